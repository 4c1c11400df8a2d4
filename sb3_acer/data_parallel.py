"""Data-parallel training: the ranks of a torch.distributed group train one agent, each on its own environments."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from stable_baselines3.common.callbacks import (
    BaseCallback,
    CallbackList,
    CheckpointCallback,
    EvalCallback,
    EventCallback,
    ProgressBarCallback,
)
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.type_aliases import MaybeCallback, RolloutReturn
from stable_baselines3.common.vec_env import VecEnv

from sb3_acer import distributed
from sb3_acer.arguments import comparable_arguments
from sb3_acer.distributed import Moments
from sb3_acer.rollouts import Generators, RolloutAlgorithm
from sb3_acer.vec_normalize import running_statistics

OF_FIRST_RANK = (EvalCallback, CheckpointCallback, ProgressBarCallback)
"""Callbacks that only rank 0 calls: they evaluate, save or print."""


def generators_of_rank(seed: int | None) -> Generators:
    """
    :param seed: the seed of all ranks; None for one that numpy's global generator draws
    :return: generators of this rank, independent of those of others
    """
    n_generators = len(Generators._fields)
    entropy = np.random.randint(2**32, size=4, dtype=np.uint32).tolist() if seed is None else seed
    seeds = np.random.SeedSequence(entropy, n_children_spawned=n_generators * distributed.rank())
    return Generators(*map(np.random.default_rng, seeds.spawn(n_generators)))


class Report(NamedTuple):
    """What a rank tells the others after a rollout."""

    stops: bool
    """whether a callback wants to stop training"""
    infos: list[dict[str, Any]]
    """what Monitor says of each episode that ended"""
    moments: list[Moments]
    """of VecNormalize's statistics"""


class OnRank:
    """
    Wraps a callback in a group. Steps of the other ranks are counted. If a callback stops training, all ranks stop at
    the end of the rollout.

    :param callback: the callback
    :param n_others: environments of the other ranks
    """

    def __init__(self, callback: BaseCallback, n_others: int) -> None:
        self._callback = callback
        self._n_others = n_others
        self.stops = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._callback, name)

    def update_locals(self, locals_: dict[str, Any]) -> None:
        self._callback.model.num_timesteps += self._n_others  # the base class has counted its own
        self._callback.update_locals(locals_)

    def on_step(self) -> bool:
        self.stops |= not self._callback.on_step()
        for each in (self._callback, *getattr(self._callback, "callbacks", [])):
            if isinstance(each, ProgressBarCallback):  # it has counted this rank's environments
                each.pbar.update(self._n_others)
        return True


