"""A trace of 500 mixed requests for two models that do not fit together: swaps of first come, first served, and of ours.

`python bench/route/swaps.py` simulates it for several loads; `--live SECONDS` also runs it through the router's gate with two real models
(tiny-glm, and the file named with `--other`), requests arriving over SECONDS.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from itertools import pairwise
from random import Random

from windlass.route.decide.swaps import Waiting, simulate

NUM_REQUESTS = 500


def trace(seconds: float, seed: int = 0) -> list[Waiting]:
    """Poisson arrivals; four of ten for the large model."""
    random, now, made = Random(seed), 0.0, list[Waiting]()
    for number in range(NUM_REQUESTS):
        now += random.expovariate(NUM_REQUESTS / seconds)
        made.append(Waiting(number=number, model="large" if random.random() < 0.4 else "small", arrived=now))
    return made


def simulated() -> None:
    runs, loads = {"small": 0.05, "large": 0.2}, {"small": 2.0, "large": 4.0}
    print("arrivals/s  max wait   swaps fcfs -> ours        longest wait      mean wait   (means of 10 traces; longest of all)")
    for rate in (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0):
        for max_wait in (10.0, 60.0):
            traces = [trace(NUM_REQUESTS / rate, seed) for seed in range(10)]
            first = [simulate(one, runs, loads, None) for one in traces]
            ours = [simulate(one, runs, loads, max_wait) for one in traces]
            swaps, fewer = (sum(one.num_swaps for one in some) / len(some) for some in (first, ours))
            least = min(1 - b.num_swaps / a.num_swaps for a, b in zip(first, ours, strict=True))
            waits = [(max(one.max_wait for one in some), sum(one.mean_wait for one in some) / len(some)) for some in (first, ours)]
            print(
                f"{rate:8.2f} {max_wait:8.0f} s  {swaps:5.0f} -> {fewer:4.0f} ({1 - fewer / swaps:.0%} fewer, at least {least:.0%})"
                f"  {waits[0][0]:7.1f} -> {waits[1][0]:6.1f} s  {waits[0][1]:6.1f} -> {waits[1][1]:5.1f} s"
            )


async def live(seconds: float, other: str) -> None:
    from windlass.core.client import Client
    from windlass.core.launch import Launch
    from windlass.core.request import GREEDY, Request
    from windlass.open.client import open_client
    from windlass.open.resolve import model_files
    from windlass.route.operate.gate import GatedClient, SwapGate

    def opener(name: str):  # type: ignore[no-untyped-def]
        async def opened() -> Client:
            client = open_client(
                Launch(model=str(model_files(name, shown=False)), device="cpu", context_tokens=512, max_sequences=8)
            )
            await client.info()
            return client

        return opened

    gate = SwapGate({"small": opener("tiny-glm"), "large": opener(other)}, max_wait_seconds=30.0)
    clients = {name: GatedClient(gate, name) for name in ("small", "large")}
    waits: list[float] = []
    begun = time.monotonic()

    async def one(waiting: Waiting) -> None:
        await asyncio.sleep(max(begun + waiting.arrived - time.monotonic(), 0.0))
        arrived = time.monotonic()
        request = Request(messages=({"role": "user", "content": f"Sort {waiting.number}, 4, 7."},), sampling=GREEDY, max_tokens=8)
        first = True
        async for _ in clients[waiting.model].generate(request):
            if first:
                waits.append(time.monotonic() - arrived)
                first = False

    arrivals = trace(seconds)
    await asyncio.gather(*(one(waiting) for waiting in arrivals))
    swaps, loading = gate.num_swaps, gate.load_seconds
    await gate.close()
    each = loading / max(swaps, 1)
    took = time.monotonic() - begun
    fcfs = 1 + sum(a.model != b.model for a, b in pairwise(arrivals))
    print(f"live: {len(waits)} answered in {took:.0f} s, {swaps} swaps of {each:.1f} s (first come, first served: {fcfs})")
    print(f"live: longest wait for the first token {max(waits):.1f} s, median {sorted(waits)[len(waits) // 2]:.1f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--live", type=float)
    parser.add_argument("--other", default="SmolLM2-135M-Instruct.gguf")
    options = parser.parse_args()
    simulated()
    if options.live:
        asyncio.run(live(options.live, options.other))
