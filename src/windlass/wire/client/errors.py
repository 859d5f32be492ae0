"""What went wrong at another server -> our errors: whether to change the request (Refusal), to ask again (Unavailable), or it took too long."""

from __future__ import annotations

import msgspec

from windlass.core import client
from windlass.core.client import Late, Unavailable
from windlass.errors import Error
from windlass.wire.schema.errors import INVALID, ErrorBody, ErrorDetail, Refusal

NEEDS_KEY = (401, 403)
TOO_LATE = (408, 504)
MAX_SHOWN = 500


class Busy(client.Busy):
    """The server is there and takes no more now (429, 503)."""

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


def failure(status: int | None, detail: ErrorDetail, retry_after: float | None = None) -> Error:
    """`status` None: in the middle of a stream, whose status was 200."""
    said = " ".join(detail.message.split())[:MAX_SHOWN] or "without saying why"
    if status is None:
        return _refusal(400, detail, said) if detail.type == INVALID else Unavailable(f"the server broke off: {said}")
    if status in TOO_LATE:
        return Late(f"the server took too long ({status}): {said}")
    if status in (429, 503):
        again = "" if retry_after is None else f"; it says to ask again in {retry_after:g} seconds"
        return Busy(f"the server takes no requests now ({status}): {said}{again}", retry_after)
    if status >= 500:
        return Unavailable(f"the server failed ({status}): {said}")
    if status in NEEDS_KEY:
        return _refusal(status, detail, f"the server refused the API key, or wants one ({status}): {said}")
    if status < 400:
        return Refusal(f"the server answered {status} and not with an answer; give its final address", status=status)
    return _refusal(status, detail, said)


def _refusal(status: int, detail: ErrorDetail, message: str) -> Refusal:
    code = None if detail.code is None else str(detail.code)
    return Refusal(message, param=detail.param, code=code, status=status, type=detail.type or INVALID)


class _Plain(msgspec.Struct):
    """Errors of servers with their own form."""

    message: str | None = None
    detail: object = None
    error: str | None = None


def read_error(body: bytes) -> ErrorDetail:
    """Of an answer that is an error, in whatever form."""
    try:
        return msgspec.json.decode(body, type=ErrorBody).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    try:
        plain = msgspec.json.decode(body, type=_Plain)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ErrorDetail(message=body[:MAX_SHOWN].decode(errors="replace"))
    said = plain.message or plain.error or plain.detail or ""
    return ErrorDetail(message=said if isinstance(said, str) else msgspec.json.encode(said).decode())


def read_retry_after(header: str | None) -> float | None:
    """In seconds; a date, which it may be too, is passed over."""
    try:
        seconds = float(header or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds < 86_400 else None
