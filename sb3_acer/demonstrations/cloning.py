"""Behaviour cloning: fits the policy to demonstrations by maximum likelihood."""

from typing import TypeVar

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.running_mean_std import RunningMeanStd

from sb3_acer.checks import check_integer, check_number, require
from sb3_acer.demonstrations.dataset import Agent, ExpertDataset
from sb3_acer.vec_normalize import normalize_of_policy

LEAST_STD = 0.1
"""Lower bound on the standard deviation, as a share of half the action's range."""

AgentType = TypeVar("AgentType", bound=Agent)


def behaviour_cloning(
    model: AgentType,
    dataset: ExpertDataset,
    n_epochs: int = 10,
    learning_rate: float = 1e-4,
    adam_epsilon: float = 1e-8,
    val_interval: int | None = None,
) -> AgentType:
    """
    Fit the policy to demonstrations by maximum likelihood with Adam, and copy it to the average policy. Parameters that
    only the critic uses and the state of the agent's own optimiser do not change. A recurrent policy is trained on
    sequences of the replay buffer's length, each from the policy's recurrent state at its first step.

    For Box actions, the standard deviation is kept above a tenth of half the action's range (above 0.1 where there is
    none), or above what it was before if that is less. A deterministic expert would drive it to 0, which leaves neither
    exploration nor usable importance ratios for learning. A VecNormalize without statistics gets those of the
    demonstrated observations.

    :param model: an ACER
    :param dataset: the demonstrations
    :param n_epochs: number of passes through the training part
    :param learning_rate: Adam's learning rate
    :param adam_epsilon: Adam's epsilon
    :param val_interval: epochs between reports of the losses, which are printed if the agent's ``verbose`` is above 0;
        None: a tenth of ``n_epochs``
    :return: the agent
    :raises ValueError: for an argument outside its range, and if observations or actions do not fit the agent's spaces
    """
    require(isinstance(dataset, ExpertDataset), "dataset", "an ExpertDataset", dataset)
    policy, n_epochs = model.policy, check_integer("n_epochs", n_epochs, 0)
    check_number("learning_rate", learning_rate, 0, 10)
    check_number("adam_epsilon", adam_epsilon, 0, 1)
    val_interval = max(n_epochs // 10, 1) if val_interval is None else check_integer("val_interval", val_interval)
    n_steps = model.replay_buffer.n_steps if policy.state_size else 1
    optimizer = th.optim.Adam(policy.parameters(), lr=learning_rate, eps=adam_epsilon)
    actions = th.as_tensor(dataset.actions_for(model), device=policy.device)
    states = policy.initial_states(dataset.num_transition)
    least_log_std = _least_log_std(model)
    _start_normalization(model, dataset)
    for epoch in range(1, n_epochs + 1):
        if policy.state_size:
            states = dataset.play_back(model)[1]
        policy.set_training_mode(True)
        losses = []
        for steps in dataset.batches("train", n_steps):
            loss = _loss(model, dataset, actions, states, steps)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if policy.log_std is not None:
                policy.log_std.data.clamp_(min=least_log_std)
            losses.append(loss.item())
        policy.set_training_mode(False)
        if model.verbose > 0 and epoch % val_interval == 0:
            batches = dataset.batches("val", n_steps)
            with th.no_grad():
                validation = [_loss(model, dataset, actions, states, steps).item() for steps in batches]
            means = f"training loss {np.mean(losses):.6f}, validation loss {np.mean(validation or [np.nan]):.6f}"
            print(f"epoch {epoch} of {n_epochs}: {means}")
    optimizer.zero_grad()
    model.average_policy.load_state_dict(policy.state_dict())
    return model


def _loss(
    model: Agent, dataset: ExpertDataset, actions: th.Tensor, all_states: np.ndarray, sequences: np.ndarray
) -> th.Tensor:
    """
    :param actions: all actions as the policy samples them, ``[N, D]``
    :param all_states: recurrent state before each step, ``[N, W]``
    :param sequences: indices of steps, ``[T, B]``
    :return: negative log-likelihood of these steps' actions, mean over the steps
    """
    policy, log_probs = model.policy, []
    states = th.as_tensor(all_states[sequences[0]], device=policy.device)
    for steps in sequences:
        stats, states = policy.step(dataset.inputs_for(model, steps), states, dataset.masks_for(model, steps))
        log_probs.append(policy.family.log_prob(stats, actions[steps]))
        states = states * th.as_tensor(~dataset.ends[steps, np.newaxis], device=states.device)
    return -th.stack(log_probs).mean()


def _least_log_std(model: Agent) -> th.Tensor | None:
    """Lower bounds on the logarithm of the standard deviation, ``[D]``; None for actions without one."""
    space, log_std = model.action_space, model.policy.log_std
    if log_std is None or not isinstance(space, spaces.Box):
        return None
    half_range = (space.high.astype(np.float64) - space.low).reshape(-1) / 2
    least = np.log(LEAST_STD * np.where(np.isfinite(half_range) & (half_range > 0), half_range, 1))
    return th.minimum(log_std.detach(), th.as_tensor(least).to(log_std))


def _start_normalization(model: Agent, dataset: ExpertDataset) -> None:
    """
    Give a VecNormalize without statistics those of the demonstrations. Otherwise its statistics would change the
    observations of the cloned policy in the first rollouts.
    """
    normalize = normalize_of_policy(model.get_env())
    if normalize is None or not normalize.norm_obs or not normalize.training:
        return
    seen = normalize.obs_rms
    if isinstance(seen, RunningMeanStd) and seen.count < 1:
        seen.update(dataset.observations_for(model, np.arange(dataset.num_transition)))
