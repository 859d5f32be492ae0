"""Twenty keys that send bombs beside twenty honest ones: what the honest ones notice.

Run: python bench/serve/hostile.py [MODEL] [--minutes 10] [--keys 20] [--pause 1] [--seed 0]   (MODEL: a path; without it SmolLM2)

The model's chat template is replaced by one with bombs of its own. A third of the time before, and again after, only the honest keys ask:
that is what their times are compared with. Their requests come at fixed times, whatever the server does. Shown are the times of the honest by
their kind, the ends of every kind of bomb, and the memory of the server and all that it started. Wrong are: an honest request that ends in anything
but 200, a 99th percentile above 1.5 times that without bombs, memory that grows by 200 MB, and an engine that ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soak import CHAT, Answer, Server, Wire, Wrong, parsed, smollm2, start

from windlass.runtime.machine.memory import tree_resident_bytes

EVERY_SECONDS = 4.0
"""A request of every honest key."""
NEW_TOKENS = 16
SECONDS_TO_ANSWER = 180.0
MOST_RATIO, MOST_GROWTH_BYTES = 1.5, 200e6
# Numbers hang on the messages: Jinja computes constants when it compiles a template, for every chat.
TEMPLATE = """
{%- if messages[0].content == 'bomb: loops' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}
{%- if messages[0].content == 'bomb: text' %}{{ 'a' * (messages | length * 3000000000) }}{% endif %}
{%- if messages[0].content == 'bomb: list' %}{% set found = namespace(x=[1]) %}{% for a in range(60) %}{% set found.x = found.x + found.x %}
{%- endfor %}{% endif %}
{%- if messages[0].content == 'bomb: filter' %}{{ ('x' * (messages | length * 9000000)) | replace('x', 'yyyyyyyyyyyyyyyyyyyy') | length }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


# --- what they send --------------------------------------------------------------------------------------------------


def chat(words: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": words}], "max_tokens": NEW_TOKENS, "temperature": 0, **more}


def schema(value: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}}


def properties(chance: random.Random, number: int) -> dict[str, Any]:
    kinds = [{"type": "integer"}, {"type": "string", "maxLength": 20}, {"enum": ["red", "green"]}, {"type": "boolean"}]
    return {
        "type": "object",
        "properties": {f"p{number}x{name}": chance.choice(kinds) for name in range(4)},
        "additionalProperties": False,
    }


def honest(chance: random.Random) -> tuple[str, dict[str, Any]]:
    words = " ".join(chance.choices(["the", "sea", "is", "blue", "and", "old"], k=chance.randint(5, 60)))
    kind = chance.choices(["chat", "a known schema", "a new schema"], [6, 3, 1])[0]
    if kind == "chat":
        return kind, chat(words)
    number = chance.randrange(8) if kind == "a known schema" else chance.randrange(8, 10**9)
    return kind, chat(words, **schema(properties(random.Random(number), number)))


NUMBER = "7040506"
"""In the bodies below; replaced by another one for every request, so that no answer is known before."""


def bomb(words: str, **more: Any) -> dict[str, Any]:
    """Those that turn out to be harmless are to cost the engine little."""
    return chat(words, **{"max_tokens": 1, **more})


def bombs() -> dict[str, bytes]:
    references = {f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(3000)}
    chain = {"$ref": "#/$defs/d0", "$defs": {**references, "d3000": {"const": NUMBER}}}
    rules = "\n".join(f"r{at}: r{at + 1}" for at in range(5000))
    nested: Any = {"const": NUMBER}
    for _ in range(400):
        nested = {"type": "array", "items": nested}
    found = {
        "schema: a large multiple": bomb(
            "hello", **schema({"type": "integer", "multipleOf": 62_615_533, "minimum": int(NUMBER)})
        ),
        "schema: references": bomb("hello", **schema(chain)),
        "schema: nested": bomb("hello", **schema(nested)),
        "schema: many values": bomb("hello", **schema({"enum": [f"{NUMBER} {at * at}" for at in range(20_000)]})),
        "schema: large counts": bomb("hello", **schema({"type": "string", "minLength": int(f"1{NUMBER}")})),
        "regex: many optional": constrained("regex", "a?" * 20_000 + NUMBER),
        "regex: large counts": constrained("regex", f"((a{{1,900}}){{1,999}}){{1,999}}{NUMBER}"),
        "regex: states": constrained("regex", f"(.*a.{{20}}b)|(.*c.{{30}}d){NUMBER}"),
        "grammar: rules": constrained("grammar", f'start: r0\n{rules}\nr5000: "{NUMBER}"'),
        "grammar: ambiguous": {**constrained("grammar", f'start: x\nx: x x | "a" | "b" | "{NUMBER}"'), "max_tokens": 400},
        **{f"template: {kind}": bomb(f"bomb: {kind}") for kind in ("loops", "text", "list", "filter")},
        "tokenizer: one long word": bomb(NUMBER + "a" * 190_000),
        "tokenizer: signs": bomb(NUMBER + "".join(chr(0x300 + at * 7919 % 0x2CFF) for at in range(60_000))),
        "name: escapes": {**bomb("hello"), "model": f"\x1b]0;owned\x07\x1b[2J\u202e{NUMBER}\r\n" * 1000},
        "name: of a tool": bomb("hello", tools=[{"type": "function", "function": {"name": NUMBER + "\x1b[31m" * 5000}}]),
    }
    return {kind: json.dumps(asked).encode() for kind, asked in found.items()}


def constrained(kind: str, value: str) -> dict[str, Any]:
    return bomb("hello", response_format={"type": kind, kind: value})


# --- who sends -------------------------------------------------------------------------------------------------------


@dataclass
class Told:
    """How requests ended, and how long those that were answered took."""

    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=dict)

    @property
    def all_seconds(self) -> list[float]:
        return [second for seconds in self.seconds.values() for second in seconds]


