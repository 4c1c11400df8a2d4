"""
What goes into the replay buffer comes out. The oracle is a plain list of everything that was ever added; what a
sequence must look like is read off it.
"""

import io
import math
import pickle
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypedDict

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import pytest
import torch as th
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.save_util import load_from_pkl, save_to_pkl
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from sb3_acer import SequenceReplayBuffer
from sb3_acer.sequences import SequenceBatch
from sb3_acer.storage import write_state

Array = npt.NDArray[Any]
Rows = dict[str, Array]  # observations by key; of a space that is no Dict, under ""

VECTOR = spaces.Box(-np.inf, np.inf, (3,))
IMAGE = spaces.Box(0, 255, (5, 4, 3), np.uint8)
SPACES: dict[str, spaces.Space[Any]] = {
    "vector": VECTOR,
    "float64": spaces.Box(-np.inf, np.inf, (2,), np.float64),
    "image": IMAGE,
    "uint16": spaces.Box(0, 2**16 - 1, (2, 2), np.uint16),
    "uint32": spaces.Box(0, 2**32 - 1, (2,), np.uint32),
    "uint64": spaces.Box(0, 2**40, (2,), np.uint64),
    "discrete": spaces.Discrete(1000, start=-3),
    "multi_discrete": spaces.MultiDiscrete([3, 500]),
    "multi_binary": spaces.MultiBinary(9),
    "dict": spaces.Dict({"image": IMAGE, "vector": VECTOR, "count": spaces.Discrete(1000), "actions": VECTOR}),
}
ACTIONS = spaces.MultiDiscrete([1000, 1000])

REPEATABLE = settings(deadline=None, derandomize=True, database=None)


class Step(TypedDict):
    """One step of all environments, as :meth:`SequenceReplayBuffer.add` hears of it."""

    obs: Rows
    next_obs: Rows
    action: Array
    behaviour: Array
    reward: Array  # float32 that numbers all steps of all environments: the name by which a sequence is found again
    terminated: Array
    truncated: Array
    states: Array  # before the step


RESET = "all environments are reset from outside"
Event = Step | str


class Sequence(NamedTuple):
    """One sequence of T steps."""

    observations: Rows  # T + 1 rows
    action: Array
    behaviour: Array
    reward: Array
    terminated: Array
    truncated: Array
    finals: dict[int, Rows]  # final observations, by the step that was truncated
    state: Array  # before the first step


class Case(NamedTuple):
    """How to size a buffer, and what its environments are like."""

    kind: str = "vector"
    n_steps: int = 3
    n_envs: int = 2
    buffer_size: int = 12
    n_events: int = 60
    terminates: float = 0.1
    truncates: float = 0.1
    resets: float = 0.05
    seed: int = 0
    width: int = 2  # of the recurrent state


def draw(space: spaces.Space[Any], rng: np.random.Generator, n: int) -> Array:
    """Independent rows, each as an environment would give it."""
    if isinstance(space, spaces.Box):
        if np.issubdtype(space.dtype, np.floating):
            return rng.normal(size=(n, *space.shape)).astype(space.dtype)
        return rng.integers(space.low, space.high, (n, *space.shape), space.dtype.type, endpoint=True)
    if isinstance(space, spaces.Discrete):
        return np.asarray(rng.integers(space.n, size=n) + space.start)
    if isinstance(space, spaces.MultiDiscrete):
        return rng.integers(space.nvec, size=(n, *space.nvec.shape))
    assert isinstance(space, spaces.MultiBinary)
    return rng.integers(2, size=(n, *space.shape)).astype(np.int8)


def draw_rows(space: spaces.Space[Any], rng: np.random.Generator, n: int) -> Rows:
    parts = space.spaces if isinstance(space, spaces.Dict) else {"": space}
    return {key: draw(part, rng, n) for key, part in parts.items()}


def simulate(case: Case, first_reward: int = 0) -> list[Event]:
    """What a vectorised environment of random observations does."""
    rng, memories = np.random.default_rng(case.seed), np.random.default_rng([case.seed, 1])
    space, n = SPACES[case.kind], case.n_envs
    events: list[Event] = []
    obs = draw_rows(space, rng, n)
    for t in range(case.n_events):
        if rng.random() < case.resets:
            events.append(RESET)
            obs = draw_rows(space, rng, n)
        terminated = rng.random(n) < case.terminates
        truncated = ~terminated & (rng.random(n) < case.truncates)
        next_obs = draw_rows(space, rng, n)
        events.append(
            {
                "obs": obs,
                "next_obs": next_obs,
                "action": rng.integers(1000, size=(n, 2)),
                "behaviour": rng.normal(size=(n, 4)).astype(np.float32),
                "reward": np.arange(n, dtype=np.float32) + first_reward + t * n,
                "terminated": terminated,
                "truncated": truncated,
                "states": memories.normal(size=(n, case.width)).astype(np.float32),
            }
        )
        fresh = draw_rows(space, rng, n)
        done = terminated | truncated
        obs = {key: np.where(_beside(done, rows), fresh[key], rows) for key, rows in next_obs.items()}
    return events


def _beside(flags: Array, rows: Array) -> Array:
    """``flags`` with dimensions that let them broadcast over ``rows``."""
    return flags.reshape(*flags.shape, *(1,) * (rows.ndim - flags.ndim))


def feed(buffer: SequenceReplayBuffer, events: Iterable[Event]) -> None:
    """Tell the buffer, in arrays that the environment then overwrites, as many do."""
    for event in events:
        if isinstance(event, str):
            buffer.end_episodes()
            continue
        step = deepcopy(event)
        obs, next_obs = unkeyed(step["obs"]), unkeyed(step["next_obs"])
        done = step["terminated"] | step["truncated"]
        # A wrapper may leave the key out, or say it of an episode that goes on.
        infos = [
            {"TimeLimit.truncated": bool(truncated) or not ended} if truncated or int(reward) % 3 else {}
            for truncated, ended, reward in zip(step["truncated"], done, step["reward"], strict=True)
        ]
        arrays = (step["action"], step["reward"], done)
        states = step["states"] if step["states"].size else None
        buffer.add(obs, next_obs, *arrays, infos, behaviour=step["behaviour"], states=states)
        for array in (*arrays, step["behaviour"], step["states"], *step["obs"].values(), *step["next_obs"].values()):
            array.fill(1)


def unkeyed(rows: Rows) -> Any:
    return rows.get("", rows)


