"""Steps that verify drafts, as a device replays them: rows that are sequences of their own, and drafts made on the device."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from fake_decoder import FakeDecoder
from hypothesis import example, given
from hypothesis import strategies as st
from late_device import Answers, LateGraphs, make_late_engine, prompt
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from drafting import Oracle
from drafting_device import VOCAB, DeviceGraphs, engine_on_device

from windlass.core.request import GREEDY, Sampling
from windlass.core.scheme import scheme
from windlass.model.families import describe, rules
from windlass.runtime.engine.engine import Engine
from windlass.runtime.engine.load import make_engine
from windlass.runtime.engine.protocol import Submit
from windlass.runtime.engine.speculate.speculation import Speculation
from windlass.runtime.nn import Decoder
from windlass.runtime.weights import RandomWeights

pytestmark = pytest.mark.cpu


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40), st.booleans()), min_size=1, max_size=6),
    st.sampled_from([12, 40]),
    st.sampled_from([0.0, 0.4]),
    st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
)
@example(
    [(1, 1, False), (1, 1, False), (1, 5, True), (1, 1, False), (1, 1, False), (1, 2, True)], 12, 0.0, (True, False, False, False)
)  # a prompt of one token
def test_the_tokens_are_those_of_the_model(
    requests: list[tuple[int, int, bool]], num_blocks: int, wrong: float, how: tuple[bool, bool, bool, bool]
) -> None:
    decoder, answers = FakeDecoder(VOCAB), Answers()
    drafts_there, late, ngram, auto = how
    with pytest.MonkeyPatch.context() as patch:
        engine = engine_on_device(
            decoder,
            patch,
            wrong=wrong,
            drafts_there=drafts_there,
            late=late,
            ngram=ngram,
            auto=auto,
            num_blocks=num_blocks,
            max_sequences=3,
        )
        plain = make_late_engine(decoder, patch, late=False, num_blocks=num_blocks, max_sequences=3)
        expected = Answers()
        for number, (length, count, is_greedy) in enumerate(requests):
            how = GREEDY if is_greedy else Sampling(temperature=0.8, seed=number)
            request = Submit(number, prompt(number % 4, length), how, max_tokens=count, stop_token_ids=[3, 17])
            engine.submit(request), plain.submit(request)
        assert answers.finish(engine) == expected.finish(plain)


def test_one_graph_a_step_verifies_and_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, answers = FakeDecoder(VOCAB), Answers()
    engine = engine_on_device(decoder, monkeypatch, wrong=0.0, drafts_there=True, num_blocks=40, max_sequences=3)
    engine.submit(Submit(1, [1, 2, 3], GREEDY, max_tokens=41))
    answers.finish(engine)
    assert answers.tokens[1] == decoder.greedy([1, 2, 3], 41)
    stats = engine.stats()
    assert (stats.steps, stats.drafted, stats.accepted) == (21, 20, 20)
    assert engine.speculation is not None and isinstance(engine.speculation.model, Oracle)
    assert engine.speculation.model.num_asked == 1, "after the prompt; later drafts come with the step"
    graphs = engine.runner.verify_graphs
    assert isinstance(graphs, DeviceGraphs) and graphs.sizes_run == {2}


@pytest.mark.parametrize("wrong", [0.0, 0.4])
def test_steps_are_launched_before_the_last_one_is_read(monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    """Nothing is computed twice but at the end: what the device goes on with is what the host wants."""
    decoder, answers = FakeDecoder(VOCAB), Answers()
    engine = engine_on_device(decoder, monkeypatch, wrong=wrong, drafts_there=True, num_blocks=60, max_sequences=3)
    for number in range(3):
        engine.submit(Submit(number, [1, 2, 3 + number], GREEDY, max_tokens=90))
    for _ in range(8):  # prompts, and steps until each sequence has a draft
        answers.take(engine.step())
    graphs = engine.runner.verify_graphs
    assert isinstance(graphs, DeviceGraphs)
    before, steps = graphs.num_launched, 25
    for _ in range(steps):
        answers.take(engine.step())
        assert engine.runner._verifying is not None
    assert graphs.num_launched - before == steps
    answers.finish(engine)
    assert all(answers.tokens[number] == decoder.greedy([1, 2, 3 + number], 90) for number in range(3))


class Counting(FakeDecoder):
    """Repeats itself after twenty tokens."""

    def logits(self, history: Sequence[int]) -> Tensor:
        return torch.nn.functional.one_hot(torch.tensor((history[-1] + 1) % 20), VOCAB).float()


def test_steps_without_drafts_are_launched_ahead_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until lookup finds something: the step that is under way then is used, and the one after it verifies drafts."""
    decoder, answers = Counting(VOCAB), Answers()
    engine = engine_on_device(decoder, monkeypatch, wrong=0.0, drafts_there=False, num_blocks=60, max_sequences=3)
    engine.speculation = Speculation(auto=False, ngram=True, max_drafts=3, clock=itertools.count().__next__)
    plain, verifying = engine.runner._graphs, engine.runner.verify_graphs
    assert isinstance(plain, LateGraphs) and isinstance(verifying, DeviceGraphs)
    engine.submit(Submit(1, [1, 2, 3], GREEDY, max_tokens=60))
    was_ahead: list[bool] = []
    while not verifying.num_launched and engine.has_work:
        answers.take(engine.step())
        was_ahead.append(engine.runner.under_way == "plain")
    assert was_ahead[1:-2] and all(was_ahead[1:-2]) and not any(was_ahead[-2:])
    assert plain.num_launched == len(was_ahead) - 2, "all but the prompt's step and the last"
    answers.finish(engine)
    assert answers.tokens[1] == decoder.greedy([1, 2, 3], 60)


GLM = {
    "model_type": "glm4_moe", "vocab_size": 512, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 1024, "num_hidden_layers": 3, "intermediate_size": 384, "n_routed_experts": 32,
    "n_shared_experts": 1, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "attention_bias": True, "use_qk_norm": False, "num_nextn_predict_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("how", ["mtp", "ngram"])
def test_on_a_gpu(how: str) -> None:
    """Nearly the same answers with drafts and without: rounding depends on the rows of a step, so near ties may differ."""
    from windlass.core.launch import Launch

    spec = describe(GLM)
    is_hopper = torch.cuda.get_device_capability()[0] == 9
    weights = RandomWeights(spec, rules(spec), quant=scheme("int4", 128), device="cuda", tiled=is_hopper)
    prompts = [prompt(number, 20 + 9 * number) * 2 for number in range(4)]

    def answered(speculate: str) -> tuple[dict[int, list[int]], Engine]:
        decoder = Decoder(spec, weights, mtp=speculate == "mtp")
        launch = Launch(device="cuda", max_sequences=4, kv_bytes=2**26, context_tokens=512, speculate=speculate)
        engine = make_engine(launch, decoder, "cuda")
        engine.warm_up()
        for number, tokens in enumerate(prompts):
            engine.submit(Submit(number, tokens, GREEDY, max_tokens=60))
        return Answers().finish(engine).tokens, engine

    plain, _ = answered("off")
    found, engine = answered(how)
    assert engine.stats().drafted > 20
    assert engine.runner.verify_graphs is not None and not engine.runner.verify_graphs.why_not
    agreeing = [next((i for i, (a, b) in enumerate(zip(plain[n], found[n], strict=True)) if a != b), 60) for n in plain]
    assert sum(agreeing) / 240 > 0.5, agreeing
