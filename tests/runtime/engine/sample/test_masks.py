"""What a grammar bars has no chance, on the host and on devices; and an engine that takes blocks away draws the same tokens."""

from __future__ import annotations

import json
from concurrent.futures import Future
from typing import Any

import pytest
from fake_decoder import FakeDecoder, make_engine

pytestmark = pytest.mark.cpu

torch = pytest.importorskip("torch")
pytest.importorskip("llguidance")

from byte_vocab import TEXTUAL  # noqa: E402

from windlass.core.request import GREEDY, Constraint, Sampling  # noqa: E402
from windlass.errors import BadInput  # noqa: E402
from windlass.model.text.grammar.tool_grammar import OutputSpec, answer_grammar  # noqa: E402
from windlass.runtime.engine.protocol import SequenceOutput, Submit, TokenizerData  # noqa: E402
from windlass.runtime.engine.sample.masks import apply_masks  # noqa: E402
from windlass.runtime.engine.sample.sampler import Sampler  # noqa: E402

NUM_TOKENS = TEXTUAL.tokenizer.vocab_size
VOCABULARY = TokenizerData(TEXTUAL.tokenizer.backend.to_str(), [TEXTUAL.end])


def grammar(regex: str) -> str:
    return answer_grammar(OutputSpec(style="plain", constraint=Constraint(kind="regex", value=regex)), {})


