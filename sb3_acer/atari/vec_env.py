"""Atari games: ale-py's C++ environments, stepped and preprocessed in threads, as one vectorised environment of SB3."""

import re
import time
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvStepReturn

NEEDED = 'Atari games need ale-py 0.12.1 or later: pip install "sb3-acer[atari]"'

try:
    import ale_py.roms
    from ale_py.vector_env import AtariVectorEnv
except ImportError as error:
    raise ImportError(NEEDED) from error
if [int(number) for number in re.findall(r"\d+", ale_py.__version__)[:3]] < [0, 12, 1]:
    raise ImportError(f"{NEEDED} (here: {ale_py.__version__})")  # which cannot reset some of the games only


class AtariId(NamedTuple):
    """What the id of an environment stands for."""

    game: str
    """name of the ROM"""
    frame_skip: int
    """frames that an action lasts"""
    sticky: float
    """probability with which a frame repeats the action of the one before"""


def parse_atari_id(env_id: str) -> AtariId:
    """
    The game, and how it is played.

    - ``*NoFrameskip-v4``: four frames an action, which is what the usual wrappers make of it; no sticky actions
    - ``*Deterministic-v4``, which ale-py no longer has: four frames, three in Space Invaders; no sticky actions
    - ``*NoFrameskip-v0``, ``*Deterministic-v0``: the same with sticky actions, 0.25
    - ``ALE/*-v5``: as registered, four frames and 0.25
    - the name of a ROM, ``ms_pacman``: as its NoFrameskip-v4

    :param env_id: the id of an environment, or the name of a ROM
    :raises ValueError: for what is none of these; ``Pong-v4`` and ``Pong-v0``, with their random frame skip, are not
    """
    known = {name: spec.kwargs for name, spec in gym.registry.items() if str(spec.entry_point).startswith("ale_py")}
    roms = {kwargs["game"] for kwargs in known.values()}
    if env_id in roms:
        return AtariId(env_id, 4, 0.0)
    deterministic = "Deterministic-" in env_id
    kwargs = known.get(env_id.replace("Deterministic-", "NoFrameskip-"))
    if kwargs is None:
        similar = get_close_matches(env_id, [*known, *roms], 1, 0)[0]
        raise ValueError(f"env_id must be that of an Atari game, such as {similar}, got {env_id!r}")
    if not isinstance(kwargs["frameskip"], int):
        fixed = env_id.replace("-v", "NoFrameskip-v")
        raise ValueError(f"env_id must have a fixed frame skip, such as {fixed}, got {env_id!r}")
    frame_skip = 4 if kwargs["frameskip"] == 1 else kwargs["frameskip"]
    if deterministic and kwargs["game"] == "space_invaders":
        frame_skip = 3
    return AtariId(kwargs["game"], frame_skip, kwargs["repeat_action_probability"])


class Game:
    """One of the games, as ``get_attr``, ``set_attr`` and ``env_method`` see it."""

    render_mode = "rgb_array"

    def __init__(self, env: "AtariVecEnv", index: int, action_meanings: list[str]) -> None:
        self._env = env
        self._index = index
        self._action_meanings = action_meanings
        self.observation_space = env.observation_space
        self.action_space = env.action_space
        self.spec = gym.registry.get(env.env_id)

    @property
    def lives(self) -> int:
        return int(self._env.lives[self._index])

    def get_action_meanings(self) -> list[str]:
        return self._action_meanings

    def render(self) -> np.ndarray:
        """The newest frame, RGB, ``[height, width, 3]``: as grey and as small as the agent sees it."""
        return np.repeat(self._env.observations[self._index, -1, :, :, None], 3, axis=-1)


