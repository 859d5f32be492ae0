"""What a run is doing while nothing else is printed: a line on standard error for every phase that lasts."""

from __future__ import annotations

import sys
from threading import Timer

from windlass.core.recipe.recipe import Recipe

SILENT_SECONDS = 2.0
"""Shorter phases are not mentioned."""
LOADING, BUILDING, RESUMING = "loading PyTorch", "opening the data and building the model", "reading the checkpoint"


class Phases:
    """One at a time. Used as `with Phases(...) as phases`, so that none is told of after the end."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._timer: Timer | None = None

    def __enter__(self) -> Phases:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def begin(self, what: str) -> None:
        self.end()
        if self._shown:
            self._timer = Timer(SILENT_SECONDS, _say, (what,))
            self._timer.daemon = True
            self._timer.start()

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _say(what: str) -> None:
    print(f"{what} ...", file=sys.stderr, flush=True)


def first_step(recipe: Recipe, on_gpu: bool) -> str:
    if recipe.run.engine == "deepspeed":
        return "the first step; on a CPU, DeepSpeed compiles its modules once, which may take minutes"
    if recipe.run.compile or on_gpu:
        return "compiling kernels, the first step may take about a minute"
    return "the first step"
