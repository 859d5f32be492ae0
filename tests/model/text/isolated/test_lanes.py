"""Who is next, with workers that answer when they are told to."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from windlass.core.client import Busy
from windlass.model.text.isolated import lanes
from windlass.model.text.isolated.jobs import Answer, Compilation, Rendering, Task
from windlass.model.text.isolated.lanes import Job, Lane
from windlass.model.text.isolated.workers import Lost

pytestmark = pytest.mark.pure


class Told:
    """A worker that is told what to answer."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answer: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
        self.is_closed = False
        self.has_ended = False

    async def ask(self, task: Task) -> Answer | None:
        self.asked.append(task.job.grammar if isinstance(task.job, Compilation) else task.job.template)
        return await self.answer

    def tell(self, answer: Answer | None) -> None:
        told, self.answer = self.answer, asyncio.get_running_loop().create_future()
        told.set_result(answer)

    def lose(self) -> None:
        self.answer.set_exception(Lost("it was ended"))

    def close(self) -> None:
        self.is_closed = True


class OneWorker:
    """A lane of one worker at a time, and the order in which jobs came to it."""

    def __init__(self, is_limited: bool = True) -> None:
        self.workers: list[Told] = []
        self.lane = Lane(self._start, 1, 1.0, is_limited=is_limited)

    def _start(self, kind: type[Job]) -> Told:
        self.workers.append(Told())
        return self.workers[-1]

    def ask(self, name: str, group: str = "") -> asyncio.Task[Answer | None]:
        return asyncio.create_task(self.lane.run(Compilation(grammar=name), group))

    @property
    def order(self) -> list[str]:
        return [name for worker in self.workers for name in worker.asked]


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def over(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


def test_groups_take_turns_and_each_in_its_order() -> None:
    async def run() -> None:
        one = OneWorker()
        jobs = [one.ask(name, name[0]) for name in ("a1", "a2", "a3", "b1", "c1", "b2")]
        for _ in jobs:
            await settled()
            one.workers[0].tell(Answer(text="fine"))
        assert [answer and answer.text for answer in await asyncio.gather(*jobs)] == ["fine"] * 6
        assert one.order == ["a1", "a2", "b1", "c1", "a3", "b2"] and len(one.workers) == 1

    over(run())


@pytest.mark.parametrize("answer", [None, Answer(is_last=True)])
def test_a_worker_that_ended_or_ends_is_replaced(answer: Answer | None) -> None:
    async def run() -> None:
        one = OneWorker()
        first, second = one.ask("1"), one.ask("2")
        await settled()
        one.workers[0].tell(answer)
        assert await first == answer
        await settled()
        assert one.workers[0].is_closed and one.workers[1].asked == ["2"]
        one.workers[1].tell(Answer())
        await second

    over(run())


def test_who_leaves_takes_the_work_along_and_the_next_begins() -> None:
    async def run() -> None:
        one = OneWorker()
        jobs = [one.ask(name) for name in "123"]
        await settled()
        jobs[1].cancel()  # waiting
        jobs[0].cancel()  # being worked at
        await settled()
        assert one.workers[0].is_closed and one.order == ["1", "3"]
        one.workers[1].tell(Answer(text="fine"))
        assert await jobs[2] == Answer(text="fine")

    over(run())


def test_one_that_answers_no_more_is_ended_and_its_job_is_not_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MOST_SECONDS", 0.0)

    async def run() -> None:
        one = OneWorker()
        with pytest.raises(Busy, match="not ready"):
            await one.ask("1")
        assert one.workers[0].is_closed

    over(run())


def test_what_was_lost_is_asked_of_another_worker_once() -> None:
    async def run() -> None:
        one = OneWorker()
        first, second = one.ask("1"), one.ask("2")
        await settled()
        one.workers[0].lose()
        await settled()
        one.workers[1].tell(Answer(text="fine"))
        assert await first == Answer(text="fine")
        await settled()
        one.workers[1].lose()
        await settled()
        one.workers[2].lose()
        with pytest.raises(Busy):
            await second
        assert one.order == ["1", "1", "2", "2"] and all(worker.is_closed for worker in one.workers)

    over(run())


def test_waiting_is_limited_for_each_group_and_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MAX_OWN_WAITING", 2)
    monkeypatch.setattr(lanes, "MAX_WAITING", 3)

    async def run() -> None:
        one = OneWorker()
        jobs = [one.ask(name, name[0]) for name in ("a1", "a2", "a3", "a4", "b1", "b2")]
        await settled()
        assert [job.done() for job in jobs] == [False, False, False, True, False, True]
        for job in (jobs[3], jobs[5]):
            with pytest.raises(Busy):
                job.result()
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        again = one.ask("c1", "c")
        await settled()
        assert one.order[-1] == "c1", "the lane is free again"
        again.cancel()

    over(run())


def test_where_users_were_admitted_before_all_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MAX_OWN_WAITING", 1)
    monkeypatch.setattr(lanes, "MAX_WAITING", 1)

    async def run() -> None:
        one = OneWorker(is_limited=False)
        jobs = [one.ask(str(number)) for number in range(5)]
        for _ in jobs:
            await settled()
            one.workers[0].tell(Answer())
        assert await asyncio.gather(*jobs) == [Answer()] * 5

    over(run())


def test_a_group_that_is_refused_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had no place among those that wait: with one, the turn would go to nobody."""
    monkeypatch.setattr(lanes, "MAX_WAITING", 1)

    async def run() -> None:
        one = OneWorker()
        first, waits, refused = one.ask("a1", "a"), one.ask("a2", "a"), one.ask("b1", "b")
        with pytest.raises(Busy):
            await refused
        for job in (first, waits):
            one.workers[0].tell(Answer())
            await job
            await settled()
        again = one.ask("c1", "c")
        await settled()
        assert one.order == ["a1", "a2", "c1"]
        again.cancel()

    over(run())


def test_who_has_left_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MAX_OWN_WAITING", 2)
    monkeypatch.setattr(lanes, "MAX_WAITING", 2)

    async def run() -> None:
        one = OneWorker()
        working = one.ask("0")
        await settled()
        for _ in range(5):
            gone = [one.ask("x"), one.ask("y")]
            await settled()
            for job in gone:
                job.cancel()
            await asyncio.wait(gone)
        stays = one.ask("1")
        await settled()
        assert not stays.done()
        one.workers[0].tell(Answer())
        await settled()
        one.workers[0].tell(Answer())
        await asyncio.gather(working, stays)
        assert one.order == ["0", "1"]

    over(run())


def test_workers_that_know_no_grammars_are_not_asked_for_them() -> None:
    async def run() -> None:
        one = OneWorker()
        for job in (Rendering(template="t", values={}), Compilation(grammar="g"), Rendering(template="u", values={})):
            asked = asyncio.create_task(one.lane.run(job, ""))
            await settled()
            one.workers[-1 if isinstance(job, Compilation) else 0].tell(Answer())
            await asked
        assert [worker.asked for worker in one.workers] == [["t", "u"], ["g"]]

    over(run())


def test_after_its_end_no_worker_is_kept() -> None:
    async def run() -> None:
        one = OneWorker()
        first = one.ask("1")
        await settled()
        one.lane.close()
        one.workers[0].tell(Answer())
        await first
        assert one.workers[0].is_closed

    over(run())
