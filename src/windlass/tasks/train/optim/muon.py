"""Muon (github.com/KellerJordan/Muon; arXiv 2502.16982): momentum updates that are orthogonalized.

torch.optim.Muon supports matrices only; here stacked experts are orthogonalized one by one, and fused parameters (Q, K and V) are split
into their matrices first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic Newton-Schulz iteration, as in Muon's reference code."""
RMS_OF_ADAM = 0.2
"""Updates are scaled to AdamW's RMS, so that one learning rate works for both (arXiv 2502.16982, 2.2)."""

Split = Callable[[Tensor], list[Tensor]]


class Muon(Optimizer):
    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, weight_decay: float = 0.1, momentum: float = 0.95, num_iterations: int = 5
    ) -> None:
        """Groups of `params` may have `splits`: for each parameter, a function that splits it into views."""
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
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = state["momentum_buffer"]
        buffer.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(buffer, group["momentum"])  # Nesterov momentum
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        for to, matrix in zip(split(parameter), split(update), strict=True):
            scale = RMS_OF_ADAM * sqrt(max(matrix.shape[-2:]))
            to.add_(orthogonalize(matrix, group["num_iterations"]).to(to.dtype), alpha=-group["lr"] * scale)


def _one(parameter: Tensor) -> list[Tensor]:
    return [parameter]


def orthogonalize(matrix: Tensor, num_iterations: int = 5) -> Tensor:
    """[.., rows, columns]: approximately U V' of the SVD, by Newton-Schulz iteration in bf16."""
    first, second, third = COEFFICIENTS
    wide = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.bfloat16() if matrix.dtype != torch.float64 else matrix
    x = x.mT if wide else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(num_iterations):
        gram = x @ x.mT
        x = first * x + (second * gram + third * gram @ gram) @ x
    return x.mT if wide else x
