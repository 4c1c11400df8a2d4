"""
All parameters of a network as one vector: each step of the optimiser, the norm of the gradient, its clipping and the
move of the average policy are then a few operations, however many layers there are.
"""

import inspect
import math
from collections.abc import Callable
from itertools import compress
from typing import Any

import torch as th
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike
from torch import nn

ELEMENTWISE: frozenset[Callable[..., th.optim.Optimizer]] = frozenset(
    (
        RMSpropTFLike,
        th.optim.Adadelta,
        th.optim.Adagrad,
        th.optim.Adam,
        th.optim.Adamax,
        th.optim.AdamW,
        th.optim.NAdam,
        th.optim.RAdam,
        th.optim.RMSprop,
        th.optim.Rprop,
        th.optim.SGD,
    )
)
"""Optimisers whose step treats every number alike: one vector gets the same steps as its parts."""

FUSED = (th.optim.Adam, th.optim.AdamW)
"""Optimisers whose step torch has as one operation, on the CPU as well."""


_rmsprop_step = inspect.unwrap(RMSpropTFLike.step)  # without what torch wraps it in


class FlatRMSProp(RMSpropTFLike):
    """SB3's RMSProp without the record for torch's profiler, which takes as long as a step on one vector does."""

    @th.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        for hook in self._optimizer_step_pre_hooks.values():
            hook(self, (), {})
        loss: float | None = _rmsprop_step(self, closure)
        for hook in self._optimizer_step_post_hooks.values():
            hook(self, (), {})
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # else torch would wrap it in that record