class Oracle:
    """All that was ever added, and what must have become of it."""

    def __init__(self, case: Case, events: Iterable[Event] = ()) -> None:
        self.n_steps, self.n_envs = case.n_steps, case.n_envs
        self.n_slots = max(case.buffer_size // case.n_steps, 1)
        self.steps: list[Step] = []
        self.hear(events)

    def hear(self, events: Iterable[Event]) -> None:
        for event in events:
            if not isinstance(event, str):
                self.steps.append(event.copy())
            elif self.steps:
                last = self.steps[-1]
                last["truncated"] = ~last["terminated"]

    @property
    def finished(self) -> int:
        return len(self.steps) // self.n_steps

    @property
    def kept(self) -> range:
        """The finished slots that are still there, oldest first."""
        return range(max(self.finished - self.n_slots, 0), self.finished)

    @property
    def cells(self) -> list[tuple[int, int]]:
        """All sequences that are still there, as (slot, environment), oldest first."""
        return [(slot, env) for slot in self.kept for env in range(self.n_envs)]

    def sequence(self, slot: int, env: int) -> Sequence:
        steps = self.steps[slot * self.n_steps : (slot + 1) * self.n_steps]
        assert len(steps) == self.n_steps
        rows = [{key: part[env] for key, part in step["obs"].items()} for step in steps]
        finals = [{key: part[env] for key, part in step["next_obs"].items()} for step in steps]
        truncated = np.array([step["truncated"][env] for step in steps])
        # Neighbours share their border row.
        border = finals[-1]
        if slot + 1 < self.finished:
            border = {key: part[env] for key, part in self.steps[(slot + 1) * self.n_steps]["obs"].items()}
        return Sequence(
            {key: np.array([row[key] for row in [*rows, border]]) for key in border},
            np.array([step["action"][env] for step in steps]),
            np.array([step["behaviour"][env] for step in steps]),
            np.array([step["reward"][env] for step in steps]),
            np.array([step["terminated"][env] for step in steps]),
            truncated,
            {int(t): finals[t] for t in np.flatnonzero(truncated)},
            steps[0]["states"][env],
        )

    def find(self, sequence: Sequence) -> tuple[int, int]:
        """Which (slot, environment) a sequence is, by its first reward."""
        t, env = divmod(int(sequence.reward[0]), self.n_envs)
        slot, rest = divmod(t, self.n_steps)
        assert rest == 0, "a sequence must start where a slot does"
        return slot, env


def keyed(observations: Any) -> Rows:
    """The observations of a batch, as the oracle has them."""
    parts = observations if isinstance(observations, dict) else {"": observations}
    return {key: part.numpy().copy() for key, part in parts.items()}


def sequences(batch: SequenceBatch) -> list[Sequence]:
    """A batch, taken apart."""
    observations, finals = keyed(batch.observations), keyed(batch.final_observations)
    final_steps = batch.final_steps.tolist()
    n_sequences = batch.rewards.shape[1]
    actions, behaviour, rewards = batch.actions.numpy(), batch.behaviour.numpy(), batch.rewards.numpy()
    terminated, truncated = batch.terminated.numpy(), batch.truncated.numpy()
    taken = [
        Sequence(
            {key: rows[:, b] for key, rows in observations.items()},
            actions[:, b],
            behaviour[:, b],
            rewards[:, b],
            terminated[:, b],
            truncated[:, b],
            {},
            batch.states[b].numpy(),
        )
        for b in range(n_sequences)
    ]
    for place, step in enumerate(final_steps):
        t, b = divmod(step, n_sequences)
        taken[b].finals[t] = {key: rows[place] for key, rows in finals.items()}
    assert len(set(final_steps)) == len(final_steps) == int(batch.truncated.sum())
    assert {len(rows) for rows in finals.values()} == {len(final_steps)}
    assert not (batch.terminated & batch.truncated).any(), "no step is both terminated and truncated"
    return taken


def assert_close(got: Array, expected: Array, rtol: float, name: str) -> None:
    if rtol or not np.array_equal(got, expected):  # the former is slow
        np.testing.assert_allclose(got, expected, rtol, err_msg=name)


def assert_close_rows(got: Rows, expected: Rows, rtol: float, name: str) -> None:
    assert got.keys() == expected.keys()
    for key, rows in expected.items():
        assert_close(got[key], rows, rtol, f"{name}[{key!r}]")


def assert_same(got: Sequence, expected: Sequence, rtol: float = 0) -> None:
    # Where the last step ends an episode, the row after it is of another one.
    ended = expected.terminated[-1] | expected.truncated[-1]
    n_rows = len(got.action) + int(not ended)
    seen, wanted = ({key: rows[:n_rows] for key, rows in each.observations.items()} for each in (got, expected))
    assert_close_rows(seen, wanted, rtol, "observations")
    for name in ("action", "behaviour", "reward", "terminated", "truncated", "state"):
        assert_close(getattr(got, name), getattr(expected, name), rtol, name)
    assert got.finals.keys() == expected.finals.keys()
    for t, rows in expected.finals.items():
        assert_close_rows(got.finals[t], rows, rtol, f"final observation of step {t}")


def assert_same_batches(got: SequenceBatch, expected: SequenceBatch) -> None:
    np.testing.assert_array_equal(got.envs, expected.envs)
    for one, other in zip(sequences(got), sequences(expected), strict=True):
        assert_same(one, other)


def assert_latest(buffer: SequenceReplayBuffer, oracle: Oracle) -> None:
    batch = buffer.latest()
    assert batch.envs.tolist() == list(range(oracle.n_envs))
    for env, sequence in enumerate(sequences(batch)):
        assert_same(sequence, oracle.sequence(oracle.finished - 1, env))


def assert_kept(buffer: SequenceReplayBuffer, oracle: Oracle, seed: int = 0) -> None:
    """Everything sampled is what it was when added, and everything that must be kept is sampled."""
    assert buffer.size() == len(oracle.kept) * oracle.n_steps
    cells = oracle.cells
    if not cells:
        return
    assert_latest(buffer, oracle)
    # The chance that a draw of this size misses any of them is below exp(-15).
    n_sequences = math.ceil(len(cells) * (math.log(len(cells)) + 15))
    batch = buffer.sample(n_sequences, rng=np.random.default_rng(seed))
    seen = set()
    for env, sequence in zip(batch.envs, sequences(batch), strict=True):
        cell = oracle.find(sequence)
        assert cell in cells, f"of the slots {oracle.kept}, got slot {cell[0]}"
        assert cell[1] == env
        if cell not in seen:
            assert_same(sequence, oracle.sequence(*cell))
            seen.add(cell)
    assert seen == set(cells)


def make_buffer(case: Case, **kwargs: Any) -> SequenceReplayBuffer:
    kwargs = {"device": "cpu", "n_envs": case.n_envs, "n_steps": case.n_steps, **kwargs}
    return SequenceReplayBuffer(case.buffer_size, SPACES[case.kind], ACTIONS, **kwargs)


def filled(case: Case) -> tuple[SequenceReplayBuffer, Oracle]:
    events = simulate(case)
    buffer = make_buffer(case)
    feed(buffer, events)
    return buffer, Oracle(case, events)


def n_places(buffer: SequenceReplayBuffer) -> int:
    """Rows of the table of final observations."""
    return 0 if buffer._ring is None else max(len(table) for table in buffer._ring.finals.rows.values())


def saved_size(buffer: SequenceReplayBuffer) -> int:
    """Bytes of all that the buffer holds."""
    return len(pickle.dumps(buffer))


def cases(kinds: Iterable[str] = SPACES, **kwargs: Any) -> st.SearchStrategy[Case]:
    chance = st.sampled_from([0.0, 0.1, 0.5, 1.0])
    strategies: dict[str, Any] = {
        "kind": st.sampled_from(sorted(kinds)),
        "n_steps": st.integers(1, 7),
        "n_envs": st.integers(1, 4),
        "buffer_size": st.integers(1, 20),
        "n_events": st.integers(0, 60),
        "terminates": chance,
        "truncates": chance,
        "resets": chance,
        "seed": st.integers(0, 2**32 - 1),
        "width": st.sampled_from([0, 1, 4]),
        **kwargs,
    }
    return st.builds(Case, **strategies)


each_kind = pytest.mark.parametrize("kind", SPACES)


# What goes in comes out


@each_kind
def test_latest_is_the_last_finished_rollout_of_all_environments(kind: str) -> None:
    @settings(REPEATABLE, max_examples=4)
    @given(cases([kind], n_events=st.integers(0, 60)))
    def law(case: Case) -> None:
        buffer, oracle = make_buffer(case), Oracle(case)
        for event in simulate(case):
            feed(buffer, [event])
            oracle.hear([event])
            if oracle.finished:
                assert_latest(buffer, oracle)

    law()


@each_kind
def test_samples_are_the_newest_slots_as_they_were_added(kind: str) -> None:
    @settings(REPEATABLE, max_examples=12)
    @given(cases([kind]))
    def law(case: Case) -> None:
        assert_kept(*filled(case), seed=case.seed)

    law()


@pytest.mark.parametrize("buffer_size", [1, 4, 5, 9, 10, 11])
def test_a_buffer_keeps_the_whole_rollouts_that_fit_in_its_size_and_one_at_least(buffer_size: int) -> None:
    case = Case(n_steps=5, buffer_size=buffer_size, n_events=47)
    buffer, oracle = filled(case)
    assert_kept(buffer, oracle)
    assert buffer.size() == {1: 5, 4: 5, 5: 5, 9: 5, 10: 10, 11: 10}[buffer_size]


def test_a_rollout_under_way_is_not_sampled_and_replaces_no_finished_one() -> None:
    case = Case(n_steps=5, buffer_size=10, n_events=60)
    buffer, oracle, events = make_buffer(case), Oracle(case), simulate(case)
    for event in events:
        feed(buffer, [event])
        oracle.hear([event])
        assert_kept(buffer, oracle)


@pytest.mark.parametrize("name", ["terminated", "truncated"])
@pytest.mark.parametrize("t", range(4))
def test_the_end_of_an_episode_is_sampled_wherever_in_a_slot_it_lies(t: int, name: str) -> None:
    case = Case(n_steps=4, n_envs=2, buffer_size=8, n_events=20, terminates=0, truncates=0, resets=0)
    events = simulate(case)
    end = 12 + t
    for step in events:
        assert isinstance(step, dict)
        step["terminated" if name == "terminated" else "truncated"][1] = int(step["reward"][0]) == 2 * end
    buffer, oracle = make_buffer(case), Oracle(case, events)
    feed(buffer, events)
    batch = buffer.sample(200, rng=np.random.default_rng(0))
    ended = getattr(batch, name)
    assert ended[t].any()
    assert set(batch.rewards[ended].tolist()) == {2.0 * end + 1}
    assert_kept(buffer, oracle)


def test_the_border_row_of_a_slot_continues_its_episode() -> None:
    case = Case(n_steps=3, buffer_size=12, n_events=40, terminates=0.3, truncates=0.3)
    buffer, oracle = filled(case)
    n_going_on = 0
    for sequence in sequences(buffer.sample(200, rng=np.random.default_rng(0))):
        slot, env = oracle.find(sequence)
        if not (sequence.terminated[-1] or sequence.truncated[-1]):
            n_going_on += 1
            following = oracle.steps[(slot + 1) * 3 - 1]["next_obs"][""][env]
            np.testing.assert_array_equal(sequence.observations[""][-1], following)
    assert n_going_on > 20


def test_a_slot_has_the_recurrent_state_before_its_first_step() -> None:
    case = Case(n_steps=4, n_envs=3, buffer_size=16, n_events=30, resets=0, width=5)
    events = [event for event in simulate(case) if isinstance(event, dict)]
    buffer = make_buffer(case)
    for t, event in enumerate(events):
        feed(buffer, [event])
        if buffer.step == 0:
            np.testing.assert_array_equal(buffer.latest().states, events[t - 3]["states"])
            np.testing.assert_array_equal(buffer.latest().states, buffer.latest(normalizer(case)).states)
    batch = buffer.sample(200, rng=np.random.default_rng(0))
    firsts = batch.rewards[0].long() // 3
    assert set(firsts.tolist()) == {12, 16, 20, 24}
    expected = [events[t]["states"][env] for t, env in zip(firsts.tolist(), batch.envs, strict=True)]
    np.testing.assert_array_equal(batch.states, expected)


def test_states_of_feed_forward_policies_have_width_zero() -> None:
    buffer, _ = filled(Case(n_events=20, width=0))
    assert buffer.latest().states.shape == (2, 0)
    assert buffer.sample(7).states.shape == (7, 0)
    assert buffer.with_envs(3).latest().states.shape == (3, 0)


@settings(REPEATABLE, max_examples=40)
@given(cases(n_steps=st.integers(2, 7), n_events=st.integers(7, 40)), st.integers(0, 6))
def test_sequences_without_their_first_steps_are_the_rest(case: Case, n_left_out: int) -> None:
    buffer, _ = filled(case)
    n_left_out = min(n_left_out, case.n_steps - 1)
    batch = buffer.sample(9, rng=np.random.default_rng(case.seed))
    batch = batch._replace(
        weights=th.randn_like(batch.weights),
        masks=th.randn(case.n_steps + 1, 9, 4) > 0,
        final_masks=th.randn(len(batch.final_steps), 4) > 0,
    )
    whole = deepcopy(batch)
    states = th.randn(9, 3)
    rest = batch.after(n_left_out, states)
    np.testing.assert_array_equal(rest.envs, batch.envs)
    assert th.equal(rest.ends, batch.ends[n_left_out:])
    assert th.equal(rest.weights, batch.weights[n_left_out:])
    assert th.equal(th.as_tensor(rest.masks), th.as_tensor(batch.masks)[n_left_out:])
    are_left = batch.final_steps >= 9 * n_left_out
    assert th.equal(th.as_tensor(rest.final_masks), th.as_tensor(batch.final_masks)[are_left])
    for got, sequence, state in zip(sequences(rest), sequences(whole), states.numpy(), strict=True):
        observations = {key: rows[n_left_out:] for key, rows in sequence.observations.items()}
        finals = {t - n_left_out: rows for t, rows in sequence.finals.items() if t >= n_left_out}
        columns = {name: getattr(sequence, name)[n_left_out:] for name in Sequence._fields[1:6]}
        assert_same(got, sequence._replace(observations=observations, **columns, finals=finals, state=state))
    assert_same_batches(batch, whole)  # which is as it was


# Draws


def chi_square(counts: Iterable[int], n_cells: int) -> float:
    """How many standard deviations the statistic of uniformity is above its mean."""
    counts = [*counts]
    expected = sum(counts) / n_cells
    statistic = sum((count - expected) ** 2 for count in counts) / expected + (n_cells - len(counts)) * expected
    return (statistic - (n_cells - 1)) / math.sqrt(2 * (n_cells - 1))


@pytest.mark.parametrize("n_events", [8, 30, 100])
def test_samples_are_uniform_over_slots_and_environments(n_events: int) -> None:
    case = Case(n_steps=4, n_envs=3, buffer_size=21, n_events=n_events, terminates=0.3)
    buffer, oracle = filled(case)
    batch = buffer.sample(20_000, rng=np.random.default_rng(1))
    counts = Counter(batch.rewards[0].tolist())
    assert len(counts) == len(oracle.cells)
    assert chi_square(counts.values(), len(oracle.cells)) < 4


def test_the_sequences_of_a_batch_are_independent() -> None:
    buffer, _ = filled(Case(n_steps=2, n_envs=2, buffer_size=6, n_events=20))
    firsts = buffer.sample(40_000, rng=np.random.default_rng(2)).rewards[0].numpy()
    assert chi_square(Counter(zip(firsts[::2], firsts[1::2], strict=True)).values(), 6**2) < 4
    rng = np.random.default_rng(3)
    firsts = np.array([buffer.sample(1, rng=rng).rewards[0, 0].item() for _ in range(2000)])
    assert chi_square(Counter(zip(firsts[::2], firsts[1::2], strict=True)).values(), 6**2) < 4


@settings(REPEATABLE, max_examples=15)
@given(cases(["dict"], n_events=st.integers(7, 60)))
def test_the_same_seed_gives_the_same_batch(case: Case) -> None:
    buffer, _ = filled(case)
    seeds = (case.seed, case.seed)
    assert_same_batches(*(buffer.sample(30, rng=np.random.default_rng(seed)) for seed in seeds))


def test_draws_come_from_the_generator_given_and_disturb_no_other() -> None:
    buffer, _ = filled(Case(n_envs=4, buffer_size=60))
    np.random.seed(0)
    th.manual_seed(0)
    expected = np.random.random(), th.rand(())
    np.random.seed(0)
    th.manual_seed(0)
    generators = [np.random.default_rng(seed) for seed in (5, 6)]
    one, other = (buffer.sample(20, rng=rng).rewards for rng in generators)
    unseeded = [buffer.sample(20).rewards for _ in range(2)]
    assert not th.equal(one, other)
    assert not th.equal(*unseeded)
    assert not th.equal(one, buffer.sample(20, rng=generators[0]).rewards)
    assert (np.random.random(), th.rand(())) == expected


@pytest.mark.parametrize("n_events", [0, 1, 2])
@pytest.mark.parametrize(
    "take", [SequenceReplayBuffer.latest, lambda buffer: buffer.sample(4)], ids=["latest", "sample"]
)
def test_sampling_before_a_rollout_is_finished_is_an_error(
    take: Callable[[SequenceReplayBuffer], SequenceBatch], n_events: int
) -> None:
    buffer, _ = filled(Case(n_steps=3, n_events=n_events, resets=1))
    assert buffer.size() == 0
    with pytest.raises(ValueError, match=r"must hold a finished rollout to be sampled, got an empty one"):
        take(buffer)


@pytest.mark.parametrize("n_rollouts", [2, 9])
def test_rollouts_older_than_the_buffer_holds_are_refused(n_rollouts: int) -> None:
    case = Case(n_steps=3, buffer_size=12, n_events=3 * n_rollouts, resets=0)
    buffer, _ = filled(case)
    n_held = buffer.size() // case.n_steps
    assert n_held == min(n_rollouts, 4)
    oldest = buffer.pos - n_held
    buffer.gather(np.array([oldest]), np.zeros(1, int))
    with pytest.raises(ValueError, match=f"slots must be from {oldest} to {buffer.pos - 1}, modulo 6, got"):
        buffer.gather(np.array([oldest - 1]), np.zeros(1, int))


def test_sequences_are_gathered_by_any_array_of_integers() -> None:
    buffer, _ = filled(Case(n_envs=2))
    last = buffer.pos - 1
    batch = buffer.gather(np.array([last, last]), np.array([1, 0]))
    make: Any
    for make in (list, th.tensor, np.uint64):
        slots, envs = make([last, last]), make([1, 0])
        assert th.equal(buffer.gather(slots, envs).rewards, batch.rewards)
    wrong: list[tuple[Any, Any, str]] = [
        (last, [0], rf"slots must be an array of integers, \[B\], got {last}"),
        ([last], [0.0], r"envs must be an array of integers, \[B\], got \[0.0\]"),
        (["newest"], [0], r"slots must be an array of numbers, got \['newest'\]"),
        ([last], [0, 1], "the number of envs must be 1, as that of slots, got 2"),
    ]
    for slots, envs, message in wrong:
        with pytest.raises(ValueError, match=message):
            buffer.gather(slots, envs)


def test_rows_of_another_number_of_environments_are_refused() -> None:
    case = Case(n_envs=2)
    buffer, _ = filled(case)
    for env in (-1, 2):
        with pytest.raises(ValueError, match="envs must be from 0 to 1, got"):
            buffer.gather(np.array([buffer.pos - 1]), np.array([env]))
    for n_envs in (1, 3):
        with pytest.raises(ValueError, match=f"rows of action must be {n_envs}, as n_envs, got 2"):
            feed(make_buffer(case, n_envs=n_envs), simulate(case))


def test_a_batch_does_not_share_the_buffers_memory() -> None:
    case = Case("dict", n_steps=3, buffer_size=6, n_events=21, truncates=0.5)
    events = simulate(case)
    buffer, oracle = make_buffer(case), Oracle(case, events)
    feed(buffer, events)
    norm = normalizer(case, norm_obs=False, norm_reward=False)
    for batch in (buffer.latest(), buffer.latest(norm), buffer.sample(40), buffer.sample(40, norm)):
        assert isinstance(batch.observations, dict)
        assert isinstance(batch.final_observations, dict)
        parts = (*batch.observations.values(), *batch.final_observations.values())
        for tensor in (*parts, batch.actions, batch.behaviour, batch.rewards, batch.terminated, batch.truncated):
            tensor.fill_(1)
        batch.states.fill_(1)
        batch.envs.fill(0)
    assert_kept(buffer, oracle)
    batch = buffer.latest()
    expected = deepcopy(batch)
    feed(buffer, simulate(case))
    buffer.end_episodes()
    assert_same_batches(batch, expected)


# Ends of episodes


@pytest.mark.parametrize(
    "truncated", [[0], [1], [2], [3], [2, 3], [3, 4], [0, 1, 2, 3], [3, 7, 11], list(range(16))], ids=str
)
def test_final_observations_of_truncated_steps_come_out(truncated: list[int]) -> None:
    case = Case(n_steps=4, n_envs=3, buffer_size=16, n_events=17, terminates=0, truncates=0, resets=0)
    rng = np.random.default_rng(7)
    events = simulate(case)
    for t in truncated:
        step, following = events[t], events[t + 1]
        assert isinstance(step, dict)
        assert isinstance(following, dict)
        step["truncated"][1] = True
        following["obs"][""][1] = rng.normal(size=3)
    buffer, oracle = make_buffer(case), Oracle(case)
    for event in events:
        feed(buffer, [event])
        oracle.hear([event])
        assert_kept(buffer, oracle)
    batch = buffer.sample(100, rng=rng)
    finals, places = keyed(batch.final_observations)[""], batch.final_steps.tolist()
    assert {batch.rewards.flatten()[place].item() for place in places} == {t * 3.0 + 1 for t in truncated}
    for final, place in zip(finals, places, strict=True):
        step = oracle.steps[int(batch.rewards.flatten()[place]) // 3]
        np.testing.assert_array_equal(final, step["next_obs"][""][1])


@settings(REPEATABLE, max_examples=8)
@given(cases(["vector"], n_events=st.integers(100, 300), buffer_size=st.integers(1, 40)))
def test_the_table_of_final_observations_is_as_large_as_the_truncated_steps_of_a_full_buffer_need(case: Case) -> None:
    buffer, oracle = make_buffer(case), Oracle(case)
    capacity = (oracle.n_slots + 2) * case.n_steps  # with the slot that is not sampled, and the rollout under way
    needed = 0
    for event in simulate(case):
        feed(buffer, [event])
        oracle.hear([event])
        needed = max(needed, sum(int(step["truncated"].sum()) for step in oracle.steps[-capacity:]))
        assert n_places(buffer) <= max(16, 2 * needed)
    assert_kept(buffer, oracle)


def test_long_runs_take_no_more_memory() -> None:
    case = Case(n_steps=5, n_envs=4, buffer_size=40, n_events=200, truncates=0.5, terminates=0.2, resets=0.3)
    buffer, events = make_buffer(case), simulate(case)
    feed(buffer, events)
    size = saved_size(buffer)
    for _ in range(10):
        feed(buffer, events)
    # The list of free places is all that varies.
    assert saved_size(buffer) < size + 4 * n_places(buffer) + 100


@settings(REPEATABLE, max_examples=30)
@given(cases(terminates=st.just(0.3), resets=st.just(0.0), n_events=st.integers(1, 60)), st.integers(1, 3))
def test_a_reset_from_outside_truncates_the_episodes_under_way_once(case: Case, n_resets: int) -> None:
    buffer, oracle = filled(case)
    feed(buffer, [RESET] * n_resets)
    oracle.hear([RESET])
    assert buffer.ended.all()
    assert_kept(buffer, oracle)
    more = simulate(case._replace(seed=case.seed + 1, n_events=8), first_reward=case.n_envs * len(oracle.steps))
    feed(buffer, more)
    oracle.hear(more)
    assert_kept(buffer, oracle)


@pytest.mark.parametrize("t", [1, 2, 3, 4, 8, 9, 27])
def test_an_episode_truncated_by_a_reset_has_its_final_observation(t: int) -> None:
    case = Case(n_steps=4, n_envs=2, buffer_size=8, n_events=t, terminates=0, truncates=0, resets=0)
    buffer, oracle = filled(case)
    expected = oracle.steps[-1]["next_obs"][""]
    buffer.end_episodes()
    feed(buffer, simulate(case._replace(seed=1, n_events=-t % 4)))
    batch = buffer.latest()
    assert batch.truncated.nonzero().tolist() == [[(t - 1) % 4, 0], [(t - 1) % 4, 1]]
    np.testing.assert_array_equal(keyed(batch.final_observations)[""], expected)


def test_a_reset_does_not_change_an_empty_buffer() -> None:
    case = Case(n_events=30)
    buffer = make_buffer(case)
    feed(buffer, [RESET, RESET])
    assert buffer.size() == 0
    feed(buffer, simulate(case))
    buffer.reset()
    feed(buffer, [RESET, *simulate(case)])
    assert_kept(buffer, Oracle(case, simulate(case)))


# Another number of environments


class Canonical(NamedTuple):
    """
    What training sees of a sequence. It makes no difference whether its last step is truncated or continues in the
    border row.
    """

    observations: bytes
    successors: tuple[bytes | None, ...]
    columns: tuple[bytes, ...]
    inner_truncations: tuple[bool, ...]
    state: bytes


def canonical(sequence: Sequence) -> Canonical:
    def as_bytes(rows: Rows) -> bytes:
        return b"".join(np.asarray(rows[key], np.float64).tobytes() for key in sorted(rows))

    n_steps = len(sequence.reward)
    rows = [{key: part[t] for key, part in sequence.observations.items()} for t in range(n_steps + 1)]
    return Canonical(
        b"".join(map(as_bytes, rows[:-1])),
        tuple(
            None if sequence.terminated[t] else as_bytes(sequence.finals.get(t, rows[t + 1])) for t in range(n_steps)
        ),
        tuple(np.ascontiguousarray(column).tobytes() for column in sequence[1:5]),
        tuple(sequence.truncated[:-1]),
        sequence.state.tobytes(),
    )


def rearranged(oracle: Oracle, n_envs: int) -> list[list[Canonical]]:
    """The rollouts of another number of environments, oldest first."""
    cells = oracle.cells
    columns = [canonical(oracle.sequence(*cell)) for cell in cells]
    firsts = range(max(len(cells) - oracle.n_slots * n_envs, 0), len(cells), n_envs)
    return [[columns[i % len(cells)] for i in range(first, first + n_envs)] for first in firsts]


def held(buffer: SequenceReplayBuffer) -> Counter[Canonical]:
    """Every sequence that the buffer holds, as often as it does."""
    n_held = buffer.size() // buffer.n_steps * buffer.n_envs
    batch = buffer.sample(math.ceil(n_held * (math.log(n_held) + 15)), rng=np.random.default_rng(0))
    found = {(int(env), canonical(sequence)) for env, sequence in zip(batch.envs, sequences(batch), strict=True)}
    assert len(found) == n_held
    return Counter(sequence for _, sequence in found)


@settings(REPEATABLE, max_examples=50)
@given(cases(n_events=st.integers(0, 60)), st.integers(1, 9))
def test_another_number_of_environments_keeps_the_sequences(case: Case, n_envs: int) -> None:
    buffer, oracle = filled(case)
    other = buffer.with_envs(n_envs)
    rollouts = rearranged(oracle, n_envs)
    assert (other.n_envs, other.n_steps, other.step) == (n_envs, case.n_steps, 0)
    assert other.size() == len(rollouts) * case.n_steps
    if rollouts:
        assert [canonical(sequence) for sequence in sequences(other.latest())] == rollouts[-1]
        assert held(other) == Counter(sequence for rollout in rollouts for sequence in rollout)
    assert_kept(buffer, oracle)  # which is as it was


def test_nothing_is_dropped_where_there_is_room() -> None:
    buffer, oracle = filled(Case(n_steps=3, n_envs=4, buffer_size=30, n_events=7))
    everything = Counter(canonical(oracle.sequence(*cell)) for cell in oracle.cells)
    assert len(everything) == 8
    for n_envs in (1, 2, 4, 8):
        assert held(buffer.with_envs(n_envs)) == everything
    for n_envs in (3, 5, 6, 20):
        padded = held(buffer.with_envs(n_envs))
        assert padded.keys() == everything.keys()
        assert sum(padded.values()) == math.ceil(8 / n_envs) * n_envs


def test_a_user_is_told_how_many_transitions_find_no_room() -> None:
    buffer, _ = filled(Case(n_steps=3, n_envs=4, buffer_size=9, n_events=9))
    with pytest.warns(UserWarning, match="buffer_size=9 for n_envs=2 keeps the newest 18 of 36 transitions"):
        assert held(buffer.with_envs(2)).total() == 6


@settings(REPEATABLE, max_examples=30)
@given(cases(n_events=st.integers(7, 60)), st.integers(1, 5))
def test_steps_can_be_added_for_another_number_of_environments(case: Case, n_envs: int) -> None:
    buffer, oracle = filled(case)
    other = buffer.with_envs(n_envs)
    rollouts = rearranged(oracle, n_envs)
    new = case._replace(n_envs=n_envs, n_events=2 * case.n_steps, seed=case.seed + 1)
    events = simulate(new, first_reward=10_000)
    feed(other, [RESET, *events])
    truth = Oracle(new, events)
    rollouts += [[canonical(truth.sequence(slot, env)) for env in range(n_envs)] for slot in range(2)]
    assert_latest(other, truth)
    assert held(other) == Counter(sequence for rollout in rollouts[-oracle.n_slots :] for sequence in rollout)


def test_another_number_of_environments_works_for_batches_on_any_device() -> None:
    case = Case("dict", truncates=0.5)
    events = simulate(case)
    buffer = make_buffer(case, device="meta")  # as good as a GPU: nothing can be read back from it
    feed(buffer, events)
    other = buffer.with_envs(3)
    assert other.device == th.device("meta")
    other.device = th.device("cpu")
    rollouts = rearranged(Oracle(case, events), 3)
    assert held(other) == Counter(sequence for rollout in rollouts for sequence in rollout)


# Saving


def through_pickle(buffer: SequenceReplayBuffer, folder: Path) -> Any:
    return pickle.loads(pickle.dumps(buffer))


def through_path(buffer: SequenceReplayBuffer, folder: Path) -> Any:
    save_to_pkl(folder / "buffer", buffer)
    return load_from_pkl(folder / "buffer")


def through_stream(buffer: SequenceReplayBuffer, folder: Path) -> Any:
    stream = io.BytesIO()
    save_to_pkl(stream, buffer)
    stream.seek(0)
    return load_from_pkl(stream)


def through_file(buffer: SequenceReplayBuffer, folder: Path) -> Any:
    with (folder / "buffer").open("wb") as file:
        buffer.write(file)
    with (folder / "buffer").open("rb") as file:
        return SequenceReplayBuffer.read(file, buffer.observation_space, buffer.action_space, "cpu")


def through_state(buffer: SequenceReplayBuffer, folder: Path) -> Any:
    sizes = {name: getattr(buffer, name) for name in ("buffer_size", "n_envs", "n_steps")}
    other = SequenceReplayBuffer(
        observation_space=buffer.observation_space, action_space=buffer.action_space, device="cpu", **sizes
    )
    other.load_state_dict(buffer.state_dict())
    return other


@pytest.mark.parametrize(
    ("through", "n_examples"),
    [(through_pickle, 10), (through_path, 3), (through_stream, 3), (through_file, 25), (through_state, 25)],
)
def test_a_saved_buffer_continues_where_it_was(
    through: Callable[[SequenceReplayBuffer, Path], Any], n_examples: int, tmp_path: Path
) -> None:
    @settings(REPEATABLE, max_examples=n_examples)
    @given(cases(n_events=st.integers(0, 60)), st.integers(0, 60))
    def law(case: Case, n_before: int) -> None:
        events = simulate(case)
        before, after = events[:n_before], events[n_before:]
        buffer, oracle = make_buffer(case), Oracle(case, before)
        feed(buffer, before)
        loaded = through(buffer, tmp_path)
        assert isinstance(loaded, SequenceReplayBuffer)
        assert_kept(loaded, oracle)
        feed(loaded, after)
        assert_kept(buffer, oracle)  # which is as it was
        feed(buffer, after)
        oracle.hear(after)
        assert_kept(loaded, oracle)
        if oracle.finished:
            assert_same_batches(*(each.sample(30, rng=np.random.default_rng(0)) for each in (buffer, loaded)))
        assert n_places(loaded) == n_places(buffer)

    law()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"buffer_size": 13}, "the replay buffer must have buffer_size=13, got 12"),
        ({"n_steps": 2}, "the replay buffer must have n_steps=2, got 3"),
        ({"n_envs": 4}, "the replay buffer must have n_envs=4, got 2"),
    ],
    ids=str,
)
def test_the_state_of_a_buffer_of_other_sizes_is_refused(changes: dict[str, Any], message: str) -> None:
    state = filled(Case())[0].state_dict()
    other, oracle = filled(Case(seed=1)._replace(**changes))
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(state)
    assert_kept(other, oracle)


