"""What the ranks of a group tell each other."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch as th
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.running_mean_std import RunningMeanStd

from sb3_acer import distributed
from sb3_acer.distributed import Moments, RankError
from sb3_acer.shared_memory import Board
from tests.ranks import Raised, on_ranks


def moments(statistics: RunningMeanStd) -> Moments:
    return Moments(statistics.mean, statistics.var, statistics.count)


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(
    sizes=st.lists(st.lists(st.integers(0, 20), min_size=3, max_size=3), min_size=1, max_size=5), seed=st.integers(0)
)
def test_pooled_moments_are_those_of_all_values_together(sizes: list[list[int]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    whole = RunningMeanStd(shape=(4,))
    common = moments(whole)
    for of_ranks in sizes:  # rollout after rollout
        statistics = []
        for size in of_ranks:
            values = rng.normal(rng.normal(0, 5, 4), 2, (size, 4))
            statistics.append(RunningMeanStd(shape=(4,)))
            statistics[-1].mean, statistics[-1].var, statistics[-1].count = common
            if size:
                statistics[-1].update(values)
                whole.update(values)
        common = distributed.pooled(common, [moments(each) for each in statistics])
    assert common.n == pytest.approx(whole.count)
    np.testing.assert_allclose(common.mean, whole.mean, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(common.var, whole.var, rtol=1e-9)


def test_moments_far_from_0_are_pooled_without_loss() -> None:
    values = 1e6 + np.random.default_rng(0).normal(size=(3, 50, 1))
    common = Moments(values[0].mean(0), values[0].var(0), 50.0)
    later = [values[[0, rank]].reshape(-1, 1) for rank in (1, 2)]
    found = distributed.pooled(common, [Moments(each.mean(0), each.var(0), 100.0) for each in later])
    np.testing.assert_allclose(found.mean, values.mean((0, 1)), rtol=1e-15)
    np.testing.assert_allclose(found.var, values.var((0, 1)), rtol=1e-8)


def test_moments_to_which_nothing_is_added_stay_as_they_are() -> None:
    common = Moments(np.array([0.1, 0.7]), np.array([1 / 3, 0.2]), 1e-4)
    assert distributed.pooled(common, [common] * 3) is common


def test_a_process_without_a_group_is_its_only_rank() -> None:
    vector, value = th.tensor([1.0, 2.0]), object()
    distributed.all_reduce_mean([vector])
    distributed.require_equal({"anything": float("nan")})
    assert (distributed.rank(), distributed.world_size()) == (0, 1)
    assert distributed.gather(value) == [value]
    assert distributed.from_first(value) is value
    assert vector.tolist() == [1.0, 2.0]
    with distributed.torchrun_group():
        assert distributed.world_size() == 1


@pytest.mark.parametrize(("n_gpus", "backend"), [(0, "gloo"), (1, "gloo"), (2, None)])
def test_ranks_without_a_gpu_for_each_use_gloo(
    n_gpus: int, backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []
    made: list[str | None] = []
    store = dist.HashStore()  # type: ignore[attr-defined]
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    monkeypatch.setattr(dist, "rendezvous", lambda _: iter([(store, 0, 1)]))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: made.append(backend))
    ended: list[str] = []
    monkeypatch.setattr(distributed, "_leave", lambda: ended.append("left"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: ended.append("destroyed"))
    monkeypatch.setattr(th.cuda, "device_count", lambda: n_gpus)
    monkeypatch.setattr(th.cuda, "set_device", used.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with distributed.torchrun_group():
        pass
    assert made == [backend]
    assert ended == ["left", "destroyed"]
    assert used == ([1 % n_gpus] if n_gpus else [])


def test_a_process_of_torchrun_that_has_joined_a_group_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("there is a group"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert distributed.is_outside_group()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    assert not distributed.is_outside_group()
    with distributed.torchrun_group():
        pass


def test_ranks_of_one_start_agree_on_a_name_of_their_own() -> None:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    store.set("sb3_acer/rank 2", "of a process that ended while it waited")
    names = []
    for _ in range(3):
        with ThreadPoolExecutor(3) as pool:
            of_ranks = list(pool.map(lambda rank: distributed._agree_on_a_name(store, rank, 3), (2, 0, 1)))
        assert len(set(of_ranks)) == 1
        names.append(of_ranks[0])
    assert len(set(names)) == 3
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(RuntimeError, match=r"all 4 ranks must start within 0:00:00.2\d*, got none of .*3"):
        distributed._agree_on_a_name(store, 0, 4)


@pytest.fixture(params=["shared memory", "messages"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How the ranks that a test starts tell each other."""
    if request.param == "messages":
        monkeypatch.setattr(distributed, "_open_board", lambda processes: None)


