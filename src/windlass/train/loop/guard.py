"""What keeps a run from going wrong unseen: steps whose loss is no number or far off, and requests to stop. No torch at import.

A spike is judged by a robust z-score: how far a loss lies above the median of the last steps, in their median absolute deviations,
which a few bad steps do not move (Iglewicz and Hoaglin, 1993: 0.6745 x / MAD). Every rank sees the same loss, so all judge alike.
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

STOPPED = 75
"""Exit code of a run that was asked to stop, has saved, and can go on with --resume (EX_TEMPFAIL of sysexits.h)."""

NORMAL_MAD = 0.6745
"""A normal distribution's median absolute deviation, in standard deviations."""

LEAST_DEVIATION = 0.005
"""Of the median loss: losses that hardly differ must not make the next a spike."""


class Diverged(Error):
    """Rolling back did not help."""

    exit_code = 4


class Guard:
    """`judge` says why a step must not stand, or nothing."""

    def __init__(self, *, window: int = 64, threshold: float = 8.0, least_steps: int = 16, max_rollbacks: int = 8) -> None:
        """Steps to compare with; the z-score of a spike (0: spikes pass); steps before any is judged; how often in a row to roll back."""
        self.window, self.threshold, self.least_steps, self.max_rollbacks = window, threshold, least_steps, max_rollbacks
        self._losses: deque[float] = deque(maxlen=window)
        self._since_rollback = 0
        self.num_rollbacks = 0
        """In a row: without a whole window of good steps between them."""

    def judge(self, loss: float, grad_norm: float = 0.0) -> str | None:
        for name, value in (("loss", loss), ("gradient norm", grad_norm)):
            if not isfinite(value):
                return f"the {name} is {value}"
        score = self.score(loss)
        if self.threshold and score > self.threshold:
            return f"the loss jumped to {loss:.4g}, {score:.1f} deviations above the median {median(self._losses):.4g}"
        self._losses.append(loss)
        self._since_rollback += 1
        if self._since_rollback >= self.window:
            self.num_rollbacks = 0
        return None

    def score(self, loss: float) -> float:
        """0 while there is too little to compare with, or where the loss is no higher than usual."""
        if len(self._losses) < min(self.least_steps, self.window):
            return 0.0
        middle = median(self._losses)
        deviation = median(abs(found - middle) for found in self._losses)
        return max(NORMAL_MAD * (loss - middle) / max(deviation, LEAST_DEVIATION * abs(middle), 1e-12), 0.0)

    def rolled_back(self, why: str) -> None:
        """Raises when it happens too often."""
        self.num_rollbacks += 1
        self._since_rollback = 0
        if self.num_rollbacks > self.max_rollbacks:
            raise Diverged(
                f"training does not recover: {why}, and {self.max_rollbacks} rollbacks in a row did not help; "
                "lower optimizer.lr, lengthen the warm-up, or look at the data"
            )

    @property
    def losses(self) -> list[float]:
        """Of the last good steps, which the next is compared with."""
        return list(self._losses)

    @losses.setter
    def losses(self, losses: list[float]) -> None:
        self._losses = deque(losses, maxlen=self.window)

    def repeats(self, num_steps: int) -> None:
        """So many steps were good once and come again: only those beyond them show that the run has recovered."""
        self._since_rollback = -num_steps


class StopRequest:
    """SIGTERM, SIGUSR1 (what Slurm sends before the end) and Ctrl-C ask a run to save and stop. The second Ctrl-C stops at once.

    Used as `with StopRequest() as stop`; only the main thread may. Before, and after, signals do what they did.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self) -> None:
        self.reason: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._asked) for number in self.SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def ask(self, reason: str) -> None:
        self.reason = self.reason or reason

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.reason is not None:
            raise KeyboardInterrupt
        self.ask(signal.Signals(number).name)


def agreed(*asked: bool, group: Any = None) -> tuple[bool, ...]:
    """Whether any rank says so, of each: signals and clocks differ, and all ranks must do the same after the same step."""
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return asked
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    said = torch.tensor(asked, dtype=torch.int32, device=device)
    dist.all_reduce(said, op=dist.ReduceOp.MAX, group=group)
    return tuple(bool(one) for one in said.tolist())
