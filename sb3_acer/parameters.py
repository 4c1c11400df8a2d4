"""The optimiser of stable-baselines' ACER, one operation for all parameters together."""

from collections.abc import Callable
from typing import Any

import torch as th
from stable_baselines3.common.sb2_compat.rmsprop_tf_like import RMSpropTFLike


class RMSpropTF(RMSpropTFLike):
    """
    SB3's :class:`RMSpropTFLike` (epsilon inside the root, slots that start at 1), with the same arguments, state and
    steps. On small networks most of a step's time goes into launching operations; here there are five, however many
    parameters.
    """

    @th.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """
        :param closure: evaluates the model again and returns the loss
        :return: its loss
        """
        if closure is not None or any(g["momentum"] or g["centered"] or g["weight_decay"] for g in self.param_groups):
            return super().step(closure)
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            gradients = [parameter.grad for parameter in parameters]
            squares = []
            for parameter in parameters:
                state = self.state[parameter]
                if not state:
                    state["step"], state["square_avg"] = 0, th.ones_like(parameter, memory_format=th.preserve_format)
                state["step"] += 1
                squares.append(state["square_avg"])
            th._foreach_mul_(squares, group["alpha"])
            th._foreach_addcmul_(squares, gradients, gradients, 1 - group["alpha"])
            roots = th._foreach_add(squares, group["eps"])
            th._foreach_sqrt_(roots)
            th._foreach_addcdiv_(parameters, gradients, roots, -group["lr"])
        return None
