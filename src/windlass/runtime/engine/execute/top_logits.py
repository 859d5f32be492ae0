"""How many top logits sampling needs: vocabulary-parallel ranks need not send the others. Exact, or all are sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from windlass.runtime.engine.execute.runner import Runner
from windlass.runtime.engine.schedule.scheduler import Chunk


class TopLogitsRunner(Runner):
    """For several ranks: every step says how many top logits per row are needed; the others may be minus infinity."""

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        self._buffers.candidates[:] = candidates_of(chunks), self._num_tokens or 0
        return super().run(chunks)


def candidates_of(chunks: Sequence[Chunk]) -> int:
    """0: all of them."""
    needed = [_num_needed(chunk.sequence.request) for chunk in chunks if chunk.num_logits]
    return max(needed) if needed and min(needed) else 0


def _num_needed(request: Any) -> int:
    """Penalties, biases and grammars change the order; log-probabilities need the sum over the vocabulary."""
    state, submit = request.sampling_state, request.submit
    if submit.logprobs is not None or submit.prompt_logprobs is not None:
        return 0
    if state.is_argmax:
        return 1
    if state.counts is not None or state.bias is not None or state.matcher is not None:
        return 0
    return state.sampling.top_k or 0
