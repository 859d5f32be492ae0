"""The application: routes, guard, and what starts and ends with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from windlass import __version__
from windlass.core.client import Client
from windlass.core.plan import Plan
from windlass.serve.api import routes
from windlass.serve.api.adapters import chat_job, completion_job
from windlass.serve.api.generate import Answering
from windlass.serve.api.middleware import Guard
from windlass.serve.api.openapi import document
from windlass.serve.http import errors as failures
from windlass.serve.monitor.log import Log
from windlass.serve.service import Service
from windlass.serve.settings import Settings


def make_app(
    client: Client,
    settings: Settings,
    *,
    plan: Plan | None = None,
    page: bool = True,
    log: Log | None = None,
) -> FastAPI:
    """The client is the application's from now on, and closed with it."""
    service = Service(client, settings, plan=plan, log=log)
    app = FastAPI(title="Windlass", version=__version__, docs_url=None, redoc_url=None, openapi_url=None, lifespan=_life)
    app.state.service = service
    for path, method, endpoint in _table(service):
        app.router.routes.append(Route(path, endpoint, methods=[method], include_in_schema=False))
    if page:
        from windlass.serve.page.mount import mount

        mount(app)
        service.has_page = True
    app.add_middleware(Guard, service=service, routes=frozenset(path for path, _, _ in _table(service)))
    app.add_exception_handler(HTTPException, _answer_http_error)
    return app


def service_of(app: FastAPI) -> Service:
    return app.state.service


def _table(service: Service) -> list[tuple[str, str, ASGIApp]]:
    def endpoint(answer: routes.Answer) -> ASGIApp:
        return routes.Endpoint(service, answer)

    return [
        ("/v1/chat/completions", "POST", Answering(service, chat_job)),
        ("/v1/completions", "POST", Answering(service, completion_job)),
        ("/v1/models", "GET", endpoint(routes.models)),
        ("/v1/models/{model:path}", "GET", endpoint(routes.model)),
        ("/tokenize", "POST", endpoint(routes.tokenize)),
        ("/detokenize", "POST", endpoint(routes.detokenize)),
        ("/health", "GET", endpoint(routes.health)),
        ("/ready", "GET", endpoint(routes.ready)),
        ("/metrics", "GET", endpoint(routes.metrics)),
        ("/windlass/status", "GET", endpoint(routes.status_now)),
        ("/windlass/live", "GET", endpoint(routes.live)),
        ("/openapi.json", "GET", endpoint(document)),
    ]


@asynccontextmanager
async def _life(app: FastAPI) -> AsyncGenerator[None]:
    service = service_of(app)
    supervising = asyncio.create_task(service.supervisor.run())
    try:
        yield
    finally:
        service.ending.set()
        supervising.cancel()
        with suppress(asyncio.CancelledError):
            await supervising
        await service.client.close()


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """What the router has to say, in the API's form."""
    assert isinstance(error, HTTPException)
    refusal = failures.wrong_method() if error.status_code == 405 else failures.unknown_route()
    return Response(refusal.body, refusal.status, error.headers, "application/json")
