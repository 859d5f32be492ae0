"""Middleware of every route: checks Host, Origin and API key; turns exceptions into error responses; access log and request count.

Plain ASGI: Starlette's BaseHTTPMiddleware, with a task and a queue per request, would cost more than all the rest.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from secrets import token_hex

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from windlass.foreign import is_failure
from windlass.tasks.serve.api.caller import KEY, REQUEST_ID
from windlass.tasks.serve.api.route import ApiRoute, openai_error
from windlass.tasks.serve.http import errors
from windlass.tasks.serve.http.api_keys import key_number
from windlass.tasks.serve.http.asgi import ClientDisconnected, Header, request_header, response_start, send_error, send_response
from windlass.tasks.serve.http.origin import allows_host, allows_origin, cors_headers, own_names
from windlass.tasks.serve.monitor.log import access_line, error_location
from windlass.tasks.serve.page.routes import is_page_path
from windlass.tasks.serve.service import Service
from windlass.wire.anthropic.writer import anthropic_error
from windlass.wire.ollama.writer import ollama_error
from windlass.wire.schema.errors import ApiError

ErrorWriter = Callable[[ApiError], bytes]
ERROR_STYLES: dict[str, ErrorWriter] = {"/v1/messages": anthropic_error, "/api/": ollama_error}
"""Formats of errors below other prefixes, of unknown routes too."""
DETAILS = "windlass.details"
"""Scope key: details for the access log."""
WITHOUT_VERSION = frozenset(
    (
        "/chat/completions",
        "/completions",
        "/responses",
        "/embeddings",
        "/rerank",
        "/models",
        "/messages",
        "/chat/completions/input_tokens",
    )
)
"""Paths below /v1 that clients with another base URL ask for without it, as llama.cpp's and TEI's do."""
CHOSEN_ID = re.compile(rb"[!-~]{1,128}")
"""Ids of requests that clients choose."""


def error_writer(path: str) -> ErrorWriter:
    return next((writer for prefix, writer in ERROR_STYLES.items() if path.startswith(prefix)), openai_error)


class AccessMiddleware:
    def __init__(self, app: ASGIApp, service: Service, routes: Sequence[ApiRoute]) -> None:
        self._app, self._service = app, service
        self._own_names = own_names(service.settings.host, service.settings.allowed_hosts)
        self._paths = frozenset(route.path for route in routes)
        self._errors = {route.path: route.error_body for route in routes}
        self._prefixes = tuple(route.path.partition("{")[0] for route in routes if "{" in route.path)
        self._public = frozenset(route.path for route in routes if route.is_public)
        admin = [route.path for route in routes if route.is_admin]
        self._admin = frozenset(path for path in admin if "{" not in path)
        self._admin_prefixes = tuple(path.partition("{")[0] for path in admin if "{" in path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"]
            await self._http({**scope, "path": f"/v1{path}"} if path in WITHOUT_VERSION else scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        else:  # no websockets
            await receive()
            await send({"type": "websocket.close", "code": 1000})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = _request_id(scope)
        response = _RecordingSend(send, self._headers(scope, request_id))
        started = time.perf_counter()
        scope[DETAILS], scope[REQUEST_ID] = "", request_id.decode()
        try:
            self._check(scope)
            if scope["method"] == "OPTIONS" and request_header(scope, b"access-control-request-method") is not None:
                await _preflight(response)
            else:
                await self._app(scope, receive, response)
        except ClientDisconnected:
            pass
        except ApiError as refusal:
            await response.send_error(refusal, self._error_body(scope["path"]))
        except HTTPException as error:
            await _send_router_error(response, error, error_writer(scope["path"]))
        except BaseException as error:
            if not is_failure(error):
                raise
            shown = scope[REQUEST_ID]
            self._service.log.line(f"{shown}: {type(error).__name__} in {error_location(error)}")
            await response.send_error(errors.to_api_error(error, request_id=shown), self._error_body(scope["path"]))
        finally:
            self._record(scope, response.status, time.perf_counter() - started)

    def _check(self, scope: Scope) -> None:
        settings = self._service.settings
        num_hosts = sum(name == b"host" for name, _ in scope["headers"])
        if num_hosts > 1 or (not num_hosts and scope.get("http_version") != "1.0"):
            raise errors.bad_host(num_hosts)
        host, origin = request_header(scope, b"host"), request_header(scope, b"origin")
        if not allows_host(host, self._own_names):
            raise errors.forbidden("Host")
        if not allows_origin(origin, host, settings.cors_origins):
            raise errors.forbidden("Origin")
        path = scope["path"]
        number = key_number(scope["headers"], self._service.keys)
        is_public = path in self._public or is_page_path(path) or scope["method"] == "OPTIONS"
        if not is_public:
            self._check_key(number, path)
        scope[KEY] = number or 0

    def _check_key(self, number: int | None, path: str) -> None:
        if number is None:
            raise errors.unauthorized()
        key = self._service.keys[number - 1] if number else None
        if key is not None and key.is_expired(datetime.now(UTC)):
            raise errors.key_expired()
        if key is not None and key.role != "admin" and (path in self._admin or path.startswith(self._admin_prefixes)):
            raise errors.needs_admin()

    def _headers(self, scope: Scope, request_id: bytes) -> list[Header]:
        named = [(b"x-request-id", request_id)]
        origins = self._service.settings.cors_origins
        requested = request_header(scope, b"access-control-request-headers")
        return [*named, *cors_headers(request_header(scope, b"origin"), origins, requested)] if origins else named

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        route = self._route(scope["path"])
        self._service.metrics.http.labels(route, str(status or "none")).inc()
        if self._service.settings.log_requests and route not in ("/health", "/metrics", "page"):
            self._service.log.line(access_line(scope["method"], route, status, seconds, scope[DETAILS]))

    def _error_body(self, path: str) -> ErrorWriter:
        """In the format of the API that the path belongs to."""
        return self._errors.get(path) or error_writer(path)

    def _route(self, path: str) -> str:
        """The metric label and log name of a path; unknown paths are not quoted, since they may contain anything."""
        if path in self._paths:
            return path
        if is_page_path(path):
            return "page"
        return next((prefix for prefix in self._prefixes if path.startswith(prefix)), "other")


def _request_id(scope: Scope) -> bytes:
    """The client's, or a new one."""
    for name, value in scope["headers"]:
        if name in (b"x-request-id", b"x-client-request-id") and CHOSEN_ID.fullmatch(value):
            return value
    return b"req_" + token_hex(16).encode()


class _RecordingSend:
    """Adds headers and remembers the status."""

    def __init__(self, send: Send, headers: list[Header]) -> None:
        self._send, self._headers = send, headers
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *self._headers]
        await self._send(message)

    async def send_error(self, refusal: ApiError, error_body: ErrorWriter) -> None:
        """Not possible once the response has started: then the connection is closed, which tells the client that it is incomplete."""
        if self.status == 0:
            await send_error(self, refusal, error_body(refusal))


async def _send_router_error(send: Send, error: HTTPException, body: ErrorWriter) -> None:
    """404 and 405."""
    refusal = errors.method_not_allowed() if error.status_code == 405 else errors.not_found()
    headers = [(name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()]
    await send_response(send, refusal.status, body(refusal), headers=headers)


async def _preflight(send: Send) -> None:
    await send(response_start(204, b"text/plain"))
    await send({"type": "http.response.body", "body": b""})
