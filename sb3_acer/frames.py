"""Observations that are stacks of frames: which they are, and how they are taken apart and put together."""

from typing import Any, NamedTuple

import numpy as np
import torch as th
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation
from stable_baselines3.common.preprocessing import is_image_space_channels_first
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, VecFrameStack


class FrameStack(NamedTuple):
    """The last frames, oldest first, side by side along the first or the last axis of an observation."""

    n_frames: int
    """k, the number of frames"""
    axis: int
    """of an observation: 0 or -1"""

    def split(self, stacks: np.ndarray) -> np.ndarray:
        """
        :param stacks: observations, ``[N, ...]``
        :return: their frames, ``[N, k, ...]``: a view
        """
        if self.axis == 0:
            return stacks.reshape(len(stacks), self.n_frames, -1, *stacks.shape[2:])
        return np.moveaxis(stacks.reshape(*stacks.shape[:-1], self.n_frames, -1), -2, 1)

    def join(self, frames: th.Tensor) -> th.Tensor:
        """
        :param frames: ``[N, k, ...]``
        :return: the observations whose frames they are, ``[N, ...]``
        """
        return frames.flatten(1, 2) if self.axis == 0 else frames.movedim(1, -2).flatten(-2)

    def goes_on(self, stacks: np.ndarray, earlier: np.ndarray) -> np.ndarray:
        """
        :param stacks: observations, ``[N, ...]``
        :param earlier: those of one step before, ``[N, ...]``
        :return: whether they differ by one new frame only, bool, ``[N]``
        """
        same = self.split(stacks)[:, :-1] == self.split(earlier)[:, 1:]
        return np.asarray(same.reshape(len(same), -1).all(1))


def make_frame_stack(space: spaces.Space[Any], n_frames: int, strict: bool = True) -> FrameStack | None:
    """
    How the observations of a space would be stacks of frames.

    :param space: the observation space
    :param n_frames: number of frames
    :param strict: whether the number of frames has to divide that of the channels
    :return: None if they are no images, whose frames would be no more than a few numbers, or if there is one frame
    :raises ValueError: if it does not, and if there are no frames
    """
    if n_frames < 1:
        raise ValueError(f"frame_stack must be at least 1, got {n_frames!r}")
    if n_frames == 1 or not isinstance(space, spaces.Box) or len(space.shape) < 3:
        return None
    axis = 0 if len(space.shape) > 3 or is_image_space_channels_first(space) else -1
    if space.shape[axis] % n_frames:
        if not strict:
            return None
        raise ValueError(
            f"frame_stack must divide the {space.shape[axis]} channels of observations of shape {space.shape}, got "
            f"{n_frames!r}"
        )
    return FrameStack(n_frames, axis)


def find_frame_stack(env: VecEnv) -> int:
    """
    :param env: a vectorised environment
    :return: how many frames its observations are made of, as its wrappers tell; 1 if none does
    """
    layer: Any = env
    while isinstance(layer, VecEnvWrapper):
        if isinstance(layer, VecFrameStack):
            return int(layer.stacked_obs.n_stack)
        layer = layer.venv
    if hasattr(layer, "frame_stack"):
        return int(layer.frame_stack)
    if all(env.env_is_wrapped(FrameStackObservation)):
        return int(env.get_attr("stack_size")[0])
    return 1
