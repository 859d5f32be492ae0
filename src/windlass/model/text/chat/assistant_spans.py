"""The assistant's spans in a rendered chat, so that the training loss is taken on them only.

A template may mark them by `{% generation %}`. Others are rendered turn by turn: what a message adds to the prompt before it is the
assistant's span. Templates that render past turns differently from new ones cannot be handled that way and are rejected.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from windlass.errors import BadInput
from windlass.model.text.chat.template import CLOSED, OPENED, Message, render_chat

Span = tuple[int, int]
"""Start and end, in characters."""


def render_with_spans(
    template: str,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    special_tokens: Mapping[str, str] | None = None,
) -> tuple[str, list[Span]]:
    """The rendered chat, and the assistant's spans including their end of turn."""
    _refuse_marks(messages, tools)
    values: dict[str, Any] = {"tools": tools, "special_tokens": special_tokens}
    if "generation" in template:
        text = render_chat(template, messages, add_generation_prompt=False, marked=True, **values)
        if OPENED in text:
            return _unmarked(text)
        if not any(message.get("role") == "assistant" for message in messages):
            return text, []
    return _turn_by_turn(template, messages, values)


def _refuse_marks(*values: object) -> None:
    written = json.dumps(values, ensure_ascii=False, default=str)
    if OPENED in written or CLOSED in written:
        raise BadInput(
            "a message contains U+FDD0 or U+FDD1, which are reserved as internal markers; remove them", field="messages"
        )


def _unmarked(text: str) -> tuple[str, list[Span]]:
    pieces: list[str] = []
    spans: list[Span] = []
    length = 0
    for part in text.split(OPENED):
        inside, found, outside = part.partition(CLOSED)
        if found:
            spans.append((length, length + len(inside)))
        pieces += [inside, outside]
        length += len(inside) + len(outside)
    return "".join(pieces), spans


def _turn_by_turn(template: str, messages: Sequence[Message], values: dict[str, Any]) -> tuple[str, list[Span]]:
    text = render_chat(template, messages, add_generation_prompt=False, **values)
    spans: list[Span] = []
    for place, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        before = render_chat(template, messages[:place], add_generation_prompt=True, **values)
        through = render_chat(template, messages[: place + 1], add_generation_prompt=False, **values)
        if not (through.startswith(before) and text.startswith(through)):
            raise BadInput(
                "this chat template renders past answers differently from new ones, so the assistant's spans cannot be determined; "
                "put {% generation %} and {% endgeneration %} around the assistant's content in it",
                field="messages",
            )
        spans.append((len(before), len(through)))
    return text, spans
