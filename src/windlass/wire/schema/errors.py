"""Errors as OpenAI's API writes them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from typing import Self

import msgspec

from windlass.errors import BadInput
from windlass.wire.schema.structs import Answered

INVALID = "invalid_request_error"


class ErrorDetail(Answered):
    message: str = ""
    type: str | None = None
    param: str | None = None
    code: str | int | None = None


class ErrorBody(Answered):
    error: ErrorDetail


class Refusal(BadInput):
    """A request that is not carried out, with the name of the parameter that is to blame and the HTTP status it is answered with."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400, type: str = INVALID
    ) -> None:
        super().__init__(message)
        self.param, self.code, self.status, self.type = param, code, status, type
        self.retry_seconds: int | None = None

    def after(self, seconds: int) -> Self:
        """It says when to ask again."""
        self.retry_seconds = seconds
        return self

    @property
    def body(self) -> bytes:
        return error_body(str(self), type=self.type, param=self.param, code=self.code)


def error_body(message: str, *, type: str = INVALID, param: str | None = None, code: str | None = None) -> bytes:
    return msgspec.json.encode(ErrorBody(error=ErrorDetail(message=message, type=type, param=param, code=code)))


def unsupported(param: str, why: str) -> Refusal:
    """Understood, and not offered here."""
    return Refusal(f"{param} {why}", param=param, code="unsupported_parameter")


def invalid(param: str, why: str) -> Refusal:
    return Refusal(f"{param} {why}", param=param, code="invalid_value")
