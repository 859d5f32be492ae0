"""Embeddings equal transformers' hidden states after the final norm, pooled in the same way."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from windlass.errors import BadInput, TooLong  # noqa: E402
from windlass.runtime.engine.execute.embed import embed  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore")]  # warnings are transformers'

TOKENS = [(7 * place + 3) % 50 for place in range(23)]


@pytest.mark.parametrize("family", ["llama", "qwen3", "glm4_moe"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_pooled_hidden_states(tiny: Any, family: str, pooling: str) -> None:
    pair = tiny.pair(next(name for name in tiny.names if name.startswith(family)))
    with torch.no_grad():
        hidden = pair.theirs(input_ids=torch.tensor([TOKENS]), output_hidden_states=True).hidden_states[-1][0]
    expected = hidden[-1] if pooling == "last" else hidden.mean(0)
    found = torch.tensor(embed(pair.ours, TOKENS, pooling, "cpu"))
    assert float((found - expected).abs().max()) < 1e-4
    assert float(expected.abs().max()) > 0.1, "not nothing"


def test_what_does_not_fit_is_refused(tiny: Any) -> None:
    pair = tiny.pair(next(name for name in tiny.names if name.startswith("llama")))
    with pytest.raises(TooLong):
        embed(pair.ours, [1] * (pair.ours.context_tokens + 1), "last", "cpu")
    with pytest.raises(BadInput, match="empty"):
        embed(pair.ours, [], "last", "cpu")
