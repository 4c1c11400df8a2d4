"""On a GPU an agent computes what it computes on the CPU, to rounding, and repeats itself to the bit."""

import pickle
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize

from sb3_acer import ACER, ExpertDataset, generate_expert_traj
from sb3_acer.export import export_onnx
from sb3_acer.policies import ACERPolicy
from sb3_acer.sb2_compat.migration import load_stable_baselines
from sb3_acer.sequences import by_key
from tests.helpers import Catch, Constant, Recall, Recorder
from tests.sb2_compat.old_agents import AGENTS
from tests.test_masks import Doors
from tests.test_resuming import LSTM, KillAt, Killed, Rows, learnt, multi_discrete, normalized, plain, require_same

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:networks of .* parameters are trained faster")]
SMALL: dict[str, Any] = {"n_steps": 8, "buffer_size": 400, "replay_start": 32, "replay_ratio": 2, "seed": 3}


class Mixed(gym.Env[Any, Any]):
    """A picture, a vector and a number at each step; episodes of five steps, ended by a time limit."""

    observation_space = spaces.Dict(
        picture=spaces.Box(0, 255, (36, 36, 1), np.uint8), vector=spaces.Box(-9, 9, (3,)), number=spaces.Discrete(4)
    )
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.n_steps = 0
        return self._look(), {}

    def _look(self) -> dict[str, Any]:
        rng = self.np_random
        picture = rng.integers(256, size=(36, 36, 1), dtype=np.uint8)
        vector = rng.standard_normal(3).astype(np.float32).clip(-9, 9)
        return {"picture": picture, "vector": vector, "number": np.int64(rng.integers(4))}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.n_steps += 1
        return self._look(), float(action == 1), False, self.n_steps == 5, {}


MIXED: dict[str, Any] = {"policy": "MultiInputPolicy", "policy_kwargs": {"use_bfloat16": False}}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "Discrete": (Recorder, {}),
    "Box": (lambda: gym.make("Pendulum-v1"), {}),
    "MultiDiscrete": (multi_discrete, {}),
    "MultiBinary": (lambda: Recorder(spaces.MultiBinary(3)), {}),
    "masks": (Doors, {}),
    "masks of MultiDiscrete": (lambda: Doors(spaces.MultiDiscrete([2, 4, 3])), {}),
    "truncated": (Constant, {}),
    "LSTM": (Recall, LSTM),
    "LSTM with normalised layers": (Recall, {**LSTM, "policy": "MlpLnLstmPolicy"}),
    "GRU": (Recall, {**LSTM, "policy": "MlpGruPolicy"}),
    "pixels": (Catch, {"policy": "CnnPolicy", "policy_kwargs": {"use_bfloat16": False}}),
    "Dict": (Mixed, MIXED),
    "Dict with LSTM": (Mixed, {**LSTM, "policy": "MultiInputLstmPolicy"}),
    "two extractors": (
        Mixed,
        {"policy": "MultiInputPolicy", "policy_kwargs": {"share_features_extractor": False, "use_bfloat16": False}},
    ),
    "Adam": (Recorder, {"policy_kwargs": {"optimizer_class": th.optim.Adam}}),
    "SGD": (Recorder, {"policy_kwargs": {"optimizer_class": th.optim.SGD, "optimizer_kwargs": {"momentum": 0.9}}}),
}
every_case = pytest.mark.parametrize("case", CASES)
both_ways = pytest.mark.parametrize(("source", "target"), [("cuda", "cpu"), ("cpu", "cuda")], ids=["down", "up"])


@pytest.fixture(autouse=True)
def _whole_float32() -> Any:
    """Convolutions without TF32, whose numbers have ten bits."""
    assert th.cuda.is_available(), "these tests need a GPU"  # stable-baselines3 takes the CPU in its place
    before = th.backends.cudnn.allow_tf32
    th.backends.cudnn.allow_tf32 = False
    yield
    th.backends.cudnn.allow_tf32 = before


def make_model(case: str, device: str = "cuda", **arguments: Any) -> ACER:
    make_env, own = CASES[case]
    arguments = {"policy": "MlpPolicy", **SMALL, **own, **arguments}
    return ACER(env=make_vec_env(make_env, 2, seed=1), device=device, **arguments)


