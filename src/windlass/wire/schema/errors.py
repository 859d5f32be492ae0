"""Errors in OpenAI's format: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import msgspec

from windlass.errors import BadInput
from windlass.wire.schema.structs import ResponseStruct

INVALID = "invalid_request_error"


class ErrorDetail(ResponseStruct):
    message: str = ""
    type: str | None = None
    param: str | None = None
    code: str | int | None = None


class ErrorBody(ResponseStruct):
    error: ErrorDetail


class ApiError(BadInput):
    """A rejected or failed request: the parameter at fault, and the HTTP status of the response."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400, type: str = INVALID
    ) -> None:
        super().__init__(message)
        self.param, self.code, self.status, self.type = param, code, status, type
        self.retry_seconds: int | None = None

    def with_retry_after(self, seconds: int) -> Self:
        """Sets the Retry-After header."""
        self.retry_seconds = seconds
        return self

    @property
    def body(self) -> bytes:
        return error_body(str(self), type=self.type, param=self.param, code=self.code)


def error_body(message: str, *, type: str = INVALID, param: str | None = None, code: str | None = None) -> bytes:
    return msgspec.json.encode(ErrorBody(error=ErrorDetail(message=message, type=type, param=param, code=code)))


def unsupported(param: str, why: str) -> ApiError:
    """A known parameter or value that is not supported."""
    return ApiError(f"{param} {why}", param=param, code="unsupported_parameter")


def invalid(param: str, why: str) -> ApiError:
    return ApiError(f"{param} {why}", param=param, code="invalid_value")


def renamed(refusal: ApiError, params: Mapping[str, str]) -> ApiError:
    """With the parameter as another API names it: `messages[0]` -> `input[0]`."""
    for old, new in params.items():
        if refusal.param is not None and (refusal.param == old or refusal.param.startswith((f"{old}.", f"{old}["))):
            param = new + refusal.param[len(old) :]
            message = str(refusal).replace(refusal.param, param, 1)
            found = ApiError(message, param=param, code=refusal.code, status=refusal.status, type=refusal.type)
            found.retry_seconds = refusal.retry_seconds
            return found
    return refusal
