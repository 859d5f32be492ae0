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


def q4_0(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Raw rows (uint8 [n, blocks * 18]) to int32 [n, blocks * 4] and fp16 scales [n, blocks]."""
    blocks = _blocks(rows, Q4_0_BYTES)
    halves = blocks[..., 2:]
    nibbles = torch.cat((halves & 15, halves >> 4), dim=-1)
    packed = (nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)).contiguous().view(torch.int32)
    return packed.flatten(1), _scales(blocks)


def q8_0(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Raw rows (uint8 [n, blocks * 34]) to int32 [n, blocks * 8] and fp16 scales [n, blocks]."""
    blocks = _blocks(rows, Q8_0_BYTES)
    # Two's complement with the top bit turned over is the code + 128.
    return (blocks[..., 2:] ^ 128).contiguous().view(torch.int32).flatten(1), _scales(blocks)


def _blocks(rows: Tensor, block_bytes: int) -> Tensor:
    if rows.dtype is not torch.uint8 or rows.dim() != 2 or rows.shape[1] % block_bytes:
        raise BadInput(f"expected rows of whole {block_bytes}-byte blocks (uint8), got {rows.dtype} {tuple(rows.shape)}")
    return rows.reshape(rows.shape[0], -1, block_bytes)


def _scales(blocks: Tensor) -> Tensor:
    return blocks[..., :2].contiguous().view(torch.float16).squeeze(-1)
