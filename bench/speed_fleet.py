"""Seconds until somebody who is gone is missed, and until a root is let in. `python bench/speed_fleet.py`; the bar is 5 for each but the last, 3."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runtime" / "fleet"))

from small_root import SmallRoot, WorkerProcess
from strangers import attack

from subprocesses import until_gone
from waiting import until
from windlass.core.layout import Layout
from windlass.runtime.fleet.protocol.messages import RankEnded, RanksStarted


@contextmanager
def begun() -> Iterator[tuple[WorkerProcess, SmallRoot, int]]:
    """A worker, a root, and the number of the one rank that the worker has."""
    with tempfile.TemporaryDirectory() as folder:
        worker = WorkerProcess(Path(folder))
        root = SmallRoot(worker.port)
        try:
            root.start(1, Layout(tp=2))
            yield worker, root, root.wait(RanksStarted).pids[0]
        finally:
            worker.process.send_signal(signal.SIGCONT)
            root.close()
            worker.close()


def killed_rank_seconds() -> float:
    with begun() as (_, root, pid):
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        root.wait(RankEnded)
        return time.monotonic() - began


def stopped_worker_seconds() -> float:
    with begun() as (worker, root, _):
        began = time.monotonic()
        worker.process.send_signal(signal.SIGSTOP)
        until(lambda: root.lost)
        return time.monotonic() - began


def silent_root_seconds() -> float:
    """Until its rank is gone."""
    with begun() as (_, root, pid):
        began = time.monotonic()
        root.fall_silent()
        until_gone(pid)
        return time.monotonic() - began


def crowded_door_seconds() -> float:
    """A root is let in while strangers stay as long as they can."""
    ending = threading.Event()

    def hold(_: Any) -> None:
        ending.wait()

    with tempfile.TemporaryDirectory() as folder:
        worker = WorkerProcess(Path(folder))
        strangers = threading.Thread(target=attack, args=(worker.port, [hold] * 150, 10.0, 150))
        strangers.start()
        try:
            until(lambda: any("too many" in line for line in worker.lines()))
            began = time.monotonic()
            SmallRoot(worker.port).close()
            return time.monotonic() - began
        finally:
            ending.set()
            strangers.join()
            worker.close()


def measurements() -> dict[str, Callable[[], float]]:
    return {
        "a rank that is killed": killed_rank_seconds,
        "a worker that stands still": stopped_worker_seconds,
        "the rank of a root that is silent": silent_root_seconds,
        "a root at a crowded door": crowded_door_seconds,
    }


if __name__ == "__main__":
    for name, measure in measurements().items():
        print(f"{name:36} {measure():8.2f} s")
