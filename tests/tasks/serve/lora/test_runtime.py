"""Adapters come and go while requests run: for admins only, none is lost, and a bad one changes nothing."""

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
from windlass.core.client import Unavailable
from windlass.errors import BadInput, Impossible
from windlass.tasks.serve.app import OfferedModel, make_app_of_several, service_of
from windlass.tasks.serve.backend import residency
from windlass.tasks.serve.backend.residency import MemoryRoom
from windlass.tasks.serve.http.api_keys import ApiKey
from windlass.tasks.serve.lora.files import CONFIG, WEIGHTS
from windlass.tasks.serve.lora.runtime import AdapterHost, Adapters
from windlass.tasks.serve.service import Service
from windlass.tasks.serve.settings import ServerSettings

pytestmark = pytest.mark.pure
ADMIN, USER = {"x-api-key": "admin-key"}, {"x-api-key": "user-key"}
KEYS = (ApiKey(name="boss", key="admin-key", role="admin"), ApiKey(name="alice", key="user-key"))
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class Engine(FakeClient):
    """Refuses to start with an adapter that is named so."""

    def __init__(self, adapters: Adapters, **options: Any) -> None:
        super().__init__(**options)
        self.adapters = dict(adapters)
        self.is_closed = False

    async def info(self) -> Any:
        for path in self.adapters.values():
            assert (Path(path) / WEIGHTS).read_bytes(), "its files are gone"
        if "bad" in names_of(self):
            raise BadInput("adapter bad: cannot be adapted while serving")
        if "crash" in names_of(self):
            raise Unavailable("the engine's process was ended by SIGKILL")
        return await super().info()

    async def unload(self) -> None:
        assert not self.running and not self.waiting, "unloaded while requests run"

    async def close(self) -> None:
        self.is_closed = True


class RunningEngine(Engine):
    """Takes adapters while it runs, unless they are named so."""

    async def add_adapter(self, name: str, folder: str) -> None:
        match name.partition("@")[0]:
            case "tiles":
                raise Impossible("the weights are in a layout that takes no adapters")
            case "lost":
                raise Unavailable("the engine was lost")
            case "bad":
                raise BadInput("adapter bad: cannot be adapted while serving")
            case _:
                self.adapters[name] = folder

    async def remove_adapter(self, name: str) -> None:
        while self.running:
            await asyncio.sleep(0.005)
        del self.adapters[name]


def names_of(engine: Engine) -> list[str]:
    """Without the numbers that engines know adapters by."""
    return [key.partition("@")[0] for key in engine.adapters]


class Host:
    kind: type[Engine] = Engine

    def __init__(self, **options: Any) -> None:
        self.opened: list[Engine] = []
        self.options = options

    def reopen(self, adapters: Adapters) -> Engine:
        self.opened.append(self.kind(adapters, **self.options))
        return self.opened[-1]

    def check(self, folder: Path) -> str:
        return "is not for this model" if b"another" in (folder / WEIGHTS).read_bytes() else ""


@asynccontextmanager
async def serving(
    tmp_path: Path, keys: tuple[ApiKey, ...] = KEYS, kind: type[Engine] = Engine, **options: Any
) -> AsyncGenerator[tuple[httpx.AsyncClient, Service, Host]]:
    for name, weights in (("tone", b"fine"), ("other", b"made for another")):
        (tmp_path / name).mkdir()
        (tmp_path / name / CONFIG).write_bytes(b"{}")
        (tmp_path / name / WEIGHTS).write_bytes(weights)
    host = Host(**options)
    host.kind = kind
    offered = [
        OfferedModel(name="m", client=host.reopen(()), adapter_host=AdapterHost(reopen=host.reopen, check=host.check)),
        OfferedModel(name="n", client=FakeClient()),
    ]
    settings = ServerSettings(api_keys=keys, lora_folder=str(tmp_path))
    app = make_app_of_several(offered, settings, MemoryRoom(max_models=1), log=Lines())
    service = service_of(app)
    async with app.router.lifespan_context(app):
        await service.supervisor.wait_ready()
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=HUNG_SECONDS, headers=ADMIN if keys else {}
        ) as http:
            yield http, service, host


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "LEAST_TURN_SECONDS", 0.0)
    monkeypatch.setattr(residency, "TURN_PER_LOAD", 0.0)


async def ask(http: httpx.AsyncClient, model: str) -> httpx.Response:
    return await http.post("/v1/chat/completions", json={**HELLO, "model": model}, headers=USER)


async def load(http: httpx.AsyncClient, name: str, path: str = "tone", **more: Any) -> httpx.Response:
    return await http.post(LOAD, json={"lora_name": name, "lora_path": path, **more})


