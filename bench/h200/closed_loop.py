"""Users who wait for an answer and ask again, through the Engine on one GPU, without HTTP: what a server could reach at most.

Random weights of a published shape; prompts that share nothing; greedy. Tokens/s are over all, from the first question to the last answer.
Run: PYTHONPATH=src python bench/h200/closed_loop.py --loads 1:1024:128,8:1024:128,32:1024:256,64:1024:256,128:1024:256,256:512:128
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass, field

import msgspec
import torch
from engine_speed import shape_of

from windlass.core.launch import Launch, RandomInit
from windlass.core.request import GREEDY
from windlass.runtime.engine.engine import Engine
from windlass.runtime.engine.load import build, make_engine
from windlass.runtime.engine.protocol import Submit
from windlass.runtime.nn.fused import decoder as fused


@dataclass
class Load:
    users: int
    prompt: int
    answer: int
    rounds: int = 3
    asked: int = 0
    done: int = 0
    asked_at: dict[int, float] = field(default_factory=dict)
    token_at: dict[int, float] = field(default_factory=dict)
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)


def ask(engine: Engine, load: Load, source: random.Random) -> None:
    load.asked += 1
    tokens = [source.randrange(engine.num_tokens) for _ in range(load.prompt)]
    load.asked_at[load.asked] = time.perf_counter()
    engine.submit(Submit(id=load.asked, token_ids=tokens, sampling=GREEDY, max_tokens=load.answer))


def run(engine: Engine, load: Load) -> str:
    source, total = random.Random(load.users), load.users * load.rounds
    for _ in range(load.users):
        ask(engine, load, source)
    tokens, begun = 0, time.perf_counter()
    while load.done < total:
        outputs, now = engine.step(), time.perf_counter()
        for output in outputs:
            if output.token_ids:
                last = load.token_at.get(output.id)
                (load.first if last is None else load.between).append(now - (load.asked_at[output.id] if last is None else last))
                load.token_at[output.id] = now
                tokens += len(output.token_ids)
            if output.finish is not None:
                load.done += 1
                if load.asked < total:
                    ask(engine, load, source)
    speed = tokens / (time.perf_counter() - begun)
    return (
        f"{load.users:4d} at once ({load.prompt} + {load.answer}): {speed:7.1f} tokens/s; "
        f"first token {at(load.first, 50):.0f} / {at(load.first, 99):.0f} ms, "
        f"between tokens {at(load.between, 50):.1f} / {at(load.between, 99):.1f} ms (median, 99th); {engine.stats().preemptions} preempted"
    )


def at(times: list[float], percent: float) -> float:
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="GLM-4.5-Air")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--loads", default="1:1024:128,8:1024:128,32:1024:256,64:1024:256,128:1024:256,256:512:128")
    parser.add_argument("--step-tokens", default="0", help="max_step_tokens to try; 0: the default")
    parser.add_argument("--dependent", default="0", help="runtime/nn/fused/decoder.py's DEPENDENT_ROWS to try; 0: the default")
    options = parser.parse_args()
    config, _ = shape_of(options.model, options.layers)
    begun = time.perf_counter()
    launch = Launch(model=options.model, device="cuda", random_weights=RandomInit(config=config, scheme="int4", group=128))
    built = build(launch, "cuda")
    print(f"{torch.cuda.get_device_name()}: weights after {time.perf_counter() - begun:.1f} s", flush=True)
    usual = fused.DEPENDENT_ROWS
    for step_tokens in map(int, options.step_tokens.split(",")):
        for dependent in map(int, options.dependent.split(",")):
            fused.DEPENDENT_ROWS = dependent or usual
            begun = time.perf_counter()
            engine = make_engine(msgspec.structs.replace(launch, max_step_tokens=step_tokens or None), built.decoder, "cuda")
            engine.warm_up()
            limits = engine.limits
            print(
                f"up to {limits.max_sequences} sequences, {limits.num_blocks * 16:,} tokens of cache, "
                f"steps of {limits.max_step_tokens}, dependent launch to {fused.DEPENDENT_ROWS} rows, {engine.runner.mode}; "
                f"warm after {time.perf_counter() - begun:.1f} s, "
                f"{torch.cuda.memory_allocated() / 2**30:.1f} GiB allocated, {torch.cuda.mem_get_info()[0] / 2**30:.1f} free",
                flush=True,
            )
            for load in options.loads.split(","):
                print("  " + run(engine, Load(*map(int, load.split(":")))), flush=True)
            engine.close()
            del engine
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
