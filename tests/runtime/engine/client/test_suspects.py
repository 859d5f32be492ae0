"""Who is blamed for the end of an engine: only one that was alone with it, whoever comes, leaves or kills meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.client import Broken, Slowed, Unavailable
from windlass.core.request import ADDRESS, GREEDY, Info, Timings, Usage
from windlass.runtime.engine.client import requests
from windlass.runtime.engine.client.replay import KILLS_ALONE, MAX_CRASHES, EngineKilled, EngineMoved
from windlass.runtime.engine.client.requests import EngineRequests
from windlass.runtime.engine.client.transport import Lost, Receive
from windlass.runtime.engine.protocol import Cancel, Command, EngineReady, Finish, SequenceOutput, StepOutputs, Submit

pytestmark = pytest.mark.pure

INFO = Info(model="told", context_tokens=256, vocab_size=64, max_sequences=64)
FINISH = Finish(
    "length", Usage(prompt_tokens=1, completion_tokens=1), Timings(queue_seconds=0, prefill_seconds=0, decode_seconds=0)
)
NEVER = 10_000
CRASH = Unavailable("the engine was ended by SIGSEGV")


class Asked(NamedTuple):
    """A request that ends an engine which computes its so many-th token, or none. It comes, and leaves, after so many steps."""

    fatal: int = NEVER
    tokens: int = 12
    priority: int = 0
    comes: int = 0
    leaves: int = NEVER

    @property
    def is_poison(self) -> bool:
        return self.fatal < self.tokens

    def submit(self, number: int, owner: str = "") -> Submit:
        return Submit(0, [number, self.fatal], GREEDY, self.tokens, priority=self.priority, owner=owner)


class Engine:
    """One token for everybody in each step; it computes for who has left until it comes to the Cancel."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._commands: list[Command] = []
        self.running: dict[int, tuple[Submit, int]] = {}
        self.submits: list[Submit] = []
        self.most_running = 0
        self.error: Unavailable | None = None
        self._task: asyncio.Task[None] | None = None

    def open(self, receive: Receive, lost: Lost) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(receive, lost))

    async def _run(self, receive: Receive, lost: Lost) -> None:
        await asyncio.sleep(0)
        await self._engines.may_start.wait()
        if self.error is None:
            receive(EngineReady(INFO))
        while self.error is None:
            await asyncio.sleep(0)
            await self._engines.may_step.wait()
            self._engines.steps += 1
            self._step(receive)
        lost(self.error)

    def _step(self, receive: Receive) -> None:
        commands, self._commands = self._commands, []
        for command in commands:
            if isinstance(command, Submit):
                self.running[command.id] = command, len(command.generated)
            elif isinstance(command, Cancel):
                self.running.pop(command.id, None)
        self.most_running = max(self.most_running, len(self.running))
        if any(done >= submit.token_ids[1] for submit, done in self.running.values()):
            self.error = self.error or CRASH
        if self.error is not None:
            return
        outputs: list[SequenceOutput] = []
        for number, (submit, done) in list(self.running.items()):
            is_last = done + 1 >= (submit.max_tokens or 0)
            outputs.append(SequenceOutput(number, [done], finish=FINISH if is_last else None))
            self.running[number] = submit, done + 1
            if is_last:
                del self.running[number]
        if outputs:
            receive(StepOutputs(outputs))

    def send(self, command: Command) -> None:
        self._commands.append(command)
        if isinstance(command, Submit):
            self.submits.append(command)

    def kill(self) -> None:
        self.error = self.error or EngineKilled("it was ended by SIGKILL")

    async def close(self) -> None:
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()


class Engines:
    def __init__(self) -> None:
        self.all: list[Engine] = []
        self.steps = 0
        self.may_start, self.may_step = asyncio.Event(), asyncio.Event()
        self.may_start.set()
        self.may_step.set()
        self.calls = EngineRequests(self._make, max_crashes=MAX_CRASHES)

    def _make(self) -> Engine:
        self.all.append(Engine(self))
        return self.all[-1]

    async def answer(self, submit: Submit) -> int:
        """Its number of tokens."""
        return sum([len(one.token_ids) async for outputs in self.calls.outputs(submit) for one in outputs])

    def ask(self, submit: Submit) -> asyncio.Task[int]:
        return asyncio.get_running_loop().create_task(self.answer(submit))

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(100_000):
            if condition():
                return
            await asyncio.sleep(0)
        raise AssertionError("hung")


