"""Norms, rotation and storing of queries, keys and values in C++ (native/attention/qkv.cpp)."""

from __future__ import annotations

from torch import Tensor

from windlass.kernels.cpu.types import STORED, is_index, is_plain
from windlass.kernels.program import program
from windlass.kernels.step import Cache


def split_qkv(
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    table: Tensor | None,
    interleaved: bool,
    positions: Tensor,
    cache: Cache | None = None,
    slots: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """`qkv` is changed in place, and the results are views of it."""
    q_norm, k_norm = norms or (None, None)
    if not is_plain(qkv, q_norm, k_norm, table) or not is_index(positions, slots) or not _storable(cache):
        return None
    half = 0 if table is None else table.shape[-1]
    keys, values = (None, None) if cache is None else (cache.keys, cache.values)
    tensors = [qkv, q_norm, k_norm, table, positions, keys, values, slots]
    ints = [num_heads, num_kv_heads, head_dim, qkv.stride(0), half, int(interleaved), 0 if keys is None else STORED[keys.dtype]]
    program.emit("split_qkv", tensors, ints, [eps], rows=qkv.shape[0])
    heads = qkv.unflatten(1, (-1, head_dim))
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    return q, k, v


def join_latent(
    absorbed: Tensor,
    q: Tensor,
    kv: Tensor,
    *,
    norm: Tensor,
    eps: float,
    table: Tensor,
    interleaved: bool,
    positions: Tensor,
    cache: Cache | None = None,
    slots: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    rows, heads, latent = absorbed.shape
    if not is_plain(q, kv, norm, table) or not is_index(positions, slots) or not _storable(cache):
        return None
    if not is_plain(absorbed) or absorbed.stride(1) != latent:
        return None
    half = table.shape[-1]
    width = latent + 2 * half
    queries, keys = program.empty((rows, heads, width)), program.empty((rows, 1, width))
    store = None if cache is None else cache.keys
    tensors = [queries, keys, absorbed, q, kv, norm, table, positions, store, slots]
    strides = [q.stride(0), q.stride(1), kv.stride(0)]
    kind = 0 if store is None else STORED[store.dtype]
    ints = [heads, latent, half, *strides, int(interleaved), kind, absorbed.stride(0), q.shape[2] - 2 * half]
    program.emit("join_latent", tensors, ints, [eps], rows=rows)
    return queries, keys


def _storable(cache: Cache | None) -> bool:
    parts = () if cache is None else (cache.keys, cache.keys if cache.values is None else cache.values)
    return all(part.dtype in (*STORED,)[:2] and part.is_contiguous() for part in parts)
