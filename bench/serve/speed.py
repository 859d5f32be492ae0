"""What the server costs: its own time per token, the first token's delay, a crowd, and throughput beside the bare engine.

Run: python bench/serve/speed.py [--only cpu,first,crowd,ratio] [--concurrency 16] [--rounds 3]

cpu:   a fake engine gives tokens to many streams at once; the server process's CPU time over all tokens.
first: the first token's delay over HTTP less the fake engine's own, one request at a time.
crowd: 500 connections at once against a queue of 64; every one is answered or refused.
ratio: the 1.10B shape (random Q4_0 blocks), the same prompts at the same time, over HTTP and straight from the engine's Client, turn by turn
       in one run. Both sides have the engine in a process of its own, so what differs is the server and the socket.

The load comes from another process, over plain sockets, so that it does not count as the server's time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import selectors
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import aclosing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "tasks" / "serve"))
sys.path.insert(0, str(Path(__file__).parents[1] / "run"))

PROMPT_TOKENS, NEW_TOKENS = 32, 64
WAVES = 2
"""Requests per place: whoever ends is followed by another, so that most steps are full."""


# --- the load, in another process ------------------------------------------------------------------------------------


class Talk:
    """One request over a connection of its own."""

    def __init__(self, address: tuple[str, int], path: str, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        self._started = time.perf_counter()
        self._first = 0.0
        self._status = self._events = 0
        self.socket = socket.create_connection(address)
        self.socket.sendall(head.encode() + data)

    def read(self) -> bool:
        """Whether there is more to come."""
        piece = self.socket.recv(65536)
        if not self._status:
            self._status = int(piece[9:12])
        found = piece.count(b"data: ")
        if found and not self._events:
            self._first = time.perf_counter() - self._started
        self._events += found
        return bool(piece)

    def ended(self) -> tuple[int, float, float, int]:
        """Status, seconds to the first event, seconds in all, events."""
        self.socket.close()
        return self._status, self._first, time.perf_counter() - self._started, self._events


def load(url: str, path: str, bodies: list[dict[str, Any]], at_once: int, out: Any) -> None:
    """Sends back what was measured and how long it took. As cheap as can be: it shares the machine with what it measures."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    waiting, found, talking = list(reversed(bodies)), [], 0
    selector = selectors.DefaultSelector()
    began = time.perf_counter()
    while waiting or talking:
        while waiting and talking < at_once:
            talk = Talk((host, int(port)), path, waiting.pop())
            selector.register(talk.socket, selectors.EVENT_READ, talk)
            talking += 1
        for key, _ in selector.select():
            if not key.data.read():
                selector.unregister(key.fileobj)
                found.append(key.data.ended())
                talking -= 1
    out.send((found, time.perf_counter() - began))


def loaded(url: str, path: str, bodies: list[dict[str, Any]], at_once: int) -> tuple[list[tuple[int, float, float, int]], float]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=load, args=(url, path, bodies, at_once, there))
    process.start()
    found = here.recv()
    process.join()
    return found


# --- the server, in this process -------------------------------------------------------------------------------------


