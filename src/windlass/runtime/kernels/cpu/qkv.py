"""QK norms, rotary embedding and KV cache writes in C++ (native/attention/qkv.cpp)."""

from __future__ import annotations

from torch import Tensor

from windlass.runtime.kernels.arguments import LatentArgs, QkvArgs
from windlass.runtime.kernels.cpu.types import CACHED, is_index, is_plain
from windlass.runtime.kernels.program import program
from windlass.runtime.kernels.step import KvCache


def split_qkv(args: QkvArgs) -> tuple[Tensor, Tensor, Tensor] | None:
    """`qkv` is changed in place, and the results are views of it."""
    qkv, table, cache, num_heads, num_kv_heads = args.qkv, args.table, args.cache, args.num_heads, args.num_kv_heads
    q_norm, k_norm = args.norms or (None, None)
    if not is_plain(qkv, q_norm, k_norm, table) or not is_index(args.positions, args.slots) or not _storable(cache):
        return None
    half = 0 if table is None else table.shape[-1]
    keys, values, scales = (None, None, None) if cache is None else (cache.keys, cache.values, cache.scales)
    tensors = [qkv, q_norm, k_norm, table, args.positions, keys, values, args.slots, scales]
    ints = [
        num_heads,
        num_kv_heads,
        args.head_dim,
        qkv.stride(0),
        half,
        int(args.interleaved),
        0 if keys is None else CACHED[keys.dtype],
    ]
    program.emit("split_qkv", tensors, ints, [args.eps], rows=qkv.shape[0])
    heads = qkv.unflatten(1, (-1, args.head_dim))
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    return q, k, v


def join_latent(args: LatentArgs) -> tuple[Tensor, Tensor] | None:
    absorbed, q, kv, norm, table, cache = args.absorbed, args.q, args.kv, args.norm, args.table, args.cache
    rows, heads, latent = absorbed.shape
    if not is_plain(q, kv, norm, table) or not is_index(args.positions, args.slots) or not _storable(cache):
        return None
    if not is_plain(absorbed) or absorbed.stride(1) != latent:
        return None
    half = table.shape[-1]
    width = latent + 2 * half
    queries, keys = program.empty((rows, heads, width)), program.empty((rows, 1, width))
    store, scales = (None, None) if cache is None else (cache.keys, cache.scales)
    tensors = [queries, keys, absorbed, q, kv, norm, table, args.positions, store, args.slots, scales]
    strides = [q.stride(0), q.stride(1), kv.stride(0)]
    kind = 0 if store is None else CACHED[store.dtype]
    ints = [heads, latent, half, *strides, int(args.interleaved), kind, absorbed.stride(0), q.shape[2] - 2 * half]
    program.emit("join_latent", tensors, ints, [args.eps], rows=rows)
    return queries, keys


def _storable(cache: KvCache | None) -> bool:
    if cache is None:
        return True
    types = {part.dtype for part in (cache.keys, cache.values) if part is not None}
    return types <= CACHED.keys() and all(part.is_contiguous() for part in cache.parts)
