"""Values as YAML. JSON is YAML, but people read these files: mappings and lists in blocks, strings quoted as JSON, so nothing is guessed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast


def to_yaml(value: Any, comment: str = "") -> str:
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    return head + "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> list[str]:
    if isinstance(value, Mapping) and value:
        pairs = cast(Mapping[str, Any], value)
        return [line for key, inner in pairs.items() for line in _entry(f"{key}:", inner)]
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        return [line for inner in cast(Sequence[Any], value) for line in _item(inner)]
    return [json.dumps(value, ensure_ascii=False)]


def _entry(head: str, inner: Any) -> list[str]:
    lines = _lines(inner)
    if isinstance(inner, str | int | float | bool) or inner is None or not inner:
        return [f"{head} {lines[0]}"]
    return [head, *(f"  {line}" for line in lines)]


def _item(inner: Any) -> list[str]:
    first, *rest = _lines(inner)
    return [f"- {first}", *(f"  {line}" for line in rest)]
