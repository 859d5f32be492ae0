"""How many sequences an optimizer step takes: what was asked for, or a default that grows with the machine. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Collection
from math import lcm
from typing import Literal

from windlass.core.model import Frozen
from windlass.core.recipe.recipe import BatchSection

LEAST_TOKENS = ((1e9, 2**19), (5e9, 2**20), (20e9, 2**21), (float("inf"), 2**22))
"""By parameters, what runs on small machines use: 0.5M tokens under 1B, 1M at 1.3B and 2.7B, 2M at 6.7B and 13B, 3.2M at 175B
(arXiv 2005.14165, table 2.1); 4M where Llama 3's 405B begins (arXiv 2407.21783, 3.4.1)."""

GROWTH = 16
"""The most over the least: 64 Mi tokens for large models. Runs of 2024 and 2025 use 16M (Llama 3 405B), 16M rising to 64M
(GLM-4.5, arXiv 2508.06471) and 63M (DeepSeek-V3: 15,360 sequences of 4,096, arXiv 2412.19437, 4.2)."""

SEQUENCES_PER_DEVICE = 4
"""Within those bounds. Then a replica has at least 4 pp micro-batches whatever the layout, and a plain pipeline waits at most a
fifth of the time: (p-1)/(4p + p-1). DeepSeek-V3 had 7.5 sequences a device, Llama 3 405B an eighth of one."""

ROUNDED_WITHIN = 4
"""A wish is moved to a multiple of at most a quarter of it, so by an eighth at most, unless the pins allow nothing nearer."""


class BatchChoice(Frozen):
    sequences: int
    how: Literal["pinned", "nearest", "default"]
    wanted_tokens: int
    """What was asked for, or the default, before it was made to divide."""


def default_tokens(num_parameters: int, num_devices: int, sequence_tokens: int) -> int:
    least = next(tokens for limit, tokens in LEAST_TOKENS if num_parameters < limit)
    return min(max(SEQUENCES_PER_DEVICE * num_devices * sequence_tokens, least), GROWTH * least)


def choose_batch(asked: BatchSection, default: int, sequence_tokens: int, replicas: Collection[int]) -> BatchChoice:
    """`replicas`: into how many parts the layouts at hand cut a batch, each a whole number of micro-batches. One batch for all
    of them, so that their times compare."""
    if asked.global_batch is not None:
        wanted = asked.global_batch * sequence_tokens
        return BatchChoice(sequences=asked.global_batch, how="pinned", wanted_tokens=wanted)
    wanted = asked.tokens or default
    sequences = nearest_sequences(wanted / sequence_tokens, replicas)
    return BatchChoice(sequences=sequences, how="nearest" if asked.tokens else "default", wanted_tokens=wanted)


def nearest_sequences(wanted: float, replicas: Collection[int]) -> int:
    unit = _unit(int(wanted) // ROUNDED_WITHIN, replicas)
    return max(round(wanted / unit), 1) * unit


def _unit(limit: int, replicas: Collection[int]) -> int:
    """A common multiple of as many layouts' parts as stay under the limit, then doubled: powers of two leave room for
    micro-batches and for whole rounds of a pipeline."""
    unit = 1
    for parts in sorted(replicas):
        shared = lcm(unit, parts)
        unit = shared if shared <= limit else unit
    if replicas and all(unit % parts for parts in replicas):
        unit = min(replicas)
    while 2 * unit <= limit:
        unit *= 2
    return unit
