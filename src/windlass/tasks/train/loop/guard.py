"""The loss guard (NaN, infinity, spikes) and stop requests. No torch at import.

Spikes are detected by a robust z-score: the distance of a loss from the median of recent steps in median absolute deviations, which a few
bad steps do not change (Iglewicz and Hoaglin, 1993: 0.6745 x / MAD). Every rank sees the same loss, so all decide the same.
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from math import isfinite
from statistics import median
from types import FrameType, TracebackType
from typing import Any

from windlass.errors import Error

NORMAL_MAD = 0.6745
"""A normal distribution's median absolute deviation, in standard deviations."""

LEAST_DEVIATION = 0.005
"""Minimum deviation, as a fraction of the median loss: if losses hardly differ, a small change is not a spike."""


class Diverged(Error):
    """Rollbacks did not help."""

    exit_code = 4


class LossGuard:
    """`judge` returns why a step must be rolled back, or None."""

    def __init__(self, *, window: int = 64, threshold: float = 8.0, least_steps: int = 16, max_rollbacks: int = 8) -> None:
        """`window`: recent steps to compare with; `threshold`: z-score of a spike, 0: off; `least_steps`: steps before the first check."""
        self.window, self.threshold, self.least_steps, self.max_rollbacks = window, threshold, least_steps, max_rollbacks
        self._losses: deque[float] = deque(maxlen=window)
        self._since_rollback = 0
        self.num_rollbacks = 0
        """Consecutive: without a whole window of good steps in between."""

    def judge(self, loss: float, grad_norm: float = 0.0) -> str | None:
        for name, value in (("loss", loss), ("gradient norm", grad_norm)):
            if not isfinite(value):
                return f"the {name} is {value}"
        score = self.score(loss)
        if self.threshold and score > self.threshold:
            return f"the loss spiked to {loss:.4g}, {score:.1f} deviations above the median {median(self._losses):.4g}"
        self._losses.append(loss)
        self._since_rollback += 1
        if self._since_rollback >= self.window:
            self.num_rollbacks = 0
        return None

    def score(self, loss: float) -> float:
        """Robust z-score; 0 with too few recent steps, or if the loss is not above the median."""
        if len(self._losses) < min(self.least_steps, self.window):
            return 0.0
        middle = median(self._losses)
        deviation = median(abs(found - middle) for found in self._losses)
        return max(NORMAL_MAD * (loss - middle) / max(deviation, LEAST_DEVIATION * abs(middle), 1e-12), 0.0)

    def record_rollback(self, why: str) -> None:
        """Raises Diverged after too many."""
        self.num_rollbacks += 1
        self._since_rollback = 0
        if self.num_rollbacks > self.max_rollbacks:
            raise Diverged(
                f"training diverged: {why}, and {self.max_rollbacks} consecutive rollbacks did not help; "
                "lower optimizer.lr, lengthen the warmup, or check the data"
            )

    @property
    def losses(self) -> list[float]:
        """Losses of recent good steps."""
        return list(self._losses)

    @losses.setter
    def losses(self, losses: list[float]) -> None:
        self._losses = deque(losses, maxlen=self.window)

    def expect_replay(self, num_steps: int) -> None:
        """The next `num_steps` steps are repeated after a rollback: only later ones show that the run has recovered."""
        self._since_rollback = -num_steps


STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
"""SIGUSR1 is what Slurm sends before a time limit, SIGHUP what a closed terminal does."""


def heard_signals() -> list[signal.Signals]:
    """Those of STOP_SIGNALS that this process was not told to ignore, as `nohup` does with SIGHUP."""
    return [number for number in STOP_SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


class StoppedBeforeStart(BaseException):
    """A signal while the run was being built. Not an Exception, so that no library takes it for a failure of its own."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class StopRequest:
    """SIGTERM, SIGUSR1, SIGHUP and Ctrl-C make a run save and stop. A second Ctrl-C stops at once.

    Used as `with StopRequest() as stop` in the main thread; restores the previous signal handlers.
    """

    def __init__(self, *, ends_at_once: bool = False) -> None:
        """`ends_at_once`: until `begin` is called there is nothing to save, and signals raise StoppedBeforeStart or KeyboardInterrupt."""
        self.reason: str | None = None
        self._ends_at_once = ends_at_once
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in heard_signals()}
        return self

    def begin(self) -> None:
        self._ends_at_once = False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def ask(self, reason: str) -> None:
        self.reason = self.reason or reason

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and (self._ends_at_once or self.reason is not None):
            raise KeyboardInterrupt
        if self._ends_at_once:
            raise StoppedBeforeStart(signal.Signals(number).name)
        self.ask(signal.Signals(number).name)


def any_rank(*flags: bool, group: Any = None) -> tuple[bool, ...]:
    """Logical or of each flag over ranks: signals and clocks differ, and all ranks must act after the same step."""
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return flags
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    reduced = torch.tensor(flags, dtype=torch.int32, device=device)
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX, group=group)
    return tuple(bool(flag) for flag in reduced.tolist())
