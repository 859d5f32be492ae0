"""SmolLM2-135M-Instruct from its GGUF through the engine: in fp32 the text transformers writes, packed the same within a bound.

What transformers writes is kept in tests/data/smollm2_golden.json; the script beside it makes it, and `make long` runs transformers anew.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.cpu

torch = pytest.importorskip("torch")

from windlass.core.launch import Launch  # noqa: E402
from windlass.core.request import GREEDY  # noqa: E402
from windlass.runtime.engine.engine import Engine  # noqa: E402
from windlass.runtime.engine.load import load_model  # noqa: E402
from windlass.runtime.engine.protocol import SequenceOutput, Submit  # noqa: E402
from windlass.runtime.weights.text.files import model_text  # noqa: E402

SCRIPT = Path(__file__).parents[3] / "data" / "make_smollm2_golden.py"
MARGIN = 3.0
"""In logits. Their spread is about 5."""


def script() -> Any:
    found = importlib.util.spec_from_file_location("make_smollm2_golden", SCRIPT)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def golden(smollm2: Path) -> list[dict[str, Any]]:
    making = script()
    kept = json.loads(making.GOLDEN.read_text())
    if making.digest(smollm2) != kept["sha256"]:
        pytest.skip(f"{making.GOLDEN.name} was made of another {kept['file']}; run tests/data/{SCRIPT.name} {smollm2}")
    assert tuple(one["text"] for one in kept["answers"]) == making.PROMPTS, f"run tests/data/{SCRIPT.name}"
    return kept["answers"]


def answered(engine: Engine, submits: list[Submit]) -> list[list[SequenceOutput]]:
    """All at once, as a server would run them."""
    found: dict[int, list[SequenceOutput]] = {}
    for submit in submits:
        engine.submit(submit)
    while engine.has_work:
        for output in engine.step():
            found.setdefault(output.id, []).append(output)
    return [found[submit.id] for submit in submits]


def tokens_of(outputs: list[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def test_text_becomes_the_tokens_it_was_made_of(smollm2: Path, golden: list[dict[str, Any]]) -> None:
    tokenizer = model_text(smollm2).tokenizer
    assert [tokenizer.encode(one["text"]) for one in golden] == [one["prompt"] for one in golden]


def test_greedy_text_is_that_of_transformers(smollm2: Path, golden: list[dict[str, Any]]) -> None:
    """Sixteen tokens of each, one by one; of four to their end, each token given those before it, so that by induction the whole text is.

    Where two are within fp32's rounding of two different sums, an answer has ended before.
    """
    engine, _ = load_model(Launch(model=str(smollm2), device="cpu", kv="fp32", exact=True, context_tokens=128))
    submits = [Submit(number, one["prompt"], GREEDY, 16) for number, one in enumerate(golden)]
    assert [tokens_of(outputs) for outputs in answered(engine, submits)] == [one["answer"][:16] for one in golden]
    whole = golden[:4]
    assert [best for best, _ in scored(engine, [(one["prompt"], one["answer"]) for one in whole])] == [
        one["answer"] for one in whole
    ]
    engine.close()


def test_packed_tokens_are_equal_where_the_margin_is_clear(smollm2: Path, golden: list[dict[str, Any]]) -> None:
    """Activations are rounded to 8 bits in blocks of 32, which on this model moves logits by about a tenth of their spread."""
    engine, _ = load_model(Launch(model=str(smollm2), device="cpu", context_tokens=128))
    agreed = total = 0
    texts = [(one["prompt"], one["answer"][:32]) for one in golden]
    for one, (_, answer), (best, _) in zip(golden, texts, scored(engine, texts), strict=True):
        same = [mine == theirs for mine, theirs in zip(best, answer, strict=True)]
        assert all(is_same for is_same, margin in zip(same, one["margins"], strict=False) if margin > MARGIN)
        agreed, total = agreed + sum(same), total + len(same)
    assert agreed / total > 0.85
    # Token by token it writes what it found most likely when it saw the whole: by the above, what transformers does.
    some = golden[:8]
    submits = [Submit(number, one["prompt"], GREEDY, 16) for number, one in enumerate(some)]
    own = [(one["prompt"], tokens_of(outputs)) for one, outputs in zip(some, answered(engine, submits), strict=True)]
    assert max(max(behind) for _, behind in scored(engine, own)) < 0.05
    engine.close()


def scored(engine: Engine, texts: list[tuple[list[int], list[int]]]) -> list[tuple[list[int], list[float]]]:
    """For every place of an answer, given all before it: the most likely token, and how much less likely the answer's own is."""
    submits = [
        Submit(
            number, [*prompt, *answer], GREEDY, 0, prompt_logprobs=1, prompt_logprobs_start=len(prompt), cache_salt=f"{number}"
        )
        for number, (prompt, answer) in enumerate(texts)
    ]
    found = []
    for (prompt, _), outputs in zip(texts, answered(engine, submits), strict=True):
        entries = (outputs[-1].prompt_logprobs or [])[len(prompt) :]
        found.append(([entry.top[0].token_id for entry in entries], [entry.top[0].logprob - entry.logprob for entry in entries]))
    return found


@pytest.mark.long
def test_transformers_still_writes_it(smollm2: Path, golden: list[dict[str, Any]]) -> None:
    """Each token is the one it finds most likely after the same tokens, so by induction the whole text is."""
    theirs = script().load(smollm2)
    for one in golden:
        with torch.inference_mode():
            logits = theirs(torch.tensor([[*one["prompt"], *one["answer"]]])).logits[0, len(one["prompt"]) - 1 : -1].float()
        top = logits.topk(2)
        assert top.indices[:, 0].tolist() == one["answer"]
        assert (top.values[:, 0] - top.values[:, 1]).tolist() == pytest.approx(one["margins"], abs=2e-3)
