"""Embedding lookups in a packed table."""

# ruff: noqa: N803 (compile-time constants are in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from windlass.runtime.kernels.packing.packed_rows import ZERO, PackedRows
from windlass.runtime.kernels.triton.tiles.product import eights

BLOCK = 1024


@triton.jit
def _embed(
    result, codes, scale, offset, tokens, num_in, row_codes, row_groups,
    KIND: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.load(tokens + tl.program_id(0)).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_in
    if KIND == "int8" or KIND == "fp8":
        stored = tl.load(codes + row * row_codes + at, mask=inside, other=0)
    else:
        stored = tl.load(codes + row * row_codes + at // 32 * 16 + at % 16, mask=inside, other=0)
        stored = (stored >> (at % 32 // 16 * 4).to(tl.uint8)) & 15
    if KIND == "fp8":
        numbers = eights(stored, tl.float32, False)
    else:
        numbers = stored.to(tl.float32)
    s = tl.load(scale + row * row_groups + at // GROUP, mask=inside, other=0).to(tl.float32)
    if KIND == "int4_zeros" or KIND == "int4_minima":
        o = tl.load(offset + row * row_groups + at // GROUP, mask=inside, other=0).to(tl.float32)
        if KIND == "int4_zeros":
            numbers = (numbers - o) * s
        else:
            numbers = numbers * s + o
    else:
        numbers = (numbers - ZERO) * s
    tl.store(result + tl.program_id(0).to(tl.int64) * num_in + at, numbers.to(result.dtype.element_ty), mask=inside)


def embed(tokens: Tensor, table: Tensor | PackedRows, dtype: torch.dtype = torch.float32) -> Tensor | None:
    if tokens.dim() != 1 or tokens.dtype not in (torch.int32, torch.int64):
        return None
    if isinstance(table, Tensor):
        rows = functional.embedding(tokens, table)
        return rows.to(torch.promote_types(rows.dtype, dtype))
    if not isinstance(table, PackedRows) or table.num_experts or not tokens.is_contiguous():
        return None
    if table.form is not None:
        return table.rows(tokens).to(dtype)
    result = torch.empty((tokens.shape[0], table.shape[1]), dtype=dtype, device=tokens.device)
    if tokens.shape[0]:
        _embed[(tokens.shape[0], triton.cdiv(table.shape[1], BLOCK))](
            result, table.data, table.scale, table.offset, tokens, table.shape[1], table.data.shape[2], table.num_groups,
            KIND=table.kind, GROUP=table.group, ZERO=ZERO.get(table.kind, 0), BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return result