OTHER_SPACES: dict[str, tuple[spaces.Space[Any], spaces.Space[Any]]] = {
    "observations of another shape": (spaces.Box(-np.inf, np.inf, (4,)), ACTIONS),
    "observations of another type": (spaces.Box(-np.inf, np.inf, (3,), np.float64), ACTIONS),
    "observations in a dict": (spaces.Dict({"vector": VECTOR}), ACTIONS),
    "other actions": (VECTOR, spaces.MultiDiscrete([1000, 999])),
    "actions of another kind": (VECTOR, spaces.Box(-1, 1, (2,))),
}


@pytest.mark.parametrize(("observations", "actions"), OTHER_SPACES.values(), ids=OTHER_SPACES)
def test_the_state_of_a_buffer_of_other_spaces_is_refused(
    observations: spaces.Space[Any], actions: spaces.Space[Any]
) -> None:
    buffer, _ = filled(Case())
    message = "the replay buffer must have observations and actions of .*, got .*MultiDiscrete"
    other = SequenceReplayBuffer(12, observations, actions, "cpu", 2, n_steps=3)
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(buffer.state_dict())
    file = io.BytesIO()
    buffer.write(file)
    file.seek(0)
    with pytest.raises(ValueError, match=message):
        SequenceReplayBuffer.read(file, observations, actions, "cpu")


