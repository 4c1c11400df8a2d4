"""
Agreement with numbers that other projects' own code computed; `golden/README.md` says how. Every file found is a case.
"""

import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_acer import ACER
from sb3_acer.distributions import DiagonalGaussian
from sb3_acer.estimators import (
    correction_factors,
    correction_gain,
    off_policy_returns,
    retrace_traces,
    truncated_factor,
    truncated_gain,
    trust_region,
    value_target,
)
from sb3_acer.heads import DuelingHead
from sb3_acer.policies import ACERPolicy
from sb3_acer.sequences import SequenceBatch
from sb3_acer.update import Update, metrics

GOLDEN = Path(__file__).parent / "golden"
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
Arrays = dict[str, npt.NDArray[Any]]
Tensors = dict[str, th.Tensor]

# stable-baselines' names of the layers -> ours
LAYERS = {
    "pi_fc0": "pi_net.0",
    "pi_fc1": "pi_net.2",
    "vf_fc0": "q_net.0",
    "vf_fc1": "q_net.2",
    "pi": "pi_head",
    "q": "q_head.q",
}


def load(path: Path) -> Arrays:
    with np.load(path) as arrays:
        return dict(arrays)


def load_tensors(path: Path) -> Tensors:
    return {name: tensor(array) for name, array in load(path).items() if array.dtype.kind != "U"}


def cases(pattern: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", sorted(GOLDEN.glob(pattern)), ids=lambda path: path.stem)


def tensor(array: npt.NDArray[Any]) -> th.Tensor:
    return th.as_tensor(array.copy())


def assert_close(ours: th.Tensor, theirs: th.Tensor) -> None:
    np.testing.assert_allclose(ours.detach().numpy(), theirs.numpy(), rtol=1e-5, atol=1e-6)


def time_major(array: npt.NDArray[Any]) -> th.Tensor:
    return tensor(array.swapaxes(0, 1))


class Stub(gym.Env[Any, Any]):
    """Spaces to build a network for; never stepped."""

    def __init__(self, size: int, n_actions: int) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (size,))
        self.action_space = spaces.Discrete(n_actions)


def parameters(policy: ACERPolicy) -> dict[str, th.Tensor]:
    """The policy's parameters under stable-baselines' names, `[in, out]` as there."""
    own = dict(policy.named_parameters())
    named = {}
    for theirs, ours in LAYERS.items():
        named[f"{theirs}/w"], named[f"{theirs}/b"] = own[f"{ours}.weight"].T, own[f"{ours}.bias"]
    return named


def by_layer(policy: ACERPolicy, vector: th.Tensor) -> dict[str, th.Tensor]:
    """Parts of a vector as long as the policy's parameters, under the same names."""
    names = {parameter: name for name, parameter in policy.named_parameters()}
    group = policy.flat._groups[0]
    own = {names[each]: part for each, part in zip(group, policy.flat._split(vector, group), strict=True)}
    return {
        f"{theirs}/{kind}": own[f"{ours}.{name}"].T if kind == "w" else own[f"{ours}.{name}"]
        for theirs, ours in LAYERS.items()
        for kind, name in (("w", "weight"), ("b", "bias"))
    }


def golden_model(case: Arrays, **changes: Any) -> ACER:
    meta = json.loads(str(case["meta_json"]))
    names = ("n_steps", "gamma", "trust_region", "delta", "correction_term", "max_grad_norm", "q_coef", "alpha")
    ent_coef = meta["ent_coef"] if meta["entropy_mode"] == "baselines" else 0.0
    env = DummyVecEnv([lambda: Stub(meta["obs_dim"], meta["n_actions"]) for _ in range(meta["n_envs"])])
    arguments = {name: meta[name] for name in names} | {
        "ent_coef": ent_coef,
        "learning_rate": meta["lr"],
        "rprop_alpha": meta["rprop_alpha"],
        "rprop_epsilon": meta["rprop_epsilon"],
        "policy_kwargs": {"net_arch": {"pi": meta["net_arch"][0]["pi"], "qf": meta["net_arch"][0]["vf"]}},
    }
    model = ACER("MlpPolicy", env, device="cpu", **(arguments | changes))
    with th.no_grad():
        for prefix, policy in (("params_before", model.policy), ("avg_before", model.average_policy)):
            for name, parameter in parameters(policy).items():
                parameter.copy_(tensor(case[f"{prefix}/{name}"]))
    (vector,) = model.policy.flat.vectors
    squares = th.zeros_like(vector.data)
    for name, square in by_layer(model.policy, squares).items():
        square.copy_(tensor(case[f"rms_before/{name}"]))
    model.policy.optimizer.state[vector] = {"step": 0, "square_avg": squares}
    return model


