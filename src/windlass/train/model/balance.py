"""Experts taken alike: who is chosen is counted, corrections follow the counts, and losses on the router's scores hang on the shares.

After each step a correction moves by `rate * sign(mean load - load)`, the loads of all ranks together (arXiv 2408.15664). The
sequence-wise loss is arXiv 2412.19437's (2.1.2, equations 17 to 20), of a sample at a time; the z-loss arXiv 2202.08906's (3.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from windlass.core.model import Router, Scoring
from windlass.core.recipe.sections import LossSection
from windlass.kernels.precision import widened
from windlass.kernels.torch_compile import chain
from windlass.nn.moe import MixtureOfExperts


@dataclass
class Frame:
    """What all routed layers know of the micro-batch that is running."""

    loss: LossSection
    length: int = 1
    """Tokens of a sample."""
    num_samples: int = 1
    """Of the whole step, on all ranks: what means are taken over."""
    owns_losses: bool = True
    """Of ranks that see the same tokens, one adds these losses."""
    scale: Tensor | float = 1.0
    """What the objective is multiplied with before it is differentiated: losses that hang beside it are, too."""


class Watch:
    """Of one routed layer (nn.moe.Watch)."""

    def __init__(self, moe: MixtureOfExperts, frame: Frame) -> None:
        self.moe, self.frame = moe, frame
        device = next(moe.router.parameters()).device
        self.load = torch.zeros(moe.moe.num_experts, dtype=torch.int64, device=device)
        self.balance, self.z = (torch.zeros((), dtype=torch.float32, device=device) for _ in range(2))

    def __call__(self, logits: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        chosen = ids.long() + self.moe.first
        objective = self._losses(widened(logits), chosen)
        if not _computed_again():
            self.load.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten()))
        return shares if objective is None else HangOn.apply(shares, objective, self.frame)

    def start_step(self) -> None:
        self.load.zero_()
        self.balance, self.z = torch.zeros_like(self.balance), torch.zeros_like(self.z)

    def _losses(self, logits: Tensor, chosen: Tensor) -> Tensor | None:
        frame, weights = self.frame, self.frame.loss
        if not (weights.balance or weights.router_z):
            return None
        balance = sequence_balance(logits, chosen, self.moe.moe.router, frame.length).sum() / frame.num_samples
        z = logits.logsumexp(-1).square().sum() / (frame.num_samples * frame.length)
        if not _computed_again():
            self.balance, self.z = self.balance + balance.detach(), self.z + z.detach()
        return weights.balance * balance + weights.router_z * z if frame.owns_losses else None


@chain
def sequence_balance(logits: Tensor, chosen: Tensor, router: Router, length: int) -> Tensor:
    """[samples]: sum over experts of (share of choices * experts) * (mean score): 1 where all are taken and liked alike."""
    num_experts, num_active = logits.shape[1], chosen.shape[1]
    scores = logits.sigmoid() if router.scoring is Scoring.SIGMOID else logits.softmax(-1)
    liked = (scores / scores.sum(-1, keepdim=True)).unflatten(0, (-1, length)).mean(1)
    taken = torch.zeros_like(logits).scatter(1, chosen, 1.0).unflatten(0, (-1, length)).mean(1)
    return (taken * (num_experts / num_active) * liked).sum(-1)


def _computed_again() -> bool:
    """Within a backward pass, where activations that were not kept are made anew: it was counted the first time."""
    return torch._C._current_graph_task_id() != -1


class HangOn(torch.autograd.Function):
    """A loss hung on something that runs through: unchanged going forward, and on the way back the loss learns too."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, loss: Tensor, frame: Frame) -> Tensor:
        ctx.like, ctx.frame = (loss.dtype, loss.device), frame
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        dtype, device = ctx.like
        return gradient, torch.ones((), dtype=dtype, device=device) * ctx.frame.scale, None


def watch_all(model: nn.Module, loss: LossSection) -> tuple[Frame, list[Watch]]:
    frame, watches = Frame(loss), list[Watch]()
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            module.watch = Watch(module, frame)
            watches.append(module.watch)
    return frame, watches


def correct(watches: list[Watch], loads: list[Tensor], rate: float) -> None:
    """`loads` are those of all ranks together."""
    for watch, load in zip(watches, loads, strict=True):
        correction = watch.moe.correction
        if correction is not None and rate:
            wide = load.to(correction.dtype)
            correction += rate * (wide.mean() - wide).sign()
