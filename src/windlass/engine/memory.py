"""How much memory weights and KV cache may take, decided before anything large is allocated. Numbers only.

The system allocates pages of the cache when they are first written, so unused blocks cost nothing.
"""

from __future__ import annotations

from windlass.core.constants import BLOCK_TOKENS
from windlass.core.model import ModelSpec, kv_bytes_per_token
from windlass.core.scheme import KV_BYTES
from windlass.engine.schedule.scheduler import SchedulerLimits
from windlass.errors import BadInput, DoesNotFit
from windlass.units import format_bytes

MAX_SEQUENCES = 16
USUAL_TOKENS = 2048
"""KV cache per sequence by default; a single sequence can still be as long as the context."""
LEAST_TOKENS = 1024
"""Minimum size of the KV cache, unless --context is smaller."""
FREE_SHARE = 0.5
"""Share of the memory left after the weights that the KV cache takes by default."""
STEP_TOKENS = {"cpu": 512}
"""Prefill chunk: enough to use all cores, short enough not to stall decoding sequences."""
OTHER_STEP_TOKENS = 2048
STEP_LOGITS = 64


def block_bytes(spec: ModelSpec, kv: str) -> int:
    return kv_bytes_per_token(spec, KV_BYTES[kv]) * BLOCK_TOKENS


def check_weights(name: str, weights_bytes: int, free_bytes: int) -> None:
    if weights_bytes > free_bytes:
        short = weights_bytes - free_bytes
        raise DoesNotFit(
            f"the weights of {name} need {format_bytes(weights_bytes)}, and {format_bytes(free_bytes)} are free: "
            f"{format_bytes(short)} short; convert it to fewer bits (`windlass convert`), or see `windlass plan` for what it needs",
            short,
        )


def cache_bytes(spec: ModelSpec, kv: str, context: int | None, num_sequences: int, given: int | None, free_bytes: int) -> int:
    """The given size, or what the sequences usually fill, limited by free memory."""
    if given is not None:
        return given
    longest = context or spec.context_tokens
    tokens = max(longest, num_sequences * min(longest, USUAL_TOKENS))
    return min(_blocks(tokens) * block_bytes(spec, kv), int(max(free_bytes, 0) * FREE_SHARE))


def capped_cache_bytes(
    spec: ModelSpec, kv: str, context: int | None, num_sequences: int, given: int | None, cap_bytes: int
) -> int:
    """Where weights are offloaded: memory is better spent on weights, so the cache gets what it needs, or an eighth if that is more."""
    if given is not None:
        return given
    longest = context or spec.context_tokens
    least = _blocks(context or min(longest, LEAST_TOKENS)) * block_bytes(spec, kv)
    usual = _blocks(max(longest, num_sequences * min(longest, USUAL_TOKENS))) * block_bytes(spec, kv)
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
        max_step_tokens=max(step_tokens, num_sequences + 1),
        max_step_logits=max(STEP_LOGITS, num_sequences),
        lookahead=lookahead,
    )


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
