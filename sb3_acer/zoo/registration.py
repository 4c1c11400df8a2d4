"""What rl-zoo has to know of ACER: its class, and how the tuner samples hyperparameters and converts them."""

import importlib
import inspect
import math
from collections.abc import Callable
from typing import Any, cast

import torch as th
import yaml
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import BaseTrial
from rl_zoo3.hyperparams_opt import HYPERPARAMS_CONVERTER, HYPERPARAMS_SAMPLER
from rl_zoo3.utils import ALGOS, SimpleLinearSchedule
from sb3_contrib import MaskablePPO
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from stable_baselines3.common.utils import ConstantSchedule

from sb3_acer import ACER
from sb3_acer.policies import ACERPolicy, default_net_arch, default_optimizer, split_net_arch

NET_ARCHS = {"small": [64, 64], "medium": [256, 256]}
ZOO_SCHEDULES = (ConstantSchedule, SimpleLinearSchedule)  # which the zoo makes of 1e-3 and lin_1e-3
ACTIVATIONS = {"tanh": th.nn.Tanh, "relu": th.nn.ReLU, "elu": th.nn.ELU}
BURN_IN_SHARES = [0.0, 0.25, 0.5]
OPTIMIZERS = {"rmsprop": RMSpropTFLike, "adam": th.optim.Adam}

Ranges = dict[str, IntDistribution | FloatDistribution | CategoricalDistribution]

# The largest replay_start is below the smallest buffer_size, so that every trial replays.
RANGES: Ranges = {
    "n_steps": IntDistribution(8, 64, log=True),
    "batch_size": IntDistribution(4, 32, log=True),
    "buffer_size_pow": IntDistribution(11, 16),
    "replay_start_pow": IntDistribution(5, 10),
    "replay_ratio": IntDistribution(2, 32, log=True),
    "learning_rate": FloatDistribution(1e-4, 2e-2, log=True),
    "lr_schedule": CategoricalDistribution(["constant", "linear"]),
    "ent_coef": FloatDistribution(1e-5, 0.2, log=True),
    "ent_schedule": CategoricalDistribution(["constant", "linear"]),
    "q_coef": FloatDistribution(0.2, 4.0, log=True),
    "correction_term": FloatDistribution(1.0, 20.0, log=True),
    "delta": FloatDistribution(0.05, 2.0, log=True),
    "one_minus_alpha": FloatDistribution(1e-3, 0.05, log=True),
    "one_minus_gamma": FloatDistribution(1e-3, 0.05, log=True),
    "max_grad_norm": FloatDistribution(0.5, 10.0, log=True),
    "net_arch": CategoricalDistribution(list(NET_ARCHS)),
    "activation_fn": CategoricalDistribution(list(ACTIVATIONS)),
    "optimizer": CategoricalDistribution(list(OPTIMIZERS)),
}
"""
Ranges for every policy; the middle of each is where learning is usually fast. ``_pow`` marks exponents of 2,
``one_minus_`` distances from 1.
"""

N_ENVS_RANGE: Ranges = {"n_envs_pow": IntDistribution(0, 5)}
NOISE_RANGES: Ranges = {
    "log_std_init": FloatDistribution(-2.0, 1.0),
    "n_action_samples": IntDistribution(2, 16, log=True),
}
RECURRENT_RANGES: Ranges = {
    "lstm_hidden_size_pow": IntDistribution(4, 8),
    "critic_lstm": CategoricalDistribution(["own", "shared", "none"]),
    "burn_in_share": CategoricalDistribution(BURN_IN_SHARES),
}
OF_POLICY_KWARGS = {"net_arch", "activation_fn", "optimizer", "log_std_init", "lstm_hidden_size_pow", "critic_lstm"}


def setting_of(name: str) -> str:
    """
    :param name: of a range
    :return: the argument of ACER that a value of this range sets, wholly or in part
    """
    if name in OF_POLICY_KWARGS:
        return "policy_kwargs"
    return name.removesuffix("_pow").removesuffix("_share").removeprefix("one_minus_")


def convert_acer_params(sampled_params: dict[str, Any]) -> dict[str, Any]:
    """
    :param sampled_params: ``params`` of a trial, as a study stores them
    :return: arguments of ACER, and ``n_envs`` if that was sampled
    """
    hyperparams: dict[str, Any] = {}
    for name, value in sampled_params.items():
        if name.endswith("_pow"):
            hyperparams[name.removesuffix("_pow")] = 2**value
        elif name.startswith("one_minus_"):
            hyperparams[name.removeprefix("one_minus_")] = 1 - value
        else:
            hyperparams[name] = value
    if "net_arch" in hyperparams:  # policy_kwargs may be fixed
        layers = NET_ARCHS[hyperparams.pop("net_arch")]
        policy_kwargs = hyperparams["policy_kwargs"] = {
            "net_arch": {"pi": list(layers), "qf": list(layers)},
            "activation_fn": ACTIVATIONS[hyperparams.pop("activation_fn")],
            "optimizer_class": OPTIMIZERS[hyperparams.pop("optimizer")],
        }
        if "log_std_init" in hyperparams:
            policy_kwargs["log_std_init"] = hyperparams.pop("log_std_init")
        if "critic_lstm" in hyperparams:
            critic_lstm = hyperparams.pop("critic_lstm")
            policy_kwargs["lstm_hidden_size"] = hyperparams.pop("lstm_hidden_size")
            policy_kwargs["enable_critic_lstm"] = critic_lstm == "own"
            policy_kwargs["shared_lstm"] = critic_lstm == "shared"
    if "burn_in_share" in hyperparams:
        hyperparams["burn_in"] = int(hyperparams.pop("burn_in_share") * hyperparams["n_steps"])
    return hyperparams


