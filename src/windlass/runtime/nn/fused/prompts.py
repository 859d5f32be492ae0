"""The rows of a fused step that are prompts: which of them have begun, and attention of those that have not."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from windlass.runtime.kernels.step import Step

PROMPT_ROWS = 256
"""New prompts are padded to a multiple of so many rows for attention."""
BEGUN_ROWS = (20, 700)
"""Of prompts that have begun: attention of few and of many rows uses different kernels."""
FEW_PLANNED_FROM = 2048
"""New prompts of more rows are rare in one step: only powers of two of these are planned ahead."""
FRESH_SEQUENCES = 16
"""Up to this many new prompts in a step use PyTorch's attention, one call each."""


def continued(step: Step, rows: int, length: int) -> Step:
    """The last `rows` of a sequence of `length` tokens, all of them in the cache's first block, with a block table like that of `step`."""
    ints = partial(torch.tensor, dtype=torch.int32)
    starts, lengths = ints([0, rows]), ints([length])
    positions = torch.arange(length - rows, length, dtype=torch.int32)
    on_device = (torch.zeros_like(positions), positions, torch.zeros_like(positions), starts, lengths)
    return Step(
        *(x.to(step.tokens.device) for x in on_device), step.blocks.new_zeros(1, step.blocks.stride(0)), step.logit_rows[:0],
        ints([rows, 1, 0]), starts, lengths,
    )  # fmt: skip


def padded_rows(rows: int) -> int:
    """cuDNN plans each length anew, which takes longer than the attention itself: few lengths are used. Rows behind the last one of a prompt
    change nothing, as attention is causal; they are those of the next prompt, or zeros."""
    return -(-rows // PROMPT_ROWS) * PROMPT_ROWS


def planned_rows(max_rows: int) -> list[int]:
    """Padded lengths of new prompts in steps of up to so many rows, for which attention is planned before the first request."""
    most = padded_rows(max_rows)
    few = [FEW_PLANNED_FROM << shift for shift in range(1, 8)]
    return [*range(PROMPT_ROWS, min(most, FEW_PLANNED_FROM) + 1, PROMPT_ROWS), *(rows for rows in few if rows <= most)]


def attend_whole(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """A new sequence: [tokens, heads, dim] -> [tokens, heads * dim]."""
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1).reshape(q.shape[0], -1)


@dataclass(frozen=True)
class Prompts:
    """The rows of a step that are prompts, which follow those of decoding sequences."""

    positions: Tensor
    slots: Tensor
    begun: Step | None
    """Of prompts that have tokens in the cache, and of any beyond FRESH_SEQUENCES; they come first."""
    new: list[tuple[int, int]]
    """First and last row of the others."""
    padding: int
    """Rows that attention of these reads behind the last one."""


def prompts_of(step: Step, first: int) -> Prompts:
    """Of the sequences from `first` on, which is also the number of rows before them."""
    starts, lengths = step.sizes()
    bounds = [(a - first, b - first) for a, b in pairwise(starts[first:])]
    num_begun = next((i for i, (a, b) in enumerate(bounds) if b - a == lengths[first + i]), len(bounds))
    if any(b - a != length for (a, b), length in zip(bounds[num_begun:], lengths[first + num_begun :], strict=True)):
        num_begun = len(bounds)
    num_begun = max(num_begun, len(bounds) - FRESH_SEQUENCES)
    return Prompts(
        positions=step.positions[first:],
        slots=step.slots[first:],
        begun=step.part(first, first + num_begun) if num_begun else None,
        new=bounds[num_begun:],
        padding=max((a + padded_rows(b - a) - bounds[-1][1] for a, b in bounds[num_begun:]), default=0),
    )