def guided(regex: str) -> Any:
    return TEXTUAL.guides.matcher(grammar(regex), [TEXTUAL.end])


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("width", [NUM_TOKENS, NUM_TOKENS + 50, 100])
def test_only_what_is_allowed_is_left(dtype: str, width: int) -> None:
    """float32 on a CPU goes through NumPy, all else through what other devices do. Heads may be wider or narrower."""
    logits = torch.randn(3, width, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    before = logits.clone()
    apply_masks(logits, [None, guided("[0-9]+"), None])
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    digits = [token for token in TEXTUAL.tokenizer.encode("0123456789", special=False) if token < width]
    kept = logits[1].isfinite().nonzero()[:, 0].tolist()
    assert kept == sorted(digits)
    assert torch.equal(logits[1, digits], before[1, digits])


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        Sampling(seed=1),
        Sampling(seed=1, top_k=200),
        Sampling(seed=1, top_k=3, top_p=0.9),
        Sampling(seed=1, top_p=0.3, min_p=0.001),
        Sampling(seed=1, min_p=0.2, temperature=3.0),
        Sampling(seed=1, logit_bias={5: 100.0}, repetition_penalty=2.0),
    ],
)
def test_no_setting_draws_what_is_barred(sampling: Sampling, on_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not on_host:
        monkeypatch.setattr("windlass.runtime.engine.sample.sampler._on_host", lambda logits: False)
        monkeypatch.setattr("windlass.runtime.engine.sample.masks._on_host", _unused)
        monkeypatch.setattr("windlass.runtime.engine.sample.masks.is_on_host", lambda logits: False)
    sampler = Sampler(NUM_TOKENS)
    allowed = set(TEXTUAL.tokenizer.encode("xyz", special=False))
    generator = torch.Generator().manual_seed(2)
    drawings = [sampler.new_state(sampling, [5, 6], guided("[xyz]{20}")) for _ in range(4)]
    for _ in range(8):
        tokens = sampler.sample(torch.randn(4, NUM_TOKENS, generator=generator) * 4, drawings)
        assert set(tokens) <= allowed
        for drawing, token in zip(drawings, tokens, strict=True):
            assert token is not None
            drawing.record(token)
            drawing.matcher.advance(token)  # type: ignore[union-attr]


def _unused(*_: object) -> None:
    raise AssertionError("the host's way was taken")


def test_a_grammar_at_its_end_is_no_number() -> None:
    guide = guided("x")
    guide.advance(17)  # which it does not allow
    sampler = Sampler(NUM_TOKENS)
    for sampling in (GREEDY, Sampling(seed=1)):
        drawings = [sampler.new_state(sampling, [1], guide), sampler.new_state(GREEDY, [1])]
        first, second = sampler.sample(torch.ones(2, NUM_TOKENS), drawings)
        assert first is None
        assert second == 0


# --- in an engine


def answers(submits: list[Submit], **limits: Any) -> tuple[dict[int, list[int]], dict[int, SequenceOutput], int]:
    engine = make_engine(FakeDecoder(NUM_TOKENS), NUM_TOKENS, **limits)
    engine.set_tokenizer(VOCABULARY)
    for submit in submits:
        engine.submit(submit)
    found: dict[int, list[int]] = {submit.id: [] for submit in submits}
    last: dict[int, SequenceOutput] = {}
    while engine.has_work:
        for output in engine.step():
            found[output.id] += output.token_ids
            last[output.id] = output
    assert engine.stats().blocks_used == 0
    return found, last, engine.stats().preemptions


def test_a_preempted_answer_goes_on_where_it_was() -> None:
    submits = [
        Submit(number, [1, 2, 3 + number], Sampling(seed=number), 60, [TEXTUAL.end], grammar=grammar("([a-c]{9} ){4}[0-9]{5,}"))
        for number in range(4)
    ]
    plenty, _, none = answers(submits)
    scarce, last, some = answers(submits, num_blocks=8, context_tokens=64)
    assert none == 0
    assert some > 0
    assert scarce == plenty
    assert all(len(tokens) >= 40 for tokens in scarce.values())
    assert {output.finish.reason for output in last.values() if output.finish} <= {"stop", "length"}


def test_a_whole_answer_ends_without_another_step() -> None:
    found, last, _ = answers([Submit(1, [1, 2], GREEDY, 60, [], grammar=grammar("abc"))])
    assert TEXTUAL.tokenizer.decode(found[1]) == "abc"
    finish = last[1].finish
    assert finish is not None
    assert (finish.reason, finish.stop_token_id, finish.usage.completion_tokens) == ("stop", None, 3)


def test_a_dead_end_is_the_requests_fault() -> None:
    (b,) = TEXTUAL.tokenizer.encode("b", special=False)
    found, last, _ = answers([Submit(1, [1, 2], GREEDY, 60, [b], grammar=grammar("abc")), Submit(2, [1], GREEDY, 5)])
    finish = last[1].finish
    assert finish is not None
    assert (finish.reason, finish.error_kind) == ("error", "BadInput")
    assert len(found[2]) == 5


def finished(engine: Any) -> dict[int, Any]:
    found: dict[int, Any] = {}
    while engine.has_work:
        found |= {output.id: output.finish for output in engine.step() if output.finish}
    return found


def test_a_grammar_that_cannot_be_ends_its_request_only() -> None:
    engine = make_engine(FakeDecoder(NUM_TOKENS), NUM_TOKENS)
    engine.set_tokenizer(VOCABULARY)
    engine.submit(Submit(1, [1], GREEDY, 5))
    engine.submit(Submit(2, [1], GREEDY, 5, grammar=grammar("(")))
    engine.submit(Submit(3, [1], GREEDY, 5, grammar=grammar("a")))
    engine.submit(Submit(4, [1] * 300, GREEDY, 5, grammar=grammar("a")))
    assert engine.stats().waiting == 4
    with pytest.raises(BadInput, match="request 2 is already running"):
        engine.submit(Submit(2, [1]))
    ends = finished(engine)
    assert {number: finish.reason for number, finish in ends.items()} == {1: "length", 2: "error", 3: "stop", 4: "error"}
    assert [(ends[number].error_kind, ends[number].error_field) for number in (2, 4)] == [
        ("BadInput", "constraint"),
        ("TooLong", "prompt"),
    ]
    assert "unclosed group" in ends[2].error
    assert "does not fit" in ends[4].error
    assert engine.stats().failed == 0
    engine.close()


def test_answers_go_on_while_a_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a request may be cancelled before its grammar is ready."""
    engine = make_engine(FakeDecoder(NUM_TOKENS), NUM_TOKENS)
    slow: Future[Any] = Future()
    monkeypatch.setattr(engine._grammars, "compile", lambda _, is_slow: slow)
    engine.submit(Submit(1, [1], GREEDY, 5))
    engine.submit(Submit(2, [1], GREEDY, 5, grammar="slow"))
    engine.submit(Submit(3, [1], GREEDY, 5, grammar="slow"))
    tokens = [output.token_ids for _ in range(5) for output in engine.step() if output.id == 1]
    assert len(tokens) == 5
    assert engine.has_work
    assert engine.step() == []
    cancelled = engine.cancel(2)
    assert cancelled is not None
    assert cancelled.finish is not None
    assert cancelled.finish.reason == "cancelled"
    slow.set_exception(KeyError("a panic"))
    (end,) = finished(engine).values()
    assert "could not compile the constraint" in end.error and "KeyError" in end.error and end.error_kind == ""
    assert engine.stats().cancelled == 1


def test_an_engine_that_knows_no_words_refuses() -> None:
    engine = make_engine()
    engine.submit(Submit(1, [1], grammar=json.dumps({})))
    (end,) = finished(engine).values()
    assert (end.error_kind, end.error_field) == ("BadInput", "constraint")
    assert "needs the model's tokenizer" in end.error
