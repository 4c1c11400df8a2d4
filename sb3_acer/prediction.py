"""What users call a policy for: predicting actions, values and distributions."""

import math
from abc import abstractmethod
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import PyTorchObs

from sb3_acer.checks import check_array, check_boolean, require, warn
from sb3_acer.distributions import Family
from sb3_acer.sequences import are_categories, by_key


class PredictionInterface(BasePolicy):
    """The methods that users know from SB3's policies, in terms of :meth:`step` and :meth:`stats_and_values`."""

    family: Family
    state_size: int
    """W, the width of the recurrent state"""
    _began = False
    """whether the last :meth:`predict` began from the zero state and no ``episode_start`` asked for it"""

    @abstractmethod
    def step(
        self, observations: PyTorchObs, states: th.Tensor, masks: th.Tensor | None = None
    ) -> tuple[th.Tensor, th.Tensor]:
        """
        One step of N environments.

        :param observations: ``[N, ...]``, a dict of such for a Dict space
        :param states: recurrent states, 0 where an episode begins, ``[N, W]`` with W = ``state_size``
        :param masks: whether actions are valid, see :meth:`Family.statistics`, ``[N, P]``; None if all are
        :return: statistics of pi(.|x), ``[N, P]``, and the recurrent states after the step, ``[N, W]``
        """

    @abstractmethod
    def stats_and_values(
        self, observations: PyTorchObs, states: th.Tensor, masks: th.Tensor | None = None
    ) -> tuple[th.Tensor, th.Tensor]:
        """
        :param observations: ``[N, ...]``, a dict of such for a Dict space
        :param states: recurrent states, ``[N, W]``
        :param masks: see :meth:`step`
        :return: statistics of pi(.|x), ``[N, P]``, and V(x), ``[N, 1]``
        """

    def predict_values(self, obs: PyTorchObs, states: Any = None, action_masks: Any = None) -> th.Tensor:
        """
        :param obs: ``[N, ...]``
        :param states: recurrent states, ``[N, W]``; None for 0, as where episodes begin
        :param action_masks: see :meth:`predict`
        :return: V(x), ``[N, 1]``
        :raises ValueError: for states of another shape
        """
        return self.stats_and_values(obs, *self._given(obs, states, action_masks))[1]

    def get_distribution(self, obs: PyTorchObs, states: Any = None, action_masks: Any = None) -> Distribution:
        """
        :param obs: ``[N, ...]``
        :param states: recurrent states, ``[N, W]``; None for 0, as where episodes begin
        :param action_masks: see :meth:`predict`
        :return: SB3's distribution of the actions, whose ``sample``, ``mode``, ``get_actions``, ``log_prob`` and
            ``entropy`` are of actions before :meth:`~sb3_acer.distributions.Family.to_env`
        :raises ValueError: for states of another shape
        """
        return self.family.distribution(self.step(obs, *self._given(obs, states, action_masks))[0])

    def evaluate_actions(
        self, obs: PyTorchObs, actions: th.Tensor, states: Any = None, action_masks: Any = None
    ) -> tuple[th.Tensor, th.Tensor, th.Tensor | None]:
        """
        :param obs: ``[N, ...]``
        :param actions: as :meth:`forward` and :meth:`get_distribution` sample them, ``[N]`` or ``[N, D]``; they count
            from 0 where the action space has another ``start``, which those of :meth:`predict` have
        :param states: recurrent states, ``[N, W]``; None for 0, as where episodes begin
        :param action_masks: see :meth:`predict`
        :return: V(x), ``[N, 1]``, the logarithm of the actions' probability or density, ``[N]``, and the entropy,
            ``[N]``
        :raises ValueError: for another number of actions than of observations, and for states of another shape
        """
        stats, values = self.stats_and_values(obs, *self._given(obs, states, action_masks))
        shape = stats.shape[0], self.family.n_components
        fits = actions.shape[:1] == shape[:1] and math.prod(actions.shape[1:]) == shape[1]
        require(fits, "actions", f"of shape {shape}", tuple(actions.shape))
        distribution = self.family.distribution(stats)
        actions = actions.reshape(shape[:1] if self.family.enumerable else shape).to(stats.dtype)
        # By SB3's distribution, since its gradient is finite where a probability is 0 in float32.
        return values, distribution.log_prob(actions), distribution.entropy()

    def _given(self, obs: PyTorchObs, states: Any, action_masks: Any) -> tuple[th.Tensor, th.Tensor | None]:
        """Recurrent states and masks for some observations."""
        rows = next(iter(by_key(obs).values()))
        n_rows = rows.shape[0]  # len() would be a constant of a trace
        if states is None:
            states = th.zeros((n_rows, self.state_size), device=rows.device)
        else:
            states = self._checked_states(states, n_rows).to(rows.device)
        return states, self._checked_masks(action_masks, n_rows)

    def _checked_states(self, states: Any, n_rows: int) -> th.Tensor:
        given: th.Tensor = states if isinstance(states, th.Tensor) else th.from_numpy(check_array("states", states))
        shape = n_rows, self.state_size
        rule = f"recurrent states of shape {shape} (masks are given as action_masks=...)"
        require(given.shape == shape, "states", rule, tuple(given.shape))
        return given

    def _checked_masks(self, action_masks: Any, n_rows: int) -> th.Tensor | None:
        if action_masks is None:
            return None
        if isinstance(action_masks, th.Tensor):
            action_masks = action_masks.cpu().numpy()
        given = check_array("action_masks", action_masks)
        return th.from_numpy(self.family.check_masks(given, n_rows)).to(self.device)

    def initial_states(self, n_envs: int) -> np.ndarray:
        """
        :param n_envs: number of environments
        :return: recurrent states where episodes begin: zeros, ``[n_envs, W]``
        """
        return np.zeros((n_envs, self.state_size), np.float32)

    def predict(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: Any = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
        action_masks: Any = None,
    ) -> tuple[np.ndarray, Any]:
        """
        Actions for observations.

        :param observation: of one environment, with the space's shape, or of N, ``[N, ...]``
        :param state: the recurrent state that the last call returned; None where episodes begin
        :param episode_start: where an episode begins, bool, ``[N]``: its recurrent state is 0
        :param deterministic: the most probable actions (of each factor) instead of sampled ones
        :param action_masks: whether actions are valid, as sb3-contrib's ``get_action_masks`` returns it, ``[N, P]``:
            the others are not chosen; None if all are. See :meth:`Family.check_masks`
        :return: actions, of one environment or ``[N, ...]``, and the recurrent state after them, ``[N, W]`` (N is 1 for
            one environment); a feed-forward policy returns ``state``
        :raises ValueError: for observations, a ``state``, an ``episode_start`` or masks of another shape, or with
            values that are not finite; for masks without a valid action; and for what gymnasium's ``reset`` returns in
            place of an observation
        """
        check_boolean("deterministic", deterministic)
        stats, after, vectorized = self.predict_statistics(observation, state, episode_start, action_masks)
        self._warn_of_lost_states(state is None and (episode_start is None or not np.all(episode_start)))
        env_actions = self.family.to_env(self._choose(stats, deterministic).cpu().numpy())
        if self.state_size:
            state = after.cpu().numpy()
        return env_actions if vectorized else env_actions.squeeze(axis=0), state

    def predict_statistics(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: Any = None,
        episode_start: Any = None,
        action_masks: Any = None,
    ) -> tuple[th.Tensor, th.Tensor, bool]:
        """
        The distributions that :meth:`predict` samples from. Arguments and errors as there.

        :return: statistics of pi(.|x), ``[N, P]``, the recurrent states after the step, ``[N, W]``, and whether the
            observation was one of N environments
        """
        if any(module.training for module in self.modules()):  # setting it takes three times as long as looking
            self.set_training_mode(False)
        if isinstance(observation, tuple):
            super().predict(observation)  # raises SB3's own error, which explains the mistake
            raise ValueError(f"observation must be an array or a dict of arrays, got the tuple {observation!r}")
        observations, vectorized = self._to_tensors(observation)
        n_envs = len(next(iter(by_key(observations).values())))
        states = self._states_before(state, episode_start, n_envs)
        masks = self._checked_masks(action_masks, n_envs)
        with th.no_grad():
            return *self.step(observations, states, masks), vectorized

    def _warn_of_lost_states(self, begins: bool) -> None:
        """Two calls without a state: probably a loop that does not pass it on."""
        if begins and self._began and self.state_size:
            warn(
                "predict was called twice without a state, so the recurrent state was 0 both times: pass on what it "
                "returns, action, state = model.predict(obs, state, episode_start), or give episode_start=[True] where "
                "an episode begins"
            )
        self._began = begins

    def _to_tensors(self, observation: Any) -> tuple[PyTorchObs, bool]:
        """The observations, on the policy's device, and whether they are of N environments."""
        if isinstance(self.observation_space, spaces.Dict) and isinstance(observation, dict):
            keys = self.observation_space.keys()
            require(observation.keys() == keys, "observation", f"of the keys {', '.join(keys)}", ", ".join(observation))
        try:
            observations, vectorized = self.obs_to_tensor(observation)
            if isinstance(self.observation_space, spaces.Dict) and isinstance(observations, dict):
                observations = {key: observations[key] for key in self.observation_space}
        except (ValueError, TypeError, AssertionError, AttributeError, KeyError, IndexError) as error:
            raise ValueError(
                f"observation must be of {self.observation_space}, got {observation!r}: {error}"
            ) from error
        parts = by_key(observations).values()
        require(len({part.shape[0] for part in parts}) <= 1, "observation", "of equally many environments", observation)
        for part in parts:
            is_finite = bool(part.float().isfinite().all()) if part.is_floating_point() else not part.is_complex()
            require(is_finite, "observation", "finite in float32", observation)
        is_category = are_categories(observations, self.observation_space)
        require(is_category, "observation", f"of {self.observation_space}", observation)
        return observations, vectorized

    def _states_before(self, state: Any, episode_start: Any, n_envs: int) -> th.Tensor:
        """The recurrent states in which :meth:`predict` acts, ``[N, W]``."""
        states = self.initial_states(n_envs)
        if self.state_size and state is not None:
            state = check_array("state", state)
            require(state.shape == states.shape, "state", f"of shape {states.shape}", state.shape)
            states[:] = state
            require(bool(np.isfinite(states).all()), "state", "finite", state)
        if episode_start is not None:
            starts = np.atleast_1d(check_array("episode_start", episode_start).astype(bool))
            require(starts.shape == (n_envs,), "episode_start", f"of shape {(n_envs,)}", starts.shape)
            states[starts] = 0
        return th.from_numpy(states).to(self.device)

    def _choose(self, stats: th.Tensor, deterministic: bool) -> th.Tensor:
        if deterministic:
            return self.family.mode(stats)
        # From torch's global generator, as all policies of SB3 predict. Training has generators of its own.
        draw = th.randn if self.family.normal_noise else th.rand
        noise = draw((stats.shape[0], self.family.n_components), dtype=th.float64, device=stats.device)
        return self.family.sample(stats, noise)

    def forward(
        self, obs: PyTorchObs, deterministic: bool = False, action_masks: Any = None
    ) -> tuple[th.Tensor, th.Tensor, th.Tensor]:
        """
        As in SB3's actor-critic policies; recurrent states are 0.

        :param obs: ``[N, ...]``
        :param deterministic: the most probable actions instead of sampled ones
        :param action_masks: see :meth:`predict`
        :return: actions as the policy samples them, V(x), ``[N, 1]``, and the actions' log probability, ``[N]``
        """
        # SB3's distributions look at values, which torch's exporters cannot trace.
        stats, values = self.stats_and_values(obs, *self._given(obs, None, action_masks))
        actions = self._choose(stats, deterministic)
        log_prob = self.family.exact_log_prob(stats, actions)
        return actions.squeeze(-1) if self.family.enumerable else actions, values, log_prob

    def _predict(self, observation: PyTorchObs, deterministic: bool = False) -> th.Tensor:
        # Without a recurrent state, for which SB3 has no place here.
        stats, _ = self.step(observation, *self._given(observation, None, None))
        return self.family.to_env(self._choose(stats, deterministic))
