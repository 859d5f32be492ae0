"""Norms in plain PyTorch equal PyTorch's own, and who computes is chosen by what is asked for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from windlass.runtime.kernels.cpu import norm as native_norm
from windlass.runtime.kernels.ops.norm import add, norm, reference
from windlass.runtime.kernels.program import program

pytestmark = pytest.mark.cpu


@given(rows=st.integers(0, 5), width=st.integers(1, 40), seed=st.integers(0, 99), eps=st.sampled_from([1e-6, 1e-5, 1e-2]))
def test_norms(rows: int, width: int, seed: int, eps: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=draw, dtype=torch.float64) * 3 + 1
    weight, bias = torch.randn(2, width, generator=draw, dtype=torch.float64)
    torch.testing.assert_close(reference(x, weight, None, eps, "rms"), functional.rms_norm(x, (width,), weight, eps))
    torch.testing.assert_close(reference(x, weight, bias, eps, "layer"), functional.layer_norm(x, (width,), weight, bias, eps))


def test_half_precision_is_normed_in_full() -> None:
    """Squares of 300 do not fit fp16."""
    x = torch.full((2, 64), 300.0, dtype=torch.float16)
    found = reference(x, torch.ones(64), None, 1e-6, "rms")
    assert found.dtype == torch.float16
    torch.testing.assert_close(found, torch.ones_like(x))


def test_a_row_of_zeros_stays() -> None:
    assert torch.equal(reference(torch.zeros(1, 8), torch.ones(8), None, 1e-6, "rms"), torch.zeros(1, 8))


def test_who_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native where it may and can; plain PyTorch where a gradient must flow, where the type is another, where native says no."""
    if not program.available():
        pytest.skip("nothing is compiled here")
    native = torch.full((2, 8), 7.0)
    monkeypatch.setattr(native_norm, "norm", lambda x, *_: native if x.dtype == torch.float32 else None)
    x, weight = torch.randn(2, 8), torch.ones(8)
    assert norm(x, weight, None, 1e-6, "rms") is native
    assert norm(x, weight.requires_grad_(), None, 1e-6, "rms").requires_grad
    with torch.no_grad():
        assert norm(x, weight, None, 1e-6, "rms") is native
    assert norm(x.double(), weight.detach(), None, 1e-6, "rms").dtype == torch.float64
    monkeypatch.setenv("WINDLASS_NO_NATIVE", "1")
    assert norm(x, weight.detach(), None, 1e-6, "rms") is not native


def test_sum() -> None:
    x, y = torch.randn(2, 3, 5)
    assert torch.equal(add(x, y), x + y)
    assert add(x.requires_grad_(), y).requires_grad
