"""Every operation under the name that runtime/kernels/ops uses. Imports triton."""

from windlass.runtime.kernels.triton.activate import activate
from windlass.runtime.kernels.triton.attention import attention
from windlass.runtime.kernels.triton.embed import embed
from windlass.runtime.kernels.triton.experts import experts
from windlass.runtime.kernels.triton.heads import gather, heads_matmul
from windlass.runtime.kernels.triton.latent import join_latent
from windlass.runtime.kernels.triton.linear import linear
from windlass.runtime.kernels.triton.norm import norm
from windlass.runtime.kernels.triton.qkv import split_qkv
from windlass.runtime.kernels.triton.route import route

__all__ = [
    "activate",
    "attention",
    "embed",
    "experts",
    "gather",
    "heads_matmul",
    "join_latent",
    "linear",
    "norm",
    "route",
    "split_qkv",
]
