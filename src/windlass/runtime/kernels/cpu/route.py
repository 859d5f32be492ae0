"""Top-k routing in C++ (native/ops/route.cpp). Ties go to the first expert."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.core.model import Router, Scoring
from windlass.runtime.kernels.cpu.types import is_plain
from windlass.runtime.kernels.program import program

NUMBERS = {Scoring.SIGMOID: 0, Scoring.SOFTMAX: 1, Scoring.SOFTMAX_OF_TOP: 2}


def route(
    logits: Tensor, correction: Tensor | None, router: Router, num_active: int, first: int = 0
) -> tuple[Tensor, Tensor] | None:
    if not is_plain(logits, correction):
        return None
    rows, experts = logits.shape
    ids, weights = program.empty((rows, num_active), torch.int32), program.empty((rows, num_active))
    groups = [router.num_groups, router.num_chosen_groups]
    ints = [experts, logits.stride(0), num_active, NUMBERS[router.scoring], int(router.renormalize), *groups, first]
    program.emit("route", [ids, weights, logits, correction], ints, [router.scale], rows=rows)
    return ids, weights
