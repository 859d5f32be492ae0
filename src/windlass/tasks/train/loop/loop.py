"""The training loop: steps, and between them the loss guard, logging, validation and checkpoints.

A step with a bad loss is undone: the run rolls back to the last checkpoint, trains again, and skips that step's samples. Knows nothing
of models, processes or files.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal, Protocol

from windlass.core.model import Frozen
from windlass.errors import NOT_SAVED, Error
from windlass.tasks.train.checkpoint import Checkpoints
from windlass.tasks.train.logging import MetricsLogger
from windlass.tasks.train.loop.guard import LossGuard, StopRequest, any_rank
from windlass.tasks.train.progress import StepReport, TrainingProgress


class LoopTrainer(Protocol):
    """What the loop needs of a trainer (`loop.trainer.Trainer`)."""

    progress: TrainingProgress

    @property
    def done(self) -> bool: ...
    def step(self) -> StepReport: ...
    def skip(self) -> None: ...
    def validate(self) -> float: ...
    def state(self) -> dict[str, Any]: ...
    def load(self, state: dict[str, Any]) -> None: ...


class Intervals(Frozen):
    """None: never."""

    checkpoint_steps: int | None = None
    checkpoint_seconds: float | None = None
    milestone_steps: int | None = None
    """Checkpoints that are kept forever, saved in addition to the others."""
    validation_steps: int | None = None
    asynchronous: bool = True
    """Training waits only for the copy to host memory."""


Phase = Literal["save", "first step"]


class RunResult(Frozen):
    kind: Literal["done", "stopped"]
    step: int
    why: str = ""


class NotSaved(Error):
    """Steps are lost, because their checkpoint could not be written."""

    exit_code = NOT_SAVED


class TrainingLoop:
    def __init__(
        self,
        trainer: LoopTrainer,
        checkpoints: Checkpoints,
        *,
        guard: LossGuard,
        logger: MetricsLogger,
        stop: StopRequest,
        intervals: Intervals,
        after_step: Callable[[], None] = lambda: None,
        announce: Callable[[Phase | None], None] = lambda _: None,
    ) -> None:
        """`after_step`: called after every good step (a profiler). `announce`: before what may take long, and None after it."""
        self.trainer, self.checkpoints, self.guard, self.logger, self.stop = trainer, checkpoints, guard, logger, stop
        self.intervals, self._after_step, self._announce = intervals, after_step, announce
        self._skipped_steps: set[int] = set()
        """First samples of steps that were rolled back."""
        self._saved_step: int | None = None
        """Of the last checkpoint that was written whole."""
        self._saving_step: int | None = None
        """Of the save whose end was not reported yet."""
        self._asked_at = time.monotonic()
        """When a checkpoint was last asked for."""

    def resume(self, step: int | None = None) -> int:
        """Loads the last checkpoint, or that of a step; returns its step."""
        self._saved_step = self._load(step)
        return self._saved_step

    def run(self) -> RunResult:
        trainer = self.trainer
        if self._saved_step is None:  # something to roll back to; and a disk that cannot be written fails now
            self._save_or_fail("training was to begin")
        self._announce("first step")
        while not trainer.done:
            if trainer.progress.samples in self._skipped_steps:
                trainer.skip()
                continue
            report = trainer.step()
            self._announce(None)
            why = self.guard.judge(report.loss, report.grad_norm)
            if why is not None:
                self._roll_back(report, why)
                continue
            self.logger.step(trainer.progress.step, report, trainer.progress.tokens)
            self._after_step()
            if self._after_good_step():
                return self._end("stopped")
        return self._end("done")

    def _after_good_step(self) -> bool:
        """Validation and checkpoints after a good step. Returns whether to stop."""
        step = self.trainer.progress.step
        if not self.checkpoints.is_saving:
            self._report_save()
        if _due(step, self.intervals.validation_steps):
            self._validate()
        seconds = self.intervals.checkpoint_seconds
        waited = seconds is not None and time.monotonic() - self._asked_at >= seconds
        stop, save = any_rank(self.stop.reason is not None, waited)
        if stop:
            self.stop.ask("another rank received a stop request")
        elif self.trainer.done:
            return False  # saved by `_end`
        elif save or _due(step, self.intervals.checkpoint_steps) or _due(step, self.intervals.milestone_steps):
            self._save(wait=not self.intervals.asynchronous)
        return stop

    def _validate(self) -> None:
        progress, loss = self.trainer.progress, self.trainer.validate()
        progress.best_validation = loss if progress.best_validation is None else min(loss, progress.best_validation)
        self.logger.validation(progress.step, loss)

    def _save(self, wait: bool, goes_on: bool = True) -> None:
        step = self.trainer.progress.step
        self._wait()
        self.trainer.progress.recent = self.guard.losses
        self._saving_step, self._asked_at = step, time.monotonic()
        self.checkpoints.save(step, self.trainer.state(), wait=wait, goes_on=goes_on)
        if wait:
            self._report_save()

    def _wait(self) -> None:
        self.checkpoints.wait()
        self._report_save()

    def _report_save(self) -> None:
        """Logs how a save ended that has ended."""
        step, self._saving_step = self._saving_step, None
        if step is None:
            return
        if not self.checkpoints.failure:
            self._saved_step = step
        self.logger.event("checkpoint_failed" if self.checkpoints.failure else "checkpoint", step=step)

    def _save_or_fail(self, what: str) -> None:
        """`what`: how far training is, for the error."""
        self._announce("save")
        self._save(wait=True, goes_on=False)
        self._announce(None)
        if self.checkpoints.failure:
            raise NotSaved(f"{what}, but the checkpoint could not be saved ({self.checkpoints.failure}): {self._remedy()}")

    def _remedy(self) -> str:
        """Where to go on from, and how."""
        good, step = self.checkpoints.latest(), self.trainer.progress.step
        lost = f"steps {(good or 0) + 1:,} to {step:,} are lost" if step > (good or 0) else "no step is lost"
        room = (
            "free or repair a disk"
            if self.checkpoints.fallback
            else "free or repair that disk, or name a second folder with checkpoint.fallback"
        )
        if good is None:
            return f"{lost}, and there is no good checkpoint; {room}, and start again"
        return f"{lost}; the last good checkpoint is {self.checkpoints.path(good)}; {room}, and continue with --resume"

    def _load(self, step: int | None = None) -> int:
        state = self.trainer.state()
        found = self.checkpoints.load(state, step)
        self.trainer.load(state)
        self.guard.losses = self.trainer.progress.recent
        return found

    def _roll_back(self, report: StepReport, why: str) -> None:
        """All ranks see the same loss, so all roll back together."""
        self._wait()
        self._skipped_steps.add(report.first_sample)
        self.guard.record_rollback(why)
        step = self._load()
        self.guard.expect_replay(report.step - 1 - step)
        self._saved_step = step
        self.logger.event("rollback", step=report.step, to_step=step, why=why, loss=report.loss, first_sample=report.first_sample)

    def _end(self, kind: Literal["done", "stopped"]) -> RunResult:
        step, why = self.trainer.progress.step, self.stop.reason or ""
        self._wait()
        if self._saved_step != step:
            self._save_or_fail(
                f"stopped after step {step:,} ({why})" if kind == "stopped" else f"training ended after step {step:,}"
            )
        if kind == "stopped":
            self.logger.event("stop", step=step, why=why)
        return RunResult(kind=kind, step=step, why=why)


def _due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0
