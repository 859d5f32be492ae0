"""Packed rows as one step of the decoder: every document is a separate sequence for attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from windlass.runtime.kernels.step import Step

IGNORED = -100
"""A target without loss, as in PyTorch's cross-entropy."""


def packed_step(batch: Any, device: torch.device | str = "cpu") -> Step:
    """`batch`: [rows, length] each, in host memory. Does not synchronize with the device."""
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
    """int32: start offsets of documents over all rows, and the end."""
    changes = torch.ones_like(documents, dtype=torch.bool)
    changes[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return torch.cat((changes.flatten().nonzero().flatten(), torch.tensor([documents.numel()]))).to(torch.int32)


def step_to(step: Step, device: torch.device | str) -> Step:
    """Copies to a device; the host copies stay."""
    to = {name: getattr(step, name).to(device, non_blocking=True) for name in ("tokens", "positions", "starts", "lengths")}
    return replace(step, **to)


def mtp_targets(batch: Any) -> tuple[Tensor, Tensor]:
    """Inputs and targets of the MTP layer: the next token of each position, and its target. [rows, length] each."""
    tokens, targets, documents = batch.tokens, batch.targets, batch.documents
    inputs = torch.zeros_like(tokens)
    inputs[:, :-1] = tokens[:, 1:]
    shifted = torch.full_like(targets, IGNORED)
    same = documents[:, 1:] == documents[:, :-1]
    shifted[:, :-1] = torch.where(same, targets[:, 1:], IGNORED)
    return inputs, shifted
