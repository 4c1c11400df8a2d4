"""What experiments.yml adds to rl-zoo's experiments, as callbacks and wrappers that it names."""

import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch as th
from gymnasium import spaces
from sb3_contrib.common.wrappers import ActionMasker
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.vec_env import VecNormalize

from sb3_acer import ACER
from sb3_acer.demonstrations.cloning import behaviour_cloning
from sb3_acer.demonstrations.dataset import ExpertDataset
from sb3_acer.demonstrations.recording import generate_expert_traj
from sb3_acer.heads import CriticOutput
from sb3_acer.policies import Evaluation
from sb3_acer.sequences import SequenceBatch
from sb3_acer.update import Update


class Variant(BaseCallback):
    """Changes an agent before its first step."""

    model: ACER

    def _on_training_start(self) -> None:
        raise NotImplementedError

    def _on_step(self) -> bool:
        return True


class ZeroStates(Variant):
    """Replayed sequences start from the zero state instead of the stored one."""

    def _on_training_start(self) -> None:
        sample = self.model.replay_buffer.sample

        def sample_from_zero(*args: Any, **kwargs: Any) -> SequenceBatch:
            batch = sample(*args, **kwargs)
            return batch._replace(states=th.zeros_like(batch.states))

        self.model.replay_buffer.sample = sample_from_zero  # type: ignore[method-assign]


class TraceRoot(Variant):
    """Retrace's traces are min(1, rho^(1/d)) with another d than the number of factors."""

    def __init__(self, root: int) -> None:
        super().__init__()
        self.root = root

    def _on_training_start(self) -> None:
        self.model.policy.family.trace_root = self.root


class IndependentMeans(Variant):
    """
    Where actions are sampled, the mean advantage in Q's error is that of the candidates, and the mean advantage in Q's
    gradient that of other samples. The paper has one mean for both (equation 13).
    """

    def _on_training_start(self) -> None:
        head: Any = self.model.policy.q_head
        forward = head.forward

        def with_two_means(*args: Any, **kwargs: Any) -> CriticOutput:
            found: CriticOutput = forward(*args, **kwargs)
            values = found.values[: found.q_values.numel()].view_as(found.q_values)
            return found._replace(q_values=found.q_values + values - found.candidate_values.mean(-1))

        head.forward = with_two_means


class Gated(Variant):
    """Replayed states count only where the policy is close to the behaviour policy (LASER, arXiv:1909.11583)."""

    limit = 0.1
    """bound on KL(behaviour || policy)"""

    def _on_training_start(self) -> None:
        policy, sample = self.model.policy, self.model.replay_buffer.sample

        def sample_gated(*args: Any, **kwargs: Any) -> SequenceBatch:
            batch = sample(*args, **kwargs)
            stats = policy.statistics(batch)
            return batch._replace(weights=batch.weights * (policy.family.kl(batch.behaviour, stats) <= self.limit))

        self.model.replay_buffer.sample = sample_gated  # type: ignore[method-assign]


class Mixed(Variant):
    """The first sequences of a replayed batch are those of the latest rollout (LASER)."""

    def _on_training_start(self) -> None:
        buffer = self.model.replay_buffer
        gather, sample = buffer.gather, buffer.sample

        def gather_mixed(slots: np.ndarray, envs: np.ndarray, *args: Any, **kwargs: Any) -> SequenceBatch:
            n = min(buffer.n_envs, len(envs))
            slots[:n], envs[:n] = buffer.pos - 1, np.arange(n)
            return gather(slots, envs, *args, **kwargs)

        def sample_mixed(*args: Any, **kwargs: Any) -> SequenceBatch:
            buffer.gather = gather_mixed  # type: ignore[method-assign]
            try:
                return sample(*args, **kwargs)
            finally:
                buffer.gather = gather  # type: ignore[method-assign]

        buffer.sample = sample_mixed  # type: ignore[method-assign]


class Reservoir(Variant):
    """Replays a uniform sample of all rollouts so far, as many as the buffer has slots, instead of the latest ones."""

    max_steps = 200_000
    """steps of the vectorised environment in a run, at most"""

    def _on_training_start(self) -> None:
        small = self.model.replay_buffer
        of_env = small.observation_space, small.action_space
        self.buffer = type(small)(self.max_steps, *of_env, small.device, small.n_envs, n_steps=small.n_steps)
        self.buffer.sample = self.sample  # type: ignore[method-assign]
        self.model.replay_buffer = self.buffer
        self.n_kept, self.kept, self.seen = small.n_slots, np.zeros(0, int), 0
        self.rng = np.random.default_rng(0)

    def sample(
        self, batch_size: int, env: VecNormalize | None = None, rng: np.random.Generator | None = None
    ) -> SequenceBatch:
        for rollout in range(self.seen, self.buffer.pos):
            if rollout < self.n_kept:
                self.kept = np.append(self.kept, rollout)
            elif (place := self.rng.integers(rollout + 1)) < self.n_kept:
                self.kept[place] = rollout
        self.seen = self.buffer.pos
        assert rng is not None
        return self.buffer.gather(
            rng.choice(self.kept, batch_size), rng.integers(self.buffer.n_envs, size=batch_size), env
        )

    def holds(self, call: int) -> bool:
        """Whether the buffer has what happened at the callback's ``call``."""
        return (call - 1) // self.buffer.n_steps in self.kept


