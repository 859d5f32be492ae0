"""Masks tokens that a grammar forbids, before bias and penalties, which therefore cannot bring them back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from windlass.runtime.engine.sample.grammar import GrammarMatcher, TokenBitmask, num_words


def apply_masks(logits: Tensor, matchers: Sequence[GrammarMatcher | None]) -> None:
    """In place, float logits [rows, tokens]; rows without a matcher are unchanged."""
    rows = [row for row, matcher in enumerate(matchers) if matcher is not None]
    if not rows:
        return
    bitmasks = np.zeros((len(rows), num_words(logits.shape[1])), np.uint32)
    for place, row in enumerate(rows):
        _fill(bitmasks[place], matchers[row])
    if is_on_host(logits):
        _on_host(logits, rows, bitmasks)
    else:
        _on_device(logits, rows, bitmasks)


def is_on_host(logits: Tensor) -> bool:
    """Whether NumPy can read them."""
    return logits.device.type == "cpu" and logits.dtype == torch.float32


def _fill(row: TokenBitmask, matcher: GrammarMatcher | None) -> None:
    """The tokenizer may have more or fewer tokens than the model's head."""
    assert matcher is not None
    whole = np.zeros(max(len(row), matcher.num_words), np.uint32)
    matcher.fill(whole)
    row[:] = whole[: len(row)]


def _on_host(logits: Tensor, rows: list[int], bitmasks: TokenBitmask) -> None:
    array = logits.numpy()
    width = array.shape[1]
    for row, packed in zip(rows, bitmasks, strict=True):
        bits = np.unpackbits(packed.view(np.uint8), bitorder="little", count=width)
        np.copyto(array[row], -np.inf, where=bits == 0)


def _on_device(logits: Tensor, rows: list[int], bitmasks: TokenBitmask) -> None:
    """The mask is copied packed, one bit per token, and unpacked on the device."""
    packed = torch.from_numpy(bitmasks.view(np.uint8)).to(logits.device)
    bits = packed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=logits.device) & 1
    forbidden = bits.flatten(1)[:, : logits.shape[1]] == 0
    chosen = torch.tensor(rows, device=logits.device)
    logits[chosen] = logits[chosen].masked_fill(forbidden, -torch.inf)
