"""Observations that are stacks of frames: how to detect them, split them into frames and join them again."""

from typing import Any, NamedTuple

import numpy as np
import torch as th
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation
from stable_baselines3.common.preprocessing import is_image_space_channels_first
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack, unwrap_vec_wrapper


class FrameStack(NamedTuple):
    """The last frames, oldest first, concatenated along the first or the last axis of an observation."""

    n_frames: int
    """k, the number of frames"""
    axis: int
    """of an observation: 0 or -1"""

    def split(self, stacks: np.ndarray) -> np.ndarray:
        """
        :param stacks: observations, ``[N, ...]``
        :return: their frames, ``[N, k, ...]``; a view
        """
        if self.axis == 0:
            return stacks.reshape(len(stacks), self.n_frames, -1, *stacks.shape[2:])
        return np.moveaxis(stacks.reshape(*stacks.shape[:-1], self.n_frames, -1), -2, 1)

    def join(self, frames: th.Tensor) -> th.Tensor:
        """
        :param frames: ``[N, k, ...]``
        :return: the observations that consist of these frames, ``[N, ...]``
        """
        return frames.flatten(1, 2) if self.axis == 0 else frames.movedim(1, -2).flatten(-2)

    def goes_on(self, stacks: np.ndarray, earlier: np.ndarray) -> np.ndarray:
        """
        :param stacks: observations, ``[N, ...]``
        :param earlier: the observations one step before, ``[N, ...]``
        :return: whether each is the earlier one without its oldest frame and with one new frame, bool, ``[N]``
        """
        same = self.split(stacks)[:, :-1] == self.split(earlier)[:, 1:]
        return np.asarray(same.reshape(len(same), -1).all(1))


def make_frame_stack(space: spaces.Space[Any], n_frames: int, strict: bool) -> FrameStack | None:
    """
    The frame stack of an observation space, for a given number of frames.

    :param space: the observation space
    :param n_frames: number of frames
    :param strict: whether a number of frames that does not divide the channels is an error
    :return: None if there is one frame, if the observations are not images (their frames would be a few numbers), and
        if the number of frames does not divide the channels and ``strict`` is False
    :raises ValueError: if ``n_frames`` does not divide the channels and ``strict`` is True
    """
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
    :return: number of frames of its observations according to its wrappers; 1 if none stacks frames
    """
    stacked = unwrap_vec_wrapper(env, VecFrameStack)
    if stacked is not None:
        return int(stacked.stacked_obs.n_stack)
    n_frames = getattr(env.unwrapped, "frame_stack", None)  # of AtariVecEnv
    if type(n_frames) is int and n_frames > 0:
        return n_frames
    try:
        return int(env.get_attr("stack_size")[0]) if all(env.env_is_wrapped(FrameStackObservation)) else 1
    except Exception:  # each library has its own for what its vectorised environments do not tell
        return 1
