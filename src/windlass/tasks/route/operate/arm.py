"""One model of a router while it runs: its client, breaker, prices, and how long its answers take now."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing

import msgspec

from windlass.core.client import Broken, Client, Late, Unavailable
from windlass.core.hardware.energy import co2_kg, energy_kwh, grid
from windlass.core.request import Delta, Info, Request, Usage
from windlass.errors import Error, TooLong
from windlass.tasks.route.decide.policy import Candidate
from windlass.tasks.route.decide.router_file import RoutedModel
from windlass.tasks.route.operate.breakers import Breaker, BreakerSettings
from windlass.tasks.route.operate.settings import ModelSettings

RECENT = 0.1
"""The weight of the newest answer in the mean time of an answer."""
CONFIGURATION = (401, 403, 404)
"""A model that refuses everybody is as good as gone; other refusals are the request's own fault."""
JOULES_PER_KWH = 3.6e6


class Silent(Unavailable):
    """The model said nothing for too long."""


def is_models_fault(error: Error) -> bool:
    """Another model may do better: it is gone, busy, broken or late."""
    status = getattr(error, "status", None)
    return (
        isinstance(error, (Unavailable, Broken, Late)) or status in CONFIGURATION or (isinstance(status, int) and status >= 429)
    )


def may_ask_another(error: Error) -> bool:
    return is_models_fault(error) or isinstance(error, TooLong) or getattr(error, "code", None) == "context_length_exceeded"


class Arm:
    def __init__(
        self, settings: ModelSettings, known: RoutedModel, client: Client, breaker: BreakerSettings, clock: Callable[[], float]
    ) -> None:
        self.settings, self.known, self.client = settings, known, client
        self.breaker = Breaker(breaker, clock)
        self.info: Info | None = None
        self._seconds = known.seconds
        self._grams_per_joule = co2_kg(energy_kwh(1.0, 1000.0 / JOULES_PER_KWH), grid(settings.region).grams_per_kwh) * 1000.0
        self.is_loaded: Callable[[], bool] = lambda: True
        self.enter: Callable[[], AbstractAsyncContextManager[Client]] | None = None
        """Of a model that is not always loaded."""

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def seconds(self) -> float:
        """Of an answer, lately."""
        return self._seconds or 0.0

    def candidate(self, chance: float) -> Candidate:
        watts, load = self.settings.watts or 0.0, self.settings.load_seconds
        return Candidate(
            name=self.name, chance=chance, cost=self.known.cost, seconds=round(self.seconds, 6), grams=self.grams(self.joules(self.seconds)),
            is_available=self.breaker.is_available, is_loaded=self.is_loaded(), load_seconds=load,
            load_cost=load * self.settings.usd_per_hour / 3600, load_grams=self.grams(load * watts),
        )  # fmt: skip

    def joules(self, seconds: float) -> float:
        """Estimated from the stated power, else what the table measured of an answer."""
        if self.settings.watts is not None:
            return self.settings.watts * seconds
        return self.known.joules or 0.0

    def grams(self, joules: float) -> float:
        return joules * self._grams_per_joule

    def cost(self, usage: Usage | None, seconds: float) -> float:
        """In dollars where the settings have prices, else as the table has it."""
        one = self.settings
        if not (one.usd_per_million_prompt or one.usd_per_million_answer or one.usd_per_hour):
            return self.known.cost
        tokens = usage or Usage(prompt_tokens=0, completion_tokens=0)
        by_token = tokens.prompt_tokens * one.usd_per_million_prompt + tokens.completion_tokens * one.usd_per_million_answer
        return by_token / 1e6 + one.usd_per_hour * seconds / 3600

    async def current_info(self, seconds: float) -> Info:
        """Asking a model that is not resident would load it, so nothing is said of it."""
        if not self.settings.resident:
            return Info(model=self.name, context_tokens=0)
        try:
            may_load = self.info is None and not self.settings.at.startswith("http")
            async with asyncio.timeout(None if may_load else seconds):
                self.info = await self.client.info()
        except TimeoutError:
            raise Silent(f"{self.name} did not answer for {seconds:g} s") from None
        return self.info

    def finished(self, seconds: float) -> None:
        self.breaker.succeeded()
        self._seconds = seconds if self._seconds is None else (1 - RECENT) * self._seconds + RECENT * seconds

    async def stream(self, request: Request, silent_seconds: float) -> AsyncGenerator[Delta, None]:
        """Its deltas. `silent_seconds`: without any, it counts as failed. The breaker hears how it went. Time in which the model
        was not even loaded is not its silence."""
        self.breaker.starts()
        try:
            async with AsyncExitStack() as stack:
                client, asked = await self._entered(stack, request)
                deltas, began = await stack.enter_async_context(aclosing(client.generate(asked))), time.monotonic()
                while True:
                    delta = await _next(deltas, silent_seconds, self.name)
                    if delta is None:
                        raise Broken(f"{self.name} ended its answer without a reason")
                    if delta.finish_reason == "error":
                        raise Broken(f"{self.name} failed in the middle of its answer")
                    if delta.finish_reason is not None:
                        self.finished(time.monotonic() - began)
                        yield delta
                        return
                    yield delta
        except Error as error:
            if is_models_fault(error):
                self.breaker.failed(getattr(error, "retry_after_seconds", None))
            else:
                self.breaker.abandoned()
            raise
        except BaseException:
            self.breaker.abandoned()
            raise

    async def _entered(self, stack: AsyncExitStack, request: Request) -> tuple[Client, Request]:
        """The client, once it is its turn, and what is left of the deadline."""
        asked = msgspec.structs.replace(request, model="")
        if self.enter is None:
            return self.client, asked
        began, deadline = time.monotonic(), request.deadline_seconds
        try:
            async with asyncio.timeout(deadline):
                client = await stack.enter_async_context(self.enter())
        except TimeoutError:
            raise Late(f"the deadline passed before {self.name} was loaded") from None
        left = None if deadline is None else max(deadline - (time.monotonic() - began), 0.001)
        return client, msgspec.structs.replace(asked, deadline_seconds=left)


async def _next(deltas: AsyncGenerator[Delta, None], seconds: float, name: str) -> Delta | None:
    try:
        async with asyncio.timeout(seconds):
            return await anext(deltas, None)
    except TimeoutError:
        raise Silent(f"{name} said nothing for {seconds:g} s") from None
