"""Dequantization of published formats: fp8 per row and per block, MXFP4. Knows no names and no files."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.core.constants import FP8_BLOCK, MXFP4_BLOCK
from windlass.errors import BadInput

# E2M1, by code (OCP Microscaling Formats, revision 1.0, table 5); the fourth bit is the sign.
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
EXPONENT_BIAS = 127


def fp8_rows(weight: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """`weight` [n, k] times `weight_scale` [n, 1] (or one for all)."""
    if scale.numel() not in (1, weight.shape[0]):
        raise BadInput(f"weight_scale has {scale.numel()} values for {weight.shape[0]} rows; expected one each, or one for all")
    return (weight.float() * scale.float().view(-1, 1)).to(dtype)


def fp8_blocks(
    weight: Tensor, scale_inv: Tensor, first_row: int = 0, block: int = FP8_BLOCK, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Rows first_row.. of a matrix times `weight_scale_inv`, of which each value covers block x block weights.

    `scale_inv` is that of the whole matrix; the last blocks may be short. As in DeepSeek-V3's `weight_dequant`
    (https://github.com/deepseek-ai/DeepSeek-V3, inference/kernel.py): the name says inverse, but it multiplies.
    """
    rows, inputs = weight.shape
    if scale_inv.shape[0] * block < first_row + rows or scale_inv.shape[1] != -(-inputs // block):
        raise BadInput(
            f"weight_scale_inv {tuple(scale_inv.shape)} does not cover rows {first_row}:{first_row + rows} of {inputs} inputs "
            f"in blocks of {block}"
        )
    which = torch.arange(first_row, first_row + rows, device=weight.device) // block
    scale = scale_inv.float()[which].repeat_interleave(block, dim=1)[:, :inputs]
    return (weight.float() * scale).to(dtype)


def mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """`_blocks` uint8 [.., b, 16] and `_scales` uint8 [.., b] to [.., b * 32]: two codes to a byte, the first in the low nibble."""
    if blocks.dtype is not torch.uint8 or scales.dtype is not torch.uint8 or blocks.shape != (*scales.shape, MXFP4_BLOCK // 2):
        raise BadInput(
            f"MXFP4 blocks should be uint8 [.., n, 16] with uint8 scales [.., n], "
            f"not {blocks.dtype} {tuple(blocks.shape)} with {scales.dtype} {tuple(scales.shape)}"
        )
    table = torch.tensor(FP4_VALUES, device=blocks.device)
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    values = torch.ldexp(table[codes.int()], scales.unsqueeze(-1).int() - EXPONENT_BIAS)
    return values.flatten(-2).to(dtype)
