"""A body's bytes -> a struct, or a Refusal that names the parameter as OpenAI's API does: `messages[0].content`."""

from __future__ import annotations

import difflib
import re
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from windlass.wire.schema.errors import Refusal

Body = TypeVar("Body")

_PATH = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$(?P<path>.*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
MAX_MESSAGE = 2000
MAX_SHOWN = 100
"""Of a name that a stranger chose."""


def decode(body: bytes, kind: type[Body]) -> Body:
    try:
        return _decoder(kind).decode(body)
    except msgspec.ValidationError as error:
        raise refusal(str(error), kind) from None
    except msgspec.DecodeError:  # its words may have bytes of the body in them
        raise Refusal("the body is not valid JSON", code="invalid_json") from None
    except UnicodeDecodeError:
        raise Refusal("the body is not valid UTF-8", code="invalid_json") from None
    except RecursionError:
        raise Refusal("the body is nested too deeply", code="invalid_json") from None


def convert(value: Any, kind: type[Body]) -> Body:
    """The same for values that are no longer bytes."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise refusal(str(error), kind) from None


def refusal(message: str, kind: Any) -> Refusal:
    """msgspec's words -> ours."""
    if len(message) > 2 * MAX_MESSAGE:  # it quotes a name of megabytes: what it says of it stands at its ends
        message = message[:MAX_MESSAGE] + message[-MAX_MESSAGE:]
    match = _PATH.match(message)
    assert match is not None
    what, path = match["what"], (match["path"] or "").removeprefix(".").replace("[...]", "")
    if unknown := _UNKNOWN.fullmatch(what):
        name = unknown[1][:MAX_SHOWN]
        return _unknown(_joined(path, name), "" if path else name, kind)
    if missing := _MISSING.fullmatch(what):
        name = _joined(path, missing[1])
        return Refusal(f"{name} is missing", param=name, code="missing_required_parameter")
    what = what[:1].lower() + what[1:300]  # it may quote what was sent
    code = "invalid_type" if ", got " in what else "invalid_value"
    return Refusal(f"{path or 'the body'}: {what}", param=path or None, code=code)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _unknown(param: str, name: str, kind: Any) -> Refusal:
    known = [field.encode_name for field in msgspec.structs.fields(kind)] if name and isinstance(kind, type) else []
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]}?" if near else "; it would have no effect, so leave it out"
    return Refusal(f"unknown parameter {param!r}{hint}", param=param, code="unknown_parameter")


@lru_cache(maxsize=32)
def _decoder(kind: type[Any]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)