def with_drawn(policy_kwargs: dict[str, Any], drawn: dict[str, Any]) -> dict[str, Any]:
    """
    :param policy_kwargs: of an entry
    :param drawn: the ``policy_kwargs`` of a trial
    :return: those of the entry with the trial's in their place; ``optimizer_kwargs`` are left out if the trial has
        another optimiser
    """
    both = policy_kwargs | drawn
    if both["optimizer_class"] is not policy_kwargs.get("optimizer_class"):
        both.pop("optimizer_kwargs", None)
    return both


def sample_acer_params(
    trial: BaseTrial, n_actions: int, n_envs: int, additional_args: dict[str, Any]
) -> dict[str, Any]:
    """
    Sample arguments of ACER. The signature is the zoo's.

    :param trial: the trial; what it has in ``fixed`` is not sampled, and the sampled ``policy_kwargs`` are
        completed by those that it has
    :param n_actions: dimension of continuous actions; 0 for other action spaces
    :param n_envs: not used
    :param additional_args: not used
    :return: arguments of ACER
    """
    fixed = fixed_settings(trial)
    suggest(trial, RANGES)
    if n_actions > 0:
        suggest(trial, NOISE_RANGES)
    if is_recurrent(trial):
        suggest(trial, RECURRENT_RANGES)
        if "n_steps" in fixed:  # burn_in is a share of them
            trial.suggest_int("n_steps", fixed["n_steps"], fixed["n_steps"])
    hyperparams = convert_acer_params(trial.params)
    hyperparams.pop("n_envs", None)  # not an argument of ACER
    for name in ("n_steps", "batch_size", "buffer_size", "replay_start", "gamma", "alpha"):
        trial.set_user_attr(name, {**hyperparams, **fixed}[name])  # printed by rl-zoo's own commands
    if "policy_kwargs" in hyperparams:
        hyperparams["policy_kwargs"] = with_drawn(getattr(trial, "policy_kwargs", {}), hyperparams["policy_kwargs"])
    return hyperparams


def is_recurrent(trial: BaseTrial) -> bool:
    """Whether the policy is recurrent, by its name, which the zoo stores in the study."""
    study = getattr(trial, "study", None)  # a FixedTrial has none
    policy = "" if study is None else study.user_attrs.get("policy", "")
    return "Lstm" in policy or "Gru" in policy


def fixed_settings(trial: BaseTrial) -> dict[str, Any]:
    """The settings that all trials of a study have in common, by their names."""
    fixed: dict[str, Any] = getattr(trial, "fixed", {})
    return fixed


def suggest(trial: BaseTrial, ranges: Ranges) -> None:
    """Sample a value from each range whose setting is not fixed; ``trial.params`` then holds them."""
    fixed = fixed_settings(trial)
    for name, allowed in ranges.items():
        if setting_of(name) in fixed:
            continue
        match allowed:
            case CategoricalDistribution():
                trial.suggest_categorical(name, allowed.choices)
            case IntDistribution():
                trial.suggest_int(name, allowed.low, allowed.high, log=allowed.log)
            case FloatDistribution():
                trial.suggest_float(name, allowed.low, allowed.high, log=allowed.log)


