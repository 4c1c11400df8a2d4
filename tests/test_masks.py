"""
Masks of invalid actions: an update with masks is that of the smaller problem without the masked actions, and what acts
is what is stored and replayed.
"""

import pickle
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from sb3_contrib.common.envs import (
    InvalidActionEnvDiscrete,
    InvalidActionEnvMultiBinary,
    InvalidActionEnvMultiDiscrete,
)
from sb3_contrib.common.maskable.callbacks import MaskableEvalCallback
from sb3_contrib.common.maskable.evaluation import evaluate_policy
from sb3_contrib.common.maskable.utils import get_action_masks
from sb3_contrib.common.wrappers import ActionMasker
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecFrameStack, VecNormalize

from sb3_acer import ACER, ExpertDataset, generate_expert_traj
from sb3_acer.distributions import make_family
from sb3_acer.masks import following_masks
from sb3_acer.policies import ACERPolicy, MlpPolicy
from sb3_acer.sequences import SequenceBatch
from sb3_acer.update import Settings, Update, compute_update
from tests.helpers import Constant, StopAt, close, normal
from tests.reference import sizes

Space = spaces.Space[Any]

ACTIONS: dict[str, Space] = {
    "Discrete": spaces.Discrete(5, start=2),
    "MultiDiscrete": spaces.MultiDiscrete([2, 4, 3]),
    "MultiBinary": spaces.MultiBinary(3),
}
every_action = pytest.mark.parametrize("action_space", ACTIONS.values(), ids=ACTIONS)
N_STATES = 6


def random_masks(space: Space, n_rows: int, seed: int) -> np.ndarray:
    """Each component of an action has at least one valid outcome, and one alone in some rows."""
    rng = np.random.default_rng(seed)
    parts = []
    for size in sizes(space):
        part = rng.random((n_rows, size)) < 0.4
        part[np.arange(n_rows), rng.integers(size, size=n_rows)] = True
        parts.append(part)
    return np.concatenate(parts, -1)


# The smaller problem


class Given:
    """A source of random numbers that are given."""

    def __init__(self, uniforms: np.ndarray) -> None:
        self.uniforms = uniforms

    def random(self, shape: tuple[int, ...]) -> np.ndarray:
        assert self.uniforms.shape == shape
        return self.uniforms


def random_policy(space: Space, n_inputs: int = 3, **arguments: Any) -> ACERPolicy:
    observations = spaces.Box(-np.inf, np.inf, (n_inputs,))
    policy = MlpPolicy(observations, space, lambda _: 1e-3, **{"net_arch": [5], **arguments}).double()
    with th.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.4 * th.randn_like(parameter))
    return policy


def smaller_policy(policy: ACERPolicy, mask: np.ndarray) -> ACERPolicy:
    """The same networks without the outputs and inputs that stand for masked outcomes."""
    space, valid = policy.action_space, th.from_numpy(np.flatnonzero(mask))
    counts = [int(part.sum()) for part in np.split(mask, np.cumsum(sizes(space))[:-1])]
    smaller: Space = spaces.Discrete(counts[0]) if isinstance(space, spaces.Discrete) else spaces.MultiDiscrete(counts)
    small = random_policy(smaller, policy.observation_space.shape[0], net_arch=policy.net_arch)  # type: ignore[index]
    small.load_state_dict({name: value[of_valid(name, valid)] for name, value in policy.state_dict().items()})
    return small


def of_valid(name: str, valid: th.Tensor) -> Any:
    """Index of what belongs to the valid outcomes in a parameter or its gradient."""
    if name.startswith(("pi_head", "q_head.q.")):
        return valid
    return (slice(None), valid) if name == "q_head.action.weight" else ...


def gradients(policy: ACERPolicy, update: Update) -> dict[str, th.Tensor]:
    policy.flat.zero_grad()
    update.evaluation.backward(*update.gradients)
    return {name: th.as_tensor(parameter.grad).clone() for name, parameter in policy.named_parameters()}


def random_batch(policy: ACERPolicy, masks: np.ndarray, seed: int, n_steps: int = 6) -> SequenceBatch:
    """
    :param masks: one for each sequence, ``[B, P]``, or one for each row of it, ``[T + 1, B, P]``
    """
    rng, family, n_sequences = np.random.default_rng(seed), policy.family, masks.shape[-2]
    shape = (n_steps, n_sequences)
    every = th.from_numpy(np.broadcast_to(masks, (n_steps + 1, *masks.shape[-2:])).copy())
    behaviour = family.statistics(1.5 * normal(rng, *shape, family.n_outputs), None, every[:-1])
    fates = th.from_numpy(rng.choice(3, shape, p=[0.6, 0.2, 0.2]))
    fates[:2, 0], fates[-1, 1] = th.tensor([1, 2]), 2
    final_steps = (fates == 2).flatten().nonzero().squeeze(-1)
    return SequenceBatch(
        normal(rng, n_steps + 1, n_sequences, 3),
        family.sample(behaviour, th.from_numpy(rng.random((*shape, family.n_components)))),
        behaviour,
        2 * normal(rng, *shape),
        fates == 1,
        fates == 2,
        normal(rng, len(final_steps), 3),
        final_steps,
        th.zeros(n_sequences, 0),
        th.ones(shape),
        np.arange(n_sequences),
        np.zeros(n_sequences, int),
        every,
        every[0, final_steps % n_sequences],
    )


def smaller_batch(policy: ACERPolicy, batch: SequenceBatch, sequence: int, mask: np.ndarray) -> SequenceBatch:
    """One of the sequences, in the smaller problem."""
    rows: Any = batch.observations
    finals: Any = batch.final_observations
    of_sequence = batch.final_steps % len(batch.envs) == sequence
    ranks = np.concatenate([np.cumsum(part) - 1 for part in np.split(mask, np.cumsum(sizes(policy.action_space))[:-1])])
    firsts = np.cumsum([0, *sizes(policy.action_space)[:-1]])
    one = slice(sequence, sequence + 1)
    return batch._replace(
        observations=rows[:, one],
        actions=th.from_numpy(ranks)[batch.actions[:, one] + th.from_numpy(firsts)],
        behaviour=batch.behaviour[:, one][..., th.from_numpy(mask)],
        final_observations=finals[of_sequence],
        final_steps=batch.final_steps[of_sequence] // len(batch.envs),
        states=batch.states[one],
        slots=batch.slots[one],
        envs=batch.envs[one],
        masks=None,
        final_masks=None,
        **{name: getattr(batch, name)[:, one] for name in ("rewards", "terminated", "truncated", "weights")},
    )