def copied(model: ACER, device: str, folder: Path, **arguments: Any) -> ACER:
    model.save(folder / "agent")
    model.save_replay_buffer(folder / "buffer")
    other = ACER.load(folder / "agent", model.env, device=device, **arguments)
    other.load_replay_buffer(folder / "buffer")
    return other


def require_close(ours: ACER, theirs: ACER, tolerance: float) -> None:
    for own, other in ((ours.policy, theirs.policy), (ours.average_policy, theirs.average_policy)):
        for name, value in own.state_dict().items():
            th.testing.assert_close(value.cpu(), other.state_dict()[name].cpu(), rtol=tolerance, atol=tolerance)


def require_on(model: ACER, device: str) -> None:
    """All that the agent computes with is on its device."""
    of_optimizer = [part for state in model.policy.optimizer.state.values() for part in state.values()]
    parameters = *model.policy.parameters(), *model.average_policy.parameters(), *model.policy.flat.vectors
    kept = [part for part in of_optimizer if isinstance(part, th.Tensor) and part.dim() > 0]
    buffers = *model.policy.buffers(), *model.average_policy.buffers()
    assert {part.device.type for part in (*parameters, *kept, *buffers)} == {device}


def some_observations(model: ACER) -> Any:
    assert model.env is not None
    return model.env.reset()


def tensors_of(model: ACER, observations: Any) -> Any:
    policy: ACERPolicy = model.policy
    return policy.obs_to_tensor(observations)[0]


@every_case
def test_updates_are_those_of_the_cpu(case: str, tmp_path: Path) -> None:
    there = make_model(case, lr_schedule="constant").learn(120)
    here = copied(there, "cpu", tmp_path)
    require_close(there, here, 0)
    for model, device in ((there, "cuda"), (here, "cpu")):
        require_on(model, device)
        for seed in range(3):
            model.set_random_seed(seed)
            model.update(model.replay_buffer.sample(4, None, np.random.default_rng(seed)))
    require_close(there, here, 1e-4)


