"""What a root does next, when a worker or a rank comes or goes. Pure: a state and an event to a state and actions; the clock is an argument.

An epoch is one life of all ranks. It begins when an engine is wanted, with the workers that are here, and ends as a whole when anything of
it is lost. Who is lost is often not who complains: ranks that wait for a dead one notice first, so that where nobody is to blame yet, the
truth is waited for as long as a silent worker takes to be noticed.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from windlass.core.model import Frozen

GROUP_LOST = "GroupLost"
"""A rank that lost another: it is not to blame."""
FIRST_SECONDS = 15.0
"""For all workers to answer, when the first epoch is to begin."""
STEADY_SECONDS = 3.0
"""A worker that has been here for so long is worth beginning anew for."""
SUSPECT_SECONDS = 4.5
"""A worker is missed after 4 s of silence."""
FORGIVEN_SECONDS = 300.0
"""An epoch that lasted so long clears its workers of what they did before."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 5.0, 300.0
MAX_UNEXPLAINED = 3
"""Epochs in a row that were lost and nobody knew why, before a request may be to blame."""

Phase = Literal["idle", "wanted", "starting", "running"]


class Worker(Frozen):
    name: str
    is_connected: bool = False
    since: float = 0.0
    """When it came, or went."""
    failures: int = 0
    not_before: float = 0.0
    """Left out until then."""
    reason: str = ""
    """Why it is not here."""
    is_refused: bool = False
    """It answers, and will not: another secret, another version, another root's."""


class State(Frozen):
    workers: tuple[Worker, ...]
    phase: Phase = "idle"
    since: float = 0.0
    """When the phase began."""
    number: int = 0
    """Of the epoch that is, or was last."""
    members: tuple[str, ...] = ()
    """Workers that take part in it."""
    suspected: float | None = None
    """Since when something of it is lost, and not known what."""
    complained: tuple[str, ...] = ()
    """Workers whose ranks lost others in it."""
    complaint: str = ""
    """What the first of its ranks said that lost another."""
    unexplained: int = 0
    is_proven: bool = False
    """There was an epoch that became ready, with all workers: from then on it goes on with those that are left."""

    def worker(self, name: str) -> Worker:
        return next(worker for worker in self.workers if worker.name == name)


# --- events


class WorkerJoined(Frozen):
    name: str


class WorkerLost(Frozen):
    name: str
    reason: str
    is_refused: bool = False


class RankExited(Frozen):
    """Of a worker, or of this machine (an empty name)."""

    name: str
    kind: str
    """`GroupLost`, `Stuck`, a class of windlass.errors, or empty: it crashed."""
    reason: str


class EngineExited(Frozen):
    """The first rank."""

    kind: str
    reason: str


class EngineRequested(Frozen):
    """An engine is asked for."""


class EngineReleased(Frozen):
    """It is not, any more."""


class EpochReady(Frozen):
    pass


class EpochStartFailed(Frozen):
    """The epoch was told why: it does not fit, its files cannot be read. `name`: who is to blame, if somebody is."""

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
    """Everything of the epoch. `blameless`: no request can have caused it."""

    number: int
    reason: str
    blameless: bool = True


class FailRequests(Frozen):
    """Whoever wanted an engine is told that there is none."""

    reason: str


Action = StartEpoch | StopEpoch | FailRequests


def next_action(state: State, event: Event, now: float) -> tuple[State, tuple[Action, ...]]:
    match event:
        case WorkerJoined():
            state = _with(state, event.name, is_connected=True, since=now, reason="", is_refused=False)
        case WorkerLost():
            return _gone(state, event, now)
        case RankExited():
            return _rank_ended(state, event, now)
        case EngineExited():
            return _engine_ended(state, event, now)
        case EngineRequested():
            if state.phase == "idle":
                state = _in(state, "wanted", now)
        case EngineReleased():
            return _over(state, now, "it is not wanted any more")
        case EpochReady():
            if state.phase == "starting":
                state = msgspec.structs.replace(_in(state, "running", now), is_proven=True)
        case EpochStartFailed():
            return _could_not(state, event, now)
        case Tick():
            pass
    return _looked(state, now)


def pause_seconds(failures: int) -> float:
    """How long a worker is left out after so many failures: not at all, then longer and longer."""
    return 0.0 if failures <= 1 else min(FIRST_PAUSE_SECONDS * 2.0 ** (failures - 2), LONGEST_PAUSE_SECONDS)


# --- how


def _looked(state: State, now: float) -> tuple[State, tuple[Action, ...]]:
    """What follows from the time alone, or from who is here."""
    if state.phase == "wanted":
        return _begun(state, now)
    if state.phase not in ("starting", "running"):
        return state, ()
    if state.suspected is not None:
        return _unexplained(state, now) if now - state.suspected >= SUSPECT_SECONDS else (state, ())
    back = [worker.name for worker in state.workers if worker.name not in state.members and _is_worth_it(state, worker, now)]
    if back:
        return _over(state, now, f"{_listed(back)} {'is' if len(back) == 1 else 'are'} back")
    if state.phase == "running" and now - state.since >= FORGIVEN_SECONDS:
        return _forgiven(state), ()
    return state, ()


def _begun(state: State, now: float) -> tuple[State, tuple[Action, ...]]:
    if not state.is_proven:
        away = [worker for worker in state.workers if not worker.is_connected]
        if away and now - state.since < FIRST_SECONDS and not any(worker.is_refused for worker in away):
            return state, ()
        if away:
            return _in(state, "idle", now), (FailRequests(reason="; ".join(_why_away(worker) for worker in away)),)
    members = tuple(worker.name for worker in state.workers if _may_begin(state, worker, now))
    state = msgspec.structs.replace(
        _in(state, "starting", now), number=state.number + 1, members=members, suspected=None, complained=(), complaint=""
    )
    return state, (StartEpoch(number=state.number, members=members),)


