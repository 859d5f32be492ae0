"""HTTP errors of a server -> our errors: ApiError (change the request), Unavailable (retry), Late (timed out)."""

from __future__ import annotations

import msgspec

from windlass.core import client
from windlass.core.client import Late, Unavailable
from windlass.core.constants import DECODE_ERRORS
from windlass.errors import Error
from windlass.wire.schema.errors import INVALID, ApiError, ErrorBody, ErrorDetail

NEEDS_KEY = (401, 403)
TIMEOUTS = (408, 504)
MAX_SHOWN = 500


class ServerBusy(client.Busy):
    """The server rejects requests for now (429, 503)."""

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


def error_from_response(status: int | None, detail: ErrorDetail, retry_after: float | None = None) -> Error:
    """`status` None: an error event within a stream."""
    reason = " ".join(detail.message.split())[:MAX_SHOWN] or "no reason given"
    if status is None:
        return (
            _refusal(400, detail, reason) if detail.type == INVALID else Unavailable(f"the server aborted the stream: {reason}")
        )
    if status in TIMEOUTS:
        return Late(f"request timed out on the server ({status}): {reason}")
    if status in (429, 503):
        again = "" if retry_after is None else f"; retry in {retry_after:g} seconds"
        return ServerBusy(f"the server is busy ({status}): {reason}{again}", retry_after)
    if status >= 500:
        return Unavailable(f"the server failed ({status}): {reason}")
    if status in NEEDS_KEY:
        return _refusal(status, detail, f"API key missing or rejected ({status}): {reason}")
    if status < 400:
        return ApiError(f"unexpected HTTP status {status} (a redirect?); give the server's final URL", status=status)
    return _refusal(status, detail, reason)


def _refusal(status: int, detail: ErrorDetail, message: str) -> ApiError:
    code = None if detail.code is None else str(detail.code)
    return ApiError(message, param=detail.param, code=code, status=status, type=detail.type or INVALID)


class _Plain(msgspec.Struct):
    """Error bodies in other formats."""

    message: str | None = None
    detail: object = None
    error: str | None = None


def read_error(body: bytes) -> ErrorDetail:
    """Parses an error body of any format."""
    try:
        return msgspec.json.decode(body, type=ErrorBody).error
    except DECODE_ERRORS:
        pass
    try:
        plain = msgspec.json.decode(body, type=_Plain)
    except DECODE_ERRORS:
        return ErrorDetail(message=body[:MAX_SHOWN].decode(errors="replace"))
    text = plain.message or plain.error or plain.detail or ""
    return ErrorDetail(message=text if isinstance(text, str) else msgspec.json.encode(text).decode())


def read_retry_after(header: str | None) -> float | None:
    """In seconds; dates are ignored."""
    try:
        seconds = float(header or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds < 86_400 else None