def serving(make_client: Any, **settings: Any) -> Any:
    from serving import running

    return running(make_client, **settings)


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def chat(tokens: int, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": tokens, "stream": True, **more}


def cpu_per_token(rounds: int) -> None:
    """Tokens come one by one every few milliseconds, as from an engine: none is batched with another."""
    from fake import FakeClient

    streams, tokens = 16, 500
    found: list[float] = []
    own: list[float] = []
    for _ in range(rounds):
        with serving(lambda: FakeClient(seconds=0.004, slots=streams)) as server:
            before = cpu_seconds()
            answers, _ = loaded(server.url, "/v1/chat/completions", [chat(tokens) for _ in range(streams)], streams)
            found.append((cpu_seconds() - before) / (streams * tokens))
            assert all(status == 200 and events > tokens for status, _, _, events in answers)
        own.append(asyncio.run(_fake_alone(streams, tokens)))
    total, engine = statistics.median(found), statistics.median(own)
    print(
        f"server CPU per token: {1e6 * (total - engine):.0f} us ({1e6 * total:.0f} us less the fake engine's {1e6 * engine:.0f} us); goal 200 us"
    )


async def _fake_alone(streams: int, tokens: int) -> float:
    from fake import FakeClient

    from windlass.core.request import Request

    client = FakeClient(seconds=0.004, slots=streams)

    async def drain() -> None:
        async with aclosing(client.generate(Request(prompt="Hello", max_tokens=tokens))) as deltas:
            async for _ in deltas:
                pass

    before = cpu_seconds()
    await asyncio.gather(*(drain() for _ in range(streams)))
    return (cpu_seconds() - before) / (streams * tokens)


def first_token(rounds: int) -> None:
    from fake import FakeClient

    delay = 0.02
    with serving(lambda: FakeClient(first_seconds=delay)) as server:
        answers, _ = loaded(server.url, "/v1/chat/completions", [chat(4) for _ in range(50 * rounds)], 1)
    firsts = sorted(first - delay for _, first, _, _ in answers)
    print(
        f"first token's delay at concurrency 1, connection included: median {1e3 * statistics.median(firsts):.2f} ms, "
        f"95 % {1e3 * firsts[int(0.95 * len(firsts))]:.2f} ms; goal 5 ms"
    )


def crowd() -> None:
    from fake import FakeClient

    slots, waiting, many = 16, 64, 500
    with serving(lambda: FakeClient(seconds=0.2, slots=slots), max_waiting=waiting) as server:
        answers, seconds = loaded(server.url, "/v1/chat/completions", [chat(3) for _ in range(many)], many)
        left = len(server.service.in_flight)
    statuses = Counter(status for status, _, _, _ in answers)
    assert set(statuses) == {200, 429} and sum(statuses.values()) == many and left == 0
    print(f"{many} connections, queue of {waiting}: {dict(statuses)} in {seconds:.1f} s, none lost, nothing left in flight")


# --- beside the bare engine ------------------------------------------------------------------------------------------


def prompts(round_number: int, count: int) -> list[list[int]]:
    """No two begin alike, lest one be found in the cache."""
    return [
        [(7 + 31 * (round_number * count + number) + place) % 1000 for place in range(PROMPT_TOKENS)] for number in range(count)
    ]


async def bare(client: Any, asked: list[list[int]], at_once: int) -> float:
    """Tokens per second."""
    from windlass.core.request import GREEDY, Request

    slots = asyncio.Semaphore(at_once)

    async def one_request(tokens: list[int]) -> int:
        request = Request(token_ids=tuple(tokens), sampling=GREEDY, max_tokens=NEW_TOKENS, ignore_eos=True)
        async with slots, aclosing(client.generate(request)) as deltas:
            return sum([len(delta.token_ids) async for delta in deltas])

    began = time.perf_counter()
    counts = await asyncio.gather(*(one_request(tokens) for tokens in asked))
    assert set(counts) == {NEW_TOKENS}
    return len(asked) * NEW_TOKENS / (time.perf_counter() - began)


def served(url: str, asked: list[list[int]], at_once: int) -> float:
    bodies = [
        {"prompt": tokens, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True} for tokens in asked
    ]
    answers, seconds = loaded(url, "/v1/completions", bodies, at_once)
    assert all(status == 200 for status, _, _, _ in answers)
    return len(asked) * NEW_TOKENS / seconds


def ratio(concurrency: int, rounds: int) -> None:
    """One engine for both, so that both meet the same weights, threads and cache; who is first changes from round to round."""
    from made_gguf import SHAPES, make

    from windlass.core.launch import Launch
    from windlass.runtime.engine.client.client import open_client

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shape.gguf"
        make(SHAPES["1.1B"], path)
        launch = Launch(model=str(path), device="cpu", context_tokens=512, max_sequences=concurrency)
        with serving(lambda: open_client(launch, needs_text=False), stuck_seconds=600.0) as server:
            pairs: list[tuple[float, float]] = []
            for number in range(rounds + 1):
                first, second = (prompts(2 * number + half, WAVES * concurrency) for half in range(2))

                def direct(asked: list[list[int]] = first) -> float:
                    running = bare(server.client, asked, concurrency)
                    return asyncio.run_coroutine_threadsafe(running, server.loop).result()

                if number % 2:
                    own, ours = direct(), served(server.url, second, concurrency)
                else:
                    ours, own = served(server.url, second, concurrency), direct()
                print(f"  {'warm-up' if not number else f'round {number}'}: {ours:.1f} served, {own:.1f} bare", flush=True)
                if number:
                    pairs.append((own, ours))
    ratios = sorted(ours / own for own, ours in pairs)
    own, ours = (statistics.median(values) for values in zip(*pairs, strict=True))
    print(
        f"1.10B shape, {concurrency} at once: {ours:.1f} tokens/s served, {own:.1f} from the bare engine, "
        f"ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}); goal 0.95"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="cpu,first,crowd,ratio")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    print(f"{os.cpu_count()} logical CPUs, load {os.getloadavg()[0]:.1f}", flush=True)
    for name in asked.only.split(","):
        if name == "cpu":
            cpu_per_token(asked.rounds)
        elif name == "first":
            first_token(asked.rounds)
        elif name == "crowd":
            crowd()
        elif name == "ratio":
            ratio(asked.concurrency, asked.rounds)
        else:
            raise SystemExit(f"--only {name}: there are cpu, first, crowd and ratio")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
