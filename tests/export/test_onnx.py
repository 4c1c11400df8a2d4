"""An exported file computes what the agent does, for any number of rows, or is not written."""

import io
import logging
import pickle
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import onnxruntime
import pytest
import torch as th
from gymnasium import spaces
from sb3_contrib.common.envs import InvalidActionEnvDiscrete
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecFrameStack, VecNormalize
from torch import nn
from torch.onnx._internal.exporter._registration import ONNXRegistry

from sb3_acer import ACER
from sb3_acer.__main__ import run as run_command
from sb3_acer.checks import LARGEST
from sb3_acer.export import export_onnx
from sb3_acer.export.onnx import ActingNetwork, _quiet, main
from tests.helpers import Recorder, Shows, WithDropout

Space = spaces.Space[Any]

VECTOR, IMAGE = spaces.Box(-5, 5, (4,)), spaces.Box(0, 255, (4, 36, 36), np.uint8)
DICT = spaces.Dict({"state": VECTOR, "image": IMAGE, "cell": spaces.Discrete(4), "bits": spaces.MultiBinary(3)})
CASES: dict[str, tuple[str, Space, Space]] = {
    "Discrete": ("MlpPolicy", VECTOR, spaces.Discrete(5, start=2)),
    "MultiDiscrete": ("MlpPolicy", VECTOR, spaces.MultiDiscrete([2, 3, 4])),
    "MultiBinary": ("MlpPolicy", spaces.MultiDiscrete([3, 4]), spaces.MultiBinary(4)),
    "Box": ("MlpPolicy", VECTOR, spaces.Box(-0.1, 0.1, (2,))),
    "Box of integers": ("MlpPolicy", spaces.Discrete(7), spaces.Box(-3, 3, (2, 2), np.int32)),
    "LSTM": ("MlpLstmPolicy", VECTOR, spaces.Discrete(3)),
    "layer-normalised LSTM": ("MlpLnLstmPolicy", VECTOR, spaces.Box(-1, 1, (1,))),
    "images": ("CnnPolicy", IMAGE, spaces.Discrete(3)),
    "images with an LSTM": ("CnnLstmPolicy", IMAGE, spaces.MultiBinary(2)),
    "Dict": ("MultiInputPolicy", DICT, spaces.Discrete(4)),
}