async def ask(port: int, key: str, body: bytes) -> Answer:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    async with asyncio.timeout(SECONDS_TO_ANSWER), Wire(port).connected() as (reader, writer):
        writer.write(head.encode() + body)
        return parsed(await reader.read())


async def timed(port: int, key: str, kind: str, body: bytes, told: Told) -> None:
    began = time.monotonic()
    try:
        found = await ask(port, key, body)
        how = str(found.status) if found.status == 200 else f"{found.status} {json.loads(found.body)['error'].get('code')}"
    except TimeoutError:
        how = "NEVER"
    except (OSError, ValueError, KeyError, Wrong) as error:
        how = f"WRONG {type(error).__name__}: {error}"[:80]
    told.ends[kind, how] += 1
    told.seconds.setdefault(kind, []).append(time.monotonic() - began)


async def asks_steadily(port: int, key: str, seed: int, until: float, told: Told) -> None:
    chance, tasks = random.Random(f"{key} {seed}"), set[asyncio.Task[None]]()
    at = time.monotonic() + chance.random() * EVERY_SECONDS
    while at < until:
        await asyncio.sleep(at - time.monotonic())
        kind, asked = honest(chance)
        tasks.add(asyncio.create_task(timed(port, key, kind, json.dumps(asked).encode(), told)))
        at += EVERY_SECONDS
    await asyncio.gather(*tasks)


async def sends_bombs(port: int, key: str, seed: int, until: float, pause: float, told: Told, bodies: dict[str, bytes]) -> None:
    chance = random.Random(f"{key} {seed}")
    while time.monotonic() < until:
        kind = chance.choice(list(bodies))
        body = bodies[kind].replace(NUMBER.encode(), str(chance.randrange(10**6, 10**7)).encode())
        await timed(port, key, kind, body, told)
        await asyncio.sleep(pause * 2 * chance.random())


def all_send_bombs(port: int, keys: int, seed: int, seconds: float, pause: float, only: str = "") -> Told:
    """In a process of its own: what it costs to send them delays no honest one."""

    async def run() -> Told:
        told, until = Told(), time.monotonic() + seconds
        bodies = {kind: body for kind, body in bombs().items() if kind.startswith(only)}
        await asyncio.gather(*(sends_bombs(port, f"bad-{key}", seed, until, pause, told, bodies) for key in range(keys)))
        return told

    return asyncio.run(run())


async def phase(
    server: Server, keys: int, seconds: float, pause: float | None, seed: int, only: str = ""
) -> tuple[Told, Told, list[int]]:
    """The honest, the others, and memory twice a second; without a `pause` the honest alone. `only`: bombs of that kind."""
    good, bad, sizes, until = Told(), Told(), list[int](), time.monotonic() + seconds
    with ProcessPoolExecutor(1) as pool:
        tasks = [asyncio.create_task(asks_steadily(server.port, f"honest-{key}", seed, until, good)) for key in range(keys)]
        sending = None if pause is None else pool.submit(all_send_bombs, server.port, keys, seed, seconds, pause, only)
        while not all(task.done() for task in tasks) or not (sending is None or sending.done()):
            sizes.append(tree_resident_bytes(server.process.pid))
            await asyncio.sleep(0.5)
        await asyncio.gather(*tasks)
        bad = bad if sending is None else sending.result()
    return good, bad, sizes


