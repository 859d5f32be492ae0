"""Tool calls between `<tool_call>` and `</tool_call>` in streamed text, in three formats:

json          {"name": "f", "arguments": {"k": 1}}                                          Hermes, Qwen3
arg_pairs     f <arg_key>k</arg_key> <arg_value>1</arg_value>                               GLM-4.5 and later
xml_function  <function=f> <parameter=k> 1 </parameter> </function>                         Qwen3-Coder, INTELLECT-3

What is no call is returned as text without the tags around it, and a valid call inside or after it is still found. Whitespace around
calls is dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from math import isinf
from typing import Any, NamedTuple, NoReturn, cast

from windlass.core.request import ToolCall
from windlass.model.text.parse.partial_calls import PartialCall, partial_json_call
from windlass.model.text.parse.splitter import ToolCallSplitter
from windlass.model.text.parse.stop_filter import SPACE, partial_match_length

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MARKERS = (OPEN, CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
"""Special tokens in some vocabularies."""

Schemas = Mapping[str, Mapping[str, Any]]
"""Tool -> parameter -> its JSON schema."""


class TaggedCallSplitter(ToolCallSplitter):
    def __init__(self, form: str, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(OPEN)
        self._form = FORMS[form]
        self._schemas = schemas(tools)
        self._searched = 0
        """Where in the buffer to look for the next closing tag."""
        self._has_stray_close = False
        """The closing tag of what was no call is still to come."""

    def _begin(self) -> None:
        self._searched = 0

    def _content(self) -> str:
        if not self._has_stray_close:
            return super()._content()
        if self._after_call:
            self._buffer = self._buffer.lstrip(SPACE)
            self._after_call = not self._buffer
        begin, close = self._buffer.find(OPEN), self._buffer.find(CLOSE)
        if close >= 0 and (begin < 0 or close < begin):
            text, self._buffer = self._buffer[:close], self._buffer[close + len(CLOSE) :]
            self._has_stray_close = False
            return text + super()._content()
        if begin >= 0:
            return super()._content()
        held = partial_match_length(self._buffer, (OPEN, CLOSE))
        end = len(self._buffer[: len(self._buffer) - held].rstrip(SPACE))
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        return text

    def _next_calls(self, final: bool) -> list[ToolCall] | str | None:
        opened = self._buffer.index(OPEN) + len(OPEN)
        while (end := self._buffer.find(CLOSE, max(self._searched, opened))) >= 0:
            body = self._buffer[opened:end]
            call = self._form.parse(body, self._schemas)
            if call is None and self._form.may_go_on(body):
                self._searched = end + 1
                continue
            partial = self._form.partial(body, self._schemas)
            if call is None and partial is None:
                self._has_stray_close = True
                return self._as_text(opened, OPEN)
            return self._take_calls([self._finished(call, partial)], end + len(CLOSE))
        self._searched = max(self._searched, len(self._buffer) - len(CLOSE) + 1)
        if not final:
            if self._progress.is_due(len(self._buffer)):
                self._progress.update(self._form.partial(self._buffer[opened:], self._schemas))
            return None
        return self._unclosed(opened, self._form.partial(self._buffer[opened:], self._schemas))

    def _unclosed(self, opened: int, partial: PartialCall | None) -> list[ToolCall] | str:
        """The output ended within a call: complete but for its tag, or cut off; what has no name yet is dropped with its tag."""
        body = self._buffer[opened:]
        call = self._form.parse(body[: len(body) - partial_match_length(body, (CLOSE,))], self._schemas)
        if call is not None and self._form.is_certain(body):
            return self._take_calls([self._finished(call, partial)], len(self._buffer))
        if partial is not None:
            return self._take_calls([self._progress.finished(*partial)], len(self._buffer))
        if OPEN in body:  # a call may follow
            self._has_stray_close = True
            return self._as_text(opened, OPEN)
        return self._as_text(len(self._buffer))[: opened - len(OPEN)]

    def _finished(self, call: PartialCall | None, partial: PartialCall | None) -> ToolCall:
        """A closed call, as it was announced if it was."""
        if partial is not None:
            return self._progress.finished(partial.name, partial.arguments + self._form.closing)
        assert call is not None
        return self._progress.finished(*call)


# --- the three formats -------------------------------------------------------------------------------------------------

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NAME = re.compile(r"[^\s<>=]+")
_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_OPEN_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*)", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^\s<>=]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^\s<>=]+)>(.*?)</parameter>", re.DOTALL)
_OPEN_PARAMETER = re.compile(r"\s*<parameter=([^\s<>=]+)>(.*)", re.DOTALL)
_FUNCTION_END = re.compile(r"\s*</function>\s*")


def call_with(name: str, arguments: Mapping[str, Any]) -> PartialCall:
    return PartialCall(name, json.dumps(arguments, ensure_ascii=False))


def call_from_json(value: Any) -> PartialCall | None:
    """From parsed JSON with a name and an object of arguments (or parameters); None: not a call."""
    if not isinstance(value, dict):
        return None
    call = cast(dict[str, Any], value)
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):  # a JSON string, as in the API
        arguments = parse_json(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return call_with(name, cast(dict[str, Any], arguments))


def _from_json(body: str, schemas: Schemas) -> PartialCall | None:
    """JSON has types, so schemas are not needed."""
    return call_from_json(parse_json(body))


def _partial_json(body: str, schemas: Schemas) -> PartialCall | None:
    return partial_json_call(body)


def _in_string(body: str) -> bool:
    return '"' in _STRING.sub("", body)


def _from_pairs(body: str, schemas: Schemas) -> PartialCall | None:
    name, pairs, rest = _pairs(body, schemas)
    return None if not name or rest.strip(SPACE) else PartialCall(name, f"{{{', '.join(pairs)}}}")


def _partial_pairs(body: str, schemas: Schemas) -> PartialCall | None:
    """Without the closing brace."""
    if "<arg_key>" not in body:
        return None
    name, pairs, rest = _pairs(body, schemas)
    open_value = _OPEN_PAIR.fullmatch(rest)
    if open_value is not None and _is_text(schemas, name, key := open_value[1].strip(SPACE)):
        text = open_value[2]
        pairs.append(_written(key, text[: len(text) - partial_match_length(text, ("</arg_value>",))])[:-1])
    return PartialCall(name, "{" + ", ".join(pairs)) if name else None


def _pairs(body: str, schemas: Schemas) -> tuple[str, list[str], str]:
    """The name (empty: not one), the complete arguments as JSON, and the rest."""
    name, tag, _ = body.partition("<arg_key>")
    position = len(name) if tag else len(body)
    name = name.strip(SPACE)
    if _NAME.fullmatch(name) is None:
        return "", [], body
    pairs: list[str] = []
    while match := _PAIR.match(body, position):
        key, position = match[1].strip(SPACE), match.end()
        pairs.append(_written(key, coerce(match[2], schemas.get(name, {}).get(key))))
    return name, pairs, body[position:]


def _has_pair(body: str) -> bool:
    return "<arg_key>" in body


def _in_pair(body: str) -> bool:
    return body.rfind("<arg_value>") > body.rfind("</arg_value>")


def _from_function(body: str, schemas: Schemas) -> PartialCall | None:
    name, pairs, rest = _parameters(body, schemas)
    return PartialCall(name, f"{{{', '.join(pairs)}}}") if name and _FUNCTION_END.fullmatch(rest) else None


def _partial_function(body: str, schemas: Schemas) -> PartialCall | None:
    """Without the closing brace."""
    name, pairs, rest = _parameters(body, schemas)
    open_value = _OPEN_PARAMETER.fullmatch(rest)
    if open_value is not None and _is_text(schemas, name, open_value[1]):
        text = open_value[2]
        held = partial_match_length(text, ("\n</parameter>", "</parameter>"))
        pairs.append(_written(open_value[1], text[: len(text) - held].removeprefix("\n"))[:-1])
    return PartialCall(name, "{" + ", ".join(pairs)) if name else None


def _parameters(body: str, schemas: Schemas) -> tuple[str, list[str], str]:
    opened = _FUNCTION.match(body)
    if opened is None:
        return "", [], body
    name, position, pairs = opened[1], opened.end(), list[str]()
    while match := _PARAMETER.match(body, position):
        position = match.end()
        value = match[2].removeprefix("\n").removesuffix("\n")  # the template puts each value on its own lines
        pairs.append(_written(match[1], coerce(value, schemas.get(name, {}).get(match[1]))))
    return name, pairs, body[position:]


def _in_parameter(body: str) -> bool:
    return body.rfind("<parameter=") > body.rfind("</parameter>")


def _written(key: str, value: Any) -> str:
    return f"{json.dumps(key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"


def _is_text(schemas: Schemas, name: str, key: str) -> bool:
    """Whether a value is certainly a string: others are converted when they are complete."""
    return schema_types(schemas.get(name, {}).get(key)) == {"string"}


class CallFormat(NamedTuple):
    parse: Callable[[str, Schemas], PartialCall | None]
    """A complete call."""
    may_go_on: Callable[[str], bool]
    """Whether a closing tag is inside a value, so that the call may continue after it."""
    partial: Callable[[str, Schemas], PartialCall | None]
    """A call that is still being written."""
    closing: str
    """What is missing at the end of a partial call's arguments when it is closed."""
    is_certain: Callable[[str], bool]
    """Whether text that parses as a call without its closing tag is one: a name alone may be any word."""


