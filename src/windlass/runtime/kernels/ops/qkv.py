"""Splits the fused QKV projection: QK norms, rotary embedding, and the write to the KV cache."""

from __future__ import annotations

from torch import Tensor

from windlass.runtime.kernels.arguments import QkvArgs
from windlass.runtime.kernels.cpu import qkv as native_qkv
from windlass.runtime.kernels.ops.norm import rms
from windlass.runtime.kernels.ops.rotary import rotate
from windlass.runtime.kernels.program import program
from windlass.runtime.kernels.torch_compile import chain
from windlass.runtime.kernels.triton import available


def split_qkv(args: QkvArgs) -> tuple[Tensor, Tensor, Tensor]:
    """q [rows, heads, dim], k and v [rows, kv heads, dim]"""
    tensors = args.qkv, args.table, *(args.norms or ())
    result = native_qkv.split_qkv(args) if program.usable(*tensors) else None
    if result is None and (gpu := available.kernels(*tensors)):
        result = gpu.split_qkv(args)
    return _chained(args) if result is None else result


def reference(args: QkvArgs) -> tuple[Tensor, Tensor, Tensor]:
    heads = args.qkv.view(args.qkv.shape[0], -1, args.head_dim)
    q, k, v = heads.split((args.num_heads, args.num_kv_heads, args.num_kv_heads), dim=1)
    if args.norms is not None:
        q, k = rms(q, args.norms[0], args.eps), rms(k, args.norms[1], args.eps)
    if args.table is not None:
        q, k = (rotate(x, args.table, args.positions, args.interleaved) for x in (q, k))
    if args.cache is not None:
        assert args.slots is not None
        args.cache.store(k, v, args.slots)
    return q, k, v.contiguous()  # otherwise autograd would keep all of qkv for the sake of v


_chained = chain(reference)
