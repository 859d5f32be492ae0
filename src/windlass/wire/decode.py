"""JSON bytes -> a struct, or an ApiError that names the parameter as OpenAI's API does: `messages[0].content`."""

from __future__ import annotations

import difflib
import re
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from windlass.wire.schema.errors import ApiError

Body = TypeVar("Body")

_PATH = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$(?P<path>.*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
MAX_MESSAGE = 2000
MAX_SHOWN = 100
"""Characters of a client-chosen name that are quoted."""


def decode(body: bytes, kind: type[Body]) -> Body:
    try:
        return _decoder(kind).decode(body)
    except msgspec.ValidationError as error:
        raise validation_error(str(error), kind) from None
    except msgspec.DecodeError:  # its message may quote the body
        raise ApiError("the request body is not valid JSON", code="invalid_json") from None
    except UnicodeDecodeError:
        raise ApiError("the request body is not valid UTF-8", code="invalid_json") from None
    except RecursionError:
        raise ApiError("the request body is nested too deeply", code="invalid_json") from None


def convert(value: Any, kind: type[Body]) -> Body:
    """The same for values that are already decoded."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise validation_error(str(error), kind) from None


def validation_error(message: str, kind: Any) -> ApiError:
    """msgspec's message -> an ApiError."""
    if len(message) > 2 * MAX_MESSAGE:  # it quotes a very long name; the rest is at both ends
        message = message[:MAX_MESSAGE] + message[-MAX_MESSAGE:]
    match = _PATH.match(message)
    assert match is not None
    what, path = match["what"], (match["path"] or "").removeprefix(".").replace("[...]", "")
    if unknown := _UNKNOWN.fullmatch(what):
        name = unknown[1][:MAX_SHOWN]
        return _unknown(_joined(path, name), "" if path else name, kind)
    if missing := _MISSING.fullmatch(what):
        name = _joined(path, missing[1])
        return ApiError(f"{name} is missing", param=name, code="missing_required_parameter")
    what = what[:1].lower() + what[1:300]  # it may quote the input
    code = "invalid_type" if ", got " in what else "invalid_value"
    return ApiError(f"{path or 'the request body'}: {what}", param=path or None, code=code)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _unknown(param: str, name: str, kind: Any) -> ApiError:
    known = [field.encode_name for field in msgspec.structs.fields(kind)] if name and isinstance(kind, type) else []
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]}?" if near else "; remove it"
    return ApiError(f"unknown parameter {param!r}{hint}", param=param, code="unknown_parameter")


@lru_cache(maxsize=32)
def _decoder(kind: type[Any]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)