def golden_batch(case: Arrays) -> SequenceBatch:
    dones = time_major(case["in/dones"])
    return SequenceBatch(
        observations=time_major(case["in/obs"]),
        actions=time_major(case["in/actions"]).unsqueeze(-1),
        behaviour=time_major(case["in/mus"]),
        rewards=time_major(case["in/rewards"]),
        terminated=dones,
        truncated=th.zeros_like(dones),
        final_observations=th.zeros(0, case["in/obs"].shape[-1]),
        final_steps=th.zeros(0, dtype=th.int64),
        states=th.zeros(dones.shape[1], 0),
        weights=th.ones(dones.shape),
        slots=np.zeros(dones.shape[1], int),
        envs=np.arange(dones.shape[1]),
    )


@cases("stable_baselines/c*.npz")
def test_an_update_is_the_one_of_stable_baselines_graph(path: Path) -> None:
    case = load(path)
    model = golden_model(case)
    unclipped = golden_model(case, max_grad_norm=None)
    update: Update = model.update(golden_batch(case))
    unclipped.update(golden_batch(case))

    def compare(name: str, ours: th.Tensor, scale: float = 1.0) -> None:
        atol = CLOSE["atol"] * scale
        np.testing.assert_allclose(ours.detach().numpy(), case[name], err_msg=name, rtol=CLOSE["rtol"], atol=atol)

    def compare_out(name: str, ours: th.Tensor) -> None:
        compare(f"out/{name}", ours.detach().transpose(0, 1))

    compare_out("qret", update.q_ret)
    compare_out("rho_i", update.ratio)
    compare_out("rho", update.candidate_ratios)
    compare_out("g_before", update.g)
    compare("out/loss_q", th.tensor(metrics(model.policy.family, update, model.correction_term)["q_loss"]))
    compare("out/norm_grads", th.tensor(update.grad_norm))
    if model.trust_region:
        compare_out("k", update.k)
        # Both are differences of larger terms, and a probability that float32 logits give is itself uncertain by the
        # rounding of the logits: with the logits of 13 in c08, theirs is 1.1e-5 away from the value in float64.
        rtol = max(CLOSE["rtol"], 1e-6 * np.abs(case["out/logits_all"]).max())
        terms = np.abs(case["out/g_before"]).max(-1, keepdims=True)
        projected = update.z.transpose(0, 1).numpy()
        np.testing.assert_allclose(
            projected / terms, case["out/g_after"] / terms, rtol=rtol, atol=rtol, err_msg="g_after"
        )
        adj = (update.g - update.z).norm(dim=-1) / update.k.norm(dim=-1)
        np.testing.assert_allclose(adj.T.numpy(), case["out/adj"], rtol=rtol, atol=CLOSE["atol"], err_msg="adj")
    for name, parameter in parameters(model.policy).items():
        compare(f"params_after/{name}", parameter)
    for name, average in parameters(model.average_policy).items():
        compare(f"avg_after/{name}", average)
    (state,) = model.policy.optimizer.state.values()
    for name, square in by_layer(model.policy, state["square_avg"]).items():
        compare(f"rms_after/{name}", square)
    for prefix, owner in (("grad_raw", unclipped), ("grad_clipped", model)):
        for theirs, ours in LAYERS.items():
            for kind, attribute in (("w", "weight"), ("b", "bias")):
                gradient = owner.policy.get_parameter(f"{ours}.{attribute}").grad
                assert gradient is not None
                # sums of many terms: their rounding is relative to the gradient's norm
                norm = max(float(case["out/norm_grads"]), 1.0)
                compare(f"{prefix}/{theirs}/{kind}", gradient.T if kind == "w" else gradient, norm)


