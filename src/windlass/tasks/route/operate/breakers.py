"""A breaker for each model: after failures in a row it is left alone for a while, then tried with one request. A clock is passed in."""

from __future__ import annotations

from collections.abc import Callable

from windlass.core.model import Frozen


class BreakerSettings(Frozen):
    failures: int = 3
    """In a row, until it opens."""
    open_seconds: float = 10.0
    """Doubled each time the trial fails too, up to `max_open_seconds`."""
    max_open_seconds: float = 300.0


class Breaker:
    def __init__(self, settings: BreakerSettings, clock: Callable[[], float]) -> None:
        self._settings, self._clock = settings, clock
        self._failures, self._open_until, self._pause = 0, 0.0, settings.open_seconds
        self._is_trying = False
        self.num_opened = 0

    @property
    def is_open(self) -> bool:
        return self._clock() < self._open_until

    @property
    def is_available(self) -> bool:
        """Closed; or half open with nobody trying."""
        return not self.is_open and not self._is_trying

    def starts(self) -> None:
        """A request is sent. The first after a pause is a trial: others wait for its outcome."""
        self._is_trying = self._failures >= self._settings.failures

    def succeeded(self) -> None:
        self._failures, self._pause, self._is_trying, self._open_until = 0, self._settings.open_seconds, False, 0.0

    def failed(self, retry_after_seconds: float | None = None) -> None:
        """`retry_after_seconds`: the model itself says when to come back (429), which opens the breaker at once."""
        was_trial, self._is_trying = self._is_trying, False
        self._failures += 1
        if was_trial:
            self._pause = min(2 * self._pause, self._settings.max_open_seconds)
        if retry_after_seconds is not None:
            self._open(min(max(retry_after_seconds, 0.0), self._settings.max_open_seconds))
        elif self._failures >= self._settings.failures:
            self._open(self._pause)

    def abandoned(self) -> None:
        """The request ended without saying anything about the model: cancelled, or refused as invalid."""
        self._is_trying = False

    def _open(self, seconds: float) -> None:
        self._open_until = max(self._open_until, self._clock() + seconds)
        self.num_opened += 1