def _why_away(worker: Worker) -> str:
    if worker.is_refused:
        return worker.reason
    return f"{worker.reason or f'{worker.name} does not answer'}; start `windlass worker` there, or leave it out"


def _may_begin(state: State, worker: Worker, now: float) -> bool:
    """Who was in the last epoch and is still here need not prove itself again."""
    if not worker.is_connected or now < worker.not_before:
        return False
    return not state.is_proven or worker.name in state.members or _is_steady(worker, now)


def _is_steady(worker: Worker, now: float) -> bool:
    return worker.is_connected and now - worker.since >= STEADY_SECONDS and now >= worker.not_before


def _is_worth_it(state: State, worker: Worker, now: float) -> bool:
    """To begin anew with it. One that failed again and again waits till the others have run for as long as it is left out: they get somewhere."""
    if not _is_steady(worker, now) or worker.failures <= 1:
        return _is_steady(worker, now)
    return state.phase == "running" and now - state.since >= pause_seconds(worker.failures)


def _gone(state: State, event: WorkerLost, now: float) -> tuple[State, tuple[Action, ...]]:
    was_here = state.worker(event.name).is_connected
    state = _with(
        state, event.name, is_connected=False, since=now if was_here else state.worker(event.name).since, reason=event.reason,
        is_refused=event.is_refused,
    )  # fmt: skip
    if _is_on(state) and event.name in state.members and was_here:
        return _over(_blamed(state, event.name, now), now, f"{event.name} is gone ({event.reason})")
    return _looked(state, now)


def _rank_ended(state: State, event: RankExited, now: float) -> tuple[State, tuple[Action, ...]]:
    if not _is_on(state):
        return state, ()
    if event.kind == GROUP_LOST:
        complained = (*state.complained, event.name) if event.name else state.complained
        return _suspicious(msgspec.structs.replace(state, complained=complained), event.reason, now), ()
    state = _blamed(state, event.name, now) if event.name else state
    return _over(state, now, f"a rank {_at(event.name)} {event.reason}", blameless=event.kind != "")


def _engine_ended(state: State, event: EngineExited, now: float) -> tuple[State, tuple[Action, ...]]:
    if not _is_on(state):
        return state, ()
    if event.kind == GROUP_LOST:
        return _suspicious(state, event.reason, now), ()
    if state.suspected is not None:  # it said that it lost others: that its process then ends, or is silent, says no more
        return state, ()
    return _over(state, now, event.reason, blameless=False)


def _could_not(state: State, event: EpochStartFailed, now: float) -> tuple[State, tuple[Action, ...]]:
    """Where a worker is to blame, the others are tried without it; but not before it ever worked with all."""
    if state.phase not in ("starting", "running"):
        return state, ()
    if not event.name or not state.is_proven:
        return _in(state, "idle", now), (StopEpoch(number=state.number, reason=event.reason), FailRequests(reason=event.reason))
    state = _blamed(state, event.name, now, at_least=2)
    return _over(state, now, f"{event.name}: {event.reason}")


def _unexplained(state: State, now: float) -> tuple[State, tuple[Action, ...]]:
    """Those that complained may not reach each other: in the end they are left out, one after the other."""
    reason = f"ranks lost each other, and nobody is known to be gone ({state.complaint})"
    if not state.is_proven:
        why = f"{reason}; can these machines reach each other, at any port?"
        return _in(state, "idle", now), (StopEpoch(number=state.number, reason=reason), FailRequests(reason=why))
    count = state.unexplained + 1
    for name in state.complained:
        state = _blamed(state, name, now)
    state = msgspec.structs.replace(state, unexplained=count)
    return _over(state, now, reason, blameless=count < MAX_UNEXPLAINED)


def _suspicious(state: State, reason: str, now: float) -> State:
    if state.suspected is not None:
        return state
    return msgspec.structs.replace(state, suspected=now, complaint=reason)


def _forgiven(state: State) -> State:
    workers = tuple(
        msgspec.structs.replace(worker, failures=0) if worker.name in state.members else worker for worker in state.workers
    )
    return msgspec.structs.replace(state, workers=workers, unexplained=0)


def _over(state: State, now: float, reason: str, blameless: bool = True) -> tuple[State, tuple[Action, ...]]:
    if not _is_on(state):
        return _in(state, "idle", now), ()
    return _in(state, "idle", now), (StopEpoch(number=state.number, reason=reason, blameless=blameless),)


def _is_on(state: State) -> bool:
    return state.phase in ("starting", "running")


def _in(state: State, phase: Phase, now: float) -> State:
    return msgspec.structs.replace(state, phase=phase, since=now)


def _with(state: State, name: str, **changes: object) -> State:
    workers = tuple(msgspec.structs.replace(worker, **changes) if worker.name == name else worker for worker in state.workers)
    return msgspec.structs.replace(state, workers=workers)


def _blamed(state: State, name: str, now: float, at_least: int = 1) -> State:
    failures = max(state.worker(name).failures + 1, at_least)
    return _with(state, name, failures=failures, not_before=now + pause_seconds(failures))


def _at(name: str) -> str:
    return f"at {name}" if name else "of this machine"


def _listed(names: list[str]) -> str:
    return " and ".join(names)