def without(state: dict[str, Any], *path: str) -> dict[str, Any]:
    """A copy in which something is missing."""
    state = deepcopy(state)
    part = state
    for name in path[:-1]:
        part = part[name]
    del part[path[-1]]
    return state


def replaced(state: dict[str, Any], value: Any, *path: str) -> dict[str, Any]:
    state = deepcopy(state)
    part = state
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    return state


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: without(state, "spaces"),
        lambda state: without(state, "sizes"),
        lambda state: without(state, "sizes", "buffer_size"),
        lambda state: without(state, "pos"),
        lambda state: without(state, "columns"),
        lambda state: without(state, "columns", "states"),
        lambda state: without(state, "columns", "steps", "rewards"),
        lambda state: without(state, "columns", "observations", ""),
        lambda state: without(state, "columns", "observations", "", "ring"),
        lambda state: without(state, "columns", "finals", "free"),
        lambda state: replaced(state, np.zeros((2, 7)), "columns", "steps", "rewards", "ring"),
        lambda state: replaced(state, np.zeros((99, 2, 3)), "columns", "observations", "", "ring"),
        lambda state: replaced(state, None, "columns", "observations"),
    ],
)
@pytest.mark.parametrize("n_events", [7, 60], ids=["filling", "full"])
def test_a_file_with_missing_or_misshapen_parts_is_refused(
    damage: Callable[[dict[str, Any]], dict[str, Any]], n_events: int
) -> None:
    buffer, _ = filled(Case(n_events=n_events))
    file = io.BytesIO()
    write_state(file, damage(buffer.state_dict()))
    file.seek(0)
    with pytest.raises(ValueError, match="the replay buffer must be a whole file, got one that is damaged"):
        SequenceReplayBuffer.read(file, VECTOR, ACTIONS, "cpu", n_steps=3)