@pytest.mark.parametrize("delta", [0.02, None], ids=["trust region", "no trust region"])
@pytest.mark.parametrize("seed", range(3))
@every_action
def test_an_update_is_that_of_the_smaller_problems_without_the_masked_actions(
    action_space: Space, seed: int, delta: float | None
) -> None:
    th.manual_seed(seed)
    policy, n_sequences, n_steps, n_samples = random_policy(action_space), 4, 6, 3
    average = deepcopy(policy)
    with th.no_grad():
        for parameter in average.parameters():
            parameter.add_(0.2 * th.randn_like(parameter))
    settings = Settings(0.875, 0.7, 0.3, 0.5, delta, n_samples)
    masks = random_masks(action_space, n_sequences, seed)
    batch = random_batch(policy, masks, seed, n_steps)
    n_components = policy.family.n_components
    uniforms = np.random.default_rng(seed).random((n_steps, n_sequences, 2 * n_samples, n_components))
    source: Any = Given(uniforms.reshape(-1, 2 * n_samples, n_components))
    update = compute_update(policy, average, batch, settings, source)
    total = gradients(policy, update)
    assert bool((update.z != update.g).any()) == (delta is not None)

    expected = {name: th.zeros_like(gradient) for name, gradient in total.items()}
    for sequence, mask in enumerate(masks):
        valid = th.from_numpy(np.flatnonzero(mask))
        small, small_average = smaller_policy(policy, mask), smaller_policy(average, mask)
        part = smaller_batch(policy, batch, sequence, mask)
        source = Given(uniforms[:, sequence])
        alone = compute_update(small, small_average, part, settings, source)
        for name in ("ratio", "q_ret", "advantage"):
            close(getattr(update, name)[:, sequence], getattr(alone, name)[:, 0])
        for name in ("g", "k", "z", "average_stats"):
            close(getattr(update, name)[:, sequence][..., valid], getattr(alone, name)[:, 0])
        close(update.evaluation.next_values[:, sequence], alone.evaluation.next_values[:, 0])
        for name, gradient in gradients(small, alone).items():
            expected[name][of_valid(name, valid)] += gradient / n_sequences
    for name, gradient in total.items():
        close(gradient, expected[name])


def test_masks_of_each_state_give_the_update_of_the_smaller_problem_with_the_actions_renamed_in_each_state() -> None:
    """Tabular policies: each state's actions have parameters of their own."""
    rng = np.random.default_rng(0)
    n_actions, n_valid, shape = 5, 3, (7, 4)
    valid = th.from_numpy(np.stack([np.sort(rng.permutation(n_actions)[:n_valid]) for _ in range(N_STATES)]))
    masks = th.zeros(N_STATES, n_actions, dtype=th.bool).scatter(1, valid, True)
    big, small = (random_policy(spaces.Discrete(n), N_STATES, net_arch=[]) for n in (n_actions, n_valid))
    big_average, small_average = deepcopy(big), deepcopy(small)
    for larger, smaller in ((big, small), (big_average, small_average)):
        for name, parameter in larger.named_parameters():
            parameter.data = normal(rng, *parameter.shape) if name.endswith("weight") else th.zeros_like(parameter)
            other = smaller.get_parameter(name)
            other.data = parameter.gather(0, valid.T) if name.endswith("weight") else th.zeros_like(other)

    states = th.from_numpy(rng.integers(N_STATES, size=(shape[0] + 1, shape[1])))
    fates = th.from_numpy(rng.choice(3, shape, p=[0.6, 0.2, 0.2]))
    final_steps = (fates == 2).flatten().nonzero().squeeze(-1)
    final_states = th.from_numpy(rng.integers(N_STATES, size=len(final_steps)))
    behaviour = normal(rng, *shape, n_valid).softmax(-1)
    actions = th.from_numpy(rng.integers(n_valid, size=(*shape, 1)))
    table = th.eye(N_STATES, dtype=th.float64)
    batch = SequenceBatch(
        table[states],
        actions,
        behaviour,
        normal(rng, *shape),
        fates == 1,
        fates == 2,
        table[final_states],
        final_steps,
        th.zeros(shape[1], 0),
        th.ones(shape),
        np.arange(shape[1]),
        np.zeros(shape[1], int),
    )
    of_steps = valid[states[:-1]]
    masked = batch._replace(
        actions=of_steps.gather(-1, actions),
        behaviour=th.zeros(*shape, n_actions, dtype=th.float64).scatter(-1, of_steps, behaviour),
        masks=masks[states],
        final_masks=masks[final_states],
    )
    settings = Settings(0.875, 0.7, 0.3, 0.5, 0.02, 1)
    expected = compute_update(small, small_average, batch, settings, rng)
    update = compute_update(big, big_average, masked, settings, rng)
    for name in ("ratio", "q_ret", "advantage"):
        close(getattr(update, name), getattr(expected, name))
    close(update.candidate_ratios.gather(-1, of_steps), expected.candidate_ratios)
    of_small = gradients(small, expected)
    for name, gradient in gradients(big, update).items():
        if name.endswith("weight"):
            close(gradient.gather(0, valid.T), of_small[name])
            assert not gradient.T[~masks].any()


