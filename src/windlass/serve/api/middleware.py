"""Stands before every route: whose page, which name, which key; and after it: the log line and the count.

Plain ASGI: a middleware that makes a task of every request, or a queue of every answer, would cost more than all the rest.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from windlass.serve.api.route import ApiRoute
from windlass.serve.http import errors as failures
from windlass.serve.http.api_keys import key_number
from windlass.serve.http.asgi import Gone, Header, header, send_refusal, start
from windlass.serve.http.origin import allows_host, allows_origin, cors_headers
from windlass.serve.monitor.log import access_line, where
from windlass.serve.page.routes import is_page_path
from windlass.serve.service import Service
from windlass.wire.schema.errors import Refusal

KEY, DETAILS = "windlass.key", "windlass.details"
"""What the guard and the routes leave for each other in a request's scope."""


class Guard:
    def __init__(self, app: ASGIApp, service: Service, routes: Sequence[ApiRoute]) -> None:
        self._app, self._service = app, service
        self._paths = frozenset(route.path for route in routes)
        self._public = frozenset(route.path for route in routes if route.is_public)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        else:  # there are no websockets here
            await receive()
            await send({"type": "websocket.close", "code": 1000})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = _Answer(send, self._headers(scope))
        started = time.perf_counter()
        scope[DETAILS] = ""
        try:
            self._check(scope)
            if scope["method"] == "OPTIONS" and header(scope, b"access-control-request-method") is not None:
                await _preflight(answer)
            else:
                await self._app(scope, receive, answer)
        except Gone:
            pass
        except Refusal as refusal:
            await answer.refuse(refusal)
        except Exception as error:  # noqa: BLE001 - the outermost edge of a request
            self._service.log.line(f"{type(error).__name__} in {where(error)}")
            await answer.refuse(failures.refused(error))
        finally:
            self._record(scope, answer.status, time.perf_counter() - started)

    def _check(self, scope: Scope) -> None:
        settings = self._service.settings
        host, origin = header(scope, b"host"), header(scope, b"origin")
        if not allows_host(host, settings.host, settings.allowed_hosts):
            raise failures.foreign("Host")
        if not allows_origin(origin, host, settings.cors_origins):
            raise failures.foreign("Origin")
        path = scope["path"]
        number = key_number(scope["headers"], settings.api_keys)
        is_public = path in self._public or is_page_path(path) or scope["method"] == "OPTIONS"
        if number is None and not is_public:
            raise failures.unauthorized()
        scope[KEY] = number or 0

    def _headers(self, scope: Scope) -> list[Header]:
        origins = self._service.settings.cors_origins
        wished = header(scope, b"access-control-request-headers")
        return cors_headers(header(scope, b"origin"), origins, wished) if origins else []

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        route = self._route(scope["path"])
        self._service.metrics.http.labels(route, str(status or "none")).inc()
        if self._service.settings.log_requests and route not in ("/health", "/metrics", "page"):
            self._service.log.line(access_line(scope["method"], route, status, seconds, scope[DETAILS]))

    def _route(self, path: str) -> str:
        """A path that is no route of ours may have anything in it."""
        if path in self._paths:
            return path
        return "page" if is_page_path(path) else "/v1/models/" if path.startswith("/v1/models/") else "other"


class _Answer:
    """Remembers what was answered."""

    def __init__(self, send: Send, headers: list[Header]) -> None:
        self._send, self._headers = send, headers
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *self._headers]
        await self._send(message)

    async def refuse(self, refusal: Refusal) -> None:
        """Too late once an answer has begun; the connection is then closed, so that a part is not taken for the whole."""
        if self.status == 0:
            await send_refusal(self, refusal)


async def _preflight(send: Send) -> None:
    await send(start(204, b"text/plain"))
    await send({"type": "http.response.body", "body": b""})