def test_a_buffer_is_read_with_the_sizes_that_it_was_written_with() -> None:
    buffer, oracle = filled(Case(n_steps=5, n_envs=3, buffer_size=20))
    file = io.BytesIO()
    buffer.write(file)
    file.seek(0)
    read = SequenceReplayBuffer.read(file, VECTOR, ACTIONS, "cpu", n_steps=2, handle_timeout_termination=False)
    assert (read.n_steps, read.n_envs, read.buffer_size, read.handle_timeout_termination) == (5, 3, 20, False)
    assert_kept(read, oracle)
    file.seek(0)
    assert SequenceReplayBuffer.read(file, VECTOR, ACTIONS, "meta").device == th.device("meta")


@pytest.mark.parametrize("path", [("states",), ("finals", "rows", "")], ids=["states", "final observations"])
def test_a_state_with_numbers_that_are_not_finite_is_refused(path: tuple[str, ...]) -> None:
    buffer, _ = filled(Case(truncates=0.5))
    state = deepcopy(buffer.state_dict())
    part = state["columns"]
    for name in path:
        part = part[name]
    part[:] = th.nan
    with pytest.raises(ValueError, match="the replay buffer must hold finite numbers"):
        make_buffer(Case()).load_state_dict(state)


# Memory


def test_memory_is_allocated_at_the_first_step_and_freed_on_reset() -> None:
    one, huge = (saved_size(SequenceReplayBuffer(size, IMAGE, ACTIONS, n_envs=16)) for size in (1, 10**12))
    assert huge < one + 100
    case = Case("image", buffer_size=1000)
    buffer, events = make_buffer(case), simulate(case)
    unused = saved_size(buffer)
    buffer.end_episodes()
    assert saved_size(buffer) == unused
    feed(buffer, events)
    assert saved_size(buffer) > 1000 * case.n_envs * 60
    buffer.reset()
    assert saved_size(buffer) == unused