class DataParallelAlgorithm(RolloutAlgorithm):
    """
    Trains on all ranks of a group, if there is one. The ranks take the same number of steps, synchronise after each
    rollout and at each update, and stop together.

    ``learn`` begins with the parameters, the optimiser and the statistics of rank 0, and with generators of its own on
    each rank.
    """

    _infos: list[dict[str, Any]]
    """of the episodes that ended on this rank in the rollout under way"""
    _common: list[Moments]
    """of VecNormalize's statistics when they were last the same on all ranks"""

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), "_infos", "_common"]

    def _setup_learn(
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        reset_num_timesteps: bool = True,
        tb_log_name: str = "run",
        progress_bar: bool = False,
    ) -> tuple[int, BaseCallback]:
        if distributed.world_size() > 1:
            self._start_as_rank_0(total_timesteps, reset_num_timesteps)
            if distributed.rank() > 0:
                self.set_logger(Logger(None, []))
                callback, progress_bar = _without_first_ranks(callback), False
        return super()._setup_learn(total_timesteps, callback, reset_num_timesteps, tb_log_name, progress_bar)

    def _start_as_rank_0(self, total_timesteps: int, reset_num_timesteps: bool) -> None:
        """Let all ranks begin as rank 0 does."""
        call = {"total_timesteps": total_timesteps, "reset_num_timesteps": reset_num_timesteps}
        device = {"type of device": self.device.type}
        others = {name: getattr(self, name) for name in ("n_envs", "num_timesteps", "_log_interval")}
        sizes = ("n_slots", "step", "pos", "full")
        buffer = {f"replay_buffer.{name}": getattr(self.replay_buffer, name) for name in sizes}
        distributed.require_equal({**comparable_arguments(self), **device, **call, **others, **buffer})
        parameters, moments, n_replays = distributed.from_first(
            (self.get_parameters(), self._moments(), self._rngs.n_replays)
        )
        if distributed.rank() > 0:
            self.set_parameters(parameters, device=self.device)
        states = distributed.gather(self._rngs.actions.bit_generator.state)
        if any(state in states[:number] for number, state in enumerate(states)):  # ranks have loaded the same agent
            self._rngs = generators_of_rank(distributed.from_first(int(self._rngs.actions.integers(2**63))))
        self._rngs = self._rngs._replace(n_replays=n_replays)
        self._set_moments(moments)

    def collect_rollouts(self, env: VecEnv, callback: BaseCallback, *args: Any, **kwargs: Any) -> RolloutReturn:
        """Collect a rollout. A rank on which this fails lets all fail."""
        n_ranks = distributed.world_size()
        if n_ranks == 1:
            return super().collect_rollouts(env, callback, *args, **kwargs)
        on_rank = OnRank(callback, (n_ranks - 1) * env.num_envs)
        n_episodes = self._episode_num

        def collect() -> tuple[RolloutReturn, Report]:
            self._infos = []
            rollout = super(DataParallelAlgorithm, self).collect_rollouts(
                env, cast(BaseCallback, on_rank), *args, **kwargs
            )
            return rollout, Report(on_rank.stops, self._infos, self._moments())

        rollouts, reports = zip(*distributed.on_all_ranks(collect), strict=True)
        self._episode_num = n_episodes  # this rank's own are counted with the reports
        self._merge_reports(reports)
        stops = any(report.stops for report in reports)
        if stops:  # learn ends without an update on this rollout
            self.train(self.gradient_steps, self.batch_size)
        return cast(RolloutReturn, rollouts[distributed.rank()]._replace(continue_training=not stops))

    def _merge_reports(self, reports: Sequence[Report]) -> None:
        """Record what has happened on all ranks."""
        infos = [info for report in reports for info in report.infos]
        super()._update_info_buffer(infos, np.ones(len(infos), bool))
        self._episode_num += len(infos)
        of_ranks = zip(*(report.moments for report in reports), strict=True)
        self._set_moments(
            [distributed.pooled(common, each) for common, each in zip(self._common, of_ranks, strict=True)]
        )

    def _update_info_buffer(self, infos: list[dict[str, Any]], dones: np.ndarray | None = None) -> None:
        """In a group the episodes of all ranks are recorded after the rollout, in the same order on all ranks."""
        if distributed.world_size() == 1:
            super()._update_info_buffer(infos, dones)
            return
        assert dones is not None
        told = ("episode", "is_success")
        ended = [infos[env] for env in np.flatnonzero(dones)]
        self._infos += [{name: info[name] for name in told if name in info} for info in ended]

    def _statistics(self) -> list[RunningMeanStd]:
        """VecNormalize's."""
        return [] if self._vec_normalize_env is None else running_statistics(self._vec_normalize_env)

    def _moments(self) -> list[Moments]:
        return [Moments(each.mean, each.var, each.count) for each in self._statistics()]

    def _set_moments(self, moments: list[Moments]) -> None:
        self._common = moments
        for each, (mean, var, count) in zip(self._statistics(), moments, strict=True):
            each.mean, each.var, each.count = mean, var, count


def _without_first_ranks(callback: Any) -> Any:
    """A callback, or a list of such, without those that only rank 0 calls."""
    if isinstance(callback, OF_FIRST_RANK):
        return None
    if isinstance(callback, list):
        return [kept for each in callback if (kept := _without_first_ranks(each)) is not None]
    if isinstance(callback, CallbackList):
        return CallbackList(_without_first_ranks(callback.callbacks))
    if isinstance(callback, EventCallback):
        callback.callback = _without_first_ranks(callback.callback)
    return callback
