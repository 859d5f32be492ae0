"""From one fused projection to queries, keys and values: normed, rotated and, where there is a cache, stored."""

from __future__ import annotations

from torch import Tensor

from windlass.kernels.cpu import qkv as native_qkv
from windlass.kernels.ops.norm import rms
from windlass.kernels.ops.rotary import rotate
from windlass.kernels.program import program
from windlass.kernels.step import Cache
from windlass.kernels.torch_compile import chain
from windlass.kernels.triton import available


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
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [rows, (heads + 2 kv heads) * head_dim] -> q [rows, heads, dim], k and v [rows, kv heads, dim].

    `norms`: weights of an RMS norm over each head of q and of k. `table`: see rotary_table; the first dimensions of q and k turn
    by the angles of their row's position. With a `cache`, k and v are written to its `slots` as well. `qkv` may be overwritten.
    """
    shape = (num_heads, num_kv_heads, head_dim)
    how = {"norms": norms, "eps": eps, "table": table, "interleaved": interleaved}
    where = {"positions": positions, "cache": cache, "slots": slots}
    made = native_qkv.split_qkv(qkv, *shape, **how, **where) if program.usable(qkv, table, *(norms or ())) else None
    if made is None and (gpu := available.kernels(qkv, table, *(norms or ()))):
        made = gpu.split_qkv(qkv, *shape, **how, **where)
    return _chained(qkv, *shape, **how, **where) if made is None else made


def _reference(
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
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.view(qkv.shape[0], -1, head_dim).split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if norms is not None:
        q, k = rms(q, norms[0], eps), rms(k, norms[1], eps)
    if table is not None:
        q, k = rotate(q, table, positions, interleaved), rotate(k, table, positions, interleaved)
    if cache is not None:
        assert slots is not None
        cache.store(k, v, slots)
    return q, k, v.contiguous()  # or all of qkv would be kept for the sake of v where it is to be differentiated


_chained = chain(_reference)