@every_action
def test_masked_outcomes_have_probability_and_gradient_exactly_zero(action_space: Space) -> None:
    th.manual_seed(0)
    policy = random_policy(action_space)
    masks = th.from_numpy(random_masks(action_space, 20, 0))
    outputs = 30 * th.randn(20, policy.family.n_outputs)
    stats = policy.family.statistics(outputs, None, masks)
    assert not stats[~masks].any()
    close(stats.sum(-1), th.full((20,), float(policy.family.n_components)), 1e-5)
    of_outputs, _ = policy.family.backward(stats, th.randn_like(stats) * 1e3)
    assert not of_outputs[~masks].any()
    assert bool(of_outputs.isfinite().all())


@every_action
def test_where_one_action_is_left_everything_is_finite_and_nothing_is_learnt_of_the_policy(action_space: Space) -> None:
    policy = random_policy(action_space)
    masks = np.concatenate([np.arange(n) == n - 1 for n in sizes(action_space)])[np.newaxis]
    batch = random_batch(policy, masks.repeat(3, 0), 0)
    settings = Settings(0.875, 0.7, 0.3, 0.5, 0.02, 2)
    update = compute_update(policy, deepcopy(policy), batch, settings, np.random.default_rng(0))
    of = gradients(policy, update)
    assert all(bool(gradient.isfinite().all()) for gradient in of.values())
    assert not of["pi_head.weight"].any()
    close(update.ratio, th.ones_like(update.ratio), 1e-5)


@every_action
def test_masks_apply_to_sequences_without_a_truncated_episode(action_space: Space) -> None:
    policy = random_policy(action_space)
    batch = random_batch(policy, random_masks(action_space, 9, 0), 0)
    masks, finals, final_observations = batch.masks, batch.final_masks, batch.final_observations
    assert masks is not None
    assert finals is not None
    assert isinstance(final_observations, th.Tensor)
    none = batch._replace(
        truncated=batch.truncated & False,
        final_observations=final_observations[:0],
        final_steps=batch.final_steps[:0],
        final_masks=finals[:0],
    )
    found, same = (policy.evaluate(each, 2, np.random.default_rng(0)) for each in (batch, none))
    assert not same.stats[~masks[:-1]].any()
    for name in ("stats", "values", "q_values", "candidates", "candidate_values"):
        close(getattr(same, name), getattr(found, name))


def test_traces_have_the_dimensions_of_the_state_that_the_action_was_taken_in() -> None:
    policy, n_steps, n_sequences = random_policy(spaces.MultiDiscrete([3, 2, 4])), 6, 20
    masks = random_masks(policy.action_space, (n_steps + 1) * n_sequences, 0).reshape(n_steps + 1, n_sequences, -1)
    batch = random_batch(policy, masks, 0, n_steps)
    settings = Settings(0.875, 0.7, 0.3, 0.5, 0.02, 2)
    update = compute_update(policy, deepcopy(policy), batch, settings, np.random.default_rng(0))
    components = np.split(masks[:-1], [3, 5], -1)
    n_free = np.stack([valid.sum(-1) > 1 for valid in components]).sum(0)
    assert np.unique(n_free).tolist() == [0, 1, 2, 3]
    traces = (update.ratio ** th.from_numpy(1 / n_free.clip(min=1))).clamp(max=1)
    evaluation, expected = update.evaluation, th.zeros_like(update.q_ret)
    for t in reversed(range(n_steps)):
        after = evaluation.next_values[t].clone()
        if t + 1 < n_steps:
            correction = traces[t + 1] * (expected[t + 1] - evaluation.q_values[t + 1])
            after += correction * ~(batch.terminated | batch.truncated)[t]
        expected[t] = batch.rewards[t] + settings.gamma * after * ~batch.terminated[t]
    close(update.q_ret, expected)


@pytest.mark.parametrize("n_free", [0, 1, 3])
def test_components_with_one_valid_outcome_are_no_dimensions_of_the_traces(n_free: int) -> None:
    masks = np.ones((1, 8), bool)
    masks[0, : 2 * (4 - n_free) : 2] = False
    bits = make_family(spaces.MultiBinary(4))
    assert bits.trace_root == 4
    assert th.as_tensor(bits.trace_roots(th.from_numpy(masks))).tolist() == [max(n_free, 1)]
    assert make_family(spaces.MultiDiscrete([1, 3, 1, 2])).trace_root == 2


# Acting, storing and replaying


