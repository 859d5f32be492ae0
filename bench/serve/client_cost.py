"""What the client of `windlass bench --served` costs: a server that sends tokens at a fixed pace to many streams, in another process.

Run: python bench/serve/client_cost.py [--streams 256] [--tokens-per-second 4000] [--new-tokens 128]

The client keeps up if the throughput it measures is the pace; its CPU time per token says how much faster it could be.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
from typing import Any

from windlass.tasks.bench.served.client.target import Target
from windlass.tasks.bench.served.load import Load
from windlass.tasks.bench.served.summary import Limits, LoadResult, summarize
from windlass.units import format_seconds

PROMPT_TOKENS = 512
CARD = {"object": "list", "data": [{"id": "paced", "object": "model", "owned_by": "bench"}]}


def chunk(value: Any) -> bytes:
    data = b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


TEXT = {"id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 1700000000, "model": "paced"}
TOKEN = chunk({**TEXT, "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None}]})
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Paced:
    """Every stream gets a token every `seconds`, each in a packet of its own."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._streams: dict[asyncio.StreamWriter, tuple[int, int]] = {}

    async def serve(self, told: Any) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, backlog=2048)
        told.send(server.sockets[0].getsockname()[1])
        loop, due = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        while True:
            due += self._seconds
            await asyncio.sleep(max(due - loop.time(), 0))
            for writer, (left, total) in list(self._streams.items()):
                writer.write(TOKEN)
                self._streams[writer] = (left - 1, total)
                if left == 1:
                    self._end(writer, total)

    def _end(self, writer: asyncio.StreamWriter, total: int) -> None:
        del self._streams[writer]
        usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": total}
        writer.write(chunk({**TEXT, "choices": [], "usage": usage}) + chunk(b"[DONE]") + b"0\r\n\r\n")

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                writer.close()
                return
            length = next((int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line), 0)
            body = await reader.readexactly(length)
            if head.startswith(b"GET /v1/models"):
                data = json.dumps(CARD).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
            elif head.startswith(b"POST /v1/completions"):
                total = int(json.loads(body)["max_tokens"])
                writer.write(HEAD)
                self._streams[writer] = (total, total)
            else:
                writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")


def serve(seconds: float, told: Any) -> None:
    asyncio.run(Paced(seconds).serve(told))


async def measure(url: str, streams: int, new_tokens: int) -> LoadResult:
    load = Load(at_once=streams, requests=3 * streams, prompt_tokens=PROMPT_TOKENS, new_tokens=new_tokens)
    target = Target(url)
    await target.open()
    try:
        return summarize([await target.run(load, "0")], Limits())
    finally:
        await target.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens-per-second", type=float, default=4000.0)
    parser.add_argument("--new-tokens", type=int, default=128)
    asked = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    seconds = asked.streams / asked.tokens_per_second
    process = context.Process(target=serve, args=(seconds, there), daemon=True)
    process.start()
    try:
        found = asyncio.run(measure(f"http://127.0.0.1:{here.recv()}", asked.streams, asked.new_tokens))
    finally:
        process.terminate()
        process.join()
    assert found.answered == found.requests and found.between_tokens is not None, found.errors
    between = found.between_tokens
    print(f"{asked.streams} streams, a token each every {format_seconds(seconds)}: {asked.tokens_per_second:,.0f} tokens/s sent")
    print(
        f"measured {found.output_tokens_per_second:,.0f} tokens/s; between tokens {format_seconds(between.p50)} / "
        f"{format_seconds(between.p90)} / {format_seconds(between.p99)} (p50, p90, p99)"
    )
    print(f"client: {1e6 * found.client_cpu_seconds_per_token:.1f} us of CPU per token, {found.client_cpu_share:.1%} of a core")


if __name__ == "__main__":
    main()
