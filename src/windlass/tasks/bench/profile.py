"""Profiles engine steps: Python parts by wrapping methods, native kernels by their own timers."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from windlass.runtime.engine.engine import Engine
from windlass.runtime.kernels.program.program import Program
from windlass.tasks.bench.trace import KERNELS, Trace

PARTS = (("scheduler", "schedule"), ("scheduler", "computed"), ("runner", "run"), ("sampler", "sample"))
"""(attribute of the engine, method)."""


@dataclass
class StepTimes:
    """Per step: sequences that got a token, seconds, seconds in kernels."""

    seen: list[tuple[int, float, float]] = field(default_factory=list[tuple[int, float, float]])

    def python_share(self, batch: int) -> float | None:
        """Of steps in which `batch` sequences decoded; None where kernels were not timed."""
        full = [(seconds, kernels) for got, seconds, kernels in self.seen if got == batch and kernels]
        total = sum(seconds for seconds, _ in full)
        return 1 - sum(kernels for _, kernels in full) / total if total else None


@contextmanager
def profiled(engine: Engine, trace: Trace) -> Generator[StepTimes]:
    """Traces every step while the block runs."""
    steps, undo = StepTimes(), list[Callable[[], None]]()
    timers = _Timers(engine.runner.program, trace)
    for owner, method in PARTS:
        undo.append(_wrap(getattr(engine, owner), method, _spanned(trace, f"{owner}.{method}")))
    undo.append(_wrap(engine, "step", _counted(steps, timers)))
    if timers.program is not None:
        undo.append(_wrap(timers.program, "run", timers.around))
    try:
        yield steps
    finally:
        for restore in undo:
            restore()


def _wrap(owner: Any, method: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Overrides the method on the instance; returns the undo function."""
    setattr(owner, method, around(getattr(owner, method)))
    return lambda: delattr(owner, method)


def _spanned(trace: Trace, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def around(work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            with trace.span(name):
                return work(*arguments)

        return timed

    return around


def _counted(steps: StepTimes, timers: _Timers) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def around(work: Callable[..., Any]) -> Callable[..., Any]:
        def timed() -> Any:
            begin = time.perf_counter()
            outputs = work()
            steps.seen.append((len(outputs), time.perf_counter() - begin, timers.take()))
            return outputs

        return timed

    return around


class _Timers:
    """Kernel times of a recorded program, per run."""

    def __init__(self, program: Program | None, trace: Trace) -> None:
        self.program, self._trace, self._taken = program, trace, 0.0
        self._before = dict(enumerate(seconds for _, seconds in program.seconds())) if program is not None else {}

    def around(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed() -> None:
            begin = time.perf_counter()
            work(timed=True)
            self._trace.add_chain(self._since(), begin, KERNELS)

        return timed

    def take(self) -> float:
        taken, self._taken = self._taken, 0.0
        return taken

    def _since(self) -> list[tuple[str, float]]:
        assert self.program is not None
        found: list[tuple[str, float]] = []
        for index, (name, seconds) in enumerate(self.program.seconds()):
            found.append((name, seconds - self._before.get(index, 0.0)))
            self._before[index] = seconds
        self._taken += sum(seconds for _, seconds in found)
        return found
