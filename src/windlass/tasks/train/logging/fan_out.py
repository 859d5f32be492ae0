"""Sends the metrics of every step to all sinks. No torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any, Protocol

import msgspec

from windlass.runtime.machine.energy import EnergyCounters
from windlass.tasks.train.progress import StepReport

RANKS = "ranks"
"""The event with the times of all ranks; too long for a log."""


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics after a step. None: not available."""

    step: int
    steps: int
    """Total steps of the run."""
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    """Since the start of the run, over all ranks and restarts."""
    tokens_per_second: float
    mfu: float | None = None
    validation_loss: float | None = None
    """The last measured."""
    expert_balance_cv: float | None = None
    """Coefficient of variation of the tokens per expert, averaged over layers: 0 is even."""
    seconds: float = 0.0
    """Duration of the step."""
    seconds_left: float | None = None
    energy_joules: float | None = None
    """Of this machine, since the process began, by its counters; None without any."""
    energy_source: str = ""
    parts: dict[str, float] = {}
    """Auxiliary losses: mtp, balance, router_z."""
    time: float = 0.0


class Sink(Protocol):
    def sample(self, sample: StepMetrics) -> None: ...
    def event(self, kind: str, values: Mapping[str, Any]) -> None:
        """Other events: validation, checkpoint, rollback, ranks, note, stop."""
        ...

    def close(self) -> None: ...


class MetricsLogger:
    """Has sinks on rank 0 only."""

    def __init__(
        self,
        sinks: Sequence[Sink] = (),
        *,
        steps: int = 0,
        flops_per_token: float = 0.0,
        peak_flops: float = 0.0,
        energy: EnergyCounters | None = None,
    ) -> None:
        """`peak_flops`: of all devices, per second; 0: unknown, no MFU."""
        self._energy = energy
        self._energy_source = "" if energy is None else energy.source
        self._sinks, self._steps = list(sinks), steps
        self._flops_per_token, self._peak_flops = flops_per_token, peak_flops
        self._validation: float | None = None
        self._smoothed_seconds = 0.0

    def step(self, step: int, report: StepReport, tokens: int) -> StepMetrics:
        """`tokens`: since the start of the run."""
        rate = report.tokens / report.seconds if report.seconds > 0 else 0.0
        self._smoothed_seconds += (report.seconds - self._smoothed_seconds) * (0.1 if self._smoothed_seconds else 1.0)
        sample = StepMetrics(
            step=step,
            steps=self._steps,
            loss=report.loss,
            learning_rate=report.lr,
            grad_norm=report.grad_norm,
            tokens=tokens,
            tokens_per_second=rate,
            mfu=rate * self._flops_per_token / self._peak_flops if self._peak_flops else None,
            validation_loss=self._validation,
            expert_balance_cv=balance_cv(getattr(report, "expert_load", None)),
            seconds=report.seconds,
            seconds_left=max(self._steps - step, 0) * self._smoothed_seconds if self._steps else None,
            energy_joules=None if self._energy is None else self._energy.joules(),
            energy_source=self._energy_source,
            parts=dict(getattr(report, "parts", None) or {}),
            time=time.time(),
        )
        for sink in self._sinks:
            sink.sample(sample)
        if ranks := getattr(report, "ranks", ()):
            self.event(RANKS, ranks=ranks)
        return sample

    def validation(self, step: int, loss: float) -> None:
        self._validation = loss
        self.event("validation", step=step, loss=loss)

    def note(self, text: str) -> None:
        """A message for people."""
        self.event("note", text=text)

    def event(self, kind: str, **values: Any) -> None:
        for sink in self._sinks:
            sink.event(kind, values)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def balance_cv(load: Any) -> float | None:
    """Coefficient of variation of tokens per expert, [layers][experts] as a tensor or lists; mean over layers."""
    if load is None:
        return None
    rows: list[list[float]] = load.tolist() if hasattr(load, "tolist") else [list(row) for row in load]
    found = [_cv(row) for row in rows if row and sum(row) > 0]
    return sum(found) / len(found) if found else None


def _cv(counts: Sequence[float]) -> float:
    mean = sum(counts) / len(counts)
    return sqrt(sum((count - mean) ** 2 for count in counts) / len(counts)) / mean