@pytest.fixture(scope="module", autouse=True)
def registry_once() -> Iterator[None]:
    """Each export makes the same table of all operators that torch knows, which is half of its time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(cache(ONNXRegistry.from_torchlib)))
        yield


def env_of(observation_space: Space, action_space: Space) -> VecEnv:
    env: gym.Env[Any, Any] = gym.Env()
    env.observation_space, env.action_space = observation_space, action_space
    return DummyVecEnv([lambda: env])


def agent(policy: str = "MlpPolicy", observations: Space = VECTOR, actions: Space = VECTOR, **kwargs: Any) -> ACER:
    if "Lstm" in policy:
        kwargs["lstm_hidden_size"] = 16
    kwargs |= {"use_bfloat16": False} if "Cnn" in policy else {"net_arch": [16]}
    model = ACER(policy, env_of(observations, actions), seed=0, device="cpu", policy_kwargs=kwargs)
    with th.no_grad():
        model.policy.pi_head.weight.mul_(300)  # an untrained policy hardly depends on its input
    return model


def sampled(space: Space, n: int) -> Any:
    space.seed(1)
    if isinstance(space, spaces.Dict):
        return {key: sampled(part, n) for key, part in space.items()}
    return np.stack([np.asarray(space.sample()) for _ in range(n)])


def inputs_of(observations: Any) -> dict[str, np.ndarray]:
    if isinstance(observations, dict):
        return {f"observation.{key}": part for key, part in observations.items()}
    return {"observation": observations}


def run(path: Path, **inputs: np.ndarray) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(path)
    return dict(zip([output.name for output in session.get_outputs()], session.run(None, inputs), strict=True))


def statistics(model: ACER, observations: Any, states: Any = None) -> tuple[np.ndarray, np.ndarray]:
    stats, states, _ = model.policy.predict_statistics(observations, states)
    return stats.numpy(), states.numpy()


@pytest.mark.parametrize(("policy", "observations", "actions"), CASES.values(), ids=CASES)
def test_a_file_computes_what_the_agent_does(policy: str, observations: Space, actions: Space, tmp_path: Path) -> None:
    model = agent(policy, observations, actions)
    export_onnx(model, tmp_path / "agent.onnx")
    given = sampled(observations, 1000)
    states, given_states = None, {}
    if model.policy.state_size:
        states = np.random.default_rng(0).normal(size=(1000, model.policy.state_size)).astype(np.float32)
        given_states = {"state": states}
    found = run(tmp_path / "agent.onnx", **inputs_of(given), **given_states)
    stats, after = statistics(model, given, states)
    np.testing.assert_allclose(found["statistics"], stats, rtol=1e-5, atol=1e-5)
    assert found["statistics"].std(0).max() > 0.01  # they depend on the observations
    predicted, _ = model.predict(given, states, deterministic=True)
    assert found["action"].shape == predicted.shape
    assert found["action"].dtype == predicted.dtype
    if isinstance(actions, spaces.Box):
        np.testing.assert_allclose(found["action"], predicted, rtol=1e-5, atol=1e-5)
    else:
        assert (found["action"] != predicted).mean() < 0.002  # two probabilities may be equal to the last digit
    if states is None:
        assert set(found) == {"action", "statistics"}
    else:
        np.testing.assert_allclose(found["next_state"], after, rtol=1e-5, atol=1e-5)


def random_masks(rng: np.random.Generator, n: int, size: int) -> np.ndarray:
    """Of each row any number of outcomes is valid, one at least."""
    masks: np.ndarray = rng.random((n, size)).argsort(-1) <= rng.integers(size, size=(n, 1))
    return masks


@pytest.mark.parametrize(
    ("policy", "actions", "sizes"),
    [
        ("MlpPolicy", spaces.Discrete(5, start=2), [5]),
        ("MlpPolicy", spaces.MultiBinary(3), [2, 2, 2]),
        ("MlpLstmPolicy", spaces.MultiDiscrete([1, 3, 4]), [1, 3, 4]),
    ],
    ids=["Discrete", "MultiBinary", "MultiDiscrete with an LSTM"],
)
def test_a_file_takes_masks_of_invalid_actions_on_request(
    policy: str, actions: Space, sizes: list[int], tmp_path: Path
) -> None:
    model, given = agent(policy, actions=actions), sampled(VECTOR, 200)
    export_onnx(model, tmp_path / "agent.onnx", action_masks=True)
    rng = np.random.default_rng(0)
    masks = np.concatenate([random_masks(rng, 200, size) for size in sizes], -1)
    state = {"state": np.zeros((200, model.policy.state_size), np.float32)} if model.policy.state_size else {}
    found = run(tmp_path / "agent.onnx", observation=given, action_masks=masks, **state)
    assert not found["statistics"][~masks].any()
    stats, _, _ = model.policy.predict_statistics(given, action_masks=masks)
    np.testing.assert_allclose(found["statistics"], stats, rtol=1e-5, atol=1e-5)
    expected, _ = model.predict(given, deterministic=True, action_masks=masks)
    assert (found["action"] != expected).mean() < 0.01
    with pytest.raises(ValueError, match="action_masks must be False for Box actions"):
        export_onnx(agent(policy), tmp_path / "agent.onnx", action_masks=True)
    with pytest.raises(ValueError, match="action_masks must be True or False, got"):
        export_onnx(model, tmp_path / "agent.onnx", action_masks=masks)  # type: ignore[arg-type]


def test_a_file_without_masks_of_an_agent_trained_with_them_is_written_with_a_warning(tmp_path: Path) -> None:
    model = ACER("MlpPolicy", DummyVecEnv([lambda: InvalidActionEnvDiscrete(3, 1)]), device="cpu").learn(40)
    model.save(tmp_path / "agent")
    with pytest.warns(UserWarning, match="the file's actions may be invalid; .* give action_masks=True"):
        export_onnx(ACER.load(tmp_path / "agent"), tmp_path / "agent.onnx")
    main([str(tmp_path / "agent.zip"), str(tmp_path / "masked.onnx"), "--action-masks"])
    found = run(
        tmp_path / "masked.onnx", observation=np.zeros(1, np.int64), action_masks=np.array([[False, False, True]])
    )
    assert found["action"] == [2]


def test_a_recurrent_file_is_run_step_by_step_and_names_its_free_axis_as_in_the_documentation(tmp_path: Path) -> None:
    model = agent("MlpLstmPolicy", actions=spaces.Discrete(3))
    export_onnx(model, tmp_path / "agent")  # the suffix may be left out
    session = onnxruntime.InferenceSession(tmp_path / "agent.onnx")
    assert {each.shape[0] for each in (*session.get_inputs(), *session.get_outputs())} == {"N"}
    steps, state, own = sampled(VECTOR, 20), np.zeros((1, model.policy.state_size), np.float32), None
    for observation in steps[:, np.newaxis]:
        found = run(tmp_path / "agent.onnx", observation=observation, state=state)
        action, own = model.predict(observation, own, deterministic=True)
        state = found["next_state"]
        np.testing.assert_array_equal(found["action"], action)
        np.testing.assert_allclose(state, own, rtol=1e-5, atol=1e-5)


def normalized(observations: Space, **kwargs: Any) -> VecNormalize:
    normalize = VecNormalize(env_of(observations, spaces.Discrete(3)), **kwargs)
    rng = np.random.default_rng(0)
    rows: Any = normalize.__dict__.get("obs_rms", {})
    for statistics_ in rows.values() if isinstance(rows, dict) else [rows]:
        statistics_.update(1e4 + rng.normal(size=(50, *np.shape(statistics_.mean))))  # float32 has four digits left
    return normalize


def test_statistics_of_vec_normalize_are_put_in_on_request(tmp_path: Path) -> None:
    """Those of a file are put in by the command, below."""
    model, normalize = agent(actions=spaces.Discrete(3)), normalized(VECTOR, clip_obs=0.1, epsilon=2.0)
    given = (1e4 + np.random.default_rng(1).normal(size=(1000, 4))).astype(np.float32)
    stats, _ = statistics(model, normalize.normalize_obs(given))
    export_onnx(model, tmp_path / "agent.onnx", normalize)
    found = run(tmp_path / "agent.onnx", observation=given)
    np.testing.assert_allclose(found["statistics"], stats, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kwargs", [{"norm_obs_keys": ["speed"]}, {"norm_obs": False}], ids=["one key", "rewards only"])
def test_only_what_vec_normalize_normalizes_is_normalized(kwargs: dict[str, Any]) -> None:
    space = spaces.Dict({"speed": VECTOR, "place": VECTOR})
    model, normalize = agent("MultiInputPolicy", space, spaces.Discrete(3)), normalized(space, **kwargs)
    given = sampled(space, 50)
    stats, _ = statistics(model, normalize.normalize_obs(given))
    network = ActingNetwork(model.policy, normalize)
    with th.no_grad():
        outputs = network(*(th.from_numpy(part) for part in given.values()))
    np.testing.assert_allclose(outputs[1].numpy(), stats, rtol=1e-5, atol=1e-5)


def test_images_beside_what_vec_normalize_normalizes_may_have_their_channels_last() -> None:
    space = spaces.Dict({"picture": spaces.Box(0, 255, (40, 40, 3), np.uint8), "speed": VECTOR})
    normalize = normalized(space, norm_obs_keys=["speed"])
    model = ACER("MultiInputPolicy", normalize, n_steps=5, device="cpu")
    assert isinstance(model.observation_space, spaces.Dict)
    assert model.observation_space["picture"].shape == (3, 40, 40)
    given = sampled(model.observation_space, 5)
    speed = normalize._normalize_obs(given["speed"], normalize.obs_rms["speed"])
    stats, _ = statistics(model, {**given, "speed": speed.astype(np.float32)})
    network = ActingNetwork(model.policy, normalize)
    with th.no_grad():
        outputs = network(*(th.from_numpy(part) for part in given.values()))
    np.testing.assert_allclose(outputs[1].numpy(), stats, rtol=1e-5, atol=1e-5)


def test_statistics_of_an_environment_with_other_keys_are_refused() -> None:
    model = agent("MultiInputPolicy", spaces.Dict({"speed": VECTOR, "place": VECTOR}), spaces.Discrete(3))
    normalize = normalized(spaces.Dict({"speed": VECTOR, "time": VECTOR}), norm_obs_keys=["speed"])
    with pytest.raises(ValueError, match="vec_normalize must be of the agent's observations"):
        ActingNetwork(model.policy, normalize)


def test_keys_of_another_order_than_the_alphabet_have_the_observations_of_their_own_spaces(tmp_path: Path) -> None:
    space = spaces.Dict([("speed", VECTOR), ("place", spaces.Box(-1, 1, (2,)))])
    model, normalize = agent("MultiInputPolicy", space, spaces.Discrete(3)), normalized(space)
    export_onnx(model, tmp_path / "agent.onnx", normalize)
    given = sampled(space, 50)
    stats, _ = statistics(model, normalize.normalize_obs(given))
    found = run(tmp_path / "agent.onnx", **{f"observation.{key}": part for key, part in given.items()})
    np.testing.assert_allclose(found["statistics"], stats, rtol=1e-5, atol=1e-5)


def test_a_file_is_tried_with_numbers_that_training_takes_and_draws_none_from_the_agents_own_space() -> None:
    wide = spaces.Box(-1e300, 1e300, (4,), np.float64)
    (inputs,) = ActingNetwork(agent(observations=wide).policy, None).sample(100)
    assert 0 < inputs.abs().max() <= LARGEST
    policy = agent(observations=spaces.Discrete(1000)).policy
    policy.observation_space.seed(0)
    expected = policy.observation_space.sample()
    policy.observation_space.seed(0)
    ActingNetwork(policy, None).sample(3)
    assert policy.observation_space.sample() == expected


class Opaque(BaseFeaturesExtractor):
    """Computes with numpy, which a trace does not see."""

    def __init__(self, observation_space: spaces.Space[Any]) -> None:
        super().__init__(observation_space, 4)

    def forward(self, observations: th.Tensor) -> th.Tensor:
        return th.from_numpy(np.tanh(observations.detach().numpy()))


class Fixed(BaseFeaturesExtractor):
    """Looks at a value, of which a trace would make a constant."""

    def __init__(self, observation_space: spaces.Space[Any]) -> None:
        super().__init__(observation_space, 4)

    def forward(self, observations: th.Tensor) -> th.Tensor:
        return observations * (2.0 if float(observations.sum()) > 0 else 1.0)


@pytest.mark.parametrize("extractor", [Opaque, Fixed])
def test_what_cannot_be_traced_raises_and_writes_no_file(extractor: type[Any], tmp_path: Path) -> None:
    model = agent(actions=spaces.Discrete(3), features_extractor_class=extractor)
    with pytest.raises(ValueError, match="the policy cannot be exported: MlpPolicy must compute with operations on"):
        export_onnx(model, tmp_path / "agent.onnx")
    assert not list(tmp_path.iterdir())


class Keeping(BaseFeaturesExtractor):
    """Keeps its output, as for a loss of its own; tensors with a history cannot be copied."""

    def __init__(self, observation_space: spaces.Space[Any]) -> None:
        super().__init__(observation_space, 4)
        self.scale = nn.Parameter(th.ones(4))

    def forward(self, observations: th.Tensor) -> th.Tensor:
        self.output = self.scale * observations
        return self.output


def test_a_policy_that_cannot_be_copied_is_refused(tmp_path: Path) -> None:
    model = agent(actions=spaces.Discrete(3), features_extractor_class=Keeping)
    model.policy.extract_features(th.zeros(1, 4), model.policy.features_extractor)
    with pytest.raises(ValueError, match=r"the policy cannot be exported: copy.deepcopy must be able to copy it"):
        export_onnx(model, tmp_path / "agent.onnx")


def test_a_file_that_computes_other_numbers_is_refused() -> None:
    one, other = (ActingNetwork(agent(actions=spaces.Discrete(3)).policy, None) for _ in range(2))
    contents = one.to_onnx()
    one.require_equal(contents)
    with th.no_grad():
        other.policy.pi_head.bias.add_(th.tensor([1.0, 0.0, 0.0]))
    with pytest.raises(ValueError, match="statistics must be what MlpPolicy computes"):
        other.require_equal(contents)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("MlpPolicy", "agent.onnx"), "model must be an agent of ACER"),
        ((None, "agent.onnx", env_of(VECTOR, VECTOR)), "vec_normalize must be a VecNormalize, or a file of one"),
        ((None, "agent.onnx", Path(__file__)), "vec_normalize must be a VecNormalize, or a file of one, .* got .*.py:"),
        ((None, "agent.onnx", normalized(spaces.Box(-1, 1, (3,)))), "vec_normalize must be of the agent's observation"),
        ((None, 5), "path must be a path"),
        ((None, "agent.zip"), "path must be that of a file whose name ends in .onnx, got 'agent.zip'"),
    ],
)
def test_wrong_arguments_are_named(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        export_onnx(arguments[0] or agent(), *arguments[1:])


def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    agent().save(tmp_path / "agent.zip")
    monkeypatch.setattr("sb3_acer.extras.find_spec", lambda name: None if name == "onnxscript" else name)
    with pytest.raises(ImportError, match=r'needs onnxscript: in the folder .* pip install .*"\.\[onnx\]"'):
        export_onnx(agent(), "agent.onnx")
    assert run_command("export", str(tmp_path / "agent.zip"), str(tmp_path / "agent.onnx")) == 2  # as other commands
    assert "sb3-acer export: " in capsys.readouterr().err


def test_the_command_exports_a_saved_agent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = agent(actions=spaces.Discrete(3))
    model.save(tmp_path / "agent.zip")
    normalize = normalized(VECTOR)
    (tmp_path / "agent").mkdir()
    normalize.save(str(tmp_path / "agent" / "vecnormalize.pkl"))
    arguments = [str(tmp_path / "agent.zip"), str(tmp_path / "out")]  # the suffix may be left out
    main([*arguments, "--vec-normalize", str(tmp_path / "agent" / "vecnormalize.pkl")])
    printed = capsys.readouterr().out
    assert printed.endswith(f": {tmp_path}/out.onnx\n")
    assert "add --vec-normalize" not in printed
    given = sampled(VECTOR, 3)
    found = run(tmp_path / "out.onnx", observation=given)
    np.testing.assert_allclose(found["statistics"], statistics(model, normalize.normalize_obs(given))[0], 1e-5, 1e-5)


class Raising:
    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_normalised_observations_are_expected_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = agent(actions=spaces.Discrete(3))
    model.set_env(VecNormalize(env_of(VECTOR, spaces.Discrete(3))))
    with pytest.warns(UserWarning, match=r"give vec_normalize=model\.get_vec_normalize_env\(\)"):
        export_onnx(model, tmp_path / "out.onnx")
    stacked = ACER("MlpPolicy", VecFrameStack(VecNormalize(env_of(VECTOR, spaces.Discrete(3))), 2), device="cpu")
    with pytest.warns(UserWarning, match="the file expects normalised observations$"):  # its export would be refused
        export_onnx(stacked, tmp_path / "out.onnx")
    model.save(tmp_path / "agent.zip")
    (tmp_path / "my agent").mkdir()  # as in a run's folder
    (tmp_path / "my agent" / "vecnormalize.pkl").write_bytes(pickle.dumps(Raising()))  # reading it would raise an error
    main([str(tmp_path / "agent.zip"), str(tmp_path / "out.onnx")])
    assert f"add --vec-normalize '{tmp_path}/my agent/vecnormalize.pkl'\n" in capsys.readouterr().out


def test_without_normalised_observations_there_is_no_warning_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ActingNetwork, "to_onnx", lambda network: b"")
    monkeypatch.setattr(ActingNetwork, "require_equal", lambda network, contents: None)
    model = agent(actions=spaces.Discrete(3))
    model.set_env(VecNormalize(env_of(VECTOR, spaces.Discrete(3)), norm_obs=False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export_onnx(model, tmp_path / "agent.onnx")


def test_an_open_file_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ActingNetwork, "to_onnx", lambda network: b"network")
    monkeypatch.setattr(ActingNetwork, "require_equal", lambda network, contents: None)
    file = io.BytesIO()
    export_onnx(agent(), file)
    assert file.getvalue() == b"network"


def test_torch_is_quiet_only_while_it_exports() -> None:
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    with _quiet():
        assert logger.level == logging.ERROR
    assert logger.level == before


def test_the_command_has_no_traceback_for_a_users_mistake(tmp_path: Path) -> None:
    with (tmp_path / "dict.pkl").open("wb") as file:
        pickle.dump({}, file)
    agent().save(tmp_path / "agent.zip")
    for arguments in (["none.zip"], ["dict.pkl"], ["agent.zip", "--vec-normalize", str(tmp_path / "dict.pkl")]):
        with pytest.raises(SystemExit, match="sb3-acer export: "):
            main([str(tmp_path / arguments[0]), str(tmp_path / "out.onnx"), *arguments[1:]])
    assert not (tmp_path / "out.onnx").exists()
    with pytest.raises(SystemExit, match=r"sb3-acer export: path must be that of a file whose name ends in \.onnx"):
        main([str(tmp_path / "agent.zip")] * 2)
    assert isinstance(ACER.load(tmp_path / "agent.zip", device="cpu"), ACER)


class Wrapper(nn.Module):
    """Of SB3's documentation of exports."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, observation: th.Tensor) -> Any:
        return self.policy(observation, deterministic=True)


