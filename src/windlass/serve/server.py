"""The application on a socket: uvicorn, told to end our way.

On SIGTERM, Ctrl-C or SIGHUP (its terminal was closed) the server goes on listening, so that newcomers are told 503 rather than nothing;
what runs is finished; then it ends. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import threading
from collections.abc import Callable, Generator
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from windlass.errors import BadInput
from windlass.serve.app import service_of
from windlass.serve.http.protocol import connection_class
from windlass.serve.monitor.log import Log, LogHandler
from windlass.serve.settings import Settings

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75
SECONDS_TO_CLOSE = 5
"""For answers that are on their way when the server ends."""


class Server(uvicorn.Server):
    """Ends by draining."""

    def __init__(self, app: Starlette, settings: Settings) -> None:
        self._service = service_of(app)
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        super().__init__(_config(app, settings, self._service.log))

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """As uvicorn's, without raising the signal again at the end: it was dealt with."""
        self._loop = asyncio.get_running_loop()
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        heeded = [number for number in ENDING if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores one, and means it
        before = {number: signal.signal(number, self.handle_exit) for number in heeded}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self.end)

    def end(self) -> None:
        """Drains; called again, ends at once."""
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        else:
            self._service.flights.end_all("closing")
            self.force_exit = self.should_exit = True

    async def _drain(self) -> None:
        await self._service.drain()
        self.should_exit = True


def _config(app: Starlette, settings: Settings, log: Log) -> uvicorn.Config:
    quiet = logging.getLogger("uvicorn")
    quiet.handlers, quiet.propagate = [LogHandler(log)], False
    quiet.setLevel(logging.WARNING)
    return uvicorn.Config(
        app,
        http=connection_class(settings.head_seconds),
        loop="uvloop",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=SECONDS_TO_CLOSE,
    )


def bind(settings: Settings) -> socket.socket:
    """Before anything is loaded, so that a port that is taken is known at once."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((settings.host, settings.port))
    except (OSError, OverflowError) as error:
        made.close()
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise BadInput(f"cannot listen on {settings.host}, port {settings.port}: {reason}; see --host and --port") from None
    made.setblocking(False)
    return made


def address(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def allow_connections() -> None:
    """Every connection is an open file; a shell's limit of them is often 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def serve(app: Starlette, settings: Settings, bound: socket.socket, started: Callable[[Server], None] = lambda _: None) -> None:
    """Until it is told to end. `started` is called on the event loop when it listens."""
    allow_connections()
    server = Server(app, settings)
    # One event loop for all: the engine's process is a child of the thread that it runs in.
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(_serve(server, bound, started))


async def _serve(server: Server, bound: socket.socket, started: Callable[[Server], None]) -> None:
    asyncio.get_running_loop().call_soon(started, server)
    await server.serve(sockets=[bound])
