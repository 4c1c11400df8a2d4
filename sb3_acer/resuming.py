"""Training that can be interrupted: saved with everything that it depends on, and continued from there."""

import pickle
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import cloudpickle
import numpy as np
import torch as th
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import TensorBoardOutputFormat, configure
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, RolloutReturn
from stable_baselines3.common.vec_env import VecEnv

from sb3_acer import distributed
from sb3_acer.arguments import comparable_arguments, make_env
from sb3_acer.callbacks import all_callbacks, changed_attributes, plain_attributes, put_back
from sb3_acer.checkpoint import (
    Checkpoint,
    find_checkpoint,
    find_undamaged,
    is_checkpoint,
    locked,
    new_checkpoint,
    require_same_run,
)
from sb3_acer.checks import check_boolean, check_integer, require, warn
from sb3_acer.data_parallel import DataParallelAlgorithm, generators_of_rank
from sb3_acer.env_state import EnvStateError, Log, cut_logs, get_env_state, set_env_state
from sb3_acer.storage import named, opened, read_state, replacing, write_state

_AGENT, _BUFFER, _TRAINING = "agent.zip", "replay_buffer.npz", "training.npz"
_NOT_SAVED = "not saved: "
_OF_LEARN = ("_callback", "_attributes_at_start", "_is_within_rollout")
"""attributes of a call of learn, which are neither saved nor copied"""

SelfResumable = TypeVar("SelfResumable", bound="ResumableAlgorithm")


class CheckpointPlan(NamedTuple):
    """Where a call of learn saves checkpoints, and when."""

    folder: Path
    freq: int
    """steps between two checkpoints"""
    keep: int | None
    """how many of the newest are kept; None: the number that the last one was written with, 2 for the first one"""


