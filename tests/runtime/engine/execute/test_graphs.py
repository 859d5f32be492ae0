"""Steps that a device replays, and begins before it is asked to: the tokens are those of an engine that does neither."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_decoder import FakeDecoder
from hypothesis import given
from hypothesis import strategies as st
from late_device import Answers, make_late_engine, prompt

from windlass.core.request import GREEDY
from windlass.core.scheme import scheme
from windlass.model.families import describe, rules
from windlass.runtime.engine.engine import Engine
from windlass.runtime.engine.execute import graphs
from windlass.runtime.engine.protocol import Submit
from windlass.runtime.engine.schedule.scheduler import Chunk, SchedulerLimits
from windlass.runtime.kernels.program import program
from windlass.runtime.nn import Decoder
from windlass.runtime.weights import RandomWeights

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors are small, and tests run side by side."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    if program.available():
        program.set_threads(1)
    yield
    torch.set_num_threads(before)
    if program.available():
        program.set_threads(program.num_threads())


@pytest.fixture(autouse=True)
def short_classes() -> Iterator[pytest.MonkeyPatch]:
    """So that sequences grow out of their graphs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "LENGTHS", (20, 48, 2**20))
        yield patch


# --- whatever comes and goes

SUBMITS = st.tuples(
    st.just("submit"), st.integers(1, 40), st.integers(1, 40), st.sampled_from([(), (3, 17, 40)]), st.sampled_from([None, None, None, 1])
)  # fmt: skip
ACTIONS = st.one_of(
    SUBMITS, SUBMITS, st.tuples(st.just("cancel"), st.integers(0, 12)), st.tuples(st.just("step"), st.integers(1, 12))
)


@given(
    st.lists(ACTIONS, min_size=2, max_size=16), st.sampled_from([8, 9, 14, 40]), st.integers(1, 5), st.booleans(),
    st.sampled_from([(1, 4), (1, 2, 3, 4), ()]),
)  # fmt: skip
def test_the_tokens_are_those_of_the_model(
    actions: list[Any], num_blocks: int, max_sequences: int, late: bool, sizes: tuple[int, ...]
) -> None:
    """Arrivals, cancels and stop tokens at any moment, few blocks, graphs with rows to spare; the device early or late."""
    decoder, answers, asked = FakeDecoder(), Answers(), {}
    with pytest.MonkeyPatch.context() as patch:
        engine = make_late_engine(decoder, patch, late=late, sizes=sizes, num_blocks=num_blocks, max_sequences=max_sequences)
        for action in actions:
            if action[0] == "submit":
                _, length, count, stops, logprobs = action
                number = len(asked)
                asked[number] = (prompt(number % 4, length), count, frozenset(stops))
                engine.submit(
                    Submit(number, asked[number][0], GREEDY, max_tokens=count, stop_token_ids=list(stops), logprobs=logprobs)
                )
            elif action[0] == "cancel":
                output = engine.cancel(action[1])
                answers.take([] if output is None else [output])
            else:
                for _ in range(action[1]):
                    answers.take(engine.step())
        answers.finish(engine)
    for number, (tokens, count, stops) in asked.items():
        expected, found = FakeDecoder().greedy(tokens, count, stops), answers.tokens[number]
        if answers.reasons[number] == "cancelled":
            assert found == expected[: len(found)]
        else:
            assert found == expected
            assert answers.reasons[number] == ("stop" if expected[-1] in stops else "length")


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("num_blocks", [60, 11])
def test_most_steps_are_begun_ahead(short_classes: pytest.MonkeyPatch, late: bool, num_blocks: int) -> None:
    """Over the ends of blocks and of classes of lengths, and (with few blocks) through preemptions."""
    decoder = FakeDecoder()
    engine = make_late_engine(decoder, short_classes, late=late, num_blocks=num_blocks, max_sequences=4, sizes=(2,))
    for number in range(4):
        engine.submit(Submit(number, prompt(number, 5 + 9 * number), GREEDY, max_tokens=60 - 7 * number))
    taken, steps = 0, 0
    answers, made = Answers(), engine.runner
    while engine.has_work:
        before, flying = made._graphs.num_launched, made._in_flight
        answers.take(engine.step())
        steps += 1
        taken += flying is not None and made._graphs.num_launched - before == int(made._in_flight is not None)
    answers.finish(engine)
    assert answers.tokens == {n: decoder.greedy(prompt(n, 5 + 9 * n), 60 - 7 * n) for n in range(4)}
    assert made._graphs.sizes_run == {2, 4}
    if num_blocks == 60:
        assert engine.scheduler.num_preemptions == 0
        assert taken > 0.8 * steps
    else:
        assert engine.scheduler.num_preemptions > 0
        assert taken > 0.3 * steps


