"""Logits -> the next token of each sequence, and log-probabilities. Knows no model, no cache and no scheduler.

Plain greedy rows take one argmax and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from windlass.core.request import Sampling, TokenLogprob
from windlass.runtime.engine.sample.cpu import draw_row
from windlass.runtime.engine.sample.filters import Filters, draw, most_likely
from windlass.runtime.engine.sample.grammar import GrammarMatcher
from windlass.runtime.engine.sample.masks import apply_masks
from windlass.runtime.engine.sample.penalties import Bias, TokenCounts, add_biases, apply_penalties, bias_of
from windlass.runtime.engine.sample.rng import fresh_seed, uniform
from windlass.runtime.kernels.torch_threads import one_thread


@dataclass(slots=True, eq=False)
class SamplingState:
    """What sampling of one sequence depends on, besides the logits."""

    sampling: Sampling
    seed: int
    counts: TokenCounts | None
    bias: Bias | None
    is_argmax: bool
    """Greedy without bias, penalties or grammar."""
    matcher: GrammarMatcher | None = None
    num_sampled: int = 0

    def record(self, token: int) -> None:
        self.num_sampled += 1
        if self.counts is not None:
            self.counts.add(token)


class Sampler:
    def __init__(self, num_tokens: int) -> None:
        """`num_tokens`: vocabulary size. The head may have more rows, for padding, which are never sampled."""
        self.num_tokens = num_tokens

    def new_state(self, sampling: Sampling, prompt: Sequence[int], matcher: GrammarMatcher | None = None) -> SamplingState:
        counts = TokenCounts(token for token in prompt if token < self.num_tokens) if sampling.has_penalties else None
        bias = bias_of(sampling, self.num_tokens)
        return SamplingState(
            sampling=sampling,
            seed=fresh_seed() if sampling.seed is None else sampling.seed,
            counts=counts,
            bias=bias,
            is_argmax=sampling.is_greedy and counts is None and bias is None and matcher is None,
            matcher=matcher,
        )

    def sample(self, logits: Tensor, states: Sequence[SamplingState]) -> list[int | None]:
        """A token for each row; None where the logits are NaN or infinite."""
        logits = logits[:, : self.num_tokens]
        if all(state.is_argmax for state in states):
            return _greedy(logits)
        tokens: list[int | None] = [None] * len(states)
        greedy_rows = [row for row, state in enumerate(states) if state.is_argmax]
        other = [row for row, state in enumerate(states) if not state.is_argmax]
        if greedy_rows:
            _put(tokens, greedy_rows, _greedy(logits[greedy_rows]))
        with one_thread(logits.device.type):
            _put(tokens, other, _sample_rows(_copy_rows(logits, other), [states[row] for row in other]))
        return tokens

    def logprobs(self, logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
        """Of one given token per row, before sampling parameters are applied."""
        with one_thread(logits.device.type):
            return self._logprobs(logits[:, : self.num_tokens].float(), tokens, top)

    def _logprobs(self, logits: Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
        totals = logits.logsumexp(-1, keepdim=True)
        chosen = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
        ranks = ((logits > chosen).sum(-1) + 1).tolist()
        best = _best(logits, totals, top) if top else [()] * len(tokens)
        found = zip(tokens, (chosen - totals)[:, 0].tolist(), ranks, best, strict=True)
        return [TokenLogprob(token_id=token, logprob=value, rank=rank, top=tops) for token, value, rank, tops in found]


def _best(logits: Tensor, totals: Tensor, count: int) -> list[tuple[TokenLogprob, ...]]:
    values, ids = most_likely(logits, min(count, logits.shape[1]))
    rows = zip(ids.tolist(), (values - totals).tolist(), strict=True)
    return [
        tuple(
            TokenLogprob(token_id=token, logprob=value, rank=place + 1)
            for place, (token, value) in enumerate(zip(*row, strict=True))
        )
        for row in rows
    ]


def _greedy(logits: Tensor) -> list[int | None]:
    """Ties go to the lowest id, which both libraries guarantee. NumPy's argmax is ten times as fast on a CPU (measured, 49,152 tokens)."""
    if _on_host(logits):
        array = logits.numpy()
        found = array.argmax(axis=1)
        best = array[np.arange(len(found)), found]
        return [token if value - value == 0 else None for token, value in zip(found.tolist(), best.tolist(), strict=True)]
    found = logits.argmax(-1)
    best = logits.gather(1, found[:, None])[:, 0]
    return [token if value - value == 0 else None for token, value in zip(found.tolist(), best.tolist(), strict=True)]