class ResumableAlgorithm(DataParallelAlgorithm):
    """Saves its training with everything that this depends on, and continues it."""

    _run: str
    """id of the run, which all of its checkpoints have"""
    _resumed: dict[str, Any] | None = None
    """what has to be restored when training continues; None if none is to be continued"""
    _logs_to_cut: Sequence[Log] = ()
    """Monitor's files whose last rows are of steps that training will make again"""
    _n_rollouts = 0
    """of the last call of learn, with those before an interruption"""
    _arguments: dict[str, Any] | None = None
    """arguments of the agent when the last call of learn began, before callbacks could change them"""
    _checkpoints: CheckpointPlan | None = None
    """of the present call of learn"""
    _next_checkpoint = 0
    _is_within_rollout = False
    """whether a rollout's first step has begun: callbacks then see a step that is counted but not stored yet"""
    _callback: BaseCallback | None = None
    """of the last call of learn"""
    _attributes_at_start: list[dict[str, int]] | None = None
    """hashes of the callbacks' attributes when that call began; those that have changed since are counters"""

    def _excluded_save_params(self) -> list[str]:
        own = ("_resumed", "_logs_to_cut", "_continues", "_checkpoints", "_next_checkpoint", *_OF_LEARN)
        return [*super()._excluded_save_params(), *own]

    def __getstate__(self) -> dict[str, Any]:
        """All but what only a call of ``learn`` needs: callbacks refer to what cannot be copied."""
        self._notice_other_resets()
        return {name: value for name, value in vars(self).items() if name not in (*_OF_LEARN, "_finite_env")}

    def save_checkpoint(self, folder: str | Path, keep: int | None = None, *, with_env: bool = True) -> Path:
        """
        Save training with everything that it depends on: the agent with its generators, the replay buffer with the
        rollout under way, the random numbers of torch, numpy and Python, the counters of the logger and of the
        callbacks, and the state of the environments and their wrappers, see :mod:`sb3_acer.env_state`.

        To be called between two calls of ``learn``, or in a callback's ``_on_rollout_start``: in ``_on_step`` the
        present step is not stored yet, and in ``_on_rollout_end`` the update is still to come. Within ``learn`` its
        argument ``checkpoint`` does it between two rollouts. If the environments' state cannot be saved, a warning says
        so, and all else is saved.

        In a group all ranks call this, and each writes files of its own to the folder, which all must see.

        The files hold pickles, as SB3's agents do: load only your own.

        :param folder: folder of checkpoints. Once it has one it always has a whole one, even if the program is killed
            while it writes
        :param keep: how many of the newest checkpoints are kept; None: the number that the last one was written with, 2
            for the first one
        :param with_env: False if the environments are not between two steps. They will begin new episodes.
        :return: the checkpoint's own folder
        :raises ValueError: if the folder has checkpoints of another run, or another program writes to it; for an agent
            without environment; and within a rollout, unless ``with_env`` is False
        :raises OSError: if it cannot be written; the older ones are kept
        """
        self._require_ready("save_checkpoint")
        _require_folder("folder", "the path of a folder", folder)
        keep = None if keep is None else check_integer("keep", keep)
        check_boolean("with_env", with_env)
        if with_env and self._is_within_rollout:
            raise ValueError(
                "save_checkpoint must be called between two calls of learn, or in a callback's _on_rollout_start, got "
                f"a call within a rollout, at step {self.num_timesteps}. learn(checkpoint=...) saves on the way; "
                "with_env=False saves here too, without the environments' state"
            )
        training, source = self._training_state(with_env)
        manifest = {
            "run": self._run,
            "num_timesteps": self.num_timesteps,
            "started_at": self._num_timesteps_at_start,
            "total_timesteps": self._total_timesteps,
            "environment": source,
            "threads": th.get_num_threads(),
            "ranks": distributed.world_size(),
        }
        new = new_checkpoint(folder, manifest, keep) if distributed.rank() == 0 else nullcontext(Path(folder))
        with ExitStack() as stack:  # each step on all ranks, or an error on all
            files = distributed.on_all_ranks(lambda: stack.enter_context(new))[0]
            distributed.on_all_ranks(lambda: self._write_files(files, training))
            distributed.on_all_ranks(lambda: _require_files_of_all(files))
            distributed.on_all_ranks(stack.close)
        found = distributed.from_first(find_checkpoint(folder))
        assert found is not None
        if with_env and source.startswith(_NOT_SAVED) and distributed.rank() == 0:
            reason = source.removeprefix(_NOT_SAVED)
            warn(f"a continued run will begin new episodes, since the environments' state cannot be saved: {reason}")
        return found.path

    def _require_ready(self, call: str) -> None:
        rule = f"given before {call}, by ACER.load(path, env) or set_env(env)"
        require(self.env is not None, "env", rule, self.env)
        is_built = self.replay_buffer is not None
        require(is_built, "_init_setup_model", f"True, or setup_model() called before {call}", False)

    def _require_no_rollout(self) -> None:
        if self._is_within_rollout:
            raise ValueError(
                "learn must be called between two rollouts of the agent, got a call by a callback within one, at step "
                f"{self.num_timesteps}"
            )

    def _write_files(self, folder: Path, training: dict[str, Any]) -> None:
        """Write the files of this rank."""
        rank = distributed.rank()
        self.save(folder / _of_rank(_AGENT, rank))
        self.save_replay_buffer(folder / _of_rank(_BUFFER, rank))
        with replacing(folder / _of_rank(_TRAINING, rank), "npz") as file:
            write_state(file, training)

    @classmethod
    def load_checkpoint(
        cls: type[SelfResumable], folder: str | Path, env: GymEnv | str, device: th.device | str = "auto", **kwargs: Any
    ) -> SelfResumable:
        """
        Load the newest undamaged checkpoint; a warning names newer files that are damaged. The next :meth:`learn` then
        continues the call that was interrupted: called with the same arguments, it ends with the agent, the replay
        buffer and the logged values that it would have had without the interruption, equal to the bit on the same
        machine with the same number of threads. If that call was complete, ``reset_num_timesteps=False`` begins the
        next one.

        If the environments' state is not available, or if their number or that of the ranks has changed, they begin new
        episodes, and a warning says so. For another number of ranks the replay buffers are divided evenly.

        :param folder: folder of checkpoints, or of a single one
        :param env: the environment, or its id; made and wrapped as that of the saved training
        :param device: device of the networks
        :param kwargs: further arguments of :meth:`load`
        :raises ValueError: if there is no checkpoint, if all are damaged, or if another version of this package wrote
            the newest one
        """
        _require_folder("folder", "the path of a folder", folder)
        found = find_undamaged(folder)
        if found is None:
            raise ValueError(f"folder must have a checkpoint, got {str(folder)!r}")
        require(env is not None, "env", "made and wrapped as that of the saved training", env)
        model = cls._load_checkpoint(found, make_env(env, verbose=0), device, **kwargs)
        model._restore_env(found)
        return model

    @classmethod
    def _load_checkpoint(
        cls: type[SelfResumable], found: Checkpoint, env: GymEnv | None, device: th.device | str, **kwargs: Any
    ) -> SelfResumable:
        """The agent of a checkpoint. Its environments are as they were until :meth:`_restore_env` is called."""
        with named(found.path):
            n_ranks, threads = found.manifest["ranks"], found.manifest["threads"]
        is_same = n_ranks == distributed.world_size()
        rank = distributed.rank() if is_same else 0
        kwargs = {"force_reset": False, **kwargs}
        model = cls.load(found.path / _of_rank(_AGENT, rank), env, device=device, **kwargs)
        resumed = _read_training(found.path / _of_rank(_TRAINING, rank))
        buffers = [found.path / _of_rank(_BUFFER, each) for each in range(n_ranks)]
        if is_same:
            model.load_replay_buffer(buffers[rank], truncate_last_traj=False)
        else:
            model._take_share(buffers)
            resumed |= _random_states()
            others = f"there were {n_ranks} ranks, and now there are {distributed.world_size()}"
            resumed["env"] = resumed["env"]._replace(envs=None, source=others)
        model._resumed = resumed
        if "buffer_size" in kwargs:
            size = model.replay_buffer.buffer_size
            require(size == model.buffer_size, "buffer_size", f"{size}, as in the checkpoint", model.buffer_size)
        if threads != th.get_num_threads():
            warn(
                f"torch had {threads} threads when the checkpoint was saved, and now has {th.get_num_threads()}: "
                "results differ in their last bits"
            )
        return model

    def _take_share(self, buffers: Sequence[Path]) -> None:
        """
        Take new random generators, and an equal share of the saved rollouts, the newest ones. One buffer after the
        other is read, since each may fill much of the memory.
        """
        rank, n_ranks = distributed.rank(), distributed.world_size()
        draws = generators_of_rank(int(self._rngs.actions.integers(2**63)))
        self._rngs = draws._replace(n_replays=self._rngs.n_replays)
        mine = self.replay_buffer
        for index, path in enumerate(buffers):
            theirs = self._read_replay_buffer(path)
            mine = theirs.emptied(self.n_envs) if index == 0 else mine
            if theirs.n_envs != self.n_envs:  # with room for all of it, since the ranks together may have that
                theirs = theirs.with_envs(self.n_envs, -(-theirs.n_slots * theirs.n_envs // self.n_envs))
            n_kept = min(theirs.n_rollouts * len(buffers) // n_ranks, mine.n_slots) * n_ranks
            # The rollout of age a in this buffer has the number a * len(buffers) + index; each rank has every n-th one.
            numbers = range(index, n_kept, len(buffers))
            ages = [number // len(buffers) for number in numbers if number % n_ranks == rank]
            mine.add_rollouts(theirs, reversed(ages))
        self.replay_buffer = mine

    @contextmanager
    def _checkpointed(
        self,
        total_timesteps: int,
        reset_num_timesteps: bool,
        checkpoint: str | Path | None,
        checkpoint_freq: int,
        checkpoint_keep: int | None,
    ) -> Iterator[None]:
        """Within it SB3's ``learn`` saves checkpoints, and continues from one. Arguments as of :meth:`ACER.learn`."""
        if checkpoint is not None:
            _require_folder("checkpoint", "the path of a folder, or None", checkpoint)
            is_single = is_checkpoint(Path(checkpoint))
            require(not is_single, "checkpoint", "a folder of checkpoints, not one of them", str(checkpoint))
        found, folder = None, None if checkpoint is None else Path(checkpoint).absolute()
        writing = nullcontext() if folder is None or distributed.rank() else locked(folder)
        with ExitStack() as stack:
            distributed.on_all_ranks(lambda: stack.enter_context(writing))
            # This call may come from a callback of another call of learn, which then gets its own values back.
            stack.callback(vars(self).update, _checkpoints=self._checkpoints)
            if folder is not None:
                distributed.require_equal({"checkpoint_freq": checkpoint_freq, "checkpoint_keep": checkpoint_keep})
                found = self._join_run(folder, 0 if reset_num_timesteps else self.num_timesteps)
            self._checkpoints = None if folder is None else CheckpointPlan(folder, checkpoint_freq, checkpoint_keep)
            begins_next = not reset_num_timesteps and found is None and self.num_timesteps >= self._total_timesteps
            self._continues = self._resumed is not None and not begins_next
            if self._continues:
                self._warn_of_what_is_left(total_timesteps, reset_num_timesteps)
            else:
                self._arguments = comparable_arguments(self)
            first = self.num_timesteps if self._continues else None
            yield
            self._restore_process()  # if there was nothing left to be done
            if self._checkpoints is not None and self.num_timesteps != first:
                self.save_checkpoint(self._checkpoints.folder, self._checkpoints.keep)

    def _join_run(self, folder: Path, start: int) -> Checkpoint | None:
        """
        Continue the run that a folder has checkpoints of, if it has any.

        :param folder: folder of checkpoints
        :param start: number of steps before this call of learn
        :return: the newest checkpoint, None if there is none
        """
        self._run = distributed.from_first(self._run)
        found = distributed.on_all_ranks(lambda: find_undamaged(folder) if distributed.rank() == 0 else None)[0]
        if self._resumed is not None:
            distributed.on_all_ranks(lambda: require_same_run(folder, self._run))
            is_newest = found is None or found.manifest["num_timesteps"] <= self.num_timesteps
            rule = (
                f"a folder without later checkpoints than the one that was loaded, of step {self.num_timesteps}: load "
                "the newest one, or give another folder"
            )
            require(is_newest, "checkpoint", rule, found and str(found.path))
        elif found is not None:
            self._take_over(found, start)
        return found

    def _warn_of_what_is_left(self, total_timesteps: int, reset_num_timesteps: bool) -> None:
        start = self._num_timesteps_at_start
        if self.num_timesteps >= start + total_timesteps:
            warn(
                f"there is nothing left to train: the checkpoint is at step {self.num_timesteps}, and learn was asked "
                f"for {total_timesteps} steps from step {start} on. A longer run needs more steps, another run another "
                "folder"
            )
        elif not reset_num_timesteps and self.num_timesteps >= self._total_timesteps:
            warn(
                f"the finished call of learn that began at step {start} goes on until it has {total_timesteps} steps: "
                f"{start + total_timesteps - self.num_timesteps} more. For {total_timesteps} more steps give a new "
                "folder, or no checkpoint"
            )

    def _setup_learn(
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        reset_num_timesteps: bool = True,
        tb_log_name: str = "run",
        progress_bar: bool = False,
    ) -> tuple[int, BaseCallback]:
        if self._continues and self._resumed is not None:
            # The base class counts from the present step; the interrupted call began at another.
            start = self._num_timesteps_at_start
            rest = start + total_timesteps - self.num_timesteps
            custom_logger = self._custom_logger
            self._log_to(self._resumed["log_folder"])
            try:
                prepared = super()._setup_learn(rest, callback, False, tb_log_name, progress_bar)
            finally:
                self._num_timesteps_at_start, self._custom_logger = start, custom_logger
            self.start_time -= self._resumed["elapsed"]
        else:
            self._n_rollouts = 0
            prepared = super()._setup_learn(total_timesteps, callback, reset_num_timesteps, tb_log_name, progress_bar)
        self._callback, self._attributes_at_start = prepared[1], None
        if self._checkpoints is not None:
            self._plan_checkpoint(self._checkpoints.freq)
        return prepared

    def _log_to(self, folder: str) -> None:
        """
        Log to tensorboard where the interrupted call did, if that is in ``tensorboard_log``; the base class would take
        the newest folder.
        """
        if self.tensorboard_log is None or self._custom_logger or not folder:
            return
        if Path(folder).is_dir() and Path(self.tensorboard_log).resolve() in Path(folder).resolve().parents:
            self._logger = configure(folder, ["tensorboard", *(["stdout"] if self.verbose else [])])
            self._custom_logger = True
            for output in self._logger.output_formats:
                if isinstance(output, TensorBoardOutputFormat):  # what was logged after the checkpoint is logged again
                    output.writer.close()  # the next value opens another file
                    output.writer.purge_step = self.num_timesteps + 1

    def _plan_checkpoint(self, freq: int) -> None:
        self._next_checkpoint = (self.num_timesteps // freq + 1) * freq

    def collect_rollouts(self, env: VecEnv, callback: BaseCallback, *args: Any, **kwargs: Any) -> RolloutReturn:
        """Collect a rollout. Before it, all of training's state is that between two steps."""
        self._restore_process()
        if self._logs_to_cut:
            for each in (env, *self._callback_envs()):
                cut_logs(each, self._logs_to_cut)
            self._logs_to_cut = ()
        if self._checkpoints is not None and self.num_timesteps >= self._next_checkpoint:
            self.save_checkpoint(self._checkpoints.folder, self._checkpoints.keep)
            self._plan_checkpoint(self._checkpoints.freq)
        try:
            return super().collect_rollouts(env, callback, *args, **kwargs)
        finally:
            self._is_within_rollout = False

    def _sample_action(self, *args: Any, **kwargs: Any) -> tuple[np.ndarray, np.ndarray]:
        self._is_within_rollout = True
        return super()._sample_action(*args, **kwargs)

    def _take_over(self, found: Checkpoint, start: int) -> None:
        """
        Become the agent of a checkpoint. If it is refused, agent and environments stay as they are, except that the
        environments and the global random generators have been given the agent's seed.
        """
        with named(found.path):
            began, run = found.manifest["started_at"], found.manifest["run"]
        if run != self._run and self._n_updates:
            raise ValueError(
                f"checkpoint must be a folder for this agent alone, which has made {self._n_updates} updates; "
                f"{found.path.parent} has checkpoints of another run, which a new agent would continue"
            )
        if began != start:
            raise ValueError(
                f"checkpoint must be a folder for this call of learn alone, which starts at step {start}; "
                f"{found.path.parent} has checkpoints of one that started at step {began}"
            )
        saved = self._load_checkpoint(found, self.env, self.device)
        self._require_same_arguments(saved, found.path.parent)
        of_call = ("_checkpoints", "_log_interval", "_early_logs", "_use_masking")
        own = ("lr_schedule", "_own_schedule", "_logger", "_custom_logger", "verbose", "tensorboard_log", *of_call)
        saved._restore_env(found)
        if saved._n_updates < self._n_updates:
            lost = self._n_updates - saved._n_updates
            warn(f"the agent goes back to its checkpoint at step {saved.num_timesteps} and loses {lost} updates")
        for ours, theirs in zip(self.policy.parameters(), saved.policy.parameters(), strict=True):
            theirs.requires_grad_(ours.requires_grad)  # the program may have frozen layers
        vars(self).update({name: value for name, value in vars(saved).items() if name not in own})
        vars(self).pop("_finite_env", None)  # the environments are where the checkpoint has them
        if self.verbose and distributed.rank() == 0:
            print(f"Continuing from {found.path}, saved at step {self.num_timesteps}")

    def _require_same_arguments(self, saved: "ResumableAlgorithm", folder: Path) -> None:
        """A run continues with the arguments that it was begun with."""
        theirs = {**comparable_arguments(saved), **(saved._arguments or {})}
        for name, given in comparable_arguments(self).items():
            is_same = given == theirs[name] or (name == "seed" and given is None)
            require(is_same, name, f"{theirs[name]!r}, as in the checkpoint that learn continues in {folder}", given)

    def _training_state(self, with_env: bool) -> tuple[dict[str, Any], str]:
        """
        :return: what neither the agent's file nor the buffer's has, and where the environments' state is from, or why
            it is not saved
        """
        if self._resumed is not None:  # training has not continued since a checkpoint was loaded
            process = dict(self._resumed)
            pickled = {name: process.pop(name) for name in ("counters", "callback_envs", "logger")}
        else:
            elapsed = time.time_ns() - self.start_time if self.start_time else 0
            log_folder = self._logger.dir if self.tensorboard_log is not None and hasattr(self, "_logger") else None
            process = {"elapsed": elapsed, "log_folder": log_folder or "", **_random_states()}
            pickled = self._callback_states()
        assert self.env is not None
        env = get_env_state(self.env)
        if not with_env:
            env = env._replace(envs=None, source="training ended within a step")
        pickled["env"] = env
        source = env.source if env.envs is not None else f"{_NOT_SAVED}{env.source}"
        return {**process, "pickled": np.frombuffer(cloudpickle.dumps(pickled), np.uint8)}, source

    def _callback_states(self) -> dict[str, Any]:
        callbacks, logger = all_callbacks(self._callback), getattr(self, "_logger", None)
        recorded = ("name_to_value", "name_to_count", "name_to_excluded")  # since the log was last written
        return {
            "counters": [
                (type(callback).__qualname__, changed_attributes(callback, hashes))
                for callback, hashes in zip(callbacks, self._attributes_at_start or [], strict=False)
            ],
            "callback_envs": [get_env_state(env) for env in self._callback_envs()],
            "logger": {name: dict(getattr(logger, name)) for name in recorded if logger is not None},
        }

    def _callback_envs(self) -> list[VecEnv]:
        """Environments that callbacks use, such as those for evaluations; not the agent's own."""
        assert self.env is not None
        own = self.env.unwrapped
        values = [value for callback in all_callbacks(self._callback) for value in vars(callback).values()]
        return [value for value in values if isinstance(value, VecEnv) and value.unwrapped is not own]

    def _restore_env(self, found: Checkpoint) -> None:
        """Give the environments the state that they had at a checkpoint which has been loaded."""
        assert self.env is not None
        assert self._resumed is not None
        self._logs_to_cut = ()
        with named(found.path):
            try:
                self._logs_to_cut = set_env_state(self.env, self._resumed.pop("env"))
            except EnvStateError as error:
                warn(f"the environments begin new episodes, since their state is not known: {error}")
                self._last_obs = None  # learn resets the environments
                if self.seed is not None:
                    first = self.seed + self.num_timesteps + distributed.rank() * self.n_envs
                    self.env.seed(first % 2**32)  # not the episodes of the start again

    def _restore_process(self) -> None:
        """Restore callbacks' counters, logged values and global random generators, which the start of learn changes."""
        if self._attributes_at_start is None:
            present = [plain_attributes(callback) for callback in all_callbacks(self._callback)]
            self._attributes_at_start = [{name: hash(value) for name, value in each.items()} for each in present]
        resumed, self._resumed = self._resumed, None
        if resumed is None:
            return
        callbacks = all_callbacks(self._callback)
        saved = deque(resumed["counters"])
        for callback in callbacks:
            counters = next((pair for pair in saved if pair[0] == type(callback).__qualname__), None)
            if counters is not None:
                saved.remove(counters)
                for name, value in counters[1].items():
                    vars(callback)[name] = put_back(vars(callback).get(name), pickle.loads(value))
        for env, state in zip(self._callback_envs(), resumed["callback_envs"], strict=False):
            try:
                self._logs_to_cut = [*self._logs_to_cut, *set_env_state(env, state)]
            except (EnvStateError, ValueError) as error:
                warn(f"a callback's environment begins new episodes: {error}")
        for name, values in resumed["logger"].items():
            getattr(self.logger, name).update(values)
        _set_random_states(resumed)


def _require_folder(name: str, rule: str, folder: Any) -> None:
    require(isinstance(folder, (str, Path)) and folder != "" and not Path(folder).is_file(), name, rule, folder)


def _of_rank(name: str, rank: int) -> str:
    """The file of a rank."""
    return f"rank_{rank}_{name}" if rank else name


def _read_training(path: Path) -> dict[str, Any]:
    """What :meth:`ResumableAlgorithm._training_state` returned, from a rank's file of it."""
    with opened(path, "npz") as file, named(path):
        training = read_state(file, "the checkpoint")
        training.update(pickle.loads(training.pop("pickled").tobytes()))
        needed = {"env", "elapsed", "log_folder", "counters", "callback_envs", "logger", *_random_states()}
        missing = needed - set(training)
        if missing:
            raise ValueError(f"the checkpoint must be whole, got one without {', '.join(sorted(missing))}")
    return training


def _require_files_of_all(folder: Path) -> None:
    """Rank 0 makes a checkpoint of the files of all ranks: refuse a folder where it does not see them."""
    ranks = range(distributed.world_size()) if distributed.rank() == 0 else ()
    lacking = [rank for rank in ranks if not (folder / _of_rank(_TRAINING, rank)).is_file()]
    require(not lacking, "folder", f"on a disk that all ranks share; rank 0 lacks the files of {lacking}", str(folder))


def _random_states() -> dict[str, Any]:
    """States of the random generators that everything in a process shares."""
    version, numbers, gauss = random.getstate()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": np.random.get_state(legacy=False),
        "torch": th.get_rng_state(),
        "cuda": th.cuda.get_rng_state_all() if th.cuda.is_initialized() else [],  # type: ignore[no-untyped-call]
    }


def _set_random_states(states: dict[str, Any]) -> None:
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(states["numpy"])
    th.set_rng_state(th.as_tensor(states["torch"]))
    for device, state in enumerate(states["cuda"][: th.cuda.device_count()]):
        th.cuda.set_rng_state(th.as_tensor(state), device)
