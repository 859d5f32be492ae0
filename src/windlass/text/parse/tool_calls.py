"""Tool calls between `<tool_call>` and `</tool_call>` in streamed text, in three formats:

json          {"name": "f", "arguments": {"k": 1}}                                          Hermes, Qwen3
arg_pairs     f <arg_key>k</arg_key> <arg_value>1</arg_value>                               GLM-4.5 and later
xml_function  <function=f> <parameter=k> 1 </parameter> </function>                         Qwen3-Coder, INTELLECT-3

Calls are returned complete. Invalid ones are returned as text, starting with the opening tag only, so that a valid call inside or
after it is still found. Whitespace around calls is dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from math import isinf
from typing import Any, NoReturn, cast
from uuid import uuid4

from windlass.core.request import ToolCall
from windlass.text.parse.splitter import ToolCallSplitter
from windlass.text.parse.stop_filter import SPACE

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MARKERS = (OPEN, CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
"""Special tokens in some vocabularies."""

Schemas = Mapping[str, Mapping[str, Any]]
"""Tool -> parameter -> its JSON schema."""


class TaggedCallSplitter(ToolCallSplitter):
    def __init__(self, form: str, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(OPEN)
        self._parse, self._may_go_on = FORMS[form]
        self._schemas = schemas(tools)
        self._searched = 0
        """Where in the buffer to look for the next closing tag."""

    def _begin(self) -> None:
        self._searched = 0

    def _next_calls(self, final: bool) -> list[ToolCall] | str | None:
        opened = self._buffer.index(OPEN) + len(OPEN)
        while (end := self._buffer.find(CLOSE, max(self._searched, opened))) >= 0:
            call = self._parse(self._buffer[opened:end], self._schemas)
            if call is not None:
                return self._take_calls([call], end + len(CLOSE))
            if not self._may_go_on(self._buffer[opened:end]):
                return self._as_text(opened)
            self._searched = end + 1
        self._searched = max(self._searched, len(self._buffer) - len(CLOSE) + 1)
        return self._as_text(opened) if final else None


# --- the three formats -------------------------------------------------------------------------------------------------

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NAME = re.compile(r"[^\s<>=]+")
_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^\s<>=]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^\s<>=]+)>(.*?)</parameter>", re.DOTALL)
_FUNCTION_END = re.compile(r"\s*</function>\s*")


def new_tool_call(name: str, arguments: dict[str, Any], id_characters: int | None = None) -> ToolCall:
    """With a new id, which the tool's result refers to."""
    number = uuid4().hex
    chosen = f"call_{number[:24]}" if id_characters is None else number[:id_characters]
    return ToolCall(id=chosen, name=name, arguments=json.dumps(arguments, ensure_ascii=False))


def tool_call_from_json(value: Any, id_characters: int | None = None) -> ToolCall | None:
    """From parsed JSON with a name and an object of arguments (or parameters); None: not a call."""
    if not isinstance(value, dict):
        return None
    call = cast(dict[str, Any], value)
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):  # a JSON string, as in the API
        arguments = parse_json(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return new_tool_call(name, cast(dict[str, Any], arguments), id_characters)


def _from_json(body: str, schemas: Schemas) -> ToolCall | None:
    """JSON has types, so schemas are not needed."""
    return tool_call_from_json(parse_json(body))


def _in_string(body: str) -> bool:
    return '"' in _STRING.sub("", body)


def _from_pairs(body: str, schemas: Schemas) -> ToolCall | None:
    name, tag, _ = body.partition("<arg_key>")
    position = len(name) if tag else len(body)
    name = name.strip(SPACE)
    if _NAME.fullmatch(name) is None:
        return None
    arguments: dict[str, Any] = {}
    while match := _PAIR.match(body, position):
        key, position = match[1].strip(SPACE), match.end()
        arguments[key] = coerce(match[2], schemas.get(name, {}).get(key))
    return None if body[position:].strip(SPACE) else new_tool_call(name, arguments)


def _in_pair(body: str) -> bool:
    return body.rfind("<arg_value>") > body.rfind("</arg_value>")


def _from_function(body: str, schemas: Schemas) -> ToolCall | None:
    opened = _FUNCTION.match(body)
    if opened is None:
        return None
    position, arguments = opened.end(), dict[str, Any]()
    while match := _PARAMETER.match(body, position):
        position = match.end()
        value = match[2].removeprefix("\n").removesuffix("\n")  # the template puts each value on its own lines
        arguments[match[1]] = coerce(value, schemas.get(opened[1], {}).get(match[1]))
    return new_tool_call(opened[1], arguments) if _FUNCTION_END.fullmatch(body, position) else None


def _in_parameter(body: str) -> bool:
    return body.rfind("<parameter=") > body.rfind("</parameter>")


FORMS: dict[str, tuple[Callable[[str, Schemas], ToolCall | None], Callable[[str], bool]]] = {
    "json": (_from_json, _in_string),
    "arg_pairs": (_from_pairs, _in_pair),
    "xml_function": (_from_function, _in_parameter),
}
"""Parser of a call, and whether a closing tag is inside a value, so that the call may continue after it."""


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