# --- what came of it -------------------------------------------------------------------------------------------------


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def show(name: str, told: Told) -> None:
    print(f"{name}:")
    for kind in sorted(told.seconds):
        values = told.seconds[kind]
        ends = ", ".join(f"{how} x {count}" for (other, how), count in sorted(told.ends.items()) if other == kind)
        print(f"  {kind:26} {percentile(values, 0.5):7.3f} {percentile(values, 0.99):7.3f} {max(values):7.3f} s   {ends}")


def problems(alone: list[Told], beside: Told, bad: Told, sizes: list[int], ends: int) -> list[str]:
    found = [
        f"honest {kind}: {how}, {count} times"
        for told in (*alone, beside)
        for (kind, how), count in told.ends.items()
        if how != "200"
    ]
    found += [f"{kind}: {how}, {count} times" for (kind, how), count in bad.ends.items() if how.startswith(("NEVER", "WRONG"))]
    without, with_bombs = percentile([s for told in alone for s in told.all_seconds], 0.99), percentile(beside.all_seconds, 0.99)
    print(f"honest 99th percentile: {without:.3f} s without bombs, {with_bombs:.3f} s beside them: {with_bombs / without:.2f} x")
    print(
        f"memory beside bombs: {sizes[0] / 1e6:,.0f} MB at first, at most {max(sizes) / 1e6:,.0f}, {sizes[-1] / 1e6:,.0f} at the end"
    )
    found += [f"the 99th percentile is {with_bombs / without:.2f} x"] if with_bombs > MOST_RATIO * without else []
    found += [f"memory grew by {(sizes[-1] - sizes[0]) / 1e6:,.0f} MB"] if sizes[-1] - sizes[0] > MOST_GROWTH_BYTES else []
    return found + ([f"engines that ended: {ends}"] if ends else [])


def prepared(model: str, folder: Path) -> str:
    """A copy at eight bits with a chat template that has bombs in it."""
    copy = folder / "model"
    subprocess.run(
        [sys.executable, "-m", "windlass", "convert", model, copy, "--quant", "int8", "--group", "32"],
        check=True,
        stdout=sys.stderr,
    )
    (copy / "chat_template.jinja").write_text(TEMPLATE)
    return str(copy)


def run(model: str, minutes: float, keys: int, pause: float, seed: int) -> list[str]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "keys").write_text("".join(f"{kind}-{key}\n" for kind in ("honest", "bad") for key in range(keys)))
        server = start(prepared(model, folder), folder, "--max-body", "8MB", "--api-key", str(folder / "keys"))
        try:
            engine = server.engine()
            asyncio.run(phase(server, keys, 20.0, None, seed))  # everything is warm
            before, _, _ = asyncio.run(phase(server, keys, 20 * minutes, None, seed + 1))
            beside, bad, sizes = asyncio.run(phase(server, keys, 60 * minutes, pause, seed + 2))
            after, _, _ = asyncio.run(phase(server, keys, 20 * minutes, None, seed + 3))
            ended = server.engine() != engine
        finally:
            server.process.send_signal(signal.SIGTERM)
            code = server.process.wait(120)
        print(f"{'':28} {'50 %':>7} {'99 %':>7} {'most':>7}")
        for title, told in (
            ("honest, before", before),
            ("honest, beside bombs", beside),
            ("honest, after", after),
            ("bombs", bad),
        ):
            show(title, told)
        found = problems([before, after], beside, bad, sizes, int(ended))
        log = server.log.read_text(errors="replace")
        found += [f"the server ended with {code}"] if code else []
        found += ["a traceback in the log"] if "Traceback" in log else []
        found += ["control characters in the log"] if any(ord(sign) < 32 and sign not in "\n\t" for sign in log) else []
        return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--keys", type=int, default=20)
    parser.add_argument("--pause", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    found = run(asked.model or smollm2(), asked.minutes, asked.keys, asked.pause, asked.seed)
    print("\n".join(found) if found else "nothing wrong")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
