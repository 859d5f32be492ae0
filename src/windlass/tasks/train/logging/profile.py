"""`--profile`: a trace of a few steps for chrome://tracing or Perfetto, time by operation, and FLOPs by module."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.flop_counter import FlopCounterMode

from windlass.model.formats.disk.atomic import write_atomically

WAIT, WARM_UP, ACTIVE = 2, 1, 3
"""Steps before profiling, steps discarded, steps recorded."""


class Profile:
    """Call `step()` after every step; after the last it writes `trace.json` and `operations.txt` to the folder."""

    def __init__(self, folder: Path, *, wait: int = WAIT, active: int = ACTIVE) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=wait, warmup=WARM_UP, active=active, repeat=1),
            on_trace_ready=self._write,
            record_shapes=True,
            with_modules=True,
        )
        self._left = wait + WARM_UP + active
        self._profile.start()

    @property
    def running(self) -> bool:
        return self._left > 0

    def step(self) -> None:
        if not self.running:
            return
        self._profile.step()
        self._left -= 1
        if not self.running:
            self._profile.stop()

    def close(self) -> None:
        """A run shorter than the profile writes what there is."""
        if self.running:
            self._left = 0
            self._profile.stop()

    def _write(self, found: Any) -> None:
        found.export_chrome_trace(str(self._folder / "trace.json"))
        key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = found.key_averages().table(sort_by=key, row_limit=40)
        write_atomically(self._folder / "operations.txt", (table + "\n").encode())


class FlopCount:
    """Counts FLOPs until `close`, forward and backward, by module and operation."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._counter: FlopCounterMode | None = FlopCounterMode(display=False, depth=None)  # pyright: ignore[reportArgumentType] - None is all levels
        self._counter.__enter__()

    def close(self) -> None:
        if self._counter is None:
            return
        counter, self._counter = self._counter, None
        counter.__exit__(None, None, None)
        found = _flops(counter.get_flop_counts())
        write_atomically(self._path, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


def _flops(counts: Mapping[str, Mapping[Any, int]]) -> dict[str, dict[str, int]]:
    """Largest first."""
    rows = {name: {str(operation): number for operation, number in found.items()} for name, found in counts.items()}
    largest = sorted(rows.items(), key=lambda item: -sum(item[1].values()))
    return {name: {"total": sum(row.values()), **row} for name, row in largest}


class RunProfile:
    """FLOPs of the first step, then a trace."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._trace = folder, None
        self._flops = FlopCount(folder / "flops.json")

    def step(self) -> None:
        if self._trace is None:
            self._flops.close()
            self._trace = Profile(self._folder)
        else:
            self._trace.step()

    def close(self) -> None:
        self._flops.close()
        if self._trace is not None:
            self._trace.close()
