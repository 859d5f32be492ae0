"""Linear layers and embedding lookups, with plain or packed weights."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from windlass.runtime.kernels.cpu import embed as native_embed
from windlass.runtime.kernels.cpu import linear as native_linear
from windlass.runtime.kernels.packing.matrix import AnyMatrix, StackedMatrix, WeightMatrix, weight_data
from windlass.runtime.kernels.packing.packed_rows import PackedRows
from windlass.runtime.kernels.packing.panels import Panels
from windlass.runtime.kernels.packing.tiered import StreamedMatrix
from windlass.runtime.kernels.program import program
from windlass.runtime.kernels.triton import available


def linear(x: Tensor, weight: AnyMatrix, bias: Tensor | None = None, add: Tensor | None = None) -> Tensor:
    """x [rows, in] @ weight.T + bias + add; `add` (the residual) has the shape of the result."""
    if isinstance(weight, StreamedMatrix):
        matrix, before, after = weight.bound
        program.call(before)
        result = linear(x, matrix, bias, add)
        program.call(after)
        return result
    if isinstance(weight, StackedMatrix):
        return _stacked(x, weight, bias, add)
    result = native_linear.linear(x, weight, bias, add) if program.usable(x, weight_data(weight), bias, add) else None
    if result is None and (gpu := available.kernels(x, weight_data(weight), bias, add)):
        result = gpu.linear(x, weight, bias, add)
    return reference(x, weight, bias, add) if result is None else result


def _stacked(x: Tensor, weight: StackedMatrix, bias: Tensor | None, add: Tensor | None) -> Tensor:
    """Each part writes its columns; where it cannot, parts are joined."""
    pieces = [
        (part, columns, None if bias is None else bias[columns], None if add is None else add[:, columns])
        for part, columns in weight.columns()
    ]
    if program.usable(x, bias, add, *(weight_data(part) for part in weight.parts)) and native_linear.covers(x, bias, add):
        result = program.empty((x.shape[0], weight.shape[0]))
        for part, columns, its_bias, its_add in pieces:
            done = native_linear.linear(x, cast(Any, part), its_bias, its_add, result[:, columns])
            assert done is not None, "parts of a stacked matrix are as kernels want them"
        return result
    return torch.cat([linear(x, part, its_bias, its_add) for part, _, its_bias, its_add in pieces], dim=1)


def reference(x: Tensor, weight: WeightMatrix, bias: Tensor | None = None, add: Tensor | None = None) -> Tensor:
    product = plain_product(x, weight, bias) if isinstance(weight, Tensor) else packed_product(x, weight, None, bias)
    return product if add is None else product + add


def packed_product(x: Tensor, weight: Panels | PackedRows, expert: int | None, bias: Tensor | None) -> Tensor:
    if x.requires_grad and torch.is_grad_enabled():
        product = FrozenProduct.apply(x, weight, expert)
        return product if bias is None else product + bias.to(product.dtype)
    return plain_product(x, weight.dense(expert, x.dtype), bias)


class FrozenProduct(torch.autograd.Function):
    """With a frozen packed matrix, which is dequantized for the forward pass and again for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Panels | PackedRows, expert: int | None) -> Tensor:
        ctx.weight, ctx.expert = weight, expert
        return x @ weight.dense(expert, x.dtype).t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient @ ctx.weight.dense(ctx.expert, gradient.dtype), None, None


def plain_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """In the wider of the two dtypes: bf16 weights with fp32 activations on the CPU, an fp32 router with bf16 activations."""
    kind = torch.promote_types(x.dtype, weight.dtype)
    if x.dtype != kind and x.requires_grad and torch.is_grad_enabled():
        product = WiderProduct.apply(x, weight)
        return product if bias is None else product + bias.to(kind)
    return functional.linear(x.to(kind), weight.to(kind), None if bias is None else bias.to(kind))


class WiderProduct(torch.autograd.Function):
    """Of a narrow input with a wider matrix (an fp32 router). Saves the input as it is, which other layers save too, and not an upcast copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.to(weight.dtype) @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        weight_gradient = gradient.t() @ x.to(weight.dtype) if ctx.needs_input_grad[1] else None
        return (gradient @ weight).to(x.dtype), weight_gradient


def embed(tokens: Tensor, table: WeightMatrix, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of `table` in `dtype`, or in the table's own dtype where that is wider."""
    result = None
    if dtype == torch.float32 and program.usable(tokens, weight_data(table)) and not isinstance(table, PackedRows):
        result = native_embed.embed(tokens, table) if isinstance(table, Tensor) else native_linear.embed(tokens, table)
    elif gpu := available.kernels(tokens, weight_data(table)):
        result = gpu.embed(tokens, table, dtype)
    return embed_reference(tokens, table, dtype) if result is None else result


def embed_reference(tokens: Tensor, table: WeightMatrix, dtype: torch.dtype = torch.float32) -> Tensor:
    rows = functional.embedding(tokens.long(), table) if isinstance(table, Tensor) else table.rows(tokens.long()).to(dtype)
    return rows.to(torch.promote_types(rows.dtype, dtype))
