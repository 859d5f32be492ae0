"""How fast the engine's own work is, without a model: a step should take less than 0.3 ms. Run: python bench/speed_engine.py"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runtime" / "engine"))

from fake_decoder import make_engine

from windlass.core.request import GREEDY
from windlass.runtime.engine.client.background import size_of
from windlass.runtime.engine.protocol import Submit


def step_seconds() -> float:
    """One greedy sequence, a vocabulary of 49,152: everything but the decoder, in processor time of this thread."""
    logits = torch.randn(1, 49_152)
    engine = make_engine(lambda step, caches: logits, vocab_size=49_152, num_blocks=64, context_tokens=1024)
    engine.submit(Submit(1, [1] * 16, GREEDY, 1000))
    for _ in range(50):
        engine.step()
    best = math.inf
    for _ in range(10):
        begin = time.thread_time()
        for _ in range(50):
            engine.step()
        best = min(best, (time.thread_time() - begin) / 50)
    return best


def size_seconds() -> float:
    """To see that a list of a million lists is long."""
    nested: list[Any] = [[[1, 2]] * 1_000_000]
    begin = time.thread_time()
    size_of(nested)
    return time.thread_time() - begin


def measurements() -> dict[str, Callable[[], float]]:
    return {"engine: a step without its model": step_seconds, "engine: a long request sized up": size_seconds}


if __name__ == "__main__":
    for name, measure in measurements().items():
        print(f"{name:40} {measure():10.6f} s")
