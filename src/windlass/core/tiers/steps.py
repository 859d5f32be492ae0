"""How many tokens of a prompt a step takes where weights lie in host memory beside a device: they are copied once for all of them. Pure."""

from __future__ import annotations

from windlass.core.model import ModelSpec, MoE

STEP_TOKENS, LEAST_STEP_TOKENS = 8192, 1024
DENSE_STEP_TOKENS = 2048
"""A product of this many rows takes longer than copying its weights."""
STEP_SHARE = 1 / 24
"""Of the device, for the activations of such a step."""


def row_bytes(spec: ModelSpec, moe: MoE) -> int:
    """Of the activations of a row of a large step: inputs and outputs of its experts in bf16, and the residual with its copies."""
    slots = moe.num_active + 1
    return slots * 2 * (spec.hidden_size + 2 * moe.intermediate_size) + 40 * spec.hidden_size


def most_step_tokens(bytes_of_row: int, cap_bytes: int) -> int:
    """As many as their activations' share of the device holds."""
    room = int(cap_bytes * STEP_SHARE) // bytes_of_row
    return max(LEAST_STEP_TOKENS, min(STEP_TOKENS, room // 256 * 256))


def offload_step_tokens(spec: ModelSpec, cap_bytes: int) -> int:
    """Of a mixture or a dense model on a device of which `cap_bytes` may be used."""
    return DENSE_STEP_TOKENS if spec.experts is None else most_step_tokens(row_bytes(spec, spec.experts), cap_bytes)
