"""Top-k routing: the experts of each token, and their weights."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.core.model import Router, Scoring
from windlass.runtime.kernels.constants import ROUTER_EPSILON
from windlass.runtime.kernels.cpu import route as native_route
from windlass.runtime.kernels.precision import widened
from windlass.runtime.kernels.program import program
from windlass.runtime.kernels.torch_compile import chain
from windlass.runtime.kernels.triton import available


def route(logits: Tensor, correction: Tensor | None, router: Router, num_active: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """logits [rows, experts] -> ids int32 and weights fp32, both [rows, num_active].

    `first`: the first expert on this rank, which gets id 0. Experts of other ranks get ids outside of the local range.
    """
    result = native_route.route(logits, correction, router, num_active, first) if program.usable(logits, correction) else None
    if result is not None:
        return result
    if gpu := available.kernels(logits, correction):
        result = gpu.route(logits, correction, router, num_active)
    ids, weights = _chained(logits, correction, router, num_active) if result is None else result
    return ids - first if first else ids, weights


def reference(logits: Tensor, correction: Tensor | None, router: Router, num_active: int) -> tuple[Tensor, Tensor]:
    logits = widened(logits)
    scores = _scores(logits, router.scoring)
    # The correction bias only affects the choice: it balances load and must not change the weights.
    preference = scores if correction is None else scores + correction
    ids = _in_best_groups(preference, router).topk(num_active, dim=-1).indices
    weights = scores.gather(1, ids)
    if router.scoring is Scoring.SOFTMAX_OF_TOP:
        weights = weights.softmax(-1)
    elif router.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + ROUTER_EPSILON)
    return ids.int(), weights * router.scale


_chained = chain(reference)


def _scores(logits: Tensor, scoring: Scoring) -> Tensor:
    match scoring:
        case Scoring.SIGMOID:
            return logits.sigmoid()
        case Scoring.SOFTMAX:
            return logits.softmax(-1)
        case Scoring.SOFTMAX_OF_TOP:
            return logits


def _in_best_groups(preference: Tensor, router: Router) -> Tensor:
    """Only experts of the groups with the largest sum of their two best scores may be chosen (arXiv 2412.19437, section 2.1.2)."""
    if router.num_groups == 1:
        return preference
    grouped = preference.unflatten(1, (router.num_groups, -1))
    best = grouped.topk(min(2, grouped.shape[2]), dim=-1).values.sum(-1).topk(router.num_chosen_groups, dim=-1).indices
    outside = torch.ones(grouped.shape[:2], dtype=torch.bool, device=preference.device).scatter(1, best, False)
    return grouped.masked_fill(outside[..., None], float("-inf")).flatten(1)
