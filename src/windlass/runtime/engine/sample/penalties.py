"""Bias and penalties on logits, for all rows of a batch in a few calls.

A row's tokens and their counts are kept in arrays that grow with the output, so that a step needs no loop over tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.core.request import Sampling


class TokenCounts:
    """The distinct tokens of a prompt and its output, and how often the output has each."""

    def __init__(self, prompt: Iterable[int]) -> None:
        distinct = dict.fromkeys(prompt)
        self._place = {token: place for place, token in enumerate(distinct)}
        self._ids = np.fromiter(distinct, np.int64, len(distinct))
        self._counts = np.zeros(len(distinct), np.float32)

    def add(self, token: int) -> None:
        place = self._place.setdefault(token, len(self._place))
        if place >= len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros(len(self._ids) + 16, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(len(self._counts) + 16, np.float32)])
        self._ids[place] = token
        self._counts[place] += 1

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> NDArray[np.float32]:
        return self._counts[: len(self._place)]


@dataclass(frozen=True)
class Bias:
    ids: NDArray[np.int64]
    values: NDArray[np.float32]


def bias_of(sampling: Sampling, num_tokens: int) -> Bias | None:
    """Of tokens within the vocabulary."""
    known = {token: value for token, value in sampling.logit_bias.items() if token < num_tokens}
    if not known:
        return None
    return Bias(np.fromiter(known, np.int64, len(known)), np.fromiter(known.values(), np.float32, len(known)))


def add_biases(logits: Tensor, biases: Sequence[Bias | None]) -> None:
    """In place, logits [rows, tokens] contiguous."""
    rows = [(row, bias) for row, bias in enumerate(biases) if bias is not None]
    if rows:
        width = logits.shape[1]
        places = _on(np.concatenate([row * width + bias.ids for row, bias in rows]), logits)
        logits.view(-1).index_add_(0, places, _on(np.concatenate([bias.values for _, bias in rows]), logits))


def apply_penalties(logits: Tensor, samplings: Sequence[Sampling], counts: Sequence[TokenCounts | None]) -> None:
    """In place. Repetition: prompt and output. Frequency and presence: output only (as OpenAI and vLLM define them)."""
    rows = [(row, found) for row, found in enumerate(counts) if found is not None]
    if not rows:
        return
    width = logits.shape[1]
    sizes = [len(found.ids) for _, found in rows]
    places = _on(np.concatenate([row * width + found.ids for row, found in rows]), logits)
    output = _on(np.concatenate([found.counts for _, found in rows]), logits)

    def spread(name: str) -> Tensor:
        values = np.array([getattr(samplings[row], name) for row, _ in rows], np.float32)
        return _on(np.repeat(values, sizes), logits)

    flat = logits.view(-1)
    values = flat[places]
    repetition = spread("repetition_penalty")
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= spread("frequency_penalty") * output + spread("presence_penalty") * (output > 0)
    flat[places] = values


def _on(array: NDArray[np.generic], logits: Tensor) -> Tensor:
    return torch.from_numpy(array).to(logits.device)
