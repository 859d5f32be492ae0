"""Grammars of a single tool call, one per format that models use.

Calls in JSON must match the tool's schema. In formats with strings as plain text, argument names and non-string values must match
it; plain strings are free unless the schema is an enum.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from windlass.core.model import Frozen
from windlass.model.text.grammar.grammar import Grammar
from windlass.model.text.grammar.schema import DEFINITIONS
from windlass.model.text.parse.tool_calls import schema_types

Parameters = dict[str, Any]
"""A tool's JSON schema."""


class ToolSchema(NamedTuple):
    name: str
    parameters: Parameters
    is_strict: bool
    """Rejects keywords that cannot be enforced."""


class CallForm(Frozen):
    mark: str
    """The marker before a call; a list of calls has it once."""
    one: Callable[[Grammar, ToolSchema], str]
    """The grammar after the marker."""
    between: str | None = None
    """The separator of two calls; None: only one call is possible."""
    is_list: bool = False
    """A JSON list of calls."""


def _tagged_json(grammar: Grammar, tool: ToolSchema) -> str:
    opened = grammar.literal(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
    closed = f"{grammar.literal('}')} {_line(grammar)} {grammar.literal('</tool_call>')}"
    return f"{_line(grammar)} {opened} {grammar.schema(tool.parameters, tool.is_strict)} {closed}"


def _pairs(grammar: Grammar, tool: ToolSchema) -> str:
    grammar.take(tool.parameters)
    line = _line(grammar)

    def pair(key: str, schema: Any) -> str:
        opened = f"{line} {grammar.literal(f'<arg_key>{key}</arg_key>')} {line} {grammar.literal('<arg_value>')}"
        return f"{opened} {_value(grammar, schema, tool, '</arg_value>')}"

    return f"{grammar.literal(tool.name)} {_each(pair, tool.parameters)} {line} {grammar.literal('</tool_call>')}"


def _function_tags(grammar: Grammar, tool: ToolSchema) -> str:
    grammar.take(tool.parameters)
    newline = grammar.literal("\n")

    def parameter(key: str, schema: Any) -> str:
        value = _value(grammar, schema, tool, "\n</parameter>\n")
        return f"{grammar.literal(f'<parameter={key}>')} {newline} {value}"

    opened = f"{newline} {grammar.literal(f'<function={tool.name}>')} {newline}"
    closed = f"{grammar.literal('</function>')} {newline} {grammar.literal('</tool_call>')}"
    return f"{opened} {_each(parameter, tool.parameters)} {closed}"


def _listed(grammar: Grammar, tool: ToolSchema) -> str:
    opened = grammar.literal(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
    return f"{opened} {grammar.schema(tool.parameters, tool.is_strict)} {grammar.literal('}')}"


def _named(grammar: Grammar, tool: ToolSchema) -> str:
    return f"{grammar.literal(f'{tool.name}[ARGS]')} {grammar.schema(tool.parameters, tool.is_strict)}"


def _bare(grammar: Grammar, tool: ToolSchema) -> str:
    """One schema for the whole call, since the alternative, an answer, may be JSON too."""
    grammar.take(tool.parameters)
    properties = {"name": {"const": tool.name}, "parameters": _rebased(tool.parameters, "#/properties/parameters")}
    return grammar.schema(
        {"type": "object", "properties": properties, "required": ["name", "parameters"], "additionalProperties": False},
        tool.is_strict,
    )


def _to_function(grammar: Grammar, tool: ToolSchema) -> str:
    return f"{grammar.literal(f'{tool.name} <|constrain|>json<|message|>')} {grammar.schema(tool.parameters, tool.is_strict)}"


CALLS: dict[str, CallForm] = {
    "json": CallForm(mark="<tool_call>", one=_tagged_json, between="\n"),
    "arg_pairs": CallForm(mark="<tool_call>", one=_pairs, between="\n"),
    "xml_function": CallForm(mark="<tool_call>", one=_function_tags, between="\n"),
    "bracket_list": CallForm(mark="[TOOL_CALLS]", one=_listed, between=", ", is_list=True),
    "bracket_args": CallForm(mark="[TOOL_CALLS]", one=_named, between=""),
    "bare_json": CallForm(mark="", one=_bare),
    "channels": CallForm(mark="<|channel|>commentary to=functions.", one=_to_function),
}


def _line(grammar: Grammar) -> str:
    """An optional newline: templates of one family differ in it."""
    return grammar.literal("\n") + "?"


# --- arguments -------------------------------------------------------------------------------------------------------


def _each(write: Callable[[str, Any], str], parameters: Mapping[str, Any]) -> str:
    """Every argument in schema order; optional ones may be left out."""
    properties: Any = parameters.get("properties")
    required: Any = parameters.get("required")
    listed: Sequence[Any] = cast(Sequence[Any], required) if isinstance(required, (list, tuple)) else ()
    needed = {name for name in listed if isinstance(name, str)}
    given = cast(Mapping[str, Any], properties) if isinstance(properties, Mapping) else dict[str, Any]()
    return " ".join(write(key, schema) if key in needed else f"({write(key, schema)})?" for key, schema in given.items())


def _value(grammar: Grammar, schema: Any, tool: ToolSchema, end: str) -> str:
    """Strings are plain text up to the closing tag."""
    given = cast(Mapping[str, Any], schema) if isinstance(schema, Mapping) else dict[str, Any]()
    chosen: Any = given.get("enum", [given["const"]] if "const" in given else None)
    if isinstance(chosen, list) and all(isinstance(choice, str) for choice in cast(list[Any], chosen)):
        choices = " | ".join(grammar.literal(choice) for choice in cast(list[str], chosen))
        return f"({choices}) {grammar.literal(end)}"
    types = schema_types(given)
    if "string" in types or (not types and "$ref" not in given):
        return grammar.until(end)
    kept = {key: tool.parameters[key] for key in DEFINITIONS if key in tool.parameters} if _refers(given) else {}
    return f"{grammar.schema({**kept, **given}, tool.is_strict)} {grammar.literal(end)}"


def _refers(schema: Any) -> bool:
    """Whether there is a `$ref` in it: what it leads to has to be given along."""
    if isinstance(schema, Mapping):
        given = cast(Mapping[str, Any], schema)
        return "$ref" in given or any(map(_refers, given.values()))
    return isinstance(schema, list) and any(map(_refers, cast(list[Any], schema)))


def _rebased(schema: Any, to: str) -> Any:
    """Rewrites `$ref`s of a schema that is embedded in another."""
    if isinstance(schema, Mapping):
        given = cast(Mapping[str, Any], schema)
        return {key: _reference(value, to) if key == "$ref" else _rebased(value, to) for key, value in given.items()}
    return [_rebased(item, to) for item in cast(list[Any], schema)] if isinstance(schema, list) else schema


def _reference(value: Any, to: str) -> Any:
    return to + value[1:] if isinstance(value, str) and value.startswith("#") else value
