"""How much memory the weights and the cache may take, decided before anything large is made. Numbers only.

Memory of the cache is taken from the system when it is first written, so blocks that are never used cost nothing.
"""

from __future__ import annotations

from windlass.core.model import ModelSpec, kv_bytes_per_token
from windlass.core.scheme import KV_BYTES
from windlass.engine.schedule.scheduler import SchedulerLimits
from windlass.errors import BadInput, DoesNotFit
from windlass.kernels.step import BLOCK_TOKENS
from windlass.units import format_bytes

MAX_SEQUENCES = 16
USUAL_TOKENS = 2048
"""Of each sequence, when as many as are allowed run at the same time; one alone may be as long as the context."""
LEAST_TOKENS = 1024
"""A cache with room for less is not worth starting with, unless it was asked for."""
FREE_SHARE = 0.5
"""Of what is free beside the weights, what the cache may take without being told."""
STEP_TOKENS = {"cpu": 512}
"""Of long prompts, what is read at once: much more than it takes to use all cores, short enough for others not to wait long."""
OTHER_STEP_TOKENS = 2048
STEP_LOGITS = 64


def block_bytes(spec: ModelSpec, kv: str) -> int:
    return kv_bytes_per_token(spec, KV_BYTES[kv]) * BLOCK_TOKENS


def check_weights(name: str, weights_bytes: int, free_bytes: int) -> None:
    if weights_bytes > free_bytes:
        short = weights_bytes - free_bytes
        raise DoesNotFit(
            f"the weights of {name} take {format_bytes(weights_bytes)} and {format_bytes(free_bytes)} are free: "
            f"{format_bytes(short)} short; convert it to fewer bits (`windlass convert`), or see `windlass plan` for what it needs",
            short,
        )


def cache_bytes(spec: ModelSpec, kv: str, context: int | None, num_sequences: int, given: int | None, free_bytes: int) -> int:
    """What the cache may take: what was given, or as much as the sequences can usually fill, as far as memory goes."""
    if given is not None:
        return given
    longest = context or spec.context_tokens
    tokens = max(longest, num_sequences * min(longest, USUAL_TOKENS))
    return min(_blocks(tokens) * block_bytes(spec, kv), int(max(free_bytes, 0) * FREE_SHARE))


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
    """`context`: that was asked for, and must fit; None: the model's, or as much of it as fits."""
    if context is not None and context > model_context:
        raise BadInput(f"a context of {context:,} tokens, where {spec.name or 'the model'} has {model_context:,}; ask for less")
    per_block = block_bytes(spec, kv)
    num_blocks = num_bytes // per_block
    least = context if context is not None else min(model_context, LEAST_TOKENS)
    if num_blocks < _blocks(least):
        needed = _blocks(least) * per_block
        raise DoesNotFit(
            f"keys and values of {least:,} tokens take {format_bytes(needed)} in {kv} and {format_bytes(num_bytes)} are to be had: "
            f"{format_bytes(needed - num_bytes)} short; ask for a shorter --context, or free memory",
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
