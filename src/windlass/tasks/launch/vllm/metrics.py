"""Stats from vLLM's Prometheus metrics (vllm/v1/metrics/loggers.py). Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from windlass.core.request import Stats

_LINE = re.compile(r"^vllm:(?P<name>\w+)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)")
_BLOCKS = re.compile(r'\bnum_gpu_blocks="(\d+)"')
PARTS = 1000
"""Blocks of the cache, if vLLM does not report their number."""


def read_stats(text: str) -> Stats:
    """Summed over its engines."""
    sums: dict[str, float] = {}
    shares: list[float] = []
    blocks = 0
    for name, labels, value in _samples(text):
        if name == "cache_config_info":
            blocks += _num_blocks(labels)
        elif name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):  # the name until 0.10
            shares.append(value)
        sums[name] = sums.get(name, 0.0) + value
    blocks = blocks or (PARTS if shares else 0)
    used = sum(shares) / len(shares) if shares else 0.0

    def count(name: str) -> int:
        return int(sums.get(name, 0.0))

    return Stats(
        running=count("num_requests_running"),
        waiting=count("num_requests_waiting"),
        num_blocks=blocks,
        blocks_used=round(used * blocks),
        prompt_tokens=count("prompt_tokens_total"),
        completion_tokens=count("generation_tokens_total"),
        prefix_query_tokens=count("prefix_cache_queries_total"),
        prefix_hit_tokens=count("prefix_cache_hits_total"),
        preemptions=count("num_preemptions_total"),
        finished=count("request_success_total"),
    )


def _samples(text: str) -> Iterator[tuple[str, str, float]]:
    for line in text.splitlines():
        found = _LINE.match(line)
        if found is None:
            continue
        try:
            value = float(found["value"])
        except ValueError:
            continue
        if 0 <= value < 2**63:  # neither NaN nor infinite
            yield found["name"], found["labels"] or "", value


def _num_blocks(labels: str) -> int:
    found = _BLOCKS.search(labels)
    return int(found[1][:12]) if found else 0
