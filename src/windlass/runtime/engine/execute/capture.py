"""Captures a CUDA graph. Like torch.cuda.graph, which gives all unused memory back to the driver before every capture, to allocate it anew
for the next: with dozens of graphs that is most of the time they take."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

LITTLE_BYTES = 2**30
"""Where less than this is free, unused memory is given back: a graph cannot take it from PyTorch's cache."""


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> Generator[None]:
    """`thread_local`: threads that load weights go on meanwhile."""
    torch.cuda.current_stream().synchronize()
    if torch.cuda.mem_get_info()[0] < LITTLE_BYTES:
        torch.cuda.empty_cache()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()
