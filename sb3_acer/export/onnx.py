"""A trained policy as an ONNX file: :func:`export_onnx` and ``sb3-acer export``."""

import argparse
import logging
import pickle
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecEnv, VecNormalize
from torch import nn

from sb3_acer.acer import ACER
from sb3_acer.checks import LARGEST, check_boolean, require, warn
from sb3_acer.distributions import Categorical
from sb3_acer.extras import require_packages
from sb3_acer.policies import ACERPolicy
from sb3_acer.sequences import by_key, spaces_by_key
from sb3_acer.storage import FilePath, opened, replacing

TOLERANCE = 1e-4
"""of what a file computes, compared with the policy; constants in place of inputs differ by far more"""


def export_onnx(
    model: ACER, path: FilePath, vec_normalize: VecNormalize | FilePath | None = None, action_masks: bool = False
) -> None:
    """
    Write the policy that acts deterministically as an ONNX file. The number of rows N of a call is free.

    Inputs:

    - ``observation``, ``[N, ...]``, as ``model.observation_space`` says and of its dtype; images have their channels
      first. Preprocessing (division by 255, one-hot vectors) is part of the file. Dict observations are one input
      ``observation.KEY`` for each key.
    - ``state``, of recurrent policies only: recurrent states, 0 where an episode begins, ``[N, W]``.
    - ``action_masks``, if asked for: True where an action is valid, bool, ``[N, P]``. At least one of each component
      must be, else the statistics are NaN.

    Outputs:

    - ``action``, ``[N, ...]``: the most probable actions, as the environment takes them.
    - ``statistics`` of the policy's distribution, ``[N, P]``: probabilities; of Box actions means, then standard
      deviations.
    - ``next_state``, of recurrent policies only: the ``state`` of the next call, ``[N, W]``.

    The file computes in float32, also if the agent computes features of images in bfloat16.

    :param model: the agent
    :param path: the file; ``.onnx`` may be left out
    :param vec_normalize: statistics of observations, or the file that ``VecNormalize.save`` wrote: ``observation`` is
        then the environment's own, not normalised. Such a file is a pickle: load only those whose author you trust.
        With a file, normalised images are float32, since the file does not have their type.
    :param action_masks: whether the file takes masks of invalid actions. Without, its actions may be invalid.
    :raises ImportError: if a package of the extra ``onnx`` is missing
    :raises ValueError: if the path has another suffix, if the policy cannot be traced, if what was traced computes
        other numbers than the policy, if ``vec_normalize`` is of other observations, and for masks of Box actions. No
        file is written then.
    """
    require(isinstance(model, ACER), "model", "an agent of ACER", model)
    if isinstance(path, (str, Path)):
        require(Path(path).suffix in ("", ".onnx"), "path", "that of a file whose name ends in .onnx", str(path))
    require_packages("export", "onnx", "onnx", "onnxscript", "onnxruntime")
    normalize = model.get_vec_normalize_env()
    if vec_normalize is None and normalize is not None and normalize.norm_obs:
        text = "the file expects normalised observations"
        with suppress(ValueError):  # a wrapper around VecNormalize, such as VecFrameStack, has made others of them
            _space_before(normalize, model.observation_space)
            text += "; for one that expects the environment's own give vec_normalize=model.get_vec_normalize_env()"
        warn(text)
    if not check_boolean("action_masks", action_masks) and model._masks is not None:
        text = "the agent was trained with masks, and the file's actions may be invalid; for one that takes masks give "
        warn(f"{text}action_masks=True, or --action-masks")
    family = model.policy.family
    require(not action_masks or isinstance(family, Categorical), "action_masks", "False for Box actions", action_masks)
    network = ActingNetwork(model.policy, _loaded(vec_normalize), action_masks)
    contents = network.to_onnx()
    network.require_equal(contents)
    with replacing(path, "onnx") as file:
        file.write(contents)


