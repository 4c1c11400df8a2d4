"""Whole runs of training against the same runs written out: environment by environment, step by step, by autograd."""

from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_acer import ACER
from sb3_acer.sequences import SequenceBatch
from sb3_acer.update import Settings
from tests import reference
from tests.helpers import close

N_ENVS, TOTAL = 3, 72
LEARNING_RATE, ALPHA, MAX_GRAD_NORM, ENT_COEF = 0.05, 0.9, 1.9, 0.05
SETTINGS = Settings(0.875, 0.7, ENT_COEF, 1.5, 0.3, 2)  # gamma is a number that float32 has


class Drift(gym.Env[Any, Any]):
    """Without chance. Some episodes reach a terminal state before the time limit of five steps, or at it."""

    def __init__(self, action_space: spaces.Space[Any], number: int) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,))
        self.action_space = action_space
        self.number, self.n_episodes, self.n_steps = number, 0, 0
        self.weights = np.random.default_rng(5).normal(size=(3, 3))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.n_episodes, self.n_steps = self.n_episodes + 1, 0
        self.place = np.sin([self.number + self.n_episodes, 2 * self.n_episodes, 3 * self.number])
        return self.place.astype(np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        push = np.cos(np.sum(action, dtype=float)) * np.array([1, -1, 0.5])
        self.place, self.n_steps = 1.5 * np.sin(self.weights @ self.place + push), self.n_steps + 1
        reward = float(np.float32(self.place[1]))
        return self.place.astype(np.float32), reward, bool(self.place[0] > 1), self.n_steps == 5, {}


def observed(observation: np.ndarray) -> th.Tensor:
    return th.from_numpy(observation).double()


class Rollout:
    """What one environment adds to the buffer: `n_steps` steps, and the observation after the last."""

    def __init__(self, state: th.Tensor) -> None:
        self.state = state
        self.observations: list[th.Tensor] = []
        self.steps: list[tuple[th.Tensor, th.Tensor, float, bool, bool]] = []
        self.finals: dict[int, th.Tensor] = {}


class WrittenOutRun:
    """Training of copies of an untrained agent's policies, with its random draws."""

    def __init__(self, model: ACER, envs: list[Drift]) -> None:
        self.model, self.envs = model, envs
        self.policy, self.average = deepcopy(model.policy), deepcopy(model.average_policy)
        self.rngs = deepcopy(model._rngs)
        self.learnt = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        self.squares = [th.ones_like(parameter) for parameter in self.learnt]
        self.store: list[list[Rollout]] = []
        self.grad_norms: list[float] = []

    def learn(self, total: int) -> None:
        model = self.model
        observations = [observed(env.reset()[0]) for env in self.envs]
        states = [th.zeros(self.policy.state_size, dtype=th.float64) for _ in self.envs]
        n_slots, n_steps = max(model.buffer_size // model.n_steps, 1), 0
        while n_steps < total:
            rollouts = [Rollout(state) for state in states]
            for t in range(model.n_steps):
                noise = self.policy.family.noise(self.rngs.actions, len(self.envs))
                for i, env in enumerate(self.envs):
                    observations[i], states[i] = self.step(env, rollouts[i], t, observations[i], states[i], noise[i])
            for rollout, observation in zip(rollouts, observations, strict=True):
                rollout.observations.append(observation)
            n_steps += model.n_steps * len(self.envs)
            self.store.append(rollouts)
            kept = self.store[-n_slots:]
            remaining = max(1 - n_steps / total, 0)
            self.update(rollouts, remaining, 0)
            if len(kept) * model.n_steps >= model.replay_start:
                for _ in range(self.rngs.n_replays.poisson(model.replay_ratio)):
                    drawn = self.rngs.replay.integers(len(kept) * len(self.envs), size=model.batch_size)
                    ages, numbers = divmod(drawn, len(self.envs))
                    replayed = [kept[-1 - age][i] for age, i in zip(ages, numbers, strict=True)]
                    self.update(replayed, remaining, model.burn_in)

    @th.no_grad()
    def step(
        self, env: Drift, rollout: Rollout, t: int, observation: th.Tensor, state: th.Tensor, noise: np.ndarray
    ) -> tuple[th.Tensor, th.Tensor]:
        """The next observation and recurrent state. Behaviour and states are stored in float32."""
        space = env.action_space
        now = reference.moment(self.policy, observation, state)
        action = reference.sample(space, now.stats, th.from_numpy(noise))
        of_env: Any = action.numpy()
        if isinstance(space, spaces.Box):
            of_env = of_env.clip(space.low, space.high).astype(np.float32)
        elif isinstance(space, spaces.Discrete):
            of_env = int(action) + int(space.start)
        following, reward, terminated, over, _ = env.step(of_env)
        truncated = over and not terminated
        rollout.observations.append(observation)
        rollout.steps.append((action, now.stats.float().double(), reward, terminated, truncated))
        if truncated:
            rollout.finals[t] = observed(following)
        if terminated or truncated:
            return observed(env.reset()[0]), th.zeros_like(state)
        return observed(following), now.after.float().double()

    def batch_of(self, rollouts: list[Rollout], burn_in: int) -> SequenceBatch:
        """The steps after the burn-in, with the recurrent states that the policy now has there."""
        states = []
        for rollout in rollouts:
            state = rollout.state
            for t in range(burn_in):
                after = reference.moment(self.policy, rollout.observations[t], state).after.detach()
                *_, terminated, truncated = rollout.steps[t]
                state = th.zeros_like(after) if terminated or truncated else after
            states.append(state)
        columns = zip(*(zip(*rollout.steps[burn_in:], strict=True) for rollout in rollouts), strict=True)
        actions, behaviour, rewards, terminations, truncations = columns
        finals = {
            (t - burn_in) * len(rollouts) + b: final
            for b, rollout in enumerate(rollouts)
            for t, final in rollout.finals.items()
            if t >= burn_in
        }
        return SequenceBatch(
            th.stack([th.stack(rollout.observations[burn_in:]) for rollout in rollouts], 1),
            th.stack([th.stack(each) for each in actions], 1),
            th.stack([th.stack(each) for each in behaviour], 1),
            th.tensor(rewards, dtype=th.float64).T,
            th.tensor(terminations).T,
            th.tensor(truncations).T,
            th.stack(list(finals.values())) if finals else th.zeros(0, 3, dtype=th.float64),
            th.tensor(list(finals), dtype=th.int64),
            th.stack(states),
            th.ones(self.model.n_steps - burn_in, len(rollouts), dtype=th.float64),
            np.zeros(len(rollouts), int),
            np.zeros(len(rollouts), int),
        )

    def update(self, rollouts: list[Rollout], remaining: float, burn_in: int) -> None:
        batch = self.batch_of(rollouts, burn_in)
        settings = SETTINGS._replace(ent_coef=ENT_COEF * remaining)
        noise = np.zeros((*batch.rewards.shape, 0))
        if not self.policy.family.enumerable:
            noise = self.policy.family.noise(self.rngs.candidates, *batch.rewards.shape, 2 * settings.n_action_samples)
        loss = reference.update(self.policy, self.average, batch, settings, noise).loss
        gradients = th.autograd.grad(loss, self.learnt, materialize_grads=True)
        norm = float(th.cat([gradient.flatten() for gradient in gradients]).norm())
        self.grad_norms.append(norm)
        with th.no_grad():
            for parameter, gradient, square in zip(self.learnt, gradients, self.squares, strict=True):
                clipped = gradient * min(1, MAX_GRAD_NORM / norm)
                square.mul_(0.99).add_(0.01 * clipped**2)
                parameter.sub_(LEARNING_RATE * remaining * clipped / (square + 1e-5).sqrt())
            for average, parameter in zip(self.average.parameters(), self.policy.parameters(), strict=True):
                average.copy_(ALPHA * average + (1 - ALPHA) * parameter)


SPACES: dict[str, spaces.Space[Any]] = {
    "Discrete": spaces.Discrete(3, start=1),
    "MultiDiscrete": spaces.MultiDiscrete([2, 3]),
    "Box": spaces.Box(np.array([-1, -2], np.float32), np.array([2, np.inf], np.float32)),
}
RUNS: dict[str, dict[str, Any]] = {
    "feed-forward": {"n_steps": 4, "buffer_size": 11},
    "single steps": {"n_steps": 1, "buffer_size": 9},
    "LSTM with burn-in": {
        "policy": "MlpLstmPolicy",
        "policy_kwargs": {"lstm_hidden_size": 3},
        "n_steps": 6,
        "buffer_size": 24,
        "burn_in": 2,
    },
    "dueling": {"policy_kwargs": {"dueling": True}, "n_steps": 4, "buffer_size": 12},
}


@pytest.mark.parametrize(
    ("space", "run"), [(space, run) for run in RUNS for space in SPACES if run != "dueling" or space == "Discrete"]
)
def test_a_run_is_the_run_written_out(space: str, run: str) -> None:
    arguments = {"policy": "MlpPolicy", "policy_kwargs": {}, **RUNS[run]}
    arguments["policy_kwargs"] = {"net_arch": [5], "optimizer_class": RMSpropTFLike, **arguments["policy_kwargs"]}
    model = ACER(
        env=DummyVecEnv([lambda i=i: Drift(SPACES[space], i) for i in range(N_ENVS)]),  # type: ignore[misc]
        **arguments,
        **SETTINGS._asdict(),
        ent_schedule="linear",
        learning_rate=LEARNING_RATE,
        lr_schedule="linear",
        alpha=ALPHA,
        max_grad_norm=MAX_GRAD_NORM,
        replay_ratio=2,
        replay_start=8,
        batch_size=4,
        seed=3,
        device="cpu",
    )
    model.policy.double()
    with th.no_grad():
        for parameter in model.policy.parameters():
            parameter.add_(0.4 * th.randn_like(parameter))
    model.average_policy.double().load_state_dict(model.policy.state_dict())
    written_out = WrittenOutRun(model, [Drift(SPACES[space], i) for i in range(N_ENVS)])
    begun = deepcopy(model.policy)
    model.learn(TOTAL)
    written_out.learn(TOTAL)
    steps = [step for rollouts in written_out.store for rollout in rollouts for step in rollout.steps]
    assert any(step[3] for step in steps)
    assert any(step[4] for step in steps)
    assert len(written_out.grad_norms) > 2 * TOTAL / N_ENVS / model.n_steps  # most updates are replay
    assert min(written_out.grad_norms) < MAX_GRAD_NORM < max(written_out.grad_norms)
    for ours, theirs in ((model.policy, written_out.policy), (model.average_policy, written_out.average)):
        for found, expected, before in zip(ours.parameters(), theirs.parameters(), begun.parameters(), strict=True):
            close(found, expected, 1e-8)
            assert not found.requires_grad or (found - before).abs().max() > 1e-4