def _sample_rows(logits: Tensor, states: list[SamplingState]) -> list[int | None]:
    """`logits` is a copy and may be changed."""
    samplings = [state.sampling for state in states]
    valid = _finite(logits)
    apply_masks(logits, [state.matcher for state in states])
    valid = [is_valid and not (state.matcher and state.matcher.error) for is_valid, state in zip(valid, states, strict=True)]
    for row in [row for row, is_valid in enumerate(valid) if not is_valid]:
        logits[row].zero_()
    add_biases(logits, [state.bias for state in states])
    apply_penalties(logits, samplings, [state.counts for state in states])
    greedy = [row for row, sampling in enumerate(samplings) if sampling.is_greedy]
    random = [row for row, sampling in enumerate(samplings) if not sampling.is_greedy]
    tokens: list[int | None] = [None] * len(states)
    if greedy:
        _put(tokens, greedy, _greedy(logits[greedy]))
    if random:
        part = logits if not greedy else logits[random]
        _put(tokens, random, _sample_random(part, [states[row] for row in random]))
    return [token if is_valid else None for token, is_valid in zip(tokens, valid, strict=True)]


def select_rows(x: Tensor, rows: list[int]) -> Tensor:
    """x[rows]; a view where they are consecutive. NumPy on the host, for the reason of cpu.py."""
    first, count = rows[0], len(rows)
    if rows == list(range(first, first + count)):
        return x[first : first + count]
    return torch.from_numpy(x.numpy()[rows]) if _on_host(x) else x[rows]


def _copy_rows(logits: Tensor, rows: list[int]) -> Tensor:
    return torch.from_numpy(logits.numpy()[rows]) if _on_host(logits) else logits[rows].float()


def _on_host(logits: Tensor) -> bool:
    return logits.device.type == "cpu" and logits.dtype == torch.float32


def _finite(logits: Tensor) -> list[bool]:
    """Whether the maximum of each row is finite; NaN or infinity means that the model failed."""
    return np.isfinite(logits.numpy().max(axis=1)).tolist() if _on_host(logits) else logits.amax(-1).isfinite().tolist()


def _sample_random(logits: Tensor, states: list[SamplingState]) -> list[int | None]:
    """None where penalties, temperature or a grammar leave no finite logit."""
    device, width = logits.device, logits.shape[1]
    samplings = [state.sampling for state in states]
    uniforms = [uniform(state.seed, state.num_sampled) for state in states]
    if _on_host(logits):
        rows = zip(logits.numpy(), samplings, uniforms, strict=True)
        return [
            draw_row(row / np.float32(sampling.temperature), sampling.top_k, sampling.top_p, sampling.min_p, chance)
            for row, sampling, chance in rows
        ]
    logits /= torch.tensor([sampling.temperature for sampling in samplings], device=device)[:, None]
    found = draw(logits, _filters(samplings, width, device), torch.tensor(uniforms, dtype=torch.float64, device=device))
    tokens = torch.where(logits.amax(-1).isfinite(), found, -1).tolist()
    return [None if token < 0 else token for token in tokens]


def _filters(samplings: list[Sampling], width: int, device: torch.device) -> Filters | None:
    if all(sampling.top_k is None and sampling.top_p == 1 and sampling.min_p == 0 for sampling in samplings):
        return None
    return Filters(
        top_k=torch.tensor([min(sampling.top_k or width, width) for sampling in samplings], device=device),
        top_p=torch.tensor([sampling.top_p for sampling in samplings], dtype=torch.float64, device=device),
        min_p=torch.tensor([sampling.min_p for sampling in samplings], device=device),
    )


def _put(tokens: list[int | None], rows: list[int], found: Sequence[int | None]) -> None:
    for row, token in zip(rows, found, strict=True):
        tokens[row] = token
