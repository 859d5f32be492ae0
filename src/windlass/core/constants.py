"""Numbers that several packages must agree on, each defined once."""

from __future__ import annotations

BLOCK_TOKENS = 16
"""Tokens of one KV block: the kernels' layout, the scheduler's unit and the planner's rounding."""
FP8_BLOCK = 128
"""Rows and columns that share a scale in published fp8 checkpoints (DeepSeek-V3's 128 x 128 blocks)."""
