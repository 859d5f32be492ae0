"""A table whose truth is known, a router fitted to it, and models that answer, fail and hesitate as told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from windlass.core.client import Unavailable
from windlass.core.request import GREEDY, Delta, Info, Request, ScoreRequest, Scores, TokenLogprob, Usage
from windlass.errors import Error
from windlass.tasks.route.decide.router_file import RouterFile
from windlass.tasks.route.features.text import text_of
from windlass.tasks.route.fit.fit import FitOptions, Fitted, fit
from windlass.tasks.route.operate.arm import Arm
from windlass.tasks.route.operate.client import RouterClient
from windlass.tasks.route.operate.log import DecisionLog
from windlass.tasks.route.operate.settings import ModelSettings, RouteSettings
from windlass.tasks.route.tables.answers import Answer
from windlass.tasks.route.tables.table import Table, make_table

WORDS = "red blue green small large old new round flat cold warm quick slow".split()


def answers(count: int = 240, seed: int = 0) -> list[Answer]:
    """Small is right at sums and wrong at names; large is right at most of both and costs ten times as much."""
    random, made = Random(seed), list[Answer]()
    for number in range(count):
        kind = random.choice(("sum", "name"))
        prompt = prompt_of(kind, random, number)
        right = {"small": 0.92 if kind == "sum" else 0.25, "large": 0.9}
        for model, chance in right.items():
            score = float(random.random() < chance)
            cost = 1.0 if model == "small" else 10.0
            made.append(Answer(prompt=prompt, model=model, score=score, group=kind, cost=cost, seconds=cost / 10, joules=cost))
    return made


def prompt_of(kind: str, random: Random, number: int) -> str:
    if kind == "sum":
        return f"What is {random.randint(1, 99)} + {random.randint(1, 99)} for case {number % 7}?"
    return f"Name the {random.choice(WORDS)} {random.choice(WORDS)} thing that people call {random.choice(WORDS)}."


SUM, NAME = "What is 17 + 25 for case 3?", "Name the red round thing that people call old."


@cache
def table() -> Table:
    return make_table(answers())


@cache
def fitted() -> Fitted:
    return fit(table(), FitOptions(floor=0.9))


def router_file() -> RouterFile:
    return fitted().router


class Model:
    """Answers `NAME says PROMPT`. `fails`: an error for the request of that number (from 1), or None."""

    def __init__(
        self,
        name: str,
        fails: Callable[[int], Error | None] = lambda number: None,
        fails_after: int = 0,
        logprob: float = -0.01,
        answer: str = "",
        hesitates: Callable[[int], bool] = lambda number: False,
    ) -> None:
        self.name, self._fails, self._fails_after, self._logprob = name, fails, fails_after, logprob
        self._answer, self._hesitates = answer, hesitates
        self.requests: list[Request] = []
        self.closed = 0

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        self.requests.append(request)
        number = len(self.requests)
        error = self._fails(number)
        words = (self._answer or f"{self.name} says {text_of(request)}").split(" ")
        if self._hesitates(number):
            await asyncio.Event().wait()
        for place, word in enumerate(words):
            if error is not None and place == self._fails_after:
                raise error
            entries = (TokenLogprob(token_id=place, logprob=self._logprob),) if request.logprobs is not None else ()
            yield Delta(content=word if place == 0 else f" {word}", token_ids=(place,), logprobs=entries)
        yield Delta(finish_reason="stop", usage=Usage(prompt_tokens=10, completion_tokens=len(words)))

    async def score(self, request: ScoreRequest) -> Scores:
        return Scores(token_ids=(1,), logprobs=(None,))

    async def info(self) -> Info:
        if self._fails(0) is not None:
            raise Unavailable("gone")
        return Info(model=self.name, context_tokens=1000, max_sequences=4)

    async def close(self) -> None:
        self.closed += 1


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def routed(small: Model, large: Model, clock: Clock | None = None, log: Path | None = None, **settings: Any) -> RouterClient:
    models = tuple(ModelSettings(name=name, at="http://localhost:1") for name in ("small", "large"))
    chosen = RouteSettings(router="router.json", models=models, **settings)
    router, clock = router_file(), clock or Clock()
    known = {model.name: model for model in router.models}
    clients = {"small": small, "large": large}
    arms = {one.name: Arm(one, known[one.name], clients[one.name], chosen.breaker, clock) for one in models}
    return RouterClient(router, chosen, arms, DecisionLog(log), clock=clock)


def chat(text: str, **fields: Any) -> Request:
    return Request(messages=({"role": "user", "content": text},), sampling=GREEDY, **fields)


async def collect(client: RouterClient, request: Request) -> tuple[str, dict[str, str]]:
    deltas = [delta async for delta in client.generate(request)]
    notes: dict[str, str] = {}
    for delta in deltas:
        notes |= delta.notes
    assert deltas[-1].finish_reason == "stop"
    return "".join(delta.content for delta in deltas), notes
