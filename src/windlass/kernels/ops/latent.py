"""Queries and keys of latent attention, put together from their parts and, where there is a cache, stored."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.kernels.cpu import qkv as native_qkv
from windlass.kernels.ops.norm import rms
from windlass.kernels.ops.rotary import rotate
from windlass.kernels.program import program
from windlass.kernels.step import Cache
from windlass.kernels.triton import available


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
) -> tuple[Tensor, Tensor]:
    """-> queries [rows, heads, latent + rope] and keys [rows, 1, latent + rope], the latent first.

    `absorbed` [rows, heads, latent]: what the queries ask of the latent. The last `rope` elements of each head of q
    [rows, heads, any + rope] and of kv [rows, latent + rope] turn by the angles of their row's position; the rest of kv, the
    latent, gets an RMS norm. `rope` is as wide as the table has angles for. With a `cache`, keys are written to its `slots` too.
    """
    how = {"norm": norm, "eps": eps, "table": table, "interleaved": interleaved}
    where = {"positions": positions, "cache": cache, "slots": slots}
    made = native_qkv.join_latent(absorbed, q, kv, **how, **where) if program.usable(absorbed, q, kv, norm, table) else None
    if made is None and (gpu := available.kernels(absorbed, q, kv, norm, table)):
        made = gpu.join_latent(absorbed, q, kv, **how, **where)
    return _reference(absorbed, q, kv, **how, **where) if made is None else made


def _reference(
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
) -> tuple[Tensor, Tensor]:
    latent = absorbed.shape[-1]
    turned_q = rotate(q[..., -2 * table.shape[-1] :], table, positions, interleaved)
    turned_k = rotate(kv[:, None, latent:], table, positions, interleaved)
    queries = torch.cat((absorbed, turned_q), dim=-1)
    keys = torch.cat((rms(kv[:, None, :latent], norm, eps), turned_k), dim=-1)
    if cache is not None:
        assert slots is not None
        cache.store(keys, None, slots)
    return queries, keys