@settings(REPEATABLE, max_examples=25)
@given(cases(), cases())
def test_a_reset_buffer_is_a_new_one(first: Case, second: Case) -> None:
    case = first._replace(**{name: getattr(second, name) for name in ("n_events", "seed", "terminates", "truncates")})
    buffer, _ = filled(first)
    buffer.reset()
    assert (buffer.size(), buffer.step) == (0, 0)
    events = simulate(case)
    feed(buffer, events)
    assert_kept(buffer, Oracle(case, events))


def test_a_buffer_that_takes_the_state_of_an_empty_one_is_a_new_one() -> None:
    case = Case(n_events=20)
    buffer, _ = filled(case)
    buffer.load_state_dict(make_buffer(case).state_dict())
    assert (buffer.size(), buffer.step, buffer.state_size) == (0, 0, None)
    events = simulate(case)
    feed(buffer, events)
    assert_kept(buffer, Oracle(case, events))


def test_a_batch_names_each_slot_by_its_number_in_the_ring() -> None:
    buffer, _ = filled(Case(n_events=60))
    slots = buffer.pos - 1 - np.arange(buffer.n_slots)
    assert buffer.full
    assert slots.min() < 0
    batch = buffer.gather(slots, np.zeros(buffer.n_slots, int))
    assert batch.slots.min() >= 0
    assert th.equal(buffer.gather(batch.slots, batch.envs).rewards, batch.rewards)