@pytest.mark.usefixtures("by")
def test_ranks_agree() -> None:
    def act(rank: int) -> Any:
        vector = th.tensor([rank, 0.1, 1 / (rank + 3)], dtype=th.float64)
        distributed.all_reduce_mean([vector])
        first: dict[str, Any] = distributed.from_first(
            {"tensor": th.full((2,), rank), "rng": np.random.default_rng(rank)}
        )
        with pytest.raises(ValueError, match=r"n_envs must be equal on all ranks, got \[2, 3, 4\]"):
            distributed.require_equal({"n_steps": 20, "n_envs": rank + 2})
        return distributed.rank(), distributed.gather("abc"[rank]), vector, first["tensor"], first["rng"].random()

    results = on_ranks(act, 3)
    for rank, (own, letters, vector, tensor, number) in enumerate(results):
        assert (own, letters, tensor.tolist()) == (rank, ["a", "b", "c"], [0, 0])
        assert number == np.random.default_rng(0).random()
        assert th.equal(vector, results[0][2])
        np.testing.assert_allclose(vector, [1, 0.1, (1 / 3 + 1 / 4 + 1 / 5) / 3])


@pytest.mark.usefixtures("by")
def test_vectors_of_any_layout_are_averaged() -> None:
    def act(rank: int) -> Any:
        vectors = [
            th.tensor(float(rank)),
            th.zeros(0),
            th.arange(6.0).view(2, 3).t() * rank,
            (th.arange(16.0).view(1, 2, 2, 4) * rank).to(memory_format=th.channels_last),
            (th.arange(6.0) * rank)[::2],
        ]
        distributed.all_reduce_mean(vectors)
        return [vector.tolist() for vector in vectors]

    images = th.arange(16.0).view(1, 2, 2, 4).tolist()
    for result in on_ranks(act, 3):
        assert result == [1, [], [[0, 3], [1, 4], [2, 5]], images, [0, 2, 4]]


def test_where_one_rank_cannot_share_memory_all_send_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    def act(rank: int) -> Any:
        if rank == 1:
            monkeypatch.setattr(Board, "open", lambda *_: None)
        return distributed.gather(rank)

    assert on_ranks(act) == [[0, 1]] * 2


def join_another_group(rank: int, folder: Path, timeout: float = 60) -> None:
    dist.destroy_process_group()
    store = f"file://{folder}/another"
    dist.init_process_group("gloo", store, timedelta(seconds=timeout), rank=rank, world_size=2)


def test_ranks_may_have_other_numbers_in_a_second_group(tmp_path: Path) -> None:
    def act(rank: int) -> Any:
        first = distributed.gather("ab"[rank])
        join_another_group(1 - rank, tmp_path)
        return first, distributed.gather("ab"[rank])

    assert on_ranks(act) == [(["a", "b"], ["b", "a"])] * 2


def test_a_rank_waits_as_long_as_its_group_does(tmp_path: Path) -> None:
    def act(rank: int) -> Any:
        join_another_group(rank, tmp_path, timeout=77)
        distributed.gather(rank)
        board = distributed._own_group().board
        return board is not None and board._timeout

    assert on_ranks(act) == [77, 77]


def test_a_rank_that_fails_before_the_first_exchange_is_named(tmp_path: Path) -> None:
    def act(rank: int) -> Any:
        dist.barrier()  # the other rank may be connecting still
        dist.destroy_process_group()
        store = dist.FileStore(str(tmp_path / "store"), 2)  # type: ignore[attr-defined]
        with (
            patch.dict(os.environ, LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2"),
            patch.object(dist, "is_torchelastic_launched", lambda: True),
            patch.object(dist, "rendezvous", lambda _: iter([(store, rank, 2)])),
            distributed.torchrun_group(),
        ):
            if rank == 1:
                raise LookupError("there are no data")
            distributed.gather(rank)

    ours, theirs = map(str, on_ranks(act))
    assert ours == "RankError: training stops: rank 1 has left its group"
    assert theirs == "LookupError: there are no data"


def test_a_rank_that_leaves_is_named_while_its_process_goes_on(tmp_path: Path) -> None:
    def act(rank: int) -> Any:
        distributed.gather(rank)
        if rank == 1:
            distributed._leave()  # at the end of torchrun_group
            while not (tmp_path / "heard").exists():
                time.sleep(0.01)
        else:
            with pytest.raises(RankError, match="training stops: rank 1 has left its group"):
                distributed.gather(rank)
            (tmp_path / "heard").touch()
        return "alive"

    assert on_ranks(act, 2) == ["alive"] * 2


@pytest.mark.usefixtures("by")
@pytest.mark.parametrize("lost", [0, 2])
def test_a_rank_that_is_killed_is_named_by_all_others(lost: int) -> None:
    def act(rank: int) -> Any:
        distributed.gather(rank)
        if rank == lost:
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(3):
            distributed.all_reduce_mean([th.zeros(1000)])

    for rank, result in enumerate(on_ranks(act, 4)):
        if rank == lost:
            assert result is None
        else:
            assert isinstance(result, Raised)
            assert f"RankError: training stops: rank {lost} (process " in str(result)
            assert " and rank" not in str(result)


def test_a_rank_that_is_killed_on_another_machine_is_named_with_that_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "_here", lambda: (f"machine{max(dist.get_rank(), 1)}", ""))  # ranks 0 and 1 on one
    monkeypatch.setattr(distributed, "_SECONDS_TO_DIE", 0.2)

    def act(rank: int) -> Any:
        distributed.gather(rank)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(3):
            distributed.all_reduce_mean([th.zeros(1000)])

    for result in on_ranks(act, 3)[:2]:
        assert "training stops: a rank on another machine has ended, one of 2 on machine2" in str(result)
