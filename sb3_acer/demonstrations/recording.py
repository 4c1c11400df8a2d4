"""
Recording demonstrations: arrays in stable-baselines' npz format, with the N steps of M trajectories in sequence.

- ``obs``: observations, ``[N, ...]``, or ``[N, 1]`` if the space is Discrete; or paths of images, ``[N]``
- ``actions``: as given to the environment, ``[N, ...]``, or ``[N, 1]`` if the space is Discrete
- ``rewards``: ``[N]`` or ``[N, 1]``
- ``episode_starts``: whether a step is the first of its trajectory, ``[N]``
- ``episode_returns``: sum of each trajectory's rewards, ``[M]``

More arrays are not part of stable-baselines' format and may be missing:

- ``truncated``: whether a trajectory was truncated, for example by a time limit, and has no terminal state, ``[M]``
- ``final_obs``: observation after the last step of each trajectory, in the form of ``obs``, ``[M, ...]``
- ``action_masks``: whether actions were valid at each step, ``[N, P]``, see :mod:`sb3_acer.masks`
- ``final_action_masks``: the same for ``final_obs``, ``[M, P]``
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from inspect import signature
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from gymnasium import spaces
from sb3_contrib.common.maskable.utils import get_action_masks
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.preprocessing import is_image_space
from stable_baselines3.common.type_aliases import GymEnv
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, unwrap_vec_normalize

from sb3_acer.arguments import make_env
from sb3_acer.checks import check_array, check_integer, check_whole, require, warn
from sb3_acer.extras import how_to_install
from sb3_acer.masks import FINAL_MASK, enable_masks
from sb3_acer.storage import replacing
from sb3_acer.vec_normalize import normalize_of_policy, recording_finals


def generate_expert_traj(
    model: BaseAlgorithm | Callable[[Any], Any],
    save_path: str | Path | None = None,
    env: GymEnv | str | None = None,
    n_timesteps: int = 0,
    n_episodes: int = 100,
    image_folder: str | Path = "recorded_images",
) -> dict[str, np.ndarray]:
    """
    Record trajectories of an expert. Rewards are recorded without normalisation, and so are observations, unless
    wrappers around VecNormalize change them (VecFrameStack): then they are recorded as the policy gets them. The
    statistics of VecNormalize do not change.

    :param model: an agent of SB3, which acts stochastically; or a function from the environment's observation to an
        action, of a vectorised environment from the observations of all environments to an action for each
    :param save_path: npz file to write; ``.npz`` may be left out. Images of 1, 3 or 4 channels are then saved as PNG
        files. None: no file
    :param env: the environment, or its id; None: the agent's. Of a vectorised environment, the first environment is
        recorded.
    :param n_timesteps: number of steps to train the agent for, before it is recorded
    :param n_episodes: number of trajectories to record
    :param image_folder: folder for images, relative to the folder of the npz file
    :return: the arrays, as saved
    :raises ValueError: if there is no environment, for Dict observations, and if ``n_episodes`` is less than 1
    :raises ImportError: if images are to be saved and OpenCV is not installed
    :raises OSError: if the file cannot be written; an older one is kept
    """
    require(isinstance(model, BaseAlgorithm) or callable(model), "model", "an agent of SB3, or a function", model)
    env = model.get_env() if env is None and isinstance(model, BaseAlgorithm) else env
    if env is None:
        raise ValueError("env must be given if the model has none, got None")
    env = make_env(env, verbose=0) if isinstance(env, str) else env
    n_episodes, n_timesteps = check_integer("n_episodes", n_episodes), check_whole("n_timesteps", n_timesteps)
    require(save_path is None or isinstance(save_path, (str, Path)), "save_path", "a path, or None", save_path)
    require(isinstance(image_folder, (str, Path)), "image_folder", "a path", image_folder)
    require(isinstance(getattr(env, "action_space", None), spaces.Space), "env", "an environment", env)
    require_no_dict(env.observation_space)
    if isinstance(model, BaseAlgorithm) and n_timesteps > 0:
        model.learn(n_timesteps)
    keep: Callable[[Any], Any] = np.array
    if save_path is not None and is_image_space(env.observation_space, check_channels=True):
        keep = _image_writer(Path(save_path).parent, Path(image_folder))
    columns: dict[str, list[Any]] = defaultdict(list)
    normalize = unwrap_vec_normalize(env) if isinstance(env, VecEnv) else None
    was_training = normalize is not None and normalize.training
    try:
        if normalize is not None:
            normalize.training = False  # the expert's steps are none of the agent's
        for step in _play(model, env, keep):
            for key, value in step.items():
                columns[key].append(value)
            if len(columns["final_obs"]) == n_episodes:
                break
    finally:
        if normalize is not None:
            normalize.training = was_training
        if isinstance(model, BaseAlgorithm) and _is_in(env, model.get_env()):
            model._last_obs = None  # the environment has moved on: the agent's next rollout has to reset it
    arrays = _arrays(columns)
    if save_path is not None:
        name = str(save_path)
        with replacing(name if name.endswith(".npz") else f"{name}.npz", "npz") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
    return arrays


def _is_in(env: GymEnv, venv: VecEnv | None) -> bool:
    """Whether a vectorised environment is the same as ``env``, a wrapper of it, or has it among its environments."""
    if venv is None:
        return False
    return env.unwrapped in (venv.unwrapped, *(each.unwrapped for each in getattr(venv.unwrapped, "envs", [])))


def _play(
    model: BaseAlgorithm | Callable[[Any], Any], env: GymEnv, keep: Callable[[Any], Any]
) -> Iterator[dict[str, Any]]:
    """The steps of the first environment, without end: their rows of the arrays, and whether they end an episode."""
    venv = env if isinstance(env, VecEnv) else DummyVecEnv([lambda: env])
    if venv.num_envs > 1:
        warn(f"only the first of {venv.num_envs} environments is recorded")
    normalize, observed = unwrap_vec_normalize(venv), normalize_of_policy(venv)
    starts: Any = np.ones(venv.num_envs, bool)
    observations: Any
    observations, state = venv.reset(), None
    masked = enable_masks(venv)
    takes_masks = isinstance(model, BaseAlgorithm) and "action_masks" in signature(model.predict).parameters
    while True:
        original: Any = observations if observed is None else observed.get_original_obs()
        observation, masks = keep(original[0]), get_action_masks(venv) if masked else None
        if isinstance(model, BaseAlgorithm):
            kwargs: dict[str, Any] = {"action_masks": masks} if takes_masks else {}
            actions, state = model.predict(observations, state, starts, **kwargs)
        else:
            chosen = model(observations) if venv is env else [model(observations[0])]
            actions = check_array("the actions of model", chosen)
            shape = venv.num_envs, *(venv.action_space.shape or ())
            rule = f"a function that returns {'actions' if venv is env else 'an action'} of {venv.action_space}"
            rule += f", here of shape {shape if venv is env else shape[1:]}"
            require(actions.shape == shape, "model", rule, actions)
        with recording_finals(venv if observed is None else observed.venv) as finals:
            observations, rewards, starts, infos = venv.step(actions)
        reward = (rewards if normalize is None else normalize.get_original_reward())[0]
        step: dict[str, Any] = {"obs": observation, "actions": np.array(actions[0]), "rewards": float(reward)}
        step["ends"] = bool(starts[0])
        if masks is not None:
            step["action_masks"] = masks[0]
        if starts[0]:
            require(0 in finals, "env", "one whose infos have terminal_observation where an episode ends", infos[0])
            step |= {"final_obs": keep(finals[0]), "truncated": infos[0].get("TimeLimit.truncated", False)}
            if masks is not None:
                final_masks = np.asarray(infos[0].get(FINAL_MASK, np.ones_like(masks[0])))
                rule = f"of {masks[0].size} actions at a final observation too"
                require(final_masks.size == masks[0].size, FINAL_MASK, rule, final_masks)
                step["final_action_masks"] = final_masks.reshape(masks[0].shape)
        yield step


def _arrays(columns: dict[str, list[Any]]) -> dict[str, np.ndarray]:
    arrays = {key: np.array(rows) for key, rows in columns.items()}
    for key in ("actions", "obs", "final_obs"):
        if arrays[key].ndim == 1 and arrays[key].dtype.kind != "U":
            arrays[key] = arrays[key][:, np.newaxis]  # stable-baselines' arrays of numbers have a second axis
    starts = np.roll(arrays.pop("ends"), 1)
    returns = np.add.reduceat(arrays["rewards"], np.flatnonzero(starts))
    return {**arrays, "episode_returns": returns, "episode_starts": starts}


def require_no_dict(space: spaces.Space[Any]) -> None:
    """
    :param space: an observation space
    :raises ValueError: if it is a Dict or a Tuple
    """
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        raise ValueError(f"observation_space must not be a Dict or a Tuple for demonstrations, got {space!r}")


# OpenCV's channels are blue, green, red. stable-baselines reverses three channels for it, but not four, which are
# stacked frames.


def read_image(path: Path) -> np.ndarray:
    """
    :param path: path of an image with 1, 3 or 4 channels
    :return: the image, ``[height, width, channels]``
    :raises ValueError: if there is no such image
    """
    image = _opencv().imread(str(path), -1)
    if image is None:
        raise ValueError(f"obs must be paths of images, got {str(path)!r}")
    channels: np.ndarray = image[..., np.newaxis] if image.ndim == 2 else image
    return channels[..., ::-1] if channels.shape[-1] == 3 else channels


def _image_writer(folder: Path, image_folder: Path) -> Callable[[np.ndarray], str]:
    cv2, paths = _opencv(), (image_folder / f"{number}.png" for number in count())
    (folder / image_folder).mkdir(parents=True, exist_ok=True)

    def write(image: np.ndarray) -> str:
        path = next(path for path in paths if not (folder / path).exists())  # others belong to another recording
        image = image if image.shape[-1] in (1, 3, 4) else np.moveaxis(image, 0, -1)
        image = image[..., ::-1] if image.shape[-1] == 3 else image
        if not cv2.imwrite(str(folder / path), np.ascontiguousarray(image)):
            raise OSError(f"{folder / path} could not be written")
        return path.as_posix()  # also where paths have backslashes: another system may read the file

    return write


def _opencv() -> ModuleType:
    try:
        import cv2
    except ImportError as error:
        raise ImportError(f"images of demonstrations need OpenCV: {how_to_install('atari')}") from error
    return cv2
