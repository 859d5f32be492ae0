"""Limits of API keys: requests and tokens a minute, tokens a day. Knows no HTTP and no engine.

Requests and tokens refill continuously (a token bucket). While a request runs, the tokens that it may use are held; when it ends, those
that it did use are counted. So one request may exceed a limit, but not many at once; the next one waits until the debt is paid.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from windlass.core.model import Frozen
from windlass.tasks.serve.api_key import ApiKey

MINUTE, DAY = 60.0, 86_400.0


class Bucket(Frozen):
    """What is left of a limit."""

    left: float
    updated: float

    def refilled(self, limit: int, period: float, now: float) -> Bucket:
        return Bucket(left=min(float(limit), self.left + (now - self.updated) * limit / period), updated=now)

    def spend(self, amount: float) -> Bucket:
        return Bucket(left=self.left - amount, updated=self.updated)


class Exceeded(Frozen):
    limit: str
    """The name of the limit."""
    retry_seconds: int


class _KeyQuota:
    def __init__(self, key: ApiKey, now: float) -> None:
        self._requests = _limit("requests_per_minute", key, MINUTE, now)
        self._tokens = [*_limit("tokens_per_minute", key, MINUTE, now), *_limit("tokens_per_day", key, DAY, now)]

    def take(self, now: float) -> Exceeded | None:
        """One request, or which limit it exceeds. A request that is rejected costs nothing."""
        limits = [*self._requests, *self._tokens]
        for one in limits:
            one.refill(now)
        exceeded = [one.exceeded() for one in limits if one.is_exceeded]
        if exceeded:
            return max(exceeded, key=lambda found: found.retry_seconds)
        for one in self._requests:
            one.bucket = one.bucket.spend(1)
        return None

    def charge(self, tokens: int, now: float) -> None:
        for one in self._tokens:
            one.refill(now)
            one.bucket = one.bucket.spend(tokens)


class _Limit:
    def __init__(self, name: str, limit: int, period: float, now: float) -> None:
        self._name, self._limit, self._period = name, limit, period
        self.bucket = Bucket(left=float(limit), updated=now)

    def refill(self, now: float) -> None:
        self.bucket = self.bucket.refilled(self._limit, self._period, now)

    @property
    def is_exceeded(self) -> bool:
        return self.bucket.left < 1

    def exceeded(self) -> Exceeded:
        seconds = (1 - self.bucket.left) * self._period / self._limit
        return Exceeded(limit=self._name, retry_seconds=max(1, math.ceil(seconds)))


def _limit(name: str, key: ApiKey, period: float, now: float) -> list[_Limit]:
    limit: int | None = getattr(key, name)
    return [] if limit is None else [_Limit(name, limit, period, now)]


class Quotas:
    """Of all keys, by their number from 1."""

    def __init__(self, keys: Sequence[ApiKey], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._keys = {number: _KeyQuota(key, clock()) for number, key in enumerate(keys, 1) if key.is_limited}

    def take(self, key: int) -> Exceeded | None:
        found = self._keys.get(key)
        return None if found is None else found.take(self._clock())

    def holding(self, key: int, tokens: int) -> AbstractContextManager[None]:
        """Tokens that a request may use, while it runs."""
        return self._held(key, tokens) if key in self._keys else nullcontext()

    @contextmanager
    def _held(self, key: int, tokens: int) -> Generator[None]:
        self.charge(key, tokens)
        try:
            yield
        finally:
            self.charge(key, -tokens)

    def charge(self, key: int, tokens: int) -> None:
        found = self._keys.get(key)
        if found is not None:
            found.charge(tokens, self._clock())
