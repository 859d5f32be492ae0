"""The server's error responses: status, code and message. Pure.

An engine's own messages may contain paths or output of its process, so clients get the texts below; the originals go to the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from windlass.core.client import Broken, Busy, Late, Slowed, Unavailable
from windlass.errors import BadCheckpoint, BadConfig, BadInput, Error
from windlass.tasks.serve.http.asgi import TOO_MANY_BYTES
from windlass.wire.schema.errors import ApiError
from windlass.wire.server.requests import bad_input_error

UNAVAILABLE = 503
MAX_NAMES = 8
"""Of models that an error lists."""
OVERLOAD_RETRY_SECONDS = 2
REQUEST_TIMEOUT = 408
"""Not 504: no upstream failed, and the client chose the deadline."""


def to_api_error(error: BaseException, body: object = None, request_id: str = "") -> ApiError:
    """`body`: the request body, whose parameter names the message uses. `request_id`: under which the log has more."""
    match error:
        case ApiError():
            return error
        case BadCheckpoint() | BadConfig():
            return engine_unavailable()
        case BadInput():
            return bad_input_error(error, body)
        case Late():
            return deadline_exceeded()
        case Broken():
            return generation_failed(request_id)
        case Slowed():
            return slowed(error.seconds)
        case Busy():
            return engine_overloaded()
        case Unavailable() | Error():
            return engine_unavailable()
        case _:
            return internal(request_id)


def internal(request_id: str) -> ApiError:
    return ApiError(f"internal server error; {_in_log(request_id)}", code="internal", status=500, type="server_error")


def _in_log(request_id: str) -> str:
    return f"see the server's log{f' under {request_id}' if request_id else ''}"


def engine_unavailable() -> ApiError:
    return ApiError(
        "the engine is not available and is being restarted; retry after the time in Retry-After",
        code="engine_unavailable",
        status=UNAVAILABLE,
        type="server_error",
    )


def cancelled_by_operator() -> ApiError:
    return ApiError("the server's operator cancelled this request", code="cancelled", status=409)


def generation_failed(request_id: str = "") -> ApiError:
    return ApiError(
        "generation failed for this request, and retrying it will probably fail again; other requests are not affected; "
        + _in_log(request_id),
        code="answer_failed",
        status=500,
        type="server_error",
    )


def loading() -> ApiError:
    return ApiError(
        "the model is still loading; retry after the time in Retry-After", code="loading", status=UNAVAILABLE, type="server_error"
    )


def shutting_down() -> ApiError:
    return ApiError(
        "the server is shutting down; retry later or on another server", code="draining", status=UNAVAILABLE, type="server_error"
    )


def deadline_exceeded() -> ApiError:
    return ApiError(
        "request timed out: the deadline passed before the response was complete; raise `timeout` (seconds) or lower max_tokens",
        param="timeout",
        code="deadline_exceeded",
        status=REQUEST_TIMEOUT,
        type="timeout_error",
    )


def queue_full(in_flight: int) -> ApiError:
    return ApiError(
        f"the queue is full: {in_flight:,} sequences are running or waiting; retry after the time in Retry-After",
        code="rate_limit_exceeded",
        status=429,
        type="rate_limit_error",
    )


def quota_exceeded(limit: str) -> ApiError:
    return ApiError(
        f"the limit of this API key is exceeded: {limit}; retry after the time in Retry-After",
        code="rate_limit_exceeded",
        status=429,
        type="rate_limit_error",
    )


def engine_overloaded() -> ApiError:
    return ApiError(
        "the engine is overloaded; retry after the time in Retry-After",
        code="rate_limit_exceeded",
        status=429,
        type="rate_limit_error",
    ).with_retry_after(OVERLOAD_RETRY_SECONDS)


def slowed(seconds: float) -> ApiError:
    return ApiError(
        "too many of your requests needed more than they are given, or ended an engine; retry after the time in Retry-After",
        code="rate_limit_exceeded",
        status=429,
        type="rate_limit_error",
    ).with_retry_after(max(ceil(seconds), 1))


def too_many_sequences(requested: int, capacity: int) -> ApiError:
    return ApiError(
        f"the request needs {requested:,} sequences and the server takes {capacity:,} at a time; send fewer prompts or a smaller n",
        param="n",
        code="invalid_value",
    )


def unauthorized() -> ApiError:
    return ApiError(
        "missing or wrong API key; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`", code="invalid_api_key", status=401
    )


def key_expired() -> ApiError:
    return ApiError("the API key has expired; ask the operator of this server for another", code="invalid_api_key", status=401)


def needs_admin() -> ApiError:
    return ApiError("this route needs an API key with the role admin", code="forbidden", status=403, type="permission_error")


def forbidden(header: str) -> ApiError:
    return ApiError(
        f"the {header} header is not allowed: the server accepts only its own host names and origins; see --allow-host and --cors",
        code="forbidden",
        status=403,
        type="permission_error",
    )


def bad_host(num_headers: int) -> ApiError:
    """https://www.rfc-editor.org/rfc/rfc9112#section-3.2"""
    return ApiError(f"an HTTP/1.1 request needs one Host header; this one has {num_headers}", code="bad_host")


def invalid_http() -> ApiError:
    return ApiError("this is not a valid HTTP/1.1 request", code="invalid_http")


def too_large_head(limit: int, most: int) -> ApiError:
    return ApiError(
        f"the request's headers are larger than {limit:,} bytes, or more than {most}", code="headers_too_large", status=431
    )


def too_large(limit: int) -> ApiError:
    return ApiError(f"the request body is larger than {limit:,} bytes", code="body_too_large", status=413)


def too_many_bytes() -> ApiError:
    return ApiError(
        "the server is reading too many request bodies at the moment; retry after the time in Retry-After",
        code=TOO_MANY_BYTES,
        status=UNAVAILABLE,
        type="server_error",
    )


def body_timeout() -> ApiError:
    return ApiError("the request body did not arrive in time", code="body_timeout", status=REQUEST_TIMEOUT, type="timeout_error")


def not_found() -> ApiError:
    return ApiError("unknown route; see /openapi.json", code="not_found", status=404)


def method_not_allowed() -> ApiError:
    return ApiError("method not allowed; see the Allow header", code="method_not_allowed", status=405)


def unknown_response(param: str | None = None) -> ApiError:
    return ApiError(
        "response not found: it was not stored, has expired, was deleted, or is another key's",
        param=param,
        code="not_found",
        status=404,
    )


def unknown_model(served: Sequence[str]) -> ApiError:
    names = ", ".join(map(repr, served[:MAX_NAMES])) + (", ..." if len(served) > MAX_NAMES else "")
    return ApiError(f"model not found; this server serves {names}", param="model", code="model_not_found", status=404)
