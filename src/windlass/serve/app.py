"""The ASGI application: routes, middleware, lifespan."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from windlass.core.client import Client
from windlass.core.plan import Plan
from windlass.serve.api.middleware import AccessMiddleware, error_writer
from windlass.serve.batch.endpoints import Batching
from windlass.serve.batch.files import FileStore, WriteFile
from windlass.serve.http import errors
from windlass.serve.monitor.log import Log
from windlass.serve.routing.routes import ROUTES
from windlass.serve.service import Service
from windlass.serve.settings import ServerSettings

WATCH_SECONDS = 15.0
ENERGY_SECONDS = 1.0


def make_app(
    client: Client,
    settings: ServerSettings,
    *,
    plan: Plan | None = None,
    page: bool = True,
    log: Log | None = None,
    write_file: WriteFile | None = None,
) -> Starlette:
    """Takes ownership of the client and closes it on shutdown. `write_file`: needed for files and batches."""
    service = Service(client, settings, plan=plan, log=log)
    if settings.files_folder and write_file is not None:
        service.batching = Batching(service, FileStore(Path(settings.files_folder), write_file))
    routes: list[BaseRoute] = [Route(route.path, route.endpoint(service), methods=[route.method]) for route in ROUTES]
    if page:
        from windlass.serve.page.routes import page_routes

        routes += page_routes()
        service.has_page = True
    app = Starlette(
        routes=routes,
        middleware=[Middleware(AccessMiddleware, service=service, routes=ROUTES)],
        exception_handlers={HTTPException: _http_error_response},
        lifespan=_lifespan,
    )
    app.state.service = service
    return app


def service_of(app: Starlette) -> Service:
    return app.state.service


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncGenerator[None]:
    service = service_of(app)
    tasks = [asyncio.create_task(service.supervisor.run())]
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
        await service.client.close()
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


async def _http_error_response(request: Request, error: Exception) -> Response:
    """The router's 404 and 405 in the API's error format."""
    assert isinstance(error, HTTPException)
    refusal = errors.method_not_allowed() if error.status_code == 405 else errors.not_found()
    return Response(error_writer(request.url.path)(refusal), refusal.status, error.headers, "application/json")
