"""Sums that travel as int8: a real model's answer stays sensible, and its logits near, by a stated bound."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
for folder in (Path(__file__).parents[1], Path(__file__).parents[3] / "runtime" / "parallel"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from safetensors.torch import load_file  # noqa: E402
from small_sums_rank import write_answers  # noqa: E402
from starting import exit_codes  # noqa: E402
from talking import Way  # noqa: E402

from windlass.runtime.kernels.program import program  # noqa: E402
from windlass.runtime.weights.text.files import model_text  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.multi, pytest.mark.skipif(not program.available(), reason="nothing is compiled here")]

PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
EXACT = Way(host="127.0.0.1", machines=(0, 1, 2))


def test_an_answer_with_small_sums(smollm2: Path, tmp_path: Path) -> None:
    """62 sums a token, each rounded twice: logits are some 6 % off (root mean square, of their spread)."""
    tokenizer = model_text(smollm2).tokenizer
    given = (str(tmp_path), str(smollm2), tokenizer.encode(PROMPT), {"exact": EXACT, "int8": EXACT._replace(sync="int8")}, 8)
    assert exit_codes(3, write_answers, *given) == [0, 0, 0]
    found = load_file(tmp_path / "answers.safetensors")
    for name in ("exact", "int8"):
        assert "Paris" in tokenizer.decode(found[f"{name} tokens"].tolist()), name
    exact, small = found["exact logits"], found["int8 logits"]
    error = float((small - exact).std() / exact.std())
    assert 0.002 < error < 0.1
    chances, near = exact.softmax(-1), small.log_softmax(-1)
    assert float((chances * (exact.log_softmax(-1) - near)).sum(-1).mean()) < 0.05
