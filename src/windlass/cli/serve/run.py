"""`windlass serve` from its options to a listening server and an exit code."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from windlass.core.launch import Launch
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
"""(progress in bytes, lines for the operator) -> a client that loads with the first request."""


class ServeOptions(Frozen):
    """The command line of `windlass serve`."""

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    max_waiting: int = 64
    max_running: int | None = None
    engine: str = "windlass"
    launch: Launch = Launch()
    plan: Path | None = None
    name: str = ""
    deadline: float = 600.0
    drain: float = 30.0
    max_body: str = "8MiB"
    allow_host: tuple[str, ...] = ()
    cors: tuple[str, ...] = ()
    log_prompts: bool = False
    quiet: bool = False
    page: bool = True
    tls_cert: str = ""
    tls_key: str = ""
    files: Path | None = None


def start(options: ServeOptions) -> int:
    _check(options)
    # Prompts arrive one by one, so its threads are of no use; and with them it warns whenever an engine process is started.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from windlass.cli.check.quick import check_before
    from windlass.open.resolve import model_files
    from windlass.serve.server import bind, check_tls

    settings = settings_of(options)
    check_tls(settings)
    listening = bind(settings)
    with listening:
        path = model_files(options.model, shown=True)
        settings = msgspec.structs.replace(settings, sampling=_sampling(path))
        opener, plan = _local(options, path) if options.engine == "windlass" else _vllm(options, path)
        check_before("serve", shown=not options.quiet)  # after all that can be refused at once
        return _Run(settings, opener, plan, options.page).serve(listening)


def _check(options: ServeOptions) -> None:
    if options.engine not in ENGINES:
        raise BadInput(f"--engine is {' or '.join(ENGINES)}, not {options.engine!r}")
    if options.engine != "windlass" and not options.launch.is_single:
        raise BadInput(
            "--workers, --tp, --pp and --ep are for --engine windlass; with vLLM, the plan decides how the model is split"
        )
    if options.max_running is not None and options.max_running < 1:
        raise BadInput(f"--max-running is {options.max_running}; it must be at least 1")
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise MissingExtra("starlette", "serve", "serving a model")


def settings_of(options: ServeOptions) -> ServerSettings:
    from windlass.serve.http.api_keys import read_keys
    from windlass.serve.settings import ServerSettings

    return ServerSettings(
        host=options.host,
        port=options.port,
        api_keys=read_keys(options.api_key),
        model=options.name,
        max_waiting=options.max_waiting,
        max_body_bytes=parse_bytes(options.max_body),
        deadline_seconds=options.deadline,
        drain_seconds=options.drain,
        allowed_hosts=options.allow_host,
        cors_origins=options.cors,
        log_requests=not options.quiet,
        log_prompts=options.log_prompts,
        tls_cert=options.tls_cert,
        tls_key=options.tls_key,
        files_folder="" if options.files is None else str(_folder(options.files)),
    )


def _folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o700)  # prompts and answers lie there
    except OSError as error:
        raise BadInput(f"cannot use --files {path}: {error.strerror}") from None
    return path


def _sampling(path: Path) -> Sampling:
    """Defaults of requests that set nothing: the model's own, else the API's."""
    from windlass.core.request import Sampling
    from windlass.open.generation import generation_defaults

    return Sampling(**generation_defaults(path))


def _plan(file: Path | None) -> Plan | None:
    if file is None:
        return None
    from windlass.open.plan import read_plan

    return read_plan(file)


def _local(options: ServeOptions, path: Path) -> tuple[Opener, Plan | None]:
    """The embedded engine, in a process of its own."""
    from windlass.open.client import open_client, require_torch
    from windlass.open.compile import compile_kernels
    from windlass.open.plan import apply_plan

    require_torch("running a model")
    plan = _plan(options.plan)
    launch = msgspec.structs.replace(options.launch, model=str(path))
    launch = launch if plan is None else apply_plan(launch, plan)
    launch = msgspec.structs.replace(launch, max_sequences=options.max_running or launch.max_sequences)
    compile_kernels(shown=True)
    return lambda progress, notify: open_client(launch, progress, notify=notify), plan


def _vllm(options: ServeOptions, path: Path) -> tuple[Opener, Plan]:
    launch = options.launch
    if launch.kv is not None or launch.exact or launch.device != "auto":
        raise BadInput("--kv, --exact and --device are for --engine windlass; put them in the plan instead")
    from windlass.open.vllm.client import VllmClient, planned

    model, plan, make_command = planned(path, _plan(options.plan), launch.context_tokens, options.max_running, options.name)
    return lambda _progress, _notify: VllmClient(make_command, model.name, plan), plan


class _Run:
    """The running server."""

    def __init__(self, settings: ServerSettings, opener: Opener, plan: Plan | None, page: bool) -> None:
        from windlass.formats.disk.atomic import write_atomically
        from windlass.serve.app import make_app, service_of

        client = opener(self._progress, self._log_line)
        self._app: Starlette = make_app(client, settings, plan=plan, page=page, write_file=write_atomically)
        self._service: Service = service_of(self._app)
        self._settings = settings
        self._failed: Error | None = None
        self._task: asyncio.Task[None] | None = None

    def _progress(self, done_bytes: int, total_bytes: int) -> None:
        self._service.progress(done_bytes, total_bytes)

    def _log_line(self, line: str) -> None:
        self._service.log.line(line)

    def serve(self, listening: socket.socket) -> int:
        from windlass.serve.server import serve

        self._listening = listening
        serve(self._app, self._settings, listening, self._started)
        self._service.log.end_status()
        if self._failed is not None:
            raise self._failed
        return 0

    def _started(self, server: Server) -> None:
        self._task = asyncio.get_running_loop().create_task(self._show(server))

    async def _show(self, server: Server) -> None:
        """Shows a panel when the server is ready, and a status line on a terminal."""
        from windlass.cli.serve.screen import show_panel, show_status
        from windlass.serve.server import address

        showing = asyncio.create_task(show_status(self._service))
        try:
            await self._service.supervisor.wait_ready()
        except Error as error:
            self._failed = error
            server.stop()
            return
        show_panel(self._service, address(self._listening, self._settings))
        await showing
