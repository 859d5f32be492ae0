"""Tools for models whose chat template has no place for them: a convention of our own, in plain text.

The tools are described in the system message, calls are written as `<tool_call>{"name": ..., "arguments": ...}</tool_call>`, and results
come back in a user message. Models that were not trained for it follow it more or less well; a required call is held to it by a grammar.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

Message = Mapping[str, Any]
STYLE = "json"
"""The output style of the calls (model/text/parse/styles.py)."""
_EXPLANATION = """You can call these functions. Their arguments are described by JSON Schemas:

{tools}

To call one, write nothing but this, with the name and the arguments filled in:
<tool_call>
{{"name": "NAME", "arguments": {{...}}}}
</tool_call>
You then get its result between <tool_response> and </tool_response>. If no function helps, answer without a call."""


def has_tool_messages(messages: Sequence[Message]) -> bool:
    return any(message.get("role") == "tool" or message.get("tool_calls") for message in messages)


def with_tools_as_text(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same chat in roles that every template knows."""
    chat = [_as_text(message) for message in messages]
    if not tools:
        return chat
    described = _EXPLANATION.format(tools="\n".join(_described(tool) for tool in tools))
    if chat and chat[0]["role"] == "system":
        return [{**chat[0], "content": f"{chat[0]['content']}\n\n{described}"}, *chat[1:]]
    return [{"role": "system", "content": described}, *chat]


def system_into_user(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """For templates without a system role: its text begins the first user message."""
    system = [message for message in messages if message.get("role") == "system"]
    rest = [dict(message) for message in messages if message.get("role") != "system"]
    text = "\n\n".join(str(message["content"]) for message in system)
    for message in rest:
        if message.get("role") == "user":
            message["content"] = f"{text}\n\n{message['content']}"
            break
    return rest


def _described(tool: Mapping[str, Any]) -> str:
    function = cast(Mapping[str, Any], tool.get("function", tool))
    shown = {key: function[key] for key in ("name", "description", "parameters") if function.get(key) is not None}
    return json.dumps(shown, ensure_ascii=False)


def _as_text(message: Message) -> dict[str, Any]:
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"}
    calls = cast(Sequence[Mapping[str, Any]], message.get("tool_calls") or ())
    if not calls:
        return dict(message)
    written = [f"<tool_call>\n{_call(call)}\n</tool_call>" for call in calls]
    text = "\n".join([*([str(message["content"])] if message.get("content") else []), *written])
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": text}


def _call(call: Mapping[str, Any]) -> str:
    function = cast(Mapping[str, Any], call.get("function", call))
    return json.dumps({"name": function.get("name"), "arguments": function.get("arguments", {})}, ensure_ascii=False)
