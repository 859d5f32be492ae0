"""A body of the Messages API -> a chat."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from windlass.wire.anthropic.schema import (
    AnthropicMessage,
    AnthropicTool,
    AnthropicToolChoice,
    Block,
    CountTokensRequest,
    MessagesRequest,
)
from windlass.wire.schema.chat import (
    ChatMessage,
    ChatRequest,
    FunctionDefinition,
    JsonSchema,
    MessageFunction,
    MessageToolCall,
    ResponseFormat,
    TemplateVariables,
    Tool,
    ToolChoice,
    ToolChoiceFunction,
)
from windlass.wire.schema.errors import invalid, unsupported

UNSUPPORTED = {
    "context_management": "is not supported: nothing is removed from a chat",
    "mcp_servers": "is not supported: this server calls no tools itself",
    "container": "is not supported: this server runs no code",
    "inference_geo": "is not supported",
}
PARAMS = {
    "stop": "stop_sequences",
    "chat_template_kwargs": "thinking",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
"""Names of a chat's parameters here."""


def messages_to_chat(body: MessagesRequest, can_switch: bool = True) -> ChatRequest:
    """`can_switch`: whether the model's template can switch reasoning on and off."""
    last = body.messages[-1]
    choice = body.tool_choice
    format = body.output_config.format if body.output_config is not None else None
    messages = chat_messages(body)
    return ChatRequest(
        model=body.model,
        messages=messages,
        tools=chat_tools(body),
        tool_choice=_choice(choice),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        max_tokens=body.max_tokens,
        stop=body.stop_sequences or None,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stream=body.stream,
        user=body.metadata.user_id if body.metadata is not None else None,
        timeout=body.timeout,
        continue_final_message=last.role == "assistant" and bool(messages[-1].content) and not messages[-1].tool_calls,
        chat_template_kwargs=_thinking(body) if can_switch else None,
        reasoning_effort=body.output_config.effort if body.output_config is not None else None,
        response_format=None
        if format is None
        else ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=format.schema)),
    )


def chat_messages(body: CountTokensRequest) -> list[ChatMessage]:
    for name, why in UNSUPPORTED.items():
        if getattr(body, name, None):
            raise unsupported(name, why)
    system = _text(body.system, "system") if body.system is not None else ""
    found = [ChatMessage(role="system", content=system)] if system else []
    for number, message in enumerate(body.messages):
        found += _chat_message(message, f"messages[{number}]")
    return found


def chat_tools(body: CountTokensRequest) -> list[Tool] | None:
    return [_tool(tool, f"tools[{number}]") for number, tool in enumerate(body.tools or ())] or None


def _chat_message(message: AnthropicMessage, where: str) -> list[ChatMessage]:
    if isinstance(message.content, str):
        return [ChatMessage(role=message.role, content=message.content)]
    blocks = [(block, f"{where}.content[{number}]") for number, block in enumerate(message.content)]
    if message.role == "assistant":
        return [_assistant(blocks)]
    results = [_result(block, at) for block, at in blocks if block.type == "tool_result"]
    rest = [block for block, _ in blocks if block.type != "tool_result"]
    text = _text(rest, f"{where}.content") if rest else ""
    return [*results, *([ChatMessage(role=message.role, content=text)] if rest or not results else [])]


def _assistant(blocks: Sequence[tuple[Block, str]]) -> ChatMessage:
    texts, thoughts, calls = list[str](), list[str](), list[MessageToolCall]()
    for block, where in blocks:
        match block.type:
            case "text":
                texts.append(_part(block, where))
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                pass
            case "tool_use":
                if block.name is None:
                    raise invalid(f"{where}.name", "is missing")
                arguments = msgspec.json.encode(block.input or {}).decode()
                calls.append(
                    MessageToolCall(id=block.id, type="function", function=MessageFunction(name=block.name, arguments=arguments))
                )
            case other:
                raise unsupported(f"{where}.type", f"{other[:40]!r} is not supported")
    return ChatMessage(
        role="assistant", content="\n".join(texts), reasoning_content="\n".join(thoughts) or None, tool_calls=calls or None
    )


def _result(block: Block, where: str) -> ChatMessage:
    if block.tool_use_id is None:
        raise invalid(f"{where}.tool_use_id", "is missing")
    text = _text(block.content, f"{where}.content") if block.content is not None else ""
    return ChatMessage(role="tool", tool_call_id=block.tool_use_id, content=f"Error: {text}" if block.is_error else text)


def _text(content: str | list[Block] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_part(block, f"{where}[{number}]") for number, block in enumerate(content))


def _part(block: Block, where: str) -> str:
    if block.type != "text":
        raise unsupported(f"{where}.type", f"{block.type[:40]!r} is not supported here: messages are text only")
    if block.text is None:
        raise invalid(f"{where}.text", "is missing")
    return block.text


def _tool(tool: AnthropicTool, where: str) -> Tool:
    if tool.type not in (None, "custom"):
        raise unsupported(f"{where}.type", f"{tool.type[:40]!r} is not supported: this server has no built-in tools")
    function = FunctionDefinition(name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict)
    return Tool(type="function", function=function)


def _choice(choice: AnthropicToolChoice | None) -> str | ToolChoice | None:
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise invalid("tool_choice.name", "is missing")
        return ToolChoice(type="function", function=ToolChoiceFunction(name=choice.name))
    return "required" if choice.type == "any" else choice.type


def _thinking(body: CountTokensRequest) -> TemplateVariables | None:
    """`adaptive` is what models do without being told."""
    if body.thinking is None or body.thinking.type == "adaptive":
        return None
    return TemplateVariables(enable_thinking=body.thinking.type == "enabled")


def unenforced(body: MessagesRequest, can_switch: bool = True) -> list[str]:
    """Accepted, but without effect."""
    has_budget = body.thinking is not None and body.thinking.budget_tokens is not None
    has_switch = not can_switch and _thinking(body) is not None
    return [*(["thinking.type"] if has_switch else []), *(["thinking.budget_tokens"] if has_budget else [])]
