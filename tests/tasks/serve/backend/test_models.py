"""Several models in one server: loaded on demand, unloaded for one another, and no request lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake import FakeClient
from serving import HELLO, Lines

from waiting import HUNG_SECONDS
from windlass.errors import DoesNotFit
from windlass.model.formats.disk.atomic import write_atomically
from windlass.tasks.serve.app import OfferedModel, make_app_of_several, service_of
from windlass.tasks.serve.backend import residency
from windlass.tasks.serve.backend.residency import MemoryRoom
from windlass.tasks.serve.service import Service
from windlass.tasks.serve.settings import ServerSettings

pytestmark = pytest.mark.pure
Several = tuple[httpx.AsyncClient, Service, dict[str, "Engine"]]


class Engine(FakeClient):
    """Counts what is loaded at the same time, over all engines of a test."""

    def __init__(self, loaded: list[str], name: str, **options: Any) -> None:
        super().__init__(**options)
        self._loaded, self._name = loaded, name
        self.most = 0
        self.fails: Exception | None = None

    async def info(self) -> Any:
        if self.fails is not None:
            raise self.fails
        if self._name not in self._loaded:
            self._loaded.append(self._name)
            self.most = max(self.most, len(self._loaded))
            await asyncio.sleep(0)
        return await super().info()

    async def unload(self) -> None:
        assert not self.running and not self.waiting, "unloaded while requests run"
        if self._name in self._loaded:
            self._loaded.remove(self._name)


@asynccontextmanager
async def several(
    *names: str, room: MemoryRoom, idle_seconds: float | None = None, engine: dict[str, Any] | None = None, **settings: Any
) -> AsyncGenerator[Several]:
    loaded: list[str] = []
    engines = {name: Engine(loaded, name, **(engine or {})) for name in names}
    offered = [OfferedModel(name=name, client=one) for name, one in engines.items()]
    app = make_app_of_several(
        offered, ServerSettings(**settings), room, idle_seconds=idle_seconds, log=Lines(), write_file=write_atomically
    )
    service = service_of(app)
    async with app.router.lifespan_context(app):
        await service.supervisor.wait_ready()
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=HUNG_SECONDS) as http:
            yield http, service, engines


async def ask(http: httpx.AsyncClient, model: str, **more: Any) -> httpx.Response:
    return await http.post("/v1/chat/completions", json={**HELLO, "model": model, **more})


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "LEAST_TURN_SECONDS", 0.0)
    monkeypatch.setattr(residency, "TURN_PER_LOAD", 0.0)


def test_each_request_is_answered_by_its_model_and_only_one_is_loaded() -> None:
    async def run() -> None:
        async with several("a", "b", room=MemoryRoom(max_models=1)) as (http, service, engines):
            names = ["a", "b", "a", "b", "b", "a"] * 5
            answers = await asyncio.gather(*(ask(http, name) for name in names))
            assert [answer.status_code for answer in answers] == [200] * len(names)
            assert [answer.json()["model"] for answer in answers] == names
            assert [len(engines[name].requests) for name in "ab"] == [15, 15]
            assert max(one.most for one in engines.values()) == 1
            waited = [answer.headers["windlass-waited"] for answer in answers if "windlass-waited" in answer.headers]
            assert waited and all(float(text.split(";")[0]) > 0 for text in waited)
            assert service.models is not None and service.models.swaps >= 1

    asyncio.run(run())


def test_both_stay_loaded_where_both_fit() -> None:
    async def run() -> None:
        async with several("a", "b", room=MemoryRoom(max_models=2)) as (http, service, engines):
            for name in "abab":
                assert (await ask(http, name)).status_code == 200
            states = {card["id"]: card["state"] for card in (await http.get("/v1/models")).json()["data"]}
            assert states == {"a": "loaded", "b": "loaded"}
            assert [one.slot.loads for one in service.group] == [1, 1]
            assert len(engines["a"].requests) == 2

    asyncio.run(run())


def test_requests_of_all_models_are_listed_by_numbers_of_their_own() -> None:
    async def run() -> None:
        held = {"hold_after": 2}
        async with several("a", "b", room=MemoryRoom(max_models=2), engine=held) as (http, service, engines):
            asking = [asyncio.create_task(ask(http, name)) for name in "ab"]
            async with asyncio.timeout(HUNG_SECONDS):
                while [one.num_tokens for one in service.all_in_flight()] != [2, 2]:
                    await asyncio.sleep(0.005)
            rows = (await http.get("/windlass/requests")).json()["requests"]
            assert len({row["number"] for row in rows}) == 2
            of_b = service.group[1].in_flight.requests[0].number
            assert (await http.delete(f"/windlass/requests/{of_b}")).json() == {"number": of_b}
            engines["a"].release()
            assert [(await answer).status_code for answer in asking] == [200, 409]

    asyncio.run(run())


def test_states_are_told_and_the_first_one_answers_who_names_none() -> None:
    async def run() -> None:
        async with several("a", "b", room=MemoryRoom(max_models=1)) as (http, _, engines):
            states = {card["id"]: card["state"] for card in (await http.get("/v1/models")).json()["data"]}
            assert states["b"] == "unloaded" and states["a"] in ("loading", "loaded")
            assert (await http.post("/v1/chat/completions", json=HELLO)).json()["model"] == "a"
            assert (await ask(http, "c")).status_code == 404
            assert "'a', 'b'" in (await ask(http, "c")).text
            tags = (await http.get("/api/tags")).json()["models"]
            assert [tag["name"] for tag in tags] == ["a", "b"]
            assert (await http.get("/v1/models/b")).json()["id"] == "b"
            told = (await http.get("/windlass/status")).json()["models"]
            assert [one["name"] for one in told] == ["a", "b"]
            assert 'windlass_model_loaded{model="a"} 1.0' in (await http.get("/metrics")).text
            assert (await http.get("/ready")).status_code == 200
            assert not engines["b"].requests

    asyncio.run(run())


def test_a_busy_model_finishes_before_it_is_unloaded() -> None:
    async def run() -> None:
        async with several("a", "b", room=MemoryRoom(max_models=1), engine={"hold_after": 2}) as (http, service, engines):
            first = asyncio.create_task(ask(http, "a"))
            while not engines["a"].running:
                await asyncio.sleep(0.005)
            other = asyncio.create_task(ask(http, "b"))
            while service.slot.state != "leaving":
                await asyncio.sleep(0.005)
            late = asyncio.create_task(ask(http, "a"))  # waits for the next turn of a
            while not service.slot.waiting:
                await asyncio.sleep(0.005)
            assert not first.done() and not engines["b"].requests
            told = {one.name: one for one in (service.models.reports() if service.models else ())}
            assert told["b"].waits_for == "a to finish 1 requests"
            for engine in engines.values():
                engine.release()
            answers = [await first, await other, await late]
            assert [answer.status_code for answer in answers] == [200, 200, 200]
            assert [one.slot.loads for one in service.group] == [2, 1]

    asyncio.run(run())


def test_one_that_does_not_fit_beside_the_other_takes_its_place() -> None:
    async def run() -> None:
        async with several("a", "b", room=MemoryRoom()) as (http, service, engines):
            engine = engines["b"]
            original = engine.info

            async def info() -> Any:
                if "a" in engine._loaded:
                    raise DoesNotFit("too large", 1)
                return await original()

            engine.info = info  # type: ignore[method-assign]
            assert (await ask(http, "b")).status_code == 200
            assert service.slot.state == "unloaded"

    asyncio.run(run())


def test_a_model_that_cannot_be_loaded_is_refused_and_the_other_goes_on() -> None:
    async def run() -> None:
        async with several("a", "b", room=MemoryRoom(max_models=1)) as (http, service, engines):
            engines["b"].fails = DoesNotFit("too large", 1)
            refused = await ask(http, "b")
            assert refused.status_code == 503 and "retry-after" in refused.headers
            assert (await ask(http, "b")).status_code == 503
            assert (await ask(http, "a")).status_code == 200
            assert any("could not be loaded" in line for line in service.log.lines)  # type: ignore[attr-defined]

    asyncio.run(run())


def test_an_engine_that_is_killed_while_it_loads_is_started_again() -> None:
    async def run() -> None:
        async with several("a", "b", room=MemoryRoom(max_models=1)) as (http, service, engines):
            engines["b"].is_alive = False
            engines["b"].refuse_starts = 2
            assert (await ask(http, "b")).status_code == 200
            assert engines["b"].refuse_starts == 0 and service.group[1].slot.loads == 1

    asyncio.run(run())


def test_an_idle_model_is_unloaded_and_comes_back() -> None:
    async def run() -> None:
        async with several("a", "b", room=MemoryRoom(), idle_seconds=0.01) as (http, service, _):
            assert (await ask(http, "a")).status_code == 200
            while service.slot.state != "unloaded":
                await asyncio.sleep(0.01)
            assert (await ask(http, "a")).status_code == 200

    asyncio.run(run())


def test_waiting_requests_are_bounded() -> None:
    async def run() -> None:
        options: dict[str, Any] = {"engine": {"hold_after": 1}, "max_waiting": 2}
        async with several("a", "b", room=MemoryRoom(max_models=1), **options) as (http, service, engines):
            holding = asyncio.create_task(ask(http, "a"))
            while not engines["a"].running:
                await asyncio.sleep(0.005)
            waiting = [asyncio.create_task(ask(http, "b")) for _ in range(2)]
            while service.group[1].slot.waiting < 2:
                await asyncio.sleep(0.005)
            assert (await ask(http, "b")).status_code == 429
            for engine in engines.values():
                engine.release()
            assert [(await task).status_code for task in (holding, *waiting)] == [200] * 3

    asyncio.run(run())


def test_a_deadline_ends_the_wait() -> None:
    async def run() -> None:
        options: dict[str, Any] = {"engine": {"hold_after": 1}, "deadline_seconds": 0.2}
        async with several("a", "b", room=MemoryRoom(max_models=1), **options) as (http, service, engines):
            holding = asyncio.create_task(ask(http, "a"))
            while not engines["a"].running:
                await asyncio.sleep(0.005)
            assert (await ask(http, "b")).status_code == 408
            assert service.group[1].slot.waiting == 0
            await holding

    asyncio.run(run())


def test_batches_of_several_models(tmp_path: Path) -> None:
    lines = "\n".join(
        f'{{"custom_id": "{number}", "method": "POST", "url": "/v1/chat/completions", "body": {{"model": "{name}", '
        f'"messages": [{{"role": "user", "content": "x"}}]}}}}'
        for number, name in enumerate("abba")
    )

    async def run() -> None:
        folder = str(tmp_path / "files")
        async with several("a", "b", room=MemoryRoom(max_models=1), files_folder=folder) as (http, _, engines):
            sent = await http.post("/v1/files", files={"file": ("x.jsonl", lines)}, data={"purpose": "batch"})
            body = {"input_file_id": sent.json()["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
            batch = (await http.post("/v1/batches", json=body)).json()
            while (found := (await http.get(f"/v1/batches/{batch['id']}")).json())["status"] == "in_progress":
                await asyncio.sleep(0.02)
            assert found["request_counts"] == {"total": 4, "completed": 4, "failed": 0}
            assert [len(engines[name].requests) for name in "ab"] == [2, 2]
            assert all(request.priority == 2 for request in engines["a"].requests)

    asyncio.run(run())