class Doors(gym.Env[Any, Any]):
    """
    A random state at each step, which says by a table what is valid. Episodes terminate at random, and are truncated
    after `length` steps. An invalid action is an error.
    """

    def __init__(self, action_space: Space | None = None, length: int = 9, as_dict: bool = False) -> None:
        self.action_space = action_space or spaces.Discrete(5, start=2)
        one_hot = spaces.Box(0, 1, (N_STATES,))
        self.observation_space = spaces.Dict(state=one_hot, other=one_hot) if as_dict else one_hot
        self.table = random_masks(self.action_space, N_STATES, 1)
        self.family = make_family(self.action_space)
        self.length = length
        self.n_steps = 0
        self.state = 0

    def _look(self) -> Any:
        row = np.eye(N_STATES, dtype=np.float32)[self.state]
        return {"state": row, "other": row} if isinstance(self.observation_space, spaces.Dict) else row

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.n_steps, self.state = 0, int(self.np_random.integers(N_STATES))
        return self._look(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        (taken,) = self.family.encode(th.from_numpy(self.family.from_env(action))).numpy().astype(bool)
        if not self.table[self.state][taken].all():
            raise AssertionError(f"{action} is invalid in state {self.state}")
        self.n_steps += 1
        self.state = int(self.np_random.integers(N_STATES))
        return self._look(), float(np.sum(action)), bool(self.np_random.random() < 0.1), self.n_steps == self.length, {}

    def action_masks(self) -> list[bool]:
        return list(self.table[self.state])


def doors(n_envs: int = 3, env: Callable[..., Any] = Doors, **arguments: Any) -> VecEnv:
    return make_vec_env(env, n_envs, env_kwargs=arguments, seed=0)


def make_agent(env: VecEnv, policy: str = "MlpPolicy", **arguments: Any) -> ACER:
    """It does not learn, so that replay must give back what acted."""
    of_replay: dict[str, Any] = {"buffer_size": 120, "replay_ratio": 0.5, "replay_start": 6}
    arguments = {"n_steps": 6, **of_replay, "learning_rate": 0.0, "seed": 0, **arguments}
    small = {"net_arch": [8], **({"lstm_hidden_size": 8} if "Lstm" in policy else {})}
    agent = ACER(policy, env, policy_kwargs=small, **arguments)
    with th.no_grad():
        for parameter in agent.policy.pi_head.parameters():
            parameter.add_(th.randn_like(parameter))
    return agent


def every_sequence(agent: ACER, env: VecNormalize | None = None) -> SequenceBatch:
    buffer = agent.replay_buffer
    n_slots = buffer.size() // buffer.n_steps
    slots, envs = np.divmod(np.arange(n_slots * buffer.n_envs), buffer.n_envs)
    return buffer.gather(buffer.pos - n_slots + slots, envs, env)


def assert_masks_are_those_of_the_states(agent: ACER, table: np.ndarray) -> SequenceBatch:
    batch: Any = every_sequence(agent)
    rows, finals = batch.observations, batch.final_observations
    if isinstance(rows, dict):
        rows, finals = rows["state"], finals["state"]
    masks = th.from_numpy(table)
    # Beyond a terminal state nothing is read: the border row has the state after the reset, or the terminal one.
    expected, read = masks[rows[..., -N_STATES:].argmax(-1)], th.ones(batch.masks.shape[:2], dtype=th.bool)
    read[-1] = ~batch.ends[-1]
    assert bool((batch.masks == expected)[read].all())
    assert bool(batch.masks.any(-1).all())
    assert len(finals) > 3
    assert th.equal(batch.final_masks, masks[finals[..., -N_STATES:].argmax(-1)])
    assert not batch.behaviour[~batch.masks[:-1]].any()
    return batch  # type: ignore[no-any-return]


def assert_replay_gives_back_what_acted(agent: ACER, env: VecNormalize | None = None) -> None:
    batch = every_sequence(agent, env)
    for policy in (agent.policy, agent.average_policy):
        policy.load_state_dict(agent.policy.state_dict())
        stats = policy.statistics(batch)
        close(stats, batch.behaviour, 1e-6)


@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
@every_action
def test_actions_are_valid_and_replay_with_unchanged_parameters_gives_back_the_stored_behaviour(
    action_space: Space, policy: str
) -> None:
    agent = make_agent(doors(action_space=action_space), policy)
    agent.learn(3 * 150)
    assert_masks_are_those_of_the_states(agent, random_masks(action_space, N_STATES, 1))
    assert_replay_gives_back_what_acted(agent)


@pytest.mark.parametrize("policy", ["MultiInputPolicy", "MultiInputLstmPolicy"])
def test_masks_with_dict_observations(policy: str) -> None:
    agent = make_agent(doors(as_dict=True), policy)
    agent.learn(3 * 60)
    assert_masks_are_those_of_the_states(agent, Doors().table)
    assert_replay_gives_back_what_acted(agent)


def test_masks_with_normalised_and_stacked_observations() -> None:
    env = VecNormalize(VecFrameStack(doors(), 2), clip_obs=2.0)
    agent = make_agent(env)
    env.training = False  # with unchanged statistics
    agent.learn(3 * 60)
    assert_masks_are_those_of_the_states(agent, Doors().table)
    assert_replay_gives_back_what_acted(agent, env)


def test_masks_of_environments_in_other_processes() -> None:
    env = make_vec_env(Doors, 2, seed=0, vec_env_cls=SubprocVecEnv, vec_env_kwargs={"start_method": "fork"})
    agent = make_agent(env)
    agent.learn(2 * 120)
    in_this_process = make_agent(doors(2)).learn(2 * 120)
    env.close()
    batch = assert_masks_are_those_of_the_states(agent, Doors().table)
    assert th.equal(batch.masks, every_sequence(in_this_process).masks)  # type: ignore[arg-type]


def test_an_environment_may_fill_one_array_with_its_masks() -> None:
    class Fills(Doors):
        masks = np.zeros(5, bool)

        def _look(self) -> Any:
            self.masks[:] = self.table[self.state]
            return super()._look()

        def action_masks(self) -> Any:
            return self.masks

    agent = make_agent(doors(1, Fills)).learn(150)
    assert_masks_are_those_of_the_states(agent, Doors().table)


def test_masks_by_contribs_wrapper_also_of_an_environment_that_is_wrapped_itself() -> None:
    class Shut(gym.Wrapper[Any, Any, Any, Any]):
        """Has no masks itself."""

        action_masks = None

    doors = Doors(length=1000)
    env = ActionMasker(Shut(gym.wrappers.TimeLimit(doors, 9)), lambda env: np.array(doors.action_masks()))
    agent = make_agent(DummyVecEnv([lambda: env]))
    agent.learn(150)
    assert_masks_are_those_of_the_states(agent, Doors().table)
    copied, n_steps = deepcopy(env), doors.n_steps
    copied.reset(seed=0)
    copied.step(2 + int(doors.table[copied.get_wrapper_attr("state")].argmax()))
    assert doors.n_steps == n_steps


class Foreign(VecEnv):
    """A vectorised environment of one's own making."""

    def __init__(self, venv: VecEnv) -> None:
        self.venv = venv
        super().__init__(venv.num_envs, venv.observation_space, venv.action_space)

    def reset(self) -> Any:
        return self.venv.reset()

    def step_async(self, actions: np.ndarray) -> None:
        self.venv.step_async(actions)

    def step_wait(self) -> Any:
        return self.venv.step_wait()

    def close(self) -> None:
        self.venv.close()

    def get_attr(self, name: str, indices: Any = None) -> Any:
        return self.venv.get_attr(name, indices)

    def set_attr(self, name: str, value: Any, indices: Any = None) -> None:
        self.venv.set_attr(name, value, indices)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> Any:
        return self.venv.env_method(method_name, *args, indices=indices, **kwargs)

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> Any:
        return self.venv.env_is_wrapped(wrapper_class, indices)


def test_where_the_mask_of_a_final_observation_is_not_known_all_its_actions_count_as_valid() -> None:
    agent = make_agent(Foreign(DummyVecEnv([Doors])))
    agent.learn(120)
    batch = every_sequence(agent)
    assert batch.final_masks is not None
    assert len(batch.final_masks)
    assert bool(batch.final_masks.all())
    assert not bool(th.as_tensor(batch.masks).all())


def test_a_step_that_a_program_has_replaced_is_used() -> None:
    env, taken = Doors(), []
    own = env.step

    def step(action: Any) -> Any:
        taken.append(action)
        return own(action)

    env.step = step  # type: ignore[method-assign]
    make_agent(DummyVecEnv([lambda: env])).learn(12)
    assert len(taken) == 12


def test_a_pickled_environment_has_masks_of_final_observations_too() -> None:
    agent = make_agent(doors(1))
    agent.learn(60)
    (trained_in,) = agent.env.envs  # type: ignore[union-attr]
    other = make_agent(DummyVecEnv([lambda: pickle.loads(pickle.dumps(trained_in))]))
    other.learn(120)
    final_masks = every_sequence(other).final_masks
    assert final_masks is not None
    assert not bool(final_masks.all())


@pytest.mark.parametrize("first", [True, False])
def test_masking_can_be_switched_between_two_calls_and_steps_without_masks_have_all_actions_valid(first: bool) -> None:
    env, own = doors(1), Doors().table
    agent = make_agent(env)
    for use_masking, resets in ((first, True), (not first, False)):
        table = own if use_masking else np.ones_like(own)  # without masks any action is accepted
        env.env_method("set_wrapper_attr", "table", table)
        agent.learn(60, use_masking=use_masking, reset_num_timesteps=resets)
        if resets:
            assert (every_sequence(agent).masks is None) == (not first)
    masks = th.as_tensor(every_sequence(agent).masks)
    assert masks.shape[1] == 20
    halves = masks[:-1, :10], masks[:-1, 10:]
    masked, unmasked = halves if first else halves[::-1]
    assert bool(unmasked.all())
    assert not bool(masked.all())


def test_environments_without_masks_store_none_and_learn_the_same_with_and_without_masking() -> None:
    agents = [make_agent(DummyVecEnv([Constant]), learning_rate=1e-3) for _ in range(2)]
    for agent, use_masking in zip(agents, (True, False), strict=True):
        agent.learn(60, use_masking=use_masking)
        assert every_sequence(agent).masks is None
        assert every_sequence(agent).final_masks is None
    for parameters in zip(*(agent.policy.parameters() for agent in agents), strict=True):
        assert th.equal(*parameters)


def test_a_mask_without_masked_actions_changes_nothing() -> None:
    class Open(Constant):
        def action_masks(self) -> list[bool]:
            return [True, True]

    agents = [make_agent(DummyVecEnv([env]), learning_rate=1e-3).learn(120) for env in (Open, Constant)]
    assert bool(th.as_tensor(every_sequence(agents[0]).masks).all())
    for parameters in zip(*(agent.policy.parameters() for agent in agents), strict=True):
        assert th.equal(*parameters)


@pytest.mark.parametrize("resets", [True, False])
def test_masks_across_calls_that_stop_within_a_rollout(resets: bool) -> None:
    agent = make_agent(doors())
    for n_calls in (4, 11, 20, 40):
        agent.learn(3000, StopAt(n_calls), reset_num_timesteps=resets)
    assert_masks_are_those_of_the_states(agent, Doors().table)
    assert_replay_gives_back_what_acted(agent)


def test_an_environment_that_an_evaluation_has_moved_on_is_asked_for_its_masks() -> None:
    agent = make_agent(doors()).learn(100)
    evaluate_policy(agent, agent.env, n_eval_episodes=3)  # type: ignore[arg-type]
    agent.learn(100, reset_num_timesteps=False)  # an invalid action would be an error


def test_buffers_with_masks_are_saved_loaded_and_rearranged(tmp_path: Path) -> None:
    agent = make_agent(doors()).learn(3 * 60)
    agent.save_replay_buffer(tmp_path / "buffer")
    agent.save(tmp_path / "agent")
    loaded = ACER.load(tmp_path / "agent", doors())
    loaded.load_replay_buffer(tmp_path / "buffer", truncate_last_traj=False)
    before, after = assert_masks_are_those_of_the_states(agent, Doors().table), every_sequence(loaded)
    assert th.equal(before.masks, after.masks)  # type: ignore[arg-type]
    assert th.equal(before.final_masks, after.final_masks)  # type: ignore[arg-type]
    loaded.set_env(doors(2))
    assert_masks_are_those_of_the_states(loaded, Doors().table)
    loaded.learn(2 * 60, reset_num_timesteps=False)
    assert_masks_are_those_of_the_states(loaded, Doors().table)
    assert_replay_gives_back_what_acted(loaded)


class DrawsMasks(Doors):
    """Whoever asks for a mask once more than necessary changes the states that follow."""

    def action_masks(self) -> list[bool]:
        self.np_random.random()
        return super().action_masks()


@pytest.mark.parametrize("env", [Doors, DrawsMasks])
def test_training_with_masks_continues_from_a_checkpoint_to_the_bit(env: type[Doors], tmp_path: Path) -> None:
    def agent() -> ACER:
        return make_agent(doors(env=env), learning_rate=1e-2)

    whole = agent().learn(3 * 90)
    agent().learn(3 * 90, StopAt(40), checkpoint=tmp_path, checkpoint_freq=60)
    continued = agent().learn(3 * 90, checkpoint=tmp_path)
    assert continued.num_timesteps == whole.num_timesteps
    for parameters in zip(whole.policy.parameters(), continued.policy.parameters(), strict=True):
        assert th.equal(*parameters)
    assert_masks_are_those_of_the_states(continued, Doors().table)


def test_a_run_that_goes_on_has_masks_if_the_present_call_says_so(tmp_path: Path) -> None:
    n_asked = 0

    class Open(Constant):
        def action_masks(self) -> list[bool]:
            nonlocal n_asked
            n_asked += 1
            return [True, True]

    make_agent(DummyVecEnv([Open])).learn(60, checkpoint=tmp_path)
    assert n_asked > 60
    n_asked = 0
    make_agent(DummyVecEnv([Open])).learn(120, use_masking=False, checkpoint=tmp_path)
    assert n_asked < 10  # and not at each step


def test_parameters_stay_finite_with_masks_and_burn_in() -> None:
    agent = make_agent(doors(), "MlpLstmPolicy", burn_in=4, learning_rate=1e-3)
    agent.learn(3 * 60)
    assert all(bool(parameter.isfinite().all()) for parameter in agent.policy.parameters())


class SaysTruncated(Foreign):
    """Says it of steps that do not end an episode too, as wrappers may."""

    def step_wait(self) -> Any:
        *step, dones, infos = self.venv.step_wait()
        for done, info in zip(dones, infos, strict=True):
            info["TimeLimit.truncated"] = info.get("TimeLimit.truncated", False) or not done
        return *step, dones, infos


def test_masks_of_the_last_row_are_those_of_its_state_whatever_info_says_of_an_episode_that_goes_on() -> None:
    agent = make_agent(SaysTruncated(DummyVecEnv([Doors])), lr_schedule="constant")
    n_rows = 0
    for _ in range(20):
        agent.learn(6, reset_num_timesteps=False)
        batch = agent.replay_buffer.latest()
        assert batch.masks is not None
        if not batch.ends[-1].any():
            n_rows += 1
            states = th.as_tensor(batch.observations)[-1].argmax(-1)
            assert th.equal(batch.masks[-1], th.from_numpy(Doors().table)[states])
    assert n_rows > 5


def test_all_parts_of_final_observations_are_stored() -> None:
    agent = make_agent(doors(as_dict=True), "MultiInputPolicy").learn(180)  # both parts say the same
    finals: Any = every_sequence(agent).final_observations
    assert len(finals["state"]) > 3
    assert th.equal(finals["state"], finals["other"])


def test_masks_that_change_between_two_calls_count_from_the_first_step() -> None:
    env = doors(1)
    agent = make_agent(env).learn(60)
    env.env_method("set_wrapper_attr", "table", np.ones_like(Doors().table))
    agent.learn(6, reset_num_timesteps=False)
    masks = th.as_tensor(agent.replay_buffer.latest().masks)
    assert bool(masks.all())


# Demonstrations


@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
@pytest.mark.parametrize("behaviour", ["expert", "policy"])
def test_demonstrations_are_recorded_cloned_and_replayed_with_their_masks(
    policy: str, behaviour: Any, tmp_path: Path
) -> None:
    agent = make_agent(doors(1), policy)
    generate_expert_traj(agent, tmp_path / "expert", n_episodes=20)
    dataset = ExpertDataset(tmp_path / "expert.npz", verbose=0)
    agent.pretrain(dataset, n_epochs=2)
    dataset.to_replay_buffer(agent, behaviour)
    batch = assert_masks_are_those_of_the_states(agent, Doors().table)
    close(batch.behaviour.sum(-1), th.ones(batch.behaviour.shape[:2]), 1e-5)
    if behaviour == "policy":
        assert_replay_gives_back_what_acted(agent)
    agent.learn(60)


def test_recorded_final_masks_have_a_number_for_each_action() -> None:
    class Odd(Doors):
        def step(self, action: Any) -> Any:
            *rest, info = super().step(action)
            return *rest, {**info, "action_masks": [True]}

    env = Foreign(DummyVecEnv([Odd]))
    with pytest.raises(ValueError, match=r"action_masks must be of 5 actions at a final observation too, got .*True"):
        generate_expert_traj(make_agent(doors(1)), env=env, n_episodes=1)


def test_demonstrated_actions_that_their_masks_exclude_are_an_error() -> None:
    agent = make_agent(doors(1))
    arrays = generate_expert_traj(agent, n_episodes=2)
    arrays["action_masks"] = np.arange(5) != arrays["actions"] - 2
    dataset = ExpertDataset(traj_data=arrays, verbose=0)
    with pytest.raises(ValueError, match="actions must be valid by action_masks"):
        dataset.to_replay_buffer(agent)
    with pytest.raises(ValueError, match="actions must be valid by action_masks"):
        agent.pretrain(dataset, n_epochs=1)


# What users ask of a policy, and what they do wrong


@every_action
def test_predictions_and_probabilities_are_those_of_valid_actions_alone(action_space: Space) -> None:
    env = Doors(action_space)
    agent = make_agent(DummyVecEnv([lambda: env]))
    family, masks = agent.policy.family, env.table
    obs = np.eye(N_STATES, dtype=np.float32)
    for deterministic in (True, False):
        for _ in range(20):
            actions, _ = agent.predict(obs, deterministic=deterministic, action_masks=masks)
            taken = family.encode(th.from_numpy(family.from_env(actions))).numpy().astype(bool)
            assert not (taken & ~masks).any()
    action, _ = agent.predict(obs[2], deterministic=True, action_masks=masks[2])
    assert np.array_equal(action, agent.predict(obs, deterministic=True, action_masks=list(masks))[0][2])

    tensors = th.from_numpy(obs)
    stats = agent.policy.step(tensors, th.zeros(N_STATES, 0), th.from_numpy(masks))[0].detach()
    probabilities: Any = agent.action_probability(obs, action_masks=masks)
    flat = np.concatenate(probabilities, -1) if isinstance(probabilities, list) else probabilities
    assert np.array_equal(flat, stats.numpy()[:, 1::2] if isinstance(action_space, spaces.MultiBinary) else stats)
    distribution = agent.policy.get_distribution(tensors, action_masks=masks)
    sampled = distribution.sample()
    values, log_prob, entropy = agent.policy.evaluate_actions(tensors, sampled, action_masks=masks)
    components = sampled.reshape(N_STATES, -1).long()
    close(log_prob, family.exact_log_prob(stats, components), 1e-5)
    close(th.as_tensor(entropy), family.entropy(stats), 1e-4)
    close(values, agent.policy.predict_values(tensors, action_masks=masks))
    for deterministic in (True, False):
        chosen, given, log_prob = agent.policy(tensors, deterministic, masks)
        assert log_prob.isfinite().all()
        close(log_prob, family.exact_log_prob(stats, chosen.reshape(N_STATES, -1)), 1e-5)
        close(given, values)


def test_the_value_of_a_state_is_the_mean_q_of_its_valid_actions() -> None:
    policy, observations, masks = make_agent(doors(1)).policy, th.eye(N_STATES), Doors().table
    with th.no_grad():
        stats, _ = policy.step(observations, th.zeros(N_STATES, 0), th.from_numpy(masks))
        expected = (stats * policy._q_chain(observations)).sum(-1)
        close(policy.predict_values(observations, action_masks=masks).squeeze(-1), expected, 1e-5)


def test_masked_actions_have_probability_zero_in_distributions_of_sb3_too() -> None:
    agent = make_agent(doors(1))
    masks = Doors().table
    distribution: Any = agent.policy.get_distribution(th.eye(N_STATES), action_masks=masks)
    assert not distribution.distribution.probs[~th.from_numpy(masks)].any()


def test_masks_in_the_place_of_recurrent_states_are_refused() -> None:
    """MaskablePPO's policies take masks there."""
    policy, rows, actions, masks = make_agent(doors(1)).policy, th.eye(N_STATES), th.zeros(N_STATES), Doors().table
    for given in (masks, th.from_numpy(masks)):
        for call in (
            lambda given=given: policy.get_distribution(rows, given),
            lambda given=given: policy.evaluate_actions(rows, actions, given),
            lambda given=given: policy.predict_values(rows, given),
        ):
            with pytest.raises(ValueError, match=r"states must be .* \(masks are given as action_masks=\.\.\.\)"):
                call()


class DeadEnd(Doors):
    """No action is valid after some steps, where the episode goes on or is truncated."""

    def __init__(self, step: int, truncates: bool = False) -> None:
        super().__init__(spaces.MultiDiscrete([3, 2]))
        self.last, self.truncates = step, truncates

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, _, _, info = super().step(action)
        return observation, reward, False, self.truncates and self.n_steps == self.last, info

    def action_masks(self) -> list[bool]:
        masks = super().action_masks()
        return masks[:3] + [False] * 2 if self.n_steps == self.last else masks


@pytest.mark.parametrize("truncates", [False, True])
def test_a_state_without_valid_actions_is_an_error_that_names_environment_and_step(truncates: bool) -> None:
    agent = make_agent(DummyVecEnv([lambda: DeadEnd(-1), lambda: DeadEnd(8, truncates)]))
    where = "the final observation of environment 1" if truncates else "environment 1"
    expected = f"action_masks must leave an outcome of component 1 valid, got none for {where} at step 16"
    with pytest.raises(ValueError, match=expected):
        agent.learn(200)
    assert agent.replay_buffer.step == 1
    assert agent.replay_buffer.size() == 6
    assert agent.num_timesteps == 16
    agent.set_env(DummyVecEnv([lambda: Doors(spaces.MultiDiscrete([3, 2]))] * 2))
    assert agent.learn(24, reset_num_timesteps=False).num_timesteps >= 40


def test_a_step_that_is_refused_where_a_callback_stops_is_followed_by_a_reset() -> None:
    agent = make_agent(DummyVecEnv([lambda: DeadEnd(8, truncates=False)]))
    with pytest.raises(ValueError, match="action_masks must leave an outcome"):
        agent.learn(200, lambda values, _: values["self"].num_timesteps < 8)
    assert agent._last_obs is None


def test_final_masks_are_those_of_truncated_episodes() -> None:
    family = make_family(spaces.Discrete(2))
    final = {"action_masks": np.array([False, True])}
    infos = [{}, {"TimeLimit.truncated": False, **final}, {"TimeLimit.truncated": True, **final}]
    infos.append({"TimeLimit.truncated": True})  # all actions are valid
    masks = following_masks(np.tile([True, False], (4, 1)), np.array([False, True, True, True]), infos, family, 1)
    assert masks.tolist() == [[True, False], [True, False], [False, True], [True, True]]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([True], "be one array for each environment, .* at step 7"),
        ([True, False, True], "be one array for each environment, .* at step 7"),
        ([np.nan, 1], "not be NaN, got .* at step 7"),
        ([False, False], "leave .* valid, got none for the final observation of environment 1 at step 7"),
    ],
)
def test_final_masks_that_do_not_fit_are_errors(mask: list[Any], message: str) -> None:
    infos = [{}, {"TimeLimit.truncated": True, "action_masks": np.array(mask)}]
    with pytest.raises(ValueError, match=f"(?s)action_masks must {message}"):
        following_masks(np.ones((2, 2), bool), np.array([False, True]), infos, make_family(spaces.Discrete(2)), 7)


