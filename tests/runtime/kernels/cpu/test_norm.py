"""Norms and sums in C++ equal plain PyTorch's, whatever the width, and a row does not feel its neighbours."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from windlass.runtime.kernels.cpu import norm as native_norm
from windlass.runtime.kernels.ops.norm import reference

pytestmark = pytest.mark.cpu
SETTINGS = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

Run = Callable[..., tuple[Tensor, ...]]
WIDTHS = st.one_of(st.sampled_from((1, 3, 15, 16, 17, 63, 64, 65, 576, 2048)), st.integers(1, 300))


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@SETTINGS
@given(rows=st.integers(1, 9), width=WIDTHS, kind=st.sampled_from(("rms", "layer")), seed=st.integers(0, 99), bias=st.booleans())
@example(rows=1, width=576, kind="rms", seed=0, bias=False)
@example(rows=9, width=4096, kind="layer", seed=0, bias=True)
def test_norms(rows: int, width: int, kind: str, seed: int, bias: bool, run: Run) -> None:
    x, weight = drawn(seed, rows, width) * 3 + 1, drawn(seed + 1, width)
    shift = drawn(seed + 2, width) if bias and kind == "layer" else None
    (mine,) = run(lambda: native_norm.norm(x, weight, shift, 1e-5, kind), rows)
    torch.testing.assert_close(mine, reference(x, weight, shift, 1e-5, kind), atol=3e-6, rtol=3e-6)


def test_a_far_mean_leaves_the_rest_of_a_layer_norm_exact(run: Run) -> None:
    x, weight = drawn(0, 3, 1001) + 1000, torch.ones(1001)
    (mine,) = run(lambda: native_norm.norm(x, weight, None, 1e-5, "layer"), 3)
    exact = reference(x.double(), weight.double(), None, 1e-5, "layer").float()
    torch.testing.assert_close(mine, exact, atol=3e-4, rtol=1e-4)


def test_slices_of_wider_rows_and_rows_that_are_not_there(run: Run) -> None:
    """The latent half of a projection; and a buffer of which only two rows are in use."""
    wide, weight = drawn(0, 5, 100), drawn(1, 64)
    (mine,) = run(lambda: native_norm.norm(wide[:, :64], weight, None, 1e-6, "rms"), 2)
    torch.testing.assert_close(mine[:2], reference(wide[:2, :64], weight, None, 1e-6, "rms"), atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("kind", ("rms", "layer"))
def test_a_row_alone_gives_what_it_gives_among_others(kind: str, run: Run) -> None:
    x, weight = drawn(0, 40, 576), drawn(1, 576)
    (together,) = run(lambda: native_norm.norm(x, weight, None, 1e-5, kind), 40)
    alone = native_norm.norm(x[7:8], weight, None, 1e-5, kind)
    assert alone is not None and torch.equal(alone[0], together[7])


def test_zeros_stay_zeros(run: Run) -> None:
    zeros, weight = torch.zeros(2, 48), torch.ones(48)
    (mine,) = run(lambda: native_norm.norm(zeros, weight, None, 1e-6, "rms"), 2)
    assert torch.equal(mine, zeros)


@SETTINGS
@given(rows=st.integers(1, 20), width=WIDTHS, seed=st.integers(0, 99))
def test_sums(rows: int, width: int, seed: int, run: Run) -> None:
    x, y = drawn(seed, rows, width), drawn(seed + 1, rows, 2 * width)[:, :width]
    (mine,) = run(lambda: native_norm.add(x, y), rows)
    assert torch.equal(mine, x + y)


def test_what_is_not_covered_is_left_to_the_reference() -> None:
    x = drawn(0, 4, 8)
    assert native_norm.norm(x.double(), x[0].double(), None, 1e-5, "rms") is None
    assert native_norm.norm(x.t(), x[:, 0], None, 1e-5, "rms") is None
    assert native_norm.add(x, x[:1]) is None
