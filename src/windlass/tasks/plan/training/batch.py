"""Global batch size in sequences: as the recipe says, or a default that grows with the cluster. Pure."""

from __future__ import annotations

from collections.abc import Collection
from math import lcm
from typing import Literal

from windlass.core.model import Frozen
from windlass.core.recipe.sections import BatchSection

LEAST_TOKENS = ((1e9, 2**19), (5e9, 2**20), (20e9, 2**21), (float("inf"), 2**22))
"""Minimum tokens per step by model size: 0.5M tokens under 1B, 1M at 1.3B and 2.7B, 2M at 6.7B and 13B, 3.2M at 175B
(arXiv 2005.14165, table 2.1); 4M where Llama 3's 405B begins (arXiv 2407.21783, 3.4.1)."""

GROWTH = 16
"""Maximum over minimum: 64 Mi tokens for large models. Runs of 2024 and 2025 use 16M (Llama 3 405B), 16M rising to 64M
(GLM-4.5, arXiv 2508.06471) and 63M (DeepSeek-V3: 15,360 sequences of 4,096, arXiv 2412.19437, 4.2)."""

TUNING_SEQUENCES = 64
"""Of adapters and of training that starts from given weights, unless more devices need more: LoRA's own runs take 8 to 128
(arXiv 2106.09685, appendix D; arXiv 2305.14314, table 9)."""

SEQUENCES_PER_DEVICE = 4
"""Within those bounds. A replica then has at least 4 pp micro-batches with any layout, so that a 1F1B pipeline's bubble is at most a
fifth: (p-1)/(4p + p-1). DeepSeek-V3 had 7.5 sequences a device, Llama 3 405B an eighth of one."""

ROUNDED_WITHIN = 4
"""The target is rounded to a multiple of at most a quarter of it, so by at most an eighth, unless pinned degrees need more."""


class BatchChoice(Frozen):
    sequences: int
    how: Literal["pinned", "nearest", "default"]
    wanted_tokens: int
    """The requested or default size before rounding."""


def default_tokens(num_parameters: int, num_devices: int, sequence_tokens: int) -> int:
    least = next(tokens for limit, tokens in LEAST_TOKENS if num_parameters < limit)
    return min(max(SEQUENCES_PER_DEVICE * num_devices * sequence_tokens, least), GROWTH * least)


def tuning_tokens(num_devices: int, sequence_tokens: int) -> int:
    return max(TUNING_SEQUENCES, num_devices) * sequence_tokens


def choose_batch(section: BatchSection, default: int, sequence_tokens: int, replicas: Collection[int]) -> BatchChoice:
    """`replicas`: dp * micro_batch of all candidate layouts. One batch size is used for all of them, so that their times compare."""
    if section.global_batch is not None:
        wanted = section.global_batch * sequence_tokens
        return BatchChoice(sequences=section.global_batch, how="pinned", wanted_tokens=wanted)
    wanted = section.tokens or default
    sequences = nearest_sequences(wanted / sequence_tokens, replicas)
    return BatchChoice(sequences=sequences, how="nearest" if section.tokens else "default", wanted_tokens=wanted)


def nearest_sequences(wanted: float, replicas: Collection[int]) -> int:
    unit = _unit(int(wanted) // ROUNDED_WITHIN, replicas)
    return max(round(wanted / unit), 1) * unit


def _unit(limit: int, replicas: Collection[int]) -> int:
    """A common multiple for as many layouts as possible under the limit, then doubled: powers of two leave room for
    micro-batches and for whole pipeline rounds."""
    unit = 1
    for parts in sorted(replicas):
        shared = lcm(unit, parts)
        unit = shared if shared <= limit else unit
    if replicas and all(unit % parts for parts in replicas):
        unit = min(replicas)
    while 2 * unit <= limit:
        unit *= 2
    return unit
