"""Greedy sampling, and the next step's inputs, on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.runtime.kernels.cuda import driver
from windlass.runtime.kernels.step import Step

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


def greedy(
    logits: Tensor, num_tokens: int, step: Step, counts: Tensor, space: GreedyWorkspace, out: Tensor | None = None
) -> Tensor:
    """int32 [rows], -1 where the largest logit is not finite. Of logits fp32 [rows, at least num_tokens].

    The first `counts[0]` (on the device) rows of `step`, which has one token a sequence, become those of the next step.
    """
    chosen = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device) if out is None else out
    run = driver.kernel("small.cu", "PQIPPPPPPPPPI", "greedy", packed=False)
    run(
        (SHARES, logits.shape[0]), 512, logits, logits.stride(0), num_tokens, space.partial, space.arrived, chosen, counts, step.tokens,
        step.positions, step.lengths, step.slots, step.blocks, step.blocks.shape[1],
    )  # fmt: skip
    return chosen
