"""Energy of requests: the machine's counters, read once a second and when a request ends, divided by `core/attribution.py`."""

from __future__ import annotations

import time
from collections.abc import Callable

from windlass.core.attribution import USES, EnergyLedger
from windlass.core.metrics import node
from windlass.serve.monitor.metrics import Metrics

LEAST_SECONDS = 0.05
"""Between two readings; NVML takes a millisecond."""


class RequestEnergy:
    """`read`: joules since the start, None without a counter."""

    def __init__(
        self,
        read: Callable[[], float | None],
        is_loading: Callable[[], bool],
        num_in_flight: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read, self._is_loading, self._num_in_flight, self._clock = read, is_loading, num_in_flight, clock
        self.ledger = EnergyLedger()
        self._last = read()
        self._read_at = clock()
        self.by_model: dict[str, float] = {}

    @property
    def is_counted(self) -> bool:
        return self._last is not None

    def add_metrics(self, metrics: Metrics) -> None:
        if self.is_counted:
            metrics.read_all(node.SERVED_ENERGY, lambda: [({"use": use}, self.ledger.joules[use]) for use in USES])
            metrics.read_all(node.REQUEST_ENERGY, lambda: [({"model": model}, used) for model, used in self.by_model.items()])

    def add(self, number: int, tokens: int) -> None:
        """Tokens that were computed for a request; the prompt's come with the first."""
        if self.is_counted:
            self.ledger.add_work(number, tokens)

    def settle(self) -> None:
        now = self._read()
        if now is not None and self._last is not None:
            self.ledger.settle(max(now - self._last, 0.0), is_loading=self._is_loading(), num_in_flight=self._num_in_flight())
            self._last, self._read_at = now, self._clock()

    def end(self, number: int, model: str) -> float | None:
        """Joules of a request that ended; None without a counter."""
        if not self.is_counted:
            return None
        if self._clock() - self._read_at >= LEAST_SECONDS:
            self.settle()
        used = self.ledger.end(number)
        self.by_model[model] = self.by_model.get(model, 0.0) + used
        return used
