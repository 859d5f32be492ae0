"""A trace of 500 mixed requests for two models that do not fit together: swaps of first come, first served, and of ours.

`python bench/route/swaps.py` simulates it for several rates. `--live RATE --other FILE.gguf --router router.json` sends requests at that rate
to a real `windlass serve tiny-glm FILE.gguf --keep 1 --route router.json` and counts the swaps that it reports.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
import tomllib
from collections import Counter
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random
from typing import NamedTuple

import httpx

from windlass.tasks.route.decide.swaps import Waiting, simulate

HERE = Path(__file__).resolve().parent
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
            waits = [
                (max(one.max_wait for one in some), sum(one.mean_wait for one in some) / len(some)) for some in (first, ours)
            ]
            print(
                f"{rate:8.2f} {max_wait:8.0f} s  {swaps:5.0f} -> {fewer:4.0f} ({1 - fewer / swaps:.0%} fewer, at least {least:.0%})"
                f"  {waits[0][0]:7.1f} -> {waits[1][0]:6.1f} s  {waits[0][1]:6.1f} -> {waits[1][1]:5.1f} s"
            )


class Answered(NamedTuple):
    arrived: float
    model: str
    seconds: float
    status: int


def prompts(count: int, seed: int = 0) -> list[str]:
    """Six of ten are sums, for tiny-glm; four are questions of fact, for the other model."""
    from windlass.tasks.evaluate.run.items import prepare
    from windlass.tasks.evaluate.run.settings import Wanted
    from windlass.tasks.evaluate.tasks.catalog import builtin

    random = Random(seed)
    sums = [
        question.messages[-1]["content"]
        for question in prepare(builtin()["arithmetic"], Wanted(), True).questions
        if question.messages
    ]
    rows = [json.loads(line) for line in (HERE / "facts.jsonl").read_text().splitlines()]
    asked = tomllib.loads((HERE / "facts.toml").read_text())["prompt"]["chat"]
    facts = [asked.format(**row) for row in rows]
    return [random.choice(facts if random.random() < 0.4 else sums) for _ in range(count)]


async def live(rate: float, count: int, other: str, router: Path, port: int) -> None:
    """The models of a fitted router behind one `windlass serve`, with room for one of them."""
    command = [sys.executable, "-m", "windlass", "serve", "tiny-glm", other, "--keep", "1", "--route", str(router)]
    server = subprocess.Popen(
        [*command, "--port", str(port), "-q", "--no-page", "--max-waiting", "1000"], stderr=subprocess.DEVNULL
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
            await _ready(client)
            found = await _asked(client, rate, count)
            text = (await client.get("/metrics")).text
    finally:
        server.terminate()
        server.wait(60)
    _show(
        found, {line.split(" ")[0]: float(line.split(" ")[1]) for line in text.splitlines() if line.startswith("windlass_route")}
    )


async def _ready(client: httpx.AsyncClient) -> None:
    for _ in range(600):
        try:
            if (await client.get("/ready")).status_code == 200:
                return
        except httpx.TransportError:
            pass
        await asyncio.sleep(0.2)
    raise SystemExit("the server did not start")


async def _asked(client: httpx.AsyncClient, rate: float, count: int) -> list[Answered]:
    random, begun = Random(1), time.monotonic()
    times = list(accumulate(random.expovariate(rate) for _ in range(count)))

    async def one(at: float, prompt: str) -> Answered:
        await asyncio.sleep(max(begun + at - time.monotonic(), 0.0))
        began = time.monotonic()
        body = {"model": "auto", "messages": [{"role": "user", "content": prompt}], "max_tokens": 8, "temperature": 0}
        made = await client.post("/v1/chat/completions", json=body)
        return Answered(at, made.headers.get("windlass-route-model", "?"), time.monotonic() - began, made.status_code)

    return await asyncio.gather(*(one(at, prompt) for at, prompt in zip(times, prompts(count), strict=True)))


def _show(found: list[Answered], metrics: dict[str, float]) -> None:
    swaps, seconds = metrics["windlass_route_swaps_total"], metrics["windlass_route_load_seconds_total"]
    in_order = sorted(found, key=lambda one: one.arrived)
    fcfs = 1 + sum(a.model != b.model for a, b in pairwise(in_order))
    took = sorted(one.seconds for one in found)
    print(
        f"live: {sum(one.status == 200 for one in found)} of {len(found)} answered, {dict(Counter(one.model for one in found))}"
    )
    print(f"live: {swaps:.0f} swaps of {seconds / swaps:.1f} s; first come, first served {fcfs}: {1 - swaps / fcfs:.0%} fewer")
    print(
        f"live: longest wait for a model {metrics['windlass_route_longest_wait_seconds']:.1f} s; an answer took {took[len(took) // 2]:.1f} s"
        f" at the median, {took[-1]:.1f} s at most"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--live", type=float, metavar="RATE", help="requests a second")
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS)
    parser.add_argument("--other", default="SmolLM2-135M-Instruct.gguf")
    parser.add_argument("--router", type=Path, default=Path("router.json"), help="fitted by bench/route/specialists.py")
    parser.add_argument("--port", type=int, default=8193)
    options = parser.parse_args()
    if options.live:
        asyncio.run(live(options.live, options.requests, options.other, options.router, options.port))
    else:
        simulated()
