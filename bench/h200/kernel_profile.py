"""One launch of a kernel after warmup, for a profiler: PYTHONPATH=src ncu -k run -s 2 -c 1 python bench/h200/kernel_profile.py one"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from windlass.runtime.kernels.cuda import driver, experts, layout, linear, route

HIDDEN, WIDTH, EXPERTS, ACTIVE, VOCABULARY = 4096, 1408, 128, 8, 151552
"""GLM-4.5-Air."""
EPS = 1e-5


def random_tiles(num_matrices: int, rows: int, inputs: int, *, paired: bool = False) -> layout.Tiles:
    return layout.random(num_matrices, rows, inputs, 128, inputs**-0.5, paired=paired)


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda")


def halves(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def profile_one() -> None:
    weight, out = random_tiles(1, VOCABULARY, HIDDEN), floats(VOCABULARY)
    h, gain = floats(HIDDEN), torch.ones(HIDDEN, device="cuda")
    for _ in range(3):
        linear.linear_few(h[None], weight, out[None], norm=gain, eps=EPS)


def profile_many(batch: int = 8) -> None:
    weight = random_tiles(EXPERTS + 1, 2 * WIDTH, HIDDEN, paired=True)
    x, act = halves(batch, HIDDEN), halves(batch * (ACTIVE + 1), WIDTH)
    chosen = route.route_many(floats(batch, EXPERTS), None, route.routes(batch, EXPERTS, ACTIVE, 1))
    for _ in range(3):
        experts.gate_up_many(x, weight, act, chosen)


def main() -> int:
    driver.DEPENDENT = False
    {"one": profile_one, "many": profile_many}[sys.argv[1]]()
    torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
