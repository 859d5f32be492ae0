"""With drafts, tokens have exactly the model's distribution: counted, and compared with what the logits say."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_decoder import FakeDecoder, make_engine

sys.path.insert(0, str(Path(__file__).parent))

from drafting import Oracle

from windlass.core.request import Sampling
from windlass.runtime.engine.engine import Engine
from windlass.runtime.engine.protocol import Submit
from windlass.runtime.engine.speculate.speculation import Speculation

pytestmark = pytest.mark.cpu

VOCAB, LENGTH, PROMPT = 4, 4, [1, 2, 1, 2, 3]


class Cheap(FakeDecoder):
    """Remembers the logits of a history."""

    def __init__(self) -> None:
        super().__init__(VOCAB)
        self.table *= 0.5
        self._known: dict[tuple[int, ...], Any] = {}

    def logits(self, history: Any) -> Any:
        key = tuple(history)
        if key not in self._known:
            self._known[key] = super().logits(history)
        return self._known[key]


def engine_with_drafts(decoder: Cheap) -> Engine:
    oracle = Oracle(lambda history, count: decoder.greedy(history, count), 0.4, VOCAB)
    engine = make_engine(
        decoder, VOCAB, clock=itertools.count().__next__, max_drafts=3, num_blocks=64, max_sequences=32, max_step_tokens=400,
        max_step_logits=128,
    )  # fmt: skip
    engine.speculation = Speculation(auto=False, ngram=True, model=oracle, max_drafts=3)
    return engine


def counted(engine: Engine, num_answers: int, temperature: float) -> Counter[tuple[int, ...]]:
    """Answers, each with a seed of its own."""
    found: dict[int, list[int]] = {number: [] for number in range(num_answers)}
    waiting = iter(range(num_answers))
    for number in itertools.chain(waiting, itertools.repeat(None)):
        if number is not None:
            engine.submit(Submit(number, PROMPT, Sampling(temperature=temperature, seed=number), max_tokens=LENGTH))
        if number is None or number % 32 == 31:
            for output in engine.step():
                found[output.id] += output.token_ids
            if number is None and not engine.has_work:
                break
    return Counter(map(tuple, found.values()))


def chance_of(decoder: Cheap, answer: tuple[int, ...], temperature: float) -> float:
    chance, history = 1.0, list(PROMPT)
    for token in answer:
        chance *= float((decoder.logits(history)[:VOCAB].double() / temperature).softmax(-1)[token])
        history.append(token)
    return chance


def deviation(found: Counter[tuple[int, ...]], decoder: Cheap, temperature: float) -> float:
    """Of chi-square from its mean, in standard deviations of a normal one (Wilson and Hilferty, 1931)."""
    total = sum(found.values())
    expected = {
        answer: total * chance_of(decoder, answer, temperature) for answer in itertools.product(range(VOCAB), repeat=LENGTH)
    }
    likely = {answer for answer, count in expected.items() if count >= 5}
    rare = total - sum(expected[answer] for answer in likely), total - sum(found[answer] for answer in likely)
    square = sum((found[answer] - expected[answer]) ** 2 / expected[answer] for answer in likely)
    square += (rare[1] - rare[0]) ** 2 / rare[0] if rare[0] >= 5 else 0
    free = len(likely) - (rare[0] < 5)
    return ((square / free) ** (1 / 3) - (1 - 2 / (9 * free))) / sqrt(2 / (9 * free))


@pytest.mark.parametrize("num_answers", [2_500, pytest.param(25_000, marks=pytest.mark.long)])
def test_sampled_answers_have_the_models_distribution(num_answers: int) -> None:
    """Of 10^4 draws, and of 10^5."""
    torch.set_num_threads(1)
    decoder = Cheap()
    engine = engine_with_drafts(decoder)
    found = counted(engine, num_answers, 1.1)
    stats = engine.stats()
    assert stats.accepted > num_answers / 4 and stats.drafted - stats.accepted > num_answers / 4
    assert abs(deviation(found, decoder, 1.1)) < 4


def test_the_count_notices_drafts_that_are_taken_unseen() -> None:
    decoder = Cheap()
    engine = engine_with_drafts(decoder)
    engine.judge = lambda draft, token: draft
    assert deviation(counted(engine, 1_000, 1.1), decoder, 1.1) > 10