def test_a_reset_buffer_takes_actions_statistics_and_states_of_another_width() -> None:
    case = Case(n_events=20)
    buffer, _ = filled(case)
    buffer.reset()
    events = simulate(case)
    for step in events:
        if isinstance(step, dict):
            step["action"] = step["action"][:, :1].astype(np.float32) / 7
            step["behaviour"] = np.tile(step["behaviour"], 3)
            step["states"] = np.tile(step["states"], 2)
    feed(buffer, events)
    assert_kept(buffer, Oracle(case, events))


def test_observations_are_stored_once() -> None:
    space = spaces.Box(0, 255, (64, 64, 1), np.uint8)
    buffer = SequenceReplayBuffer(100, space, ACTIONS, "cpu", n_steps=5)
    frames = np.zeros((1, *space.shape), np.uint8)
    one = np.zeros(1)
    for _ in range(300):
        buffer.add(frames, frames, one[:, None], one, one > 0, [{}], behaviour=one[:, None])
    assert buffer.size() == 100
    assert saved_size(buffer) < 1.2 * 100 * frames.nbytes


@pytest.mark.parametrize("width", [0, 100], ids=["feed-forward", "recurrent"])
@pytest.mark.parametrize(("kind", "row_bytes"), [("image", 60), ("float64", 16), ("dict", 60 + 12 + 8 + 12)])
def test_a_buffer_that_will_not_fit_in_memory_warns_with_both_figures(
    kind: str, row_bytes: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(kind, n_steps=10, n_envs=4, buffer_size=500_000, n_events=25, width=width)
    # action, behaviour, reward, two flags; a place for the final observation; a tenth of a recurrent state
    needed = case.buffer_size * case.n_envs * (row_bytes + 2 * 8 + 4 * 4 + 4 + 2 + 8 + width * 4 / 10)
    memory = SimpleNamespace(available=needed * 0.9)
    monkeypatch.setattr("sb3_acer.buffer.psutil.virtual_memory", lambda: memory)
    events = [event for event in simulate(case) if isinstance(event, dict)]
    buffer = make_buffer(case)
    with pytest.warns(UserWarning, match="replay buffer will need") as caught:
        feed(buffer, events)
    assert len(caught) == 1, "once is enough"
    message = str(caught[0].message)
    figures = [float(figure) for figure in re.findall(r"(\d+\.\d+) GB", message)]
    assert figures == pytest.approx([needed / 1e9, needed * 0.9 / 1e9], abs=0.0051)
    assert "buffer_size=500000" in message
    assert "the vectorised environment, each of 4 transitions" in message
    memory.available = needed * 1.1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        feed(make_buffer(case), events[:1])


# VecNormalize


class Stub(gym.Env[Any, Any]):
    """Spaces for a wrapper to look at; never stepped."""

    def __init__(self, observation_space: spaces.Space[Any]) -> None:
        self.observation_space = deepcopy(observation_space)  # VecNormalize changes it
        self.action_space = ACTIONS


def normalizer(case: Case, **kwargs: Any) -> VecNormalize:
    return VecNormalize(DummyVecEnv([lambda: Stub(SPACES[case.kind])] * case.n_envs), **kwargs)


def statistics(norm: VecNormalize) -> dict[str, RunningMeanStd]:
    """Of the observations, by key."""
    if not norm.norm_obs:
        return {}
    return norm.obs_rms if isinstance(norm.obs_rms, dict) else {"": norm.obs_rms}


def experience(norm: VecNormalize, rng: np.random.Generator) -> None:
    """Change the statistics."""
    for moments in (*statistics(norm).values(), norm.ret_rms):
        moments.update(rng.normal(rng.normal(), 1 + rng.random(), (50, *moments.mean.shape)))


def normalized(sequence: Sequence, norm: VecNormalize) -> Sequence:
    """The formula, written out."""

    def of(rows: Rows) -> Rows:
        rows = dict(rows)
        for key, moments in statistics(norm).items():
            scaled = (rows[key] - moments.mean) / np.sqrt(moments.var + norm.epsilon)
            rows[key] = scaled.clip(-norm.clip_obs, norm.clip_obs).astype(np.float32)
        return rows

    reward = sequence.reward
    if norm.norm_reward:
        scaled = reward / np.sqrt(norm.ret_rms.var + norm.epsilon)
        reward = scaled.clip(-norm.clip_reward, norm.clip_reward).astype(np.float32)
    finals = {t: of(rows) for t, rows in sequence.finals.items()}
    return sequence._replace(observations=of(sequence.observations), reward=reward, finals=finals)


NORMALIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "vector": ("vector", {}),
    "float64": ("float64", {}),
    "image": ("image", {}),
    "uint16": ("uint16", {}),
    "one key": ("dict", {"norm_obs_keys": ["vector"]}),
    "two keys": ("dict", {"norm_obs_keys": ["image", "actions"]}),
    "clipped": ("vector", {"clip_obs": 0.5, "clip_reward": 2.0}),
    "rewards only": ("dict", {"norm_obs": False}),
    "observations only": ("vector", {"norm_reward": False}),
}


