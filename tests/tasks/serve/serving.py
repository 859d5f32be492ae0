"""Servers for tests: in this process without a socket, and on a real one in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
from fake import FakeClient
from starlette.applications import Starlette

from waiting import HUNG_SECONDS, until
from windlass.core.client import Client
from windlass.model.formats.disk.atomic import write_atomically
from windlass.tasks.serve.app import make_app, service_of
from windlass.tasks.serve.monitor.log import Log
from windlass.tasks.serve.server import Server, address, bind
from windlass.tasks.serve.service import Service
from windlass.tasks.serve.settings import ServerSettings

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}


class Lines(Log):
    """What was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)


@asynccontextmanager
async def in_process(client: Client, **settings: Any) -> AsyncGenerator[tuple[httpx.AsyncClient, Service], None]:
    """The application without a socket."""
    app = make_app(client, ServerSettings(**settings), log=Lines(), write_file=write_atomically)
    service = service_of(app)
    async with app.router.lifespan_context(app):
        await service.supervisor.wait_ready()
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=HUNG_SECONDS
        ) as http:
            yield http, service


def post(url: str, **options: Any) -> httpx.Response:
    """To a server on a socket."""
    return httpx.post(url, timeout=HUNG_SECONDS, **options)


def get(url: str) -> httpx.Response:
    return httpx.get(url, timeout=HUNG_SECONDS)


def posted(path: str, body: Any, client: Client | None = None, **settings: Any) -> httpx.Response:
    """One request to a server of its own."""

    async def ask() -> httpx.Response:
        async with in_process(client or FakeClient(), **settings) as (http, _):
            kind = "content" if isinstance(body, bytes) else "json"
            return await http.post(path, **{kind: body})

    return asyncio.run(ask())


class Running:
    """A server on a loopback socket, in a thread with an event loop of its own."""

    def __init__(self, make_client: Callable[[], Client], **settings: Any) -> None:
        self._settings = ServerSettings(**{"port": 0, **settings})
        self._socket = bind(self._settings)
        self.url = address(self._socket)
        self._make_client = make_client
        self._ready = threading.Event()
        self._failed: BaseException | None = None
        self.log = Lines()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> Running:
        self._thread.start()
        assert self._ready.wait(HUNG_SECONDS), "the server hung while it started"
        if self._failed is not None:
            raise self._failed
        return self

    def _run(self) -> None:
        try:
            self.client = self._make_client()
            self.app: Starlette = make_app(self.client, self._settings, log=self.log, write_file=write_atomically)
            self.service = service_of(self.app)
            self.server = Server(self.app, self._settings)
            with asyncio.Runner(loop_factory=self.server.config.get_loop_factory()) as runner:
                runner.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - told to the test
            self._failed = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        serving = asyncio.create_task(self.server.serve(sockets=[self._socket]))
        while not self.server.started and not serving.done():
            await asyncio.sleep(0.005)
        await self.service.supervisor.wait_ready()
        self._ready.set()
        await serving

    def call(self, function: Callable[[], Any]) -> Any:
        """In the server's thread."""

        async def called() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(called(), self.loop).result(HUNG_SECONDS)

    def until(self, condition: Callable[[], bool]) -> None:
        until(lambda: self.call(condition))

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def wait_ended(self) -> None:
        self._thread.join(HUNG_SECONDS)
        assert not self._thread.is_alive(), "the server hung, and did not end"

    def end(self) -> None:
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.server.stop)
        self.wait_ended()
        if self._failed is not None:
            raise self._failed


@contextmanager
def running(make_client: Callable[[], Client] = FakeClient, **settings: Any) -> Generator[Running]:
    server = Running(make_client, **{"drain_seconds": 5.0, **settings}).start()
    try:
        yield server
    finally:
        server.end()