FORMS: dict[str, CallFormat] = {
    "json": CallFormat(_from_json, _in_string, _partial_json, "", bool),
    "arg_pairs": CallFormat(_from_pairs, _in_pair, _partial_pairs, "}", _has_pair),
    "xml_function": CallFormat(_from_function, _in_parameter, _partial_function, "}", bool),
}


# --- types -----------------------------------------------------------------------------------------------------------

_PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}
_OF_TYPE: dict[str, Callable[[Any], bool]] = {
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "null": lambda value: value is None,
}


def schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """From tools with or without the `function` wrapper. Invalid schemas are ignored."""
    found: dict[str, dict[str, Any]] = {}
    for tool in tools:
        function = _object(tool.get("function", tool))
        properties = _object(_object(function.get("parameters")).get("properties"))
        found[str(function.get("name"))] = dict(properties)
    return found


def _object(value: Any) -> Mapping[str, Any]:
    return cast(Mapping[str, Any], value) if isinstance(value, Mapping) else {}


def coerce(text: str, schema: Any) -> Any:
    """Converts plain text to the schema's type; returns the text itself if that is not possible.

    Without a schema, valid JSON is parsed: templates write everything but strings as JSON.
    """
    types = schema_types(schema)
    if types == {"string"}:
        return text
    stripped = text.strip(SPACE)
    value = _PYTHON_CONSTANTS[stripped] if stripped in _PYTHON_CONSTANTS else parse_json(stripped)
    if value is _NOT_JSON:
        return text
    return value if not types or any(_OF_TYPE[kind](value) for kind in types if kind in _OF_TYPE) else text


def schema_types(schema: Any) -> set[str]:
    """All allowed types; empty: unspecified."""
    if not isinstance(schema, Mapping):
        return set()
    given = cast(Mapping[str, Any], schema)
    named = given.get("type")
    found = (
        {named}
        if isinstance(named, str)
        else {str(kind) for kind in cast(list[Any], named)}
        if isinstance(named, list)
        else set[str]()
    )
    for key in ("anyOf", "oneOf"):
        choices = given.get(key)
        for choice in cast(list[Any], choices) if isinstance(choices, list) else []:
            found |= schema_types(choice)
    return found


class _NotJson:
    """Marks invalid JSON; None would be JSON's null."""


_NOT_JSON = _NotJson()


def parse_json(text: str) -> Any:
    """Lenient: allows line breaks within strings. Rejects values that JSON or UTF-8 cannot represent."""
    try:
        value = json.loads(text, strict=False, parse_constant=_refuse, parse_float=_finite)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # fails on half a surrogate pair
        return value
    except (ValueError, RecursionError):
        return _NOT_JSON


def _refuse(word: str) -> NoReturn:
    raise ValueError(word)


def _finite(digits: str) -> float:
    number = float(digits)
    if isinf(number):
        raise ValueError(digits)
    return number
