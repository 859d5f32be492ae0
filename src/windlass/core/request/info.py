"""What a Client says of its model, its machine and its work so far."""

from __future__ import annotations

from collections.abc import Mapping

from windlass.core.model import Frozen
from windlass.core.tiers.stats import TierStats


class DeviceMemory(Frozen):
    name: str
    used_bytes: int
    """By all processes."""
    total_bytes: int
    own_bytes: int = 0
    """By the engine alone."""


class Stats(Frozen):
    """Current state and counters of an engine since its start."""

    waiting: int = 0
    running: int = 0
    num_blocks: int = 0
    blocks_used: int = 0
    """Held by running sequences; cached blocks are not counted."""
    blocks_cached: int = 0
    """Free blocks that hold a cached prefix."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    late: int = 0
    """Cancelled because their deadline passed."""
    drafted: int = 0
    """Tokens that speculation guessed and a step verified, and how many of them were right."""
    accepted: int = 0
    process_bytes: int = 0
    """Resident memory of the engine process; 0: unknown."""
    devices: tuple[DeviceMemory, ...] = ()
    """Accelerators in use, if known."""
    tiers: TierStats | None = None
    """Where weights are and how they are read; None: all are in the first tier."""


class Info(Frozen):
    model: str
    context_tokens: int
    """Prompt and output together."""
    vocab_size: int = 0
    max_sequences: int = 1
    stop_token_ids: tuple[int, ...] = ()
    has_text: bool = True
    """Has a tokenizer; otherwise token ids only."""
    has_chat: bool = True
    tools: str = "template"
    """How the model is shown tools: by its chat `template`, by our plain `convention`, or empty: not at all."""
    device: str = ""
    scheme: str = ""
    kv: str = ""
    weights_bytes: int = 0
    kv_bytes: int = 0
    load_seconds: float = 0.0
    details: Mapping[str, str] = {}
    stats: Stats | None = None
