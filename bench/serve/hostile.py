"""Twenty keys that send bombs beside twenty honest ones: what the honest ones notice.

Run: python bench/serve/hostile.py [MODEL] [--minutes 10] [--keys 20] [--pause 0.5] [--seed 0]   (MODEL: a path; without it SmolLM2)

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soak import CHAT, Answer, Server, Wire, Wrong, parsed, smollm2, start

from windlass.machine.memory import tree_resident_bytes

EVERY_SECONDS = 4.0
"""A request of every honest key."""
NEW_TOKENS = 16
SECONDS_TO_ANSWER = 180.0
MOST_RATIO, MOST_GROWTH_BYTES = 1.5, 200e6
TEMPLATE = """
{%- if messages[0].content == 'bomb: loops' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}
{%- if messages[0].content == 'bomb: text' %}{{ 'a' * 3000000000 }}{% endif %}
{%- if messages[0].content == 'bomb: list' %}{% set found = namespace(x=[1]) %}{% for a in range(60) %}{% set found.x = found.x + found.x %}
{%- endfor %}{% endif %}
{%- if messages[0].content == 'bomb: filter' %}{{ ('x' * 9000000) | replace('x', 'yyyyyyyyyyyyyyyyyyyy') | length }}{% endif %}
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


def bomb(chance: random.Random) -> tuple[str, dict[str, Any]]:
    """Every one a little different, so that no answer is known before."""
    number, few = chance.randrange(10**6), chance.randrange(1, 50)
    references = {f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(3000 + few)}
    chain = {"$ref": "#/$defs/d0", "$defs": {**references, f"d{3000 + few}": {"const": number}}}
    rules = "\n".join(f"r{at}: r{at + 1}" for at in range(5000 + few))
    nested: Any = {"const": number}
    for _ in range(400):
        nested = {"type": "array", "items": nested}
    kinds: dict[str, Any] = {
        "schema: a large multiple": schema({"type": "integer", "multipleOf": 62_615_533 + 2 * number}),
        "schema: references": schema(chain),
        "schema: nested": schema(nested),
        "schema: many values": schema({"enum": [f"{number} {chance.random()}" for _ in range(20_000)]}),
        "schema: large counts": schema({"type": "string", "minLength": 10**9 + number}),
        "regex: many optional": {"response_format": {"type": "regex", "regex": "a?" * 20_000 + str(number)}},
        "regex: large counts": {"response_format": {"type": "regex", "regex": f"((a{{1,{900 + few}}}){{1,999}}){{1,999}}"}},
        "regex: states": {"response_format": {"type": "regex", "regex": f"(.*a.{{{20 + few}}}b)|(.*c.{{30}}d){number}"}},
        "grammar: rules": {"response_format": {"type": "grammar", "grammar": f'start: r0\n{rules}\nr{5000 + few}: "{number}"'}},
        "grammar: ambiguous": {
            "response_format": {"type": "grammar", "grammar": f'start: x\nx: x x | "a" | "b" | "{number}"'},
            "max_tokens": 400,
        },
    }
    bombs = {kind: chat("hello", **more) for kind, more in kinds.items()}
    bombs |= {f"template: {kind}": chat(f"bomb: {kind}") for kind in ("loops", "text", "list", "filter")}
    bombs |= {
        "tokenizer: one long word": chat("a" * 190_000),
        "tokenizer: signs": chat("".join(map(chr, (chance.randrange(0x300, 0x2FFF) for _ in range(60_000))))),
        "name: escapes": {**chat("hello"), "model": f"\x1b]0;owned\x07\x1b[2J\u202e{number}\r\n" * 1000},
        "name: of a tool": chat("hello", tools=[{"type": "function", "function": {"name": "\x1b[31m" * 5000}}]),
    }
    kind = chance.choice(list(bombs))
    return kind, bombs[kind]


# --- who sends -------------------------------------------------------------------------------------------------------


@dataclass
class Told:
    """How requests ended, and how long those that were answered took."""

    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=dict)

    @property
    def all_seconds(self) -> list[float]:
        return [second for seconds in self.seconds.values() for second in seconds]


async def ask(port: int, key: str, asked: dict[str, Any]) -> Answer:
    body = json.dumps(asked).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    async with asyncio.timeout(SECONDS_TO_ANSWER), Wire(port).connected() as (reader, writer):
        writer.write(head.encode() + body)
        return parsed(await reader.read())


async def timed(port: int, key: str, made: tuple[str, dict[str, Any]], told: Told) -> None:
    kind, asked = made
    began = time.monotonic()
    try:
        found = await ask(port, key, asked)
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
        tasks.add(asyncio.create_task(timed(port, key, honest(chance), told)))
        at += EVERY_SECONDS
    await asyncio.gather(*tasks)


async def bombs(port: int, key: str, seed: int, until: float, pause: float, told: Told) -> None:
    chance = random.Random(f"{key} {seed}")
    while time.monotonic() < until:
        await timed(port, key, bomb(chance), told)
        await asyncio.sleep(pause * 2 * chance.random())


async def phase(server: Server, keys: int, seconds: float, pause: float | None, seed: int) -> tuple[Told, Told, list[int]]:
    """The honest, the others, and memory twice a second; without a `pause` the honest alone."""
    good, bad, sizes, until = Told(), Told(), list[int](), time.monotonic() + seconds
    tasks = [asyncio.create_task(asks_steadily(server.port, f"honest-{key}", seed, until, good)) for key in range(keys)]
    if pause is not None:
        tasks += [asyncio.create_task(bombs(server.port, f"bad-{key}", seed, until, pause, bad)) for key in range(keys)]
    while not all(task.done() for task in tasks):
        sizes.append(tree_resident_bytes(server.process.pid))
        await asyncio.sleep(0.5)
    await asyncio.gather(*tasks)
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
    parser.add_argument("--pause", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    found = run(asked.model or smollm2(), asked.minutes, asked.keys, asked.pause, asked.seed)
    print("\n".join(found) if found else "nothing wrong")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
