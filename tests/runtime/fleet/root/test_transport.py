"""The way to a fleet's engine, with an engine that does as it is told: what becomes of what it says, and of how it ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import owned_time
from windlass.core.client import Broken, Unavailable
from windlass.core.launch import Launch, RankJob
from windlass.core.layout import Layout
from windlass.core.ranks.epoch import EpochPlan
from windlass.core.request import GREEDY, Info, Timings, Usage
from windlass.errors import DoesNotFit, Error
from windlass.runtime.engine.client.requests import EngineRequests
from windlass.runtime.engine.client.transport import EngineTransport, Lost, Receive
from windlass.runtime.engine.protocol import (
    Command,
    EngineFailed,
    EngineReady,
    Finish,
    InfoReply,
    InfoRequest,
    SequenceOutput,
    StepOutputs,
    Submit,
)
from windlass.runtime.fleet.root import root as root_module
from windlass.runtime.fleet.root import state_machine as events
from windlass.runtime.fleet.root.root import Fleet

pytestmark = pytest.mark.pure

HOUR = 3600.0
"""Of the loop's own time, in which nothing takes any."""
INFO = Info(model="told", context_tokens=64)


class ToldEngine:
    """Answers every request with its prompt, once it is allowed to."""

    def __init__(self) -> None:
        self.submits: list[Submit] = []
        self.is_killed = False

    def open(self, receive: Receive, lost: Lost) -> None:
        self.receive, self.lost = receive, lost

    def ready(self) -> None:
        self.receive(EngineReady(INFO))

    def answer(self) -> None:
        for submit in self.submits:
            finish = Finish("length", Usage(prompt_tokens=1, completion_tokens=1), Timings())
            self.receive(StepOutputs([SequenceOutput(submit.id, [7], finish=finish)]))
        self.submits.clear()

    def send(self, command: Command) -> None:
        if isinstance(command, Submit):
            self.submits.append(command)
        if isinstance(command, InfoRequest):
            self.receive(InfoReply(command.id, INFO))

    def kill(self) -> None:
        self.is_killed = True

    async def close(self) -> None: ...


class Stage:
    """A fleet of this machine alone, and every engine that it made."""

    def __init__(self, max_crashes: int = 0) -> None:
        self.engines: list[ToldEngine] = []
        self.lines: list[str] = []
        self.refusal: Error | None = None
        self.fleet = Fleet(Launch(model="told", device="cpu"), self._plan, notify=self.lines.append, make_engine=self._engine)
        self.calls = EngineRequests(self.fleet.transport, max_crashes=max_crashes)

    def _plan(self, nodes: Any) -> EpochPlan:
        if self.refusal is not None:
            raise self.refusal
        return EpochPlan(layout=Layout(), nodes=(0,))

    def _engine(self, job: RankJob, supervised: socket.socket | None) -> EngineTransport:
        assert job.meeting is None and supervised is None, "one rank needs nobody"
        self.engines.append(ToldEngine())
        return self.engines[-1]

    async def engine(self, number: int) -> ToldEngine:
        """The so many-th, ready."""
        while asyncio.get_running_loop().time() < HOUR:
            if len(self.engines) >= number and hasattr(self.engines[number - 1], "receive"):
                self.engines[number - 1].ready()
                return self.engines[number - 1]
            await asyncio.sleep(0.01)
        raise AssertionError(f"there never was an engine {number}: {self.lines}")

    def ask(self) -> asyncio.Task[list[int]]:
        async def answer() -> list[int]:
            submit = Submit(0, [1], GREEDY, 5)
            return [token async for found in self.calls.outputs(submit) for output in found for token in output.token_ids]

        return asyncio.get_running_loop().create_task(answer())

    async def submitted(self, engine: ToldEngine) -> None:
        while not engine.submits:
            await asyncio.sleep(0.001)


Test = Callable[[Stage], Coroutine[Any, Any, None]]


def staged(max_crashes: int = 0) -> Callable[[Test], Callable[[pytest.MonkeyPatch], None]]:
    def decorated(test: Test) -> Callable[[pytest.MonkeyPatch], None]:
        async def play() -> None:
            stage = Stage(max_crashes)
            try:
                await test(stage)
            finally:
                await stage.calls.close()
                await stage.fleet.close()

        def run(monkeypatch: pytest.MonkeyPatch) -> None:
            monkeypatch.setattr(root_module, "time", owned_time.clock())
            owned_time.run(asyncio.wait_for(play(), HOUR))

        run.__name__ = test.__name__
        return run

    return decorated


