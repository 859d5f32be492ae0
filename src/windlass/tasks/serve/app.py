"""The ASGI application: routes, middleware, lifespan."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import weakref
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from starlette.applications import Starlette
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from windlass.core.client import Client
from windlass.core.model import Frozen
from windlass.core.plan import Plan
from windlass.core.request import Sampling
from windlass.tasks.serve.api.middleware import AccessMiddleware
from windlass.tasks.serve.api.model_switch import ModelSwitch
from windlass.tasks.serve.api.route import ApiRoute
from windlass.tasks.serve.backend.models import Models
from windlass.tasks.serve.backend.residency import MemoryRoom
from windlass.tasks.serve.batch.endpoints import Batching
from windlass.tasks.serve.batch.files import FileStore, WriteFile
from windlass.tasks.serve.lora.runtime import AdapterHost, RuntimeAdapters
from windlass.tasks.serve.monitor.log import Log
from windlass.tasks.serve.routing.routes import ROUTES
from windlass.tasks.serve.service import Service
from windlass.tasks.serve.settings import ServerSettings

WATCH_SECONDS = 15.0
ENERGY_SECONDS = 1.0


class OfferedModel(Frozen):
    """One of several models."""

    name: str
    client: Client
    num_bytes: int = 0
    """What it will take in memory, as far as that is known before it is loaded."""
    sampling: Sampling = Sampling()
    adapters: tuple[tuple[str, str], ...] = ()
    adapter_host: AdapterHost | None = None
    """With it and a folder for them, adapters can be loaded at run time."""


def make_app(
    client: Client,
    settings: ServerSettings,
    *,
    plan: Plan | None = None,
    page: bool = True,
    log: Log | None = None,
    write_file: WriteFile | None = None,
) -> Starlette:
    """One model, which stays loaded. Takes ownership of the client and closes it on shutdown. `write_file`: needed for files and
    batches."""
    return _app(Service(client, settings, plan=plan, log=log), page, write_file)


def make_app_of_several(
    offered: Sequence[OfferedModel],
    settings: ServerSettings,
    room: MemoryRoom,
    *,
    idle_seconds: float | None = None,
    page: bool = True,
    log: Log | None = None,
    write_file: WriteFile | None = None,
) -> Starlette:
    """Models that are loaded on demand, the first one at once. Takes ownership of the clients."""
    first: Service | None = None
    group: list[Service] = []
    for model in offered:
        own = msgspec.structs.replace(settings, model=model.name, sampling=model.sampling, adapters=model.adapters)
        group.append(Service(model.client, own, log=log, beside=first, num_bytes=model.num_bytes))
        first = first or group[0]
    assert first is not None
    first.slot.is_preloaded = True
    models = Models([one.slot for one in group], room, idle_seconds, first.log.line)
    for one in group:
        one.group, one.models = tuple(group), models
    first.metrics.add_models(models)
    for one, model in zip(group, offered, strict=True):
        _allow_adapters(one, model.adapter_host)
    return _app(first, page, write_file)


def _allow_adapters(service: Service, host: AdapterHost | None) -> None:
    """Copies of adapters lie in a folder that is removed with the server."""
    root = service.settings.lora_folder
    if host is not None and root:
        kept = tempfile.mkdtemp(prefix="windlass-lora-")
        service.runtime_adapters = RuntimeAdapters(service, host, Path(root), Path(kept))
        weakref.finalize(service, shutil.rmtree, kept, ignore_errors=True)


def _app(service: Service, page: bool, write_file: WriteFile | None) -> Starlette:
    if service.settings.files_folder and write_file is not None:
        service.batching = Batching(service, FileStore(Path(service.settings.files_folder), write_file))
    routes: list[BaseRoute] = [Route(route.path, _endpoint(service, route), methods=[route.method]) for route in ROUTES]
    if page:
        from windlass.tasks.serve.page.routes import page_routes

        routes += page_routes()
        service.has_page = True
    app = _ServerApp(routes=routes, lifespan=_lifespan)
    app.state.service = service
    return app


class _ServerApp(Starlette):
    """AccessMiddleware does what Starlette's own two middlewares would do, and they would each add a coroutine to every token."""

    def build_middleware_stack(self) -> ASGIApp:
        return AccessMiddleware(self.router, service_of(self), ROUTES)


def _endpoint(service: Service, route: ApiRoute) -> ASGIApp:
    """Bodies that name a model are for one of several."""
    if service.models is not None and route.names_model:
        return ModelSwitch(service.group, route)
    return route.endpoint(service)


def service_of(app: Starlette) -> Service:
    return app.state.service


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncGenerator[None]:
    service = service_of(app)
    tasks = [asyncio.create_task(service.supervisor.run() if service.models is None else service.models.run())]
    if service.models is not None:
        service.models.want(service.slot)
    if isinstance(service.batching, Batching):
        tasks.append(asyncio.create_task(service.batching.runner.run()))
    tasks += [asyncio.create_task(_watch(service)), asyncio.create_task(_settle_energy(service))]
    try:
        yield
    finally:
        service.draining.set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(one.client.close() for one in service.group))
        await asyncio.to_thread(_close_watch, service)


async def _watch(service: Service) -> None:
    while service.watch is not None:
        service.last_metrics = service.metrics.text().decode()
        await asyncio.to_thread(service.watch.tick)
        await asyncio.sleep(WATCH_SECONDS)


async def _settle_energy(service: Service) -> None:
    while service.energy.is_counted:
        service.energy.settle()
        await asyncio.sleep(ENERGY_SECONDS)


def _close_watch(service: Service) -> None:
    if service.watch is not None:
        service.watch.close()
    if service.traces is not None:
        service.traces.close()