def test_an_environment_is_not_asked_for_the_mask_of_a_terminal_state_where_time_is_up_as_well() -> None:
    class OneWay(Doors):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            self.n_steps += 1
            over = self.n_steps == self.length
            return self._look(), 0.0, over, over, {}

        def action_masks(self) -> list[bool]:
            assert self.n_steps < self.length, "a terminal state has no actions"
            return super().action_masks()

    assert make_agent(DummyVecEnv([lambda: OneWay(length=4)])).learn(12).num_timesteps == 12


def test_masks_may_have_a_row_for_each_component() -> None:
    class Rows(Doors):
        def action_masks(self) -> Any:
            return np.reshape(super().action_masks(), (2, 3))

    ours, flat = (
        make_agent(doors(1, env, action_space=spaces.MultiDiscrete([3, 3]), length=4), learning_rate=1e-3).learn(60)
        for env in (Rows, Doors)
    )
    for own, other in zip(ours.policy.parameters(), flat.policy.parameters(), strict=True):
        assert th.equal(own, other)


@pytest.mark.parametrize("vec_env", [DummyVecEnv, partial(SubprocVecEnv, start_method="fork")])
def test_an_attribute_that_is_no_method_is_an_error_unless_masks_are_not_used(vec_env: Any) -> None:
    class Odd(Doors):
        def __init__(self) -> None:
            super().__init__()
            self.action_masks = np.ones(5, bool)  # type: ignore[method-assign, assignment]

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            return self._look(), 0.0, False, False, {}

    env = vec_env([Odd])
    agent = make_agent(env)
    with pytest.raises(ValueError, match="action_masks must be a method of the environment, or left alone by learn"):
        agent.learn(20)
    assert agent.learn(20, use_masking=False).num_timesteps == 24
    env.close()


