"""Two processes with one thread each against one process with two: decoding the 1.10B shape with random int4 weights.

Both are loaded at once and take turns, a few steps each, because other programs on the machine come and go; what counts is the ratio.

    python bench/split/rank_speed.py [--batch 1] [--rounds 10] [--steps 32] [--context 256] [--tp 2]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

SHAPE = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32,
    "num_key_value_heads": 4, "intermediate_size": 5632, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def main() -> None:
    asked = _arguments()
    if asked.role:
        _serve(asked)
        return
    cores = os.cpu_count() or 1
    runs = {"alone": _start(asked, "alone", cores), "split": _start(asked, "split", cores)}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
    for number in range(asked.rounds):
        for name in sorted(runs, reverse=bool(number % 2)):
            found[name].append(_ask(runs[name]))
    for process in runs.values():
        process.stdin.close()
        process.wait()
    _print(asked, found)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("batch", 1), ("rounds", 10), ("steps", 32), ("context", 256), ("tp", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--role", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


# --- one engine


def _start(asked: argparse.Namespace, role: str, cores: int) -> subprocess.Popen[str]:
    given = [part for name in ("batch", "steps", "context", "tp") for part in (f"--{name}", str(getattr(asked, name)))]
    env = {**os.environ, "WINDLASS_THREADS": str(cores), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--role", role, *given]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None and process.stdout.readline() == "ready\n", f"{role} did not start"
    return process


def _ask(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def _serve(asked: argparse.Namespace) -> None:
    from windlass.cli.bench.ranks import InlineRanks
    from windlass.core.launch import Launch, RandomInit
    from windlass.core.layout import Layout
    from windlass.runtime.engine.load import load_model

    layout = Layout(tp=asked.tp) if asked.role == "split" else Layout()
    random = RandomInit(config=SHAPE, scheme="int4", group=32)
    longest = asked.context + 2 * asked.steps
    launch = Launch(
        model="1.10B", device="cpu", context_tokens=longest, random_weights=random, layout=layout, max_sequences=asked.batch
    )
    ranks = InlineRanks(lambda _: None, lambda _: None)
    engine, _ = load_model(launch) if launch.is_single else ranks.load(launch, lambda _done, _total: None)
    decode(engine, asked.batch, asked.context, 4)
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(decode(engine, asked.batch, asked.context, asked.steps)), flush=True)
    engine.close()
    ranks.__exit__()


def decode(engine: Any, batch: int, context: int, steps: int, begin: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Prompts that are the same every time, so that after the first they are in the cache; `begin`; then so many steps, timed."""
    from windlass.core.request import GREEDY
    from windlass.runtime.engine.protocol import Submit

    prompts = [[(7 * at + 13 * number) % 32000 for at in range(context)] for number in range(batch)]
    for number, prompt in enumerate(prompts):
        engine.submit(Submit(number, prompt, GREEDY, steps + 1))
    begun: set[int] = set()
    while len(begun) < batch:
        begun |= {output.id for output in engine.step()}
    begin()
    group = engine.runner.decoder.shard.groups.tp
    before, began, tokens = group.counts(), time.perf_counter(), 0
    while engine.has_work:
        tokens += sum(len(output.token_ids) for output in engine.step())
    seconds = time.perf_counter() - began
    counts = {name: _difference(count, before.get(name)) for name, count in group.counts().items()}
    return {"seconds": seconds, "tokens": tokens, "steps": steps, "counts": counts}


def _difference(now: Any, before: Any) -> list[float]:
    return [a - b for a, b in zip(now, before or (0, 0, 0, 0), strict=True)]


# --- what is said of it


def _print(asked: argparse.Namespace, found: dict[str, list[dict[str, Any]]]) -> None:
    speeds = {name: [one["tokens"] / one["seconds"] for one in rounds] for name, rounds in found.items()}
    ratios = [split / alone for split, alone in zip(speeds["split"], speeds["alone"], strict=True)]
    for name, label in (("alone", "one process"), ("split", f"{asked.tp} processes")):
        print(f"{label:12s} {statistics.median(speeds[name]):7.2f} tokens/s (best {max(speeds[name]):.2f})")
    best = max(speeds["split"]) / max(speeds["alone"])
    print(
        f"ratio        {statistics.median(ratios):7.3f} (of rounds {min(ratios):.3f} to {max(ratios):.3f}; best of both {best:.3f})"
    )
    steps = sum(one["steps"] for one in found["split"])
    step_seconds = sum(one["seconds"] for one in found["split"]) / steps
    print(f"a step       {step_seconds * 1e3:7.2f} ms, of which rank 0 spends")
    for name in found["split"][0]["counts"]:
        calls, sent, received, seconds = (sum(one["counts"][name][i] for one in found["split"]) for i in range(4))
        print(
            f"  {name:12s} {seconds / steps * 1e3:7.3f} ms in {calls / steps:.0f} calls ({seconds / calls * 1e6:.1f} us each),"
            f" {sent / steps:,.0f} bytes sent, {received / steps:,.0f} received"
        )


if __name__ == "__main__":
    main()
