"""Muon (github.com/KellerJordan/Muon; arXiv 2502.16982): momentum whose matrices are made orthogonal before they move the weights.

torch.optim.Muon takes matrices only; here a stack of experts is a stack of matrices, each made orthogonal by itself. A parameter that
is several of our matrices below each other (Q, K and V) is taken apart first, since their directions have nothing to do with each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration: they need not converge to one, only grow fast from nought (as in Muon's own code)."""
RMS_OF_ADAM = 0.2
"""Updates are scaled to the root mean square that AdamW's have, so that one learning rate serves both (arXiv 2502.16982, 2.2)."""

Split = Callable[[Tensor], list[Tensor]]


class Muon(Optimizer):
    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, weight_decay: float = 0.1, momentum: float = 0.95, num_iterations: int = 5
    ) -> None:
        """Groups of `params` may have `splits`: for each parameter, how it is taken apart (views)."""
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "num_iterations": num_iterations,
            "splits": None,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            splits = group["splits"] or [_one] * len(group["params"])
            for parameter, split in zip(group["params"], splits, strict=True):
                if parameter.grad is not None:
                    self._move(parameter, split, group)

    def _move(self, parameter: Tensor, split: Split, group: dict[str, Any]) -> None:
        state, gradient = self.state[parameter], parameter.grad
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = state["momentum_buffer"]
        buffer.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(buffer, group["momentum"])  # Nesterov's
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        for to, matrix in zip(split(parameter), split(update), strict=True):
            scale = RMS_OF_ADAM * sqrt(max(matrix.shape[-2:]))
            to.add_(orthogonal(matrix, group["num_iterations"]).to(to.dtype), alpha=-group["lr"] * scale)


def _one(parameter: Tensor) -> list[Tensor]:
    return [parameter]


def orthogonal(matrix: Tensor, num_iterations: int = 5) -> Tensor:
    """[.., rows, columns]: about U V' of the singular value decomposition, by Newton and Schulz; in bf16, as it is meant to be."""
    first, second, third = COEFFICIENTS
    wide = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.bfloat16() if matrix.dtype != torch.float64 else matrix
    x = x.mT if wide else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(num_iterations):
        gram = x @ x.mT
        x = first * x + (second * gram + third * gram @ gram) @ x
    return x.mT if wide else x
