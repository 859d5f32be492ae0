"""Several processes of one run on this machine, kept alive by torchrun's own agent: a killed one restarts all from the last checkpoint.

Who runs here is for the caller to say (a command line). A request to stop goes to the workers, which save and end well, so the
agent sees success; what the run came to is told by a file that the first rank leaves (`Outcome`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import uuid
from pathlib import Path
from types import FrameType
from typing import Literal

import msgspec

from windlass.formats.disk.atomic import write_atomically

OUTCOME = "outcome.json"
STOP = "stop"
"""A file that says the same as the signal, for workers that were not listening yet."""
ASKED_TO_STOP = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""


class Outcome(msgspec.Struct, frozen=True):
    """How a run ended, as the first rank tells it."""

    kind: Literal["done", "stopped", "failed"]
    step: int = 0
    message: str = ""
    exit_code: int = 0


def write_outcome(folder: Path, outcome: Outcome) -> None:
    write_atomically(folder / OUTCOME, msgspec.json.encode(outcome) + b"\n")


def read_outcome(folder: Path) -> Outcome | None:
    try:
        return msgspec.json.decode((folder / OUTCOME).read_bytes(), type=Outcome)
    except (OSError, msgspec.DecodeError):
        return None


def under_agent() -> bool:
    """Whether this process is one of a run that torchrun (ours or somebody's) started."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def restarted() -> bool:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def end_with_agent() -> None:
    """A worker whose agent was killed is asked to stop, so that it saves and does not go on unseen."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def run_workers(arguments: list[str], num_workers: int, max_restarts: int, folder: Path) -> Outcome:
    """Runs `python ARGUMENTS` that many times together, and again from the last checkpoint when one of them dies."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    folder.mkdir(parents=True, exist_ok=True)
    for name in (OUTCOME, STOP):
        (folder / name).unlink(missing_ok=True)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_workers,
        run_id=f"windlass-{uuid.uuid4().hex[:8]}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=max_restarts,
        signals_to_handle="SIGHUP,SIGQUIT",  # the others are passed on to workers
    )
    # One store for all attempts keeps the addresses of ranks that are gone, and those started again wait for them (torch 2.13,
    # rendezvous.py `_create_c10d_store`); without sharing every attempt gets a store of its own.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    passer = _Passer(folder)
    before = {number: signal.signal(number, passer.pass_on) for number in ASKED_TO_STOP}
    try:
        elastic_launch(config, sys.executable)(*arguments)
    except ChildFailedError as error:
        return read_outcome(folder) or _worst(error, max_restarts)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        (folder / STOP).unlink(missing_ok=True)
    return read_outcome(folder) or Outcome("failed", message="the run's processes ended without a word", exit_code=4)


def _worst(error: object, max_restarts: int) -> Outcome:
    failures = getattr(error, "failures", {})
    rank, failure = next(iter(failures.items()), (0, None))
    code = getattr(failure, "exitcode", 1)
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return Outcome("failed", message=f"rank {rank} {how} once more after {max_restarts} restarts", exit_code=4)


class _Passer:
    def __init__(self, folder: Path) -> None:
        self._stop = folder / STOP
        self._interrupts = 0

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        """One signal for all reasons: SIGUSR1, which workers take as `save and stop`. The second Ctrl-C ends them without."""
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            raise KeyboardInterrupt
        self._stop.touch()
        for child in _children():
            try:
                os.kill(child, signal.SIGUSR1)
            except ProcessLookupError:
                continue


def _children() -> list[int]:
    """One that is not listening yet is ended by the signal, started again by the agent, and finds the file."""
    found = (task / "children" for task in Path(f"/proc/{os.getpid()}/task").iterdir())
    return [int(word) for path in found for word in _words(path)]


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:  # a thread that has just ended
        return []
