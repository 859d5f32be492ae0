"""Log-probabilities of sampled tokens and of prompts, for the requests that want them."""

from __future__ import annotations

import msgspec
from torch import Tensor

from windlass.core.request import TokenLogprob
from windlass.runtime.engine.sample.sampler import Sampler
from windlass.runtime.engine.schedule.scheduler import Chunk
from windlass.runtime.engine.schedule.sequence import Sequence as EngineSequence


def output_logprobs(
    sampler: Sampler, sequences: list[EngineSequence], tokens: list[int | None], logits: Tensor
) -> dict[int, list[TokenLogprob]]:
    """By request ID, for the requests that want them; all rows at once."""
    rows = [
        (row, sequence, token)
        for row, (sequence, token) in enumerate(zip(sequences, tokens, strict=True))
        if sequence.request.submit.logprobs is not None and token is not None
    ]
    if not rows:
        return {}
    most = max(sequence.request.submit.logprobs for _, sequence, _ in rows)
    wanted = logits if len(rows) == len(logits) else logits[[row for row, _, _ in rows]]
    found = sampler.logprobs(wanted, [token for _, _, token in rows], most)
    return {
        sequence.id: [msgspec.structs.replace(entry, top=entry.top[: sequence.request.submit.logprobs])]
        for (_, sequence, _), entry in zip(rows, found, strict=True)
    }


def score_prompt(sampler: Sampler, chunk: Chunk, logits: Tensor) -> None:
    """Log-probabilities of the prompt tokens that follow the chunk's tokens."""
    sequence, request = chunk.sequence, chunk.sequence.request
    stop = min(chunk.stop, sequence.num_prompt - 1)
    if chunk.logits_from >= stop:
        return
    first, last = chunk.logits_from + 1, stop + 1
    found = sampler.logprobs(logits[: last - first], sequence.tokens[first:last], request.submit.prompt_logprobs)
    request.prompt_logprobs[first:last] = found
