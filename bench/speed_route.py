"""Seconds that a router's decision takes. `python bench/speed_route.py`; under a millisecond is promised, three for the slowest of 100."""

from __future__ import annotations

import os
import time
from random import Random

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from windlass.route.decide.predict import PromptPredictor
from windlass.route.fit.fit import FitOptions, fit
from windlass.route.tables.answers import Answer
from windlass.route.tables.table import make_table


def predictor() -> tuple[PromptPredictor, list[str]]:
    random = Random(0)
    words = [f"w{number}" for number in range(3000)]
    answers, prompts = list[Answer](), list[str]()
    for number in range(1000):
        prompts.append(" ".join(random.choices(words, k=random.randint(20, 300))))
        for model, cost in (("small", 1.0), ("large", 10.0)):
            score = float(random.random() < 0.7)
            answers.append(Answer(prompt=prompts[-1], model=model, score=score, group=str(number % 20), cost=cost))
    return PromptPredictor(fit(make_table(answers), FitOptions()).router), prompts


def main() -> None:
    made, prompts = predictor()
    times = sorted(_seconds(made, prompt) for prompt in [*prompts * 3, *[" ".join(prompts[:40])] * 30])
    for name, share in (("median", 0.5), ("99 %", 0.99)):
        print(f"decision, {name:8} {times[int(share * (len(times) - 1))] * 1e6:10,.0f} µs")


def _seconds(made: PromptPredictor, prompt: str) -> float:
    began = time.perf_counter()
    made.predict(prompt)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
