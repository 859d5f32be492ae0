"""Runs several worker processes under torchrun's elastic agent, one agent a machine: if one is killed, all restart from the last checkpoint.

Stop signals are forwarded to the workers, which save and exit with success, so that the agent does not restart them; the result of the run
is in a file written by rank 0 (`RunOutcome`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import uuid
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal

import msgspec

from windlass.errors import NOT_SAVED, Error
from windlass.model.formats.disk.atomic import write_atomically
from windlass.runtime.machine.torch_import import importing
from windlass.tasks.train.loop.guard import heard_signals

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig

OUTCOME = "outcome.json"
STOP = "stop"
"""A file with the meaning of the signal, for workers that had no handler yet."""
ROOM_BYTES = 4096
"""Reserved for the outcome at the start: the disk may be full at the end."""
PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""


class Machines(msgspec.Struct, frozen=True):
    """The machines of a run: from `least` to `most`, which meet at `rendezvous` (HOST:PORT on machine 0)."""

    least: int = 1
    most: int = 1
    rendezvous: str = ""
    number: int = 0
    """This one's."""
    address: str = ""
    """Where the others reach this one."""


class RunOutcome(msgspec.Struct, frozen=True):
    """How a run ended, written by rank 0."""

    kind: Literal["done", "stopped", "failed"]
    step: int = 0
    message: str = ""
    exit_code: int = 0


def begin_outcome(folder: Path) -> None:
    """By rank 0, before the others can have one."""
    with suppress(Error):
        write_atomically(folder / OUTCOME, b" " * ROOM_BYTES)


def write_outcome(folder: Path, outcome: RunOutcome) -> None:
    """The first error of any rank stays: those of other ranks may follow from it."""
    before = read_outcome(folder)
    if outcome.kind == "failed" and before is not None and before.kind == "failed":
        return
    content = msgspec.json.encode(outcome) + b"\n"
    try:
        write_atomically(folder / OUTCOME, content)
    except Error:
        _write_into_room(folder / OUTCOME, content)


def _write_into_room(file: Path, content: bytes) -> None:
    try:
        with file.open("r+b") as stream:
            stream.write(content.ljust(ROOM_BYTES))
    except OSError:
        print(f"windlass: {content.decode()}", file=sys.stderr)


def read_outcome(folder: Path) -> RunOutcome | None:
    try:
        return msgspec.json.decode((folder / OUTCOME).read_bytes(), type=RunOutcome)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def under_agent() -> bool:
    """Whether torchrun (ours or the user's) started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def was_restarted() -> bool:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def stop_when_agent_dies() -> None:
    """If the agent is killed, the worker receives SIGTERM, so that it saves and stops."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def run_workers(
    arguments: list[str], num_workers: int, max_restarts: int, folder: Path, machines: Machines | None = None
) -> RunOutcome:
    """Runs `python ARGUMENTS` in `num_workers` processes of this machine, and restarts all of them, on every machine, when one dies."""
    with importing():
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import elastic_launch

    folder.mkdir(parents=True, exist_ok=True)
    for name in (OUTCOME, STOP):
        (folder / name).unlink(missing_ok=True)
    config = _config(num_workers, max_restarts, machines or Machines())
    # A store shared by all attempts keeps the addresses of dead ranks, and restarted ranks wait for them (torch 2.13,
    # rendezvous.py `_create_c10d_store`); without sharing, every attempt gets its own store.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    forwarder = _SignalForwarder(folder)
    before = {number: signal.signal(number, forwarder.forward) for number in heard_signals()}
    try:
        elastic_launch(config, sys.executable)(*arguments)
    except ChildFailedError as error:
        return read_outcome(folder) or _worst(error, max_restarts)
    except SignalException as error:
        return RunOutcome("failed", message=f"ended by {error.sigval.name}, without a checkpoint of the last steps", exit_code=4)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        (folder / STOP).unlink(missing_ok=True)
    return read_outcome(folder) or RunOutcome(
        "failed", message="the worker processes ended without a result; see their output above", exit_code=4
    )


def _config(num_workers: int, max_restarts: int, machines: Machines) -> LaunchConfig:
    from torch.distributed.launcher.api import LaunchConfig

    alone = machines.most == 1
    return LaunchConfig(
        min_nodes=machines.least,
        max_nodes=machines.most,
        nproc_per_node=num_workers,
        # All machines of a run have the same name for it; the port is theirs alone.
        run_id=f"windlass-{uuid.uuid4().hex[:8]}" if alone else f"windlass-{machines.rendezvous.rpartition(':')[2]}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0" if alone else machines.rendezvous,
        # Else it is guessed by comparing names, which fails where a host has several.
        rdzv_configs={} if alone else {"is_host": machines.number == 0},
        local_addr="localhost" if alone else machines.address or None,
        max_restarts=max_restarts,
        signals_to_handle="SIGQUIT",  # the others are forwarded to the workers
    )


def _worst(error: ChildFailedError, max_restarts: int) -> RunOutcome:
    """Of workers that left no outcome. One that was killed is the reason why the others lost their connections."""
    codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
    first = error.get_first_failure()[0]
    rank = next(
        (rank for rank, code in codes.items() if code in (-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT)),
        first,
    )
    if NOT_SAVED in codes.values():
        return RunOutcome("failed", message="the last checkpoint could not be saved; see above", exit_code=NOT_SAVED)
    times = f"after {max_restarts} restart{'' if max_restarts == 1 else 's'}"
    return RunOutcome("failed", message=f"rank {rank} {_how_ended(codes[rank])} {times}; continue with --resume", exit_code=4)


def _how_ended(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    memory = " (the kernel does that when memory runs out)" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{memory}"


class _SignalForwarder:
    def __init__(self, folder: Path) -> None:
        self._stop = folder / STOP
        self._interrupts = 0

    def forward(self, number: int, frame: FrameType | None) -> None:
        """Sends SIGUSR1, which workers handle as `save and stop`. The second Ctrl-C stops without saving."""
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
    """Child processes. One without a handler yet dies from the signal, is restarted by the agent, and finds the stop file."""
    found = (task / "children" for task in Path(f"/proc/{os.getpid()}/task").iterdir())
    return [int(pid) for path in found for pid in _read_pids(path)]


def _read_pids(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:  # a thread that has just ended
        return []
