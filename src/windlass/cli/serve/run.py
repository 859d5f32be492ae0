"""From the command line's words to a server that listens, and an exit code."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from windlass.cli.open.fleet import Over
from windlass.core.model import Frozen
from windlass.errors import BadInput, Error, MissingExtra
from windlass.units import parse_bytes

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from windlass.core.client import Client
    from windlass.core.plan import Plan
    from windlass.core.request import Sampling
    from windlass.serve.server import Server
    from windlass.serve.service import Service
    from windlass.serve.settings import ServerSettings

ENGINES = ("windlass", "vllm")
Opener = Callable[[Callable[[int, int], None], Callable[[str], None]], "Client"]
"""OnEvent of progress in bytes, and of what an operator should know -> a client, which loads when it is asked."""


class Asked(Frozen):
    """The command line."""

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    max_waiting: int = 64
    max_running: int | None = None
    engine: str = "windlass"
    over: Over = Over()
    plan: Path | None = None
    name: str = ""
    device: str = "auto"
    kv: str | None = None
    context: str | None = None
    exact: bool = False
    deadline: float = 600.0
    drain: float = 30.0
    max_body: str = "8MiB"
    allow_host: tuple[str, ...] = ()
    cors: tuple[str, ...] = ()
    log_prompts: bool = False
    quiet: bool = False
    page: bool = True


def start(asked: Asked) -> int:
    _check(asked)
    # Prompts come one by one, so its threads are of no use; and with them it complains whenever an engine's process is started.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from windlass.cli.open.locate import locate
    from windlass.serve.server import bind

    settings = settings_of(asked)
    listening = bind(settings)
    with listening:
        path = locate(asked.model, shown=True)
        settings = msgspec.structs.replace(settings, sampling=_sampling(path))
        opener, plan = _local(asked, path) if asked.engine == "windlass" else _vllm(asked, path)
        return _Run(settings, opener, plan, asked.page).until_the_end(listening)


def _check(asked: Asked) -> None:
    if asked.engine not in ENGINES:
        raise BadInput(f"--engine is {' or '.join(ENGINES)}, not {asked.engine!r}")
    asked.over.check()
    if asked.engine != "windlass" and not asked.over.is_one:
        raise BadInput("--workers, --tp, --pp and --ep are for --engine windlass; a plan says how vLLM splits a model")
    if asked.max_running is not None and asked.max_running < 1:
        raise BadInput(f"--max-running is {asked.max_running}; it should be at least 1")
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise MissingExtra("starlette", "serve", "serving a model")


def settings_of(asked: Asked) -> ServerSettings:
    from windlass.serve.http.api_keys import read_keys
    from windlass.serve.settings import ServerSettings

    return ServerSettings(
        host=asked.host,
        port=asked.port,
        api_keys=read_keys(asked.api_key),
        model=asked.name,
        max_waiting=asked.max_waiting,
        max_body_bytes=parse_bytes(asked.max_body),
        deadline_seconds=asked.deadline,
        drain_seconds=asked.drain,
        allowed_hosts=asked.allow_host,
        cors_origins=asked.cors,
        log_requests=not asked.quiet,
        log_prompts=asked.log_prompts,
    )


def _sampling(path: Path) -> Sampling:
    """Of requests that say nothing: the model's own, else the API's."""
    from windlass.cli.run.options import from_config, read_generation_config
    from windlass.core.request import Sampling

    return Sampling(**from_config(read_generation_config(path)))


def _plan(file: Path | None) -> Plan | None:
    if file is None:
        return None
    from windlass.cli.open.plan import read_plan

    return read_plan(file)


def _local(asked: Asked, path: Path) -> tuple[Opener, Plan | None]:
    """The embedded engine, in a process of its own."""
    if find_spec("torch") is None:
        raise MissingExtra("torch", "run", "running a model")
    from windlass.cli.open.compiling import compile_kernels
    from windlass.cli.open.fleet import open_client
    from windlass.cli.open.plan import wanted
    from windlass.cli.run.engine import launch_of
    from windlass.cli.run.options import Options

    options = Options(
        device=asked.device, kv=asked.kv, context=asked.context, plan=asked.plan, exact=asked.exact, over=asked.over
    )
    found = wanted(path, options)
    launch = launch_of(found)
    launch = msgspec.structs.replace(launch, max_sequences=asked.max_running or found.max_sequences)
    compile_kernels(shown=True)
    return lambda progress, told: open_client(launch, found.over, progress, told=told), _plan(asked.plan)


def _vllm(asked: Asked, path: Path) -> tuple[Opener, Plan]:
    if asked.kv is not None or asked.exact or asked.device != "auto":
        raise BadInput("--kv, --exact and --device are for --engine windlass; plan with what you want instead")
    from windlass.cli.serve.vllm import VllmClient, planned

    model, plan, make_command = planned(path, _plan(asked.plan), asked.context, asked.max_running, asked.name)
    return lambda _progress, _told: VllmClient(make_command, model.name, plan), plan


class _Run:
    """One life of the server."""

    def __init__(self, settings: ServerSettings, opener: Opener, plan: Plan | None, page: bool) -> None:
        from windlass.serve.app import make_app, service_of

        self._app: Starlette = make_app(opener(self._progress, self._tell), settings, plan=plan, page=page)
        self._service: Service = service_of(self._app)
        self._settings = settings
        self._failed: Error | None = None
        self._task: asyncio.Task[None] | None = None

    def _progress(self, done_bytes: int, total_bytes: int) -> None:
        self._service.progress(done_bytes, total_bytes)

    def _tell(self, line: str) -> None:
        self._service.log.line(line)

    def until_the_end(self, listening: socket.socket) -> int:
        from windlass.serve.server import serve

        self._listening = listening
        serve(self._app, self._settings, listening, self._started)
        self._service.log.end_status()
        if self._failed is not None:
            raise self._failed
        return 0

    def _started(self, server: Server) -> None:
        self._task = asyncio.get_running_loop().create_task(self._accompany(server))

    async def _accompany(self, server: Server) -> None:
        """Tells of the start, and of the state ever after where there is a terminal."""
        from windlass.cli.serve.screen import show_panel, show_status
        from windlass.serve.server import address

        showing = asyncio.create_task(show_status(self._service))
        try:
            await self._service.supervisor.wait_ready()
        except Error as error:
            self._failed = error
            server.stop()
            return
        show_panel(self._service, address(self._listening))
        await showing
