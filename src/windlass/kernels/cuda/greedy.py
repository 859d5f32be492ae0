"""Greedy sampling, and the next step's inputs, on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.core.constants import BLOCK_TOKENS
from windlass.kernels.cuda import driver
from windlass.kernels.step import Step

SHARES = 32
"""Thread blocks per row: what one warp can compare in the end."""


@dataclass(frozen=True)
class GreedyWorkspace:
    """`arrived` is zero between launches."""

    partial: Tensor
    arrived: Tensor


def workspace(rows: int, device: torch.device) -> GreedyWorkspace:
    return GreedyWorkspace(
        partial=torch.empty(rows * SHARES, dtype=torch.int64, device=device),
        arrived=torch.zeros(rows, dtype=torch.int32, device=device),
    )


def greedy(logits: Tensor, num_tokens: int, step: Step, counts: Tensor, space: GreedyWorkspace) -> Tensor:
    """int32 [rows], -1 where the largest logit is not finite. Of logits fp32 [rows, at least num_tokens].

    The first `counts[0]` (on the device) rows of `step`, which has one token a sequence, become those of the next step.
    """
    chosen = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    run = driver.kernel("small.cu", "PQIPPPPPPPPPI", "greedy", packed=False)
    run(
        (SHARES, logits.shape[0]), 512, logits, logits.stride(0), num_tokens, space.partial, space.arrived, chosen, counts, step.tokens,
        step.positions, step.lengths, step.slots, step.blocks, step.blocks.shape[1],
    )  # fmt: skip
    return chosen


def greedy_reference(logits: Tensor, num_tokens: int, step: Step, counts: Tensor) -> Tensor:
    """Plain PyTorch, without synchronization."""
    best, found = logits[:, :num_tokens].max(-1)
    # Ties go to the lowest id: `max` does not guarantee which.
    found = (logits[:, :num_tokens] == best[:, None]).to(torch.uint8).argmax(-1)
    chosen = torch.where(best.isfinite(), found, -1).int()
    rows = torch.arange(len(chosen), device=logits.device)
    moves = rows < counts[0]
    position = step.positions + 1
    column = (position // BLOCK_TOKENS).clamp(max=step.blocks.shape[1] - 1).long()
    slots = step.blocks[rows, column] * BLOCK_TOKENS + position % BLOCK_TOKENS
    for old, new in (
        (step.tokens, chosen.clamp(min=0)),
        (step.positions, position),
        (step.lengths, position + 1),
        (step.slots, slots),
    ):
        old.copy_(torch.where(moves, new, old))
    return chosen
