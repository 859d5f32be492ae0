"""Random rows of ggml's blocks, for tests: all bytes at random, but for the block's numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.core.ggml.forms import FORMS

NUMBERS_AT = {"q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "q5_1": (0, 2)}
"""Where the fp16 numbers are; elsewhere one is in front."""


def random_rows(kind: str, rows: int, blocks: int, seed: int = 0, size: float = 1.0) -> Tensor:
    """uint8 [rows, blocks * bytes]."""
    draw = torch.Generator().manual_seed(seed)
    made = torch.randint(0, 256, (rows, blocks, FORMS[kind].stored_bytes), generator=draw, dtype=torch.uint8)
    if kind == "mxfp4":
        made[..., 0] = torch.randint(110, 130, (rows, blocks), generator=draw, dtype=torch.uint8)
        return made.flatten(1)
    for at in NUMBERS_AT.get(kind, (0,)):
        made[..., at : at + 2] = (size * torch.randn(rows, blocks, 1, generator=draw)).half().view(torch.uint8)
    return made.flatten(1)
