"""Deltas -> the items and events of a response: reasoning, a message, function calls, in the order in which they are written.

Every event has a number and repeats the whole object where OpenAI's do: `response.created`, `.in_progress`, then for each item
`output_item.added`, its parts and deltas, `output_item.done`, and last `response.completed`, `.incomplete` or `.failed`.
"""

from __future__ import annotations

import time
from typing import Any
from uuid import uuid4

import msgspec

from windlass.core.request import CallPiece, Delta, ToolCall, Usage
from windlass.wire.responses.schema import ResponsesRequest
from windlass.wire.schema.errors import ApiError
from windlass.wire.server.envelope import api_finish_reason
from windlass.wire.sse import DONE_EVENT

_encode = msgspec.json.Encoder().encode
Item = dict[str, Any]


class ResponseBuilder:
    """One response: pass every delta to `event`, then call `ending`. `response` is the object so far."""

    def __init__(self, body: ResponsesRequest, model: str) -> None:
        self.id = f"resp_{uuid4().hex}"
        self.items: list[Item] = []
        self._body, self._model, self._created = body, model, int(time.time())
        self._sequence = 0
        self._open: _OpenItem | None = None
        self._begun = False
        self._usage: Usage | None = None
        self._status, self._error = "in_progress", None
        self._by_call: dict[str, _OpenItem] = {}

    # --- events

    def event(self, index: int, delta: Delta) -> bytes:
        events = b"" if self._begun else self._begin()
        if delta.reasoning:
            events += self._grow("reasoning", delta.reasoning)
        if delta.content:
            events += self._grow("message", delta.content)
        for piece in delta.call_pieces:
            events += self._call_piece(piece)
        for call in delta.tool_calls:
            events += self._call(call)
        if delta.usage is not None:
            self._usage = delta.usage
        if delta.finish_reason is not None:
            api_finish_reason(delta.finish_reason)  # raises for what was interrupted
            self._status = "incomplete" if delta.finish_reason == "length" else "completed"
            events += self._close()
        return events

    def ending(self) -> bytes:
        return self._event(f"response.{self._status}", response=self.response) + DONE_EVENT

    def failed(self, refusal: ApiError) -> bytes:
        self._status, self._error = "failed", {"code": refusal.code or "server_error", "message": str(refusal)}
        return self._event("response.failed", response=self.response) + DONE_EVENT

    @property
    def response(self) -> dict[str, Any]:
        body = self._body
        choice: Any = "auto" if body.tool_choice is None else msgspec.to_builtins(body.tool_choice)
        format: Any = None if body.text is None else body.text.format
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "status": self._status,
            "background": False,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "model": self._model,
            "output": list(self.items),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"} if format is None else msgspec.to_builtins(format)},
            "tool_choice": choice,
            "tools": [_tool(tool) for tool in body.tools or ()],
            "top_logprobs": 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "truncation": "disabled",
            "usage": None if self._status == "in_progress" else usage_of(self._usage),
            "user": body.user,
            "metadata": body.metadata or {},
        }

    # --- items

    def _begin(self) -> bytes:
        self._begun = True
        return self._event("response.created", response=self.response) + self._event(
            "response.in_progress", response=self.response
        )

    def _grow(self, kind: str, text: str) -> bytes:
        events = b""
        if self._open is None or self._open.kind != kind:
            events = self._close() + self._add(_TextItem(kind, len(self.items)))
        assert isinstance(self._open, _TextItem)
        self._open.text += text
        extra: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        return events + self._event(f"response.{self._open.word}.delta", **self._open.place, content_index=0, delta=text, **extra)

    def _call_piece(self, piece: CallPiece) -> bytes:
        events = b""
        if piece.id not in self._by_call:
            self._by_call[piece.id] = item = _CallItem(piece.id, piece.name, len(self.items))
            events = self._close() + self._add(item)
        item = self._by_call[piece.id]
        assert isinstance(item, _CallItem)
        item.arguments += piece.arguments
        return events + self._event("response.function_call_arguments.delta", **item.place, delta=piece.arguments)

    def _call(self, call: ToolCall) -> bytes:
        """A complete call, which may have come in pieces."""
        events = b""
        if self._by_call.pop(call.id, None) is None:
            events = self._call_piece(CallPiece(id=call.id, name=call.name, arguments=call.arguments))
            self._by_call.pop(call.id)
        return events + self._close()

    def _add(self, item: _OpenItem) -> bytes:
        self._open = item
        self.items.append(item.value("in_progress"))
        added = self._event("response.output_item.added", output_index=item.index, item=item.value("in_progress", empty=True))
        if isinstance(item, _TextItem):
            added += self._event("response.content_part.added", **item.place, content_index=0, part=item.part(empty=True))
        return added

    def _close(self) -> bytes:
        item, self._open = self._open, None
        if item is None:
            return b""
        status = "incomplete" if self._status == "incomplete" else "completed"
        self.items[item.index] = item.value(status)
        if isinstance(item, _TextItem):
            extra: dict[str, Any] = {"logprobs": []} if item.kind == "message" else {}
            events = self._event(f"response.{item.word}.done", **item.place, content_index=0, text=item.text, **extra)
            events += self._event("response.content_part.done", **item.place, content_index=0, part=item.part())
        else:
            assert isinstance(item, _CallItem)
            events = self._event("response.function_call_arguments.done", **item.place, name=item.name, arguments=item.arguments)
        return events + self._event("response.output_item.done", output_index=item.index, item=item.value(status))

    def _event(self, kind: str, **values: Any) -> bytes:
        data = _encode({"type": kind, "sequence_number": self._sequence, **values})
        self._sequence += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


class _OpenItem:
    kind = ""

    def __init__(self, id: str, index: int) -> None:
        self.id, self.index = id, index

    @property
    def place(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self.index}

    def value(self, status: str, empty: bool = False) -> Item:
        raise NotImplementedError


class _TextItem(_OpenItem):
    def __init__(self, kind: str, index: int) -> None:
        super().__init__(f"{'rs' if kind == 'reasoning' else 'msg'}_{uuid4().hex}", index)
        self.kind, self.text = kind, ""
        self.word = "reasoning_text" if kind == "reasoning" else "output_text"

    def part(self, empty: bool = False) -> dict[str, Any]:
        text = "" if empty else self.text
        extra: dict[str, Any] = {} if self.kind == "reasoning" else {"annotations": [], "logprobs": []}
        return {"type": self.word, "text": text, **extra}

    def value(self, status: str, empty: bool = False) -> Item:
        content = [] if empty else [self.part()]
        if self.kind == "reasoning":
            return {
                "id": self.id,
                "type": "reasoning",
                "summary": [],
                "content": content,
                "encrypted_content": None,
                "status": status,
            }
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}


class _CallItem(_OpenItem):
    kind = "function_call"

    def __init__(self, call_id: str, name: str, index: int) -> None:
        super().__init__(f"fc_{uuid4().hex}", index)
        self._call_id, self.name, self.arguments = call_id, name, ""

    def value(self, status: str, empty: bool = False) -> Item:
        arguments = "" if empty else self.arguments
        return {
            "id": self.id, "type": "function_call", "status": status, "call_id": self._call_id, "name": self.name,
            "arguments": arguments,
        }  # fmt: skip


def _tool(tool: Any) -> dict[str, Any]:
    return {"description": None, "parameters": None, "strict": None, **msgspec.to_builtins(tool)}


def usage_of(usage: Usage | None) -> dict[str, Any] | None:
    if usage is None:
        return None
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
