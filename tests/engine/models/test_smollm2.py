"""SmolLM2-135M-Instruct from its GGUF through the engine: in fp32 the text transformers writes, packed the same within a bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.cpu

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from windlass.core.launch import Launch  # noqa: E402

from windlass.core.request import GREEDY  # noqa: E402
from windlass.engine.load import load_model  # noqa: E402
from windlass.engine.protocol import Submit  # noqa: E402
from windlass.weights.text.files import model_text  # noqa: E402

NEW_TOKENS = 100
PROMPTS = (
    "What is the capital of France?", "Explain gravity to a child.", "Write a haiku about the sea.", "def fibonacci(n):",
    "The quick brown fox", "List three uses of copper.", "Why is the sky blue?", "Translate 'good morning' into Spanish.",
    "Once upon a time, in a village by the river,", "What is 12 times 7?", "Name the planets.", "How do I boil an egg?",
    "The most important invention of the twentieth century was", "Give me a synonym of happy.", "import numpy as np\n",
    "What does a compiler do?", "Who wrote Hamlet?", "Describe a winter morning.", "Ein Hund und eine Katze", "1, 1, 2, 3, 5, 8,",
)  # fmt: skip


def generated(launch: Launch, prompts: list[list[int]]) -> list[list[int]]:
    """All at once, as a server would run them."""
    engine, _ = load_model(launch)
    found: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        engine.submit(Submit(number, prompt, GREEDY, NEW_TOKENS))
    while engine.has_work:
        for output in engine.step():
            found.setdefault(output.id, []).extend(output.token_ids)
    engine.close()
    return [found[number] for number in range(len(prompts))]


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> list[list[int]]:
    tokenizer = model_text(smollm2).tokenizer
    return [tokenizer.encode(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def theirs(smollm2: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(smollm2.parent), gguf_file=smollm2.name, dtype=torch.float32).eval()


@torch.inference_mode()
def logits_after(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """What transformers expects at every place of the answer, given all before it."""
    return model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].float()


def test_greedy_text_is_that_of_transformers(smollm2: Path, prompts: list[list[int]], theirs: Any) -> None:
    """Each token is the one it finds most likely after the same tokens, so by induction the whole text is."""
    launch = Launch(model=str(smollm2), device="cpu", kv="fp32", exact=True, context_tokens=256)
    for prompt, answer in zip(prompts, generated(launch, prompts), strict=True):
        assert len(answer) == NEW_TOKENS
        expected = logits_after(theirs, prompt, answer)
        best, chosen = expected.amax(-1), expected.gather(1, torch.tensor(answer)[:, None])[:, 0]
        # Equal but for ties within fp32's rounding of two different sums.
        assert (best - chosen).max() < 2e-4
        assert (expected.argmax(-1) == torch.tensor(answer)).sum() >= NEW_TOKENS - 1


def test_packed_tokens_are_equal_where_the_margin_is_clear(smollm2: Path, prompts: list[list[int]], theirs: Any) -> None:
    """Activations are rounded to 8 bits in blocks of 32, which on this model moves logits by about a tenth of their spread."""
    packed = generated(Launch(model=str(smollm2), device="cpu", context_tokens=256), prompts)
    agreed = total = 0
    for prompt, answer in zip(prompts, packed, strict=True):
        expected = logits_after(theirs, prompt, answer)
        top = expected.topk(2).values
        clear = top[:, 0] - top[:, 1] > MARGIN
        same = expected.argmax(-1) == torch.tensor(answer)
        assert same[clear].all()
        agreed, total = agreed + int(same.sum()), total + len(answer)
    assert agreed / total > 0.85


MARGIN = 3.0
"""In logits. Their spread is about 5."""
