"""Users in a closed loop and Poisson arrivals, on a clock of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

import owned_time
from windlass.tasks.bench.served.arrivals import schedule
from windlass.tasks.bench.served.load import Load
from windlass.tasks.bench.served.record import RequestRecord
from windlass.tasks.bench.served.runner import HOPELESS, REFUSED_SECONDS, Runner

pytestmark = pytest.mark.pure


class Server:
    """Answers after so many seconds; fails where `fails` says so."""

    def __init__(self, seconds: Callable[[int], float], fails: Callable[[int], bool] = lambda _: False) -> None:
        self._seconds, self._fails = seconds, fails
        self.running = 0
        self.numbers: list[int] = []
        self.dues: list[float] = []
        self.seen: list[tuple[float, int]] = []
        """When a request came, and how many then ran."""

    async def send(self, number: int, due: float) -> RequestRecord:
        now = asyncio.get_running_loop().time
        self.running += 1
        self.numbers.append(number)
        self.dues.append(due)
        self.seen.append((now(), self.running))
        if not self._fails(number):
            await asyncio.sleep(self._seconds(number))
        self.running -= 1
        error = "429 full" if self._fails(number) else ""
        return RequestRecord(sent=due, ended=now(), times=() if error else (now(),), error=error)


def ran(server: Server, load: Load, seed: str = "0") -> tuple[RequestRecord, ...]:
    async def run() -> tuple[RequestRecord, ...]:
        return await Runner(load, server.send, asyncio.get_running_loop().time, seed).run()

    return owned_time.run(run())


def closed(at_once: int, requests: int | None = None, seconds: float | None = None) -> Load:
    return Load(at_once=at_once, prompt_tokens=1, new_tokens=2, requests=requests, seconds=seconds)


def test_all_users_are_busy_until_no_request_is_left() -> None:
    server = Server(lambda number: 1.0 + number % 3)
    records = ran(server, closed(4, requests=22))
    assert sorted(server.numbers) == list(range(22)) and len(records) == 22
    assert [running for _, running in server.seen] == [1, 2, 3, *[4] * 19], "a user asks again as soon as it is answered"


def test_fewer_requests_than_users() -> None:
    assert len(ran(Server(lambda _: 1.0), closed(8, requests=3))) == 3


def test_for_a_time() -> None:
    """Nobody begins after it; what was begun is waited for."""
    records = ran(Server(lambda _: 4.0), closed(2, seconds=10.0))
    assert sorted(record.sent for record in records) == [0, 0, 4, 4, 8, 8] and max(one.ended for one in records) == 12


def test_a_user_that_is_refused_waits_a_little() -> None:
    server = Server(lambda _: 10.0, fails=lambda number: number == 1)
    records = ran(server, closed(2, requests=3))
    assert sorted(server.dues) == [0, 0, REFUSED_SECONDS] and sum(bool(record.error) for record in records) == 1


@pytest.mark.parametrize("load", [closed(1, requests=1000), closed(20, requests=1000), closed(20, seconds=1e6)])
def test_a_load_without_a_single_answer_is_given_up(load: Load) -> None:
    records = ran(Server(lambda _: 1.0, fails=lambda _: True), load)
    assert max(HOPELESS, load.at_once) <= len(records) <= HOPELESS + load.at_once and all(record.error for record in records)


def test_one_answer_is_hope() -> None:
    assert len(ran(Server(lambda _: 1.0, fails=lambda number: number != 3), closed(2, requests=60))) == 60


def test_poisson_arrivals_come_when_they_are_due() -> None:
    """However long answers take."""
    server, load = Server(lambda _: 1e4), Load(rate=3.0, prompt_tokens=1, new_tokens=2, seconds=50.0)
    records = ran(server, load, seed="7")
    expected = list(schedule(3.0, "7", None, 50.0))
    assert server.dues == pytest.approx(expected) and [now for now, _ in server.seen] == pytest.approx(expected)
    assert len(records) == len(expected) > 100 and server.seen[-1][1] == len(expected)


def test_poisson_arrivals_of_a_number_and_of_a_server_that_refuses_all() -> None:
    load = Load(rate=3.0, prompt_tokens=1, new_tokens=2, requests=40)
    assert len(ran(Server(lambda _: 0.1), load)) == 40
    assert len(ran(Server(lambda _: 0.1, fails=lambda _: True), load)) == HOPELESS


def test_progress() -> None:
    told: list[int] = []

    async def run() -> None:
        server = Server(lambda _: 1.0)
        await Runner(closed(3, requests=7), server.send, asyncio.get_running_loop().time, done=told.append).run()

    owned_time.run(run())
    assert told == list(range(1, 8))
