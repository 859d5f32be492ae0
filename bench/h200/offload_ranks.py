"""Pipeline stages that each keep weights in host memory, two on one card: the same model as one rank with all weights on the device.

Run: PYTHONPATH=src:bench/h200 python bench/h200/offload_ranks.py [--model GLM-4.5-Air|Llama-3.1-405B]
Prints what each case differs by, and `ok` or `NOT ok` at the end. Rows of a random mixture whose experts are chosen otherwise are far off, so the
median counts.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from typing import Any, NamedTuple

import torch
from engine_speed import shape_of

from windlass.cli.bench.ranks import InlineRanks
from windlass.core.launch import Launch, RandomInit
from windlass.core.layout import Layout
from windlass.core.request import GREEDY
from windlass.runtime.engine.engine import Engine
from windlass.runtime.engine.load import load_model
from windlass.runtime.engine.protocol import Submit
from windlass.units import GB

BOUND = 0.05
"""Of the median difference of a log-probability."""
PROMPT_TOKENS, NEW_TOKENS = 200, 24


class Case(NamedTuple):
    layers: int
    caps: tuple[int, ...]
    """Of each rank, so that some of its weights lie in host memory."""


CASES = {"GLM-4.5-Air": Case(14, (8 * GB, 9 * GB)), "Llama-3.1-405B": Case(10, (14 * GB, 14 * GB))}


def answers(engine: Engine) -> tuple[list[float], list[int], float]:
    """Log-probabilities of a prompt and of what follows it, the tokens, and seconds of a decode step."""
    prompt = [(7 * place * place + 13) % 5000 for place in range(PROMPT_TOKENS)]
    engine.submit(Submit(1, prompt, GREEDY, NEW_TOKENS, logprobs=0, prompt_logprobs=0))
    scores: list[float] = []
    tokens: list[int] = []
    times: list[float] = []
    while engine.has_work:
        began = time.perf_counter()
        outputs = engine.step()
        times.append(time.perf_counter() - began)
        for output in outputs:
            scores += [entry.logprob for entry in output.prompt_logprobs or () if entry is not None]
            tokens += output.token_ids
    return scores, tokens, statistics.median(times[2:])


def run(config: dict[str, Any], name: str, layout: Layout, caps: tuple[int, ...]) -> tuple[list[float], list[int], float, str]:
    launch = Launch(
        model=name, device="cuda", random_weights=RandomInit(config=config, scheme="int4", group=128), context_tokens=512,
        max_sequences=4, layout=layout, gpu_memory=caps,
    )  # fmt: skip
    gc.collect()
    torch.cuda.empty_cache()  # the first rank is this process: weights of the case before would count as its own
    with InlineRanks(print, lambda _: None) as ranks:
        engine, info = load_model(launch) if launch.is_single else ranks.load(launch, lambda _done, _total: None)
        try:
            return *answers(engine), info.details.get("offload", "all on the device")
        finally:
            engine.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(CASES), action="append")
    is_ok = True
    for name in parser.parse_args().model or CASES:
        case = CASES[name]
        config, _ = shape_of(name, case.layers)
        whole, expected, seconds, line = run(config, name, Layout(), ())
        print(f"{name}, {case.layers} layers, one rank: {line}; {seconds * 1e3:.1f} ms a step", flush=True)
        for layout, caps in ((Layout(pp=2), ()), (Layout(pp=2), case.caps)):
            began = time.perf_counter()
            found, tokens, seconds, line = run(config, name, layout, caps or (40 * GB, 40 * GB))
            differs = [abs(a - b) for a, b in zip(whole, found, strict=True)]
            same = next((at for at, pair in enumerate(zip(expected, tokens, strict=True)) if pair[0] != pair[1]), len(tokens))
            good = statistics.median(differs) < BOUND and (bool(caps) == ("host memory" in line))
            is_ok &= good
            print(
                f"  {layout}, rank 0: {line}; log-probabilities differ by {statistics.median(differs):.4f} (median), {max(differs):.3f} (most); "
                f"{same} of {NEW_TOKENS} tokens alike; {seconds * 1e3:.1f} ms a step; {time.perf_counter() - began:.0f} s in all",
                flush=True,
            )
    print("ok" if is_ok else "NOT ok")
    return int(not is_ok)


if __name__ == "__main__":
    sys.exit(main())
