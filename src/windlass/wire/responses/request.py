"""A body of the Responses API -> a chat. Every parameter is carried over or rejected by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from windlass.wire.responses.schema import InputItem, InputPart, ResponsesRequest, ResponseTool, ResponseToolChoice
from windlass.wire.schema.chat import (
    AllowedTool,
    AllowedTools,
    ChatMessage,
    ChatRequest,
    FunctionDefinition,
    JsonSchema,
    MessageFunction,
    MessageToolCall,
    ResponseFormat,
    Tool,
    ToolChoice,
    ToolChoiceFunction,
)
from windlass.wire.schema.errors import invalid, unsupported

HARMLESS: dict[str, tuple[tuple[Any, ...], str]] = {
    "background": ((False,), "is not supported: responses are not made in the background; stream them"),
    "conversation": ((), "is not supported; use previous_response_id or send the items"),
    "context_management": (([],), "is not supported: nothing is compacted"),
    "include": (
        ([], ["reasoning.encrypted_content"]),
        "is not supported except for reasoning.encrypted_content, which is always null",
    ),
    "max_tool_calls": ((), "is not supported: there are no built-in tools"),
    "moderation": ((), "is not supported"),
    "prompt": ((), "is not supported: there are no stored prompts"),
    "prompt_cache_options": ((), "is not supported: common prefixes are cached automatically"),
    "prompt_cache_retention": (("in_memory", "in-memory"), "is always in_memory"),
    "service_tier": (("auto", "default"), "is not supported: there is one tier"),
    "top_logprobs": ((0,), "is not supported; use /v1/chat/completions"),
    "truncation": (("disabled",), "is not supported: prompts are never truncated"),
}
"""Values without effect, and why others are rejected."""
PARAMS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Names of a chat's parameters here."""
TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def responses_to_chat(body: ResponsesRequest, earlier: Sequence[InputItem] = ()) -> ChatRequest:
    """`earlier`: the items of the response that is continued."""
    _check(body)
    items = [*earlier, *input_items(body)]
    if not items:
        raise invalid("input", "is missing")
    system = [ChatMessage(role="system", content=body.instructions)] if body.instructions else []
    format = body.text.format if body.text is not None else None
    return ChatRequest(
        model=body.model,
        messages=[*system, *_messages(items, len(items) - len(input_items(body)))],
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        tools=[_tool(tool, f"tools[{number}]") for number, tool in enumerate(body.tools or ())] or None,
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=None
        if format is None
        else ResponseFormat(
            type=format.type,
            json_schema=JsonSchema(schema=format.schema, name=format.name, strict=format.strict)
            if format.type == "json_schema"
            else None,
        ),
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
        continue_final_message=False,
        stream=body.stream,
        user=body.user,
        safety_identifier=body.safety_identifier,
        timeout=body.timeout,
        seed=body.seed,
    )


def input_items(body: ResponsesRequest) -> list[InputItem]:
    given = body.input
    if given is None:
        return []
    return [InputItem(type="message", role="user", content=given)] if isinstance(given, str) else given


def _check(body: ResponsesRequest) -> None:
    for name, (harmless, why) in HARMLESS.items():
        value = getattr(body, name)
        if value is not None and value not in harmless:
            raise unsupported(name, why)
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        raise unsupported("text.verbosity", "is not supported; put it into the instructions")
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        raise unsupported("stream_options.include_obfuscation", "is not supported")


def _messages(items: Sequence[InputItem], first: int) -> list[ChatMessage]:
    """Reasoning and calls belong to one message of the assistant. `first`: the index of the body's own first item."""
    messages: list[ChatMessage] = []
    reasoning, calls = "", list[MessageToolCall]()

    def flush(text: str | None = None) -> None:
        nonlocal reasoning, calls
        if reasoning or calls or text is not None:
            content = text or ""
            messages.append(
                ChatMessage(role="assistant", content=content, reasoning_content=reasoning or None, tool_calls=calls or None)
            )
        reasoning, calls = "", []

    for place, item in enumerate(items):
        where = f"input[{place - first}]"
        match item.type:
            case "message":
                text = _text(item.content, where)
                if item.role is None:
                    raise invalid(f"{where}.role", "is missing")
                if item.role == "assistant":
                    if calls:
                        flush()
                    flush(text)
                else:
                    flush()
                    messages.append(ChatMessage(role=item.role, content=text))
            case "reasoning":
                if calls:
                    flush()
                parts = item.content if isinstance(item.content, list) and item.content else item.summary or []
                reasoning = "\n".join(part.text or "" for part in parts)
            case "function_call":
                if item.name is None or item.arguments is None:
                    raise invalid(f"{where}.{'name' if item.name is None else 'arguments'}", "is missing")
                function = MessageFunction(name=item.name, arguments=item.arguments)
                calls.append(MessageToolCall(id=item.call_id or item.id, type="function", function=function))
            case "function_call_output":
                flush()
                if item.call_id is None:
                    raise invalid(f"{where}.call_id", "is missing")
                messages.append(ChatMessage(role="tool", tool_call_id=item.call_id, content=_text(item.output, where, "output")))
            case other:
                raise unsupported(f"{where}.type", f"{other[:40]!r} is not supported")
    flush()
    return _merged(messages)


def _merged(messages: list[ChatMessage]) -> list[ChatMessage]:
    """An answer and the calls after it are one message, as the model wrote them."""
    found: list[ChatMessage] = []
    for message in messages:
        last = found[-1] if found else None
        is_one = last is not None and last.role == message.role == "assistant" and not last.tool_calls and not message.content
        if last is not None and is_one:
            found[-1] = ChatMessage(
                role="assistant",
                content=last.content,
                reasoning_content=last.reasoning_content or message.reasoning_content,
                tool_calls=message.tool_calls,
            )
        else:
            found.append(message)
    return found


def _text(content: str | list[InputPart] | None, where: str, name: str = "content") -> str:
    if content is None:
        raise invalid(f"{where}.{name}", "is missing")
    if isinstance(content, str):
        return content
    return "\n".join(_part(part, f"{where}.{name}[{number}]") for number, part in enumerate(content))


def _part(part: InputPart, where: str) -> str:
    if part.type not in (*TEXT_PARTS, "refusal"):
        raise unsupported(f"{where}.type", f"{part.type[:40]!r} is not supported: messages are text only")
    text = part.refusal if part.type == "refusal" else part.text
    if text is None:
        raise invalid(f"{where}.text", "is missing")
    return text


def _tool(tool: ResponseTool, where: str) -> Tool:
    if tool.type != "function":
        raise unsupported(
            f"{where}.type", f"{tool.type[:40]!r} is not supported: this server has no built-in tools; use function"
        )
    if tool.name is None:
        raise invalid(f"{where}.name", "is missing")
    function = FunctionDefinition(name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict)
    return Tool(type="function", function=function)


def _choice(choice: str | ResponseToolChoice | None) -> str | ToolChoice | None:
    if choice is None or isinstance(choice, str):
        return choice
    if choice.type == "allowed_tools":
        names = [AllowedTool(name=str(tool.get("name"))) for tool in choice.tools or ()]
        return ToolChoice(type="allowed_tools", allowed_tools=AllowedTools(mode=choice.mode or "auto", tools=names))
    if choice.type != "function" or choice.name is None:
        raise unsupported("tool_choice.type", f"{choice.type[:40]!r} is not supported; name a function")
    return ToolChoice(type="function", function=ToolChoiceFunction(name=choice.name))
