"""Engines that crash, hang and refuse to start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from fake import FakeClient
from serving import HELLO, Lines, in_process

import owned_time
from windlass.core.client import Unavailable
from windlass.runtime.fleet.root.root import NodeStatus
from windlass.tasks.serve.backend import supervisor
from windlass.tasks.serve.backend.supervisor import (
    MAX_BACKOFF_SECONDS,
    MAX_FAILED_STARTS,
    Supervisor,
    backoff_seconds,
    state_after,
)

pytestmark = pytest.mark.pure
CHAT = "/v1/chat/completions"
HOUR = 3600.0


@pytest.mark.parametrize(("breakdowns", "seconds"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 4), (6, 16), (7, 30), (60, 30)])
def test_the_more_often_it_breaks_the_longer_the_pause(breakdowns: int, seconds: float) -> None:
    assert backoff_seconds(breakdowns) == seconds <= MAX_BACKOFF_SECONDS


@pytest.mark.parametrize(
    ("in_a_row", "was_ready", "state"),
    [
        (1, False, "loading"),
        (1, True, "restarting"),
        (4, True, "restarting"),
        (MAX_FAILED_STARTS, True, "dead"),
        (MAX_FAILED_STARTS, False, "dead"),
    ],
)
def test_what_it_is_called_then(in_a_row: int, was_ready: bool, state: str) -> None:
    assert state_after(in_a_row, was_ready) == state


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is waited for here is waited for in the loop's own time."""
    monkeypatch.setattr(supervisor, "time", owned_time.clock())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(HOUR):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
def test_a_crash_in_the_middle_is_told_and_mended(stream: bool) -> None:
    async def ask() -> None:
        client = FakeClient(hold_after=2)
        client.start_seconds = 30.0
        async with in_process(client) as (http, service):
            asking = asyncio.create_task(http.post(CHAT, json={**HELLO, "stream": stream}))
            await until(lambda: client.running == 1)
            await asyncio.sleep(0.1)  # what was said is on its way
            client.crash()
            answer = await asking
            assert "/secret" not in answer.text and "engine_unavailable" in answer.text
            assert answer.status_code == (200 if stream else 503)
            meanwhile = await http.post(CHAT, json=HELLO)
            assert meanwhile.status_code == 503 and int(meanwhile.headers["retry-after"]) >= 1
            assert (await http.get("/health")).status_code == 503 and (await http.get("/ready")).status_code == 503
            await until(lambda: service.supervisor.is_ready)
            client.release()
            assert (await http.post(CHAT, json=HELLO)).status_code == 200
            assert (await http.get("/health")).json() == {"status": "ok", "state": "ready"}
            assert service.supervisor.restarts == 1 and len(service.in_flight) == 0
            assert not any("/secret" in line for line in service.log.lines)  # type: ignore[attr-defined]

    owned_time.run(ask())


def test_a_crash_while_nobody_asks_is_noticed() -> None:
    async def ask() -> None:
        client = FakeClient()
        async with in_process(client) as (http, service):
            client.crash()
            assert (await http.post(CHAT, json=HELLO)).status_code == 503
            await until(lambda: client.starts == 2 and service.supervisor.is_ready)
            assert (await http.post(CHAT, json=HELLO)).status_code == 200

    owned_time.run(ask())


def test_requests_do_not_start_an_engine_that_is_given_a_pause() -> None:
    async def ask() -> None:
        client = FakeClient()
        async with in_process(client) as (http, service):
            for _ in range(2):  # the second one within a minute is followed by a pause
                await until(lambda: service.supervisor.is_ready)
                client.crash()
                service.supervisor.check_now()
                await until(lambda: service.supervisor.state == "restarting" or client.is_alive)
            starts = client.starts
            answers = [await http.post(CHAT, json=HELLO) for _ in range(20)]
            assert {answer.status_code for answer in answers} == {503}
            assert client.starts == starts
            await until(lambda: service.supervisor.is_ready)
            assert client.starts == starts + 1

    owned_time.run(ask())


def test_an_engine_that_will_not_start_is_called_dead_and_still_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.tasks.serve.backend.supervisor.backoff_seconds", lambda _: 0.01)

    async def ask() -> None:
        client = FakeClient()
        async with in_process(client) as (http, service):
            client.refuse_starts = MAX_FAILED_STARTS + 20
            client.crash()
            service.supervisor.check_now()
            await until(lambda: service.supervisor.state == "dead")
            health = await http.get("/health")
            assert health.status_code == 503 and health.json()["state"] == "dead"
            await until(lambda: service.supervisor.is_ready)
            assert (await http.post(CHAT, json=HELLO)).status_code == 200

    owned_time.run(ask())


