"""What a call must look like, in each of the ways that models write one; and where an answer or a call may stand in the model's text.

A call in JSON is held to its tool's schema. In the forms that write strings as plain text, the names of arguments and what is no
string are held to it, and of strings only those that are chosen from a list.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

from windlass.core.model import Frozen
from windlass.core.request import Constraint, tool_name
from windlass.errors import BadInput
from windlass.text.grammar import Grammar
from windlass.text.styles import PLAIN, style_tags
from windlass.text.tools import schema_types

Reasons = Literal["never", "first", "already"]
"""Whether a model may reason before it answers, or is in the middle of it where its answer begins."""
Tool = Mapping[str, Any]


class Asked(Frozen):
    """What is asked of an answer."""

    style: str
    constraint: Constraint | None = None
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str = "auto"
    reasons: Reasons = "never"


def answer_grammar(asked: Asked, special: Mapping[str, int]) -> str:
    """Empty: whatever the model writes will do."""
    must_call = asked.tool_choice not in ("auto", "none")
    if asked.constraint is None and not must_call:
        return ""
    if must_call and asked.style not in CALLS:
        raise BadInput(
            f"tool_choice is {asked.tool_choice!r}, and this model's chat template shows no way of writing calls that is known here; "
            "leave tool_choice out, or constrain the answer with a JSON schema"
        )
    grammar = Grammar(special)
    ways = [] if must_call else [_answer(asked, grammar)]
    if asked.style in CALLS and asked.tools and asked.tool_choice != "none":
        ways.append(_calls(asked, grammar))
    return grammar.built(f"{_lead(asked, grammar)} ({' | '.join(ways)})")


def _answer(asked: Asked, grammar: Grammar) -> str:
    assert asked.constraint is not None
    answer = grammar.constraint(asked.constraint)
    return f"{grammar.literal(FINAL)} {answer}" if asked.style == "channels" else answer


def _lead(asked: Asked, grammar: Grammar) -> str:
    """The reasoning before."""
    if asked.style == PLAIN:
        return ""
    if asked.style == "channels":
        return f"({grammar.literal(ANALYSIS)} {grammar.until('<|end|>')} {grammar.literal('<|start|>assistant')})*"
    opening, closing = style_tags(asked.style)
    if asked.reasons == "already":
        return f"{grammar.until(closing)} {grammar.space()}"
    if asked.reasons == "first":
        return f"({grammar.space()} {grammar.literal(opening)} {grammar.until(closing)} {grammar.space()})?"
    return ""


def _calls(asked: Asked, grammar: Grammar) -> str:
    """One call where it is named, otherwise one or several of any tool."""
    is_named = asked.tool_choice not in ("auto", "required")
    tools = [tool for tool in asked.tools if not is_named or tool_name(tool) == asked.tool_choice]
    form = CALLS[asked.style]
    call = grammar.rule(" | ".join(form.one(grammar, tool_name(tool), _parameters(tool)) for tool in tools), "call")
    before, between, after = (grammar.literal(text) if text else "" for text in (form.before, form.between, form.after))
    more = "" if is_named or form.between is None else f" ({between} {call})*"
    return f"{before} {call}{more} {after}".strip()


def _parameters(tool: Tool) -> dict[str, Any]:
    function = cast(Tool, tool.get("function", tool))
    given = function.get("parameters")
    if given is not None and not isinstance(given, Mapping):
        raise BadInput(f"the parameters of tool {tool_name(tool)!r} are no JSON schema")
    return {"type": "object", **cast(dict[str, Any], given or {"properties": {}, "additionalProperties": False})}


# --- one call of a tool ----------------------------------------------------------------------------------------------

FINAL, ANALYSIS = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>"


def _tagged_json(grammar: Grammar, name: str, parameters: dict[str, Any]) -> str:
    opened = grammar.literal(f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": ')
    closed = grammar.literal("}\n</tool_call>")
    return f"{opened} {grammar.schema(parameters)} {closed}"


def _pairs(grammar: Grammar, name: str, parameters: dict[str, Any]) -> str:
    def pair(key: str, schema: Any) -> str:
        opened = grammar.literal(f"\n<arg_key>{key}</arg_key>\n<arg_value>")
        return f"{opened} {_value(grammar, schema, parameters, '</arg_value>')}"

    opened, closed = grammar.literal(f"<tool_call>{name}"), grammar.literal("\n</tool_call>")
    return f"{opened} {_each(pair, parameters)} {closed}"


def _function_tags(grammar: Grammar, name: str, parameters: dict[str, Any]) -> str:
    def parameter(key: str, schema: Any) -> str:
        value = _value(grammar, schema, parameters, "\n</parameter>\n")
        return f"{grammar.literal(f'<parameter={key}>')} {newline} {value}"

    newline = grammar.literal("\n")
    opened, closed = grammar.literal(f"<tool_call>\n<function={name}>\n"), grammar.literal("</function>\n</tool_call>")
    return f"{opened} {_each(parameter, parameters)} {closed}"


def _listed(grammar: Grammar, name: str, parameters: dict[str, Any]) -> str:
    opened = grammar.literal(f'{{"name": {json.dumps(name)}, "arguments": ')
    return f"{opened} {grammar.schema(parameters)} {grammar.literal('}')}"


def _named(grammar: Grammar, name: str, parameters: dict[str, Any]) -> str:
    return f"{grammar.literal(f'[TOOL_CALLS]{name}[ARGS]')} {grammar.schema(parameters)}"


def _bare(grammar: Grammar, name: str, parameters: dict[str, Any]) -> str:
    """One schema for the whole, since the answer it may stand beside can be JSON too."""
    properties = {"name": {"const": name}, "parameters": _moved(parameters, "#/properties/parameters")}
    return grammar.schema(
        {"type": "object", "properties": properties, "required": ["name", "parameters"], "additionalProperties": False}
    )


def _to_function(grammar: Grammar, name: str, parameters: dict[str, Any]) -> str:
    opened = grammar.literal(f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>")
    return f"{opened} {grammar.schema(parameters)}"


class Form(Frozen):
    one: Callable[[Grammar, str, dict[str, Any]], str]
    between: str | None = None
    """Two calls; None: there is only one."""
    before: str = ""
    """All calls."""
    after: str = ""


CALLS: dict[str, Form] = {
    "json": Form(one=_tagged_json, between="\n"),
    "arg_pairs": Form(one=_pairs, between="\n"),
    "xml_function": Form(one=_function_tags, between="\n"),
    "bracket_list": Form(one=_listed, between=", ", before="[TOOL_CALLS][", after="]"),
    "bracket_args": Form(one=_named, between=""),
    "bare_json": Form(one=_bare),
    "channels": Form(one=_to_function),
}


# --- arguments -------------------------------------------------------------------------------------------------------


def _each(write: Callable[[str, Any], str], parameters: Mapping[str, Any]) -> str:
    """Every argument in the schema's order; those that are not required may be left out."""
    properties: Any = parameters.get("properties")
    required: Any = parameters.get("required")
    needed: Sequence[Any] = cast(Sequence[Any], required) if isinstance(required, (list, tuple)) else ()
    given = cast(Mapping[str, Any], properties) if isinstance(properties, Mapping) else dict[str, Any]()
    return " ".join(write(key, schema) if key in needed else f"({write(key, schema)})?" for key, schema in given.items())


