"""The values of the root's state machine (state_machine.py): its state, the events it takes and the actions it returns."""

from __future__ import annotations

from typing import Literal

from windlass.core.model import Frozen

GROUP_LOST = "GroupLost"
"""`kind` of a rank that exited because another one was gone: it is not to blame."""

Phase = Literal["idle", "requested", "starting", "running"]


class WorkerState(Frozen):
    name: str
    is_connected: bool = False
    since: float = 0.0
    """When it connected, or was lost."""
    failures: int = 0
    not_before: float = 0.0
    """Left out of epochs until then."""
    reason: str = ""
    """Why it is not connected."""
    is_refused: bool = False
    """It answers and refuses: another secret, another version, or busy with another root."""


class FleetState(Frozen):
    workers: tuple[WorkerState, ...]
    phase: Phase = "idle"
    since: float = 0.0
    """When the phase began."""
    number: int = 0
    """Of the current epoch, or the last one."""
    members: tuple[str, ...] = ()
    """Workers that take part in it."""
    suspected: float | None = None
    """Since when a rank has been missing without it being known which."""
    complained: tuple[str, ...] = ()
    """Workers whose ranks lost others in this epoch."""
    complaint: str = ""
    """The first such report."""
    unexplained: int = 0
    """Epochs in a row that were lost for an unknown reason."""
    is_proven: bool = False
    """An epoch with all workers became ready once: from then on the root continues with those that are left."""

    def worker(self, name: str) -> WorkerState:
        return next(worker for worker in self.workers if worker.name == name)


# --- events


class WorkerJoined(Frozen):
    name: str


class WorkerLost(Frozen):
    name: str
    reason: str
    is_refused: bool = False


class RankExited(Frozen):
    """A rank other than rank 0. `name`: its worker; empty: the root's machine."""

    name: str
    kind: str
    """`GroupLost`, `Stuck`, a class of windlass.errors; empty: it crashed."""
    reason: str


class EngineExited(Frozen):
    """Rank 0."""

    kind: str
    reason: str


class EngineRequested(Frozen):
    """A request needs an engine."""


class EngineReleased(Frozen):
    """Nobody needs the engine any more."""


class EpochReady(Frozen):
    pass


class EpochStartFailed(Frozen):
    """It does not fit, or files cannot be read. `name`: the worker at fault; empty: none."""

    reason: str
    name: str = ""


class Tick(Frozen):
    pass


Event = (
    WorkerJoined
    | WorkerLost
    | RankExited
    | EngineExited
    | EngineRequested
    | EngineReleased
    | EpochReady
    | EpochStartFailed
    | Tick
)


# --- actions


class StartEpoch(Frozen):
    number: int
    members: tuple[str, ...]


class StopEpoch(Frozen):
    """End all its ranks. `blameless`: no request can have caused it."""

    number: int
    reason: str
    blameless: bool = True


class FailRequests(Frozen):
    """Requests that wait for an engine fail with this reason."""

    reason: str


Action = StartEpoch | StopEpoch | FailRequests
