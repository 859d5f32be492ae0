"""Embeddings: the hidden states of a text after the final norm, pooled by the last token or the mean.

One pass over the whole text, without the KV cache and outside the schedule: other sequences wait for it as for one prefill.
"""

from __future__ import annotations

from typing import Any

import torch

from windlass.errors import BadInput, TooLong
from windlass.runtime.kernels.step import Step

MAX_TOKENS = 8192
"""Of one text, since a pass is not divided."""


def embed(decoder: Any, token_ids: list[int], pooling: str, device: str) -> list[float]:
    """fp32, not normalized."""
    if decoder.fused is not None or not decoder.shard.is_whole:
        raise BadInput(
            "embeddings need the whole model on one device in the general layout; serve it with --exact, without a split, and where it fits",
            field="input",
        )
    longest = min(decoder.context_tokens, MAX_TOKENS)
    if len(token_ids) > longest:
        raise TooLong(f"input of {len(token_ids):,} tokens does not fit in {longest:,} tokens; shorten it", field="input")
    if not token_ids:
        raise BadInput("the input is empty; it needs at least one token", field="input")
    with torch.inference_mode():
        hidden = decoder.forward_hidden(_step(token_ids, device))
        hidden = hidden if decoder.norm is None else decoder.norm(hidden)
        pooled = hidden[-1].float() if pooling == "last" else hidden.float().mean(0)
    return pooled.tolist()


def _step(token_ids: list[int], device: str) -> Step:
    count = len(token_ids)
    nothing = torch.zeros(0, dtype=torch.int32, device=device)
    starts, lengths = torch.tensor([0, count], dtype=torch.int32), torch.tensor([count], dtype=torch.int32)
    return Step(
        tokens=torch.tensor(token_ids, dtype=torch.int32, device=device),
        positions=torch.arange(count, dtype=torch.int32, device=device),
        slots=nothing,
        starts=starts.to(device),
        lengths=lengths.to(device),
        blocks=nothing,
        logit_rows=nothing,
        counts=torch.tensor([count, 1, 0], dtype=torch.int32),
        host_starts=starts,
        host_lengths=lengths,
    )
