"""What a constraint costs that the server has not seen before: chats of one token and of many, one at a time.

Run: python bench/serve/new_schemas.py URL [URL ...] [--rounds 50] [--max-tokens 48]

Several servers are asked in turns, so that two versions or two machines' settings can be compared in one run. Kinds: `none`, without a
constraint; `known`, always the same schema; `new`, another one with every request. Shown are medians, and the middle half of the values.
"""

from __future__ import annotations

import argparse
import itertools
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
        **({"ignore_eos": True} if kind == "none" else {"response_format": form}),
    }


def once(http: httpx.Client, url: str, body: dict[str, Any]) -> float:
    """Seconds to the whole answer."""
    began = time.perf_counter()
    answer = http.post(f"{url}/v1/chat/completions", json=body)
    seconds = time.perf_counter() - began
    answer.raise_for_status()
    return seconds


def shown(values: list[float]) -> str:
    low, middle, high = statistics.quantiles([value * 1e3 for value in values], n=4)
    return f"{middle:8.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("urls", nargs="+")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=48)
    given = parser.parse_args()
    found: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    start = time.time_ns()
    lengths = (1, given.max_tokens)
    with httpx.Client(timeout=600) as http:
        for number in range(given.rounds + 2):
            for kind in ("none", "known", "new"):
                for at, (tokens, url) in enumerate(itertools.product(lengths, given.urls)):
                    seconds = once(http, url, asked(kind, start + len(lengths) * number + at // len(given.urls), tokens))
                    if number >= 2:  # all are warm
                        found[kind, tokens, url].append(seconds)
    for (kind, tokens, url), values in sorted(found.items()):
        print(f"{kind:6} {tokens:4} tokens from {url:28} {shown(values)} ms")


if __name__ == "__main__":
    main()
