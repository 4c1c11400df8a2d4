"""Masks of invalid actions in evaluations by SB3 and rl-zoo, which predict without them."""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported
from stable_baselines3.common import callbacks, evaluation
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.vec_env import VecEnv


class Masked:
    """
    An agent that predicts with the masks that an environment has at the time.

    :param model: an agent whose ``predict`` takes ``action_masks``
    :param env: the environment
    """

    def __init__(self, model: Any, env: VecEnv) -> None:
        self._model = model
        self._env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        return self._model.predict(*args, action_masks=get_action_masks(self._env), **kwargs)


def with_masks(model: Any, env: Any) -> Any:
    """
    :param model: an agent
    :param env: an environment
    :return: the agent, made to predict with masks if both have them
    """
    if is_masking_supported(env) and "action_masks" in inspect.signature(model.predict).parameters:
        return Masked(model, env)
    return model


def evaluate_policy(model: Any, env: Any, *args: Any, **kwargs: Any) -> Any:
    """SB3's ``evaluate_policy``, with masks. sb3-contrib's own loses the state of a recurrent policy."""
    return evaluation.evaluate_policy(with_masks(model, env), env, *args, **kwargs)


class MaskedEvalCallback(EvalCallback):
    """SB3's ``EvalCallback``, with masks. sb3-contrib's own loses the state of a recurrent policy."""

    def _on_step(self) -> bool:
        with patch.object(callbacks, "evaluate_policy", evaluate_policy):
            return super()._on_step()


class Algorithms(dict[str, Any]):
    """
    rl-zoo's algorithms. Agents loaded from here act with the masks of the environment that was made last.

    :param algorithms: classes by names
    :param create_env: the zoo's ``create_test_env``, or another in its place
    """

    def __init__(self, algorithms: dict[str, Any], create_env: Callable[..., VecEnv]) -> None:
        super().__init__(algorithms)
        self._create_env = create_env
        self._env: VecEnv | None = None

    def create_env(self, *args: Any, **kwargs: Any) -> VecEnv:
        """To replace the zoo's ``create_test_env``: its record_video leaves out the entry's ``env_kwargs``."""
        of_entry = kwargs["hyperparams"].get("env_kwargs", {})
        self._env = self._create_env(*args, **kwargs | {"env_kwargs": {**of_entry, **kwargs["env_kwargs"]}})
        return self._env

    def __getitem__(self, name: str) -> Any:
        algorithm = super().__getitem__(name)
        return SimpleNamespace(load=lambda *args, **kwargs: with_masks(algorithm.load(*args, **kwargs), self._env))
