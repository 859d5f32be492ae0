"""`windlass serve` from its options to a listening server and an exit code."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from windlass.cli.serve.openers import Opener, local, sampling_of, vllm
from windlass.cli.serve.options import ServeOptions, adapters_of, check_options, named_models
from windlass.cli.serve.several import app_of_several
from windlass.errors import BadInput, Error
from windlass.units import parse_bytes

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from windlass.core.plan import Plan
    from windlass.tasks.serve.server import Server
    from windlass.tasks.serve.service import Service
    from windlass.tasks.serve.settings import ServerSettings


def start(options: ServeOptions) -> int:
    check_options(options)
    # Prompts arrive one by one, so its threads are of no use; and with them it warns whenever an engine process is started.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not _is_one_engine(options):
        return _start(options)
    from windlass.open.client import require_torch
    from windlass.runtime.engine.client.transport import started_ahead

    require_torch("running a model")
    with started_ahead():  # it imports torch while the server is set up
        return _start(options)


def _start(options: ServeOptions) -> int:
    from windlass.cli.check.quick import check_before
    from windlass.open.resolve import runnable_files
    from windlass.tasks.serve.server import bind, check_tls

    settings = settings_of(options)
    check_tls(settings)
    listening = bind(settings)
    with listening:
        given, port = named_models(options.models), listening.getsockname()[1]
        if options.route is not None:
            from windlass.cli.serve.route import route_opener

            routed = route_opener(options.route, options.launch, given, options.keep)
            return _Run(settings, lambda run: _app_of_one(settings, routed, None, options.page, run), options, port).serve(
                listening
            )
        if len(given) > 1 or options.lora_dir is not None:
            return _Run(settings, lambda run: app_of_several(options, settings, given, run), options, port).serve(listening)
        path = runnable_files(given[0].model, shown=True)
        adapters = adapters_of(options.lora, given)[0]
        name = given[0].name or options.name
        settings = msgspec.structs.replace(settings, sampling=sampling_of(path), adapters=adapters, model=name)
        opener, plan = local(options, path, adapters) if options.engine == "windlass" else vllm(options, path)
        check_before("serve", shown=not options.quiet)  # after all that can be refused at once
        return _Run(settings, lambda run: _app_of_one(settings, opener, plan, options.page, run), options, port).serve(listening)


def _is_one_engine(options: ServeOptions) -> bool:
    """Whether it will need one engine process, and as soon as it can have it."""
    is_alone = len(options.models) == 1 and options.route is None and options.lora_dir is None and options.plan is None
    return is_alone and options.engine == "windlass" and options.launch.is_single


def _app_of_one(settings: ServerSettings, opener: Opener, plan: Plan | None, page: bool, run: _Run) -> Starlette:
    from windlass.model.formats.disk.atomic import write_atomically
    from windlass.tasks.serve.app import make_app

    client = opener(run.progress, run.log_line)
    return make_app(client, settings, plan=plan, page=page, write_file=write_atomically)


def settings_of(options: ServeOptions) -> ServerSettings:
    from windlass.tasks.serve.http.api_keys import read_keys
    from windlass.tasks.serve.settings import ServerSettings

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
        metric_aliases=options.metric_aliases,
        usage_energy=options.usage_energy,
        tls_cert=options.tls_cert,
        tls_key=options.tls_key,
        lora_folder="" if options.lora_dir is None else str(options.lora_dir.resolve()),
        files_folder="" if options.files is None else str(_folder(options.files)),
    )


def _folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o700)  # prompts and answers lie there
    except OSError as error:
        raise BadInput(f"cannot use --files {path}: {error.strerror}") from None
    return path


class _Run:
    """The running server."""

    def __init__(self, settings: ServerSettings, make_app: Callable[[_Run], Starlette], options: ServeOptions, port: int) -> None:
        from windlass.cli.serve.watch import WatchOptions, add_watch
        from windlass.tasks.serve.app import service_of

        self._app: Starlette = make_app(self)
        self._service: Service = service_of(self._app)
        how = WatchOptions(
            instance=f"{options.host}:{port}",
            history=options.history,
            webhook=options.alert_webhook,
            command=options.alert_command,
            otlp=options.otlp,
        )
        add_watch(self._service, how)
        add_metrics: Callable[[object], None] | None = getattr(self._service.client, "add_metrics", None)
        if add_metrics is not None:
            add_metrics(self._service.metrics.registry)
        self._settings = settings
        self._failed: Error | None = None
        self._task: asyncio.Task[None] | None = None

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        self._service.progress(done_bytes, total_bytes)

    def log_line(self, line: str) -> None:
        self._service.log.line(line)

    def serve(self, listening: socket.socket) -> int:
        from windlass.tasks.serve.server import serve

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
        from windlass.tasks.serve.server import address

        showing = asyncio.create_task(show_status(self._service))
        try:
            await self._service.supervisor.wait_ready()
        except Error as error:
            self._failed = error
            server.stop()
            return
        show_panel(self._service, address(self._listening, self._settings))
        await showing
