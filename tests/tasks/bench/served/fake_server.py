"""A small OpenAI-compatible server on a socket, by hand: what it refuses, and when it breaks, a test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any

EVENT_STREAM = "text/event-stream"


class FakeServer:
    def __init__(self, **behaviour: Any) -> None:
        """`unknown`: parameters that are refused. `missing`: paths that are not there. `takes_ids`: prompts of token ids.
        `template`: tokens that a chat adds. `break_at`: numbers of requests that lose their connection in the middle.
        `slots`: more than so many at once get 429; none but the first request is answered before one was refused.
        `drops_kept`: closes every connection after its first answer, without having said so."""
        self.unknown: set[str] = set(behaviour.get("unknown", ()))
        self.missing: set[str] = set(behaviour.get("missing", ()))
        self.takes_ids: bool = behaviour.get("takes_ids", True)
        self.template: int = behaviour.get("template", 0)
        self.slots: int | None = behaviour.get("slots")
        self._refused = asyncio.Event()
        self.break_at: set[int] = set(behaviour.get("break_at", ()))
        self.drops_kept: bool = behaviour.get("drops_kept", False)
        self.key: str | None = behaviour.get("key")
        self.bodies: list[dict[str, Any]] = []
        """Of requests that were answered, the short ones with which a client finds out how to ask included."""
        self.connections = self.running = self.most_running = self.generated = 0
        self.url = ""
        self._tasks: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def listening(self) -> AsyncGenerator[FakeServer]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await self._answer(reader, writer):
                pass
        self._tasks.discard(task)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split(" ", 2)
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head.split("\r\n")[1:])}
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        if self.key is not None and headers.get("authorization") != f"Bearer {self.key}":
            return await self._send(writer, 401, {"error": {"message": "no key", "code": "invalid_api_key"}})
        if path in self.missing:
            return await self._send(writer, 404, {"detail": "Not Found"})
        if method == "GET":
            return await self._get(writer, path)
        body = json.loads(raw)
        if path == "/tokenize":
            tokens = [1, *(1000 + hash(word) % 900 for word in body["prompt"].split()), 2]
            return await self._send(writer, 200, {"count": len(tokens), "tokens": tokens, "max_model_len": 512})
        return await self._generate(writer, body)

    async def _get(self, writer: asyncio.StreamWriter, path: str) -> bool:
        if path == "/v1/models":
            card = {"id": "fake", "object": "model", "owned_by": "tests", "max_model_len": 512}
            return await self._send(writer, 200, {"object": "list", "data": [card]})
        return await self._send(writer, 404, {"detail": "Not Found"})

    async def _generate(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> bool:
        prompt = body.get("prompt")
        refused = self.unknown & set(body)
        if refused or (isinstance(prompt, list) and not self.takes_ids):
            return await self._send(writer, 400, {"error": {"message": f"unknown {refused or 'prompt'}", "code": "bad"}})
        if self.slots is not None and self.running >= self.slots:
            self._refused.set()
            return await self._send(writer, 429, {"error": {"message": "full", "code": "full"}})
        self.bodies.append(body)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._stream(writer, body, len(self.bodies) - 1)
        finally:
            self.running -= 1

    async def _stream(self, writer: asyncio.StreamWriter, body: dict[str, Any], number: int) -> bool:
        if self.slots is not None and number:
            await self._refused.wait()
        is_chat = "messages" in body
        prompt = body["messages"][0]["content"] if is_chat else body["prompt"]
        count = body.get("max_tokens") or body.get("max_completion_tokens")
        count = count if {"ignore_eos", "min_tokens"} & set(body) else min(count, 3)
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: {EVENT_STREAM}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        if is_chat:
            self._event(writer, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for token in range(count):
            if number in self.break_at and token == 2:
                return False
            finish = "length" if token == count - 1 else None
            piece = {"delta": {"content": "w "}} if is_chat else {"text": "w "}
            self._event(writer, {"choices": [{"index": 0, **piece, "finish_reason": finish}]})
            await writer.drain()
            await asyncio.sleep(0)
        tokens = len(prompt) if isinstance(prompt, list) else len(prompt.split()) + self.template
        if "stream_options" in body:
            usage = {"prompt_tokens": tokens, "completion_tokens": count, "total_tokens": tokens + count}
            self._event(writer, {"choices": [], "usage": usage})
        self._chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        self.generated += 1
        return not self.drops_kept

    def _event(self, writer: asyncio.StreamWriter, value: Any) -> None:
        self._chunk(writer, b"data: " + json.dumps(value).encode() + b"\n\n")

    def _chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    async def _send(self, writer: asyncio.StreamWriter, status: int, value: Any) -> bool:
        data = json.dumps(value).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()
        return True
