"""With drafts, right or wrong, an engine answers exactly as without."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from drafting import Follower, Oracle
from fake_decoder import FakeDecoder, make_engine
from simulated_cache import check_accounts

from windlass.core.request import GREEDY, Sampling
from windlass.runtime.engine.engine import Engine
from windlass.runtime.engine.protocol import SequenceOutput, Submit
from windlass.runtime.engine.speculate.speculation import Speculation

pytestmark = pytest.mark.cpu

VOCAB = 64
SAMPLED = Sampling(temperature=0.9, top_p=0.95, seed=3)
KINDS = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "penalties": Sampling(temperature=0.7, presence_penalty=0.8, frequency_penalty=0.5, repetition_penalty=1.2, seed=5),
    "greedy with penalties": Sampling(temperature=0.0, repetition_penalty=1.5),
    "bias": Sampling(temperature=1.0, logit_bias={3: 4.0, 7: -9.0}, seed=1),
}


def speculating(decoder: FakeDecoder, wrong: float, *, auto: bool = False, ngram: bool = False, **changes: Any) -> Engine:
    oracle = Oracle(lambda history, count: decoder.greedy(history, count), wrong, VOCAB)
    engine = make_engine(decoder, VOCAB, clock=itertools.count().__next__, max_drafts=4, **({"max_step_logits": 20} | changes))
    engine.speculation = Speculation(auto=auto, ngram=ngram, model=oracle, max_drafts=4)
    return engine


def finish(engine: Engine) -> dict[int, SequenceOutput]:
    """Everything of each request, as one output."""
    found: dict[int, SequenceOutput] = {}
    while engine.has_work:
        for output in engine.step():
            before = found.get(output.id)
            tokens, logprobs = (before.token_ids, before.logprobs) if before else ([], [])
            found[output.id] = SequenceOutput(
                output.id, tokens + output.token_ids, logprobs + output.logprobs, output.prompt_logprobs, finish=output.finish
            )
        check_accounts(engine.scheduler)
    return found


def answers(engine: Engine, requests: list[Submit]) -> list[tuple[list[int], str, list[float]]]:
    for request in requests:
        engine.submit(request)
    found = finish(engine)
    ends = [(found[request.id], found[request.id].finish) for request in requests]
    return [
        (output.token_ids, end.reason if end else "", [round(entry.logprob, 4) for entry in output.logprobs])
        for output, end in ends
    ]


@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokens_as_without(kind: str, wrong: float) -> None:
    requests = [Submit(number, [number + 1] * (5 + 9 * number), KINDS[kind], max_tokens=33, logprobs=2) for number in range(6)]
    decoder = FakeDecoder(VOCAB)
    engine = speculating(decoder, wrong)
    assert answers(engine, requests) == answers(make_engine(decoder, VOCAB), requests)
    assert engine.speculation is not None
    assert engine.speculation.num_drafted > 50
    if kind == "greedy" and not wrong:
        assert engine.speculation.num_accepted == engine.speculation.num_drafted
        assert engine.stats().steps < 6 * 33 / 2


def test_fewer_steps_are_taken_and_counted() -> None:
    decoder = FakeDecoder(VOCAB)
    engine = speculating(decoder, 0.0)
    assert answers(engine, [Submit(1, [1, 2, 3], GREEDY, max_tokens=40)])[0][0] == decoder.greedy([1, 2, 3], 40)
    stats = engine.stats()
    assert stats.steps <= 14
    assert stats.completion_tokens == 40
    assert stats.accepted == stats.drafted == 40 - stats.steps


@given(
    requests=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 60), st.integers(1, 40), st.booleans()), min_size=1, max_size=8
    ),
    num_blocks=st.integers(8, 16),
    step_tokens=st.integers(1, 30),
    logits=st.integers(0, 12),
    wrong=st.sampled_from([0.0, 0.2, 0.6]),
    auto=st.booleans(),
)
def test_whatever_is_shared_cut_or_preempted(
    requests: list[tuple[int, int, int, bool]], num_blocks: int, step_tokens: int, logits: int, wrong: float, auto: bool
) -> None:
    """In caches that are too small for all, with little room for drafts, prompts that share beginnings, and stop tokens among the drafts."""
    decoder = FakeDecoder(VOCAB)
    engine = speculating(
        decoder, wrong, auto=auto, ngram=auto, num_blocks=num_blocks, max_step_tokens=4 + step_tokens, max_step_logits=4 + logits,
        context_tokens=112,
    )  # fmt: skip
    asked = [
        Submit(number, [*([start] * 30), *range(30)][30 - length // 2 :][:length] or [1], GREEDY if plain else SAMPLED, max_tokens=most,
               stop_token_ids=[11, 12])
        for number, (start, length, most, plain) in enumerate(requests)
    ]  # fmt: skip
    assert answers(engine, asked) == answers(make_engine(decoder, VOCAB), asked)
    assert engine.scheduler.pool.num_free == num_blocks


def test_min_tokens_hold_and_an_accepted_block_is_found_again() -> None:
    decoder = FakeDecoder(VOCAB)
    stops = list(range(0, VOCAB, 2))
    request = Submit(1, list(range(20)), GREEDY, max_tokens=30, min_tokens=9, stop_token_ids=stops)
    assert answers(speculating(decoder, 0.1), [request]) == answers(make_engine(decoder, VOCAB), [request])
    engine = speculating(decoder, 0.0)
    answer = answers(engine, [Submit(1, list(range(20)), GREEDY, max_tokens=30)])[0][0]
    engine.submit(Submit(2, [*range(20), *answer, 5, 6], GREEDY, max_tokens=4))
    end = finish(engine)[2].finish
    assert end is not None
    assert end.usage.cached_tokens == 48


def test_an_engine_that_takes_over_goes_on_the_same() -> None:
    decoder = FakeDecoder(VOCAB)
    whole = answers(make_engine(decoder, VOCAB), [Submit(1, [1, 2, 3], SAMPLED, max_tokens=30)])[0][0]
    engine = speculating(decoder, 0.3)
    rest = answers(engine, [Submit(1, [1, 2, 3], SAMPLED, max_tokens=30, generated=whole[:13])])[0][0]
    assert rest == whole[13:]


def test_what_repeats_itself_is_drafted_by_lookup() -> None:
    """A decoder that repeats its prompt: nearly every draft is right."""
    decoder = Copying(VOCAB)
    engine = make_engine(decoder, VOCAB, clock=itertools.count().__next__, max_drafts=8, max_step_logits=20)
    engine.speculation = Speculation(auto=False, ngram=True)
    prompt = [3, 9, 4, 1, 5, 2, 6, 8, 7] * 3
    assert answers(engine, [Submit(1, prompt, GREEDY, max_tokens=45)])[0][0] == (prompt * 3)[:45]
    assert engine.stats().accepted > 30
    assert engine.stats().steps < 25


def test_forced_acceptance_takes_the_draft() -> None:
    engine = speculating(FakeDecoder(VOCAB), 1.0)
    engine.judge = lambda draft, token: draft
    answers(engine, [Submit(1, [1], GREEDY, max_tokens=30)])
    assert engine.stats().accepted == engine.stats().drafted > 0


class Clock:
    """Steps take as long as their rows cost: `per_row` of a step of one row for each further one."""

    def __init__(self, engine: Engine, per_row: float) -> None:
        self._engine, self._per_row, self._now, self._before = engine, per_row, 0.0, 0
        self._late = 0.0

    def wait(self, seconds: float) -> None:
        """Before the end of a step."""
        self._late = seconds

    def __call__(self) -> float:
        decoder: Any = self._engine.runner.decoder
        rows, self._before = decoder.num_rows - self._before, decoder.num_rows
        if rows:
            self._now, self._late = self._now + 1 + self._per_row * (rows - 1) + self._late, 0.0
        return self._now


def with_follower(wrong: float, per_row: float) -> tuple[Engine, Follower]:
    decoder = FakeDecoder(VOCAB)
    engine = make_engine(decoder, VOCAB, max_drafts=1, max_step_logits=20, context_tokens=1024, num_blocks=80)
    engine._clock = Clock(engine, per_row)
    model = Follower(lambda history, count: decoder.greedy(history, count), wrong, VOCAB)
    engine.speculation = Speculation(
        auto=True, ngram=False, model=model, max_drafts=1, clock=itertools.count().__next__, drafts_in_step=True
    )
    return engine, model


def test_auto_goes_on_drafting_where_it_pays() -> None:
    """Also after the steps without drafts that measure what they gain."""
    engine, _ = with_follower(wrong=0.0, per_row=0.2)
    answers(engine, [Submit(1, [1, 2, 3], GREEDY, max_tokens=150)])
    assert engine.stats().accepted > 65
    assert engine.stats().steps < 85


@pytest.mark.parametrize("wrong", [0.1, 0.25, 0.35])
def test_auto_drafts_as_often_as_it_pays(wrong: float) -> None:
    """A second row costs half a step, as of GLM-4.5-Air on an H200: one that is accepted in more than half of the cases pays. What few steps
    of a first answer say does not decide about the next one."""
    engine, _ = with_follower(wrong, per_row=0.5)
    answers(engine, [Submit(1, [1, 2, 3], GREEDY, max_tokens=32)])
    before = engine.stats()
    answers(engine, [Submit(2, [4, 5, 6], GREEDY, max_tokens=512)])
    after = engine.stats()
    assert after.drafted - before.drafted > 0.95 * (after.steps - before.steps)


def test_one_slow_step_ends_nothing() -> None:
    """A graph that is captured when a sequence has grown."""
    engine, _ = with_follower(wrong=0.3, per_row=0.5)
    clock: Any = engine._clock
    engine.submit(Submit(1, [1, 2, 3], GREEDY, max_tokens=400))
    while engine.has_work:
        if engine.stats().drafted in (1, 60):
            clock.wait(100)
        engine.step()
    assert engine.stats().drafted > 0.95 * engine.stats().steps


def test_auto_follows_nothing_where_it_does_not_pay() -> None:
    """A sequence that was not followed all the way is left alone: a model that follows it would cost time, and could not draft."""
    engine, model = with_follower(wrong=1.0, per_row=0.9)
    answers(engine, [Submit(1, [1, 2, 3], GREEDY, max_tokens=200)])
    assert model.num_followed < 20
    assert engine.stats().drafted < 20


@pytest.mark.parametrize("wrong", [0.2, 0.6])
def test_auto_turns_to_lookup_where_the_answer_copies(wrong: float) -> None:
    """Though the model comes first, which is thought to be right more often: lookup is judged by what came instead of its drafts."""
    decoder = Copying(VOCAB)
    engine = make_engine(decoder, VOCAB, max_drafts=8, max_step_logits=20, context_tokens=1024, num_blocks=80)
    engine._clock = Clock(engine, 0.1)
    model = Follower(lambda history, count: decoder.greedy(history, count), wrong, VOCAB)
    engine.speculation = Speculation(
        auto=True, ngram=True, model=model, model_drafts=1, clock=itertools.count().__next__, drafts_in_step=True
    )
    prompt = [3, 9, 4, 1, 5, 2, 6, 8, 7] * 3
    assert answers(engine, [Submit(1, prompt, GREEDY, max_tokens=180)])[0][0] == prompt[:9] * 20
    assert engine.stats().steps < 55


class Copying(FakeDecoder):
    """What follows is what stood nine tokens before."""

    def logits(self, history: Any) -> Any:
        row = super().logits(history)
        row[: self.vocab_size] = -9.0
        row[history[-9] if len(history) >= 9 else 0] = 9.0
        return row
