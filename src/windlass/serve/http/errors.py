"""What went wrong -> what the client is told. Pure.

An engine's own words may have paths in them, or what its process said last; clients get ours, the operator's log gets theirs.
"""

from __future__ import annotations

from windlass.core.client import Broken, Busy, Late, Unavailable
from windlass.errors import BadCheckpoint, BadConfig, BadInput, Error
from windlass.serve.backend.in_flight import Why
from windlass.serve.http.asgi import CROWDED
from windlass.wire.schema.errors import Refusal
from windlass.wire.server.requests import blamed

UNAVAILABLE = 503
BUSY_SECONDS = 2
LATE = 408
"""Not 504: nothing behind the server failed, and whoever sent the request chose the time."""


def refused(error: BaseException, body: object = None) -> Refusal:
    """`body`: of the request that it is an answer to, whose parameters are named."""
    match error:
        case Refusal():
            return error
        case BadCheckpoint() | BadConfig():
            return engine_gone()
        case BadInput():
            return blamed(error, body)
        case Late():
            return late()
        case Broken():
            return broken()
        case Busy():
            return busy()
        case Unavailable() | Error():
            return engine_gone()
        case _:
            return Refusal(
                "something went wrong in the server; its log says more", code="internal", status=500, type="server_error"
            )


def ended(why: Why) -> Refusal:
    return late() if why == "late" else closing()


def engine_gone() -> Refusal:
    return Refusal(
        "the engine is not available; it is being started anew, so ask again in a moment",
        code="engine_unavailable",
        status=UNAVAILABLE,
        type="server_error",
    )


def broken() -> Refusal:
    return Refusal(
        "this answer could not be computed, and the same again will hardly be; others are not concerned",
        code="answer_failed",
        status=500,
        type="server_error",
    )


def loading() -> Refusal:
    return Refusal("the model is being loaded; ask again in a moment", code="loading", status=UNAVAILABLE, type="server_error")


def closing() -> Refusal:
    return Refusal(
        "the server is shutting down; ask another one, or again later", code="draining", status=UNAVAILABLE, type="server_error"
    )


def late() -> Refusal:
    return Refusal(
        "the deadline passed before the answer was whole; allow more with `timeout` (seconds), or ask for fewer tokens",
        param="timeout",
        code="deadline_exceeded",
        status=LATE,
        type="timeout_error",
    )


def full(waiting: int) -> Refusal:
    return Refusal(
        f"the queue is full: {waiting:,} sequences are running or waiting; ask again after the time in Retry-After",
        code="rate_limit_exceeded",
        status=429,
        type="rate_limit_error",
    )


def busy() -> Refusal:
    return Refusal(
        "the engine has too much of this to do at the moment; ask again after the time in Retry-After",
        code="rate_limit_exceeded",
        status=429,
        type="rate_limit_error",
    ).after(BUSY_SECONDS)


def never(asked: int, capacity: int) -> Refusal:
    return Refusal(
        f"the request asks for {asked:,} answers at once and there is room for {capacity:,}; ask for fewer prompts or a smaller n",
        param="n",
        code="invalid_value",
    )


def unauthorized() -> Refusal:
    return Refusal("a valid API key is needed: send it as `Authorization: Bearer KEY`", code="invalid_api_key", status=401)


def foreign(what: str) -> Refusal:
    return Refusal(
        f"refused because of its {what} header: this server answers to its own names and pages only; see --allow-host and --cors",
        code="forbidden",
        status=403,
        type="permission_error",
    )


def too_large(limit: int) -> Refusal:
    return Refusal(f"the body is larger than {limit:,} bytes", code="body_too_large", status=413)


def crowded() -> Refusal:
    return Refusal(
        "too many bytes of requests are being read at this moment; ask again in a moment",
        code=CROWDED,
        status=UNAVAILABLE,
        type="server_error",
    )


def slow_body() -> Refusal:
    return Refusal("the body did not come in time", code="body_timeout", status=408, type="timeout_error")


def unknown_route() -> Refusal:
    return Refusal("there is no such route; see /openapi.json", code="not_found", status=404)


def wrong_method() -> Refusal:
    return Refusal("this route does not take that method; see the Allow header", code="method_not_allowed", status=405)


def unknown_model(served: str) -> Refusal:
    return Refusal(f"there is no such model here; {served!r} is served", param="model", code="model_not_found", status=404)