@every_case
def test_agents_act_alike_on_both(case: str, tmp_path: Path) -> None:
    there = make_model(case).learn(64)
    here = copied(there, "cpu", tmp_path)
    env: Any = there.env
    observations, masks = env.reset(), env.env_method("action_masks") if case == "masks" else None
    masks = None if masks is None else np.stack(masks)
    (theirs, states), (ours, own_states) = (
        model.predict(observations, deterministic=True, action_masks=masks) for model in (there, here)
    )
    np.testing.assert_allclose(theirs, ours, rtol=1e-4, atol=1e-4)
    if own_states is not None:
        np.testing.assert_allclose(states, own_states, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("arguments", [{}, LSTM], ids=["feed-forward", "LSTM"])
@pytest.mark.parametrize("make", [plain("CartPole-v1"), normalized("Pendulum-v1")], ids=["Discrete", "Box"])
def test_a_run_on_a_gpu_that_was_killed_ends_as_one_that_was_not(
    make: Any, arguments: dict[str, Any], tmp_path: Path
) -> None:
    arguments = {**arguments, "device": "cuda"}
    expected = learnt(make, arguments, Rows())
    with pytest.raises(Killed):
        learnt(make, arguments, Rows(), KillAt(137), folder=tmp_path)
    require_same(learnt(make, arguments, Rows(), folder=tmp_path), expected)


def test_a_run_on_pixels_that_was_killed_ends_as_one_that_was_not(tmp_path: Path) -> None:
    arguments = {"policy": "CnnPolicy", "device": "cuda"}
    expected = learnt(plain(Catch), arguments, Rows(), n_steps=120)
    with pytest.raises(Killed):
        learnt(plain(Catch), arguments, Rows(), KillAt(77), n_steps=120, folder=tmp_path)
    require_same(learnt(plain(Catch), arguments, Rows(), n_steps=120, folder=tmp_path), expected)


@pytest.mark.parametrize("case", ["Discrete", "pixels", "LSTM", "Dict", "Dict with LSTM", "masks", "truncated"])
def test_observations_kept_on_the_gpu_are_those_in_memory(case: str, tmp_path: Path) -> None:
    there = make_model(case, replay_buffer_kwargs={"storage_device": "cuda"}).learn(160)
    here = make_model(case).learn(160)
    batches = [model.replay_buffer.sample(4, None, np.random.default_rng(0)) for model in (there, here)]
    assert there.replay_buffer.storage_device.type == "cuda"
    for name in ("observations", "final_observations", "masks", "final_masks", "states"):
        theirs, ours = (getattr(batch, name) for batch in batches)
        th.testing.assert_close(theirs, ours, rtol=0, atol=0)
    require_close(there, here, 0)
    require_close(copied(there, "cpu", tmp_path), there, 0)


def test_an_agent_learns_on_a_gpu() -> None:
    model = ACER("MlpPolicy", make_vec_env(Constant, 4), **SMALL, gamma=0.5, learning_rate=5e-3, device="cuda").learn(
        4000
    )
    value = model.policy.predict_values(th.ones(1, 1, device="cuda"))
    assert value.item() == pytest.approx(2, rel=0.05)


def test_an_exported_agent_acts_as_it_did_on_the_gpu(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model = make_model("Discrete").learn(64)
    export_onnx(model, tmp_path / "agent.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "agent.onnx", providers=["CPUExecutionProvider"])
    observations = np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32)
    (name,) = [each.name for each in session.get_inputs()]
    actions = session.run(None, {name: observations})[0]
    np.testing.assert_array_equal(actions, model.predict(observations, deterministic=True)[0])


PROGRAM = r"""
import sys, torch as th
from stable_baselines3.common.env_util import make_vec_env
from sb3_acer import ACER
from sb3_acer.distributed import torchrun_group
with torchrun_group():
    env = make_vec_env("CartPole-v1", 2, seed=1)
    model = ACER("MlpPolicy", env, device=sys.argv[1], seed=0, replay_start=32).learn(800)
    sys.stdout.write(f"trained on {model.device} {model.policy.flat.vectors[0].sum().item()}\n")  # one piece
"""


@pytest.mark.parametrize(("n_ranks", "device"), [(1, "cuda"), (2, "cpu"), (2, "cuda")])
def test_torchrun(n_ranks: int, device: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}"]
    run = subprocess.run([*command, str(tmp_path / "program.py"), device], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    lines = [line for line in run.stdout.splitlines() if line.startswith("trained on")]
    assert len(lines) == n_ranks
    assert len(set(lines)) == 1, lines


def test_an_lstm_that_has_predicted_can_be_updated() -> None:
    model = make_model("LSTM").learn(64)
    model.predict(some_observations(model))  # leaves the policy in evaluation mode, in which cuDNN has no backward pass
    model.update(model.replay_buffer.sample(4, None, np.random.default_rng(0)))


@pytest.mark.parametrize(
    "make", [multi_discrete, lambda: Recorder(spaces.MultiBinary(3))], ids=["MultiDiscrete", "bits"]
)
def test_a_run_with_many_factors_repeats_itself(make: Any, tmp_path: Path) -> None:
    """Sums of several candidates' factors have one order."""
    expected = learnt(plain(make), {"device": "cuda"}, Rows(), n_steps=160)
    with pytest.raises(Killed):
        learnt(plain(make), {"device": "cuda"}, Rows(), KillAt(97), n_steps=160, folder=tmp_path)
    require_same(learnt(plain(make), {"device": "cuda"}, Rows(), n_steps=160, folder=tmp_path), expected)


def test_a_run_with_an_lstm_of_two_layers_that_was_killed_ends_as_one_that_was_not(tmp_path: Path) -> None:
    kwargs = {"lstm_hidden_size": 8, "n_lstm_layers": 2}
    arguments = {"policy": "MlpLstmPolicy", "policy_kwargs": kwargs, "device": "cuda"}
    expected = learnt(plain(Recall), arguments, Rows(), n_steps=160)
    with pytest.raises(Killed):
        learnt(plain(Recall), arguments, Rows(), KillAt(97), n_steps=160, folder=tmp_path)
    require_same(learnt(plain(Recall), arguments, Rows(), n_steps=160, folder=tmp_path), expected)


@every_case
def test_distributions_and_values_are_those_of_the_cpu(case: str, tmp_path: Path) -> None:
    there = make_model(case).learn(64)
    here = copied(there, "cpu", tmp_path)
    observations, found = some_observations(there), []
    for model in (there, here):
        policy, tensors = model.policy, tensors_of(model, observations)
        policy.set_training_mode(False)
        with th.no_grad():
            distribution = policy.get_distribution(tensors)
            mode, sampled = distribution.mode(), distribution.sample()
            assert mode.device.type == sampled.device.type == model.device.type
            values, log_prob, entropy = policy.evaluate_actions(tensors, mode)
            actions, of_forward, _ = policy(tensors, deterministic=True)
            parts = [values, policy.predict_values(tensors), of_forward, log_prob, entropy, mode, actions.float()]
        given = model.predict(observations, deterministic=True)[0]
        probabilities = model.action_probability(observations)
        parts += [
            th.as_tensor(part)
            for part in (probabilities if isinstance(probabilities, (list, tuple)) else [probabilities])
        ]
        parts += [
            th.as_tensor(model.action_probability(observations, actions=given, logp=logp)) for logp in (False, True)
        ]
        found.append([part.float().cpu() for part in parts])
    for theirs, ours in zip(*found, strict=True):
        th.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)


def test_gradients_of_given_actions_are_those_of_the_cpu(tmp_path: Path) -> None:
    there = make_model("LSTM").learn(64)
    here = copied(there, "cpu", tmp_path)
    observations, found = some_observations(there), []
    for model in (there, here):
        model.policy.optimizer.zero_grad()
        actions = th.ones(2, 1, device=model.device)
        values, log_prob, _ = model.policy.evaluate_actions(tensors_of(model, observations), actions)
        (values.sum() + log_prob.sum()).backward()  # type: ignore[no-untyped-call]
        found.append([gradient.cpu().clone() for gradient in model.policy.flat.gradients()])
    th.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


def test_masks_and_states_may_be_given_from_either_side() -> None:
    model = make_model("masks").learn(32)
    observations = some_observations(model)
    assert model.env is not None
    masks = np.stack(model.env.env_method("action_masks"))
    for given in (masks, th.from_numpy(masks), th.from_numpy(masks).to("cuda")):
        actions = model.predict(observations, action_masks=given)[0]
        assert masks[np.arange(2), actions - 2].all()
    recurrent = make_model("LSTM").learn(32)
    state: Any = None
    for _ in range(3):
        _, state = recurrent.predict(some_observations(recurrent), state, episode_start=np.array([True, False]))
        assert isinstance(state, np.ndarray)
    probabilities = recurrent.action_probability(some_observations(recurrent), state, mask=np.array([False, True]))
    np.testing.assert_allclose(probabilities.sum(-1), 1, rtol=1e-5)


def test_stacks_of_frames_kept_on_the_gpu_are_those_in_memory(tmp_path: Path) -> None:
    models = []
    for storage in ("cuda", "cpu"):
        env = VecFrameStack(make_vec_env(Catch, 2, seed=1), 4)
        kwargs: dict[str, Any] = {"policy_kwargs": {"use_bfloat16": False}, "device": "cuda"}
        models.append(ACER("CnnPolicy", env, **SMALL, **kwargs, replay_buffer_kwargs={"storage_device": storage}))
        models[-1].learn(200)
    for seed in range(5):
        first, second = (
            model.replay_buffer.sample(4, None, np.random.default_rng(seed)).observations for model in models
        )
        th.testing.assert_close(first, second, rtol=0, atol=0)
    require_close(models[0], models[1], 0)
    moved = copied(models[0], "cpu", tmp_path, replay_buffer_kwargs={"storage_device": "cpu"})
    ours, theirs = (each.replay_buffer.sample(4, None, np.random.default_rng(0)) for each in (moved, models[0]))
    th.testing.assert_close(ours.observations, theirs.observations.cpu(), rtol=0, atol=0)  # type: ignore[union-attr]


@pytest.mark.parametrize("make", [lambda: gym.make("Pendulum-v1"), Constant], ids=["Pendulum", "truncated"])
def test_observations_kept_on_the_gpu_are_normalised_as_those_in_memory(make: Any) -> None:
    models = []
    for storage in ("cuda", "cpu"):
        env = VecNormalize(make_vec_env(make, 2, seed=1))
        kwargs = {"storage_device": storage}
        models.append(ACER("MlpPolicy", env, **SMALL, device="cuda", replay_buffer_kwargs=kwargs).learn(160))
    batches = [
        model.replay_buffer.sample(4, model.get_vec_normalize_env(), np.random.default_rng(0)) for model in models
    ]
    th.testing.assert_close(batches[0].observations, batches[1].observations, rtol=0, atol=0)
    require_close(models[0], models[1], 0)


@both_ways
@pytest.mark.parametrize("case", ["Dict with LSTM", "masks", "truncated"])
@pytest.mark.parametrize("n_envs", [2, 3])
def test_a_replay_buffer_goes_from_one_device_to_the_other(
    case: str, source: str, target: str, n_envs: int, tmp_path: Path
) -> None:
    saved = make_model(case, source, replay_buffer_kwargs={"storage_device": source}).learn(160)
    saved.save_replay_buffer(tmp_path / "buffer")
    make_env, own = CASES[case]
    arguments: dict[str, Any] = {"policy": "MlpPolicy", **SMALL, **own}
    env = make_vec_env(make_env, n_envs, seed=1)
    loaded = ACER(env=env, device=target, replay_buffer_kwargs={"storage_device": target}, **arguments)
    loaded.load_replay_buffer(tmp_path / "buffer")
    assert loaded.replay_buffer.storage_device.type == target
    if n_envs == 2:
        ours, theirs = (each.replay_buffer.sample(4, None, np.random.default_rng(0)) for each in (loaded, saved))
        for name in ("observations", "final_observations", "masks", "actions", "behaviour", "states"):
            one, other = (by_key(getattr(batch, name)) for batch in (ours, theirs))
            for key, part in other.items():
                if part is not None:
                    assert one[key].device.type == target
                    th.testing.assert_close(one[key].cpu(), part.cpu(), rtol=0, atol=0)
    loaded.learn(80)


def test_a_buffer_that_is_saved_with_the_agent_keeps_its_device(tmp_path: Path) -> None:
    model = make_model("Discrete", replay_buffer_kwargs={"storage_device": "cuda"}).learn(80)
    model.save(tmp_path / "agent", include=["replay_buffer"])
    loaded = ACER.load(tmp_path / "agent", model.env, device="cuda")
    ours, theirs = (each.replay_buffer.sample(4, None, np.random.default_rng(0)) for each in (loaded, model))
    th.testing.assert_close(ours.observations, theirs.observations, rtol=0, atol=0)
    loaded.learn(80)


@both_ways
@pytest.mark.parametrize("case", ["Discrete", "LSTM", "Dict", "masks"])
def test_a_checkpoint_is_continued_on_the_other_device(case: str, source: str, target: str, tmp_path: Path) -> None:
    saved = make_model(case, source).learn(120, checkpoint=tmp_path)
    loaded = ACER.load_checkpoint(tmp_path, make_vec_env(CASES[case][0], 2, seed=1), device=target)
    require_close(saved, loaded, 0)
    require_on(loaded, target)
    loaded.learn(240)
    assert loaded.num_timesteps >= 240
    require_on(loaded, target)
    continued = make_model(case, target).learn(240, checkpoint=tmp_path)  # as a program that is started again
    require_on(continued, target)
    require_close(continued, loaded, 1e-6)


@both_ways
@pytest.mark.parametrize("optimizer", [None, th.optim.Adam, th.optim.NAdam, th.optim.SGD])
def test_parameters_go_from_one_device_to_the_other(source: str, target: str, optimizer: Any, tmp_path: Path) -> None:
    kwargs = {} if optimizer is None else {"optimizer_class": optimizer}
    first, second = (make_model("Box", device, policy_kwargs=kwargs).learn(80) for device in (source, target))
    second.set_parameters(first.get_parameters())
    require_close(first, second, 0)
    first.save(tmp_path / "agent")
    second.set_parameters(tmp_path / "agent", device=target)
    second.load_parameters(tmp_path / "agent")
    second.load_parameters([parameter.detach() for parameter in first.get_parameter_list()])
    require_on(second, target)
    second.learn(80)
    require_on(second, target)


def test_copies_and_pickles_of_an_agent_stay_on_the_gpu(tmp_path: Path) -> None:
    for case in ("Discrete", "LSTM"):
        model = make_model(case).learn(64)
        policy_path = str(tmp_path / "policy")
        model.policy.save(policy_path)
        alone = type(model.policy).load(policy_path, device="cuda")
        assert {parameter.device.type for parameter in alone.parameters()} == {"cuda"}
        unpickled: ACERPolicy = pickle.loads(pickle.dumps(model.policy))
        for other in (deepcopy(model.policy), unpickled):
            assert {part.device.type for part in (*other.parameters(), *other.flat.vectors)} == {"cuda"}
            batch = model.replay_buffer.sample(4, None, np.random.default_rng(0))
            other.set_training_mode(True)
            evaluation = other.evaluate(batch, 2, np.random.default_rng(0))
            evaluation.backward(th.ones_like(evaluation.stats), th.ones_like(evaluation.q_values))
            other.optimizer.step()


@pytest.mark.parametrize("case", ["Discrete", "Box", "MultiDiscrete", "MultiBinary", "masks", "LSTM", "pixels"])
def test_demonstrations_are_cloned_as_on_the_cpu(case: str, tmp_path: Path) -> None:
    expert = make_model(case).learn(32)
    expert.set_random_seed(0)
    with pytest.warns(UserWarning, match="only the first of 2"):
        arrays = generate_expert_traj(expert, n_episodes=4)
    there = make_model(case)
    here = copied(there, "cpu", tmp_path)
    for model in (there, here):
        np.random.seed(0)
        dataset = ExpertDataset(traj_data=arrays, verbose=0, randomize=False, batch_size=16)
        model.pretrain(dataset, n_epochs=2, learning_rate=1e-3)
        for behaviour in ("expert", "policy"):
            dataset.to_replay_buffer(model, behaviour=behaviour)
    require_close(there, here, 1e-3)
    ours, theirs = (model.replay_buffer.sample(4, None, np.random.default_rng(0)) for model in (here, there))
    th.testing.assert_close(ours.behaviour, theirs.behaviour.cpu(), rtol=1e-3, atol=1e-3)
    th.testing.assert_close(ours.actions, theirs.actions.cpu(), rtol=0, atol=0)
    there.learn(64)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Acrobot-v1"])
def test_an_agent_of_stable_baselines_acts_as_on_the_cpu(env_id: str) -> None:
    obs_rms = AGENTS / env_id / "obs_rms.pkl"
    found = []
    for device in ("cuda", "cpu"):
        env = make_vec_env(env_id, 2, seed=1)
        arguments: dict[str, Any] = {"obs_rms": obs_rms if obs_rms.exists() else None, "verbose": 0, "seed": 0}
        model = load_stable_baselines(AGENTS / f"{env_id}.pkl", env, device=device, **arguments)
        require_on(model, device)
        assert model.env is not None
        observations: Any = model.env.reset()
        found.append(model.action_probability(observations))
        model.learn(100)
        require_on(model, device)
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", ["Discrete", "Box", "Dict", "LSTM"])
def test_histograms_are_written_and_hold_no_memory_of_the_gpu(case: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    arguments: dict[str, Any] = {"tensorboard_log": str(tmp_path / "log"), "full_tensorboard_log": True}
    model = make_model(case, **arguments).learn(64, log_interval=1)
    assert list((tmp_path / "log").rglob("events.*"))
    model.learn(64, log_interval=None, checkpoint=tmp_path / "run")  # its values wait for a callback that writes them
    values = [getattr(value, "image", value) for value in model.logger.name_to_value.values()]
    assert {value.device.type for value in values if isinstance(value, th.Tensor)} == {"cpu"}
