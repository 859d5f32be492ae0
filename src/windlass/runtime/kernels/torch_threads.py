"""PyTorch's own threads beside those of the CPU kernels."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread(device: str) -> Generator[None]:
    """On a CPU the kernels' threads keep spinning: PyTorch's own would compete with them."""
    if device != "cpu":
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