@cases("stable_baselines/retrace_*.npz")
def test_returns_are_those_of_stable_baselines_retrace(path: Path) -> None:
    case = load(path)
    rewards, dones, q_values, ratios = (time_major(case[name]) for name in ("rewards", "dones", "q_i", "rho_i"))
    discounts = float(case["gamma"]) * ~dones
    next_values = time_major(case["values"])[1:]
    q_ret = off_policy_returns(rewards, discounts, next_values, q_values, ratios.clamp(max=1), (~dones).float())
    assert_close(q_ret.T, tensor(case["qret"]))


@cases("pfrl/pfrl_disc_*.npz")
def test_gains_and_projection_are_pfrls_for_discrete_actions(path: Path) -> None:
    case = load_tensors(path)
    logits = case["raw_pi"].clone().requires_grad_()
    log_pi, log_mu = logits.log_softmax(-1), case["raw_mu"].log_softmax(-1)
    actions = case["actions"].unsqueeze(-1)
    ratios = (log_pi.detach() - log_mu).exp()
    ratio = ratios.gather(-1, actions).squeeze(-1)
    c, v = float(case["c"]), case["v"]
    ones = th.ones_like(v)
    next_values = th.cat((v[1:], case["bootstrap"].reshape(1)))
    for name, traces in (("Q_ret", ratio.clamp(max=1)), ("Q_opc", ones)):
        returns = off_policy_returns(case["rewards"], float(case["gamma"]) * ones, next_values, case["Q"], traces, ones)
        assert_close(returns, case[name])
    assert_close(ratio, case["rho"])
    truncated = truncated_gain(log_pi.gather(-1, actions).squeeze(-1), ratio, case["adv_in"], c)
    correction = correction_gain(log_pi, log_pi.detach().exp(), ratios, case["q"] - v.unsqueeze(-1), c)
    assert_close(-(truncated + correction), case["loss_pg"])
    assert_close(-correction, case["loss_fullcorr"])
    for name, gain in (("grad_raw_pg", truncated + correction), ("grad_raw_fullcorr", correction)):
        (gradient,) = th.autograd.grad(-gain.sum(), logits, retain_graph=True)
        assert_close(gradient, case[name])
    for delta in (0.0, 0.1, 1.0):
        z = trust_region(-case["g_logp_loss"], -case["k_code"], delta)
        (projected,) = th.autograd.grad(log_pi, logits, -z, retain_graph=True)
        assert_close(projected, case[f"grad_raw_kl_delta{delta}"])


@cases("di_engine/*.npz")
def test_returns_gains_and_projection_are_di_engines(path: Path) -> None:
    case = load_tensors(path)
    c, gamma, n_steps = float(case["c"]), float(case["gamma"]), int(case["T"])
    log_pi = case["log_pi"][:n_steps].clone().requires_grad_()
    actions = case["actions"].unsqueeze(-1)
    q, v = case["q"][:n_steps], case["v"].squeeze(-1)
    q_values, ratio = (values.gather(-1, actions).squeeze(-1) for values in (q, case["ratio"]))
    discounts = gamma * case["weights"]
    # Its last row stands for the state after the last step, whose return is its value.
    q_ret = off_policy_returns(case["rewards"], discounts, v[1:], q_values, ratio.clamp(max=1), th.ones_like(ratio))
    assert_close(q_ret, case["q_ret"][:n_steps].squeeze(-1))
    truncated = truncated_gain(log_pi.gather(-1, actions).squeeze(-1), ratio, q_ret - v[:n_steps], c)
    advantages = q - v[:n_steps].unsqueeze(-1)
    correction = correction_gain(log_pi, log_pi.detach().exp(), case["ratio"], advantages, c)
    assert_close(truncated, case["actor_obj"].squeeze(-1))
    assert_close(correction, case["bias_obj"].squeeze(-1))
    (g,) = th.autograd.grad((truncated + correction).sum(), log_pi)
    assert_close(-g, case["G_logp"])
    k = -case["log_avg"].exp()
    for delta in (0.0, 0.1, 1.0):
        assert_close(-trust_region(g, k, delta), case[f"z_logp_delta{delta}"])


def exactly_close(ours: th.Tensor, theirs: th.Tensor) -> None:
    np.testing.assert_allclose(ours.detach().numpy(), theirs.numpy(), rtol=1e-6, atol=1e-12)


