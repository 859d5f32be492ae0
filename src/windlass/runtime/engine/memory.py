"""How much memory weights and KV cache may take, decided before anything large is allocated. Numbers only.

The system allocates pages of the cache when they are first written, so unused blocks cost nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from windlass.core.constants import BLOCK_TOKENS
from windlass.core.model import ModelSpec
from windlass.core.scheme import kv_token_bytes
from windlass.errors import BadInput, DoesNotFit
from windlass.runtime.engine.schedule.scheduler import SchedulerLimits
from windlass.units import format_bytes

LEAST_TOKENS = 1024
"""Minimum size of the KV cache, unless --context is smaller; and room for each sequence that may run at once."""


class CacheDefaults(NamedTuple):
    """What is taken of a device where nothing was asked for."""

    max_sequences: int
    """More would make a step slower in proportion."""
    sequence_tokens: int
    """KV cache per sequence. What running sequences leave is the prefix cache; a single sequence can still be as long as the context."""
    free_share: float
    """Of the memory left after the weights."""
    spared_bytes: int = 0
    """At least so much is left for activations."""


CPU = CacheDefaults(max_sequences=16, sequence_tokens=2048, free_share=0.5)
GPU = CacheDefaults(max_sequences=256, sequence_tokens=8192, free_share=0.9, spared_bytes=3 * 2**29)
"""A GPU is there for the model alone."""


def defaults_of(kind: str) -> CacheDefaults:
    return GPU if kind == "cuda" else CPU


STEP_TOKENS = {"cpu": 512}
"""Prefill chunk: enough to use all cores, short enough not to stall decoding sequences."""
OTHER_STEP_TOKENS = 2048
STEP_LOGITS = 64


def block_bytes(spec: ModelSpec, kv: str) -> int:
    return kv_token_bytes(spec, kv) * BLOCK_TOKENS


def check_weights(name: str, weights_bytes: int, free_bytes: int) -> None:
    if weights_bytes > free_bytes:
        short = weights_bytes - free_bytes
        raise DoesNotFit(
            f"the weights of {name} need {format_bytes(weights_bytes)}, and {format_bytes(free_bytes)} are free: "
            f"{format_bytes(short)} short; convert it to fewer bits (`windlass convert`), or see `windlass plan` for what it needs",
            short,
        )


def spare_bytes(free_bytes: int, defaults: CacheDefaults) -> int:
    """What a KV cache may take of the memory left after the weights."""
    return max(0, min(int(free_bytes * defaults.free_share), free_bytes - defaults.spared_bytes))


def max_sequences(spec: ModelSpec, kv: str, context: int | None, available: int, defaults: CacheDefaults) -> int:
    """How many run at once: as many as have room for a short conversation each in `available` bytes."""
    tokens = min(context or spec.context_tokens, LEAST_TOKENS)
    return max(1, min(defaults.max_sequences, available // (_blocks(tokens) * block_bytes(spec, kv))))


def cache_bytes(
    spec: ModelSpec, kv: str, context: int | None, num_sequences: int, available: int, defaults: CacheDefaults
) -> int:
    """What the sequences usually fill, limited by what is available."""
    longest = context or spec.context_tokens
    tokens = max(longest, num_sequences * min(longest, defaults.sequence_tokens))
    return min(_blocks(tokens) * block_bytes(spec, kv), available)


def capped_cache_bytes(
    spec: ModelSpec, kv: str, context: int | None, num_sequences: int, given: int | None, cap_bytes: int
) -> int:
    """Where weights are offloaded: memory is better spent on weights, so the cache gets what it needs, or an eighth if that is more."""
    if given is not None:
        return given
    longest = context or spec.context_tokens
    least = _blocks(context or min(longest, LEAST_TOKENS)) * block_bytes(spec, kv)
    usual = _blocks(max(longest, num_sequences * min(longest, CPU.sequence_tokens))) * block_bytes(spec, kv)
    return max(least, min(usual, cap_bytes // 8))


def limits_for(
    spec: ModelSpec,
    kv: str,
    num_bytes: int,
    *,
    context: int | None,
    num_sequences: int,
    step_tokens: int,
    model_context: int,
    lookahead: bool = False,
    max_drafts: int = 0,
) -> SchedulerLimits:
    """`context`: requested, and must fit; None: the model's, or as much of it as fits."""
    if context is not None and context > model_context:
        raise BadInput(f"--context {context:,} exceeds the {model_context:,} tokens of {spec.name or 'the model'}; lower it")
    per_block = block_bytes(spec, kv)
    num_blocks = num_bytes // per_block
    least = context if context is not None else min(model_context, LEAST_TOKENS)
    if num_blocks < _blocks(least):
        needed = _blocks(least) * per_block
        raise DoesNotFit(
            f"the KV cache of {least:,} tokens needs {format_bytes(needed)} in {kv}, and {format_bytes(num_bytes)} are available: "
            f"{format_bytes(needed - num_bytes)} short; lower --context, or free memory",
            needed - num_bytes,
        )
    return SchedulerLimits(
        num_blocks=num_blocks,
        context_tokens=context or model_context,
        max_sequences=num_sequences,
        max_step_tokens=max(step_tokens, num_sequences + 1 + max_drafts),
        max_step_logits=max(STEP_LOGITS, num_sequences) + (STEP_LOGITS if max_drafts else 0),
        lookahead=lookahead,
        max_drafts=max_drafts,
    )


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
