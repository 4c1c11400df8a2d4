"""Calls of an agent's methods in any order."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch as th
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from stable_baselines3.common.evaluation import evaluate_policy

from sb3_acer import ACER
from tests.helpers import Recorder, StopAt
from tests.test_acer import copied_whole, flat, flat_average, small, through_files
from tests.test_buffer import REPEATABLE


class Calls(RuleBasedStateMachine):
    """Calls in any order of two equal agents, of which one is replaced by what copies or files hold of it."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        arguments: dict[str, Any] = {"buffer_size": 20, "replay_ratio": 1, "replay_start": 5}
        self.agents = [small(Recorder(length=9), **arguments) for _ in range(2)]

    @rule(resets=st.booleans(), stop=st.integers(1, 9))
    def learn(self, resets: bool, stop: int) -> None:
        for agent in self.agents:
            agent.learn(8, StopAt(stop), reset_num_timesteps=resets)

    @rule(stop=st.integers(1, 9))
    def fail(self, stop: int) -> None:
        def fails(values: dict[str, Any], _: dict[str, Any]) -> None:
            assert values["self"].replay_buffer.step != stop % 5

        for agent in self.agents:
            with suppress(AssertionError):
                agent.learn(8, fails, reset_num_timesteps=False)

    @rule()
    def evaluate(self) -> None:
        for agent in self.agents:
            evaluate_policy(agent, agent.get_env(), 1, deterministic=True)  # type: ignore[arg-type]

    @rule(kept=st.sampled_from([copied_whole, through_files]))
    def replace(self, kept: Callable[[ACER, Path], ACER]) -> None:
        self.agents[1] = kept(self.agents[1], Path(self.folder.name))

    @invariant()
    def they_are_equal(self) -> None:
        ours, theirs = self.agents
        assert ours.num_timesteps == theirs.num_timesteps
        assert th.equal(flat(ours), flat(theirs))
        assert th.equal(flat_average(ours), flat_average(theirs))
        if ours.replay_buffer.n_rollouts:
            latest = [agent.replay_buffer.latest() for agent in self.agents]
            for name in ("observations", "actions", "behaviour", "truncated", "states"):
                assert th.equal(*(getattr(batch, name) for batch in latest))

    def teardown(self) -> None:
        self.folder.cleanup()


@pytest.mark.filterwarnings("ignore:this call learns nothing", "ignore:the learning rate begins", "ignore:predict was")
def test_agents_that_go_through_copies_and_files_learn_as_those_that_do_not() -> None:
    run_state_machine_as_test(Calls, settings=settings(REPEATABLE, max_examples=20, stateful_step_count=8))
