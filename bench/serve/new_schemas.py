"""What a constraint costs that the server has not seen before: first token and tokens/s of chats, one at a time.

Run: python bench/serve/new_schemas.py URL [URL ...] [--rounds 50] [--max-tokens 48]

Several servers are asked in turns, so that two versions or two machines' settings can be compared in one run. Kinds: `none`, without a
constraint; `known`, always the same schema; `new`, another one with every request. Shown are medians, and the middle half of the values.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import defaultdict
from typing import Any

import httpx


def schema(number: int) -> dict[str, Any]:
    chance = random.Random(number)
    kinds: list[dict[str, Any]] = [
        {"type": "integer", "minimum": 0, "maximum": 999},
        {"type": "string", "maxLength": 40},
        {"enum": ["red", "green", "blue"]},
        {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 4},
    ]
    properties = {f"field{number}x{name}": chance.choice(kinds) for name in range(8)}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def asked(kind: str, number: int, max_tokens: int) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema(0 if kind == "known" else number)}}
    return {
        "messages": [{"role": "user", "content": f"Describe item {number}."}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        **({} if kind == "none" else {"response_format": form}),
    }


def once(http: httpx.Client, url: str, body: dict[str, Any]) -> tuple[float, float]:
    """Seconds to the first text, and tokens/s after it."""
    began, first, events = time.perf_counter(), 0.0, 0
    with http.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            choices = json.loads(line[6:])["choices"]
            if choices and choices[0]["delta"].get("content"):
                first, events = first or time.perf_counter(), events + 1
    return first - began, (events - 1) / max(time.perf_counter() - first, 1e-9)


def shown(values: list[float], unit: float) -> str:
    low, middle, high = statistics.quantiles([value * unit for value in values], n=4)
    return f"{middle:8.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("urls", nargs="+")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--max-tokens", type=int, default=48)
    given = parser.parse_args()
    found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    start = time.time_ns()
    with httpx.Client(timeout=600) as http:
        for number in range(given.rounds + 2):
            for kind in ("none", "known", "new"):
                for url in given.urls:
                    values = once(http, url, asked(kind, start + number, given.max_tokens))
                    if number >= 2:  # both are warm
                        found[kind, url].append(values)
    for (kind, url), pairs in sorted(found.items()):
        firsts, speeds = zip(*pairs, strict=True)
        print(f"{kind:6} {url:28} first token {shown(list(firsts), 1e3)} ms, {shown(list(speeds), 1.0)} tokens/s")


if __name__ == "__main__":
    main()