class ClippedByMoment(Variant):
    """Adam's gradients are clipped to three times the root of their second moments."""

    limit = 3.0

    def _on_training_start(self) -> None:
        def clip(optimizer: th.optim.Optimizer, *_: Any) -> None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    state = optimizer.state[parameter]
                    if state:
                        moment = state["exp_avg_sq"] / (1 - group["betas"][1] ** float(state["step"]))
                        bound = self.limit * moment.sqrt()
                        parameter.grad.clamp_(-bound, bound)

        optimizer = self.model.policy.optimizer
        assert isinstance(optimizer, th.optim.Adam)
        optimizer.register_step_pre_hook(clip)


class BoundedStep(Variant):
    """A step of the optimiser that moves the policy too far on its batch is halved until it does not."""

    limit = 1e-4
    """bound on the mean KL(before || after)"""

    def _on_training_start(self) -> None:
        policy, update = self.model.policy, self.model.update

        def bounded(batch: SequenceBatch) -> Update:
            def statistics() -> th.Tensor:
                return policy.statistics(batch)

            before, vectors = statistics(), [vector.detach().clone() for vector in policy.flat.vectors]
            made = update(batch)
            with th.no_grad():
                while policy.family.kl(before, statistics()).mean() > self.limit:
                    for old, new in zip(vectors, policy.flat.vectors, strict=True):
                        new.lerp_(old, 0.5)
            return made

        self.model.update = bounded  # type: ignore[method-assign]


class AverageActs(Variant):
    """The average policy acts, so the behaviour changes slowly."""

    def _on_training_start(self) -> None:
        self.model.policy.act = self.model.average_policy.act  # type: ignore[method-assign]


class AverageBootstraps(Variant):
    """Retrace bootstraps from the values of the average network, as from a target network."""

    def _on_training_start(self) -> None:
        policy, average = self.model.policy, self.model.average_policy
        evaluate = policy.evaluate

        def with_average_values(*args: Any) -> Evaluation:
            with th.no_grad():
                next_values = average.evaluate(*args).next_values
            return evaluate(*args)._replace(next_values=next_values)

        policy.evaluate = with_average_values  # type: ignore[method-assign, assignment]


class Clock(BaseCallback):
    """Prints how long training took."""

    def _on_training_start(self) -> None:
        self.start = time.process_time()

    def _on_step(self) -> bool:
        return True

    def _on_training_end(self) -> None:
        print(f"Trained for {self.num_timesteps} steps in {time.process_time() - self.start:.3f} s")


class Levels(gym.ActionWrapper[Any, Any, Any]):
    """A Box action space as MultiDiscrete, each component at evenly spaced levels."""

    def __init__(self, env: gym.Env[Any, Any], n_levels: int = 5) -> None:
        super().__init__(env)
        assert isinstance(env.action_space, spaces.Box)
        self.levels = np.linspace(env.action_space.low, env.action_space.high, n_levels, axis=-1).astype(np.float32)
        self.action_space = spaces.MultiDiscrete([n_levels] * env.action_space.shape[0])

    def action(self, action: Any) -> Any:
        return np.take_along_axis(self.levels, np.asarray(action)[:, np.newaxis], -1).squeeze(-1)


class TaxiMasks(ActionMasker):
    """Taxi, whose own ``action_mask(state)`` says which actions change something, with sb3-contrib's method."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        taxi: Any = env.unwrapped
        super().__init__(env, lambda _: taxi.action_mask(taxi.s).astype(bool))


EXPERTS: dict[str, Callable[[np.ndarray], Any]] = {
    # With full force where the car is going.
    "MountainCarContinuous-v0": lambda observation: np.sign(observation[1:]),
    # A linear rule that never drops the pole.
    "CartPole-v1": lambda observation: int(observation @ [0.02, 0.05, 1.0, 0.3] > 0),
}


class Demonstrations(Variant):
    """
    Give the agent episodes of a simple expert, the same for every seed, and evaluate it once before it learns.

    :param environment: id of the environment, one of EXPERTS
    :param n_episodes: number of episodes
    :param cloned: clone the expert
    :param replayed: put the episodes into the replay buffer
    """

    def __init__(self, environment: str, n_episodes: int, cloned: bool, replayed: bool) -> None:
        super().__init__()
        self.environment, self.n_episodes = environment, n_episodes
        self.cloned, self.replayed = cloned, replayed

    def _on_training_start(self) -> None:
        env = gym.make(self.environment)
        env.reset(seed=0)
        episodes = generate_expert_traj(EXPERTS[self.environment], env=env, n_episodes=self.n_episodes)
        dataset = ExpertDataset(traj_data=episodes)
        if self.cloned:
            behaviour_cloning(self.model, dataset, n_epochs=20, learning_rate=1e-3)
        if self.replayed:
            dataset.to_replay_buffer(self.model, "expert")
        for callback in self.locals["callback"].callbacks:
            if isinstance(callback, EvalCallback):
                callback._on_step()  # its zeroth step, which it evaluates as every `eval_freq`th