class AtariVecEnv(VecEnv):
    """
    Games side by side, preprocessed as SB3's ``AtariWrapper`` and ``VecFrameStack`` do, by ale-py's threads.

    Observations: the last frames, oldest first, zeros before the first of an episode, uint8, ``[frame_stack, height,
    width]``. Infos: ``lives``, ``frame_number``, ``episode_frame_number``, ``TimeLimit.truncated``, at the end of an
    episode ``terminal_observation``, and at the end of a game ``episode``: ``r``, its points, ``l``, its frames, ``t``,
    seconds since the start. That is what SB3's Monitor counts under ``make_atari_env``.

    The same actions have the same results as with SB3's wrappers, rewards, ends, lives and scores, except that

    - a game begins with 0 to ``noop_max`` - 1 frames of nothing, the first of them FIRE where the game has that, and
      their points are not in the score. In SB3 with 1 to ``noop_max``, then the actions FIRE and number 2.
    - after a lost life the next action is FIRE where the game has that, whatever was asked for. SB3 plays there,
      unseen, NOOP, and FIRE and number 2 where the game has FIRE.
    - frames are grey before the larger of two is taken, in SB3 after: where the two differ in colour, a few pixels do.
    - where a game is over or cut in the midst of an action, the newest frame of ``terminal_observation`` is that of the
      step before, or a mixture with it.
    - the limit of ``max_frames`` counts from the first observation on, in SB3 from the start of the game.
    - ``reset`` begins new games. SB3 goes on with those that have lives left.

    It cannot be pickled. ``render`` shows what the agent sees, as ale-py does not give the screen.

    :param env_id: the id of an environment, or the name of a ROM, see :func:`parse_atari_id`
    :param n_envs: number of games
    :param frame_stack: frames of an observation
    :param frame_skip: frames that an action lasts; None for what the id stands for
    :param sticky: probability with which a frame repeats the action of the one before; None for what the id stands for
    :param screen_size: height and width of a frame
    :param noop_max: bound on the frames without an action at the start of a game
    :param fire_reset: whether FIRE is pressed where an episode begins, for the games that wait for it
    :param episodic_life: whether a lost life ends an episode; the game goes on
    :param clip_reward: whether a reward is the sign of the points
    :param max_frames: frames until a game is cut, which is a truncation
    :param full_action_space: whether all 18 actions are there, not only those that the game knows
    :param num_threads: threads that play; 0 for one a processor
    :param seed: that of the first game, the others have the next ones; None for any
    :raises ValueError: for an argument outside its range, an unknown game, and a ROM that is not there
    """

    def __init__(
        self,
        env_id: str,
        n_envs: int = 16,
        *,
        frame_stack: int = 4,
        frame_skip: int | None = None,
        sticky: float | None = None,
        screen_size: int = 84,
        noop_max: int = 30,
        fire_reset: bool = True,
        episodic_life: bool = True,
        clip_reward: bool = True,
        max_frames: int = 108_000,
        full_action_space: bool = False,
        num_threads: int = 0,
        seed: int | None = None,
    ) -> None:
        game, usual_skip, usual_sticky = parse_atari_id(env_id)
        self.env_id = env_id
        self.frame_stack = frame_stack
        self.frame_skip = usual_skip if frame_skip is None else frame_skip
        self.sticky = usual_sticky if sticky is None else sticky
        self.episodic_life = episodic_life
        self.clip_reward = clip_reward
        counts = {"n_envs": n_envs, "frame_stack": frame_stack, "frame_skip": self.frame_skip, "max_frames": max_frames}
        _require_at_least(1, {**counts, "screen_size": screen_size})
        _require_at_least(0, {"noop_max": noop_max, "num_threads": num_threads})
        if not 0 <= self.sticky <= 1:
            raise ValueError(f"sticky must be in [0, 1], got {sticky!r}")
        _require_rom(game)
        self._ale = AtariVectorEnv(
            game,
            n_envs,
            num_threads=num_threads,
            max_num_frames_per_episode=max_frames,
            repeat_action_probability=self.sticky,
            full_action_space=full_action_space,
            img_height=screen_size,
            img_width=screen_size,
            stack_num=frame_stack,
            frameskip=self.frame_skip,
            noop_max=noop_max,
            use_fire_reset=fire_reset,
            reward_clipping=False,  # the score is made of the points
        )
        action_meanings = [action.name for action in self._ale.ale.get_action_set()]
        self._fire = action_meanings.index("FIRE") if fire_reset and "FIRE" in action_meanings else None
        self.observation_space = spaces.Box(0, 255, (frame_stack, screen_size, screen_size), np.uint8)
        self.action_space = spaces.Discrete(len(action_meanings))
        self.games = [Game(self, index, action_meanings) for index in range(n_envs)]
        self.lives = np.zeros(n_envs, np.int32)
        self.observations = np.zeros((n_envs, *self.observation_space.shape), np.uint8)
        self._scores = np.zeros(n_envs, np.int64)
        self._revived = np.zeros(n_envs, bool)  # games that go on after a lost life, at the start of an episode
        self._blanks = np.zeros(n_envs, np.int64)  # frames of the next observation that are of an earlier episode
        self.t_start = time.time()
        self._stepping = False
        super().__init__(n_envs, self.observation_space, self.action_space)
        if seed is not None:
            self.seed(seed)

    def reset(self) -> np.ndarray:
        if self._stepping:
            self._ale.recv()
            self._stepping = False
        # The ALE takes the seeds below 2^31; -1 for none.
        seeds = np.array([-1 if seed is None else seed % 2**31 for seed in self._seeds])
        self.observations, infos = self._ale.reset(seed=seeds)
        self._reset_seeds()
        self._reset_options()
        self.lives = infos["lives"]
        self._scores[:] = 0
        self._revived[:] = False
        self.reset_infos = _infos(infos)
        return self.observations

    def step_async(self, actions: np.ndarray) -> None:
        actions = np.asarray(actions, np.int64).reshape(self.num_envs)
        if actions.min() < 0 or actions.max() >= self.action_space.n:  # type: ignore[attr-defined]
            # which ale-py would wait for without end
            raise ValueError(f"actions must be elements of {self.action_space}, got {actions}")
        if self._fire is not None and self._revived.any():
            actions = np.where(self._revived, self._fire, actions)
        self._ale.send(actions)
        self._stepping = True

    def step_wait(self) -> VecEnvStepReturn:
        observations, points, terminated, truncated, ale_infos = self._ale.recv()
        self._stepping = False
        self._scores += points
        lives = ale_infos["lives"]
        over = terminated | truncated
        died = (lives > 0) & (lives < self.lives) if self.episodic_life else np.zeros_like(over)
        dones = over | died
        infos = _infos(ale_infos)
        self.lives, self.observations, self._revived = lives, observations, died & ~over
        if self._blanks.any():
            for game in np.flatnonzero(self._blanks):
                observations[game, : self._blanks[game]] = 0
                self._blanks[game] -= 1
        if dones.any():
            for game in np.flatnonzero(dones):
                infos[game]["terminal_observation"] = observations[game].copy()
            observations[self._revived, :-1] = 0
            self._blanks[self._revived] = max(self.frame_stack - 2, 0)
            if over.any():
                self._end_games(over, truncated & ~terminated & ~died, infos)
        rewards = (np.sign(points) if self.clip_reward else points).astype(np.float32)
        return observations, rewards, dones, infos

    def _end_games(self, over: np.ndarray, truncated: np.ndarray, infos: list[dict[str, Any]]) -> None:
        """Report on the games that are over and begin new ones in their places."""
        seconds = round(time.time() - self.t_start, 6)
        new_observations, ale_infos = self._ale.reset(options={"reset_mask": over})
        new_infos = _infos(ale_infos)
        for game in np.flatnonzero(over):
            info = infos[game]
            info["TimeLimit.truncated"] = bool(truncated[game])
            score, frames = float(self._scores[game]), info["episode_frame_number"]
            info["episode"] = {"r": score, "l": frames, "t": seconds}
            self.observations[game] = new_observations[game]
            self.reset_infos[game] = new_infos[game]
        self.lives = ale_infos["lives"]
        self._scores[over] = 0

    def close(self) -> None:
        """End the threads."""
        if hasattr(self, "_ale"):
            del self._ale

    def get_images(self) -> Sequence[np.ndarray | None]:
        return [game.render() for game in self.games]

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        return [getattr(self.games[index], attr_name) for index in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        for index in self._get_indices(indices):
            setattr(self.games[index], attr_name, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **kwargs: Any
    ) -> list[Any]:
        return [getattr(self.games[i], method_name)(*method_args, **kwargs) for i in self._get_indices(indices)]

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper], indices: VecEnvIndices = None) -> list[bool]:
        """Whether it does what a wrapper does: true of Monitor, whose reports on episodes SB3 looks for."""
        return [wrapper_class is Monitor for _ in self._get_indices(indices)]


