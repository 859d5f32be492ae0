"""Keep the first model's answer or pass the request on: by its confidence, by checks, by agreement, by a verifier.

A stream is held back only until that is decided: for `hold_tokens`, if it is confident so far; to its end where a check needs it whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from windlass.core.request import GREEDY, Delta, Request, Sampling
from windlass.errors import Error
from windlass.tasks.route.decide.checks import check_json, given_tests
from windlass.tasks.route.decide.confidence import agreement, chance, confidence_of
from windlass.tasks.route.decide.router_file import Confident
from windlass.tasks.route.features.text import text_of
from windlass.tasks.route.operate.settings import CascadeSettings

RunTests = Callable[[str, str], Awaitable[bool]]
"""(program, tests) -> passed; a sandbox, wired in by `cli`."""
Ask = Callable[[Request], Awaitable[str]]
"""A model's whole answer."""
SAMPLED = Sampling(temperature=0.7, top_p=0.95)
MIN_TOKENS = 8
"""Before so many, a stretch of low probabilities says nothing yet."""
QUESTION = "A question and an answer to it follow. Is the answer right? Say Yes or No.\n\nQuestion: {question}\n\nAnswer: {answer}\n\nRight?"


class PassedOn(Exception):
    def __init__(self, why: str, confidence: float | None, score: float | None = None) -> None:
        super().__init__(why)
        self.why, self.confidence, self.score = why, confidence, score


@dataclass(slots=True)
class Kept:
    """What is known of an answer that was kept."""

    confidence: float | None = None
    score: float | None = None
    """1: a check passed."""


@dataclass(slots=True)
class Cascade:
    settings: CascadeSettings
    rule: Confident | None
    run_tests: RunTests | None = None
    verify: Ask | None = None
    sample: Ask | None = None
    """The first model's own further answers."""
    kept: Kept = field(default_factory=Kept)

    def prepared(self, request: Request) -> Request:
        """With the log-probabilities that confidence needs."""
        if self.rule is None or request.logprobs is not None:
            return request
        return msgspec.structs.replace(request, logprobs=0)

    @property
    def threshold(self) -> float:
        given = self.settings.threshold
        return given if given is not None else self.rule.threshold if self.rule is not None else 0.0

    def needs_whole(self, request: Request) -> bool:
        """A check looks at the complete answer."""
        has_json = self.settings.json and request.constraint is not None
        has_tests = self.settings.tests and self.run_tests is not None and "assert " in text_of(request)
        return has_json or has_tests or self.settings.samples > 1 or self.verify is not None

    async def stream(self, request: Request, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
        """Raises PassedOn before anything was let through."""
        held: list[Delta] = []
        logprobs: list[float] = []
        is_free, whole = False, self.needs_whole(request)
        async with aclosing(deltas) as arriving:
            async for delta in arriving:
                logprobs += [entry.logprob for entry in delta.logprobs]
                shown = delta if request.logprobs is not None else msgspec.structs.replace(delta, logprobs=())
                if is_free:
                    yield shown
                    continue
                held.append(shown)
                is_last = delta.finish_reason is not None
                if is_last or self._is_due(logprobs, whole):
                    await self._judge(request, held, logprobs, is_last)
                    is_free = True
                    for one in held:
                        yield one

    def _is_due(self, logprobs: Sequence[float], whole: bool) -> bool:
        """Time to judge what there is: nothing needs the whole answer, and a stream is not held back for longer."""
        if self.rule is None:
            return not whole
        return not whole and len(logprobs) >= max(self.settings.hold_tokens, MIN_TOKENS)

    async def _judge(self, request: Request, held: Sequence[Delta], logprobs: Sequence[float], is_last: bool) -> None:
        self.kept.confidence = self._confidence(logprobs)
        if self.kept.confidence is not None and self.kept.confidence < self.threshold:
            raise PassedOn(f"confidence {self.kept.confidence:.2f} below {self.threshold:.2f}", self.kept.confidence)
        if is_last:
            await self._check(request, "".join(delta.content for delta in held))

    def _confidence(self, logprobs: Sequence[float]) -> float | None:
        if self.rule is None:
            return None
        found = confidence_of(logprobs)
        return chance(self.rule.weights, self.rule.bias, found) if found else None

    async def _check(self, request: Request, answer: str) -> None:
        sure = self.kept.confidence
        if self.settings.json:
            verdict = check_json(request, answer)
            self._scored(verdict != "failed" if verdict != "none" else None, "the answer does not keep its JSON schema", sure)
        if self.settings.tests and self.run_tests is not None and (tests := given_tests(request, answer)) is not None:
            self._scored(await self.run_tests(tests.source, tests.tests), "the code does not pass the tests of its prompt", sure)
        if self.settings.samples > 1 and self.sample is not None:
            await self._agree(request, answer, self.sample)
        if self.verify is not None:
            await self._verify(request, answer, self.verify)

    def _scored(self, passed: bool | None, why: str, sure: float | None) -> None:
        if passed is None:
            return
        self.kept.score = float(passed)
        if not passed:
            raise PassedOn(why, sure, 0.0)

    async def _agree(self, request: Request, answer: str, sample: Ask) -> None:
        again = msgspec.structs.replace(request, sampling=SAMPLED, logprobs=None)
        others = await asyncio.gather(*(sample(again) for _ in range(self.settings.samples - 1)), return_exceptions=True)
        answers = [answer, *(other for other in others if isinstance(other, str))]
        found = agreement(answers)
        if len(answers) > 1 and found < self.settings.agreement:
            raise PassedOn(f"{found:.0%} of {len(answers)} samples agree", self.kept.confidence)

    async def _verify(self, request: Request, answer: str, verify: Ask) -> None:
        text = QUESTION.format(question=text_of(request)[-4000:], answer=answer[-4000:])
        asked = Request(messages=({"role": "user", "content": text},), sampling=GREEDY, max_tokens=8, thinking=False)
        try:
            said = (await verify(asked)).strip().lower()
        except Error:
            return  # a verifier that is gone decides nothing
        if said.startswith("no"):
            raise PassedOn("the verifier says no", self.kept.confidence)
