"""What is kept of answers, who is suspect, and whose turn and whose fault it is: with lanes that are told what to answer."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from waiting import HUNG_SECONDS
from windlass.core.client import Broken, Busy, Slowed
from windlass.errors import BadInput, MissingExtra
from windlass.model.text.grammar import compile as compiling
from windlass.model.text.isolated import lanes, limits, process
from windlass.model.text.isolated import pool as pools
from windlass.model.text.isolated.jobs import Answer, Compilation, Rendering, done
from windlass.model.text.isolated.pool import IsolatedPool
from windlass.model.text.isolated.process import Vocabulary

pytestmark = pytest.mark.pure

FINE = Answer(cpu_seconds=0.001)


def over(test: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(HUNG_SECONDS):
            await test

    asyncio.run(limited())


class Told:
    """A lane."""

    def __init__(self, answer: Callable[[str], Any]) -> None:
        self.answer, self.groups = answer, list[str]()

    async def run(self, job: object, group: str) -> Answer | None:
        self.groups.append(group)
        found = self.answer(group)
        if isinstance(found, Exception):
            raise found
        return await found if isinstance(found, asyncio.Future) else found


class Pool:
    """With a clock, and lanes that answer as `quick` and `slow` say."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pool = IsolatedPool(lambda: Vocabulary("", []), clock=lambda: self.now)
        self.quick_answer: Any = FINE
        self.slow_answer: Any = FINE
        self.quick, self.slow = Told(lambda _: self.quick_answer), Told(lambda _: self.slow_answer)
        self.pool._quick, self.pool._slow = self.quick, self.slow  # type: ignore[assignment]

    @property
    def num_asked(self) -> tuple[int, int]:
        return len(self.quick.groups), len(self.slow.groups)


def test_what_could_not_be_compiled_in_time_is_tried_again_after_a_while() -> None:
    async def run() -> None:
        one = Pool()
        one.quick_answer = one.slow_answer = None
        for _ in range(2):
            with pytest.raises(BadInput, match="needs more than"):
                await one.pool.check_grammar("g", "a/")
        assert one.num_asked == (1, 1)
        one.now += pools.REMEMBERED_SECONDS
        one.quick_answer = FINE
        await one.pool.check_grammar("g", "a/")
        one.now += 1e9
        await one.pool.check_grammar("g", "b/")
        assert one.num_asked == (2, 1), "what can be compiled is known for ever"

    over(run())


def test_who_asks_while_nobody_has_time_is_not_noted() -> None:
    async def run() -> None:
        one = Pool()
        one.quick_answer = Busy("too much to do")
        with pytest.raises(Busy):
            await one.pool.check_grammar("g", "a/")
        one.quick_answer = FINE
        await one.pool.check_grammar("g", "a/")
        assert one.num_asked == (2, 0)

    over(run())


def test_a_suspect_that_is_quick_goes_back_to_the_quick_lane() -> None:
    async def run() -> None:
        one = Pool()
        one.quick_answer = None
        one.slow_answer = Answer(cpu_seconds=pools.QUICK_SECONDS * 2)
        for _ in range(3):
            await one.pool.render("t", {}, "a/")
        assert one.num_asked == (1, 3), "it stays in the slow one as long as it is slow"
        one.slow_answer = FINE
        await one.pool.render("t", {}, "a/")
        one.quick_answer = FINE
        await one.pool.render("t", {}, "a/")
        assert one.num_asked == (2, 4)

    over(run())


def test_a_group_does_not_wait_for_the_turn_of_another_nor_pay_for_it() -> None:
    async def run() -> None:
        one = Pool()
        never: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        one.quick.answer = lambda group: never if group == "a" else FINE
        waits = asyncio.create_task(one.pool.check_grammar("g", "a/"))
        await asyncio.sleep(0)
        await one.pool.check_grammar("g", "b/")
        for _ in range(pools.MOST_ENDED + 1):
            one.pool._by_grammars.note("bad")
        refused = asyncio.create_task(one.pool.check_grammar("h", "bad/"))
        follows = asyncio.create_task(one.pool.check_grammar("h", "good/"))
        with pytest.raises(Slowed):
            await refused
        await follows
        never.set_result(FINE)
        await waits

    over(run())


def test_who_comes_as_the_last_one_leaves_begins_anew() -> None:
    async def run() -> None:
        one = Pool()
        never: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        one.quick_answer = never
        first = asyncio.create_task(one.pool.check_grammar("g", "a/"))
        while not one.quick.groups:
            await asyncio.sleep(0)
        one.quick_answer = FINE
        first.cancel()
        await asyncio.sleep(0)
        await one.pool.check_grammar("g", "a/")
        with pytest.raises(asyncio.CancelledError):
            await first
        assert one.pool._compiling == {}

    over(run())


def test_the_vocabulary_is_made_once_and_not_on_the_event_loop() -> None:
    threads: list[threading.Thread] = []

    def made() -> Vocabulary:
        threads.append(threading.current_thread())
        return Vocabulary("", [])

    async def run() -> None:
        pool = IsolatedPool(made)
        first, second = await asyncio.gather(pool._grammar_workers(), pool._grammar_workers())
        assert first is second

    over(run())
    assert len(threads) == 1 and threads[0] is not threading.main_thread()


def test_all_chats_that_were_admitted_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MAX_OWN_WAITING", 1)
    monkeypatch.setattr(lanes, "MAX_WAITING", 1)

    class Quick:
        has_ended = False

        async def ask(self, task: object) -> Answer:
            await asyncio.sleep(0)
            return FINE

        def close(self) -> None: ...

    async def run() -> None:
        pool = IsolatedPool()
        monkeypatch.setattr(pool, "_worker", lambda *_, **__: Quick())
        assert await asyncio.gather(*(pool.render("t", {}, "a/") for _ in range(20))) == [""] * 20

    over(run())


# --- in a worker


@pytest.mark.parametrize(
    "error", [Broken("another version of llguidance is needed"), MissingExtra("llguidance", "serve", "constrained output")]
)
def test_why_there_is_no_tokenizer_is_told_and_is_nobodys_fault(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise error

    monkeypatch.setattr(compiling, "grammar_tokenizer", none)
    reader = os.memfd_create("tokenizer")
    os.write(reader, pools.msgspec.msgpack.encode(Vocabulary("", [])))
    before = limits.resource.getrlimit(limits.resource.RLIMIT_AS)
    found = process._tokenizer(reader)
    assert limits.resource.getrlimit(limits.resource.RLIMIT_AS) == before
    assert found is error
    answer = done(Compilation(grammar="{}"), error)  # type: ignore[arg-type]
    assert answer.is_foreign and answer.error == str(error)


def test_a_chat_that_cannot_be_rendered_for_want_of_a_package_is_nobodys_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **__: Any) -> None:
        raise MissingExtra("jinja2", "run", "rendering a chat")

    monkeypatch.setattr("windlass.model.text.isolated.jobs.render_chat", none)
    assert done(Rendering(template="", values={}), None).is_foreign


@pytest.mark.parametrize(
    ("hard", "wanted", "set_to"),
    [(limits.resource.RLIM_INFINITY, 100, 100), (50, 100, 50), (200, 100, 100)],
)
def test_a_limit_that_was_set_from_outside_stays(hard: int, wanted: int, set_to: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only root may raise it."""
    done: list[tuple[int, int]] = []
    monkeypatch.setattr(limits.resource, "getrlimit", lambda _: (hard, hard))
    monkeypatch.setattr(limits.resource, "setrlimit", lambda _, values: done.append(values))
    limits.limit_memory(wanted)
    assert done == [(set_to, hard)]