def nearest_trial(hyperparams: dict[str, Any], n_envs: int) -> dict[str, Any]:
    """
    The inverse of :func:`convert_acer_params`. A number becomes the nearest one that can be drawn; layers become those
    with the nearest number of units. Other values that no range contains, such as another schedule, are left out and
    therefore sampled.

    :param hyperparams: arguments of ACER; the others have their defaults
    :param n_envs: number of environments
    :return: ``params`` of a trial
    """
    values = defaults_of(ACER) | hyperparams | {"n_envs": n_envs}
    given = values["policy_kwargs"] or {}
    policy = hyperparams.get("policy", ACERPolicy)
    policy_class = cast(type[ACERPolicy], policy if isinstance(policy, type) else ACER.policy_aliases[policy])
    optimizer_class = default_optimizer(given.get("recurrent_class") or policy_class.default_recurrent)
    options = defaults_of(ACERPolicy) | {"optimizer_class": optimizer_class} | given
    learning_rate = values["learning_rate"]
    if isinstance(learning_rate, SimpleLinearSchedule):
        values["lr_schedule"] = "linear"
    extractor = options["features_extractor_class"] or policy_class.default_features_extractor
    layers = default_net_arch(extractor) if options["net_arch"] is None else options["net_arch"]
    of_pi, of_q = split_net_arch(layers)
    values |= {
        "batch_size": values["batch_size"] or n_envs,
        "learning_rate": learning_rate(1.0) if isinstance(learning_rate, ZOO_SCHEDULES) else learning_rate,
        "net_arch": min(NET_ARCHS, key=lambda name: abs(2 * sum(NET_ARCHS[name]) - sum(of_pi) - sum(of_q))),
        "activation_fn": key_of(options["activation_fn"], ACTIVATIONS),
        "optimizer": key_of(options["optimizer_class"], OPTIMIZERS),
        "log_std_init": options["log_std_init"],
        "lstm_hidden_size": options["lstm_hidden_size"],
        "critic_lstm": "shared" if options["shared_lstm"] else "own" if options["enable_critic_lstm"] else "none",
        "burn_in_share": min(BURN_IN_SHARES, key=lambda share: abs(share - values["burn_in"] / values["n_steps"])),
    }
    params: dict[str, Any] = {}
    for name, allowed in (RANGES | N_ENVS_RANGE | NOISE_RANGES | RECURRENT_RANGES).items():
        if name.endswith("_pow"):
            value = math.log2(max(values[name.removesuffix("_pow")], 1))
        elif name.startswith("one_minus_"):
            value = 1 - values[name.removeprefix("one_minus_")]
        else:
            value = values[name]
        if isinstance(allowed, CategoricalDistribution):
            if value in allowed.choices:
                params[name] = value
        elif isinstance(value, (int, float)):
            nearest = min(max(value, allowed.low), allowed.high)
            params[name] = round(nearest) if isinstance(allowed, IntDistribution) else nearest
    return params


def entry_of(env_id: str, hyperparams: dict[str, Any], params: dict[str, Any], policy_kwargs: dict[str, Any]) -> str:
    """
    :param env_id: id of the environment
    :param hyperparams: of its present entry, as read from the file
    :param params: of a trial
    :param policy_kwargs: of the present entry, which those of the trial replace in part
    :return: an entry of a file of hyperparameters, in YAML, with the trial's settings in place of the present ones;
        their numbers are rounded to four digits
    """
    drawn = rounded(convert_acer_params(params))
    settings = {**hyperparams, **drawn}
    if "policy_kwargs" in drawn:
        settings["policy_kwargs"] = with_drawn(policy_kwargs, drawn["policy_kwargs"])
    if isinstance(settings.get("policy_kwargs"), dict):
        settings["policy_kwargs"] = code_of(settings["policy_kwargs"])
    text: str = yaml.dump({env_id: settings}, Dumper=EntryDumper, sort_keys=False, width=1000)
    return text


class EntryDumper(yaml.SafeDumper):  # type: ignore[misc]
    """Classes by their dotted names, as the zoo finds them; other objects as they print themselves."""

    def represent_object(self, value: Any) -> yaml.ScalarNode:
        is_class = isinstance(value, type)
        return self.represent_str(f"{value.__module__}.{value.__qualname__}" if is_class else repr(value))


EntryDumper.add_multi_representer(object, EntryDumper.represent_object)


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def code_of(value: Any) -> str:
    """A value as the zoo evaluates it: policy_kwargs of an entry are a line of Python."""
    if isinstance(value, dict):
        return f"dict({', '.join(f'{key}={code_of(part)}' for key, part in value.items())})"
    if isinstance(value, type):
        prefixes = {"torch.nn": "nn.", "torch.optim": "th.optim."}
        prefix = prefixes.get(".".join(value.__module__.split(".")[:2]), "")
        return f"{prefix}{value.__name__}"
    return repr(value)


def defaults_of(function: Callable[..., Any]) -> dict[str, Any]:
    return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}


def key_of(value: Any, among: dict[str, Any]) -> str | None:
    return next((key for key, other in among.items() if other == value), None)


def register() -> None:
    """
    Register ACER as an algorithm of rl-zoo in this process, and MaskablePPO, which the zoo leaves out, as ppo_mask. The
    dicts are changed in place, since all modules of the zoo share them.
    """
    ALGOS["acer"] = ACER
    ALGOS.setdefault("ppo_mask", MaskablePPO)
    HYPERPARAMS_SAMPLER["acer"] = sample_acer_params
    HYPERPARAMS_CONVERTER["acer"] = convert_acer_params
    restore_generate_metadata()


def restore_generate_metadata() -> None:
    """
    Add the function ``generate_metadata`` to huggingface_sb3 if it is missing. rl-zoo's push_to_hub imports it; newer
    versions have renamed it and return another type.
    """
    hub = importlib.import_module("huggingface_sb3.push_to_hub")
    if not hasattr(hub, "generate_metadata"):
        hub.__dict__["generate_metadata"] = lambda *args: hub.__dict__["_generate_metadata"](*args).to_dict()
