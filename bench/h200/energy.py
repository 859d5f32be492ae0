"""Joules per token of decode, by NVML's energy counter, at several batch sizes through the Engine.

Run: PYTHONPATH=src:bench/h200 python bench/h200/energy.py [--model GLM-4.5-Air] [--batch 1,8,64] [--seconds 10]
"""

from __future__ import annotations

import argparse
import sys
import time

from engine_speed import shape_of

from windlass.core.launch import Launch, RandomInit
from windlass.core.request import GREEDY
from windlass.runtime.engine.engine import Engine
from windlass.runtime.engine.load import build, make_engine
from windlass.runtime.engine.protocol import Submit
from windlass.runtime.machine.energy import EnergyCounters


def idle_watts(counters: EnergyCounters, seconds: float = 4.0) -> float:
    before = counters.joules() or 0.0
    time.sleep(seconds)
    return ((counters.joules() or 0.0) - before) / seconds


def decode(engine: Engine, counters: EnergyCounters, batch: int, seconds: float) -> str:
    """All sequences decode from the first to the last reading of the counter."""
    for number in range(batch):
        ids = [(97 * number + 31 * place) % engine.num_tokens for place in range(16)]
        engine.submit(Submit(id=batch * 1000 + number, token_ids=ids, sampling=GREEDY, max_tokens=8_000))
    for _ in range(20 + batch):
        engine.step()
    tokens, before, began = 0, counters.joules() or 0.0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        tokens += sum(len(output.token_ids) for output in engine.step())
    taken, joules = time.perf_counter() - began, (counters.joules() or 0.0) - before
    for number in range(batch):
        engine.cancel(batch * 1000 + number)
    engine.step()
    return f"batch {batch:3d}: {tokens / taken:8.1f} tokens/s, {joules / taken:6.1f} W, {joules / tokens:8.4f} J/token"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="GLM-4.5-Air")
    parser.add_argument("--batch", default="1,8,64")
    parser.add_argument("--seconds", type=float, default=8.0)
    options = parser.parse_args()
    counters = EnergyCounters()
    if counters.source != "nvml":
        sys.exit(f"energy is counted by {counters.source} here; the figures are NVML's alone")
    print(f"counters: {counters.source}; idle before: {idle_watts(counters):.1f} W", flush=True)
    config, _ = shape_of(options.model)
    launch = Launch(model=options.model, device="cuda", random_weights=RandomInit(config=config, scheme="int4", group=128))
    engine = make_engine(launch, build(launch, "cuda").decoder, "cuda")
    engine.warm_up()
    print(f"idle with weights loaded: {idle_watts(counters):.1f} W", flush=True)
    for batch in map(int, options.batch.split(",")):
        print(decode(engine, counters, batch, options.seconds), flush=True)
    engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
