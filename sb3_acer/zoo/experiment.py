"""rl-zoo's experiment with a report at the end: the agent's score, its learning curve and the next command."""

import glob
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from copy import copy
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, SupportsFloat
from unittest.mock import patch

import gymnasium as gym
import numpy as np
import optuna
import yaml
from optuna import create_study
from optuna.storages import BaseStorage
from rl_zoo3 import exp_manager
from rl_zoo3.exp_manager import ExperimentManager
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import ProgressBarCallback
from stable_baselines3.common.env_util import make_vec_env, unwrap_wrapper
from stable_baselines3.common.monitor import Monitor, ResultsWriter, load_results
from stable_baselines3.common.results_plotter import X_TIMESTEPS, ts2xy
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, is_vecenv_wrapped

from sb3_acer import ACER, distributed
from sb3_acer.callbacks import StopOnSignal
from sb3_acer.checkpoint import has_checkpoints
from sb3_acer.checks import check_integer, require
from sb3_acer.hyperparams import ENTRIES_FILE, hyperparams
from sb3_acer.storage import replacing
from sb3_acer.zoo.display import takes_render_mode
from sb3_acer.zoo.masking import evaluate_policy
from sb3_acer.zoo.mistakes import check_counts
from sb3_acer.zoo.plots import learning_curve
from sb3_acer.zoo.registration import (
    N_ENVS_RANGE,
    entry_of,
    nearest_trial,
    sample_acer_params,
    suggest,
    with_drawn,
)
from sb3_acer.zoo.runs import ARGUMENTS, CHECKPOINTS, LAUNCHERS, command, launcher, runs_of
from sb3_acer.zoo.study import begin_study, open_storage

CONTINUOUS = ENTRIES_FILE.with_name("continuous.py")
EVAL_EPISODES = 100
COUNTS = ("n_eval_envs", "eval_episodes", "n_trials", "max_total_trials", "n_evaluations")  # of the command line


class TrialNumber(int):
    """A trial's number, true even if it is 0: the zoo would take trial 0 for no trial and use the entry's values."""

    def __bool__(self) -> bool:
        return True


