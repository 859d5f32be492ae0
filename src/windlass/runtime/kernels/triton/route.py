"""Top-k routing: a program per row. Ties go to the first expert."""

# ruff: noqa: N803, N806 (compile-time constants are in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.core.model import Router
from windlass.runtime.kernels.constants import ROUTER_EPSILON
from windlass.runtime.kernels.triton.tiles.types import is_float

EPSILON = tl.constexpr(ROUTER_EPSILON)


@triton.jit
def _route(
    ids, weights, logits, correction, scale, logits_stride,
    EXPERTS: tl.constexpr, GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, ACTIVE: tl.constexpr, SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr, GROUP_BLOCK: tl.constexpr, SIZE_BLOCK: tl.constexpr, ACTIVE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Scores are a tile [groups, experts of a group], both padded to powers of two."""
    SIZE: tl.constexpr = EXPERTS // GROUPS
    NOTHING: tl.constexpr = float("-inf")
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, GROUP_BLOCK)
    sizes = tl.arange(0, SIZE_BLOCK)
    expert = groups[:, None] * SIZE + sizes[None, :]
    real = (groups < GROUPS)[:, None] & (sizes < SIZE)[None, :]
    scores = tl.load(logits + row * logits_stride + expert, mask=real, other=NOTHING).to(tl.float32)
    if SCORING == "sigmoid":
        scores = tl.sigmoid(scores)
    elif SCORING == "softmax":
        scores = tl.exp(scores - tl.max(tl.max(scores, 1), 0))
        scores = scores / tl.sum(tl.sum(scores, 1), 0)
    preference = scores
    if correction is not None:
        preference += tl.load(correction + expert, mask=real, other=0).to(tl.float32)
    preference = tl.where(real, preference, NOTHING)
    if GROUPS > 1:
        best = tl.max(preference, 1)
        if SIZE > 1:
            found = tl.argmax(preference, 1)
            best += tl.max(tl.where(sizes[None, :] == found[:, None], NOTHING, preference), 1)
        best = tl.where(groups < GROUPS, best, NOTHING)
        allowed = groups < 0
        for _ in range(CHOSEN_GROUPS):
            chosen = groups == tl.argmax(best, 0)
            allowed = allowed | chosen
            best = tl.where(chosen, NOTHING, best)
        preference = tl.where(allowed[:, None], preference, NOTHING)

    flat = tl.reshape(preference, (GROUP_BLOCK * SIZE_BLOCK,))
    flat_scores = tl.reshape(scores, (GROUP_BLOCK * SIZE_BLOCK,))
    place = tl.arange(0, GROUP_BLOCK * SIZE_BLOCK)
    choice = tl.arange(0, ACTIVE_BLOCK)
    picked = tl.zeros((ACTIVE_BLOCK,), tl.int32)
    shares = tl.full((ACTIVE_BLOCK,), NOTHING, tl.float32)
    for number in range(ACTIVE):
        where = tl.argmax(flat, 0)
        score = tl.sum(tl.where(place == where, flat_scores, 0.0), 0)
        picked = tl.where(choice == number, where // SIZE_BLOCK * SIZE + where % SIZE_BLOCK, picked)
        shares = tl.where(choice == number, score, shares)
        flat = tl.where(place == where, NOTHING, flat)
    if SCORING == "softmax_of_top":
        shares = tl.exp(shares - tl.max(shares, 0))
        shares = shares / tl.sum(shares, 0)
    elif RENORMALIZE:
        shares = shares / (tl.sum(tl.where(choice < ACTIVE, shares, 0.0), 0) + EPSILON)
    tl.store(ids + row * ACTIVE + choice, picked, mask=choice < ACTIVE)
    tl.store(weights + row * ACTIVE + choice, shares * scale, mask=choice < ACTIVE)


def route(logits: Tensor, correction: Tensor | None, router: Router, num_active: int) -> tuple[Tensor, Tensor] | None:
    if logits.dim() != 2 or logits.stride(1) != 1 or not is_float(logits, correction):
        return None
    rows, num_experts = logits.shape
    ids = torch.empty((rows, num_active), dtype=torch.int32, device=logits.device)
    weights = torch.empty((rows, num_active), dtype=torch.float32, device=logits.device)
    if rows:
        _route[(rows,)](
            ids, weights, logits, correction, float(router.scale), logits.stride(0),
            EXPERTS=num_experts, GROUPS=router.num_groups, CHOSEN_GROUPS=router.num_chosen_groups, ACTIVE=num_active,
            SCORING=router.scoring.value, RENORMALIZE=router.renormalize, GROUP_BLOCK=triton.next_power_of_2(router.num_groups),
            SIZE_BLOCK=triton.next_power_of_2(num_experts // router.num_groups), ACTIVE_BLOCK=triton.next_power_of_2(num_active),
            num_warps=1,
        )  # fmt: skip
    return ids, weights
