"""One request to one model after another, until one of them has answered to its end.

A model that fails before it said anything is replaced at once. One that fails in the middle of its answer is too: the next model
continues what was already sent (`continues_answer`), so that no stream breaks off.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from windlass.core.client import Late
from windlass.core.request import Delta, Request
from windlass.errors import Error
from windlass.tasks.route.operate.arm import Arm, may_ask_another
from windlass.tasks.route.operate.cascade import Cascade, PassedOn
from windlass.tasks.route.operate.log import Attempt

MAX_ROUNDS = 5
PAUSE_SECONDS = 1.0
"""How often all models are tried: those that were busy or restarting may answer the next time."""


@dataclass(slots=True)
class Trial:
    """How one request went."""

    first: str
    then: tuple[str, ...] = ()
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    current: str = ""
    answered: str = ""
    num_resumed: int = 0


@dataclass(slots=True)
class _Progress:
    """Of one request over all its attempts."""

    sent: str = ""
    failure: Error | None = None
    passed_on: set[str] = field(default_factory=set[str])
    failed: set[str] = field(default_factory=set[str])


class Answering:
    def __init__(
        self, arms: Mapping[str, Arm], silent_seconds: float, cascade: Cascade | None, notify: Callable[[str], None]
    ) -> None:
        self._arms, self._silent_seconds, self._cascade, self._notify = arms, silent_seconds, cascade, notify

    async def stream(self, request: Request, trial: Trial) -> AsyncGenerator[Delta, None]:
        until = None if request.deadline_seconds is None else time.monotonic() + request.deadline_seconds
        progress = _Progress()
        for name in self._turns(trial):
            if name is None:
                await _pause(until)
                continue
            if self._is_skipped(name, trial, progress):
                continue
            if until is not None and time.monotonic() >= until:
                break
            async with aclosing(self._ask(name, request, trial, progress, until)) as deltas:
                async for delta in deltas:
                    yield delta
            if trial.answered:
                return
        raise progress.failure or Late("the deadline passed before any model answered")

    def _turns(self, trial: Trial) -> Iterator[str | None]:
        """None: a pause. The model whose answer was passed on comes last of all: its answer is better than none."""
        names = list(dict.fromkeys((trial.first, *trial.then)))
        for number in range(MAX_ROUNDS):
            if number:
                yield None
            yield from names

    def _is_skipped(self, name: str, trial: Trial, progress: _Progress) -> bool:
        """A model with an open breaker, while another one may answer; one whose answer was passed on, until all others have failed."""
        others = [one for one in dict.fromkeys((trial.first, *trial.then)) if one != name and one not in progress.passed_on]
        if name in progress.passed_on:
            return any(one not in progress.failed for one in others)
        return self._arms[name].breaker.is_open and any(not self._arms[one].breaker.is_open for one in others)

    async def _ask(
        self, name: str, request: Request, trial: Trial, progress: _Progress, until: float | None
    ) -> AsyncGenerator[Delta, None]:
        began, trial.current = time.monotonic(), name
        left = None if until is None else until - began
        asked = msgspec.structs.replace(continued(request, progress.sent), deadline_seconds=left)
        try:
            async with aclosing(self._attempt(self._arms[name], asked, trial, progress)) as deltas:
                async for delta in deltas:
                    progress.sent += delta.content
                    if delta.finish_reason is not None:  # before it is handed on: the caller may stop listening with the last one
                        trial.attempts.append(Attempt(model=name, outcome="kept", seconds=_since(began)))
                        trial.answered = name
                    yield delta
        except PassedOn:
            trial.attempts.append(Attempt(model=name, outcome="passed on", seconds=_since(began)))
            progress.passed_on.add(name)
        except Error as error:
            trial.attempts.append(Attempt(model=name, outcome=_short(error), seconds=_since(began)))
            self._notify(f"{name}: {_short(error)}")
            if not may_ask_another(error) or (until is not None and time.monotonic() >= until):
                raise
            trial.num_resumed += bool(progress.sent)
            progress.failure = error
            progress.failed.add(name)

    def _attempt(self, arm: Arm, request: Request, trial: Trial, progress: _Progress) -> AsyncGenerator[Delta, None]:
        """The first model's answer is judged, unless it is wanted after all because nobody else answers."""
        cascade = self._cascade
        if cascade is None or arm.name != trial.first or arm.name in progress.passed_on or progress.sent:
            return arm.stream(request, self._silent_seconds)
        return cascade.stream(request, arm.stream(cascade.prepared(request), self._silent_seconds))


def continued(request: Request, sent: str) -> Request:
    """The same request with the answer so far, to be continued."""
    if not sent:
        return request
    left = None if request.max_tokens is None else max(request.max_tokens - max(len(sent) // 4, 1), 1)
    if request.messages is not None:
        messages = (*request.messages, {"role": "assistant", "content": sent})
        if request.continues_answer and request.messages[-1].get("role") == "assistant":
            last = request.messages[-1]
            messages = (*request.messages[:-1], {**last, "content": f"{last.get('content') or ''}{sent}"})
        return msgspec.structs.replace(request, messages=messages, continues_answer=True, max_tokens=left, min_tokens=0)
    if request.prompt is not None:
        return msgspec.structs.replace(request, prompt=request.prompt + sent, max_tokens=left, min_tokens=0)
    return request


async def _pause(until: float | None) -> None:
    left = PAUSE_SECONDS if until is None else max(until - time.monotonic(), 0.0)
    await asyncio.sleep(min(PAUSE_SECONDS, left))


def _since(began: float) -> float:
    return round(time.monotonic() - began, 6)


def _short(error: Error) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