def _value(grammar: Grammar, schema: Any, parameters: Mapping[str, Any], end: str) -> str:
    """Strings are plain text up to the tag that ends them."""
    given = cast(Mapping[str, Any], schema) if isinstance(schema, Mapping) else dict[str, Any]()
    chosen: Any = given.get("enum", [given["const"]] if "const" in given else None)
    if isinstance(chosen, list) and all(isinstance(choice, str) for choice in cast(list[Any], chosen)):
        choices = " | ".join(grammar.literal(choice) for choice in cast(list[str], chosen))
        return f"({choices}) {grammar.literal(end)}"
    types = schema_types(given)
    if "string" in types or (not types and "$ref" not in given):
        return grammar.until(end)
    kept = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    return f"{grammar.schema({**kept, **given})} {grammar.literal(end)}"


def _moved(schema: Any, to: str) -> Any:
    """References within a schema that has become part of another."""
    if isinstance(schema, Mapping):
        given = cast(Mapping[str, Any], schema)
        return {key: _reference(value, to) if key == "$ref" else _moved(value, to) for key, value in given.items()}
    return [_moved(item, to) for item in cast(list[Any], schema)] if isinstance(schema, list) else schema


def _reference(value: Any, to: str) -> Any:
    return to + value[1:] if isinstance(value, str) and value.startswith("#") else value