@pytest.mark.parametrize(("kind", "arguments"), NORMALIZERS.values(), ids=NORMALIZERS)
def test_observations_and_rewards_are_stored_raw_and_normalised_by_the_statistics_of_now(
    kind: str, arguments: dict[str, Any]
) -> None:
    case = Case(kind, n_steps=4, n_envs=3, buffer_size=12, n_events=40, truncates=0.3)
    buffer, oracle = filled(case)
    norm = normalizer(case, **{"clip_reward": 1e6, **arguments})
    rng = np.random.default_rng(0)
    for seed in range(3):
        experience(norm, rng)
        before = pickle.dumps((statistics(norm), norm.ret_rms))
        latest = buffer.latest(norm)
        for raw, batch in (
            (buffer.latest(), latest),
            (buffer.sample(20, rng=np.random.default_rng(seed)), buffer.sample(20, norm, np.random.default_rng(seed))),
        ):
            assert len(batch.final_steps) > 0
            np.testing.assert_array_equal(batch.envs, raw.envs)
            for got, sequence in zip(sequences(batch), sequences(raw), strict=True):
                truth = oracle.sequence(*oracle.find(sequence))
                assert_same(sequence, truth)
                assert_same(got, normalized(truth, norm), rtol=1e-5)
        assert pickle.dumps((statistics(norm), norm.ret_rms)) == before, "sampling teaches the statistics nothing"


def test_batches_without_truncated_steps_are_normalised() -> None:
    case = Case("dict", truncates=0, resets=0)
    buffer, oracle = filled(case)
    norm = normalizer(case, norm_obs_keys=["image"])
    experience(norm, np.random.default_rng(0))
    batch = buffer.latest(norm)
    assert len(batch.final_steps) == 0
    for env, sequence in enumerate(sequences(batch)):
        assert_same(sequence, normalized(oracle.sequence(oracle.finished - 1, env), norm), rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"), [((0, 5), "buffer_size must be an integer of at least 1, got 0"), ((5, -2), "n_steps")]
)
def test_a_buffer_without_room_is_refused(arguments: tuple[int, int], message: str) -> None:
    buffer_size, n_steps = arguments
    with pytest.raises(ValueError, match=message):
        SequenceReplayBuffer(buffer_size, spaces.Discrete(2), spaces.Discrete(2), n_steps=n_steps)


def test_rearranged_buffers_keep_episodes_that_were_reset_from_outside_truncated() -> None:
    buffer = SequenceReplayBuffer(20, VECTOR, ACTIONS, "cpu", 1, n_steps=4, handle_timeout_termination=False)
    behaviour = np.full((1, 2000), 1 / 1000, np.float32)
    for step in range(4):
        obs = np.full((1, *VECTOR.shape), step, np.float32)
        buffer.add(obs, obs + 1, np.zeros((1, 2)), np.zeros(1), np.zeros(1), [{}], behaviour=behaviour)
        if step == 1:
            buffer.end_episodes()
    rearranged = buffer.with_envs(1)
    assert not rearranged.handle_timeout_termination
    for each in (buffer, rearranged):
        batch = each.gather(np.zeros(1, int), np.zeros(1, int), None, th.device("cpu"))
        assert batch.truncated[:, 0].tolist() == [False, True, False, False]
        assert not batch.terminated.any()