@staged()
async def test_what_an_engine_says_goes_through_with_where_it_is(stage: Stage) -> None:
    asking = stage.ask()
    engine = await stage.engine(1)
    await stage.submitted(engine)
    engine.answer()
    assert await asking == [7]
    details = (await stage.calls.info()).details
    assert (details["nodes"], details["epoch"], details["layout"]) == ("root", "1", "one device")
    assert [node.name for node in stage.fleet.nodes] == ["root"] and stage.fleet.rank_machines == ("root",)


@staged(max_crashes=1)
async def test_an_engine_that_crashes_is_followed_once(stage: Stage) -> None:
    asking = stage.ask()
    for number in (1, 2):
        engine = await stage.engine(number)
        await stage.submitted(engine)
        engine.lost(Unavailable("it was ended by SIGSEGV"))
    with pytest.raises(Broken, match="SIGSEGV"):
        await asking
    assert len(stage.engines) == 2 and not stage.calls.is_alive


@staged()
async def test_an_engine_that_lost_its_group_is_not_to_blame(stage: Stage) -> None:
    """It says so and ends; for a while it is waited for somebody to turn out to be gone."""
    asking = stage.ask()
    engine = await stage.engine(1)
    await stage.submitted(engine)
    engine.receive(EngineFailed("GroupLost", "rank 0 lost another"))
    engine.lost(Unavailable("its process ended"))
    await asyncio.sleep(events.SUSPECT_SECONDS - 0.1)
    assert len(stage.engines) == 1
    engine = await stage.engine(2)
    await stage.submitted(engine)
    engine.answer()
    assert await asking == [7]
    assert any("rank 0 lost another" in line for line in stage.lines)


@staged(max_crashes=1)
async def test_one_that_is_given_up_is_followed_by_another(stage: Stage) -> None:
    """As a supervisor does with an engine that says nothing."""
    asking = stage.ask()
    stuck = await stage.engine(1)
    await stage.submitted(stuck)
    await stage.calls.restart()
    assert stuck.is_killed
    engine = await stage.engine(2)
    await stage.submitted(engine)
    engine.answer()
    assert await asking == [7]


@staged()
async def test_what_cannot_be_planned_or_loaded_is_said_as_it_is(stage: Stage) -> None:
    stage.refusal = DoesNotFit("12 bytes are missing", 12)
    with pytest.raises(DoesNotFit, match="12 bytes") as found:
        await stage.ask()
    assert found.value.short_bytes == 12
    stage.refusal = None
    asking = stage.ask()
    while not stage.engines:
        await asyncio.sleep(0.01)
    stage.engines[0].receive(EngineFailed("BadCheckpoint", "the file is damaged"))
    with pytest.raises(Error, match="the file is damaged"):
        await asking
    asking = stage.ask()
    engine = await stage.engine(2)
    await stage.submitted(engine)
    engine.answer()
    assert await asking == [7]


@staged()
async def test_what_does_not_fit_on_who_is_left_fails_who_waits_and_the_next_who_asks_is_served_where_it_fits(
    stage: Stage,
) -> None:
    asking = stage.ask()
    engine = await stage.engine(1)
    await stage.submitted(engine)
    stage.refusal = DoesNotFit("7 bytes are missing", 7)
    engine.receive(EngineFailed("GroupLost", "rank 0 lost another"))
    with pytest.raises(DoesNotFit, match="7 bytes"):
        await asking
    assert not stage.calls.is_alive
    stage.refusal = None
    asking = stage.ask()
    engine = await stage.engine(2)
    await stage.submitted(engine)
    engine.answer()
    assert await asking == [7]


@staged()
async def test_closing_while_it_begins_leaves_nothing(stage: Stage) -> None:
    asking = stage.ask()
    await asyncio.sleep(0.01)
    await stage.calls.close()
    await stage.fleet.close()
    await stage.fleet.close()
    with pytest.raises(Unavailable, match="closed"):
        await asking
