"""Messages of the API <-> messages as chat templates expect them.

Templates expect plain text as content, `system` for `developer`, and tool call arguments as an object rather than a JSON string.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from windlass.wire.decode import convert
from windlass.wire.schema.chat import ChatMessage, ContentPart, MessageToolCall, Tool
from windlass.wire.schema.errors import invalid, unsupported

MALFORMED = "malformed_arguments"


def from_messages(messages: Sequence[ChatMessage]) -> tuple[dict[str, Any], ...]:
    return tuple(_from_message(message, f"messages[{number}]") for number, message in enumerate(messages))


def to_messages(messages: Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    """Unknown keys are rejected."""
    return convert({"messages": [_with_text_arguments(message) for message in messages]}, _Messages).messages


class _Messages(msgspec.Struct):
    """Gives validation errors the right path."""

    messages: list[ChatMessage]


def _from_message(message: ChatMessage, where: str) -> dict[str, Any]:
    _check(message, where)
    found: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _content(message, f"{where}.content"),
    }
    optional = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content or message.reasoning,
        "tool_calls": [_call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(message.tool_calls or ())],
    }
    return found | {key: value for key, value in optional.items() if value}


def _check(message: ChatMessage, where: str) -> None:
    if message.role == "function" or message.function_call is not None:
        raise unsupported(f"{where}.function_call", "is deprecated; use tool_calls and the role tool")
    if message.audio is not None:
        raise unsupported(f"{where}.audio", "is not supported: messages are text only")
    if message.tool_calls and message.role != "assistant":
        raise invalid(f"{where}.tool_calls", f"is only valid with the role assistant, not {message.role}")
    if message.tool_call_id is not None and message.role != "tool":
        raise invalid(f"{where}.tool_call_id", f"is only valid with the role tool, not {message.role}")


def _content(message: ChatMessage, where: str) -> str:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role != "assistant":
            raise invalid(where, f"is missing; messages with the role {message.role} need content")
        return message.refusal or ""  # an assistant message may have tool calls only
    return "\n".join(_part(part, f"{where}[{number}]") for number, part in enumerate(content))


def _part(part: ContentPart, where: str) -> str:
    text = {"text": part.text, "refusal": part.refusal}.get(part.type)
    if part.type not in ("text", "refusal"):
        raise unsupported(f"{where}.type", f"{part.type[:40]!r} is not supported: messages are text only")
    if text is None:
        raise invalid(f"{where}.{part.type}", "is missing")
    return text


def _call(call: MessageToolCall, where: str) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": _arguments(call.function.arguments, f"{where}.function.arguments")}
    return {**({"id": call.id} if call.id else {}), "type": "function", "function": function}


def _arguments(text: str, where: str) -> dict[str, Any]:
    """A call that the length cut off comes back as it was: templates need an object, so its text becomes a value of one."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except RecursionError:
        raise invalid(where, "is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeEncodeError):
        return {MALFORMED: text}


def _with_text_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    calls: Any = message.get("tool_calls")
    if not isinstance(calls, Sequence):
        return dict(message)
    return {**message, "tool_calls": [_with_text(call) for call in cast(Sequence[Any], calls)]}


def _with_text(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    known = cast(Mapping[str, Any], call)
    function: Any = known.get("function")
    if not isinstance(function, Mapping):
        return known
    given: Any = cast(Mapping[str, Any], function).get("arguments")
    text = given if isinstance(given, str) else msgspec.json.encode(given).decode()
    return {"type": "function", **known, "function": {**cast(Mapping[str, Any], function), "arguments": text}}


# --- tools -----------------------------------------------------------------------------------------------------------

CHOICES = ("none", "auto", "required")


def from_tools(tools: Sequence[Tool]) -> tuple[dict[str, Any], ...]:
    return tuple(_from_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools))


def to_tools(tools: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """Accepts tools with or without the `function` wrapper."""
    wrapped = [dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)} for tool in tools]
    return convert({"tools": wrapped}, _Tools).tools


class _Tools(msgspec.Struct):
    tools: list[Tool]


def _from_tool(tool: Tool, where: str) -> dict[str, Any]:
    if tool.type != "function" or tool.custom is not None:
        raise unsupported(f"{where}.type", f"{tool.type[:40]!r} is not supported; use function")
    if tool.function is None:
        raise invalid(f"{where}.function", "is missing")
    if tool.function.name in ("", *CHOICES):
        raise invalid(f"{where}.function.name", f"cannot be {tool.function.name!r}")
    return {"type": "function", "function": msgspec.to_builtins(tool.function)}
