from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_decoder import FakeDecoder, make_engine
from hypothesis import given
from hypothesis import strategies as st
from simulated_cache import check_accounts

from windlass.core.request import GREEDY, Sampling
from windlass.errors import BadInput
from windlass.runtime.engine.engine import Engine
from windlass.runtime.engine.protocol import SequenceOutput, Submit

pytestmark = pytest.mark.cpu


class Collected:
    """Everything that came out for each request."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.outputs: dict[int, list[SequenceOutput]] = {}

    def add(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            self.tokens.setdefault(output.id, []).extend(output.token_ids)
            self.outputs.setdefault(output.id, []).append(output)

    def last(self, number: int) -> SequenceOutput:
        return self.outputs[number][-1]


def finish(engine: Engine, collected: Collected | None = None) -> Collected:
    collected = collected or Collected()
    while engine.has_work:
        collected.add(engine.step())
        check_accounts(engine.scheduler)
    return collected


def greedy(number: int, tokens: list[int], max_tokens: int | None = 8, **more: Any) -> Submit:
    return Submit(number, tokens, sampling=GREEDY, max_tokens=max_tokens, **more)


def test_tokens_are_what_the_history_says() -> None:
    decoder = FakeDecoder()
    engine = make_engine(decoder)
    prompts = {number: [(number * 7 + index) % 64 for index in range(1 + number * 13)] for number in range(7)}
    for number, prompt in prompts.items():
        engine.submit(greedy(number, prompt, 10))
    found = finish(engine)
    for number, prompt in prompts.items():
        assert found.tokens[number] == decoder.greedy(prompt, 10)
        end = found.last(number).finish
        assert end is not None
        assert (end.reason, end.usage.prompt_tokens, end.usage.completion_tokens) == ("length", len(prompt), 10)
    assert engine.scheduler.pool.num_free == engine.limits.num_blocks


@given(
    requests=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 70), st.integers(0, 40), st.integers(0, 5)), min_size=1, max_size=10
    ),
    num_blocks=st.integers(8, 20),
    step_tokens=st.integers(1, 60),
    logits=st.integers(0, 20),
    late=st.integers(0, 20),
)
def test_whatever_is_shared_cut_or_preempted(
    requests: list[tuple[int, int, int, int]], num_blocks: int, step_tokens: int, logits: int, late: int
) -> None:
    """Prompts with common beginnings, in caches that are too small for all; some are scored, some come later."""
    decoder = FakeDecoder()
    engine = make_engine(
        decoder, num_blocks=num_blocks, max_step_tokens=4 + step_tokens, max_step_logits=4 + logits, context_tokens=128
    )
    collected = Collected()
    asked: dict[int, tuple[list[int], int, bool]] = {}
    for number, (beginning, length, max_tokens, kind) in enumerate(requests):
        prompt = [*([beginning] * 40), *range(40)][40 - length // 2 :][:length] or [1]
        asked[number] = (prompt, max_tokens, kind == 0)
        engine.submit(greedy(number, prompt, max_tokens, prompt_logprobs=0 if kind == 0 else None))
        for _ in range(late % (number + 1)):
            collected.add(engine.step())
    finish(engine, collected)
    for number, (prompt, max_tokens, scored) in asked.items():
        assert collected.tokens[number] == decoder.greedy(prompt, max_tokens)
        given_logprobs = [output.prompt_logprobs for output in collected.outputs[number] if output.prompt_logprobs is not None]
        assert len(given_logprobs) == (1 if scored else 0)
        for logprobs in given_logprobs:
            assert logprobs[0] is None
            found = [entry.logprob for entry in logprobs[1:] if entry is not None]
            assert found == pytest.approx(decoder.logprobs(prompt), abs=1e-4)
    assert engine.scheduler.pool.num_free == num_blocks


def test_a_repeated_prompt_is_computed_once() -> None:
    decoder = FakeDecoder()
    engine = make_engine(decoder)
    prompt = list(range(60))
    engine.submit(greedy(1, prompt, 1))
    finish(engine)
    before = decoder.num_rows
    engine.submit(greedy(2, prompt, 1))
    end = finish(engine).last(2).finish
    assert decoder.num_rows - before == 60 - 48
    assert end is not None
    assert end.usage.cached_tokens == 48
    assert engine.stats().prefix_hit_tokens == 48


def test_an_answer_is_part_of_the_next_turns_prefix() -> None:
    decoder = FakeDecoder()
    engine = make_engine(decoder)
    engine.submit(greedy(1, list(range(20)), 30))
    answer = finish(engine).tokens[1]
    engine.submit(greedy(2, [*range(20), *answer, 5, 6], 4))
    end = finish(engine).last(2).finish
    assert end is not None
    assert end.usage.cached_tokens == 48


def test_seeds_hold_through_preemption() -> None:
    prompts = {number: [number + 1] * 20 for number in range(4)}
    sampling = {number: Sampling(temperature=1.2, top_p=0.9, seed=number) for number in prompts}

    def run(num_blocks: int) -> tuple[Collected, int]:
        engine = make_engine(num_blocks=num_blocks)
        for number, prompt in prompts.items():
            engine.submit(Submit(number, prompt, sampling[number], max_tokens=40))
        return finish(engine), engine.stats().preemptions

    roomy, none = run(32)
    tight, some = run(8)
    assert none == 0
    assert some > 0
    assert tight.tokens == roomy.tokens


@pytest.mark.parametrize("top", [0, 3])
def test_logprobs_of_new_tokens(top: int) -> None:
    decoder = FakeDecoder()
    engine = make_engine(decoder)
    engine.submit(Submit(1, [1, 2, 3], Sampling(seed=5), max_tokens=12, logprobs=top))
    engine.submit(greedy(2, [4] * 30, 12))
    found = finish(engine)
    entries = [entry for output in found.outputs[1] for entry in output.logprobs]
    tokens = found.tokens[1]
    assert [entry.token_id for entry in entries] == tokens
    assert [entry.logprob for entry in entries] == pytest.approx(decoder.logprobs([1, 2, 3, *tokens])[2:], abs=1e-4)
    assert all(len(entry.top) == top for entry in entries)
    assert all(not output.logprobs for output in found.outputs[2])


def test_prompt_logprobs_can_begin_late_and_use_the_cache() -> None:
    decoder = FakeDecoder()
    engine = make_engine(decoder)
    prompt = [index * 5 % 64 for index in range(50)]
    engine.submit(greedy(1, prompt, 1))
    finish(engine)
    before = decoder.num_rows
    engine.submit(greedy(2, prompt, 0, prompt_logprobs=2, prompt_logprobs_start=40))
    (output,) = finish(engine).outputs[2]
    assert decoder.num_rows - before == 50 - 32
    assert output.finish is not None
    assert output.finish.reason == "length"
    assert output.token_ids == []
    logprobs = output.prompt_logprobs or []
    assert [entry is None for entry in logprobs] == [True] * 40 + [False] * 10
    found = [entry.logprob for entry in logprobs if entry is not None]
    assert found == pytest.approx(decoder.logprobs(prompt)[39:], abs=1e-4)
    assert all(len(entry.top) == 2 for entry in logprobs if entry is not None)


def test_stop_tokens_stop_and_are_given_out() -> None:
    decoder = FakeDecoder()
    engine = make_engine(decoder)
    answer = decoder.greedy([9, 9], 20)
    stops = frozenset({answer[5], answer[7]})
    first = min(answer.index(stop) for stop in stops)
    engine.submit(greedy(1, [9, 9], 20, stop_token_ids=sorted(stops)))
    found = finish(engine)
    end = found.last(1).finish
    assert found.tokens[1] == answer[: first + 1]
    assert end is not None
    assert (end.reason, end.stop_token_id) == ("stop", answer[first])


def test_without_a_limit_the_context_is_filled() -> None:
    engine = make_engine(context_tokens=64)
    engine.submit(greedy(1, [1] * 10, None))
    found = finish(engine)
    assert len(found.tokens[1]) == 54
    end = found.last(1).finish
    assert end is not None
    assert end.reason == "length"


def test_cancelling_frees_everything_at_once_and_leaves_others_alone() -> None:
    decoder = FakeDecoder()
    engine = make_engine(decoder, max_sequences=2)
    for number in range(3):
        engine.submit(greedy(number, [number + 3] * 20, 10))
    collected = Collected()
    for _ in range(3):
        collected.add(engine.step())
    for number in (0, 2):  # one runs, one waits
        output = engine.cancel(number)
        assert output is not None
        assert output.finish is not None
        assert output.finish.reason == "cancelled"
        assert engine.cancel(number) is None
        check_accounts(engine.scheduler)
    finish(engine, collected)
    assert collected.tokens[1] == decoder.greedy([4] * 20, 10)
    assert engine.stats().cancelled == 2


def test_numbers_may_be_used_again() -> None:
    engine = make_engine()
    engine.submit(greedy(1, [1], 2))
    with pytest.raises(BadInput, match="request 1 is already running"):
        engine.submit(greedy(1, [1], 2))
    finish(engine)
    engine.submit(greedy(1, [1], 2))
    assert len(finish(engine).tokens[1]) == 2


@pytest.mark.parametrize(
    ("submit", "words"),
    [
        (greedy(1, [], 1), "empty"),
        (greedy(1, [64], 1), "token 64; this model's tokens are 0 to 63"),
        (greedy(1, [-1], 1), "token -1"),
        (greedy(1, [1] * 256, None), "256 tokens plus max_tokens 1 does not fit in 256 tokens"),
        (greedy(1, [1] * 200, 57), "200 tokens plus max_tokens 57 does not fit"),
    ],
)
def test_requests_that_cannot_be_are_refused(submit: Submit, words: str) -> None:
    engine = make_engine()
    with pytest.raises(BadInput, match=words):
        engine.submit(submit)
    assert not engine.has_work
    assert engine.stats().waiting == 0


def test_a_model_that_fails_fails_only_its_request() -> None:
    decoder = FakeDecoder()
    decoder.broken_after = 30
    engine = make_engine(decoder)
    engine.submit(greedy(1, [1] * 28, 10))
    engine.submit(greedy(2, [2] * 10, 10))
    found = finish(engine)
    end = found.last(1).finish
    assert end is not None
    assert end.reason == "error"
    assert "NaN or infinite" in end.error
    assert len(found.tokens[1]) == 3
    assert len(found.tokens[2]) == 10
    assert engine.stats().failed == 1


def test_statistics_add_up() -> None:
    engine = make_engine()
    for number in range(6):
        engine.submit(greedy(number, [number] * 20, 5))
    assert engine.stats().waiting == 6
    engine.step()
    stats = engine.stats()
    assert (stats.waiting, stats.running) == (4, 2)
    assert stats.blocks_used == 4
    finish(engine)
    stats = engine.stats()
    assert (stats.waiting, stats.running, stats.blocks_used, stats.finished) == (0, 0, 0, 6)
    assert (stats.prompt_tokens, stats.completion_tokens) == (120, 30)
    assert stats.blocks_cached > 0


class Clock:
    """Goes on when it is told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Taking(FakeDecoder):
    """A second for a step."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def __call__(self, step: Any, caches: Any) -> torch.Tensor:
        self._clock.now += 1
        return super().__call__(step, caches)


def test_timings_are_told() -> None:
    clock = Clock()
    engine = make_engine(Taking(clock), clock=clock)
    engine.submit(greedy(1, [1] * 100, 5))
    clock.now += 7
    end = finish(engine).last(1).finish
    assert end is not None
    assert end.timings.queue_seconds == 7
    assert end.timings.prefill_seconds == 3, "40 tokens a step"
    assert end.timings.decode_seconds == 4


def test_a_closed_engine_refuses_and_lets_go() -> None:
    engine = make_engine()
    engine.submit(greedy(1, [1], 50))
    engine.step()
    engine.close()
    engine.close()
    assert not engine.has_work
    with pytest.raises(Exception, match="closed"):
        engine.submit(greedy(2, [1], 1))


class Quick(FakeDecoder):
    """Reads nothing back; for many requests."""

    def __call__(self, step: Any, caches: Any) -> torch.Tensor:
        return self.table[: int(step.counts[2])]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_thousands_of_requests_leak_nothing() -> None:
    chance = random.Random(1)
    engine = make_engine(
        Quick(vocab_size=64, padding=0), num_blocks=64, max_sequences=16, max_step_tokens=128, max_step_logits=32
    )
    live: set[int] = set()
    ended = submitted = warm = 0
    while submitted < 10_000 or live:
        while submitted < 10_000 and len(live) < 24:
            tokens = [chance.randrange(8) for _ in range(chance.randrange(1, 60))]
            sampling = Sampling(temperature=chance.choice([0.0, 0.0, 0.0, 1.0]), presence_penalty=chance.choice([0.0, 0.0, 1.0]))
            engine.submit(Submit(submitted, tokens, sampling, max_tokens=chance.randrange(0, 12)))
            live.add(submitted)
            submitted += 1
        if chance.random() < 0.2 and live:
            number = chance.choice(sorted(live))
            assert engine.cancel(number) is not None
            live.discard(number)
            ended += 1
        done = {output.id for output in engine.step() if output.finish}
        live -= done
        ended += len(done)
        if not warm and submitted > 3000:
            warm = resident_bytes()
    assert ended == 10_000
    stats = engine.stats()
    assert stats.cancelled > 300
    assert stats.finished + stats.cancelled == 10_000
    assert engine.scheduler.pool.num_free == 64
    assert not engine._sequences
    assert resident_bytes() - warm < 16 * 2**20


def test_steps_cost_little_python() -> None:
    """One greedy sequence: everything but the decoder, in calls of functions. How long they take is measured by bench/speed_engine.py."""
    logits = torch.randn(1, 64)
    engine = make_engine(lambda step, caches: logits, num_blocks=64, context_tokens=1024)
    engine.submit(greedy(1, [1] * 16, 1000))
    for _ in range(50):
        engine.step()
    num_calls = 0

    def count(frame: Any, event: str, of: Any) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    for _ in range(50):
        engine.step()
    sys.setprofile(None)
    assert num_calls / 50 < MOST_CALLS


MOST_CALLS = 120
"""They are about 80."""


def test_what_is_late_ends_whether_it_runs_or_waits() -> None:
    clock = Clock()
    engine = make_engine(max_sequences=1, clock=clock)
    for number in (1, 2):
        engine.submit(Submit(number, [1, 2, 3], GREEDY, 200, deadline_seconds=5.0))
    engine.submit(Submit(3, [1, 2, 3], GREEDY, 4, deadline_seconds=60.0))
    engine.step()
    assert engine.stats().running == 1
    clock.now += 4
    assert not [output for output in engine.step() if output.finish]
    clock.now += 2
    ended = {output.id: output.finish for output in engine.step() if output.finish}
    assert ended.keys() == {1, 2}
    for finish in ended.values():
        assert finish is not None
        assert (finish.reason, finish.error_kind) == ("error", "Late")
        assert "after 5 s" in finish.error
    while engine.has_work:
        engine.step()
    stats = engine.stats()
    assert (stats.late, stats.finished, stats.failed, stats.blocks_used) == (2, 1, 0, 0)


def test_deadlines_of_those_that_ended_do_not_pile_up() -> None:
    engine = make_engine()
    for number in range(500):
        engine.submit(Submit(number, [1, 2, 3], GREEDY, 1, deadline_seconds=600.0))
        engine.step()
    assert not engine.has_work
    assert len(engine._deadlines) < 100
