"""What `auto` knows of the time of steps, on a device that is given the next one before the last is read.

Plain steps of 2.8 ms, steps with a draft of 4.2 (GLM-4.5-Air on an H200), and a host that takes 0.9 ms to fill the buffers of a step that was not
launched ahead."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from drafting import Follower
from drafting_device import VOCAB, engine_on_device
from fake_decoder import FakeDecoder
from late_device import Stream

from windlass.core.request import GREEDY
from windlass.runtime.engine.engine import Engine
from windlass.runtime.engine.protocol import Submit
from windlass.runtime.engine.speculate.speculation import Speculation

pytestmark = pytest.mark.cpu

PLAIN, DRAFT, FILL, HOST = 2.8e-3, 4.2e-3, 0.9e-3, 0.1e-3
PAUSE = 1.3 * DRAFT


def engine_in_time(monkeypatch: pytest.MonkeyPatch, spoiled: int) -> tuple[Engine, Stream]:
    """Drafts are wrong after `spoiled` tokens in five."""
    decoder = FakeDecoder(VOCAB)
    changes = {"num_blocks": 80, "max_sequences": 1, "context_tokens": 1024}
    engine = engine_on_device(decoder, monkeypatch, wrong=1.0, drafts_there=True, spoiled=spoiled, **changes)
    assert engine.runner.verify_graphs is not None
    stream: Stream = engine.runner.verify_graphs.stream  # type: ignore[attr-defined]
    stream.step_seconds, stream.upload_seconds = {1: PLAIN, 2: DRAFT}, FILL
    engine._clock = lambda: stream.now
    model = Follower(lambda history, count: decoder.greedy(history, count), 1.0, VOCAB)
    engine.speculation = Speculation(
        auto=True, ngram=False, model=model, max_drafts=1, clock=itertools.count().__next__, drafts_in_step=True
    )
    return engine, stream


def answer(engine: Engine, stream: Stream, tokens: int, number: int = 1, pause_every: int = 0) -> float:
    """Seconds of an answer; the host pauses for longer than a step before one in so many."""
    engine.submit(Submit(number, [number, 2, 3], GREEDY, max_tokens=tokens))
    began, steps = stream.now, 0
    while engine.has_work:
        steps += 1
        stream.now += PAUSE if pause_every and steps % pause_every == 0 else HOST
        engine.step()
    return stream.now - began


def costs(engine: Engine) -> dict[int, float]:
    assert engine.speculation is not None
    return dict(engine.speculation.controls["model"].costs.seconds)


@pytest.mark.parametrize(("pause_every", "seconds"), [(0, DRAFT), (7, DRAFT), (1, PAUSE)])
def test_a_step_that_is_over_when_it_is_asked_for_was_not_free(
    monkeypatch: pytest.MonkeyPatch, pause_every: int, seconds: float
) -> None:
    engine, stream = engine_in_time(monkeypatch, spoiled=0)
    answer(engine, stream, 200, pause_every=pause_every)
    assert engine.stats().drafted > 80
    assert costs(engine)[2] == pytest.approx(seconds, rel=0.03)


def test_steps_that_measure_count_as_those_that_are_launched_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, stream = engine_in_time(monkeypatch, spoiled=0)
    engine.measure_waiting()
    assert engine.speculation is not None
    assert engine.speculation.waiting_seconds == pytest.approx(FILL)
    assert not engine.speculation.num_drafted and not costs(engine)
    answer(engine, stream, 300)
    assert engine.stats().accepted > 140
    assert costs(engine)[1] == pytest.approx(PLAIN, rel=0.01)


def test_nothing_is_taken_off_where_no_step_is_launched_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = engine_in_time(monkeypatch, spoiled=0)
    engine.runner._graphs = None
    engine.measure_waiting()
    assert engine.speculation is not None
    assert engine.speculation.waiting_seconds == 0 and engine.stats().steps == 0


def test_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = engine_in_time(monkeypatch, spoiled=0)
    engine.try_steps()
    assert engine.speculation is not None
    assert engine.speculation.waiting_seconds == pytest.approx(FILL)
    assert engine.stats().steps == 0 and engine.scheduler.pool.num_free == 80


@pytest.mark.parametrize("pause_every", [0, 11])
@pytest.mark.parametrize(("spoiled", "pays"), [(4, False), (3, False), (1, True), (0, True)])
def test_auto_drafts_where_it_is_faster(monkeypatch: pytest.MonkeyPatch, spoiled: int, pays: bool, pause_every: int) -> None:
    """About 0.2, 0.4, 0.8 and all of the drafts are accepted; half of them would have to be."""
    engine, stream = engine_in_time(monkeypatch, spoiled)
    engine.measure_waiting()
    before = engine.stats()
    answer(engine, stream, 400, pause_every=pause_every)
    drafted = engine.stats().drafted - before.drafted
    steps = engine.stats().steps - before.steps
    assert drafted > 0.9 * steps if pays else drafted < 60, (drafted, steps)
