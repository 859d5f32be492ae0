"""One row of numbers a step, handed to everything that shows them. Imports no torch; what a step is, is the trainer's to know."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any, Protocol

import msgspec


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """What is known after a step. None: this run has none of it, or not now."""

    step: int
    steps: int
    """That the run is to have."""
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    """Since the run began, over all ranks and restarts."""
    tokens_per_second: float
    mfu: float | None = None
    validation_loss: float | None = None
    """The last that was measured."""
    expert_balance_cv: float | None = None
    """Standard deviation over mean of the tokens an expert got, averaged over layers: 0 is even."""
    seconds: float = 0.0
    """Of the step."""
    seconds_left: float | None = None
    parts: dict[str, float] = {}
    """Of the loss: mtp, balance, z..."""
    time: float = 0.0


class Sink(Protocol):
    def sample(self, sample: Sample) -> None: ...
    def event(self, kind: str, values: Mapping[str, Any]) -> None:
        """Beside steps: validation, checkpoint, rollback, note, stop."""
        ...

    def close(self) -> None: ...


class Report(Protocol):
    """What `Trainer.step` returns, as far as it is shown."""

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    seconds: float


class Watch:
    """On the first rank; other ranks have one without sinks."""

    def __init__(
        self, sinks: Sequence[Sink] = (), *, steps: int = 0, flops_per_token: float = 0.0, peak_flops: float = 0.0
    ) -> None:
        """`peak_flops`: of all devices together, per second; 0: unknown, and no MFU is shown."""
        self._sinks, self._steps = list(sinks), steps
        self._flops_per_token, self._peak_flops = flops_per_token, peak_flops
        self._validation: float | None = None
        self._smoothed_seconds = 0.0

    def step(self, step: int, report: Report, tokens: int) -> Sample:
        """`tokens`: since the run began; the report's are of this step, over all ranks."""
        rate = report.tokens / report.seconds if report.seconds > 0 else 0.0
        self._smoothed_seconds += (report.seconds - self._smoothed_seconds) * (0.1 if self._smoothed_seconds else 1.0)
        sample = Sample(
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
            parts=dict(getattr(report, "parts", None) or {}),
            time=time.time(),
        )
        for sink in self._sinks:
            sink.sample(sample)
        return sample

    def validation(self, step: int, loss: float) -> None:
        self._validation = loss
        self.event("validation", step=step, loss=loss)

    def note(self, text: str) -> None:
        """For people: something happened."""
        self.event("note", text=text)

    def event(self, kind: str, **values: Any) -> None:
        for sink in self._sinks:
            sink.event(kind, values)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def balance_cv(load: Any) -> float | None:
    """Of the tokens each expert got, [layers][experts] as a tensor or lists; mean over layers."""
    if load is None:
        return None
    rows: list[list[float]] = load.tolist() if hasattr(load, "tolist") else [list(row) for row in load]
    found = [_cv(row) for row in rows if row and sum(row) > 0]
    return sum(found) / len(found) if found else None


def _cv(counts: Sequence[float]) -> float:
    mean = sum(counts) / len(counts)
    return sqrt(sum((count - mean) ** 2 for count in counts) / len(counts)) / mean
