"""Drafts of the bundled model: by its MTP layer, by lookup, and by a model with the same tokens; the answers stay the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fake_text import encoded  # noqa: E402

from windlass.core.launch import Launch, check_launch  # noqa: E402
from windlass.core.layout import Layout  # noqa: E402
from windlass.core.request import GREEDY, Request, Sampling  # noqa: E402
from windlass.errors import BadInput  # noqa: E402
from windlass.model.bundled.tasks import held_out  # noqa: E402
from windlass.open.drafts import with_draft_model  # noqa: E402
from windlass.open.resolve import model_files  # noqa: E402
from windlass.runtime.engine.client.text_processor import TextProcessor  # noqa: E402
from windlass.runtime.engine.load import load_model  # noqa: E402
from windlass.runtime.engine.protocol import Submit, TokenizerData  # noqa: E402
from windlass.runtime.kernels.program import program  # noqa: E402
from windlass.runtime.weights.text.files import model_text  # noqa: E402

pytestmark = pytest.mark.cpu

PROPERTIES = '{"a": {"type": "integer"}, "b": {"type": "string"}}'
JSON = '{"grammars": [{"json_schema": {"type": "object", "properties": ' + PROPERTIES + ', "required": ["a", "b"]}}]}'


def question_tokens(processor: TextProcessor, question: str) -> list[int]:
    return encoded(processor, Request(messages=({"role": "user", "content": question},))).tokens


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    if program.available():
        program.set_threads(1)
    yield
    if program.available():
        program.set_threads(program.num_threads())


@pytest.fixture(scope="module")
def path() -> Path:
    return model_files("tiny-glm", shown=False)


@pytest.fixture(scope="module")
def requests(path: Path) -> list[Submit]:
    """Problems, greedy and sampled, with penalties, with log-probabilities; texts of any kind; a grammar."""
    text = model_text(path)
    processor, stops = TextProcessor(text), list(text.stop_ids)
    prompts = [question_tokens(processor, problem.prompt) for problem in held_out(1, seed=5)]
    ways: list[dict[str, Any]] = [
        {"sampling": GREEDY},
        {"sampling": Sampling(temperature=1.0, seed=1), "logprobs": 2},
        {"sampling": Sampling(temperature=0.8, top_p=0.9, presence_penalty=0.4, repetition_penalty=1.1, seed=2)},
        {"sampling": Sampling(temperature=0.7, seed=3), "grammar": JSON},
    ]
    return [
        Submit(number, prompt, max_tokens=30, stop_token_ids=stops, **ways[number % len(ways)])
        for number, prompt in enumerate(prompts)
    ]


def answered(path: Path, requests: list[Submit], how: str, **more: Any) -> tuple[dict[int, list[int]], Any]:
    """In fp32, where rounding does not depend on the rows of a step."""
    engine, _ = load_model(Launch(model=str(path), device="cpu", exact=True, kv="fp32", max_sequences=4, speculate=how, **more))
    text = model_text(path)
    engine.set_tokenizer(TokenizerData(text.tokenizer.backend.to_str(), list(text.stop_ids)))
    for request in requests:
        engine.submit(request)
    found: dict[int, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.finish is None or output.finish.reason in ("stop", "length"), output.finish
            found.setdefault(output.id, []).extend(output.token_ids)
    return found, engine


def test_answers_are_the_same_token_by_token(path: Path, requests: list[Submit]) -> None:
    plain, _ = answered(path, requests, "off")
    assert len(plain) == len(requests)
    for how, least in (("mtp", 0.2), ("ngram", 0.05), ("auto", 0.0), (str(path), 0.3)):
        found, engine = answered(path, requests, how)
        assert found == plain, how
        stats = engine.stats()
        assert how == "auto" or stats.drafted > 20
        assert stats.accepted >= least * stats.drafted, how
        engine.close()


def test_the_mtp_layer_is_right_more_often_than_not(path: Path) -> None:
    """Of the first draft: measured by bench/speculate/acceptance.py as 0.87."""
    text = model_text(path)
    processor = TextProcessor(text)
    engine, info = load_model(Launch(model=str(path), device="cpu", max_sequences=1, speculate="mtp"))
    assert info.details["speculation"] == "MTP layer"
    assert engine.speculation is not None
    engine.speculation.controls["model"] = type(engine.speculation.controls["model"])(auto=False, max_drafts=1)
    for number, problem in enumerate(held_out(2, seed=9)):
        prompt = question_tokens(processor, problem.prompt)
        engine.submit(Submit(number, prompt, GREEDY, max_tokens=60, stop_token_ids=list(text.stop_ids)))
    while engine.has_work:
        engine.step()
    stats = engine.stats()
    assert stats.drafted > 50
    assert stats.accepted > 0.75 * stats.drafted


def test_what_cannot_draft_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="auto, off, ngram, mtp or a model"):
        with_draft_model(Launch(model=str(path), speculate="nosuchthing"))
    with pytest.raises(BadInput, match="the whole model on one device"):
        check_launch(Launch(speculate="mtp", layout=Layout(tp=2)))
    check_launch(Launch(speculate="ngram", layout=Layout(tp=2)))
    assert with_draft_model(Launch(model=str(path), speculate="tiny-glm")).speculate == str(path)
    import shutil

    bare = tmp_path / "bare"
    shutil.copytree(path, bare)
    (bare / "mtp.safetensors").unlink()
    with pytest.raises(BadInput, match="has no MTP layer"):
        load_model(Launch(model=str(bare), device="cpu", speculate="mtp"))
