"""Tool calls out of a model's text, as it arrives. Three ways of writing one, all between `<tool_call>` and `</tool_call>`:

json          {"name": "f", "arguments": {"k": 1}}                                          Hermes, Qwen3
arg_pairs     f <arg_key>k</arg_key> <arg_value>1</arg_value>                               GLM-4.5 and later
xml_function  <function=f> <parameter=k> 1 </parameter> </function>                         Qwen3-Coder, INTELLECT-3

A call comes out whole. What is no call comes out as the text it is: its opening tag first, so that a good call inside or behind it
is still found. Space around calls is no content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from math import isinf
from typing import Any, NoReturn, cast
from uuid import uuid4

from windlass.core.request import ToolCall
from windlass.text.parse.splitter import Splitting
from windlass.text.parse.stop_filter import SPACE

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MARKERS = (OPEN, CLOSE, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
"""Tokens of their own in some vocabularies."""

Schemas = Mapping[str, Mapping[str, Any]]
"""Tool -> parameter -> its JSON schema."""


class CallSplitter(Splitting):
    def __init__(self, form: str, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(OPEN)
        self._parse, self._may_go_on = FORMS[form]
        self._schemas = schemas(tools)
        self._searched = 0
        """Where in the waiting text the next closing tag is looked for."""

    def _begin(self) -> None:
        self._searched = 0

    def _found(self, final: bool) -> list[ToolCall] | str | None:
        opened = self._waiting.index(OPEN) + len(OPEN)
        while (end := self._waiting.find(CLOSE, max(self._searched, opened))) >= 0:
            call = self._parse(self._waiting[opened:end], self._schemas)
            if call is not None:
                return self._called([call], end + len(CLOSE))
            if not self._may_go_on(self._waiting[opened:end]):
                return self._as_text(opened)
            self._searched = end + 1
        self._searched = max(self._searched, len(self._waiting) - len(CLOSE) + 1)
        return self._as_text(opened) if final else None


# --- the three forms -------------------------------------------------------------------------------------------------

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NAME = re.compile(r"[^\s<>=]+")
_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^\s<>=]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^\s<>=]+)>(.*?)</parameter>", re.DOTALL)
_FUNCTION_END = re.compile(r"\s*</function>\s*")


def made_call(name: str, arguments: dict[str, Any], id_characters: int | None = None) -> ToolCall:
    """With an id of its own, by which the tool's answer will refer to it."""
    number = uuid4().hex
    chosen = f"call_{number[:24]}" if id_characters is None else number[:id_characters]
    return ToolCall(id=chosen, name=name, arguments=json.dumps(arguments, ensure_ascii=False))


def call_from(value: Any, id_characters: int | None = None) -> ToolCall | None:
    """From decoded JSON: a name, and arguments (or parameters) that are an object; None: it is no call."""
    if not isinstance(value, dict):
        return None
    call = cast(dict[str, Any], value)
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):  # JSON within JSON, as the API has it
        arguments = decoded(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return made_call(name, cast(dict[str, Any], arguments), id_characters)


def _from_json(body: str, schemas: Schemas) -> ToolCall | None:
    """Typed already."""
    return call_from(decoded(body))


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
        arguments[key] = typed(match[2], schemas.get(name, {}).get(key))
    return None if body[position:].strip(SPACE) else made_call(name, arguments)


def _in_pair(body: str) -> bool:
    return body.rfind("<arg_value>") > body.rfind("</arg_value>")


def _from_function(body: str, schemas: Schemas) -> ToolCall | None:
    opened = _FUNCTION.match(body)
    if opened is None:
        return None
    position, arguments = opened.end(), dict[str, Any]()
    while match := _PARAMETER.match(body, position):
        position = match.end()
        value = match[2].removeprefix("\n").removesuffix("\n")  # the template sets each value on lines of its own
        arguments[match[1]] = typed(value, schemas.get(opened[1], {}).get(match[1]))
    return made_call(opened[1], arguments) if _FUNCTION_END.fullmatch(body, position) else None


def _in_parameter(body: str) -> bool:
    return body.rfind("<parameter=") > body.rfind("</parameter>")


FORMS: dict[str, tuple[Callable[[str, Schemas], ToolCall | None], Callable[[str], bool]]] = {
    "json": (_from_json, _in_string),
    "arg_pairs": (_from_pairs, _in_pair),
    "xml_function": (_from_function, _in_parameter),
}
"""How a call is read, and whether a closing tag stands inside a value, so that the call may go on behind it."""


# --- types -----------------------------------------------------------------------------------------------------------

_WORDS = {"True": True, "False": False, "None": None}
_OF_TYPE: dict[str, Callable[[Any], bool]] = {
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "null": lambda value: value is None,
}


def schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """From tools as the API has them, with or without the wrapping `function`. What is no schema is passed over."""
    found: dict[str, dict[str, Any]] = {}
    for tool in tools:
        function = _object(tool.get("function", tool))
        properties = _object(_object(function.get("parameters")).get("properties"))
        found[str(function.get("name"))] = dict(properties)
    return found


def _object(value: Any) -> Mapping[str, Any]:
    return cast(Mapping[str, Any], value) if isinstance(value, Mapping) else {}


def typed(text: str, schema: Any) -> Any:
    """A value written as plain text, in the type that the schema asks for; the text itself where it cannot be that.

    Of a parameter without a schema, what reads as JSON is JSON: templates write everything but strings so.
    """
    types = schema_types(schema)
    if types == {"string"}:
        return text
    stripped = text.strip(SPACE)
    value = _WORDS[stripped] if stripped in _WORDS else decoded(stripped)
    if value is _NOTHING:
        return text
    return value if not types or any(_OF_TYPE[kind](value) for kind in types if kind in _OF_TYPE) else text


def schema_types(schema: Any) -> set[str]:
    """All that it may be; empty: not said."""
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


class _Nothing:
    """Not JSON. None would be JSON's null."""


_NOTHING = _Nothing()


def decoded(text: str) -> Any:
    """Lenient where models are careless: line breaks within strings are let through. What could not be written again is refused."""
    try:
        value = json.loads(text, strict=False, parse_constant=_refuse, parse_float=_finite)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no text
        return value
    except (ValueError, RecursionError):
        return _NOTHING


def _refuse(word: str) -> NoReturn:
    raise ValueError(word)


def _finite(digits: str) -> float:
    number = float(digits)
    if isinf(number):
        raise ValueError(digits)
    return number