def test_masks_of_box_actions_are_an_error_unless_they_are_not_used() -> None:
    class Odd(Doors):
        def __init__(self) -> None:
            super().__init__()
            self.action_space = spaces.Box(-1, 1, (2,))

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            return self._look(), 0.0, False, False, {}

    agent = make_agent(DummyVecEnv([Odd]))
    with pytest.raises(
        ValueError, match=r"action_masks must be None for the action space Box\(.*\), got masks \(.*\) at step 0"
    ):
        agent.learn(20)
    assert agent.learn(20, use_masking=False).num_timesteps == 24
    with pytest.raises(ValueError, match=r"action_masks must be None for the action space Box"):
        agent.predict(np.zeros(N_STATES), action_masks=[True])
    with pytest.raises(ValueError, match="use_masking must be True or False, got 2"):
        agent.learn(20, use_masking=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ([True] * 4, r"action_masks must be of shape \(1, 5\), got \(4,\)"),
        ([[True] * 5] * 2, r"action_masks must be of shape \(1, 5\), got \(2, 5\)"),
        ([1, 1, 1, 1, np.nan], "action_masks must not be NaN, got "),
        ([False] * 5, "action_masks must leave an action valid, got none for row 0"),
        ("no masks", "action_masks must be"),
        ([[True], [True, False]], "action_masks must be"),
    ],
    ids=str,
)
def test_masks_that_do_not_fit_are_errors_of_predict(masks: Any, message: str) -> None:
    agent = make_agent(doors(1))
    with pytest.raises(ValueError, match=message):
        agent.predict(np.zeros(N_STATES), action_masks=masks)
    with pytest.raises(ValueError, match=message):
        agent.action_probability(np.zeros(N_STATES), action_masks=masks)


