"""What the root does next when a worker or a rank comes or goes. Pure: (state, event, time) -> (state, actions).

An epoch is one life of all ranks. It starts when an engine is requested, with the workers that are connected, and ends as a whole when
any of them is lost. Ranks that wait for a dead one notice it first, so a rank that reports a lost group is not to blame: the root waits
for as long as a silent worker takes to be noticed before it decides who was.
"""

from __future__ import annotations

import msgspec

from windlass.runtime.fleet.root.events import (
    GROUP_LOST,
    Action,
    EngineExited,
    EngineReleased,
    EngineRequested,
    EpochReady,
    EpochStartFailed,
    Event,
    FailRequests,
    FleetState,
    Phase,
    RankExited,
    StartEpoch,
    StopEpoch,
    Tick,
    WorkerJoined,
    WorkerLost,
    WorkerState,
)

FIRST_SECONDS = 15.0
"""For all workers to connect before the first epoch."""
STEADY_SECONDS = 3.0
"""A worker connected for so long is worth a new epoch."""
SUSPECT_SECONDS = 4.5
"""A silent worker is noticed after 4 s."""
FORGIVEN_SECONDS = 300.0
"""An epoch that ran for so long clears the failures of its workers."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 5.0, 300.0
MAX_UNEXPLAINED = 3
"""Epochs lost in a row for an unknown reason before a request is taken to be the cause."""

Next = tuple[FleetState, tuple[Action, ...]]


def next_action(state: FleetState, event: Event, now: float) -> Next:
    match event:
        case WorkerJoined():
            state = _update(state, event.name, is_connected=True, since=now, reason="", is_refused=False)
        case WorkerLost():
            return _worker_lost(state, event, now)
        case RankExited():
            return _rank_exited(state, event, now)
        case EngineExited():
            return _engine_exited(state, event, now)
        case EngineRequested():
            if state.phase == "idle":
                state = _enter(state, "requested", now)
        case EngineReleased():
            return _stop(state, now, "no request needs it any more")
        case EpochReady():
            if state.phase == "starting":
                state = msgspec.structs.replace(_enter(state, "running", now), is_proven=True)
        case EpochStartFailed():
            return _start_failed(state, event, now)
        case Tick():
            pass
    return _advance(state, now)


def pause_seconds(failures: int) -> float:
    """How long a worker is left out after so many failures: exponential backoff from the second one on."""
    return 0.0 if failures <= 1 else min(FIRST_PAUSE_SECONDS * 2.0 ** (failures - 2), LONGEST_PAUSE_SECONDS)


# --- transitions


def _advance(state: FleetState, now: float) -> Next:
    """What follows from the time and from who is connected."""
    if state.phase == "requested":
        return _start(state, now)
    if not _is_active(state):
        return state, ()
    if state.suspected is not None:
        return _unexplained(state, now) if now - state.suspected >= SUSPECT_SECONDS else (state, ())
    back = [worker.name for worker in state.workers if worker.name not in state.members and _is_worth_it(state, worker, now)]
    if back:
        return _stop(state, now, f"{' and '.join(back)} {'is' if len(back) == 1 else 'are'} back")
    if state.phase == "running" and now - state.since >= FORGIVEN_SECONDS:
        return _clear_failures(state), ()
    return state, ()


def _start(state: FleetState, now: float) -> Next:
    if not state.is_proven:
        away = [worker for worker in state.workers if not worker.is_connected]
        if away and now - state.since < FIRST_SECONDS and not any(worker.is_refused for worker in away):
            return state, ()
        if away:
            return _enter(state, "idle", now), (FailRequests(reason="; ".join(_why_away(worker) for worker in away)),)
    members = tuple(worker.name for worker in state.workers if _may_start(state, worker, now))
    state = msgspec.structs.replace(
        _enter(state, "starting", now), number=state.number + 1, members=members, suspected=None, complained=(), complaint=""
    )
    return state, (StartEpoch(number=state.number, members=members),)


def _worker_lost(state: FleetState, event: WorkerLost, now: float) -> Next:
    before = state.worker(event.name)
    since = now if before.is_connected else before.since
    state = _update(state, event.name, is_connected=False, since=since, reason=event.reason, is_refused=event.is_refused)
    if _is_active(state) and event.name in state.members and before.is_connected:
        return _stop(_count_failure(state, event.name, now), now, f"{event.name} is lost ({event.reason})")
    return _advance(state, now)


def _rank_exited(state: FleetState, event: RankExited, now: float) -> Next:
    if not _is_active(state):
        return state, ()
    if event.kind == GROUP_LOST:
        complained = (*state.complained, event.name) if event.name else state.complained
        return _suspect(msgspec.structs.replace(state, complained=complained), event.reason, now), ()
    state = _count_failure(state, event.name, now) if event.name else state
    where = f"of {event.name}" if event.name else "of this machine"
    return _stop(state, now, f"a rank {where} {event.reason}", blameless=event.kind != "")


def _engine_exited(state: FleetState, event: EngineExited, now: float) -> Next:
    if not _is_active(state):
        return state, ()
    if event.kind == GROUP_LOST:
        return _suspect(state, event.reason, now), ()
    if state.suspected is not None:  # it reported a lost group before: its exit says no more
        return state, ()
    return _stop(state, now, event.reason, blameless=False)


def _start_failed(state: FleetState, event: EpochStartFailed, now: float) -> Next:
    """If a worker is at fault the others continue without it, but not before an epoch with all of them has run."""
    if not _is_active(state):
        return state, ()
    if not event.name or not state.is_proven:
        actions = (StopEpoch(number=state.number, reason=event.reason), FailRequests(reason=event.reason))
        return _enter(state, "idle", now), actions
    state = _count_failure(state, event.name, now, at_least=2)
    return _stop(state, now, f"{event.name}: {event.reason}")


def _unexplained(state: FleetState, now: float) -> Next:
    """Workers that complained may be unable to reach each other: in the end they are left out, one after the other."""
    reason = f"ranks lost each other although every worker is connected ({state.complaint})"
    if not state.is_proven:
        why = f"{reason}; check that these machines can reach each other on any port"
        return _enter(state, "idle", now), (StopEpoch(number=state.number, reason=reason), FailRequests(reason=why))
    count = state.unexplained + 1
    for name in state.complained:
        state = _count_failure(state, name, now)
    state = msgspec.structs.replace(state, unexplained=count)
    return _stop(state, now, reason, blameless=count < MAX_UNEXPLAINED)


def _stop(state: FleetState, now: float, reason: str, blameless: bool = True) -> Next:
    stopped = _enter(state, "idle", now)
    return stopped, (StopEpoch(number=state.number, reason=reason, blameless=blameless),) if _is_active(state) else ()


# --- questions


def _is_active(state: FleetState) -> bool:
    return state.phase in ("starting", "running")


def _may_start(state: FleetState, worker: WorkerState, now: float) -> bool:
    """A member of the last epoch that is still connected need not be steady first."""
    if not worker.is_connected or now < worker.not_before:
        return False
    return not state.is_proven or worker.name in state.members or _is_steady(worker, now)


def _is_steady(worker: WorkerState, now: float) -> bool:
    return worker.is_connected and now - worker.since >= STEADY_SECONDS and now >= worker.not_before


def _is_worth_it(state: FleetState, worker: WorkerState, now: float) -> bool:
    """To restart the epoch with it. After several failures the others run for as long as it is left out, so that they make progress."""
    if not _is_steady(worker, now) or worker.failures <= 1:
        return _is_steady(worker, now)
    return state.phase == "running" and now - state.since >= pause_seconds(worker.failures)


def _why_away(worker: WorkerState) -> str:
    if worker.is_refused:
        return worker.reason
    return f"{worker.reason or f'{worker.name} does not answer'}; start `windlass worker` there, or leave it out of --workers"


# --- changes of the state


def _enter(state: FleetState, phase: Phase, now: float) -> FleetState:
    return msgspec.structs.replace(state, phase=phase, since=now)


def _suspect(state: FleetState, reason: str, now: float) -> FleetState:
    if state.suspected is not None:
        return state
    return msgspec.structs.replace(state, suspected=now, complaint=reason)


def _count_failure(state: FleetState, name: str, now: float, at_least: int = 1) -> FleetState:
    failures = max(state.worker(name).failures + 1, at_least)
    return _update(state, name, failures=failures, not_before=now + pause_seconds(failures))


def _clear_failures(state: FleetState) -> FleetState:
    workers = tuple(
        msgspec.structs.replace(worker, failures=0) if worker.name in state.members else worker for worker in state.workers
    )
    return msgspec.structs.replace(state, workers=workers, unexplained=0)


def _update(state: FleetState, name: str, **changes: object) -> FleetState:
    workers = tuple(msgspec.structs.replace(worker, **changes) if worker.name == name else worker for worker in state.workers)
    return msgspec.structs.replace(state, workers=workers)
