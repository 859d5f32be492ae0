"""Format of a model's reasoning and tool calls, by its chat template, since models of one family differ (dialects.toml)."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files

import msgspec

from windlass.core.model import Frozen

_REASONING_MARKS = ("</think>", "[/THINK]", "analysis")
_EFFORT = "reasoning_effort"


class Dialect(Frozen):
    style: str = "plain"
    thinking: str = ""
    """Template variable that switches reasoning on and off; empty: none."""
    reasons: bool = False
    """Whether the template has reasoning tags."""
    past_reasoning: str = ""
    """Message field in which the template expects past reasoning, if not reasoning_content."""
    effort: str = ""
    """Template variable for the reasoning effort; empty: none."""


class _DialectRow(Frozen):
    models: str
    template_has: tuple[str, ...]
    style: str
    thinking: str = ""
    past_reasoning: str = ""


def dialect(template: str | None) -> Dialect:
    """Dialect of a chat template; without a template or known tags, all text is content."""
    for row in _rows() if template else ():
        if all(mark in (template or "") for mark in row.template_has):
            return _dialect(row, template or "")
    return Dialect()


def _dialect(row: _DialectRow, template: str) -> Dialect:
    return Dialect(
        style=row.style,
        thinking=row.thinking if row.thinking in template else "",
        reasons=any(mark in template for mark in _REASONING_MARKS),
        past_reasoning=row.past_reasoning,
        effort=_EFFORT if _EFFORT in template else "",
    )


@cache
def _rows() -> tuple[_DialectRow, ...]:
    text = files("windlass.model.families.chat").joinpath("dialects.toml").read_text(encoding="utf-8")
    return tuple(msgspec.convert(tomllib.loads(text)["dialect"], list[_DialectRow], strict=True))
