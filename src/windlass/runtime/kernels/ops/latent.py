"""Builds the queries and keys of latent attention from their parts, and writes the keys to the KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.runtime.kernels.arguments import LatentArgs
from windlass.runtime.kernels.cpu import qkv as native_qkv
from windlass.runtime.kernels.ops.norm import rms
from windlass.runtime.kernels.ops.rotary import rotate
from windlass.runtime.kernels.program import program
from windlass.runtime.kernels.triton import available


def join_latent(args: LatentArgs) -> tuple[Tensor, Tensor]:
    """Queries [rows, heads, latent + rope] and keys [rows, 1, latent + rope], the latent first."""
    tensors = args.absorbed, args.q, args.kv, args.norm, args.table
    result = native_qkv.join_latent(args) if program.usable(*tensors) else None
    if result is None and (gpu := available.kernels(*tensors)):
        result = gpu.join_latent(args)
    return reference(args) if result is None else result


def reference(args: LatentArgs) -> tuple[Tensor, Tensor]:
    latent, kv = args.absorbed.shape[-1], args.kv[:, None]
    rotated_q = rotate(args.q[..., -2 * args.table.shape[-1] :], args.table, args.positions, args.interleaved)
    rotated_k = rotate(kv[..., latent:], args.table, args.positions, args.interleaved)
    queries = torch.cat((args.absorbed, rotated_q), dim=-1)
    keys = torch.cat((rms(kv[..., :latent], args.norm, args.eps), rotated_k), dim=-1)
    if args.cache is not None:
        assert args.slots is not None
        args.cache.store(keys, None, args.slots)
    return queries, keys
