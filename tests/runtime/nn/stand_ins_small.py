"""Stand-ins, as in stand_ins.py, for the kernels beside the products: routing, attention and norms."""

# ruff: noqa: E402 (the folder of cuda_references is put on the path first)

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CUDA_TESTS = str(Path(__file__).parents[2] / "runtime" / "kernels" / "cuda")
if CUDA_TESTS not in sys.path:
    sys.path.insert(0, CUDA_TESTS)

from cuda_references import decode_attention_reference, head_norm_reference, norm_reference, rotate_reference, route_reference

from windlass.core.constants import BLOCK_TOKENS
from windlass.core.fused import BLOCK_INPUTS
from windlass.runtime.kernels.cuda import attention, route
from windlass.runtime.kernels.cuda.int8 import RoundedRows
from windlass.runtime.kernels.cuda.route import Guess, Routes
from windlass.runtime.kernels.step import KvCache

NAN = float("nan")


def plain(dtype: torch.dtype, *tensors: Tensor) -> None:
    """As a kernel takes them that is given addresses alone."""
    for tensor in tensors:
        assert tensor.dtype == dtype and tensor.is_contiguous(), f"{tensor.dtype}, not {dtype}, strides {tensor.stride()}"


def plain_cache(half: torch.dtype, keys: Tensor, values: Tensor, scales: Tensor | None) -> None:
    """In the type of activations, or in fp8 with the scales of all tokens."""
    plain(half if scales is None else torch.float8_e4m3fn, keys, values)
    if scales is not None:
        plain(torch.uint8, scales)
        assert scales.shape == (*keys.shape[:2], 2, BLOCK_TOKENS)


def put(out: Tensor, value: Tensor) -> Tensor:
    """`value` may have been made of `out`."""
    assert out.shape == value.shape, f"{tuple(value.shape)} into {tuple(out.shape)}"
    return out.copy_(value)