class TrialRun:
    """
    The trial as a training run of it sees it.

    :param trial: the trial
    :param is_first: whether the run reports its evaluations and can be pruned by them
    :param fixed: settings that are not sampled
    :param policy_kwargs: of the entry, which those sampled replace in part
    """

    def __init__(
        self, trial: optuna.Trial, is_first: bool, fixed: dict[str, Any], policy_kwargs: dict[str, Any]
    ) -> None:
        self.trial = trial
        self.is_first = is_first
        self.fixed = fixed
        self.policy_kwargs = policy_kwargs
        self.evaluations: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.trial, name)

    def report(self, value: float, step: int) -> None:
        self.evaluations.append(value)
        if self.is_first:
            self.trial.report(value, step)

    def should_prune(self) -> bool:
        return self.is_first and self.trial.should_prune()

    def value(self) -> float:
        """Mean of the second half of the evaluations: a run that loses what it has learnt is worth less."""
        return np.mean(self.evaluations[len(self.evaluations) // 2 :]).item()


class Truncations(gym.Wrapper[Any, Any, Any, Any]):
    """Records an episode that a wrapper around Monitor has truncated: SB3's evaluation counts what Monitor records."""

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        if truncated and "episode" not in info:
            monitor = unwrap_wrapper(self.env, Monitor)
            assert isinstance(monitor, Monitor)
            seconds = round(time.time() - monitor.t_start, 6)
            episode = info["episode"] = {"r": sum(monitor.rewards), "l": len(monitor.rewards), "t": seconds}
            if monitor.results_writer is not None:
                told = {name: info[name] for name in monitor.info_keywords}
                monitor.results_writer.write_row({**episode, **monitor.current_reset_info, **told})
        return observation, reward, terminated, truncated, info


class Experiment(ExperimentManager):
    """The zoo's experiment, which prints a report after training and tuning."""

    n_runs = 1
    """training runs of a trial, whose value is half their mean and half the worst of them"""
    evaluates_often = True
    """whether evaluations are made ten times in a run, if that is more often than ``eval_freq`` says"""
    checkpoint_freq: int | None = None
    """steps between two checkpoints; None for no checkpoints"""
    can_render = True
    """whether the environment can be rendered"""
    arguments: Sequence[str] = ()
    """of the command line, for a run that is continued"""
    resumed: Path | None = None
    """folder of the run to continue"""
    stopped_by = 0
    """number of the signal that ended training"""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        is_plain = glob.escape(self.log_folder) == self.log_folder
        require(is_plain, "--log-folder", "a path without *, ? and [, which rl-zoo takes for patterns", self.log_folder)
        check_counts(self.args, COUNTS, n_timesteps="the entry's", num_threads="torch's default", n_jobs="one per core")
        is_interval = getattr(self.args, "log_interval", -1) != 0
        require(is_interval, "--log-interval", "at least 1, -1 for the default, or less for no log", 0)
        self.fixed: dict[str, Any] = self.custom_hyperparams or {}  # of -params
        for name in ("policy", "policy_kwargs"):  # the zoo would leave them out without a word
            is_allowed = name not in self.fixed or not self.continue_training
            require(is_allowed, f"-params {name}", "left out with -i, whose agent has its own", self.fixed.get(name))
        if self.trial_id is not None:
            is_found = self.storage is not None and self.study_name is not None
            require(is_found, "--trial-id", "given with --storage and --study-name", self.trial_id)
            assert self.storage is not None
            require(self.trial_id >= 0, "--trial-id", "the number of a trial", self.trial_id)
            path = self.storage.removeprefix("sqlite:///")
            if path != self.storage or path.endswith(".log"):
                is_there = Path(path.partition("?")[0]).is_file()
                require(is_there, "--storage", "the file of a study", self.storage)
            else:
                open_storage(self.storage)  # exits if it cannot be opened
            self.trial_id = TrialNumber(self.trial_id)
        if self.resumed is not None:
            self.save_path = str(self.resumed)
        self.save_path = distributed.from_first(self.save_path)  # others may find that it has been created
        self.params_path = f"{self.save_path}/{self.env_name}"

    def read_hyperparameters(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """
        The zoo's. Of acer.yml, continuous actions have another ``default`` than the others. Numbers like ``5e-4``,
        which YAML takes for strings, are numbers.

        :raises ValueError: if the run to continue was begun with others
        """
        if self.config == str(ENTRIES_FILE) and self.env_name.gym_id not in hyperparams and not self._is_atari:
            env = gym.make(self.env_name.gym_id, **self.env_kwargs)
            if isinstance(env.action_space, gym.spaces.Box):
                self.config = str(CONTINUOUS)
            env.close()
        both = used, saved = super().read_hyperparameters()
        for settings in both:
            settings.update({name: _number_of(value) for name, value in settings.items()})
            for name in ("frame_stack", "vec_env_wrapper"):
                if settings.get(name, 0) is None:  # the zoo's enjoy takes no None
                    del settings[name]
        if isinstance(saved.get("normalize"), dict):  # the zoo writes gamma into it, and takes an empty one for False
            used["normalize"], saved["normalize"] = dict(saved["normalize"]), saved["normalize"] or True
        if self.resumed is not None:
            self._require_same_settings(saved)
        check_settings(saved)
        self.saved_hyperparams = saved
        return used, saved

    @staticmethod
    def _preprocess_schedules(hyperparams: dict[str, Any]) -> dict[str, Any]:
        try:
            return ExperimentManager._preprocess_schedules(hyperparams)
        except ValueError as error:
            rule = "learning_rate and clip_range must be numbers, or 'lin_NUMBER' for one that falls to 0"
            raise ValueError(f"{rule}: {error}") from error

    def _require_same_settings(self, hyperparams: dict[str, Any]) -> None:
        """Refuse settings that differ from those of the run to continue, except the ones that may change."""
        config, args = (
            dict(yaml.unsafe_load(Path(self.params_path, name).read_text())) for name in ("config.yml", "args.yml")
        )
        before = {**config, "--env-kwargs": args["env_kwargs"]}
        given = {**hyperparams, "--env-kwargs": self.args.env_kwargs}
        for name in sorted({*before, *given} - {"n_timesteps", "n_envs", "callback"}):
            rule = repr(before[name]) if name in before else "left out"
            require(before.get(name) == given.get(name), name, f"{rule}, as in the run to resume", given.get(name))

    def create_callbacks(self) -> None:
        """The zoo's callbacks evaluate, save and print. They are called once for ``n_envs`` steps of each rank."""
        self.n_envs = check_integer("n_envs", self.n_envs)
        self.eval_env_kwargs = self.eval_env_kwargs or self.env_kwargs  # the zoo leaves out those of the entry
        if self.evaluates_often:
            self.eval_freq = min(self.eval_freq, max(int(self.n_timesteps) // 10, 1))
        if distributed.rank() == 0:
            n_envs = self.n_envs
            self.n_envs *= distributed.world_size()
            super().create_callbacks()  # type: ignore[no-untyped-call]
            self.n_envs = n_envs

    def _preprocess_hyperparams(self, hyperparams: dict[str, Any]) -> tuple[Any, ...]:
        hyperparams, wrapper, *others = super()._preprocess_hyperparams(hyperparams)
        return hyperparams, wrapper and (lambda env: Truncations(wrapper(env))), *others

    def create_envs(self, n_envs: int, eval_env: bool = False, no_log: bool = False) -> VecEnv:
        goes_on = self.resumed is not None and not eval_env and not no_log
        starts = self._monitor_starts(n_envs) if goes_on else []
        if self.resumed is not None:
            self.monitor_kwargs = {**self.monitor_kwargs, "override_existing": False}
        numbered = partial(make_vec_env, start_index=distributed.rank() * n_envs)  # the files of monitors
        with patch.object(exp_manager, "make_vec_env", numbered) if distributed.rank() else nullcontext():
            env = super().create_envs(n_envs, eval_env, no_log)
        loads = is_vecenv_wrapped(env, VecNormalize) and not self.normalize
        require(not loads, "normalize", "set, since the agent of -i has statistics of it", self.normalize)
        for index, start in enumerate(starts):
            env.set_attr("t_start", start, index)
        has_modes = bool(env.get_attr("metadata")[0].get("render_modes"))
        self.can_render = has_modes and takes_render_mode(self.env_name.gym_id)
        return env

    def _monitor_starts(self, n_envs: int) -> list[float]:
        """
        When the monitors' files of a resumed run began: the times in them count from there. Files that are missing or
        empty begin now, since Monitor writes no header where it appends.
        """
        starts, first = [], distributed.rank() * n_envs
        for path in (Path(self.save_path, f"{number}.{Monitor.EXT}") for number in range(first, first + n_envs)):
            if not path.exists() or path.stat().st_size == 0:
                keys = (*self.monitor_kwargs.get("reset_keywords", ()), *self.monitor_kwargs.get("info_keywords", ()))
                header: dict[str, float | str] = {"t_start": time.time(), "env_id": str(self.env_name.gym_id)}
                ResultsWriter(str(path), header, keys).close()
            with path.open() as file:
                starts.append(float(json.loads(file.readline()[1:])["t_start"]))
        return starts

    def setup_experiment(self) -> tuple[BaseAlgorithm, dict[str, Any]] | None:
        """
        The zoo's; if the settings are wrong, no folder of a run stays behind. A search makes its agents only in its
        trials, so one agent is made beforehand: wrong settings are refused at once, as in train.
        """
        existed = Path(self.save_path).exists()
        try:
            prepared = super().setup_experiment()
            if prepared is None and self.algo == "acer":
                env = self.create_envs(self.n_envs, no_log=True)
                ACER(env=env, device=self.device, **self._hyperparams)
                env.close()
            return prepared
        except BaseException:
            is_begun = Path(self.params_path, "config.yml").exists()  # by another process, at the same moment
            if distributed.rank() == 0 and not existed and not is_begun:
                shutil.rmtree(self.save_path, ignore_errors=True)
            raise

    def load_trial(
        self, storage: str, study_name: str, trial_id: int | None = None, convert: bool = True
    ) -> dict[str, Any]:
        try:
            settings = super().load_trial(storage, study_name, trial_id, convert)
        except (KeyError, IndexError) as error:  # of optuna and of the zoo
            raise ValueError(
                f"--trial-id must be the number of a trial of study {study_name!r} in {storage}, got {trial_id}"
            ) from error
        if self.algo == "acer" and "policy_kwargs" in settings:
            settings["policy_kwargs"] = with_drawn(self._policy_kwargs_of_entry(), settings["policy_kwargs"])
        return settings

    def _policy_kwargs_of_entry(self) -> dict[str, Any]:
        """The zoo replaces them by the trial's before it returns the entry, so the entry is read once more."""
        reader = copy(self)
        reader.trial_id = reader.custom_hyperparams = None
        with redirect_stdout(StringIO()):
            given = super(Experiment, reader).read_hyperparameters()[0].get("policy_kwargs") or {}
        return dict(eval(given, vars(exp_manager)) if isinstance(given, str) else given)

    def _save_config(self, saved_hyperparams: dict[str, Any]) -> None:
        if self.resumed is None:
            self._save_settings()

    def _save_settings(self) -> None:
        """Write down settings and arguments. A resumed run keeps its own until training goes on with others."""
        launchers = distributed.gather(launcher())
        if distributed.rank() > 0:
            return
        line = Path(self.params_path, "command.txt")
        before = line.read_text().rstrip("\n") + "\n" if line.exists() else ""  # of a run that is resumed
        self.saved_hyperparams["n_timesteps"] = self.n_timesteps  # -n counts, in the zoo's benchmark as well
        super()._save_config(self.saved_hyperparams)
        line.write_text(before + line.read_text().rstrip("\n") + "\n")
        if "TORCHELASTIC_RESTART_COUNT" in os.environ:  # of torchrun
            with replacing(Path(self.save_path, LAUNCHERS), "json") as file:
                file.write(json.dumps(launchers).encode())
        if self.checkpoint_freq is not None:
            drawn = [f"--checkpoint-freq={self.checkpoint_freq}", f"--seed={self.seed}"]
            with replacing(Path(self.save_path, ARGUMENTS), "json") as file:
                file.write(json.dumps([*self.arguments, *drawn]).encode())

    def learn(self, model: BaseAlgorithm) -> None:
        """
        Train as the zoo does. The agent is saved when training ends, also by an error if a step was made. With
        ``checkpoint_freq`` a checkpoint is saved then too, but not after a second signal or an error in a group.
        """
        if not isinstance(model, ACER):
            super().learn(model)
            return
        folder = Path(self.save_path)
        stop = StopOnSignal(self._save_settings if self.resumed is not None else lambda: None)
        # The last: a signal that comes during an evaluation ends training at that step.
        kwargs: dict[str, Any] = {"callback": [*self.callbacks, stop]}
        if self.log_interval != -1:
            kwargs["log_interval"] = self.log_interval if self.log_interval >= 0 else None
        if self.checkpoint_freq is not None:
            kwargs |= {"checkpoint": folder / CHECKPOINTS, "checkpoint_freq": self.checkpoint_freq}
        has_failed = True
        try:
            with stop.listening():
                model.learn(self.n_timesteps, **kwargs)
                stop.stopped_by = max(distributed.gather(stop.stopped_by))  # not every rank may have got the signal
            has_failed = False
        except KeyboardInterrupt:  # a second signal
            pass
        except Exception as error:
            if isinstance(error, ValueError) and self.resumed is not None and stop.start is None:
                sys.exit(f"sb3-acer train: {error}")
            if stop.has_trained() and distributed.rank() == 0:
                super().save_trained_model(model)
                print(f"Agent: {self.save_path}/{self.env_name}.zip", flush=True)
                if self.checkpoint_freq is not None and distributed.world_size() == 1:  # else of all ranks, or none
                    model.save_checkpoint(folder / CHECKPOINTS, with_env=False)
            # Ctrl-C ends the processes of environments too.
            if isinstance(error, distributed.RankError) or not stop.stopped_by:
                raise
        finally:
            self.stopped_by = stop.stopped_by
            for callback in self.callbacks if has_failed else []:
                if isinstance(callback, ProgressBarCallback) and hasattr(callback, "pbar"):
                    callback.on_training_end()  # else it stays on the screen
            assert model.env is not None
            model.env.close()

    def objective(self, trial: optuna.Trial) -> float:
        experiment = copy(self)  # trials may run in parallel threads
        of_entry = self._hyperparams.get("policy_kwargs") or {}
        runs: list[Any] = [TrialRun(trial, number == 0, self.fixed, of_entry) for number in range(self.n_runs)]
        values: list[float] = []
        if self.algo == "acer":
            suggest(runs[0], N_ENVS_RANGE)
            if "n_envs_pow" in trial.params:
                experiment.n_envs = 2 ** trial.params["n_envs_pow"]
            sampled = sample_acer_params(runs[0], self.n_actions, experiment.n_envs, {})
            # train --trial-id normalises with the trial's gamma; the zoo's trials would use the entry's.
            experiment.normalize_kwargs = {**self.normalize_kwargs, "gamma": {**self._hyperparams, **sampled}["gamma"]}
        for number, run in enumerate(runs):
            if self.optimization_log_path is not None and self.n_runs > 1:
                experiment.optimization_log_path = f"{self.optimization_log_path}/run_{number}"
            try:
                last = super(Experiment, experiment).objective(run)
            except ValueError as error:  # such as a fixed burn_in and a smaller n_steps
                raise optuna.TrialPruned(str(error)) from error
            values.append(run.value() if run.evaluations else last)
            if number > 0:
                trial.report(trial_value(values), len(runs[0].evaluations) + number)
                if trial.should_prune():
                    raise optuna.TrialPruned
        return trial_value(values)

    def hyperparameters_optimization(self) -> None:
        create: Callable[..., optuna.Study] = create_study
        prints_entry = bool(self.storage) and self.algo == "acer"
        if self.storage:
            storage = open_storage(self.storage)  # tries several times, the zoo only once, and has a heartbeat
            if self.algo == "acer" and self.study_name:
                options = {
                    "--env": str(self.env_name.gym_id),
                    "--env-kwargs": str(dict(sorted(self.env_kwargs.items()))),
                    "-n": int(self.n_timesteps),
                    "--n-evaluations": self.n_evaluations,
                    "--eval-episodes": self.n_eval_episodes,
                    "--n-runs": self.n_runs,
                    "-params": str(dict(sorted(self.fixed.items()))),
                }
                begin_study(storage, self.study_name, nearest_trial(self._hyperparams, self.n_envs), options)
            create = partial(_create_study, storage)
        try:
            with (
                patch.object(optuna, "create_study", create),
                patch.object(exp_manager, "print", without_params if prints_entry else print, create=True),
            ):
                super().hyperparameters_optimization()
        except ValueError as error:
            sys.exit(f"No best trial: {error}")
        if prints_entry:
            assert self.storage is not None
            study = optuna.load_study(storage=open_storage(self.storage), study_name=self.study_name)
            of_entry = self._hyperparams.get("policy_kwargs") or {}
            entry = entry_of(self.env_name.gym_id, self.saved_hyperparams, study.best_trial.params, of_entry)
            print(f"Its settings, as an entry for a file of -conf:\n\n{entry}")

    def save_trained_model(self, model: BaseAlgorithm) -> None:
        if distributed.rank() > 0:
            if self.stopped_by:
                sys.exit(128 + self.stopped_by)
            return
        super().save_trained_model(model)
        agent = f"{self.save_path}/{self.env_name}.zip"
        print(f"Agent: {agent}", flush=True)
        if self.stopped_by == signal.SIGTERM:  # there may be no time for more
            sys.exit(128 + self.stopped_by)
        self.draw_learning_curve()
        if self.eval_freq > 0 and not self.stopped_by:  # otherwise the user has asked for no evaluation, or for an end
            self.evaluate(model, agent)
        self.print_next_commands()
        if self.stopped_by:
            sys.exit(128 + self.stopped_by)

    def print_next_commands(self) -> None:
        """How to watch the agent, and how to go on with a run that was stopped."""
        of_run = self.algo, self.env_name.gym_id, self.log_folder, getattr(self.args, "gym_packages", [])
        path = Path(self.save_path)
        is_newest = runs_of(*of_run[:3])[0][1] == path
        number = "" if is_newest else f" {path.name.removeprefix(f'{self.env_name}_')}"
        if not getattr(self.args, "uuid", False):  # enjoy finds runs by their numbers
            options = f"{number and ' --exp-id'}{number}{'' if self.can_render else ' --no-render'}"
            print(f"To watch the agent: {command('enjoy', *of_run)}{options}")
        if self.stopped_by and self.checkpoint_freq is not None and has_checkpoints(path / CHECKPOINTS):
            n_ranks = distributed.world_size()
            ranks = f" (under torchrun with {n_ranks} processes)" if n_ranks > 1 else ""
            print(f"To go on: {command('train', *of_run)} --resume{number}{ranks}")

    def evaluate(self, model: BaseAlgorithm, agent: str) -> None:
        self.verbose = 0
        self.trained_agent = agent  # makes the zoo load this run's VecNormalize statistics instead of starting new ones
        env: VecEnv | None = None
        # First as the entry means it. A stochastic policy may score quite differently in the other way.
        for deterministic in [self.deterministic_eval, not self.deterministic_eval][: 1 + isinstance(model, ACER)]:
            kind = "deterministic" if deterministic else "stochastic"
            print(f"Evaluating over {EVAL_EPISODES} episodes ({kind} actions)", flush=True)
            env = env or self.create_envs(self.n_eval_envs, eval_env=True)
            env.seed(self.seed)  # the same initial states for both kinds
            mean, std = evaluate_policy(model, env, EVAL_EPISODES, deterministic=deterministic)
            print(f"Mean reward: {mean:.2f} +/- {std:.2f}")
        assert env is not None
        env.close()

    def draw_learning_curve(self) -> None:
        episodes = load_results(self.save_path)
        if len(episodes) == 0:
            print("Learning curve: none, since no episode has ended")
            return
        steps, rewards = ts2xy(episodes, X_TIMESTEPS)
        figure = learning_curve(steps, rewards, f"{self.algo.upper()} on {self.env_name.gym_id}")
        path = f"{self.save_path}/learning_curve.png"
        figure.savefig(path, dpi=150)
        print(f"Learning curve: {path}")


def trial_value(values: Sequence[float]) -> float:
    """The value of a trial, from those of its runs: settings that fail now and then should not win."""
    return (np.mean(values).item() + min(values)) / 2


def _create_study(opened: BaseStorage, **kwargs: Any) -> optuna.Study:
    """``optuna.create_study`` in a storage that is open. A study that goes on has new draws, whatever ``--seed`` is."""
    study = create_study(**{**kwargs, "storage": opened})
    if any(trial.state.is_finished() for trial in study.trials):
        study.sampler.reseed_rng()
    return study


def without_params(*values: Any, **kwargs: Any) -> None:
    """The zoo's print of the best trial, without the tuner's own parameters such as ``one_minus_alpha``."""
    if not str(values[0]).startswith(("    ", "Params", "User Attributes")):
        print(*values, **kwargs)


def _number_of(value: Any) -> Any:
    """The value of a string in exponential notation; another value as it is."""
    if not isinstance(value, str) or re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value) is None:
        return value
    number = float(value)
    return int(number) if number.is_integer() else number


def check_settings(settings: dict[str, Any]) -> None:
    """
    :param settings: of an entry or of -params
    :raises ValueError: for what the zoo would trip over
    """
    for name in ("seed", "verbose", "device"):
        require(name not in settings, name, f"given as --{name}", settings.get(name))
    require(isinstance(settings.get("env_kwargs", {}), dict), "env_kwargs", "a dict", settings.get("env_kwargs"))
    monitor = settings.get("monitor_kwargs", {})
    require(isinstance(monitor, (dict, str)), "monitor_kwargs", "a dict, or its text", monitor)
    policy, callbacks = settings.get("policy", ""), settings.get("callback") or []
    require(isinstance(policy, str), "policy", "a name, or MODULE.CLASS", policy)
    wrappers = str(settings.get("vec_env_wrapper"))
    is_other = "VecNormalize" not in wrappers
    require(is_other, "vec_env_wrapper", "without VecNormalize, whose statistics normalize:True keeps", wrappers)
    listed = callbacks if isinstance(callbacks, list) else [callbacks]
    is_named = all(isinstance(each, dict) or (isinstance(each, str) and "." in each) for each in listed)
    require(is_named, "callback", "MODULE.CLASS, or a list of such names", callbacks)
    if "frame_stack" in settings:
        check_integer("frame_stack", settings["frame_stack"])