def _infos(ale_infos: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    columns = (ale_infos[name].tolist() for name in ("lives", "frame_number", "episode_frame_number"))
    return [
        {"lives": lives, "frame_number": frames, "episode_frame_number": game_frames, "TimeLimit.truncated": False}
        for lives, frames, game_frames in zip(*columns, strict=True)
    ]


def _require_at_least(bound: int, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if not isinstance(value, (int, np.integer)) or value < bound:
            raise ValueError(f"{name} must be an integer of at least {bound}, got {value!r}")


def _require_rom(game: str) -> None:
    try:
        ale_py.roms.get_rom_path(game)
    except OSError as error:
        raise ValueError(f"env_id must be that of a game whose ROM is there, got {game!r}: {error}") from error


def make_atari_vec_env(env_id: str, n_envs: int = 16, seed: int | None = None, **kwargs: Any) -> AtariVecEnv:
    """
    Games as ``VecFrameStack(make_atari_env(env_id, n_envs, seed), 4)`` makes them, at the ALE's own speed.

    :param env_id: the id of an environment, or the name of a ROM
    :param n_envs: number of games
    :param seed: that of the first game, the others have the next ones; None for any
    :param kwargs: keyword arguments of :class:`AtariVecEnv`
    :raises ValueError: as :class:`AtariVecEnv`
    """
    return AtariVecEnv(env_id, n_envs, seed=seed, **kwargs)
