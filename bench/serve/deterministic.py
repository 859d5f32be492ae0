"""Whether a request's tokens depend on what else runs, with and without `--deterministic`, and what the option costs.

Run: python bench/serve/deterministic.py MODEL answers [--questions FILE.jsonl[.gz]...] [--count 284] [--new 32] [--both]
     python bench/serve/deterministic.py MODEL cost [--rounds 5] [--cpu-time]

answers: each question alone, nothing cached and prompts in one piece; then all of them in another order, 61 at once as others end, of three
priorities, with a cache in which they share their beginning and that is too small for all (some are preempted), prompts in pieces, and
speculation by lookup. Every second question is sampled with a seed. cost: tokens/s of 1, 8 and 32 sequences with and without, turn by turn.

FILE has a JSON object a line, with `question`, `prompt` or `text`; without it, generated tasks are asked.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import time
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from windlass.core.constants import BLOCK_TOKENS
from windlass.core.launch import Launch
from windlass.core.request import GREEDY, Sampling
from windlass.model.bundled.tasks import MAKERS, held_out
from windlass.open.resolve import runnable_files
from windlass.runtime.engine.engine import Engine
from windlass.runtime.engine.load import build, load_model, make_engine
from windlass.runtime.engine.memory import block_bytes
from windlass.runtime.engine.protocol import Submit
from windlass.runtime.kernels.program import program
from windlass.runtime.weights.text.files import model_text

AT_ONCE = 61
DETERMINISTIC = {"deterministic": True}
PREAMBLE = "Question: A baker has 12 loaves and sells 5 of them in the morning. How many are left?\nAnswer: 12 - 5 = 7 loaves are left.\nQuestion: "
SAMPLED = (
    Sampling(temperature=0.8, top_p=0.95),
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=40, min_p=0.02),
    Sampling(temperature=0.9, repetition_penalty=1.1, presence_penalty=0.2),
)


def questions(files: list[Path], wanted: int) -> list[str]:
    if not files:
        return [problem.prompt for problem in held_out(-(-wanted // len(MAKERS)) + 3)][:wanted]
    found: list[str] = []
    for file in files:
        with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as lines:
            rows = [json.loads(line) for line in lines]
        found += [next(row[key] for key in ("question", "prompt", "text") if key in row) for row in rows]
    Random(0).shuffle(found)
    return found[:wanted]


def submit(number: int, tokens: list[int], new: int, salt: str = "") -> Submit:
    sampling = GREEDY if number % 2 == 0 else msgspec.structs.replace(SAMPLED[number // 2 % len(SAMPLED)], seed=number)
    return Submit(number, tokens, sampling, new, cache_salt=salt, priority=number // 2 % 3)


def run(engine: Engine, wanted: list[Submit], at_once: int) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {one.id: [] for one in wanted}
    left, running = list(reversed(wanted)), 0
    while left or running:
        while left and running < at_once:
            engine.submit(left.pop())
            running += 1
        for output in engine.step():
            found[output.id] += output.token_ids
            running -= output.finish is not None
    return found


def launched(options: argparse.Namespace, **more: Any) -> Launch:
    path = str(runnable_files(options.model, False))
    return Launch(model=path, device="cpu", kv=options.kv, exact=options.exact, context_tokens=options.context, **more)


def answers(options: argparse.Namespace, how: dict[str, Any]) -> None:
    tokenizer = model_text(runnable_files(options.model, False)).tokenizer
    most = min(options.context, options.prompt) - options.new
    texts = [tokenizer.encode(PREAMBLE + text)[:most] for text in questions(options.questions, options.count)]
    engine, _ = load_model(launched(options, max_sequences=64, max_step_tokens=1024, **how))
    block = block_bytes(engine.runner.decoder.spec, options.kv)  # type: ignore[attr-defined]
    began = time.perf_counter()
    alone = run(engine, [submit(number, text, options.new, f"{number}") for number, text in enumerate(texts)], 1)
    seconds = time.perf_counter() - began
    engine.close()
    order = list(range(len(texts)))
    Random(1).shuffle(order)
    room = sum(len(text) + options.new for text in texts) * AT_ONCE // len(texts) // 2
    kv_bytes = max(room, options.context) // BLOCK_TOKENS * block
    engine, _ = load_model(launched(options, max_sequences=64, max_step_tokens=200, kv_bytes=kv_bytes, speculate="ngram", **how))
    began = time.perf_counter()
    beside = run(engine, [submit(number, texts[number], options.new) for number in order], AT_ONCE)
    kinds = [[alone[number] == beside[number] for number in order if number % 2 == kind] for kind in (0, 1)]
    stats = engine.stats()
    print(
        f"{Path(options.model).name} {'exact ' if options.exact else ''}kv {options.kv} {'deterministic' if how else 'as usual'}: "
        f"{sum(map(sum, kinds))} of {len(order)} answers equal (greedy {sum(kinds[0])} of {len(kinds[0])}, sampled {sum(kinds[1])} of "
        f"{len(kinds[1])}); {engine.scheduler.num_preemptions} preemptions, {engine.scheduler.prefix_hit_tokens:,} tokens from the cache, "
        f"{stats.drafted:,} drafts; alone {seconds:.0f} s, beside others {time.perf_counter() - began:.0f} s",
        flush=True,
    )
    engine.close()


def cost(options: argparse.Namespace) -> None:
    """Both use the same weights: where those lie in memory makes more of a difference than their kernels do."""
    launch = launched(options, max_sequences=32)
    built = build(launch, "cpu")
    engines = {
        name: make_engine(msgspec.structs.replace(launch, **how), built.decoder, "cpu")
        for name, how in (("usual", {}), ("deterministic", DETERMINISTIC))
    }
    numbers, clock = count(), time.process_time if options.cpu_time else time.perf_counter
    for sequences in (1, 8, 32):
        speeds: dict[str, list[float]] = {name: [] for name in engines}
        for round_number in range(options.rounds + 1):
            for name, engine in sorted(engines.items(), reverse=bool(round_number % 2)):
                first = next(numbers) * 100
                prompts = [[(7 + 31 * (first + place) + 13 * token) % 1000 for token in range(32)] for place in range(sequences)]
                for place, prompt in enumerate(prompts):
                    engine.submit(Submit(first + place, prompt, GREEDY, options.new, cache_salt=f"{first}"))
                engine.step()
                began, made = clock(), 0
                while engine.has_work:
                    made += sum(len(output.token_ids) for output in engine.step())
                if round_number:
                    speeds[name].append(made / (clock() - began))
        usual, with_option = (statistics.median(speeds[name]) for name in ("usual", "deterministic"))
        ratios = [mine / theirs for mine, theirs in zip(speeds["deterministic"], speeds["usual"], strict=True)]
        print(
            f"{Path(options.model).name} {'exact ' if options.exact else ''}{sequences:3} sequences: {usual:8.1f} tokens/s, "
            f"{with_option:8.1f} deterministic, ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("what", choices=("answers", "cost"))
    parser.add_argument("--questions", type=Path, nargs="*", default=[])
    parser.add_argument("--count", type=int, default=284)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=2**31, help="most tokens of a prompt and its answer")
    parser.add_argument(
        "--cpu-time", action="store_true", help="seconds of processor time, of one thread: where others use the machine"
    )
    parser.add_argument("--kv", default="bf16")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--both", action="store_true", help="also without the option")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.cpu_time:
        program.set_threads(1)
    if options.what == "cost":
        cost(options)
        return
    for how in ({}, DETERMINISTIC) if options.both else (DETERMINISTIC,):
        answers(options, how)


if __name__ == "__main__":
    main()