@pytest.mark.parametrize("n_valid", [1, 255, 256, 512])
def test_any_number_of_actions_may_be_valid(n_valid: int) -> None:
    masks = np.arange(512) < n_valid
    assert np.array_equal(make_family(spaces.Discrete(512)).check_masks(masks, 1), masks[np.newaxis])


def test_masks_of_each_component_that_are_not_side_by_side_are_an_error() -> None:
    class Apart(Doors):
        def __init__(self) -> None:
            super().__init__(ACTIONS["MultiDiscrete"])

        def action_masks(self) -> Any:
            return [np.ones(2, bool), np.ones(4, bool), np.ones(3, bool)]

    message = (
        "action_masks must be one array for each environment, the components of its action side by side, got .* step 0"
    )
    with pytest.raises(ValueError, match=message):
        make_agent(DummyVecEnv([Apart])).learn(1)


@pytest.mark.parametrize("shape", [(5, 3), (15,), (1, 3, 5)], ids=str)
def test_masks_have_a_row_for_each_observation(shape: tuple[int, ...]) -> None:
    agent, observations = make_agent(doors(3)), np.zeros((3, N_STATES))
    masks = np.ones((3, 5), bool)
    agent.predict(observations, action_masks=masks)
    with pytest.raises(ValueError, match=r"action_masks must be of shape \(3, 5\), got "):
        agent.predict(observations, action_masks=masks.reshape(shape))


