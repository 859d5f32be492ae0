"""What a root does next: a table of what happens and what follows, second by second. Nothing runs here."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.runtime.fleet.root.events import (
    Action,
    EngineExited,
    EngineReleased,
    EngineRequested,
    EpochReady,
    EpochStartFailed,
    Event,
    FailRequests,
    FleetState,
    RankExited,
    StartEpoch,
    StopEpoch,
    Tick,
    WorkerJoined,
    WorkerLost,
    WorkerState,
)
from windlass.runtime.fleet.root.state_machine import (
    FIRST_SECONDS,
    FORGIVEN_SECONDS,
    LONGEST_PAUSE_SECONDS,
    STEADY_SECONDS,
    SUSPECT_SECONDS,
    next_action,
    pause_seconds,
)

pytestmark = pytest.mark.pure

LOST = "GroupLost"
NAMES = ("a", "b")


def states(names: tuple[str, ...] = NAMES) -> FleetState:
    return FleetState(workers=tuple(WorkerState(name=name) for name in names))


def shown(action: Action) -> Any:
    match action:
        case StartEpoch():
            return "begin", action.members
        case StopEpoch():
            return "moved" if action.blameless else "broke"
        case FailRequests():
            return "refuse"


def played(story: list[tuple[float, Event, list[Any]]], state: FleetState | None = None) -> FleetState:
    """Every event at its second, and what must follow it."""
    found = state or states()
    for number, (now, event, expected) in enumerate(story):
        found, actions = next_action(found, event, now)
        assert [shown(action) for action in actions] == expected, f"line {number}: {event} at {now}"
    return found


RUNNING: list[tuple[float, Event, list[Any]]] = [
    (0, EngineRequested(), []),
    (1, WorkerJoined(name="a"), []),
    (2, WorkerJoined(name="b"), [("begin", ("a", "b"))]),
    (8, EpochReady(), []),
]


def gone(name: str, reason: str = "nothing was heard for 4.1 s") -> WorkerLost:
    return WorkerLost(name=name, reason=reason)


def ended(name: str, kind: str = "") -> RankExited:
    return RankExited(name=name, kind=kind, reason="was ended by SIGSEGV")


STORIES: dict[str, list[tuple[float, Event, list[Any]]]] = {
    "the first epoch waits for all": RUNNING,
    "nothing begins unasked": [
        (0, WorkerJoined(name="a"), []),
        (0, WorkerJoined(name="b"), []),
        (100, Tick(), []),
        (101, EngineRequested(), [("begin", NAMES)]),
    ],
    "a worker that never answers is named": [
        (0, EngineRequested(), []),
        (1, WorkerJoined(name="a"), []),
        (2, gone("b", "b:9998: Connection refused"), []),
        (FIRST_SECONDS - 1, Tick(), []),
        (FIRST_SECONDS, Tick(), ["refuse"]),
        (FIRST_SECONDS + 1, Tick(), []),
        (FIRST_SECONDS + 2, EngineRequested(), []),
        (FIRST_SECONDS + 3, WorkerJoined(name="b"), [("begin", NAMES)]),
    ],
    "one with another secret is named at once": [
        (0, EngineRequested(), []),
        (1, WorkerLost(name="a", reason="a: another secret", is_refused=True), ["refuse"]),
    ],
    "a worker that is lost before anything ran is waited for": [
        *RUNNING[:3],
        (3, gone("b"), ["moved"]),
        (3, EngineRequested(), []),
        (10, WorkerJoined(name="b"), [("begin", NAMES)]),
    ],
    "a dead worker: on with who is left, and back when it is steady": [
        *RUNNING,
        (20, gone("b"), ["moved"]),
        (20, EngineRequested(), [("begin", ("a",))]),
        (25, EpochReady(), []),
        (30, gone("b", "connection refused"), []),
        (40, WorkerJoined(name="b"), []),
        (40 + STEADY_SECONDS - 0.1, Tick(), []),
        (40 + STEADY_SECONDS, Tick(), ["moved"]),
        (40 + STEADY_SECONDS, EngineRequested(), [("begin", NAMES)]),
    ],
    "one that comes back while others start is worth starting anew": [
        *RUNNING,
        (20, gone("b"), ["moved"]),
        (20, EngineRequested(), [("begin", ("a",))]),
        (21, WorkerJoined(name="b"), []),
        (21 + STEADY_SECONDS, Tick(), ["moved"]),
    ],
    "one that was not in the last epoch must prove itself": [
        *RUNNING,
        (20, gone("b"), ["moved"]),
        (20, EngineRequested(), [("begin", ("a",))]),
        (21, WorkerJoined(name="b"), []),
        (22, gone("a"), ["moved"]),
        (22, EngineRequested(), [("begin", ())]),
    ],
    "ranks that complain are not to blame; who is silent is": [
        *RUNNING,
        (20, ended("a", LOST), []),
        (20, EngineExited(kind=LOST, reason="rank 0 lost another"), []),
        (23, Tick(), []),
        (24, gone("b"), ["moved"]),
        (24, EngineRequested(), [("begin", ("a",))]),
    ],
    "where nobody turns out to be gone, it begins anew with the same": [
        *RUNNING,
        (20, EngineExited(kind=LOST, reason="rank 0 lost another"), []),
        (20 + SUSPECT_SECONDS - 0.1, Tick(), []),
        (20 + SUSPECT_SECONDS, Tick(), ["moved"]),
        (25, EngineRequested(), [("begin", NAMES)]),
    ],
    "an engine that lost others has not crashed when it ends for that": [
        *RUNNING,
        (20, EngineExited(kind=LOST, reason="rank 0 lost another"), []),
        (20.1, EngineExited(kind="", reason="the process ended with status 1"), []),
        (24.2, EngineExited(kind="Stuck", reason="no sign of life"), []),
        (20 + SUSPECT_SECONDS, Tick(), ["moved"]),
    ],
    "machines that cannot reach each other from the beginning are told of": [
        *RUNNING[:3],
        (20, ended("a", LOST), []),
        (20 + SUSPECT_SECONDS, Tick(), ["moved", "refuse"]),
    ],
    "losing each other again and again is a request's fault in the end, and those that complain are left out": [
        *RUNNING,
        (20, ended("a", LOST), []),
        (25, Tick(), ["moved"]),
        (25, EngineRequested(), [("begin", NAMES)]),
        (30, ended("a", LOST), []),
        (35, Tick(), ["moved"]),
        (35, EngineRequested(), [("begin", ("b",))]),
        (36, EngineExited(kind=LOST, reason=""), []),
        (41, Tick(), ["broke"]),
    ],
    "a rank that crashes may be a request's fault": [
        *RUNNING,
        (20, ended("a"), ["broke"]),
        (20, EngineRequested(), [("begin", NAMES)]),
        (22, EpochReady(), []),
        (30, ended("a"), ["broke"]),
        (30, EngineRequested(), [("begin", ("b",))]),
        (36, Tick(), []),
        (37, EpochReady(), []),
        (41, Tick(), []),
        (42, Tick(), ["moved"]),
    ],
    "a stuck one is not": [*RUNNING, (20, ended("b", "Stuck"), ["moved"]), (20, EngineRequested(), [("begin", NAMES)])],
    "one of this machine is nobody's": [*RUNNING, (20, ended(""), ["broke"]), (20, EngineRequested(), [("begin", NAMES)])],
    "an engine that crashes": [*RUNNING, (20, EngineExited(kind="", reason="SIGABRT"), ["broke"]), (21, Tick(), [])],
    "what does not fit is refused, and tried again when it is asked for": [
        *RUNNING,
        (20, gone("b"), ["moved"]),
        (20, EngineRequested(), [("begin", ("a",))]),
        (21, EpochStartFailed(reason="7 bytes short"), ["moved", "refuse"]),
        (30, WorkerJoined(name="b"), []),
        (40, Tick(), []),
        (41, EngineRequested(), [("begin", NAMES)]),
    ],
    "a worker that cannot be prepared: the first time it is said": [
        *RUNNING[:3],
        (3, EpochStartFailed(reason="the disk is full", name="b"), ["moved", "refuse"]),
    ],
    "later the others go on, and it is left out for a while": [
        *RUNNING,
        (20, gone("b"), ["moved"]),
        (20, EngineRequested(), [("begin", ("a",))]),
        (22, EpochReady(), []),
        (30, WorkerJoined(name="b"), []),
        (33, Tick(), ["moved"]),
        (33, EngineRequested(), [("begin", NAMES)]),
        (34, EpochStartFailed(reason="the disk is full", name="b"), ["moved"]),
        (34, EngineRequested(), [("begin", ("a",))]),
        (36, EpochReady(), []),
        (40, Tick(), []),
        (45, Tick(), ["moved"]),
    ],
    "nothing is left of what nobody wants": [*RUNNING, (20, EngineReleased(), ["moved"]), (21, gone("a"), []), (22, Tick(), [])],
    "what comes late is nothing": [
        *RUNNING,
        (20, gone("a"), ["moved"]),
        (20, ended("b", LOST), []),
        (21, EngineExited(kind=LOST, reason=""), []),
        (21, EpochStartFailed(reason="x"), []),
        (22, EpochReady(), []),
    ],
}


@pytest.mark.parametrize("name", STORIES)
def test_what_follows(name: str) -> None:
    played(STORIES[name])


def test_a_worker_that_fails_again_and_again_is_left_out_longer_and_longer() -> None:
    pauses = [pause_seconds(count) for count in range(1, 12)]
    assert pauses[:4] == [0, 5, 10, 20]
    assert pauses == sorted(pauses) and pauses[-1] == LONGEST_PAUSE_SECONDS
    state, now, waited = played(RUNNING), 20.0, []
    for _ in range(5):
        state = played(
            [(now, gone("b"), ["moved"]), (now, EngineRequested(), [("begin", ("a",))]), (now, EpochReady(), [])], state
        )
        state = played([(now + 1, WorkerJoined(name="b"), [])], state)
        began = now
        while not (actions := next_action(state, Tick(), now)[1]):
            now += 0.5
        waited.append(now - began)
        assert [shown(action) for action in actions] == ["moved"]
        state = played([(now, Tick(), ["moved"]), (now, EngineRequested(), [("begin", NAMES)]), (now, EpochReady(), [])], state)
    assert waited == [4.0, 5.0, 10.0, 20.0, 40.0]
    now += FORGIVEN_SECONDS
    state = played([(now, Tick(), []), (now, gone("b"), ["moved"])], state)
    assert state.worker("b").failures == 1


def test_why_is_said() -> None:
    state = played(RUNNING)
    _, (end,) = next_action(state, gone("b"), 20)
    assert isinstance(end, StopEpoch) and end.reason == "b is lost (nothing was heard for 4.1 s)"
    _, (end,) = next_action(state, ended("a"), 20)
    assert isinstance(end, StopEpoch) and end.reason == "a rank of a was ended by SIGSEGV"


def events() -> st.SearchStrategy[Event]:
    names = st.sampled_from(NAMES)
    kinds = st.sampled_from(["", LOST, "Stuck", "DoesNotFit"])
    return st.one_of(
        names.map(lambda name: WorkerJoined(name=name)),
        names.map(gone),
        st.builds(RankExited, name=st.sampled_from(["", *NAMES]), kind=kinds, reason=st.just("x")),
        st.builds(EngineExited, kind=kinds, reason=st.just("x")),
        st.builds(EpochStartFailed, reason=st.just("x"), name=st.sampled_from(["", *NAMES])),
        st.sampled_from([EngineRequested(), EngineReleased(), EpochReady(), Tick(), Tick(), Tick()]),
    )


@given(st.lists(st.tuples(st.floats(0, 30), events()), max_size=60))
def test_whatever_happens_epochs_follow_each_other(happened: list[tuple[float, Event]]) -> None:
    """One at a time, each with its own number, of workers that are here; every one that begins ends once; who asks is answered."""
    state, now, open_epoch, is_asked, last = states(), 0.0, 0, False, 0
    for pause, event in happened:
        now += pause
        is_asked = is_asked or isinstance(event, EngineRequested)
        state, actions = next_action(state, event, now)
        for action in actions:
            match action:
                case StartEpoch():
                    assert not open_epoch and is_asked and action.number > last
                    assert all(state.worker(name).is_connected for name in action.members)
                    open_epoch = last = action.number
                case StopEpoch():
                    assert open_epoch == action.number
                    open_epoch, is_asked = 0, False
                case FailRequests():
                    assert not open_epoch
                    is_asked = False
        if isinstance(event, EngineReleased):
            is_asked = False
        assert (state.phase in ("starting", "running")) == bool(open_epoch)
        assert (state.phase == "requested") == (is_asked and not open_epoch)
