"""Masks where NumPy cannot reach the logits. Needs no grammar library, so that it runs wherever there is a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from windlass.runtime.engine.sample.grammar import num_words  # noqa: E402
from windlass.runtime.engine.sample.masks import apply_masks  # noqa: E402


class Fixed:
    """Allows the same tokens always."""

    error = ""

    def __init__(self, vocab_size: int, tokens: list[int]) -> None:
        self.num_words, self._tokens = num_words(vocab_size), tokens

    def fill(self, row: Any) -> None:
        row[:] = 0
        for token in self._tokens:
            row[token // 32] |= np.uint32(1 << (token % 32))


def check(device: str, dtype: Any) -> None:
    width = 151_936 - 7
    logits = torch.randn(5, width, generator=torch.Generator().manual_seed(1)).to(device=device, dtype=dtype)
    before = logits.clone()
    allowed = [0, 7, 8, 31, 32, 63, 100_000, width - 1]
    guides: list[Any] = [None, Fixed(width, allowed), None, Fixed(width + 64, [5]), Fixed(100, [99])]
    apply_masks(logits, guides)
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    for row, kept in ((1, allowed), (3, [5]), (4, [99])):
        assert logits[row].isfinite().nonzero()[:, 0].tolist() == kept
        assert torch.equal(logits[row, kept], before[row, kept])


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_masks_without_a_gpu(dtype: str) -> None:
    check("cpu", getattr(torch, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_masks_on_a_gpu(dtype: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    check("cuda", getattr(torch, dtype))