# sb3-contrib's own tasks and helpers


@pytest.mark.parametrize(
    ("env", "n_timesteps"),
    [
        (InvalidActionEnvDiscrete(dim=20, n_invalid_actions=10), 1000),
        (InvalidActionEnvMultiDiscrete(dims=[6, 6], n_invalid_actions=8), 600),
        (InvalidActionEnvMultiBinary(dims=5, n_invalid_actions=4), 600),
    ],
    ids=["Discrete", "MultiDiscrete", "MultiBinary"],
)
def test_contribs_tasks_with_invalid_actions_are_solved(env: Any, n_timesteps: int) -> None:
    np.random.seed(0)  # the tasks draw from it
    kwargs = {"net_arch": [64], "optimizer_class": th.optim.Adam}
    arguments: dict[str, Any] = {"gamma": 0.0, "learning_rate": 3e-3, "ent_coef": 0.0, "batch_size": 8, "seed": 0}
    agent = ACER("MlpPolicy", env, lr_schedule="constant", replay_start=50, policy_kwargs=kwargs, **arguments)
    agent.learn(n_timesteps)
    evaluate_policy(agent, env, 10, reward_threshold=99, warn=False)  # type: ignore[arg-type]


def test_contribs_callback_evaluates_with_masks(tmp_path: Path) -> None:
    agent = make_agent(doors(1))
    callback = MaskableEvalCallback(doors(2), n_eval_episodes=4, eval_freq=30, log_path=str(tmp_path), verbose=0)
    agent.learn(90, callback)  # an invalid action would be an error
    assert np.load(tmp_path / "evaluations.npz")["results"].shape == (3, 4)
    assert get_action_masks(doors(2)).shape == (2, 5)


def test_a_method_that_a_program_has_put_in_the_place_of_step_is_used() -> None:
    env, taken = Doors(), []

    def step(self: Doors, action: Any) -> Any:
        taken.append(action)
        return Doors.step(self, action)

    env.step = MethodType(step, env)  # type: ignore[method-assign]
    make_agent(DummyVecEnv([lambda: env])).learn(12)
    assert len(taken) == 12