def test_an_adapter_is_loaded_used_and_unloaded(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as (http, service, host):
            assert (await ask(http, "m:tone")).status_code == 404
            assert (await load(http, "tone")).json()["id"] == "m:tone"
            assert names_of(host.opened[-1]) == ["tone"] and host.opened[0].is_closed
            answer = await ask(http, "m:tone")
            assert answer.json()["model"] == "m:tone" and host.opened[-1].requests[-1].adapter == "tone@1"
            cards = {card["id"]: card.get("parent") for card in (await http.get("/v1/models")).json()["data"]}
            assert cards["m:tone"] == "m"
            assert (await load(http, "tone")).status_code == 400
            assert (await http.post(UNLOAD, json={"lora_name": "tone"})).status_code == 200
            assert (await ask(http, "m:tone")).status_code == 404 and (await ask(http, "m")).status_code == 200
            assert (await http.post(UNLOAD, json={"lora_name": "tone"})).status_code == 404
            assert (await load(http, "second")).status_code == 200
            assert names_of(host.opened[-1]) == ["second"], "what was unloaded is gone with the next start"
            assert service.slot.adapter_bytes == 2 * len(b"fine")

    asyncio.run(run())


def test_requests_finish_first_and_others_wait(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path, hold_after=2) as (http, service, host):
            running = asyncio.create_task(ask(http, "m"))
            while not host.opened[0].running:
                await asyncio.sleep(0.005)
            loading = asyncio.create_task(load(http, "tone"))
            while service.slot.state != "leaving":
                await asyncio.sleep(0.005)
            late = asyncio.create_task(ask(http, "m"))
            while not service.slot.waiting:
                await asyncio.sleep(0.005)
            assert not running.done() and not loading.done()
            host.opened[0].release()
            assert (await running).status_code == 200 and (await loading).status_code == 200
            host.opened[-1].release()
            answer = await late
            assert answer.status_code == 200 and "windlass-waited" in answer.headers

    asyncio.run(run())


def test_an_adapter_goes_into_the_engine_that_runs(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path, kind=RunningEngine, hold_after=2) as (http, service, host):
            [engine] = host.opened
            running = asyncio.create_task(ask(http, "m"))
            while not engine.running:
                await asyncio.sleep(0.005)
            loaded = (await load(http, "tone")).json()
            assert not loaded["restarted"] and "engine that runs" in loaded["message"] and not running.done()
            adapted = asyncio.create_task(ask(http, "m:tone"))
            while engine.running < 2:
                await asyncio.sleep(0.005)
            assert (await http.post(UNLOAD, json={"lora_name": "tone"})).json()["restarted"] is False
            assert (await ask(http, "m:tone")).status_code == 404 and names_of(engine) == ["tone"], "it is in use"
            assert (await load(http, "tone")).status_code == 200 and list(engine.adapters) == ["tone@1", "tone@2"]
            engine.release()
            assert [(await task).json()["model"] for task in (running, adapted)] == ["m", "m:tone"]
            assert (await ask(http, "m:tone")).status_code == 200
            while "tone@1" in engine.adapters:
                await asyncio.sleep(0.005)
            assert engine.requests[-1].adapter == "tone@2" and host.opened == [engine] and service.slot.loads == 1
            kept = Path(engine.adapters["tone@2"]).parent.parent
            while (kept / "1").exists():
                await asyncio.sleep(0.005)
            assert (kept / "2" / "tone" / WEIGHTS).exists() and service.slot.adapter_bytes == 2 * len(b"fine")

    asyncio.run(run())


@pytest.mark.parametrize(("name", "starts"), [("tiles", 2), ("lost", 2), ("tone", 1)])
def test_an_engine_that_cannot_take_it_is_started_with_it(tmp_path: Path, name: str, starts: int) -> None:
    async def run() -> None:
        async with serving(tmp_path, kind=RunningEngine) as (http, service, host):
            loaded = (await load(http, name)).json()
            assert loaded["restarted"] == (starts > 1) and len(host.opened) == starts == service.slot.loads
            assert names_of(host.opened[-1]) == [name] and (await ask(http, f"m:{name}")).status_code == 200
            assert (await load(http, "bad")).status_code == 400 and len(host.opened) == starts, "no engine would take it"
            assert names_of(host.opened[-1]) == [name] and list(service.adapters) == [name]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "path", "param"),
    [
        ("bad", "tone", "lora_path"),
        ("crash", "tone", "lora_path"),
        ("x", "other", "lora_path"),
        ("x", "../", "lora_path"),
        ("x", "nowhere", "lora_path"),
        ("../x", "tone", "lora_name"),
        ("m", "tone", "lora_name"),
        ("n", "tone", "lora_name"),
    ],
)
def test_a_bad_adapter_changes_nothing(tmp_path: Path, name: str, path: str, param: str) -> None:
    async def run() -> None:
        async with serving(tmp_path) as (http, service, host):
            during = asyncio.create_task(ask(http, "m"))
            refused = await load(http, name, path)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == param, refused.text
            assert (await during).status_code == 200 and (await ask(http, "m")).status_code == 200
            assert not service.adapters and not host.opened[-1].adapters and service.slot.adapter_bytes == 0
            assert (await load(http, "tone")).status_code == 200

    asyncio.run(run())


def test_only_admins_change_adapters(tmp_path: Path) -> None:
    async def run() -> None:
        body = {"lora_name": "tone", "lora_path": "tone"}
        async with serving(tmp_path) as (http, _, host):
            for path in (LOAD, UNLOAD):
                assert (await http.post(path, json=body, headers=USER)).status_code == 403
                assert (await http.post(path, json=body, headers={"x-api-key": "wrong"})).status_code == 401
            assert (await load(http, "tone", base_model="n")).status_code == 404, "that one takes none"
            assert (await load(http, "tone", base_model="?")).status_code == 404
            assert len(host.opened) == 1

    asyncio.run(run())


def test_without_keys_nobody_is_an_admin(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path, keys=()) as (http, _, host):
            assert (await load(http, "tone")).status_code == 403 and len(host.opened) == 1

    asyncio.run(run())
