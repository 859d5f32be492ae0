"""Every operation under the name that kernels/ops uses. Imports triton."""

from windlass.kernels.triton.activate import activate
from windlass.kernels.triton.attention import attention
from windlass.kernels.triton.embed import embed
from windlass.kernels.triton.experts import experts
from windlass.kernels.triton.heads import gather, heads_matmul
from windlass.kernels.triton.latent import join_latent
from windlass.kernels.triton.linear import linear
from windlass.kernels.triton.norm import norm
from windlass.kernels.triton.qkv import split_qkv
from windlass.kernels.triton.route import route

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