def test_a_full_disk_while_it_is_started_anew_is_one_more_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.tasks.serve.backend.supervisor.backoff_seconds", lambda _: 0.01)

    async def ask() -> None:
        client = FakeClient()
        client.start_error = OSError(28, "No space left on device")
        async with in_process(client) as (http, service):
            client.refuse_starts = 2
            client.crash()
            service.supervisor.check_now()
            await until(lambda: service.supervisor.is_ready and client.starts == 2)
            assert service.supervisor.restarts == 3 and (await http.post(CHAT, json=HELLO)).status_code == 200

    owned_time.run(ask())


def test_the_first_start_that_fails_is_raised() -> None:
    async def ask() -> None:
        client = FakeClient()
        client.is_alive, client.refuse_starts = False, 1
        supervisor = Supervisor(client, stuck_seconds=10)
        running = asyncio.create_task(supervisor.run())
        with pytest.raises(Unavailable):
            await supervisor.wait_ready()
        running.cancel()

    owned_time.run(ask())


def test_an_engine_that_says_nothing_is_given_up_for_another() -> None:
    async def ask() -> None:
        client = FakeClient(hold_after=2)
        async with in_process(client, stuck_seconds=5.0) as (http, service):
            asking = asyncio.create_task(http.post(CHAT, json=HELLO))
            await until(lambda: client.running == 1)
            client.is_stuck = True
            assert (await asking).status_code == 503
            await until(lambda: service.supervisor.is_ready)
            assert client.restarted == 1 and service.supervisor.restarts == 1
            assert any("engine failed" in line for line in service.log.lines)  # type: ignore[attr-defined]

    owned_time.run(ask())


def test_an_engine_that_moves_is_neither_gone_nor_stuck() -> None:
    """However long it takes: what is asked waits for it."""

    async def ask() -> None:
        client: Any = FakeClient(hold_after=2)
        async with in_process(client, stuck_seconds=5.0) as (http, service):
            client.is_moving = client.is_stuck = True
            asking = asyncio.create_task(http.post(CHAT, json=HELLO))
            await asyncio.sleep(60.0)
            assert service.supervisor.is_ready and service.supervisor.restarts == 0 and client.restarted == 0
            client.release()
            assert (await asking).status_code == 200

    owned_time.run(ask())


def test_the_machines_of_a_client_are_shown() -> None:
    async def ask() -> None:
        client: Any = FakeClient()
        client.nodes = (NodeStatus("root", "", "running", 2 / 3), NodeStatus("a:9998", "10.0.0.7", "lost", 0.0))
        async with in_process(client) as (http, _):
            found = (await http.get("/windlass/status")).json()["workers"]
            assert [(one["name"], one["state"], one["share"]) for one in found] == [
                ("root", "running", 0.6667),
                ("a:9998", "lost", 0.0),
            ]

    owned_time.run(ask())


def test_loading_takes_as_long_as_it_takes() -> None:
    async def ask() -> None:
        client: Any = FakeClient()
        client.is_alive, client.start_seconds = False, HOUR
        supervisor = Supervisor(client, stuck_seconds=5.0, probe_seconds=1.0)
        running = asyncio.create_task(supervisor.run())
        await supervisor.wait_ready()
        assert supervisor.restarts == 0
        running.cancel()

    owned_time.run(ask())


def test_before_the_model_is_there_requests_are_told_so() -> None:
    async def ask() -> None:
        import httpx

        from windlass.tasks.serve.app import make_app, service_of
        from windlass.tasks.serve.settings import ServerSettings

        client = FakeClient()
        client.is_alive, client.start_seconds = False, 30.0
        app = make_app(client, ServerSettings(model="named"), log=Lines())
        transport = httpx.ASGITransport(app)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            answer = await http.post(CHAT, json=HELLO)
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "loading"
            status = (await http.get("/windlass/status")).json()
            assert status["state"] == "loading" and status["model"] == "named"
            assert (await http.get("/metrics")).status_code == 200 and (await http.get("/v1/models")).status_code == 503
            await service_of(app).supervisor.wait_ready()
            assert (await http.get("/v1/models")).json()["data"][0]["id"] == "named"

    owned_time.run(ask())
