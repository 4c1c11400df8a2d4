"""What rl-zoo has to know of ACER: its class, and how its tuner draws and reads ACER's parameters."""

import importlib
from typing import Any

import torch as th
from optuna.trial import BaseTrial, Trial
from rl_zoo3.hyperparams_opt import HYPERPARAMS_CONVERTER, HYPERPARAMS_SAMPLER
from rl_zoo3.utils import ALGOS

from sb3_acer import ACER
from sb3_acer.rmsprop import RMSpropTF

NET_ARCHS = {"tiny": [64], "small": [64, 64], "medium": [256, 256]}
ACTIVATIONS = {"tanh": th.nn.Tanh, "relu": th.nn.ReLU, "elu": th.nn.ELU}
OPTIMIZERS = {"rmsprop": RMSpropTF, "adam": th.optim.Adam}


def convert_acer_params(sampled_params: dict[str, Any]) -> dict[str, Any]:
    """A trial's raw ``params``, as a study stores them, as arguments of ACER, with ``n_envs`` where that was drawn."""
    hyperparams: dict[str, Any] = {}
    for name, value in sampled_params.items():
        if name.endswith("_pow"):
            hyperparams[name.removesuffix("_pow")] = 2**value
        elif name.startswith("one_minus_"):
            hyperparams[name.removeprefix("one_minus_")] = 1 - value
        else:
            hyperparams[name] = value
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
        hyperparams["burn_in"] = int(hyperparams.pop("burn_in_share") * hyperparams["n_steps"])
    return hyperparams


def sample_acer_params(
    trial: BaseTrial, n_actions: int, n_envs: int, additional_args: dict[str, Any]
) -> dict[str, Any]:
    """
    Arguments of ACER drawn for a trial: the zoo's signature.

    The ranges have in their middle what learns fast: replay ratios of 4 to 16 and batches of 8 to 16 sequences.

    :param trial: the trial
    :param n_actions: dimension of continuous actions, 0 for others
    :param n_envs: not read
    :param additional_args: not read
    """
    trial.suggest_int("n_steps_pow", 3, 7)
    trial.suggest_int("batch_size_pow", 2, 5)
    # Steps of the vectorised environment. The largest replay_start is the smallest buffer: every draw can replay.
    trial.suggest_int("buffer_size_pow", 10, 16)
    trial.suggest_int("replay_start_pow", 5, 10)
    trial.suggest_int("replay_ratio", 2, 32, log=True)
    trial.suggest_float("learning_rate", 5e-5, 5e-3, log=True)
    trial.suggest_categorical("lr_schedule", ["constant", "linear"])
    trial.suggest_float("ent_coef", 1e-6, 0.1, log=True)
    trial.suggest_categorical("ent_schedule", ["constant", "linear"])
    trial.suggest_float("q_coef", 0.1, 4.0, log=True)
    trial.suggest_float("correction_term", 1.0, 20.0, log=True)
    trial.suggest_float("delta", 0.05, 5.0, log=True)
    trial.suggest_float("one_minus_alpha", 1e-3, 0.1, log=True)
    trial.suggest_float("one_minus_gamma", 1e-4, 0.05, log=True)
    trial.suggest_categorical("net_arch", list(NET_ARCHS))
    trial.suggest_categorical("activation_fn", list(ACTIVATIONS))
    trial.suggest_categorical("optimizer", list(OPTIMIZERS))
    if n_actions > 0:
        trial.suggest_float("log_std_init", -2.0, 1.0)
        trial.suggest_int("n_action_samples", 2, 16, log=True)
    if has_memory(trial):
        trial.suggest_int("lstm_hidden_size_pow", 4, 8)
        trial.suggest_categorical("critic_lstm", ["own", "shared", "none"])
        trial.suggest_categorical("burn_in_share", [0.0, 0.25, 0.5])
    hyperparams = convert_acer_params(trial.params)
    hyperparams.pop("n_envs", None)  # no argument of ACER
    for name in ("n_steps", "batch_size", "buffer_size", "replay_start", "gamma", "alpha"):
        trial.set_user_attr(name, hyperparams[name])  # the zoo prints these beside the raw params
    return hyperparams


def has_memory(trial: BaseTrial) -> bool:
    """Whether the policy is recurrent: the zoo tells its samplers nothing of it, but writes it down in the study."""
    return isinstance(trial, Trial) and "Lstm" in trial.study.user_attrs.get("policy", "")


def register() -> None:
    """
    Make ACER an algorithm of rl-zoo in this process.

    Every module of the zoo shares these dicts: they are changed, never replaced.
    """
    ALGOS["acer"] = ACER
    HYPERPARAMS_SAMPLER["acer"] = sample_acer_params
    HYPERPARAMS_CONVERTER["acer"] = convert_acer_params
    restore_generate_metadata()


def restore_generate_metadata() -> None:
    """Give huggingface_sb3's function the name and the type that rl-zoo's push_to_hub knows, where it has others."""
    hub = importlib.import_module("huggingface_sb3.push_to_hub")
    if not hasattr(hub, "generate_metadata"):
        hub.__dict__["generate_metadata"] = lambda *args: hub.__dict__["_generate_metadata"](*args).to_dict()
