"""R-Adam (Liu et al. 2020) in a few dozen launches, whatever the number of parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TRUSTED = 5.0  # with a shorter memory of squares than so many steps, R-Adam is momentum alone


class RAdam(torch.optim.Optimizer):
    """torch.optim.RAdam with decoupled weight decay, and its state, but the factors that follow the number of the step
    are computed once and on the device, not for every parameter.

    Torch's own, where a CUDA graph can hold it, launches several small kernels for every parameter, and an update of a
    small model is bound by launches. All parameters of a group step together.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        # "capturable" tells torch to load the number of the step to where the parameters are
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "capturable": True}
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            params = [each for each in group["params"] if each.grad is not None]
            if params:
                self._move(params, group)
        return loss

    def _move(self, params: list[Tensor], group: dict[str, Any]) -> None:
        (fade, fade_squares), rate = group["betas"], group["lr"]
        for each in params:
            if not self.state[each]:
                zeros = torch.zeros_like
                self.state[each] = {
                    "step": torch.zeros((), device=each.device),
                    "exp_avg": zeros(each),
                    "exp_avg_sq": zeros(each),
                }
        steps, means, squares = (
            [self.state[each][name] for each in params] for name in ("step", "exp_avg", "exp_avg_sq")
        )
        gradients = [each.grad for each in params if each.grad is not None]
        torch._foreach_add_(steps, 1.0)
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - rate * group["weight_decay"])
        torch._foreach_lerp_(means, gradients, 1 - fade)
        torch._foreach_mul_(squares, fade_squares)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - fade_squares)
        squared, plain = _weights(steps[0].double(), fade, fade_squares)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, group["eps"])
        for ahead, weight in ((torch._foreach_div(means, roots), squared), (means, plain)):
            torch._foreach_add_(params, torch._foreach_mul(ahead, (-rate * weight).float()))


def _weights(step: Tensor, fade: float, fade_squares: float) -> tuple[Tensor, Tensor]:
    """Of the mean gradient over the root of the mean square, corrected for their start at 0 and for how little is known
    of the square yet, and of the mean gradient alone, which serves where that is too little. One of them is 0: a
    choice on the device, which a graph can hold."""
    most, lasting = 2 / (1 - fade_squares) - 1, fade_squares**step
    length = most - 2 * step * lasting / (1 - lasting)
    trusted, corrected = length > TRUSTED, 1 / (1 - fade**step)
    known = (length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length)
    squared = torch.sqrt(torch.where(trusted, known * (1 - lasting), 0.0))
    return squared * corrected, torch.where(trusted, 0.0, corrected)
