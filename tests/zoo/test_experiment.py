"""What training and tuning save and report."""

import errno
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import optuna
import pytest
import torch as th
import yaml
from optuna.distributions import IntDistribution
from rl_zoo3.exp_manager import ExperimentManager
from stable_baselines3 import A2C
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.monitor import Monitor, load_results
from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv

from sb3_acer import ACER, distributed
from sb3_acer.callbacks import StopOnSignal
from sb3_acer.checkpoint import find_checkpoint
from sb3_acer.hyperparams import ENTRIES_FILE
from sb3_acer.zoo import commands, experiment, registration, runs
from sb3_acer.zoo.experiment import Truncations, _number_of
from sb3_acer.zoo.masking import Algorithms
from sb3_acer.zoo.registration import convert_acer_params, entry_of
from sb3_acer.zoo.study import open_storage
from tests.zoo.conftest import HYPERPARAMS, SEARCH, SHORT_RUN, finished_trials, sb3_acer

# Episodes of 200 steps: one environment and one episode are enough.
PENDULUM = ("--env", "Pendulum-v1", "--n-eval-envs", "1", "--eval-episodes", "1")


def test_train_says_where_the_agent_is_and_how_good_it_is(trained: tuple[Path, str]) -> None:
    folder, printed = trained
    lines = printed.splitlines()
    assert "Agent: logs/acer/CartPole-v1_1/CartPole-v1.zip" in lines
    assert "Learning curve: logs/acer/CartPole-v1_1/learning_curve.png" in lines
    said = "\n".join(lines)
    assert said.index("(deterministic actions)") < said.index("(stochastic actions)")
    means = [line.removeprefix("Mean reward: ") for line in lines if line.startswith("Mean reward: ")]
    assert len(means) == 2
    for reward, deviation in (map(float, mean.split(" +/- ")) for mean in means):
        assert 1 <= reward <= 500
        assert deviation >= 0
    assert "To watch the agent: sb3-acer enjoy" in lines
    assert isinstance(ACER.load(folder / "logs/acer/CartPole-v1_1/CartPole-v1.zip"), ACER)
    assert (folder / "logs/acer/CartPole-v1_1/learning_curve.png").read_bytes().startswith(b"\x89PNG")


def test_both_kinds_of_actions_are_evaluated_from_the_same_initial_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[Any] = []

    def spy(model: ACER, env: VecEnv, n_eval_episodes: int, deterministic: bool) -> tuple[float, float]:
        starts.append(env.reset())
        env.reset()
        return 0.0, 0.0

    monkeypatch.setattr(experiment, "evaluate_policy", spy)
    sb3_acer("train", *SHORT_RUN, "--n-eval-envs", "2", cwd=tmp_path)
    deterministic, sampled = starts
    np.testing.assert_array_equal(deterministic, sampled)


def test_the_arguments_of_an_entrys_environment_hold_wherever_it_is_made(tmp_path: Path) -> None:
    conf = tmp_path / "conf.yml"
    entry = {"n_timesteps": 200, "policy": "MlpPolicy", "env_kwargs": {"sutton_barto_reward": True}}
    conf.write_text(yaml.safe_dump({"CartPole-v1": entry}))
    evaluated = ("--eval-freq", "100", "--eval-episodes", "2", "--n-eval-envs", "1")
    printed = sb3_acer("train", "-conf", str(conf), *evaluated, cwd=tmp_path)
    assert printed.count("Mean reward: -1.00 +/- 0.00") == 2  # -1 at the end of an episode
    assert (np.load(next(tmp_path.rglob("evaluations.npz")))["results"] == -1).all()
    assert "Mean reward: -1.00" in sb3_acer("enjoy", "--no-render", "-n", "600", cwd=tmp_path)


def test_train_leaves_what_the_zoos_own_script_leaves_and_the_picture(trained: tuple[Path, str]) -> None:
    run = trained[0] / "logs/acer/CartPole-v1_1"
    films = (".mp4", ".gif")  # of enjoy
    assert {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file() and path.suffix not in films} == {
        "CartPole-v1.zip",
        "CartPole-v1/args.yml",
        "CartPole-v1/command.txt",
        "CartPole-v1/config.yml",
        "CartPole-v1/vecnormalize.pkl",
        "0.monitor.csv",
        "1.monitor.csv",
        "best_model.zip",
        "evaluations.npz",
        "learning_curve.png",
    }
    with np.load(run / "evaluations.npz") as evaluations:  # ten in a run, whatever its length
        assert evaluations["timesteps"].tolist() == list(range(60, 601, 60))
    arguments = yaml.unsafe_load((run / "CartPole-v1/args.yml").read_text())
    arguments = dict(arguments)
    assert (arguments["algo"], arguments["n_timesteps"], arguments["seed"]) == ("acer", 600, 1)
    assert arguments["conf_file"] == str(ENTRIES_FILE)


def test_the_final_evaluation_sees_observations_normalised_as_in_training(
    shell: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "EVAL_EPISODES", 2)
    commands.main(["train", *SHORT_RUN, "normalize:True"])
    printed = capsys.readouterr().out
    assert printed.index("Evaluating over 2 episodes") < printed.index("Loading saved VecNormalize stats")