class ActingNetwork(nn.Module):
    """
    What :func:`export_onnx` writes, as a module of tensors.

    :param policy: the policy; it is copied
    :param vec_normalize: see :func:`export_onnx`
    :param action_masks: see :func:`export_onnx`
    """

    def __init__(self, policy: ACERPolicy, vec_normalize: VecNormalize | None, action_masks: bool = False) -> None:
        super().__init__()
        self.policy = _copied(policy).to("cpu")
        self.policy.set_training_mode(False)
        self.policy.use_bfloat16 = False
        space = policy.observation_space
        self.observation_space = space if vec_normalize is None else _space_before(vec_normalize, space)
        self.keys = list(spaces_by_key(space))
        statistics = {} if vec_normalize is None else _statistics_of(vec_normalize)
        self.normalizers = nn.ModuleList(
            Normalizer(statistics[key], vec_normalize) if vec_normalize and key in statistics else nn.Identity()
            for key in self.keys
        )
        self.in_dict = isinstance(space, spaces.Dict)
        self.input_names = [f"observation.{key}" if self.in_dict else "observation" for key in self.keys]
        self.output_names = ["action", "statistics"]
        if policy.state_size:
            self.input_names.append("state")
            self.output_names.append("next_state")
        self.is_masked = action_masks
        if action_masks:
            self.input_names.append("action_masks")

    def forward(self, *inputs: th.Tensor) -> tuple[th.Tensor, ...]:
        parts = [normalizer(part) for normalizer, part in zip(self.normalizers, inputs, strict=False)]
        observations = dict(zip(self.keys, parts, strict=True)) if self.in_dict else parts[0]
        others = inputs[len(self.keys) :]
        states = others[0] if self.policy.state_size else parts[0].new_zeros((parts[0].shape[0], 0))
        stats, states = self.policy.step(observations, states, others[-1] if self.is_masked else None)
        family = self.policy.family
        outputs = (family.to_env(family.mode(stats)), stats, states)
        return outputs[: len(self.output_names)]

    def to_onnx(self) -> bytes:
        """
        :raises ValueError: if the policy cannot be traced
        """
        inputs, batch = self.sample(2), th.export.Dim("batch")
        free = {"inputs": tuple({0: batch} for _ in inputs)}
        try:
            with th.no_grad(), _quiet():
                program = th.export.export(self, inputs, dynamic_shapes=free, strict=False)
        except Exception as error:  # whatever a features extractor of the user's does that cannot be traced
            raise ValueError(
                f"the policy cannot be exported: {type(self.policy).__name__} must compute with operations on tensors, "
                f"whose number of rows is free, got {type(error).__name__}: {str(error).strip()}"
            ) from error
        with _quiet():
            exported = th.onnx.export(
                program,
                dynamo=True,
                verbose=False,
                input_names=self.input_names,
                output_names=self.output_names,
                external_data=False,
            )
        assert exported is not None
        proto = exported.model_proto
        values = (*proto.graph.input, *proto.graph.value_info, *proto.graph.output)
        axes = [axis for value in values for axis in value.type.tensor_type.shape.dim]
        name_of_torch = axes[0].dim_param
        for axis in axes:
            if axis.dim_param == name_of_torch:
                axis.dim_param = "N"
        contents: bytes = proto.SerializeToString()
        return contents

    def require_equal(self, contents: bytes) -> None:
        """
        :param contents: of an ONNX file
        :raises ValueError: if it computes other numbers than this network, on batches of several sizes
        """
        import onnxruntime

        session = onnxruntime.InferenceSession(contents, providers=["CPUExecutionProvider"])
        for n_rows in (1, 3, 16):
            inputs = self.sample(n_rows)
            with th.no_grad():
                expected = self(*inputs)
            found = session.run(
                self.output_names,
                {name: part.numpy() for name, part in zip(self.input_names, inputs, strict=True)},
            )
            # Actions are not compared: which of two equal probabilities is the larger one is left to rounding.
            for name, own, other in list(zip(self.output_names, expected, found, strict=True))[1:]:
                if own.shape != other.shape or not np.allclose(own.numpy(), other, TOLERANCE, TOLERANCE):
                    raise ValueError(
                        f"the policy cannot be exported: {name} must be what {type(self.policy).__name__} computes, "
                        "got other values from the file: something was traced as a constant"
                    )

    def sample(self, n_rows: int) -> tuple[th.Tensor, ...]:
        """Random inputs."""
        of_keys = spaces_by_key(self.observation_space)
        parts = [_of_training(of_keys[key]) for key in self.keys]
        for part in parts:
            part.seed(n_rows)
        inputs = [th.from_numpy(np.stack([np.asarray(part.sample()) for _ in range(n_rows)])) for part in parts]
        if self.policy.state_size:
            inputs.append(th.rand((n_rows, self.policy.state_size), generator=th.Generator().manual_seed(n_rows)))
        if self.is_masked:
            family = self.policy.family
            assert isinstance(family, Categorical)
            masks = th.rand((n_rows, family.n_stats), generator=th.Generator().manual_seed(n_rows)) < 0.5
            masks[:, np.cumsum([0, *family.sizes[:-1]])] = True  # each component's first outcome
            inputs.append(masks)
        return tuple(inputs)