@cases("pfrl/pfrl_cont_*.npz")
def test_continuous_actions_have_pfrls_ratios_returns_gradients_and_projection(path: Path) -> None:
    case = load_tensors(path)
    c, gamma, size = float(case["c"]), float(case["gamma"]), int(case["D"])
    family = DiagonalGaussian(spaces.Box(-np.inf, np.inf, (size,)))
    stats, behaviour, average = (
        th.cat((case[f"loc{which}"], case[f"scale{which}"]), -1) for which in ("", "_mu", "_avg")
    )
    actions, candidates = case["actions"], case["actions_dash"].unsqueeze(-2)
    ratio, ratios = family.ratios(stats, behaviour, actions, candidates)
    exactly_close(ratio, case["rho"])
    exactly_close(1 / ratios.squeeze(-1), case["rho_dash_inv"])

    v, q_values = case["v"], case["Q"]
    next_values = th.cat((v[1:], case["bootstrap"].reshape(1)))
    ones = th.ones_like(v)
    traces = retrace_traces(ratio, family.trace_root)
    exactly_close(traces, case["c_ret"])
    steps = (case["rewards"], gamma * ones, next_values, q_values)
    q_ret, q_opc = off_policy_returns(*steps, traces, ones), off_policy_returns(*steps, ones, ones)
    exactly_close(q_ret, case["Q_ret"])
    exactly_close(q_opc, case["Q_opc"])
    exactly_close(value_target(ratio, q_ret, q_values, v), case["v_target"])

    advantages = (case["Q_dash"] - v).unsqueeze(-1)
    weight = truncated_factor(ratio, q_opc - v, c)
    weights = correction_factors(th.ones_like(ratios), ratios, advantages, c)
    nothing = th.zeros_like(weight)
    g = family.gain_gradient(stats, actions, weight, candidates, weights)
    exactly_close(-g, th.cat((case["g_loc_pg"], case["g_scale_pg"]), -1))
    correction = family.gain_gradient(stats, actions, nothing, candidates, weights)
    exactly_close(-correction, th.cat((case["g_loc_samplecorr"], case["g_scale_samplecorr"]), -1))
    k = family.kl_gradient(average, stats)
    exactly_close(-k, th.cat((case["g_loc_k_code"], case["g_scale_k_code"]), -1))
    exactly_close(family.kl(average, stats), case["kl"])
    for delta in (0.0, 0.1, 1.0):
        z = trust_region(g, k, delta)
        exactly_close(-z, th.cat((case[f"g_loc_kl_delta{delta}"], case[f"g_scale_kl_delta{delta}"]), -1))


def test_a_stochastic_dueling_head_is_pfrls() -> None:
    case = load_tensors(GOLDEN / "pfrl" / "pfrl_sdn.npz")
    observations, w, n_samples = case["obs"], case["w"], int(case["n"])
    size = observations.shape[-1]
    family = DiagonalGaussian(spaces.Box(-np.inf, np.inf, (case["action"].shape[-1],)))
    head = DuelingHead(family, size, th.nn.Tanh).double()
    with th.no_grad():  # A(x, a) = tanh([x, a] w), and V as given
        for parameter in head.parameters():
            parameter.zero_()
        head.latent.weight[0] = th.linalg.lstsq(observations, case["v"]).solution[:, 0]
        head.latent.weight[1] = w[:size]
        head.action.weight[0] = w[size:]
        head.advantage.weight[0, 0] = 1

    class Given(np.random.Generator):
        """The actions u are their own noise: their distribution is the standard normal."""

        def standard_normal(self, size: Any = None, *args: Any, **kwargs: Any) -> Any:
            given = case["u"].transpose(0, 1)
            return th.cat((given, given), -2).reshape(size).numpy()

    stats = th.cat((th.zeros_like(case["action"]), th.ones_like(case["action"])), -1)
    judged = head(head.latent(observations), stats, case["action"].unsqueeze(0), n_samples, Given(np.random.PCG64()))
    exactly_close(judged.values, case["V"].squeeze(-1))
    exactly_close(judged.q_values[0], case["Q"].squeeze(-1))
