"""Admission control: a pure decision from the current load. Knows no HTTP and no engine."""

from __future__ import annotations

import math

from windlass.core.model import Frozen

MIN_RETRY_SECONDS = 1
MAX_RETRY_SECONDS = 60
DEFAULT_SECONDS = 5.0
"""Assumed duration of a sequence until one has finished."""


class Load(Frozen):
    in_flight: int
    """Admitted sequences that have not finished."""
    max_running: int
    """Sequences the engine runs at a time."""
    max_waiting: int
    mean_seconds: float = DEFAULT_SECONDS
    """Recent mean duration of a sequence, from admission to its end."""
    own: int = 0
    """Of `in_flight`, those of the same key or address."""
    num_shares: int = 1
    """Keys or addresses that have sequences in flight, this one included."""

    @property
    def capacity(self) -> int:
        return max(self.max_running, 1) + self.max_waiting

    @property
    def fair_share(self) -> int:
        return self.capacity // max(self.num_shares, 1)


class AdmissionResult(Frozen):
    """Admitted, or rejected for now with a time to retry, or impossible because it exceeds the capacity."""

    admitted: bool
    is_impossible: bool = False
    retry_seconds: int = 0


def admit(load: Load, requested: int) -> AdmissionResult:
    """All of a request's sequences or none.

    Whoever holds less than a fair share gets it even if others have filled the queue, so that one key cannot shut out another. Shares
    add up to the capacity, so there are never more than twice as many sequences in flight.
    """
    if requested > load.capacity:
        return AdmissionResult(admitted=False, is_impossible=True)
    is_within_share = load.num_shares > 1 and load.own + requested <= load.fair_share
    if load.in_flight + requested > load.capacity and not (is_within_share and load.in_flight + requested <= 2 * load.capacity):
        return AdmissionResult(admitted=False, retry_seconds=retry_seconds(load, requested))
    return AdmissionResult(admitted=True)


def retry_seconds(load: Load, requested: int) -> int:
    """Until enough sequences have finished, assuming that `max_running` of them finish every `mean_seconds`."""
    excess = load.in_flight + requested - load.capacity
    rounds = excess / max(load.max_running, 1)
    return clamp_retry_seconds(rounds * load.mean_seconds)


def clamp_retry_seconds(seconds: float) -> int:
    return max(MIN_RETRY_SECONDS, min(MAX_RETRY_SECONDS, math.ceil(seconds)))
