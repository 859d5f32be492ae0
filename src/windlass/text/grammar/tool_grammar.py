"""Where answers and calls stand in a model's text, as a grammar of the whole of it. What one call looks like: call_forms.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

from windlass.core.model import Frozen
from windlass.core.request import Constraint, tool_name
from windlass.errors import BadInput
from windlass.text.grammar.call_forms import CALLS, Form
from windlass.text.grammar.grammar import ANYTHING, Grammar
from windlass.text.parse.styles import BARE_JSON, CHANNELS, PLAIN, style_tags

Reasons = Literal["never", "first", "already"]
"""Whether a model may reason before it answers, or is in the middle of it where its answer begins."""
Tool = Mapping[str, Any]
FINAL, ANALYSIS = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>"
PREAMBLE, NEXT = "<|channel|>commentary<|message|>", "<|start|>assistant"


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
    may_call = asked.style in CALLS and bool(asked.tools) and asked.tool_choice != "none"
    if must_call and not may_call:
        raise BadInput(
            f"tool_choice is {asked.tool_choice!r}, and this model's chat template shows no way of writing calls that is known here; "
            "leave tool_choice out, or constrain the answer with a JSON schema",
            field="tool_choice",
        )
    grammar = Grammar(special)
    if asked.constraint is not None:
        ways = [_answer(asked, asked.constraint, grammar), *([_calls(asked, grammar)] if may_call else [])]
    elif must_call:
        ways = [_calls(asked, grammar)]
    elif may_call and any(_is_strict(tool) for tool in asked.tools):
        ways = [_free(asked, grammar)]
    else:
        return ""
    return grammar.built(f"{_lead(asked, grammar)} ({' | '.join(ways)})")


def _answer(asked: Asked, constraint: Constraint, grammar: Grammar) -> str:
    answer = grammar.constraint(constraint)
    return f"{grammar.literal(FINAL)} {answer}" if asked.style == CHANNELS else answer


def _lead(asked: Asked, grammar: Grammar) -> str:
    """The reasoning before."""
    if asked.style == PLAIN:
        return ""
    if asked.style == CHANNELS:
        return _messages(ANALYSIS, grammar)
    opening, closing = style_tags(asked.style)
    if asked.reasons == "already":
        return f"{grammar.until(closing)} {grammar.space()}"
    if asked.reasons == "first":
        return f"({grammar.space()} {grammar.literal(opening)} {grammar.until(closing)} {grammar.space()})?"
    return ""


def _messages(header: str, grammar: Grammar) -> str:
    return f"({grammar.literal(header)} {grammar.until('<|end|>')} {grammar.literal(NEXT)})*"


def _calls(asked: Asked, grammar: Grammar) -> str:
    """One call where it is named, otherwise one or several of any tool."""
    form, one = CALLS[asked.style], _one(asked, grammar)
    mark = grammar.literal(form.mark) if form.mark else ""
    if form.is_list:
        return f"{mark} {_list(form, one, asked, grammar)}"
    if _is_named(asked) or form.between is None:
        return f"{mark} {one}".strip()
    between = grammar.literal(form.between) if form.between else ""
    return f"{mark} {one} ({between} {mark} {one})*"


def _free(asked: Asked, grammar: Grammar) -> str:
    """Any text; what begins as a call must be one."""
    form, one = CALLS[asked.style], _one(asked, grammar)
    if asked.style == BARE_JSON:
        return f"{one} | {grammar.space()} /[^{{\\s](?s:.*)/ | {grammar.space()}"
    if asked.style == CHANNELS:
        call, final = f"{grammar.literal(form.mark)} {one}", f"{grammar.literal(FINAL)} {ANYTHING}"
        return f"{_messages(PREAMBLE, grammar)} ({call} | {final})"
    rest = _list(form, one, asked, grammar) if form.is_list else one
    return f"({grammar.until(form.mark)} {rest})* {grammar.without(form.mark)}?"


def _one(asked: Asked, grammar: Grammar) -> str:
    """A call of any tool that may be called, behind its mark."""
    tools = [tool for tool in asked.tools if not _is_named(asked) or tool_name(tool) == asked.tool_choice]
    form = CALLS[asked.style]
    return grammar.rule(" | ".join(form.one(grammar, tool_name(tool), _parameters(tool)) for tool in tools), "call")


def _list(form: Form, one: str, asked: Asked, grammar: Grammar) -> str:
    more = "" if _is_named(asked) else f"({grammar.literal(form.between or '')} {one})*"
    return f"{grammar.space()} {grammar.literal('[')} {one} {more} {grammar.literal(']')}"


def _is_named(asked: Asked) -> bool:
    return asked.tool_choice not in ("auto", "none", "required")


def _is_strict(tool: Tool) -> bool:
    """Whoever says so wants arguments that keep to the schema, whether the model has to call it or not."""
    return cast(Tool, tool.get("function", tool)).get("strict") is True


def _parameters(tool: Tool) -> dict[str, Any]:
    function = cast(Tool, tool.get("function", tool))
    given = function.get("parameters")
    if given is not None and not isinstance(given, Mapping):
        raise BadInput(f"the parameters of tool {tool_name(tool)!r} are no JSON schema", field="tools")
    return {"type": "object", **cast(dict[str, Any], given or {"properties": {}, "additionalProperties": False})}
