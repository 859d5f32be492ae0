"""What the kernels ask about where they run."""

from __future__ import annotations

import os
from functools import cache

import torch


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; under the interpreter as many as an H200 has, so that the same kernels are tested."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