def over(test: Callable[[Engines], Any]) -> None:
    async def run() -> None:
        engines = Engines()
        try:
            async with asyncio.timeout(500):
                await test(engines)
        finally:
            await engines.calls.close()

    asyncio.run(run())


async def play(engines: Engines, asked: Sequence[Asked], kills: Sequence[int]) -> list[Any]:
    """What becomes of each; those who left: CancelledError."""

    async def one(number: int, entry: Asked) -> int:
        while ticks[0] < entry.comes:
            await asyncio.sleep(0)
        return await engines.answer(entry.submit(number))

    ticks, left = [0], sorted(kills)
    tasks = [asyncio.get_running_loop().create_task(one(number, entry)) for number, entry in enumerate(asked)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        ticks[0] += 1
        if left and ticks[0] >= left[0]:
            left.pop(0)
            if engines.all:
                engines.all[-1].kill()
        for task, entry in zip(tasks, asked, strict=True):
            if ticks[0] >= entry.leaves:
                task.cancel()
        assert ticks[0] < 100_000, "hung"
    return await asyncio.gather(*tasks, return_exceptions=True)


def asks(
    fatal: st.SearchStrategy[int], tokens: st.SearchStrategy[int], leaves: st.SearchStrategy[int]
) -> st.SearchStrategy[Asked]:
    return st.builds(Asked, fatal=fatal, tokens=tokens, priority=st.integers(0, 3), comes=st.integers(0, 80), leaves=leaves)


never = st.just(NEVER)
sound = asks(never, st.integers(1, 30), never)
fatal = asks(st.integers(0, 12), st.just(30), never)
leaving = asks(st.sampled_from([0, 3, 8, NEVER]), st.just(30), st.integers(1, 120))


@given(many=st.lists(sound, max_size=6), poisons=st.lists(fatal, min_size=1, max_size=3), data=st.data())
def test_the_cause_is_found_and_all_others_are_answered(many: list[Asked], poisons: list[Asked], data: st.DataObject) -> None:
    asked = data.draw(st.permutations([*many, *poisons]))

    async def test(engines: Engines) -> None:
        found = await play(engines, asked, [])
        for entry, one in zip(asked, found, strict=True):
            assert isinstance(one, Broken) if entry.is_poison else one == entry.tokens, (entry, one)

    over(test)


@given(
    many=st.lists(sound, min_size=1, max_size=5),
    others=st.lists(leaving, max_size=3),
    kills=st.lists(st.integers(1, 150), max_size=KILLS_ALONE - 1),
    data=st.data(),
)
def test_nobody_else_is_blamed_whoever_leaves_and_kills(
    many: list[Asked], others: list[Asked], kills: list[int], data: st.DataObject
) -> None:
    asked = data.draw(st.permutations([*many, *others]))

    async def test(engines: Engines) -> None:
        found = await play(engines, asked, kills)
        blamed = [entry for entry, one in zip(asked, found, strict=True) if isinstance(one, Broken)]
        assert all(entry.is_poison for entry in blamed), blamed

    over(test)


def test_nothing_new_runs_beside_one_that_is_tried() -> None:
    async def test(engines: Engines) -> None:
        old = [engines.ask(Asked().submit(number)) for number in range(3)]
        await engines.until(lambda: engines.steps > 2)
        engines.all[0].kill()
        await engines.until(lambda: len(engines.all) == 2 and len(engines.all[1].submits) == 1)
        new = engines.ask(Asked(tokens=1).submit(9))
        await asyncio.gather(new, *old)
        order = [submit.token_ids[0] for submit in engines.all[1].submits]
        assert order == [0, 1, 2, 9]

    over(test)


def test_what_is_urgent_is_tried_first() -> None:
    """A line of a batch would wait for the others to be over, and all that is new for it."""

    async def test(engines: Engines) -> None:
        asked = [engines.ask(Asked(priority=priority).submit(number)) for number, priority in enumerate((5, 0, 3))]
        await engines.until(lambda: engines.steps > 2)
        engines.all[0].kill()
        await asyncio.gather(*asked)
        assert [submit.token_ids[0] for submit in engines.all[1].submits] == [1, 2, 0]

    over(test)


@pytest.mark.parametrize("how", ["killed", "stuck"])
def test_what_was_ended_from_outside_is_no_requests_fault(how: str) -> None:
    async def test(engines: Engines) -> None:
        asked = engines.ask(Asked(tokens=50).submit(1))
        for number in range(1, KILLS_ALONE):
            await engines.until(lambda number=number: len(engines.all) == number and bool(engines.all[-1].running))
            if how == "killed":
                engines.all[-1].kill()
            else:
                await engines.calls.restart()
        assert await asked == 50

    over(test)


def test_one_that_is_alone_whenever_an_engine_is_killed_is_the_cause_after_all() -> None:
    """It takes all memory, say."""

    async def test(engines: Engines) -> None:
        asked = engines.ask(Asked(tokens=50).submit(1))
        for number in range(1, KILLS_ALONE + 1):
            await engines.until(lambda number=number: len(engines.all) == number and bool(engines.all[-1].running))
            engines.all[-1].kill()
        with pytest.raises(Broken):
            await asked

    over(test)


def test_copies_are_refused_with_what_they_are_copies_of() -> None:
    async def test(engines: Engines) -> None:
        copies = [engines.ask(Asked(fatal=3).submit(7, f"{number}/")) for number in range(16)]
        sound = [engines.ask(Asked().submit(number)) for number in range(3)]
        found = await asyncio.gather(*copies, return_exceptions=True)
        assert all(isinstance(one, Broken) for one in found)
        assert await asyncio.gather(*sound) == [12] * 3
        assert len(engines.all) == 3

    over(test)


def test_copies_that_waited_for_the_engine_are_refused_too() -> None:
    async def test(engines: Engines) -> None:
        first = engines.ask(Asked(fatal=3).submit(7))
        await engines.until(lambda: len(engines.all) == 2)
        engines.may_start.clear()
        await engines.until(lambda: not engines.calls.is_alive or first.done())
        late = [engines.ask(Asked(fatal=3).submit(7)) for _ in range(5)]
        for _ in range(20):
            await asyncio.sleep(0)
        engines.may_start.set()
        found = await asyncio.gather(first, *late, return_exceptions=True)
        assert all(isinstance(one, Broken) for one in found)
        assert not any(submit.token_ids == [7, 3] for engine in engines.all[2:] for submit in engine.submits)

    over(test)


@pytest.mark.parametrize(("group", "is_refused"), [("1", True), (f"{ADDRESS}10.0.0.1", False)])
def test_a_key_is_refused_as_a_whole_and_an_address_is_not(group: str, is_refused: bool) -> None:
    """Those who share an address may be strangers."""

    async def test(engines: Engines) -> None:
        for number in range(requests.MOST_CRASHES):
            with pytest.raises(Broken):
                await engines.answer(Asked(fatal=1).submit(number, f"{group}/a"))
        poison = engines.ask(Asked(fatal=1, priority=-1).submit(20, f"{group}/a"))
        running = engines.ask(Asked().submit(21, f"{group}/b"))
        other = engines.ask(Asked().submit(22, "2/c"))
        with pytest.raises(Broken):
            await poison
        for waits in (running, engines.ask(Asked().submit(23, f"{group}/c"))):
            if is_refused:
                with pytest.raises(Slowed):
                    await waits
            else:
                assert await waits == 12
        assert await other == 12

    over(test)


def test_one_that_leaves_while_it_is_tried_leaves_no_blame_behind() -> None:
    """Its engine ends before it has come to the Cancel."""

    async def test(engines: Engines) -> None:
        poison, sound = engines.ask(Asked(fatal=5).submit(0)), engines.ask(Asked(tokens=30).submit(1))
        await engines.until(lambda: len(engines.all) == 2 and bool(engines.all[1].submits))
        engines.may_step.clear()
        poison.cancel()
        await engines.until(lambda: len(engines.all[1].submits) == 2)
        engines.all[1].error = CRASH
        engines.may_step.set()
        assert await sound == 30

    over(test)


def test_an_engine_that_ends_while_it_loads_accuses_nobody() -> None:
    async def test(engines: Engines) -> None:
        asked = [engines.ask(Asked(tokens=6).submit(number)) for number in range(3)]
        await engines.until(lambda: engines.steps > 2)
        engines.may_start.clear()
        engines.all[0].error = EngineMoved("to other hosts")
        await engines.until(lambda: len(engines.all) == 2)
        engines.all[1].error = CRASH
        engines.may_start.set()
        assert await asyncio.gather(*asked) == [6] * 3
        assert engines.all[2].most_running == 3, "together, and not one after another"

    over(test)


def test_one_that_is_beside_many_causes_is_answered() -> None:
    """More of them than crashes of its own would be forgiven."""

    async def test(engines: Engines) -> None:
        long = engines.ask(Asked(tokens=400).submit(1, "1/"))
        for number in range(2, 2 * MAX_CRASHES):
            with pytest.raises(Broken):
                await engines.answer(Asked(fatal=3).submit(number, f"{number}/"))
        assert await long == 400

    over(test)
