"""A router's decision: under a millisecond is promised (bench/route/decisions.py has the slowest of a hundred)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from random import Random

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from windlass.tasks.route.decide.predict import PromptPredictor
from windlass.tasks.route.fit.fit import FitOptions, fit
from windlass.tasks.route.tables.answers import Answer
from windlass.tasks.route.tables.table import make_table


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


def measurements() -> dict[str, Callable[[], float]]:
    return {"a router's decision": _median}


def _median() -> float:
    made, prompts = predictor()
    times = sorted(_seconds(made, prompt) for prompt in prompts)
    return times[len(times) // 2]


def _seconds(made: PromptPredictor, prompt: str) -> float:
    began = time.process_time()
    made.predict(prompt)
    return time.process_time() - began