class FlatParameters:
    """
    Makes a module's parameters views of one vector, and their gradients views of another.

    The module's parameters stay what they are to everyone else: ``state_dict``, ``parameters()`` and in-place changes
    work as before. Where types, devices or ``requires_grad`` differ there is one vector for each combination.

    :param module: the module; parameters that it gets later do not take part
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.parameters = list(module.parameters())
        groups: dict[Any, list[nn.Parameter]] = {}
        for parameter in self.parameters:
            groups.setdefault((parameter.dtype, parameter.device, parameter.requires_grad), []).append(parameter)
        self._groups = list(groups.values())
        self.vectors = [nn.Parameter(th.empty(0), requires_grad=group[0].requires_grad) for group in self._groups]
        self.attach()

    def attach(self) -> None:
        """
        Make the views anew, after something has replaced the parameters' memory: a move to another device, say.
        Parameters that already lie in one vector keep their memory. After ``share_memory`` they still do, since it
        moves the whole vector.
        """
        self._owners: list[tuple[nn.Module, str]] | None = None  # of buffers; a copy's module may not be complete yet
        self._gradients: dict[nn.Parameter, th.Tensor | None] = dict.fromkeys(self.parameters)
        self._frozen: list[tuple[th.Tensor, th.Tensor]] = []
        for vector, group in zip(self.vectors, self._groups, strict=True):
            if not self._are_views(vector, group):
                size = sum(parameter.numel() for parameter in group)
                vector.data = th.empty(size, dtype=group[0].dtype, device=group[0].device)
                for parameter, view in zip(group, self._split(vector.data, group), strict=True):
                    view.copy_(parameter.data)
                    parameter.data = view
            vector.grad = th.zeros_like(vector) if vector.requires_grad else None
            if vector.grad is not None:
                for parameter, view in zip(group, self._split(vector.grad, group), strict=True):
                    self._gradients[parameter] = parameter.grad = view
        self._places = [parameter.data_ptr() for parameter in self.parameters]

    def require_frozen(self) -> None:
        """
        :raises ValueError: if a parameter that was frozen when the module was built, and that the optimiser therefore
            does not have, is to be learnt
        """
        for parameter, gradient in self._gradients.items():
            if parameter.requires_grad and gradient is None:
                name = next(name for name, each in self._module.named_parameters() if each is parameter)
                raise ValueError(
                    f"{name} must be frozen as it was when the policy was built, got requires_grad=True. Parameters "
                    "that are to be learnt later are frozen after that: model.policy.features_extractor"
                    ".requires_grad_(False), say"
                )

    def require_unchanged(self, optimizer: th.optim.Optimizer) -> None:
        """
        :param optimizer: the module's
        :raises ValueError: if parameters were replaced since the policy was built, since no update would change the new
            ones, or if the optimiser was replaced, since its state could be saved but not loaded
        """
        present = list(self._module.parameters())
        if list(map(id, present)) != list(map(id, self.parameters)):
            raise ValueError(
                "policy must keep the parameters that it was built with, in their order, got others: load_state_dict "
                "sets their values, and a subclass may prune or parametrise them when it builds its networks"
            )
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if sorted(map(id, held)) != sorted(map(id, self._optimized)):
            raise ValueError(
                "policy.optimizer must be the one that the policy was built with, of the policy_kwargs optimizer_class "
                f"and optimizer_kwargs, got {type(optimizer).__name__} of other parameters"
            )

    def without_gradients(self) -> None:
        """Neither the vectors nor the parameters get gradients: for an average."""
        for tensor in (*self.vectors, *self.parameters):
            tensor.requires_grad_(False)
            tensor.grad = None
        self.attach()

    def _are_views(self, vector: th.Tensor, group: list[nn.Parameter]) -> bool:
        """Whether a group's parameters lie in its vector already, each in its place."""
        if vector.numel() != sum(parameter.numel() for parameter in group):
            return False
        pairs = zip(group, self._split(vector.data, group), strict=True)
        return all((own.data_ptr(), own.stride()) == (view.data_ptr(), view.stride()) for own, view in pairs)

    @staticmethod
    def _split(vector: th.Tensor, group: list[nn.Parameter]) -> list[th.Tensor]:
        """Views of a vector in the parameters' shapes and orders of memory, channels_last among them."""
        views, start = [], 0
        for parameter in group:
            strides = th.empty_like(parameter, device="meta", memory_format=th.preserve_format).stride()
            views.append(vector.as_strided(parameter.shape, strides, start))
            start += parameter.numel()
        return views

    def __getstate__(self) -> dict[str, Any]:
        """The attributes without those that :meth:`attach` makes."""
        return {**vars(self), "_owners": None, "_gradients": {}, "_frozen": [], "_places": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make the views anew: unpickling and deep copies copy each tensor on its own."""
        self.__dict__.update(state)
        self.attach()

    def make_optimizer(
        self, optimizer_class: Callable[..., th.optim.Optimizer], lr: float, kwargs: dict[str, Any]
    ) -> th.optim.Optimizer:
        """
        :param optimizer_class: an optimiser of torch's, or any other
        :param lr: the initial learning rate
        :param kwargs: its other arguments
        :return: an optimiser of the vectors if it treats every number alike, else of the single parameters. Its
            ``zero_grad`` and ``step`` work as those of any optimiser, also if the gradients have been replaced.
        """
        tensors = self.vectors if optimizer_class in ELEMENTWISE else self.parameters
        self._optimized = learnt = [tensor for tensor in tensors if tensor.requires_grad]
        if optimizer_class in FUSED and not {"fused", "foreach", "capturable", "differentiable"} & set(kwargs):
            kwargs = {**kwargs, "fused": all(vector.is_floating_point() for vector in learnt)}
        if optimizer_class is RMSpropTFLike:
            optimizer_class = FlatRMSProp
        optimizer = optimizer_class(learnt, lr=lr, **kwargs)
        self.connect(optimizer)
        return optimizer

    def connect(self, optimizer: th.optim.Optimizer) -> None:
        """
        From now on the optimiser's ``step`` uses the gradients of the single parameters and does not change frozen
        parameters, and its ``zero_grad`` sets these gradients to 0. A copy of the optimiser has to be connected again.

        An optimiser of vectors has a state for frozen parameters too: its first step makes it, later ones leave it as
        it is, and its count of steps is that of the whole vector. An optimiser of single parameters gets no gradient of
        a frozen one.

        :param optimizer: of the vectors, or of the single parameters
        """
        optimizer.zero_grad = self.zero_grad  # type: ignore[method-assign]
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def _before_step(self, optimizer: th.optim.Optimizer, *_: Any) -> None:
        """Collect parameters and gradients, and keep copies of what the step must leave as it is."""
        self._collect_parameters()
        self._collect_gradients()
        self._frozen = []
        for vector, group in zip(self.vectors, self._groups, strict=True):
            frozen = [not parameter.requires_grad for parameter in group]
            if vector.grad is None or not any(frozen):
                continue
            for parameter in compress(group, frozen):
                parameter.grad = None  # an optimiser of single parameters does not step them then
            slots = (slot for slot in optimizer.state.get(vector, {}).values() if th.is_tensor(slot))
            for values in (vector.data, *(slot for slot in slots if slot.shape == vector.shape)):
                parts = compress(th.split(values, [parameter.numel() for parameter in group]), frozen)
                self._frozen += [(part, part.clone()) for part in parts]

    def _after_step(self, *_: Any) -> None:
        for part, before in self._frozen:
            part.copy_(before)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """
        Set all gradients to 0. Those of parameters that a backward pass does not reach stay 0.

        :param set_to_none: unused: the gradients stay views
        """
        for parameter, gradient in self._gradients.items():
            if parameter.grad is not gradient:
                parameter.grad = gradient
        for vector in self.vectors:
            if vector.grad is not None:
                vector.grad.zero_()

    def _collect_parameters(self) -> None:
        """Copy parameters that have been given other memory, by a layer that bounds its norm say, into the vectors."""
        if [parameter.data_ptr() for parameter in self.parameters] == self._places:
            return
        for vector, group in zip(self.vectors, self._groups, strict=True):
            for parameter, view in zip(group, self._split(vector.data, group), strict=True):
                view.copy_(parameter.data)
                parameter.data = view

    def _collect_gradients(self) -> None:
        """Copy gradients that have been replaced, by a hook for example, into the vectors'."""
        for parameter, gradient in self._gradients.items():
            if gradient is None or parameter.grad is gradient:
                continue
            if parameter.grad is None:  # after zero_grad(set_to_none=True)
                gradient.zero_()
            else:
                gradient.copy_(parameter.grad)
            parameter.grad = gradient

    def gradients(self) -> list[th.Tensor]:
        """
        :return: the vectors' gradients, not copied
        """
        self._collect_gradients()
        return [vector.grad for vector in self.vectors if vector.grad is not None]

    def clip_grad_norm(self, max_norm: float | None) -> float:
        """
        Scale all gradients together to a norm of at most ``max_norm``.

        :param max_norm: None for no bound
        :return: the norm before
        """
        gradients = self.gradients()
        norm = math.hypot(*(th.linalg.vector_norm(gradient).item() for gradient in gradients))
        if max_norm is not None and norm > max_norm:
            for gradient in gradients:
                gradient.mul_(max_norm / norm)
        return norm

    def polyak_update(self, other: "FlatParameters", alpha: float) -> None:
        """
        theta <- alpha theta + (1 - alpha) theta', with theta' those of another module of the same layout. Buffers are
        copied: the running means of batch normalisation, say.

        :param other: the other module's
        :param alpha: the decay, in [0, 1]
        """
        for flat in (self, other):
            flat._collect_parameters()
        for own, theirs in zip(self.vectors, other.vectors, strict=True):
            if own.is_floating_point() or own.is_complex():
                own.data.lerp_(theirs.data.to(own.dtype), 1 - alpha)
        for (owner, name), (their_owner, _) in zip(self._buffer_names(), other._buffer_names(), strict=True):
            buffer, current = owner._buffers[name], their_owner._buffers[name]
            if buffer is None or current is None or buffer.shape != current.shape:  # made or grown by a forward pass
                owner._buffers[name] = None if current is None else current.clone()
            else:
                buffer.copy_(current)

    def buffers(self) -> list[th.Tensor]:
        """The module's buffers."""
        found = (owner._buffers[name] for owner, name in self._buffer_names())  # a module may assign its buffers anew
        return [buffer for buffer in found if buffer is not None]

    def _buffer_names(self) -> list[tuple[nn.Module, str]]:
        """Modules and the names of their buffers, kept since walking through the modules takes as long as a layer."""
        if self._owners is None:
            self._owners = [(owner, name) for owner in self._module.modules() for name in owner._buffers]
        return self._owners
