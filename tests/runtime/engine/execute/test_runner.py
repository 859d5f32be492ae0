from __future__ import annotations

from functools import partial

import pytest
import torch
from fake_decoder import FakeDecoder, make_engine

from windlass.core.request import GREEDY, Sampling
from windlass.runtime.engine.engine import Engine
from windlass.runtime.engine.execute import runner
from windlass.runtime.engine.execute.buffers import Buffers
from windlass.runtime.engine.execute.runner import Runner
from windlass.runtime.engine.protocol import Submit
from windlass.runtime.engine.schedule.scheduler import Chunk, SchedulerLimits
from windlass.runtime.engine.schedule.sequence import Sequence
from windlass.runtime.kernels.step import attention_cache

pytestmark = pytest.mark.cpu

LIMITS = SchedulerLimits(num_blocks=16, context_tokens=128, max_sequences=3, max_step_tokens=64, max_step_logits=8)


def answers(engine: Engine) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for number in range(9):
        engine.submit(Submit(number, [number + 1] * (3 + 11 * (number % 4)), GREEDY, max_tokens=30))
    while engine.has_work:
        for output in engine.step():
            found.setdefault(output.id, []).extend(output.token_ids)
    return found


@pytest.mark.parametrize("num_blocks", [32, 8])
def test_copies_on_a_device_are_kept_up_to_date(monkeypatch: pytest.MonkeyPatch, num_blocks: int) -> None:
    """Rows of the table of blocks change owners, grow and are preempted; only what changed is copied."""
    expected = answers(make_engine(num_blocks=num_blocks))
    monkeypatch.setattr(runner, "Buffers", partial(Buffers, separate=True))
    engine = make_engine(num_blocks=num_blocks)
    step = engine.runner._buffers.step
    assert step.tokens.data_ptr() != engine.runner._buffers.tokens.ctypes.data
    assert answers(engine) == expected
    decoder = FakeDecoder()
    assert all(tokens == decoder.greedy([number + 1] * (3 + 11 * (number % 4)), 30) for number, tokens in expected.items())


def test_a_step_says_what_is_in_it() -> None:
    seen: list[runner.Step] = []

    def decoder(step: runner.Step, caches: object) -> torch.Tensor:
        seen.append(step.trimmed())
        return torch.zeros(int(step.counts[2]), 4)

    made = Runner(decoder, [attention_cache(16, 1, 1, torch.float32)], LIMITS, record=False)
    one = Sequence(id=1, tokens=list(range(40)), num_prompt=40, max_tokens=5, blocks=[7, 2, 9], num_computed=10)
    two = Sequence(id=2, tokens=[50, 51, 52], num_prompt=2, max_tokens=5, blocks=[4], num_computed=2)
    logits = made.run([Chunk(two, 2, 3, 2), Chunk(one, 10, 34, 30)])
    (step,) = seen
    assert logits.shape == (5, 4)
    assert step.counts.tolist() == [25, 2, 5]
    assert step.tokens.tolist() == [52, *range(10, 34)]
    assert step.positions.tolist() == [2, *range(10, 34)]
    blocks = [7, 2, 9]
    assert step.slots.tolist() == [4 * 16 + 2, *(blocks[place // 16] * 16 + place % 16 for place in range(10, 34))]
    assert step.starts.tolist() == [0, 1, 25]
    assert step.lengths.tolist() == [3, 34]
    assert step.blocks[0, :1].tolist() == [4]
    assert step.blocks[1, :3].tolist() == blocks
    assert step.logit_rows.tolist() == [0, 21, 22, 23, 24]


def test_a_decoder_that_computes_with_pytorch_is_called_and_says_so() -> None:
    made = Runner(FakeDecoder(), [attention_cache(16, 1, 1, torch.float32)], LIMITS)
    assert made.program is None
    assert made.why_not_recorded


def test_rows_of_another_type_take_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU gives is not read by NumPy: the same tokens come from PyTorch's operations."""
    sampling = Sampling(temperature=0.9, top_p=0.9, top_k=20, repetition_penalty=1.2, seed=3)

    def tokens() -> list[int]:
        engine = make_engine()
        engine.submit(Submit(1, [5, 6, 7], sampling, max_tokens=40, logprobs=1))
        return [token for _ in range(40) for output in engine.step() for token in output.token_ids]

    expected = tokens()
    monkeypatch.setattr("windlass.runtime.engine.sample.sampler._on_host", lambda logits: False)
    assert tokens() == expected
