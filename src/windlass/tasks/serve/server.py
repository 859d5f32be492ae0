"""The application on a socket: uvicorn with graceful draining.

On SIGTERM, Ctrl-C or SIGHUP (the terminal was closed) the server keeps listening and answers new requests with 503, finishes the
requests in flight, and exits. A second signal exits at once. Where the event loop is stuck, the watchdog ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Generator
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from windlass.errors import BadInput
from windlass.tasks.serve.app import service_of
from windlass.tasks.serve.http.protocol import protocol_class
from windlass.tasks.serve.monitor.log import Log, LogHandler
from windlass.tasks.serve.settings import ServerSettings
from windlass.tasks.serve.watchdog import Watchdog

SHUTDOWN_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75
SECONDS_TO_CLOSE = 5
"""For responses that are still being sent on exit."""


class Server(uvicorn.Server):
    """Drains on shutdown."""

    def __init__(self, app: Starlette, settings: ServerSettings) -> None:
        self._service = service_of(app)
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watchdog = Watchdog()
        super().__init__(_config(app, settings, self._service.log))

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """As uvicorn's, but does not re-raise the signal on exit."""
        self._loop = asyncio.get_running_loop()
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # A signal that is ignored stays so: nohup does that to SIGHUP.
        handled = [number for number in SHUTDOWN_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, self.handle_exit) for number in handled}
        try:
            with self._watchdog.watching():
                yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self.stop)
        self._watchdog.signal(sig)

    def stop(self) -> None:
        """Drains; if called again, exits at once."""
        self._watchdog.is_noticed = True
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain())
        else:
            self._service.cancel_all()
            self.force_exit = self.should_exit = True

    async def _drain(self) -> None:
        await self._service.drain()
        self.should_exit = True


def _config(app: Starlette, settings: ServerSettings, log: Log) -> uvicorn.Config:
    for name in ("uvicorn", "windlass"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [LogHandler(log)], False
        logger.setLevel(logging.WARNING)
    return uvicorn.Config(
        app,
        http=protocol_class(settings.head_seconds),
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
        ssl_certfile=settings.tls_cert or None,
        ssl_keyfile=settings.tls_key or None,
    )


def check_tls(settings: ServerSettings) -> None:
    """Before anything is loaded."""
    if bool(settings.tls_cert) != bool(settings.tls_key):
        raise BadInput("TLS needs both --tls-cert and --tls-key")
    if not settings.tls_cert:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(settings.tls_cert, settings.tls_key, password="")
    except (OSError, ssl.SSLError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise BadInput(f"cannot use --tls-cert and --tls-key: {reason}; they should be PEM files that belong together") from None


def bind(settings: ServerSettings) -> socket.socket:
    """Called before anything is loaded, so that a port in use is reported at once."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise BadInput(f"cannot listen on {settings.host}:{settings.port}: {reason}; {_other_place(error)}") from None
    listener.setblocking(False)
    return listener


def _other_place(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return "`windlass ps` shows servers of yours; stop that one, or choose another --port"
    return "see --host and --port"


def address(bound: socket.socket, settings: ServerSettings | None = None) -> str:
    host, port = bound.getsockname()[:2]
    scheme = "https" if settings is not None and settings.tls_cert else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def raise_file_limit() -> None:
    """Raises the limit on open files: every connection is one, and shells often allow 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def serve(
    app: Starlette, settings: ServerSettings, bound: socket.socket, started: Callable[[Server], None] = lambda _: None
) -> None:
    """Runs until shutdown. `started` is called on the event loop when it starts."""
    raise_file_limit()
    server = Server(app, settings)
    # One event loop for everything: the engine process is a child of the thread that runs it.
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(_serve(server, bound, started))


async def _serve(server: Server, bound: socket.socket, started: Callable[[Server], None]) -> None:
    asyncio.get_running_loop().call_soon(started, server)
    await server.serve(sockets=[bound])