def test_who_asks_for_no_evaluation_gets_none(shell: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands.main(["train", *SHORT_RUN, "--eval-freq", "-1"])
    printed = capsys.readouterr().out
    assert "Agent: logs" in printed
    assert "Evaluating" not in printed


def test_training_saves_all_that_it_is_asked_to(continued: tuple[Path, str]) -> None:
    run = continued[0] / "logs/acer/CartPole-v1_1"
    agents = {"CartPole-v1.zip", "best_model.zip", "rl_model_200_steps.zip", "rl_model_400_steps.zip"}
    records = {"replay_buffer.pkl", "0.monitor.csv", "1.monitor.csv", "evaluations.npz", "learning_curve.png"}
    assert {path.name for path in run.iterdir() if path.is_file()} == agents | records
    assert (run / "CartPole-v1/vecnormalize.pkl").exists()
    evaluations = np.load(run / "evaluations.npz")
    np.testing.assert_array_equal(evaluations["timesteps"], [100, 200, 300, 400])
    assert evaluations["results"].shape == (4, 3)


def test_tensorboard_gets_what_acer_logs(continued: tuple[Path, str]) -> None:
    (run,) = (continued[0] / "tensorboard/CartPole-v1").glob("ACER_1")
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = event_accumulator.EventAccumulator(str(run)).Reload()
    tags = set(events.Tags()["scalars"])
    assert {"train/trust_region_active", "train/q_loss", "eval/mean_reward", "rollout/ep_rew_mean"} <= tags
    assert events.Scalars("train/q_loss")[-1].step == 448


def test_training_goes_on_with_the_agent_and_its_replay_buffer(continued: tuple[Path, str]) -> None:
    folder, printed = continued
    assert "Loading pretrained agent" in printed
    assert "Loading replay buffer" in printed
    models = []
    for run in (1, 2):
        path = folder / f"logs/acer/CartPole-v1_{run}"
        models.append(ACER.load(path / "CartPole-v1.zip"))
        models[-1].load_replay_buffer(path / "replay_buffer.pkl")
    first, second = (model.replay_buffer.size() for model in models)
    assert (first, second) == (224, 448)
    assert models[1]._n_updates > models[0]._n_updates


@pytest.mark.parametrize("frame_stack", [2, 3])
def test_frames_are_stacked_over_normalised_observations(frame_stack: int, shell: Path) -> None:
    """Every off-policy class of SB3 crashes there: https://github.com/DLR-RM/stable-baselines3/issues/693"""
    entry = {**HYPERPARAMS["CartPole-v1"], "normalize": True, "frame_stack": frame_stack, "n_envs": 2}
    (shell / "both.yml").write_text(yaml.safe_dump({"CartPole-v1": entry}))
    sb3_acer("train", "-conf", "both.yml", *SHORT_RUN, cwd=shell)
    model = ACER.load(shell / "logs/acer/CartPole-v1_1/CartPole-v1.zip")
    assert model.observation_space.shape == (4 * frame_stack,)
    assert model._n_updates > 600 // 64
    assert "Mean reward: " in sb3_acer("enjoy", "--no-render", "-n", "600", cwd=shell)  # an episode has at most 500


def test_a_search_begins_with_the_entry_and_once(shell: Path) -> None:
    for n_trials in (1, 2):
        sb3_acer("tune", *SEARCH, "--n-trials", "1", cwd=shell)
        first, *others = [convert_acer_params(trial.params) for trial in finished_trials("logs/acer/CartPole-v1.log")]
        assert len(others) == n_trials - 1
    entry = HYPERPARAMS["CartPole-v1"]
    for name in (
        "n_envs",
        "n_steps",
        "batch_size",
        "replay_ratio",
        "learning_rate",
        "ent_coef",
        "ent_schedule",
        "delta",
    ):
        assert first[name] == entry[name]
    assert first["gamma"] == pytest.approx(entry.get("gamma", 0.99))
    assert first not in others


def entry_in(printed: str) -> str:
    return printed.split("as an entry for a file of -conf:\n")[1].split("To train with")[0]


def test_the_entry_of_a_search_that_began_with_a_modules_is_whole(shell: Path) -> None:
    module = {"CartPole-v1": {**HYPERPARAMS["CartPole-v1"], "policy": "sb3_acer.policies.MlpPolicy"}}
    (shell / "settings_of_mine.py").write_text(f"hyperparams = {module!r}")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(shell))
        printed = sb3_acer("tune", *SEARCH, "-conf", "settings_of_mine", cwd=shell)
    found = yaml.safe_load(entry_in(printed))["CartPole-v1"]
    assert found.keys() >= module["CartPole-v1"].keys()
    assert found["policy"] == "sb3_acer.policies.MlpPolicy"