def test_a_real_decoder(short_classes: pytest.MonkeyPatch) -> None:
    config = {
        "model_type": "llama", "vocab_size": 64, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 256, "num_hidden_layers": 2, "intermediate_size": 96,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip
    spec = describe(config)
    decoder = Decoder(spec, RandomWeights(spec, rules(spec), quant=scheme("bf16")))
    limits = {"num_blocks": 18, "context_tokens": 256, "max_sequences": 5, "max_step_tokens": 40, "max_step_logits": 12}

    def answered(ahead: bool) -> tuple[Answers, Engine]:
        caches = decoder.make_caches(19, torch.float32)
        engine = make_late_engine(decoder, short_classes, late=True, caches=caches, **limits, lookahead=ahead)
        if not ahead:
            engine.runner._graphs = None
        answers = Answers()
        for number in range(9):
            engine.submit(Submit(number, prompt(number, 3 + 7 * number), GREEDY, max_tokens=20 + 3 * number))
            answers.take(engine.step())
        return answers.finish(engine), engine

    plain, _ = answered(ahead=False)
    found, engine = answered(ahead=True)
    assert found == plain
    assert engine.runner._graphs.num_launched > 20


# --- one thing at a time


def started(patch: pytest.MonkeyPatch, decoder: Any, count: int, **changes: Any) -> tuple[Engine, Answers]:
    """Sequences 0..count that decode, one step of which is under way."""
    engine = make_late_engine(decoder, patch, **({"late": True, "num_blocks": 20, "max_sequences": 4} | changes))
    answers = Answers()
    for number in range(count):
        engine.submit(Submit(number, prompt(number, 6 + number), GREEDY, max_tokens=30))
    for _ in range(4):
        answers.take(engine.step())
    assert engine.runner._in_flight is not None
    return engine, answers


def test_a_step_that_nobody_asks_for_does_no_harm(short_classes: pytest.MonkeyPatch) -> None:
    """What it wrote to the blocks of one that was cancelled is written again by whoever gets them."""
    decoder = FakeDecoder()
    engine, answers = started(short_classes, decoder, 3, num_blocks=7)
    answers.take([engine.cancel(1)])
    engine.submit(Submit(7, prompt(3, 33), GREEDY, max_tokens=25))
    answers.finish(engine)
    assert answers.tokens[7] == decoder.greedy(prompt(3, 33), 25)
    for number in (0, 2):
        assert answers.tokens[number] == decoder.greedy(prompt(number, 6 + number), 30)


def test_a_step_is_taken_only_by_those_it_was_begun_for(short_classes: pytest.MonkeyPatch) -> None:
    """One leaves and another, whose prompt is one token, takes its row in the same step."""
    decoder = FakeDecoder()
    engine, answers = started(short_classes, decoder, 2)
    answers.take([engine.cancel(1)])
    engine.submit(Submit(7, [44], GREEDY, max_tokens=9))
    answers.finish(engine)
    assert answers.tokens[7] == decoder.greedy([44], 9)
    assert answers.tokens[0] == decoder.greedy(prompt(0, 6), 30)


def test_rows_that_fill_a_graph_up_write_to_a_block_of_their_own(short_classes: pytest.MonkeyPatch) -> None:
    engine, answers = started(short_classes, FakeDecoder(), 2, sizes=(), num_blocks=12)
    held = {block for sequence in engine.scheduler.running for block in sequence.blocks}
    answers.finish(engine)
    (cache,) = engine.runner._caches
    written = {block for block in range(13) if cache.keys[block].any()}
    assert engine.runner._graphs.sizes_run == {4}
    assert 12 in written and held <= written
    assert cache.keys[12].flatten().tolist() == [1.0] + [0.0] * 15  # token 0 at position 0, however often


def test_logits_that_are_no_numbers_end_their_sequence_alone(short_classes: pytest.MonkeyPatch) -> None:
    class Broken(FakeDecoder):
        def logits(self, history: Any) -> torch.Tensor:
            row = super().logits(history)
            return row * torch.nan if len(history) == 12 and history[0] == 31 else row

    decoder = Broken()
    engine, answers = started(short_classes, decoder, 3)
    answers.finish(engine)
    assert answers.reasons == {0: "length", 1: "error", 2: "length"}
    assert answers.tokens[1] == decoder.greedy(prompt(1, 7), 30)[:5]
    assert answers.tokens[2] == decoder.greedy(prompt(2, 8), 30)


def test_nothing_is_begun_that_will_not_be_asked_for(short_classes: pytest.MonkeyPatch) -> None:
    """While others wait to join, or where one is about to end."""
    engine, answers = started(short_classes, FakeDecoder(), 1, max_sequences=1)
    engine.submit(Submit(9, [5], GREEDY, max_tokens=3))
    answers.take(engine.step())
    assert engine.runner._in_flight is None
    answers.take([engine.cancel(0)])
    begun: list[bool] = []
    while engine.has_work:
        answers.take(engine.step())
        begun.append(engine.runner._in_flight is not None)
    assert begun == [True, True, False]


def test_nothing_is_drawn_where_only_the_prompt_was_asked_about(short_classes: pytest.MonkeyPatch) -> None:
    engine = make_late_engine(FakeDecoder(), short_classes, late=False, num_blocks=8, max_sequences=2)
    answers = Answers()
    engine.submit(Submit(0, [5], GREEDY, max_tokens=0))
    engine.submit(Submit(1, [6], GREEDY, max_tokens=1))
    answers.finish(engine)
    assert answers.tokens == {0: [], 1: FakeDecoder().greedy([6], 1)}
    assert answers.reasons == {0: "length", 1: "length"}


def test_a_runner_says_when_it_cannot_choose(short_classes: pytest.MonkeyPatch) -> None:
    engine, _ = started(short_classes, FakeDecoder(), 2)
    made, (one, two) = engine.runner, engine.scheduler.running
    end = len(one.tokens)
    assert made.next_tokens([Chunk(one, 0, end, end - 1)], ahead=False) is None  # a prompt
    assert made._in_flight is None
    assert made.next_tokens([Chunk(one, end - 1, end, end)], ahead=False) is None  # no logits
    made._graphs.why_not = "for this test"
    last = len(two.tokens)
    assert made.next_tokens([Chunk(two, last - 1, last, last - 1)], ahead=False) is None
    assert made.run([Chunk(two, last - 1, last, last - 1)]).shape == (1, 72)


def test_room_for_the_token_after_next_only_where_nobody_needs_it(short_classes: pytest.MonkeyPatch) -> None:
    engine = make_late_engine(FakeDecoder(), short_classes, late=False, num_blocks=5, max_sequences=2)
    engine.submit(Submit(0, prompt(0, 15), GREEDY, max_tokens=20))
    blocks = []
    answers = Answers()
    for _ in range(3):
        answers.take(engine.step())
        blocks.append(len(engine.scheduler.running[0].blocks))
    assert blocks == [1, 2, 2]  # with 15 tokens and the 16th drawn, the second step has room for two more
    answers.finish(engine)


def test_sizes_and_classes() -> None:
    assert list(graphs.SIZES) == sorted(set(graphs.SIZES))
    with pytest.MonkeyPatch.context() as patch:
        made = make_late_engine(
            FakeDecoder(), patch, late=False, sizes=graphs.SIZES, num_blocks=64, max_sequences=30, max_step_logits=30
        ).runner._graphs
    made._step.lengths.fill_(1)
    made._step.starts.copy_(torch.arange(31)), made._step.logit_rows.copy_(torch.arange(30))
    assert [made.size(rows) for rows in (1, 8, 9, 15, 17, 29, 30)] == [1, 8, 10, 16, 20, 30, 30]
    assert made.size(31) is None
    captured = made.get(1, 20)
    assert made.covers(captured, 1) and made.covers(captured, 20) and not made.covers(captured, 21)
    assert made.get(1, 3) is captured and made.get(1, 21) is not captured and made.get(2, 20) is not captured


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    """The same tokens with steps begun ahead and without, over the ends of many blocks."""
    config = {
        "model_type": "llama", "vocab_size": 512, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 1024, "num_hidden_layers": 3, "intermediate_size": 384,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip
    spec = describe(config)
    is_hopper = torch.cuda.get_device_capability()[0] == 9
    decoder = Decoder(spec, RandomWeights(spec, rules(spec), quant=scheme("int4", 128), device="cuda", tiled=is_hopper))
    limits = SchedulerLimits(num_blocks=64, context_tokens=512, max_sequences=4, lookahead=True)

    def answered(ahead: bool) -> Answers:
        engine = Engine(decoder, decoder.make_caches(65, device="cuda"), limits, 512, device="cuda")
        if not ahead:
            engine._continues = lambda batch: False  # type: ignore[method-assign]
        for number in range(4):
            engine.submit(Submit(number, prompt(number, 5 + 9 * number), GREEDY, max_tokens=150 - 20 * number))
        answers = Answers().finish(engine)
        assert engine.runner.mode == "CUDA graphs"
        return answers

    assert answered(ahead=True) == answered(ahead=False)


def test_nothing_of_the_warm_up_is_seen() -> None:
    """And the usual graphs are captured before the first request."""
    with pytest.MonkeyPatch.context() as patch:
        engine = make_late_engine(FakeDecoder(), patch, late=False, sizes=(1, 2), num_blocks=40, max_sequences=3)
        untouched = engine.stats()
        engine.warm_up()
        assert engine.stats() == untouched and not engine.has_work
        engine.submit(Submit(1, prompt(1, 9), GREEDY, max_tokens=5))
        found = [token for _ in range(6) for output in engine.step() for token in output.token_ids]
        fresh = make_late_engine(FakeDecoder(), patch, late=False, sizes=(1, 2), num_blocks=40, max_sequences=3)
        fresh.submit(Submit(1, prompt(1, 9), GREEDY, max_tokens=5))
        assert found == [token for _ in range(6) for output in fresh.step() for token in output.token_ids] != []
