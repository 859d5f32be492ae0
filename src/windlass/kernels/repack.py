"""GGML's Q4_0 and Q8_0 blocks as int4 and int8 in groups of 32: the same numbers in another order, nothing is rounded.

A block is 32 weights (https://github.com/ggml-org/llama.cpp, ggml-common.h): an fp16 scale and either 16 bytes, of which byte j
holds code j in its low nibble and code j + 16 in its high one, each plus 8; or 32 signed bytes. Scales stay fp16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.errors import BadInput

BLOCK = 32
Q4_0_BYTES = 18
Q8_0_BYTES = 34
TOP_BITS = 0x8080 - 0x10000
"""Of both bytes of an int16."""


def q4_0(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Raw rows (uint8 [n, blocks * 18]) to int32 [n, blocks * 4] and fp16 scales [n, blocks]."""
    scales, pairs = _blocks(rows, Q4_0_BYTES)
    # Of two neighbouring bytes the low nibbles are neighbours in the first half of the block, the high ones in the second.
    first = (pairs & 15) | ((pairs >> 4) & 0xF0)
    second = ((pairs >> 4) & 15) | ((pairs >> 8) & 0xF0)
    return torch.cat((first, second), dim=-1).to(torch.uint8).view(torch.int32).flatten(1), scales


def q8_0(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Raw rows (uint8 [n, blocks * 34]) to int32 [n, blocks * 8] and fp16 scales [n, blocks]."""
    scales, pairs = _blocks(rows, Q8_0_BYTES)
    # Two's complement with the top bit turned over is the code + 128.
    return (pairs ^ TOP_BITS).view(torch.int32).flatten(1), scales


def _blocks(rows: Tensor, block_bytes: int) -> tuple[Tensor, Tensor]:
    """Scales, and what follows them two bytes at a time: a third as many operations as by nibbles."""
    if rows.dtype is not torch.uint8 or rows.dim() != 2 or rows.shape[1] % block_bytes:
        raise BadInput(f"expected rows of whole {block_bytes}-byte blocks (uint8), got {rows.dtype} {tuple(rows.shape)}")
    pairs = rows.contiguous().view(torch.int16).view(rows.shape[0], -1, block_bytes // 2)
    return pairs[..., 0].contiguous().view(torch.float16), pairs[..., 1:]