class Small:
    def __init__(self, half: torch.dtype) -> None:
        self.half = half

    # --- routing

    def router_few(self, x: Tensor, norm: Tensor, weight: Tensor, logits: Tensor, eps: float) -> Tensor:
        plain(torch.float32, x, norm, weight, logits)
        assert 1 <= len(x) <= 4
        return put(logits, norm_reference(x, norm, eps) @ weight.T)

    def router_many(self, x: Tensor, weight: Tensor, logits: Tensor, guess: Guess | None = None) -> Tensor:
        plain(self.half, x)
        plain(torch.float32, weight, logits)
        assert logits.shape == (len(x), len(weight)) and len(weight) % 4 == 0
        if guess is not None:
            plain(torch.float32, guess.router, guess.scale, guess.logits)
            assert (
                guess.router.shape == weight.shape
                and guess.scale.shape == weight.shape[1:]
                and guess.logits.shape == logits.shape
            )
            put(guess.logits, x.float() @ (guess.router * guess.scale).T)
        return put(logits, x.float() @ weight.T)

    def route_many(
        self, logits: Tensor, correction: Tensor | None, into: Routes, routed_scale: float = 1.0, guess: Guess | None = None
    ) -> Routes:
        if guess is not None:
            plain(torch.int32, guess.ids)
            ids, _ = route_reference(guess.logits, guess.correction, into.num_active, routed_scale, softmax=into.softmax)
            put(guess.ids, ids.int())
        assert len(logits) <= route.MAX_ROWS and into.ids.shape == into.weights.shape == (len(logits), into.num_active)
        plain(torch.int32, into.ids)
        plain(torch.float32, into.weights)
        ids, weights = route_reference(logits, correction, into.num_active, routed_scale, softmax=into.softmax)
        into.ids.copy_(ids), into.weights.copy_(weights)
        size = into.item_rows.shape[1]
        items = route.items_reference(ids, into.num_experts, into.num_shared, size)
        assert len(items) <= len(into.item_expert), "more items than there is room for"
        into.num_items[0] = len(items)
        for number, (expert, rows, places) in enumerate(items):
            into.item_expert[number] = expert
            for buffer, values in ((into.item_rows, rows), (into.item_places, places)):
                buffer[number] = torch.tensor(values + [-1] * (size - len(values)))
        return into

    def choose_many(
        self, logits: Tensor, correction: Tensor | None, num_active: int, routed_scale: float = 1.0, *, softmax: bool = False
    ) -> tuple[Tensor, Tensor]:
        plain(torch.float32, logits)
        logits = logits if logits.dim() == 2 else logits.sum(1)
        return route_reference(logits, correction, num_active, routed_scale, softmax=softmax)

    # --- attention

    def decode_attention(
        self, qkv: Tensor, table: Tensor, positions: Tensor, slots: Tensor, lengths: Tensor, blocks: Tensor, keys: Tensor,
        values: Tensor, out: Tensor | RoundedRows, space: attention.AttentionWorkspace, *, scale: float, splits: int,
        interleaved: bool = False, shape: tuple[int, int] | None = None, scales: Tensor | None = None, chained: bool = False,
    ) -> None:  # fmt: skip
        out = out.codes if isinstance(out, RoundedRows) else out
        assert shape is None or shape in attention.TOGETHER
        rows, kv_heads = len(qkv), keys.shape[1]
        heads = qkv.shape[1] // BLOCK_INPUTS - 2 * kv_heads
        plain(self.half, qkv, out)
        plain_cache(self.half, keys, values, scales)
        plain(torch.float32, table)
        assert out.shape == (rows, heads * BLOCK_INPUTS) and 1 <= splits <= attention.MAX_SPLITS and heads // kv_heads <= 16
        assert space.partial.numel() >= rows * heads * splits * (BLOCK_INPUTS + 2)
        assert space.arrived.numel() >= rows * kv_heads and not space.arrived.any()
        plain(torch.int32, positions, slots, lengths, blocks)
        # Rows of a sequence come one after another, and see those before them.
        parts = [slice(row, row + 1) for row in range(rows)] if chained else [slice(0, rows)]
        found = [
            decode_attention_reference(
                qkv[part], table, positions[part], slots[part], lengths[part], blocks[part], keys, values, scale=scale,
                interleaved=interleaved, scales=scales,
            )
            for part in parts
        ]  # fmt: skip
        put(out, torch.cat(found))

    def rotate_store(
        self, qkv: Tensor, table: Tensor, positions: Tensor, slots: Tensor, keys: Tensor, values: Tensor, num_kv_heads: int,
        *, interleaved: bool = False, scales: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        plain(self.half, qkv)
        plain_cache(self.half, keys, values, scales)
        plain(torch.float32, table)
        parts = qkv.view(len(qkv), -1, BLOCK_INPUTS)
        q, k, v = parts.split((parts.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)
        for part in (q, k):
            part.copy_(rotate_reference(part, table, positions, interleaved))
        KvCache(keys, values, scales=scales).store(k, v, slots)
        return qkv

    def head_norm(self, qkv: Tensor, q_norm: Tensor, k_norm: Tensor, num_kv_heads: int, eps: float) -> Tensor:
        plain(self.half, qkv)
        plain(torch.float32, q_norm, k_norm)
        return qkv.copy_(head_norm_reference(qkv, q_norm, k_norm, num_kv_heads, eps))

    # --- norms

    def add_norm(
        self, residual: Tensor, norm: Tensor, out: Tensor | None, eps: float, *, parts: Tensor | None = None, weights: Tensor | None = None,
        rounded: Any = None,
    ) -> None:  # fmt: skip
        plain(torch.float32, residual, norm)
        results = [*([] if out is None else [out]), *([] if rounded is None else [rounded.codes])]
        plain(self.half, *results)
        if parts is not None:
            assert parts.dtype in (torch.float32, self.half) and parts.stride(-1) == 1
            by_row = parts.float() if weights is not None else parts.float().transpose(0, 1)
            factors = torch.ones(by_row.shape[:2])
            if weights is not None:
                plain(torch.float32, weights)
                factors[:, : weights.shape[1]] = weights
            residual += (by_row * factors[..., None]).sum(1)
        for result in results:
            put(result, norm_reference(residual, norm, eps))

    def head_one(self, x: Tensor, norm: Tensor, weight: Tensor, out: Tensor, eps: float) -> Tensor:
        plain(torch.float32, x, norm, out)
        plain(torch.bfloat16, weight)
        return put(out, norm_reference(x, norm, eps) @ weight.float().T)
