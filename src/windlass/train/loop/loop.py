"""A run from where it stands to its end: steps, and between them what keeps it safe and shows it.

After every step it is judged (`guard`), shown (`watch`), and maybe saved (`checkpoint`). A step that must not stand is undone: back to
the last checkpoint, on as before, and that step's samples left out. Knows nothing of models, processes or files.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal, Protocol

from windlass.core.model import Frozen
from windlass.train.checkpoint import Checkpoints
from windlass.train.logging import Watch
from windlass.train.loop.guard import Guard, StopRequest, agreed


class Learner(Protocol):
    """What the loop asks of a trainer (`train.state.Trainer`)."""

    progress: Any
    done: bool

    def step(self) -> Any: ...
    def skip(self) -> None: ...
    def validate(self) -> float: ...
    def state(self) -> dict[str, Any]: ...
    def load(self, state: dict[str, Any]) -> None: ...


class Intervals(Frozen):
    """None: never."""

    checkpoint_steps: int | None = None
    checkpoint_seconds: float | None = None
    milestone_steps: int | None = None
    """Saved whatever the others say: those that stay for ever must be there."""
    validation_steps: int | None = None
    asynchronous: bool = True
    """Training waits only for the copy to host memory."""


class Ended(Frozen):
    kind: Literal["done", "stopped"]
    step: int
    why: str = ""


class Loop:
    def __init__(
        self,
        trainer: Learner,
        checkpoints: Checkpoints,
        *,
        guard: Guard,
        watch: Watch,
        stop: StopRequest,
        intervals: Intervals,
        after_step: Callable[[], None] = lambda: None,
    ) -> None:
        """`after_step`: for whoever else counts steps (a profiler)."""
        self.trainer, self.checkpoints, self.guard, self.watch, self.stop = trainer, checkpoints, guard, watch, stop
        self.intervals, self._after_step = intervals, after_step
        self._broken: set[int] = set()
        """First samples of steps that did not stand."""
        self._saved_step: int | None = None
        self._saved_at = time.monotonic()
        self._failed_before = 0

    def resume(self, step: int | None = None) -> int:
        """Goes on from the last checkpoint, or from that of a step; returns it."""
        self._saved_step = self._load(step)
        return self._saved_step

    def run(self) -> Ended:
        if self._saved_step is None:  # something to roll back to; and whoever cannot save hears of it now
            self._save(wait=True)
        trainer = self.trainer
        while not trainer.done:
            if trainer.progress.samples in self._broken:
                trainer.skip()
                continue
            report = trainer.step()
            why = self.guard.judge(report.loss, report.grad_norm)
            if why is not None:
                self._roll_back(report, why)
                continue
            self.watch.step(trainer.progress.step, report, trainer.progress.tokens)
            self._after_step()
            if self._between():
                return self._end("stopped")
        return self._end("done")

    def _between(self) -> bool:
        """After a good step; whether to stop here."""
        step = self.trainer.progress.step
        if _due(step, self.intervals.validation_steps):
            self._validate()
        seconds = self.intervals.checkpoint_seconds
        waited = seconds is not None and time.monotonic() - self._saved_at >= seconds
        stop, save = agreed(self.stop.reason is not None, waited)
        if stop:
            self.stop.ask("another rank was asked to stop")
        elif save or _due(step, self.intervals.checkpoint_steps) or _due(step, self.intervals.milestone_steps):
            self._save(wait=not self.intervals.asynchronous)
        return stop

    def _validate(self) -> None:
        progress, loss = self.trainer.progress, self.trainer.validate()
        progress.best_validation = loss if progress.best_validation is None else min(loss, progress.best_validation)
        self.watch.validation(progress.step, loss)

    def _save(self, wait: bool) -> None:
        step = self.trainer.progress.step
        self.checkpoints.wait()
        self._failed_before = self.checkpoints.num_failed
        self.trainer.progress.recent = self.guard.losses
        self.checkpoints.save(step, self.trainer.state(), wait=wait)
        self._saved_step, self._saved_at = step, time.monotonic()
        self.watch.event("checkpoint_failed" if self._failed else "checkpoint", step=step)

    @property
    def _failed(self) -> bool:
        """Of the last save, as far as it has come."""
        return self.checkpoints.num_failed > self._failed_before

    def _load(self, step: int | None = None) -> int:
        state = self.trainer.state()
        found = self.checkpoints.load(state, step)
        self.trainer.load(state)
        self.guard.losses = self.trainer.progress.recent
        return found

    def _roll_back(self, report: Any, why: str) -> None:
        """All ranks judged alike, so all come here."""
        self._broken.add(report.first_sample)
        self.guard.rolled_back(why)
        step = self._load()
        self.guard.repeats(report.step - 1 - step)
        self._saved_step = step
        self.watch.event("rollback", step=report.step, to_step=step, why=why, first_sample=report.first_sample)

    def _end(self, kind: Literal["done", "stopped"]) -> Ended:
        step = self.trainer.progress.step
        self.checkpoints.wait()
        if self._saved_step != step or self._failed:
            self._save(wait=True)
        why = self.stop.reason or ""
        if kind == "stopped":
            self.watch.event("stop", step=step, why=why)
        return Ended(kind=kind, step=step, why=why)


def _due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0
