"""The text that a router looks at: the whole conversation, not only its last message. The same when fitting and when serving."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from windlass.core.request import Request, tool_name

HEAD_CHARACTERS = TAIL_CHARACTERS = 4000
"""Of a longer text, its beginning and its end are looked at: what is asked stands there, and a decision takes bounded time."""


def text_of(request: Request) -> str:
    """Empty for token ids, which only a model can read."""
    if request.prompt is not None:
        return request.prompt
    text = messages_text(request.messages or ())
    tools = " ".join(name for tool in request.tools if (name := tool_name(tool)))
    return f"{text}\n{tools}" if tools else text


def messages_text(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(part for message in messages for part in _parts(message.get("content")) if part)


def _parts(content: Any) -> list[str]:
    """Content is a text, or a list of parts of which some are texts."""
    if isinstance(content, str):
        return [content]
    if isinstance(content, Sequence):
        parts = cast(Sequence[Any], content)
        return [text for part in parts if isinstance(part, Mapping) and isinstance(text := cast(Any, part).get("text"), str)]
    return []


def looked_at(text: str) -> str:
    if len(text) <= HEAD_CHARACTERS + TAIL_CHARACTERS:
        return text
    return f"{text[:HEAD_CHARACTERS]}\n{text[-TAIL_CHARACTERS:]}"
