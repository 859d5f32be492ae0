"""Energy of requests: the machine's counters, read once a second and when a request ends, divided by `core/hardware/attribution.py`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from windlass.core.hardware.attribution import USES, EnergyLedger
from windlass.core.metrics import node
from windlass.tasks.serve.backend.in_flight import InFlightRequest
from windlass.tasks.serve.monitor.metrics import Metrics

LEAST_SECONDS = 0.05
"""Between two readings; NVML takes a millisecond."""


class RequestEnergy:
    """`read`: joules since the start, None without a counter."""

    def __init__(
        self,
        read: Callable[[], float | None],
        is_loading: Callable[[], bool],
        in_flight: Callable[[], Sequence[InFlightRequest]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._is_loading, self._in_flight, self._clock = read, is_loading, in_flight, clock
        self.ledger = EnergyLedger()
        self._last = read()
        self._read_at = clock()
        self._models: set[str] = set()

    @property
    def is_counted(self) -> bool:
        return self._last is not None

    @property
    def by_model(self) -> dict[str, float]:
        """Joules of requests that have ended."""
        return {model: self.ledger.used(model) for model in self._models}

    def add_metrics(self, metrics: Metrics) -> None:
        if self.is_counted:
            metrics.read_all(node.SERVED_ENERGY, lambda: [({"use": use}, self.ledger.joules[use]) for use in USES])
            metrics.read_all(node.REQUEST_ENERGY, lambda: [({"model": model}, used) for model, used in self.by_model.items()])

    def settle(self) -> None:
        now = self._read()
        if now is not None and self._last is not None:
            flights = self._in_flight()
            for flight in flights:
                self._take_work(flight)
            self.ledger.settle(max(now - self._last, 0.0), is_loading=self._is_loading(), num_in_flight=len(flights))
            self._last, self._read_at = now, self._clock()

    def _take_work(self, flight: InFlightRequest) -> None:
        """Requests count their own tokens, which costs less than telling every one of them here."""
        if flight.unsettled_tokens:
            self.ledger.add_work(flight.number, flight.unsettled_tokens)
            flight.unsettled_tokens = 0

    def used(self, flight: InFlightRequest) -> float | None:
        """Joules of a request up to now, read now; None without a counter."""
        if not self.is_counted:
            return None
        self.settle()
        return self.ledger.used(flight.number)

    def end(self, flight: InFlightRequest, model: str) -> float | None:
        """Of a request that ended; what it did in the last twentieth of a second may not be in it, and is settled for its model."""
        if not self.is_counted:
            return None
        if self._clock() - self._read_at >= LEAST_SECONDS:
            self.settle()
        self._take_work(flight)
        used = self.ledger.used(flight.number)
        self.ledger.end(flight.number, model)
        self._models.add(model)
        return used
