"""On a GPU an agent computes what it computes on the CPU, to rounding, and repeats itself to the bit."""

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.env_util import make_vec_env

from sb3_acer import ACER
from sb3_acer.export import export_onnx
from tests.helpers import Catch, Constant, Recall, Recorder
from tests.test_masks import Doors
from tests.test_resuming import LSTM, KillAt, Killed, Rows, learnt, normalized, plain, require_same

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:networks of .* parameters are trained faster")]
SMALL: dict[str, Any] = {"n_steps": 8, "buffer_size": 400, "replay_start": 32, "replay_ratio": 2, "seed": 3}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "Discrete": (Recorder, {}),
    "Box": (lambda: gym.make("Pendulum-v1"), {}),
    "MultiDiscrete": (lambda: Recorder(spaces.MultiDiscrete([3, 2])), {}),
    "MultiBinary": (lambda: Recorder(spaces.MultiBinary(3)), {}),
    "masks": (Doors, {}),
    "LSTM": (Recall, LSTM),
    "LSTM with normalised layers": (Recall, {**LSTM, "policy": "MlpLnLstmPolicy"}),
    "GRU": (Recall, {**LSTM, "policy": "MlpGruPolicy"}),
    "pixels": (Catch, {"policy": "CnnPolicy", "policy_kwargs": {"use_bfloat16": False}}),
    "Adam": (Recorder, {"policy_kwargs": {"optimizer_class": th.optim.Adam}}),
    "SGD": (Recorder, {"policy_kwargs": {"optimizer_class": th.optim.SGD, "optimizer_kwargs": {"momentum": 0.9}}}),
}


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


def copied(model: ACER, device: str, folder: Path) -> ACER:
    model.save(folder / "agent")
    model.save_replay_buffer(folder / "buffer")
    other = ACER.load(folder / "agent", model.env, device=device)
    other.load_replay_buffer(folder / "buffer")
    return other


def require_close(ours: ACER, theirs: ACER, tolerance: float) -> None:
    for own, other in ((ours.policy, theirs.policy), (ours.average_policy, theirs.average_policy)):
        for name, value in own.state_dict().items():
            th.testing.assert_close(value.cpu(), other.state_dict()[name].cpu(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", CASES)
def test_updates_are_those_of_the_cpu(case: str, tmp_path: Path) -> None:
    there = make_model(case).learn(120)
    here = copied(there, "cpu", tmp_path)
    require_close(there, here, 0)
    for model in (there, here):
        assert {parameter.device.type for parameter in model.policy.parameters()} == {model.device.type}
        for seed in range(3):
            model.set_random_seed(seed)
            model.update(model.replay_buffer.sample(4, None, np.random.default_rng(seed)))
    require_close(there, here, 1e-4)


@pytest.mark.parametrize("case", CASES)
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


@pytest.mark.parametrize("case", ["Discrete", "pixels", "LSTM"])
def test_observations_kept_on_the_gpu_are_those_in_memory(case: str, tmp_path: Path) -> None:
    there = make_model(case, replay_buffer_kwargs={"storage_device": "cuda"}).learn(160)
    here = make_model(case).learn(160)
    batches = [model.replay_buffer.sample(4, None, np.random.default_rng(0)) for model in (there, here)]
    assert there.replay_buffer.storage_device.type == "cuda"
    th.testing.assert_close(batches[0].observations, batches[1].observations, rtol=0, atol=0)
    require_close(there, here, 0)
    require_close(copied(there, "cpu", tmp_path), there, 0)


def test_an_agent_learns_on_a_gpu() -> None:
    model = ACER("MlpPolicy", make_vec_env(Constant, 4), **SMALL, gamma=0.5, learning_rate=5e-3, device="cuda").learn(
        4000
    )
    value = model.policy.predict_values(th.ones(1, 1, device="cuda"))
    assert value.item() == pytest.approx(2, rel=0.05)


def test_small_networks_are_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"networks of [\d,]+ parameters are trained faster on the CPU: device='cpu'"):
        make_model("Discrete").learn(16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_model("Discrete", policy_kwargs={"net_arch": [512, 512]}).learn(16)


def test_an_exported_agent_acts_as_it_did_on_the_gpu(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model = make_model("Discrete").learn(64)
    export_onnx(model, tmp_path / "agent.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "agent.onnx", providers=["CPUExecutionProvider"])
    observations = np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32)
    (name,) = [each.name for each in session.get_inputs()]
    actions = session.run(None, {name: observations})[0]
    np.testing.assert_array_equal(actions, model.predict(observations, deterministic=True)[0])


PROGRAM = """
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