@pytest.mark.parametrize("dynamo", [True, False], ids=["torch.export", "tracing"])
@pytest.mark.parametrize("actions", [spaces.Discrete(3), spaces.Box(-1, 1, (2,))], ids=["Discrete", "Box"])
@pytest.mark.filterwarnings("ignore")
def test_the_wrapper_of_sb3s_documentation_can_be_exported(actions: Space, dynamo: bool, tmp_path: Path) -> None:
    module = Wrapper(agent(actions=actions).policy.eval())
    example, path = th.randn(2, 4), str(tmp_path / "agent.onnx")
    axes: dict[str, Any] = (
        {"dynamic_shapes": ({0: th.export.Dim("batch")},)} if dynamo else {"dynamic_axes": {"input": [0]}}
    )
    th.onnx.export(module, (example,), path, input_names=["input"], dynamo=dynamo, opset_version=18, **axes)
    rows = th.from_numpy(sampled(VECTOR, 100))
    with th.no_grad():
        expected = module(rows)
    found = onnxruntime.InferenceSession(path).run(None, {"input": rows.numpy()})
    for own, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(own.numpy(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
def test_a_trace_of_predict_depends_on_its_input(policy: str) -> None:
    own = agent(policy, actions=spaces.Discrete(3, start=1)).policy.eval()
    rows = th.from_numpy(sampled(VECTOR, 100))

    class Predict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy = own

        def forward(self, observation: th.Tensor) -> th.Tensor:
            return self.policy._predict(observation, deterministic=True)

    traced = th.jit.trace(Predict(), rows[:2], check_trace=False)  # type: ignore[no-untyped-call]
    found = traced(rows)
    assert th.equal(found, own._predict(rows, deterministic=True))
    assert len(found.unique()) > 1


def test_a_file_drops_no_features() -> None:
    model = ACER("MlpPolicy", Recorder(), device="cpu", policy_kwargs={"features_extractor_class": WithDropout})
    model.policy.set_training_mode(True)  # as after learn
    network, rows = ActingNetwork(model.policy, None), th.rand(50, 2)
    assert network(rows)[1].equal(network(rows)[1])


def test_a_file_computes_features_of_images_in_float32() -> None:
    env = DummyVecEnv([lambda: Shows(spaces.Box(0, 255, (1, 36, 36), np.uint8))])
    model = ACER("CnnPolicy", env, seed=0, device="cpu", policy_kwargs={"use_bfloat16": True})
    network, images = ActingNetwork(model.policy, None), th.randint(0, 256, (8, 1, 36, 36), dtype=th.uint8)
    model.policy.use_bfloat16 = False
    model.policy.set_training_mode(False)
    with th.no_grad():
        expected = model.policy.step(images, th.zeros(8, 0))[0]
        np.testing.assert_allclose(network(images)[1], expected, rtol=1e-6)


def test_a_file_takes_the_environments_numbers_in_their_own_type(tmp_path: Path) -> None:
    own = spaces.Box(0, 20_000, (4,), np.int64)
    model, normalize = agent(actions=spaces.Discrete(3)), normalized(own)
    given = 10_000 + np.random.default_rng(1).integers(-3, 3, size=(50, 4))
    stats, _ = statistics(model, normalize.normalize_obs(given))
    export_onnx(model, tmp_path / "agent.onnx", normalize)
    found = run(tmp_path / "agent.onnx", observation=given)["statistics"]
    np.testing.assert_allclose(found, stats, rtol=1e-5, atol=1e-5)
