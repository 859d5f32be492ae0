"""One launch of a kernel after warm-up, for a profiler: PYTHONPATH=src ncu -k run -s 2 -c 1 python bench/h200_profile.py one"""

from __future__ import annotations

import sys

import torch
from h200_decode import ACTIVE, EPS, EXPERTS, HIDDEN, VOCABULARY, WIDTH, floats, halves, random_tiles

from windlass.kernels.cuda import driver, experts, linear, route


def main() -> int:
    driver.DEPENDENT = False
    what = sys.argv[1]
    if what == "one":
        weight, h, gain, out = (
            random_tiles(1, VOCABULARY, HIDDEN),
            floats(HIDDEN),
            torch.ones(HIDDEN, device="cuda"),
            floats(VOCABULARY),
        )
        for _ in range(3):
            linear.linear_one(h, weight, out, norm=gain, eps=EPS)
    if what == "many":
        batch = 8
        weight, x, act = (
            random_tiles(EXPERTS + 1, 2 * WIDTH, HIDDEN, paired=True),
            halves(batch, HIDDEN),
            halves(batch * 9, WIDTH),
        )
        chosen = route.route_many(floats(batch, EXPERTS), None, route.routes(batch, EXPERTS, ACTIVE, 1))
        for _ in range(3):
            experts.gate_up_many(x, weight, act, chosen)
    torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
