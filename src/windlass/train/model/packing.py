"""Packed rows as one step of the decoder: every document a sequence of its own, which sees nothing of the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from windlass.kernels.step import Step

IGNORED = -100
"""A target that is not to be learned, as PyTorch's cross-entropy has it."""


def step_of(batch: Any, device: torch.device | str = "cpu") -> Step:
    """`batch`: train.data.Batch, [rows, length] each, in host memory. The device is never asked anything."""
    starts = _bounds(batch.documents)
    lengths = starts.diff()
    none = torch.zeros(0, dtype=torch.int32)
    rows = batch.tokens.numel()
    return Step(
        tokens=_flat(batch.tokens, device),
        positions=_flat(batch.positions, device),
        slots=none,
        starts=starts.to(device, non_blocking=True),
        lengths=lengths.to(device, non_blocking=True),
        blocks=none,
        logit_rows=none,
        counts=torch.tensor([rows, len(lengths), 0], dtype=torch.int32),
        host_starts=starts,
        host_lengths=lengths,
    )


def _flat(numbers: Tensor, device: torch.device | str) -> Tensor:
    return numbers.flatten().to(torch.int32).to(device, non_blocking=True)


def _bounds(documents: Tensor) -> Tensor:
    """int32: where documents begin among all rows, and the end."""
    changes = torch.ones_like(documents, dtype=torch.bool)
    changes[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return torch.cat((changes.flatten().nonzero().flatten(), torch.tensor([documents.numel()]))).to(torch.int32)


def moved(step: Step, device: torch.device | str) -> Step:
    """The same on a device; what the host asks stays with it."""
    to = {name: getattr(step, name).to(device, non_blocking=True) for name in ("tokens", "positions", "starts", "lengths")}
    return replace(step, **to)


def after_next(batch: Any) -> tuple[Tensor, Tensor]:
    """What the layer that guesses ahead is given, and asked: each row's next token, and the target of that. [rows, length] each."""
    tokens, targets, documents = batch.tokens, batch.targets, batch.documents
    following = torch.zeros_like(tokens)
    following[:, :-1] = tokens[:, 1:]
    asked = torch.full_like(targets, IGNORED)
    same = documents[:, 1:] == documents[:, :-1]
    asked[:, :-1] = torch.where(same, targets[:, 1:], IGNORED)
    return following, asked
