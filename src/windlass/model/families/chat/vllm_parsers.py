"""vLLM's tool-call and reasoning parsers for a model, by its chat template (vllm_parsers.toml)."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files

import msgspec

from windlass.core.model import Frozen


class VllmParsers(Frozen):
    """vLLM's parser names; empty: none."""

    tools: str = ""
    reasoning: str = ""


class _ParserRow(Frozen):
    models: str
    template_has: tuple[str, ...]
    tools: str = ""
    reasoning: str = ""
    reasoning_has: str = "</think>"


def vllm_parsers(template: str | None) -> VllmParsers:
    """No parsers without a template or a matching row."""
    for row in _rows() if template else ():
        if all(mark in (template or "") for mark in row.template_has):
            return VllmParsers(tools=row.tools, reasoning=row.reasoning if row.reasoning_has in (template or "") else "")
    return VllmParsers()


@cache
def _rows() -> tuple[_ParserRow, ...]:
    text = files("windlass.model.families.chat").joinpath("vllm_parsers.toml").read_text(encoding="utf-8")
    return tuple(msgspec.convert(tomllib.loads(text)["parsers"], list[_ParserRow], strict=True))