class Normalizer(nn.Module):
    """
    Observations as VecNormalize normalises them, in float64 as there.

    :param statistics: mean and variance
    :param vec_normalize: whose clipping and epsilon are used
    """

    mean: th.Tensor
    std: th.Tensor

    def __init__(self, statistics: RunningMeanStd, vec_normalize: VecNormalize) -> None:
        super().__init__()
        self.register_buffer("mean", th.as_tensor(statistics.mean, dtype=th.float64))
        self.register_buffer("std", th.as_tensor(statistics.var + vec_normalize.epsilon, dtype=th.float64).sqrt())
        self.bound = float(vec_normalize.clip_obs)

    def forward(self, observation: th.Tensor) -> th.Tensor:
        return ((observation.double() - self.mean) / self.std).clamp(-self.bound, self.bound).float()


def _copied(policy: ACERPolicy) -> ACERPolicy:
    try:
        return deepcopy(policy)
    except Exception as error:  # of a module of the user's
        raise ValueError(
            "the policy cannot be exported: copy.deepcopy must be able to copy it, so its modules may not keep their "
            f"outputs, got {type(error).__name__}: {str(error).strip()}"
        ) from error


def _loaded(vec_normalize: VecNormalize | FilePath | None) -> VecNormalize | None:
    if vec_normalize is None or isinstance(vec_normalize, VecNormalize):
        return vec_normalize
    rule = "a VecNormalize, or a file of one, as vecnormalize.pkl"
    require(not isinstance(vec_normalize, VecEnv), "vec_normalize", rule, vec_normalize)
    with opened(vec_normalize, "pkl", "vec_normalize") as file:
        try:
            loaded = pickle.load(file)
        except Exception as error:  # whatever pickle raises because of another file
            raise ValueError(f"vec_normalize must be {rule}, got {vec_normalize}: {error}") from error
    require(isinstance(loaded, VecNormalize), "vec_normalize", rule, loaded)
    return loaded  # type: ignore[no-any-return]


def _statistics_of(vec_normalize: VecNormalize) -> dict[str, RunningMeanStd]:
    """Mean and variance of each part of the observations that is normalised, by its key; "" without keys."""
    if not vec_normalize.norm_obs:
        return {}
    return by_key(vec_normalize.obs_rms)


def _space_before(vec_normalize: VecNormalize, space: spaces.Space[Any]) -> spaces.Space[Any]:
    """The agent's observation space, with the parts that are normalised as they are before."""
    before = vec_normalize.observation_space if vec_normalize.venv is None else vec_normalize.venv.observation_space
    agents, before_by_key = spaces_by_key(space), spaces_by_key(before)
    normalized = {key: before_by_key[key] for key in _statistics_of(vec_normalize)}
    alike = all(key in agents and part.shape == agents[key].shape for key, part in normalized.items())
    require(
        alike and agents.keys() == before_by_key.keys(), "vec_normalize", f"of the agent's observations {space}", before
    )
    parts = {**agents, **normalized}
    return spaces.Dict(parts) if isinstance(space, spaces.Dict) else parts[""]


def _of_training(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """A copy of a space, without the numbers that training refuses."""
    if not isinstance(space, spaces.Box) or np.dtype(space.dtype).kind != "f":
        return deepcopy(space)
    bound = min(LARGEST, float(np.finfo(space.dtype).max))
    low, high = (np.where(np.isfinite(each), np.clip(each, -bound, bound), each) for each in (space.low, space.high))
    return spaces.Box(low.astype(space.dtype), high.astype(space.dtype), dtype=space.dtype)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torch's notes on its own progress."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def main(arguments: list[str]) -> None:
    """
    :param arguments: of the command line
    """
    parser = argparse.ArgumentParser("sb3-acer export", description="Write a saved agent's policy as an ONNX file.")
    parser.add_argument("agent", metavar="AGENT", type=Path, help="the saved agent")
    parser.add_argument("path", metavar="OUT", type=Path, help="the file to write, for example agent.onnx")
    parser.add_argument("--vec-normalize", type=Path, help="statistics to put in: the run's vecnormalize.pkl")
    parser.add_argument("--action-masks", action="store_true", help="let the file take masks of invalid actions")
    options = parser.parse_args(arguments)
    path = options.path if options.path.suffix else options.path.with_suffix(".onnx")
    try:
        model = ACER.load(options.agent, device="cpu")
        export_onnx(model, path, options.vec_normalize, options.action_masks)
    except (ValueError, OSError) as error:
        sys.exit(f"sb3-acer export: {error}")
    if options.vec_normalize is None:
        for statistics in options.agent.parent.glob("*/vecnormalize.pkl"):  # of a run; not read, since it is a pickle
            print(f"If the agent learnt from normalised observations, add --vec-normalize {quote(str(statistics))}")
    print(f"{type(model.policy).__name__} for {model.observation_space} and {model.action_space}: {path}")
