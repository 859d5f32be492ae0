"""The grammar of a model's whole output: reasoning, answer, tool calls. A single call: call_forms.py."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Literal, cast

from msgspec.structs import replace

from windlass.core.model import Frozen
from windlass.core.request import Constraint, tool_name
from windlass.errors import BadInput
from windlass.model.text.grammar.call_forms import CALLS, CallForm, ToolSchema
from windlass.model.text.grammar.grammar import ANYTHING, Grammar
from windlass.model.text.grammar.guard import looking
from windlass.model.text.parse.styles import BARE_JSON, CHANNELS, PLAIN, style_tags

Reasons = Literal["never", "first", "already"]
"""Whether the model may reason before its answer, or is already reasoning where the output begins."""
Tool = Mapping[str, Any]
FINAL, ANALYSIS = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>"
PREAMBLE, NEXT = "<|channel|>commentary<|message|>", "<|start|>assistant"


class OutputSpec(Frozen):
    """Requirements on a model's output."""

    style: str
    constraint: Constraint | None = None
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str = "auto"
    parallel: bool = False
    """Several calls where one is required."""
    reasons: Reasons = "never"


def answer_grammar(spec: OutputSpec, special: Mapping[str, int]) -> str:
    """Empty: the output is unconstrained."""
    for known, marks, grammar in tuple(_LATELY):
        if _is_same(known, spec) and marks == special:
            return grammar
    with looking():
        grammar = _answer_grammar(spec, special)
    if grammar:
        _LATELY.append((spec, special, grammar))
    return grammar


_LATELY: deque[tuple[OutputSpec, Mapping[str, int], str]] = deque(maxlen=2)
"""The choices of a request come one after another, up to 256 of them, and all have the same grammar."""


def _is_same(one: OutputSpec, other: OutputSpec) -> bool:
    """Without a look into what may be large."""
    rest = {"constraint": None, "tools": ()}
    return one.constraint is other.constraint and one.tools is other.tools and replace(one, **rest) == replace(other, **rest)


def _answer_grammar(spec: OutputSpec, special: Mapping[str, int]) -> str:
    must_call = spec.tool_choice not in ("auto", "none")
    may_call = spec.style in CALLS and bool(spec.tools) and spec.tool_choice != "none"
    if must_call and not may_call:
        raise BadInput(
            f"tool_choice is {spec.tool_choice!r}, but the tool call format of this model's chat template is not known; "
            "leave tool_choice out, or constrain the answer with a JSON schema",
            field="tool_choice",
        )
    grammar = Grammar(special)
    if spec.constraint is not None:
        ways = [_answer(spec, spec.constraint, grammar), *([_calls(spec, grammar)] if may_call else [])]
    elif must_call:
        ways = [_calls(spec, grammar)]
    elif may_call and any(_is_strict(tool) for tool in spec.tools):
        ways = [_free(spec, grammar)]
    else:
        return ""
    return grammar.built(f"{_lead(spec, grammar)} ({' | '.join(ways)})")


def _answer(spec: OutputSpec, constraint: Constraint, grammar: Grammar) -> str:
    answer = grammar.constraint(constraint)
    return f"{grammar.literal(FINAL)} {answer}" if spec.style == CHANNELS else answer


def _lead(spec: OutputSpec, grammar: Grammar) -> str:
    """The reasoning before the answer."""
    if spec.style == PLAIN:
        return ""
    if spec.style == CHANNELS:
        return _messages(ANALYSIS, grammar)
    opening, closing = style_tags(spec.style)
    if spec.reasons == "already":
        return f"{grammar.until(closing)} {grammar.space()}"
    if spec.reasons == "first":
        return f"({grammar.space()} {grammar.literal(opening)} {grammar.until(closing)} {grammar.space()})?"
    return ""


def _messages(header: str, grammar: Grammar) -> str:
    return f"({grammar.literal(header)} {grammar.until('<|end|>')} {grammar.literal(NEXT)})*"


def _calls(spec: OutputSpec, grammar: Grammar) -> str:
    """One call of any tool; with `parallel` and no named tool, one or more: weak models repeat calls until the length ends them."""
    form, one = CALLS[spec.style], _one(spec, grammar)
    mark = grammar.literal(form.mark) if form.mark else ""
    if form.is_list:
        return f"{mark} {_list(form, one, spec, grammar)}"
    if _is_one(spec) or form.between is None:
        return f"{mark} {one}".strip()
    between = grammar.literal(form.between) if form.between else ""
    return f"{mark} {one} ({between} {mark} {one})*"


def _free(spec: OutputSpec, grammar: Grammar) -> str:
    """Free text, but whatever starts as a call must be a valid one."""
    form, one = CALLS[spec.style], _one(spec, grammar)
    if spec.style == BARE_JSON:
        return f"{one} | {grammar.space()} /[^{{\\s](?s:.*)/ | {grammar.space()}"
    if spec.style == CHANNELS:
        call, final = f"{grammar.literal(form.mark)} {one}", f"{grammar.literal(FINAL)} {ANYTHING}"
        return f"{_messages(PREAMBLE, grammar)} ({call} | {final})"
    rest = _list(form, one, spec, grammar) if form.is_list else one
    return f"({grammar.until(form.mark)} {rest})* {grammar.without(form.mark)}?"


def _one(spec: OutputSpec, grammar: Grammar) -> str:
    """A call of any allowed tool, after its marker."""
    tools = [tool for tool in spec.tools if not _is_named(spec) or tool_name(tool) == spec.tool_choice]
    form = CALLS[spec.style]
    return grammar.rule(
        " | ".join(form.one(grammar, ToolSchema(tool_name(tool), _parameters(tool), _is_strict(tool))) for tool in tools), "call"
    )


def _list(form: CallForm, one: str, spec: OutputSpec, grammar: Grammar) -> str:
    more = "" if spec.tool_choice != "auto" and _is_one(spec) else f"({grammar.literal(form.between or '')} {one})*"
    return f"{grammar.space()} {grammar.literal('[')} {one} {more} {grammar.literal(']')}"


def _is_one(spec: OutputSpec) -> bool:
    return _is_named(spec) or not spec.parallel


def _is_named(spec: OutputSpec) -> bool:
    return spec.tool_choice not in ("auto", "none", "required")


def _is_strict(tool: Tool) -> bool:
    """OpenAI's `strict`: arguments must match the schema even if the call is optional."""
    return cast(Tool, tool.get("function", tool)).get("strict") is True


def _parameters(tool: Tool) -> dict[str, Any]:
    function = cast(Tool, tool.get("function", tool))
    given = function.get("parameters")
    if given is not None and not isinstance(given, Mapping):
        raise BadInput(f"the parameters of tool {tool_name(tool)!r} are not a JSON schema", field="tools")
    return {"type": "object", **cast(dict[str, Any], given or {"properties": {}, "additionalProperties": False})}
