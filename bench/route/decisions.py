"""What a decision, a fit and a router cost: `python bench/route/decisions.py [FOLDER of tables]`.

Without a folder, 14,000 made-up prompts of 57 sources and 20 to 400 words. One thread.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path
from random import Random

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from windlass.runtime.machine.memory import process_memory
from windlass.tasks.route.decide.policy import Candidate, Policy, Situation, decide
from windlass.tasks.route.decide.predict import PromptPredictor
from windlass.tasks.route.decide.router_file import decode_router, encode_router
from windlass.tasks.route.fit.fit import FitOptions, fit
from windlass.tasks.route.report.report import report_of
from windlass.tasks.route.tables.answers import Answer, read_paths
from windlass.tasks.route.tables.table import Table, make_table

NUM_DECISIONS = 5000


def made_up(count: int = 14_000) -> Table:
    random = Random(0)
    words = [f"w{random.randint(0, 10**6)}" for _ in range(20_000)]
    sources = [[random.choice(words) for _ in range(600)] for _ in range(57)]
    answers: list[Answer] = []
    for number in range(count):
        source = number % 57
        prompt = " ".join(
            random.choice(sources[source] if random.random() < 0.6 else words) for _ in range(random.randint(20, 120))
        )
        answers.append(
            Answer(prompt=prompt, model="small", score=float(random.random() < 0.4 + source / 100), group=str(source), cost=1)
        )
        answers.append(Answer(prompt=prompt, model="large", score=float(random.random() < 0.8), group=str(source), cost=10))
    return make_table(answers)


def main() -> None:
    table = make_table(read_paths([Path(sys.argv[1])])) if len(sys.argv) > 1 else made_up()
    start = process_memory(os.getpid()).anonymous_bytes / 2**20
    began, cpu = time.perf_counter(), time.process_time()
    fitted = fit(table, FitOptions())
    report_of(fitted)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory {peak:.0f} MiB, {start:.0f} MiB of it before the fit (interpreter, numpy, the table)")
    print(f"fit of {len(table):,} rows: {time.process_time() - cpu:.1f} s of CPU, {time.perf_counter() - began:.1f} s")
    raw = encode_router(fitted.router)
    prompts = list(table.prompts)
    del fitted
    before = process_memory(os.getpid()).anonymous_bytes
    predictor = PromptPredictor(decode_router(raw, "router"))
    print(f"file {len(raw) / 2**20:.1f} MiB; in memory {(process_memory(os.getpid()).anonymous_bytes - before) / 2**20:.1f} MiB")
    random = Random(1)
    some = [random.choice(prompts) for _ in range(NUM_DECISIONS)] + [prompts[0] * 200] * 50
    random.shuffle(some)
    times = [_timed(predictor, prompt) for prompt in some]
    p50, p99 = np.quantile(times, (0.5, 0.99))
    print(f"decision: p50 {1000 * p50:.3f} ms, p99 {1000 * p99:.3f} ms over {len(times):,} prompts (CPU time; 1 % are very long)")


def _timed(predictor: PromptPredictor, prompt: str) -> float:
    router = predictor.router
    began = time.process_time_ns()
    found = predictor.predict(prompt)
    candidates = tuple(
        Candidate(name=one.name, chance=each, cost=one.cost) for one, each in zip(router.models, found.chances, strict=True)
    )
    decide(
        Situation(candidates=candidates, best=router.best, tolerance=router.tolerance, policy=Policy(), is_unlike=found.is_unlike)
    )
    return (time.process_time_ns() - began) / 1e9


if __name__ == "__main__":
    main()