def test_trials_and_training_with_one_keep_the_options_of_the_entrys_policy_that_are_not_drawn(
    shell: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    class Spy(ACER):
        def _setup_model(self) -> None:
            super()._setup_model()
            made.append(self.policy_kwargs)

    monkeypatch.setattr(registration, "ACER", Spy)
    kept = {"dueling": True, "ortho_init": False}
    entry = {**HYPERPARAMS["CartPole-v1"], "policy_kwargs": "dict(dueling=True, net_arch=[8], ortho_init=False)"}
    (shell / "mine.yml").write_text(yaml.safe_dump({"CartPole-v1": entry}))
    printed = sb3_acer("tune", *SEARCH, "-conf", "mine.yml", cwd=shell)
    trials = finished_trials("logs/acer/CartPole-v1.log")
    drawn = [kept | convert_acer_params(trial.params)["policy_kwargs"] for trial in trials]
    assert made == drawn
    assert "dueling=True" in yaml.safe_load(entry_in(printed))["CartPole-v1"]["policy_kwargs"]
    words = shlex.split(printed.splitlines()[-1].removeprefix("To train with the best trial: sb3-acer "))
    printed = sb3_acer(*words, "-n", "100", "--eval-freq", "-1", cwd=shell)
    assert made[-1] == drawn[int(words[-1])]
    assert printed.count("Loading hyperparameters from: mine.yml") == 1


def test_an_agent_can_be_trained_with_any_trial_of_a_search(shell: Path) -> None:
    printed = sb3_acer("tune", *SEARCH, cwd=shell)
    trials = finished_trials("logs/acer/CartPole-v1.log")
    assert len(trials) == 2
    assert len(list(shell.glob("logs/acer/report_*.csv"))) == 1
    assert "Agent:" not in printed
    *_, last = printed.splitlines()
    assert "one_minus" not in printed
    entry = entry_in(printed)
    assert yaml.safe_load(entry)["CartPole-v1"].keys() >= HYPERPARAMS["CartPole-v1"].keys()
    (shell / "mine.yml").write_text(entry)
    best = max(trials, key=lambda trial: trial.value or 0).number
    assert last.startswith("To train with the best trial: sb3-acer train ")
    assert last.endswith(f" --trial-id {best}")
    words = shlex.split(last.removeprefix("To train with the best trial: sb3-acer "))
    for trial in trials:  # including trial 0, which the zoo would take for no trial
        sb3_acer(*words[:-1], str(trial.number), "-n", "100", "--eval-freq", "-1", cwd=shell)
        run = shell / f"logs/acer/CartPole-v1_{trial.number + 2}"  # run 1 is the search
        config = dict(yaml.unsafe_load((run / "CartPole-v1/config.yml").read_text()))
        assert config == HYPERPARAMS["CartPole-v1"] | convert_acer_params(trial.params) | {"n_timesteps": 100}
        assert len(list(run.glob("*.monitor.csv"))) == config["n_envs"] == 2 ** trial.params["n_envs_pow"]
        assert ACER.load(run / "CartPole-v1.zip").gamma == 1 - trial.params["one_minus_gamma"]


def test_a_trial_normalises_and_acts_as_the_training_with_it_will(shell: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Spy(ACER):
        def _setup_model(self) -> None:
            super()._setup_model()
            seen.append(self)

    monkeypatch.setattr(registration, "ACER", Spy)
    more = ("normalize:True", 'policy:"MlpLstmPolicy"')
    sb3_acer("tune", *SEARCH, *PENDULUM, "-params", *more, cwd=shell)
    for model, trial in zip(seen, finished_trials("logs/acer/Pendulum-v1.log", "acer-Pendulum-v1"), strict=True):
        drawn = convert_acer_params(trial.params)
        normalize = model.get_vec_normalize_env()
        assert normalize is not None
        assert (normalize.gamma, model.gamma, model.n_envs) == (drawn["gamma"], drawn["gamma"], drawn["n_envs"])
        assert {"lstm_hidden_size", "log_std_init"} <= drawn["policy_kwargs"].keys() <= model.policy_kwargs.keys()
        assert model.burn_in == drawn["burn_in"]


def test_given_settings_are_those_of_all_trials_and_of_the_training_with_one(
    shell: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[ACER] = []

    class Spy(ACER):
        def _setup_model(self) -> None:
            super()._setup_model()
            made.append(self)

    monkeypatch.setattr(registration, "ACER", Spy)
    code = "dict(net_arch=[8], lstm_hidden_size=8, activation_fn=nn.ReLU)"
    fixed = {"gamma": 0.98765, "n_steps": 20, "policy": "MlpLstmPolicy", "policy_kwargs": code}
    given = ("gamma:0.98765", "n_steps:20", "policy:'MlpLstmPolicy'", f"policy_kwargs:{code}", "normalize:True")
    printed = sb3_acer("tune", *SEARCH, *PENDULUM, "-params", *given, cwd=shell)
    entry = yaml.safe_load(entry_in(printed))["Pendulum-v1"]
    assert {name: entry[name] for name in fixed} == fixed
    words = shlex.split(printed.splitlines()[-1].removeprefix("To train with the best trial: sb3-acer "))[:-1]
    trials = finished_trials("logs/acer/Pendulum-v1.log", "acer-Pendulum-v1")
    for trial, of_trial in zip(trials, [*made], strict=True):
        drawn = convert_acer_params(trial.params)
        assert drawn.keys() & fixed.keys() <= {"n_steps"}
        sb3_acer(*words, str(trial.number), "-n", "64", "--eval-freq", "-1", cwd=shell)
        for model in (of_trial, made[-1]):
            assert all(getattr(model, name) == drawn[name] for name in drawn.keys() - {"learning_rate", "lr_schedule"})
            assert model.lr_schedule(1.0) == drawn["learning_rate"]
            assert (model.gamma, model.n_steps, model.policy.state_size) == (0.98765, 20, 4 * 8)
            assert (model.policy_kwargs["net_arch"], model.policy_kwargs["activation_fn"]) == ([8], th.nn.ReLU)
            normalize = model.get_vec_normalize_env()
            assert normalize is not None
            assert normalize.gamma == 0.98765


def test_a_trial_whose_settings_do_not_fit_together_is_pruned(shell: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "nearest_trial", lambda *_: {})
    monkeypatch.setitem(registration.RANGES, "n_steps", IntDistribution(8, 8))
    given = ("policy:'MlpLstmPolicy'", "burn_in:12")  # less than the 16 steps of the entry
    with pytest.raises(SystemExit, match="No best trial"):
        sb3_acer("tune", *SEARCH, "-params", *given, cwd=shell)
    assert [trial.state.name for trial in finished_trials("logs/acer/CartPole-v1.log")] == ["PRUNED", "PRUNED"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("gama:0.5", "ACER has no argument 'gama'; it has 'gamma'"),
        ("gamma:3", r"gamma must be a number in \[0, 1\], got 3"),
        ("burn_in:4", "burn_in must be 0 for a feed-forward policy, got 4"),
    ],
)
def test_settings_that_train_refuses_are_refused_before_a_study_begins(given: str, message: str, shell: Path) -> None:
    for command in ("train", "tune"):
        with pytest.raises(SystemExit, match=f"^sb3-acer {command}: {message}$"):
            sb3_acer(command, "-params", given, cwd=shell)
    assert not list(shell.glob("logs/acer/*"))


def test_a_run_is_worth_what_it_holds_and_a_trial_counts_its_worst_run(
    shell: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_run, runs = ExperimentManager.objective, []

    def spy(self: ExperimentManager, trial: Any) -> float:
        reward: float = one_run(self, trial)
        runs.append((list(trial.evaluations), dict(trial.params)))
        assert trial.evaluations[-1] == reward
        return reward

    monkeypatch.setattr(ExperimentManager, "objective", spy)
    more = (*PENDULUM, "-params", 'policy:"MlpLstmPolicy"', "n_envs:2")
    printed = sb3_acer("tune", *SEARCH, "--n-trials", "1", "--n-runs", "3", "--n-evaluations", "3", *more, cwd=shell)
    assert "--n-runs 3" in printed.splitlines()[0]
    assert "--n-runs" not in printed.splitlines()[-1]
    (trial,) = finished_trials("logs/acer/Pendulum-v1.log", "acer-Pendulum-v1")
    assert [params for _, params in runs] == [trial.params] * 3
    values = [np.mean(evaluations[len(evaluations) // 2 :]) for evaluations, _ in runs]
    assert all(len(evaluations) >= 3 for evaluations, _ in runs)
    assert len(set(values)) == 3
    assert trial.value == pytest.approx(np.mean(values) / 2 + min(values) / 2)
    reported = [trial.intermediate_values[step] for step in sorted(trial.intermediate_values)]
    of_two = np.mean(values[:2]) / 2 + min(values[:2]) / 2
    assert reported == pytest.approx([*runs[0][0], of_two, trial.value])


def test_a_trial_whose_second_run_disappoints_is_pruned(shell: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = iter([3.0, 3.0, 3.0, 3.0, 0.0])
    monkeypatch.setattr(ExperimentManager, "objective", lambda self, trial: next(rewards))
    sb3_acer("tune", *SEARCH, "--n-startup-trials", "1", "--n-runs", "3", cwd=shell)
    first, second = finished_trials("logs/acer/CartPole-v1.log")
    assert (first.value, second.intermediate_values) == (3.0, {1: 0.75})
    assert second.state is optuna.trial.TrialState.PRUNED


def test_the_number_of_environments_is_not_drawn_where_it_is_given(shell: Path) -> None:
    sb3_acer("tune", *SEARCH, "--n-trials", "1", "-params", "n_envs:3", cwd=shell)
    assert "n_envs_pow" not in finished_trials("logs/acer/CartPole-v1.log")[0].params


class Broken(gym.Wrapper[Any, Any, Any, Any]):
    """The first one that takes a step, which is the training environment of the first trial, returns NaN rewards."""

    broken: ClassVar["Broken | None"] = None

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        Broken.broken = Broken.broken or self
        observation, reward, *rest = super().step(action)
        return (observation, np.nan if self is Broken.broken else reward, *rest)


@pytest.mark.filterwarnings("ignore:.*The reward is a NaN value")
def test_a_trial_that_meets_a_nan_is_pruned_and_the_search_goes_on(shell: Path) -> None:
    gym.register("Broken-v0", lambda **_: Broken())
    search = ("tune", *SEARCH, "--n-eval-envs", "1", "--n-trials", "1", "--env", "Broken-v0", "-params", "n_envs:1")
    with pytest.raises(SystemExit, match="No best trial: No trials are completed yet"):
        sb3_acer(*search, cwd=shell)
    sb3_acer(*search, cwd=shell)
    states = [trial.state.name for trial in finished_trials("logs/acer/Broken-v0.log", "acer-Broken-v0")]
    assert states == ["PRUNED", "COMPLETE"]


LONGER = ("-n", "600", "--eval-freq", "150", "--eval-episodes", "1")


def episodes(run: Path) -> list[list[str]]:
    """Rewards and lengths in Monitor's files."""
    files = sorted(run.glob("*.monitor.csv"))
    return [[",".join(line.split(",")[:2]) for line in path.read_text().splitlines()[2:]] for path in files]


def interrupted_at(
    step: int, act: Callable[[], None], of: type[BaseCallback] = StopOnSignal
) -> Callable[[BaseCallback], bool]:
    on_step = of._on_step

    def interrupt(callback: BaseCallback) -> bool:
        if callback.num_timesteps == step:
            act()
        return on_step(callback)

    return interrupt


def test_a_run_that_is_interrupted_leaves_an_agent_and_is_not_evaluated(
    shell: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(StopOnSignal, "_on_step", interrupted_at(334, lambda: os.kill(os.getpid(), signal.SIGINT)))
    with pytest.raises(SystemExit, match=str(128 + signal.SIGINT)):
        commands.main(["train", *SHORT_RUN, *LONGER, "-f", "interrupted"])
    printed = capsys.readouterr().out
    assert ACER.load(shell / "interrupted/acer/CartPole-v1_1/CartPole-v1.zip").num_timesteps == 334
    assert "Learning curve" in printed
    assert "Evaluating" not in printed


class Ending(BaseCallback):
    n_ends: ClassVar[int] = 0

    def _on_step(self) -> bool:
        return True

    def _on_training_end(self) -> None:
        Ending.n_ends += 1


def test_a_callback_is_ended_once_and_advice_to_go_on_needs_a_checkpoint(
    shell: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Ending, "n_ends", 0)
    arguments = [
        "train",
        *SHORT_RUN,
        f"callback:'{__name__}.Ending'",
        "--eval-freq",
        "-1",
        "--checkpoint-freq",
        "10000",
    ]
    commands.main(arguments)
    assert Ending.n_ends == 1

    def stop_twice() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(StopOnSignal, "_on_step", interrupted_at(334, stop_twice))
    with pytest.raises(SystemExit, match=str(128 + signal.SIGINT)):
        commands.main([*arguments, "-f", "interrupted"])
    assert "To go on" not in capsys.readouterr().out


def test_a_run_that_is_terminated_leaves_an_agent_and_continues_to_the_same_end(
    shell: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sb3_acer("train", *SHORT_RUN, "normalize:True", *LONGER, "-f", "whole", cwd=shell)
    handler = signal.getsignal(signal.SIGTERM)
    on_step = EvalCallback._on_step
    parts = ("normalize:True", "n_envs:2", *LONGER, "-f", "parts", "--checkpoint-freq", "100")
    during_evaluation = interrupted_at(334, lambda: os.kill(os.getpid(), signal.SIGTERM), of=EvalCallback)
    monkeypatch.setattr(EvalCallback, "_on_step", during_evaluation)
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        sb3_acer("train", *SHORT_RUN, *parts, cwd=shell)
    monkeypatch.setattr(EvalCallback, "_on_step", on_step)
    assert signal.getsignal(signal.SIGTERM) is handler
    run = shell / "parts/acer/CartPole-v1_1"
    assert ACER.load(run / "CartPole-v1.zip").num_timesteps == 334
    printed = sb3_acer("train", "--resume", "-f", "parts", cwd=shell)
    assert "Agent: parts/acer/CartPole-v1_1/CartPole-v1.zip" in printed.splitlines()
    whole = shell / "whole/acer/CartPole-v1_1"
    ours, theirs = (ACER.load(path / "CartPole-v1.zip") for path in (run, whole))
    for name, value in theirs.average_policy.state_dict().items():
        np.testing.assert_array_equal(ours.average_policy.state_dict()[name], value)
    assert episodes(run) == episodes(whole)
    evaluations, expected = (np.load(path / "evaluations.npz") for path in (run, whole))
    np.testing.assert_array_equal(evaluations["results"], expected["results"])
    assert [path.name for path in (shell / "parts/acer").iterdir()] == ["CartPole-v1_1"]


def test_output_that_nobody_reads_any_more_does_not_keep_training_from_being_saved(
    shell: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end_reader() -> None:  # as Ctrl-C ends `| tee`, too
        monkeypatch.setattr(sys.stdout, "write", broken)
        os.kill(os.getpid(), signal.SIGINT)
        print("a table of the log")

    def broken(text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(StopOnSignal, "_on_step", interrupted_at(334, end_reader))
    with pytest.raises(SystemExit, match=str(128 + signal.SIGINT)):
        commands.main(["train", *SHORT_RUN, "--eval-freq", "-1", "--checkpoint-freq", "100000"])
    run = shell / "logs/acer/CartPole-v1_1"
    assert ACER.load(run / "CartPole-v1.zip").num_timesteps == 334
    assert list((run / "checkpoints").glob("checkpoint_*_334_steps"))


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows")
def test_a_terminal_that_closes_ends_training_unless_nohup_ignores_it() -> None:
    before = signal.getsignal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    stop = StopOnSignal()
    try:
        with stop.listening():
            for _ in range(2):  # as a shell that ends sends it
                os.kill(os.getpid(), signal.SIGHUP)
        assert stop.stopped_by == signal.SIGHUP
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with StopOnSignal().listening():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_run_is_resumed_by_its_number_and_named_by_it_if_it_is_not_the_newest(shell: Path) -> None:
    arguments = ("train", *SHORT_RUN, *CHECKPOINTED)
    for _ in range(2):
        sb3_acer(*arguments, cwd=shell)
    printed = sb3_acer("train", "--resume", "1", "-n", "1200", cwd=shell)
    assert "Agent: logs/acer/CartPole-v1_1/CartPole-v1.zip" in printed
    assert "To watch the agent: sb3-acer enjoy --exp-id 1" in printed.splitlines()
    assert len((shell / "logs/acer/CartPole-v1_1/CartPole-v1/command.txt").read_text().splitlines()) == 2
    with pytest.raises(SystemExit, match="logs/acer has no run 3 of CartPole-v1 with a checkpoint to resume from"):
        sb3_acer("train", "--resume", "3", cwd=shell)


def test_an_environment_that_fails_leaves_an_agent_and_a_checkpoint(
    shell: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise RuntimeError("the simulator is gone")

    arguments = ("train", *SHORT_RUN, "--eval-freq", "-1", "--checkpoint-freq", "100")
    on_step = StopOnSignal._on_step
    monkeypatch.setattr(StopOnSignal, "_on_step", interrupted_at(334, fail))
    with pytest.raises(RuntimeError, match="the simulator is gone"):
        sb3_acer(*arguments, cwd=shell)
    monkeypatch.setattr(StopOnSignal, "_on_step", on_step)
    run = shell / "logs/acer/CartPole-v1_1"
    assert ACER.load(run / "CartPole-v1.zip").num_timesteps == 334
    found = find_checkpoint(run / "checkpoints")
    assert found is not None
    assert found.manifest["environment"] == "not saved: training ended within a step"
    with pytest.warns(UserWarning, match="the environments begin new episodes"):
        sb3_acer("train", "--resume", cwd=shell)
    assert ACER.load(run / "CartPole-v1.zip").num_timesteps >= 600


CHECKPOINTED = ("--eval-freq", "-1", "--checkpoint-freq", "300")


def test_a_resumed_run_may_have_more_environments(shell: Path) -> None:
    sb3_acer("train", *SHORT_RUN, "normalize:True", *CHECKPOINTED, cwd=shell)
    sb3_acer("train", "--resume", "-n", "1200", "-params", "n_envs:4", cwd=shell)
    run = shell / "logs/acer/CartPole-v1_1"
    model = ACER.load(run / "CartPole-v1.zip")
    assert model.n_envs == 4
    assert model.num_timesteps >= 1200
    assert len(list(run.glob("*.monitor.csv"))) == 4
    assert len(load_results(str(run))) > 0
    times = [float(line.split(",")[2]) for line in (run / "0.monitor.csv").read_text().splitlines()[2:]]
    assert len(times) > 2
    assert times == sorted(times)
    assert "normalize" in (run / "CartPole-v1/config.yml").read_text()


def test_a_run_whose_checkpoints_are_damaged_is_refused_in_one_line(shell: Path) -> None:
    sb3_acer("train", *SHORT_RUN, *CHECKPOINTED, cwd=shell)
    run = shell / "logs/acer/CartPole-v1_1"
    for path in (run / "checkpoints").glob("*/agent.zip"):
        path.write_bytes(path.read_bytes()[:1000])
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    with pytest.raises(SystemExit, match=r"^sb3-acer train: .*agent.zip could not be loaded: it has changed since"):
        sb3_acer("train", "--resume", "-n", "1200", "--progress", cwd=shell)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == names


def test_a_refused_resume_leaves_the_run_as_it_was(shell: Path) -> None:
    sb3_acer("train", *SHORT_RUN, *CHECKPOINTED, cwd=shell)
    run = shell / "logs/acer/CartPole-v1_1"
    before = [(run / name).read_bytes() for name in ("arguments.json", "CartPole-v1/config.yml")]
    for others, message in (
        (("-params", "delta:0.6"), r"delta must be 1\.0, as in the run to resume, got 0\.6"),
        (("-params", "normalize:False"), r"normalize must be True, as .*, got False"),
        (("-params", "frame_stack:2"), r"frame_stack must be left out, as in the run to resume, got 2"),
        (("--env-kwargs", "is_easy:True"), r"--env-kwargs must be None, as .*, got {'is_easy': True}"),
    ):
        with pytest.raises(SystemExit, match=f"^sb3-acer train: {message}$"):
            sb3_acer("train", "--resume", "-n", "1200", *others, cwd=shell)
    assert [(run / name).read_bytes() for name in ("arguments.json", "CartPole-v1/config.yml")] == before
    sb3_acer("train", "--resume", "-n", "1200", cwd=shell)
    assert ACER.load(run / "CartPole-v1.zip").num_timesteps >= 1200


def test_a_run_with_an_id_of_its_own_is_resumed(shell: Path) -> None:
    for seed in ("1", "2"):
        sb3_acer("train", *SHORT_RUN, *CHECKPOINTED, "--seed", seed, "--uuid", cwd=shell)
    sb3_acer("train", "--resume", "-n", "700", cwd=shell)
    agents = [ACER.load(path) for path in shell.glob("logs/acer/CartPole-v1_1_*/CartPole-v1.zip")]
    assert sorted((agent.seed, agent.num_timesteps >= 700) for agent in agents) == [(1, False), (2, True)]


def test_numbers_that_yaml_takes_for_strings_are_numbers(shell: Path) -> None:
    (shell / "mine.yml").write_text(
        "CartPole-v1:\n  n_timesteps: 1e2\n  policy: MlpPolicy\n  learning_rate: 5e-4\n  buffer_size: 1e3\n"
    )
    sb3_acer("train", "-conf", "mine.yml", "--eval-freq", "-1", "--num-threads", "1", cwd=shell)
    agent = ACER.load(shell / "logs/acer/CartPole-v1_1/CartPole-v1.zip")
    assert (agent.num_timesteps, agent.lr_schedule(1.0), agent.buffer_size) == (100, 5e-4, 1000)


@pytest.mark.parametrize("normalize", ["normalize:dict(norm_reward=False)", "normalize:{}"])
def test_a_run_with_options_of_its_normalisation_is_resumed_and_played_with_it(normalize: str, shell: Path) -> None:
    sb3_acer("train", *CHECKPOINTED, *SHORT_RUN, normalize, "gamma:0.98", cwd=shell)
    sb3_acer("train", "--resume", "-n", "700", cwd=shell)
    assert ACER.load(shell / "logs/acer/CartPole-v1_1/CartPole-v1.zip").num_timesteps >= 700
    printed = sb3_acer("enjoy", "--no-render", "-n", "10", cwd=shell)
    assert "Loading running average" in printed


def test_a_wrapper_and_frames_that_are_switched_off_are_left_out_in_playing_too(shell: Path) -> None:
    sb3_acer("train", *SHORT_RUN, "frame_stack:None", "vec_env_wrapper:None", cwd=shell)
    sb3_acer("enjoy", "--no-render", "-n", "10", cwd=shell)


@pytest.mark.parametrize("vec_env", ["dummy", "subproc"])
def test_episodes_that_a_wrapper_truncates_are_evaluated(
    vec_env: str, shell: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SubprocVecEnv.__init__, "__defaults__", ("fork",))  # other processes import everything again
    limit = "env_wrapper:[{'gymnasium.wrappers.TimeLimit':dict(max_episode_steps=5)}]"
    printed = sb3_acer("train", *SHORT_RUN, limit, "--vec-env", vec_env, "--n-eval-envs", "1", cwd=shell)
    assert "Mean reward: 5.00 +/- 0.00" in printed
    assert printed.splitlines()[-1] == "To watch the agent: sb3-acer enjoy"
    episodes = (shell / "logs/acer/CartPole-v1_1/0.monitor.csv").read_text().splitlines()[2:]
    assert len(episodes) == 60
    assert all(line.startswith("5.0,5,") for line in episodes)


def test_classes_in_the_entry_of_a_search_are_named(shell: Path) -> None:
    wrapped = {**HYPERPARAMS["CartPole-v1"], "env_wrapper": [gym.wrappers.FlattenObservation]}
    entry = yaml.safe_load(entry_of("CartPole-v1", wrapped, {}, {}))["CartPole-v1"]
    assert entry["env_wrapper"] == ["gymnasium.wrappers.transform_observation.FlattenObservation"]


def test_the_best_trial_of_another_algorithm_is_printed_with_its_settings(shell: Path) -> None:
    printed = sb3_acer("tune", *SEARCH, "--n-trials", "1", "--algo", "a2c", cwd=shell)
    assert "Params: " in printed
    assert "learning_rate: " in printed


@pytest.mark.parametrize("setting", ["policy:'MlpLstmPolicy'", "policy_kwargs:dict(net_arch=[8])"])
def test_an_agent_that_is_trained_on_keeps_its_own_networks(
    setting: str, trained: tuple[Path, str], shell: Path
) -> None:
    agent = trained[0] / "logs/acer/CartPole-v1_1/CartPole-v1.zip"
    name = setting.partition(":")[0]
    with pytest.raises(SystemExit, match=f"-params {name} must be left out with -i, whose agent has its own, got"):
        commands.main(["train", "-i", str(agent), *SHORT_RUN, setting])
    assert not (shell / "logs").exists()


def test_an_agent_of_normalised_observations_is_trained_on_only_with_them(
    continued: tuple[Path, str], shell: Path
) -> None:
    agent = continued[0] / "logs/acer/CartPole-v1_1/CartPole-v1.zip"
    message = "normalize must be set, since the agent of -i has statistics of it, got False"
    with pytest.raises(SystemExit, match=f"^sb3-acer train: {message}$"):
        commands.main(["train", "-i", str(agent), *SHORT_RUN, "normalize:False"])
    assert not list((shell / "logs").glob("acer/*"))


def test_a_trial_that_does_not_exist_is_one_line(shell: Path) -> None:
    optuna.create_study(storage=open_storage("mine.log"), study_name="mine")
    study = ("--study-name", "mine", "--storage", "mine.log")
    with pytest.raises(SystemExit, match=r"--trial-id must be the number of a trial of study 'mine' in .*, got 7"):
        commands.main(["train", *study, "--trial-id", "7"])
    optuna.create_study(storage="sqlite:///mine.db?timeout=30", study_name="mine")
    study = ("--study-name", "mine", "--storage", "sqlite:///mine.db?timeout=30")
    with pytest.raises(SystemExit, match=r"--trial-id must be the number of a trial of study 'mine' in .*, got 7"):
        commands.main(["train", *study, "--trial-id", "7"])
    with pytest.raises(SystemExit, match="--trial-id must be the number of a trial, got -1"):
        commands.main(["train", *study, "--trial-id", "-1"])


@pytest.mark.parametrize(
    ("storage", "message"),
    [
        ("typo.log", "--storage must be the file of a study, got 'typo.log'"),
        ("foo", "--storage must be a file NAME.log or a database that can be opened: Could not parse"),
        ("sqlite:///typo.db", "--storage must be the file of a study, got 'sqlite:///typo.db'"),
    ],
)
def test_a_storage_without_the_study_is_one_line(
    storage: str, message: str, shell: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with pytest.raises(SystemExit, match=message):
        commands.main(["train", "--storage", storage, "--study-name", "mine", "--trial-id", "0"])
    assert not list(shell.glob("typo.*"))


def test_a_search_does_not_begin_with_an_agent(shell: Path) -> None:
    with pytest.raises(SystemExit, match="sb3-acer tune: -i must be left out: trials begin with new agents"):
        commands.main(["tune", "-i", "agent.zip"])


def test_the_last_params_of_a_run_count_where_it_is_resumed_too(shell: Path) -> None:
    sb3_acer("train", *SHORT_RUN, "--eval-freq", "-1", "--checkpoint-freq", "500", "-params", "n_envs:2", cwd=shell)
    sb3_acer("train", "--resume", "-n", "1200", cwd=shell)
    model = ACER.load(shell / "logs/acer/CartPole-v1_1/CartPole-v1.zip")
    assert model.num_timesteps >= 1200
    assert model.replay_start == HYPERPARAMS["CartPole-v1"]["replay_start"]


def test_what_cannot_be_resumed_is_one_line(shell: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="logs/acer has no run of Acrobot-v1 with a checkpoint to resume from"):
        commands.main(["train", "--resume", "--env", "Acrobot-v1"])
    with pytest.raises(SystemExit, match="2"):
        commands.main(["train", "--checkpoint-freq", "0"])
    assert "--checkpoint-freq must be at least 1, got 0" in capsys.readouterr().err


def test_a_run_whose_arguments_are_not_known_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "has_checkpoints", lambda folder: True)
    older, newer = (tmp_path / "acer" / f"CartPole-v1_{number}" for number in (1, 2))
    for run in (older, newer):
        run.mkdir(parents=True)
    (older / "arguments.json").write_text("[]")
    assert runs.run_to_resume("acer", "CartPole-v1", str(tmp_path)) == older


def test_checkpoints_are_for_acer_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        commands.main(["train", "--algo", "ppo", "--checkpoint-freq", "100"])
    assert "--checkpoint-freq must be left out for --algo ppo: only acer has checkpoints" in capsys.readouterr().err


def test_a_run_without_a_number_names_no_command_that_would_find_another(shell: Path) -> None:
    printed = sb3_acer("train", *SHORT_RUN, "--eval-freq", "-1", "--uuid", cwd=shell)
    assert "Agent: " in printed
    assert "To watch the agent" not in printed


@pytest.mark.parametrize(("n_timesteps", "eval_freq"), [(5, 1), (600.0, 60), (1e6, 25_000)])
def test_evaluations_are_ten_in_a_run_or_more_and_count_the_steps_of_all_ranks(
    n_timesteps: float, eval_freq: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(distributed, "world_size", lambda: 4)
    monkeypatch.setattr(distributed, "rank", lambda: 0)
    monkeypatch.setattr(ExperimentManager, "create_callbacks", lambda self: seen.append((self.n_envs, self.eval_freq)))
    own: Any = experiment.Experiment.__new__(experiment.Experiment)
    vars(own).update(n_envs=2, n_timesteps=n_timesteps, eval_freq=25_000, eval_env_kwargs={}, env_kwargs={})
    own.create_callbacks()
    assert seen == [(8, eval_freq)]
    assert own.n_envs == 2


def test_environment_arguments_of_record_video_come_before_those_of_the_entry() -> None:
    made: list[dict[str, Any]] = []
    algorithms = Algorithms({}, lambda *args, **kwargs: made.append(kwargs))  # type: ignore[arg-type]
    algorithms.create_env("CartPole-v1", hyperparams={"env_kwargs": {"a": 1, "b": 2}}, env_kwargs={"a": 3})
    assert made[0]["env_kwargs"] == {"a": 3, "b": 2}


def test_the_row_of_an_episode_that_a_wrapper_truncates_has_monitors_keywords(tmp_path: Path) -> None:
    class Scored(gym.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            *step, info = self.env.step(action)
            return *step, {**info, "score": 7}

    monitored = Monitor(Scored(gym.make("CartPole-v1")), str(tmp_path / "0"), info_keywords=("score",))
    env = Truncations(gym.wrappers.TimeLimit(monitored, 3))
    env.reset(seed=0)
    for _ in range(3):
        env.step(0)
    env.close()
    assert load_results(str(tmp_path))["score"].tolist() == [7]


def test_whole_numbers_in_exponential_notation_are_integers() -> None:
    numbers = [_number_of(text) for text in ("2e1", "5e-4", "lin_1e-3")]
    assert numbers == [20, 5e-4, "lin_1e-3"]
    assert [type(number) for number in numbers] == [int, float, str]


def test_a_resumed_run_that_fails_before_its_first_step_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointed = ("--eval-freq", "-1", "--checkpoint-freq", "300")
    sb3_acer("train", *SHORT_RUN, *checkpointed, "-n", "100", cwd=tmp_path)
    run = tmp_path / "logs/acer/CartPole-v1_1"
    before = {path: path.stat().st_mtime_ns for path in (run / "checkpoints").glob("*/*")}
    monkeypatch.setattr(ACER, "_require_same_env", lambda agent: agent.no_memory)
    with pytest.raises(AttributeError, match="no_memory"):
        sb3_acer("train", "--resume", "-n", "1200", cwd=tmp_path)
    assert {path: path.stat().st_mtime_ns for path in (run / "checkpoints").glob("*/*")} == before


def test_each_run_of_a_trial_writes_its_evaluations_to_a_folder_of_its_own(shell: Path) -> None:
    more = ("--n-trials", "1", "--n-runs", "2", "--optimization-log-path", "found")
    sb3_acer("tune", *SEARCH, *more, cwd=shell)
    folders = {path.relative_to(shell / "found").parts[0] for path in shell.glob("found/**/evaluations.npz")}
    assert folders == {"run_0", "run_1"}
    assert not list(shell.glob("found/run_0/run_1"))


def test_the_row_of_an_episode_that_a_wrapper_truncates_has_the_keywords_of_its_reset(tmp_path: Path) -> None:
    env = Monitor(gym.make("CartPole-v1"), str(tmp_path / "0"), reset_keywords=("options",))
    limited = Truncations(gym.wrappers.TimeLimit(env, 3))
    limited.reset(options={"low": -0.01, "high": 0.01})
    for _ in range(3):
        limited.step(0)
    limited.close()
    assert "low" in load_results(str(tmp_path))["options"][0]


def test_a_resumed_run_may_have_other_callbacks(shell: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ending, "n_ends", 0)
    sb3_acer("train", *SHORT_RUN, *CHECKPOINTED, cwd=shell)
    sb3_acer("train", "--resume", "-n", "1200", "-params", f"callback:'{__name__}.Ending'", cwd=shell)
    assert Ending.n_ends == 1


def test_a_negative_log_interval_is_no_log(shell: Path) -> None:
    printed = [
        sb3_acer("train", *SHORT_RUN, "--eval-freq", "-1", "--log-interval", interval, cwd=shell)
        for interval in ("-1", "-2")
    ]
    assert ["total_timesteps" in each for each in printed] == [True, False]


def test_a_run_that_is_terminated_ends_without_a_picture(shell: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StopOnSignal, "_on_step", interrupted_at(334, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        sb3_acer("train", *SHORT_RUN, "--eval-freq", "-1", cwd=shell)
    assert (shell / "logs/acer/CartPole-v1_1/CartPole-v1.zip").exists()
    assert not (shell / "logs/acer/CartPole-v1_1/learning_curve.png").exists()


def test_the_first_signal_is_the_one_that_ended_training() -> None:
    stop = StopOnSignal()
    for signum in (signal.SIGTERM, signal.SIGHUP):
        stop.stop(signum, None)
    assert stop.stopped_by == signal.SIGTERM


def test_only_the_first_run_of_a_trial_is_pruned_by_its_evaluations() -> None:
    class Pruned:
        def should_prune(self) -> bool:
            return True

    trial: Any = Pruned()
    assert [experiment.TrialRun(trial, is_first, {}, {}).should_prune() for is_first in (True, False)] == [True, False]


@pytest.mark.parametrize("deterministic", [True, False])
def test_an_agent_is_evaluated_first_as_its_entry_means_it_and_others_in_this_way_alone(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(experiment, "evaluate_policy", lambda *args, **kwargs: (0.0, 0.0))
    own: Any = experiment.Experiment.__new__(experiment.Experiment)
    env = make_vec_env("CartPole-v1", 1)
    vars(own).update(deterministic_eval=deterministic, n_eval_envs=1, seed=0, create_envs=lambda *_, **__: env)
    kinds = ["deterministic", "stochastic"] if deterministic else ["stochastic", "deterministic"]
    for model, expected in ((ACER("MlpPolicy", "CartPole-v1"), kinds), (A2C("MlpPolicy", "CartPole-v1"), kinds[:1])):
        own.evaluate(model, "agent.zip")
        said = capsys.readouterr().out
        assert [line.split("(")[1].split()[0] for line in said.splitlines() if "Evaluating" in line] == expected
