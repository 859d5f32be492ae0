"""Norms, rotations, routing and the rest against plain references, see __init__.py."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from triton_cases.compare import CASES, LARGE, TYPES, close, numbers
from windlass.core.model import Activation, Router, Scoring
from windlass.runtime.kernels.arguments import LatentArgs, QkvArgs
from windlass.runtime.kernels.ops import activate, heads, latent, norm, qkv, route
from windlass.runtime.kernels.step import BLOCK_TOKENS, KvCache, attention_cache, latent_cache
from windlass.runtime.kernels.triton import ops


def places(rows: int, device: str) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(rows)
    slots = torch.randperm(5 * BLOCK_TOKENS, generator=draw)[:rows].int().to(device)
    return {"positions": torch.randint(0, 50, (rows,), generator=draw).int().to(device), "slots": slots}


def same_cache(mine: KvCache | None, wanted: KvCache | None, dtype: torch.dtype) -> None:
    if mine is not None and wanted is not None:
        if wanted.scales is not None and mine.scales is not None:
            same_codes(mine, wanted)
            return
        close(mine.keys, wanted.keys, dtype)
        if wanted.values is not None:
            close(mine.values, wanted.values, dtype)


def same_codes(mine: KvCache, wanted: KvCache) -> None:
    """Equal bits, but for numbers that were rounded otherwise before they were coded."""
    for one, other in zip(mine.parts, wanted.parts, strict=True):
        differ = (one.view(torch.uint8) != other.view(torch.uint8)).double().mean()
        assert differ < 0.01, f"{differ:.1%} of the codes differ"
        assert other.view(torch.uint8).any()


def check_qkv(
    device: str,
    *,
    num_heads: int,
    kv_heads: int,
    dim: int,
    half: int,
    interleaved: bool,
    normed: bool,
    cached: bool,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
) -> None:
    rows, draw = 6, numbers(dim, device)
    x = draw(rows, (num_heads + 2 * kv_heads) * dim).to(dtype)
    how = {"norms": (draw(dim), draw(dim)) if normed else None, "eps": 1e-5, "table": draw(50, 2, half) if half else None}
    how |= {"interleaved": interleaved, **places(rows, device)}
    mine_cache, wanted_cache = (
        attention_cache(5, kv_heads, dim, cache_dtype or dtype, device) if cached else None for _ in range(2)
    )
    wanted = qkv.reference(QkvArgs(x.clone(), num_heads, kv_heads, dim, cache=wanted_cache, **how))
    mine = ops.split_qkv(QkvArgs(x, num_heads, kv_heads, dim, cache=mine_cache, **how))
    assert mine is not None
    for one, other in zip(mine, wanted, strict=True):
        close(one, other, dtype)
    same_cache(mine_cache, wanted_cache, dtype)


def check_latent(
    device: str, *, latent_dim: int, half: int, nope: int, interleaved: bool, cached: bool, dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
) -> None:  # fmt: skip
    rows, draw = 5, numbers(half, device)
    absorbed, q = draw(rows, 3, latent_dim).to(dtype), draw(rows, 3, nope + 2 * half).to(dtype)
    kv = draw(rows, latent_dim + 2 * half).to(dtype)
    how = {"norm": draw(latent_dim), "eps": 1e-6, "table": draw(50, 2, half), "interleaved": interleaved, **places(rows, device)}
    mine_cache, wanted_cache = (
        latent_cache(5, latent_dim, 2 * half, cache_dtype or dtype, device) if cached else None for _ in range(2)
    )
    wanted = latent.reference(LatentArgs(absorbed, q, kv, cache=wanted_cache, **how))
    mine = ops.join_latent(LatentArgs(absorbed, q, kv, cache=mine_cache, **how))
    assert mine is not None
    for one, other in zip(mine, wanted, strict=True):
        close(one, other, dtype)
    same_cache(mine_cache, wanted_cache, dtype)


_QKV = ((3, 1, 16, 8, False, True), (4, 2, 33, 4, True, True), (2, 2, 80, 16, False, False), (1, 1, 64, 0, False, True))
for _number, (_heads, _kv, _dim, _half, _inter, _normed) in enumerate((*_QKV, (32, 8, 128, 64, False, True))):
    for _type, _cached in (("fp32", True), ("bf16", True), ("fp16", False)):
        (LARGE if _heads == 32 else CASES)[f"qkv {_heads}/{_kv} of {_dim}, {_half} angles, {_type}"] = partial(
            check_qkv, num_heads=_heads, kv_heads=_kv, dim=_dim, half=_half, interleaved=_inter, normed=_normed, cached=_cached,
            dtype=TYPES[_type],
        )  # fmt: skip
for _latent, _half, _nope, _inter in ((16, 4, 8, True), (24, 8, 0, False), (512, 32, 128, True)):
    for _type, _cached in (("fp32", True), ("bf16", True), ("fp16", False)):
        (LARGE if _latent == 512 else CASES)[f"latent {_latent} + {2 * _half} {_type}"] = partial(
            check_latent, latent_dim=_latent, half=_half, nope=_nope, interleaved=_inter, cached=_cached, dtype=TYPES[_type]
        )


FP8 = torch.float8_e4m3fn
CASES["qkv into an fp8 cache"] = partial(
    check_qkv,
    num_heads=4,
    kv_heads=2,
    dim=80,
    half=16,
    interleaved=False,
    normed=True,
    cached=True,
    dtype=torch.bfloat16,
    cache_dtype=FP8,
)
CASES["latent into an fp8 cache"] = partial(
    check_latent, latent_dim=24, half=8, nope=8, interleaved=True, cached=True, dtype=torch.bfloat16, cache_dtype=FP8
)


def check_norm(device: str, *, kind: str, width: int, dtype: torch.dtype) -> None:
    draw = numbers(width, device)
    x, weight, bias = (draw(5, width) + 1).to(dtype), draw(width), draw(width) if kind == "layer" else None
    close(ops.norm(x, weight, bias, 1e-5, kind), norm.reference(x.float(), weight, bias, 1e-5, kind), dtype)
    part = torch.cat((x, x), dim=1)[:, width:]
    close(ops.norm(part, weight, bias, 1e-5, kind), norm.reference(x.float(), weight, bias, 1e-5, kind), dtype)


def check_activate(device: str, *, activation: Activation, gated: bool, clamp: float | None, dtype: torch.dtype) -> None:
    x = (numbers(3, device)(4, 2 * 50) * 3).to(dtype)
    close(ops.activate(x, activation, gated, clamp), activate.reference(x.float(), activation, gated, clamp), dtype)


for _number, (_kind, _width) in enumerate((("rms", 64), ("layer", 64), ("rms", 1000), ("layer", 7), ("rms", 5120))):
    _type = ("fp32", "bf16", "fp16")[_number % 3]
    CASES[f"norm {_kind} {_width} {_type}"] = partial(check_norm, kind=_kind, width=_width, dtype=TYPES[_type])
for _activation in Activation:
    for _gated, _clamp, _type in ((True, None, "fp32"), (True, 1.5, "bf16"), (False, None, "fp16")):
        CASES[f"activate {_activation.value} {'gated' if _gated else 'alone'} {_clamp} {_type}"] = partial(
            check_activate, activation=_activation, gated=_gated, clamp=_clamp, dtype=TYPES[_type]
        )


def check_route(device: str, *, num_experts: int, active: int, router: Router, dtype: torch.dtype) -> None:
    draw = numbers(num_experts, device)
    logits, correction = draw(9, num_experts).to(dtype), draw(num_experts) if router.correction_bias else None
    ids, weights = ops.route(logits, correction, router, active) or (None, None)
    wanted_ids, wanted = route.reference(logits, correction, router, active)
    assert ids is not None and torch.equal(ids, wanted_ids), "other experts were chosen"
    close(weights, wanted, torch.float32)


_ROUTERS = (
    (8, 2, Router(scoring=Scoring.SOFTMAX)),
    (130, 8, Router(scoring=Scoring.SOFTMAX, renormalize=False)),
    (32, 4, Router(scoring=Scoring.SOFTMAX_OF_TOP)),
    (64, 6, Router(scoring=Scoring.SIGMOID, correction_bias=True, scale=2.5)),
    (12, 4, Router(scoring=Scoring.SIGMOID, correction_bias=True, num_groups=4, num_chosen_groups=2)),
    (256, 8, Router(scoring=Scoring.SIGMOID, correction_bias=True, num_groups=8, num_chosen_groups=4, scale=2.5)),
    (4, 2, Router(scoring=Scoring.SIGMOID, num_groups=4, num_chosen_groups=2, renormalize=False)),
)
for _number, (_experts, _active, _router) in enumerate(_ROUTERS):
    CASES[f"route {_number}: {_experts} experts, {_router.scoring.value}"] = partial(
        check_route, num_experts=_experts, active=_active, router=_router, dtype=torch.float32
    )


def check_heads(device: str) -> None:
    draw = numbers(0, device)
    x, weight = draw(3, 4, 20)[..., :12], draw(4, 12, 7)
    close(ops.heads_matmul(x, weight), heads.reference(x, weight), torch.float32)
    rows = torch.tensor([2, 0, 2], dtype=torch.int32, device=device)
    assert torch.equal(ops.gather(x, rows), x[rows.long()])


CASES["heads and rows"] = check_heads
