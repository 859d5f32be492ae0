"""Activations in C++ are within a millionth of exact ones."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from windlass.core.model import Activation
from windlass.runtime.kernels.cpu import activate as native_activate
from windlass.runtime.kernels.ops.activate import reference

pytestmark = pytest.mark.cpu
SETTINGS = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

Run = Callable[..., tuple[Tensor, ...]]


@SETTINGS
@given(
    rows=st.integers(1, 5),
    width=st.one_of(st.sampled_from((1, 15, 16, 17, 255, 256, 257, 1536)), st.integers(1, 600)),
    activation=st.sampled_from(list(Activation)),
    gated=st.booleans(),
    clamp=st.sampled_from((None, 7.0)),
    seed=st.integers(0, 99),
)
def test_they_equal_the_reference(
    rows: int, width: int, activation: Activation, gated: bool, clamp: float | None, seed: int, run: Run
) -> None:
    x = torch.randn(rows, 2 * width if gated else width, generator=torch.Generator().manual_seed(seed)) * 5
    (mine,) = run(lambda: native_activate.activate(x, activation, gated, clamp), rows)
    # In fp64, because PyTorch's own fp32 loses digits of GELU's tail.
    torch.testing.assert_close(mine, reference(x.double(), activation, gated, clamp).float(), atol=1e-7, rtol=4e-6)


@pytest.mark.parametrize("activation", list(Activation))
def test_every_size_of_number(activation: Activation, run: Run) -> None:
    """Relative to fp64, tails too: where a result is as small as 1e-30 it has as many digits as elsewhere."""
    x = torch.cat((torch.linspace(-100, 100, 40_001), torch.logspace(-30, 2, 999), -torch.logspace(-30, 2, 999)))[None]
    (mine,) = run(lambda: native_activate.activate(x, activation, False), 1)
    exact = reference(x.double(), activation, False)
    # As they are usually written, both GELUs lose the digits of their tails even in fp64.
    if activation is Activation.GELU:
        exact = x.double() * torch.special.erfc(-x.double() * 0.5**0.5) / 2
    if activation is Activation.GELU_TANH:
        exact = x.double() * torch.sigmoid((8 / math.pi) ** 0.5 * (x.double() + 0.044715 * x.double() ** 3))
    error = (mine.double() - exact).abs()
    # The argument of an exponential is rounded, which counts as often as it is large: up to x squared.
    assert (error <= 2e-36 + exact.abs() * 1e-6 * (1 + x.double().square() / 8)).all()


@pytest.mark.parametrize("activation", list(Activation))
def test_what_is_not_a_number_stays_so(activation: Activation, run: Run) -> None:
    x = torch.tensor([[float("nan")] * 16 + [1.0] * 16])
    (mine,) = run(lambda: native_activate.activate(x, activation, True, 7.0), 1)
    assert mine.isnan().all()
    turned = x.flip(1)
    (mine,) = run(lambda: native_activate.activate(turned, activation, True, 7.0), 1)
    assert mine.isnan().all()


def test_slices_of_wider_rows(run: Run) -> None:
    wide = torch.randn(3, 100, generator=torch.Generator().manual_seed(0))
    (mine,) = run(lambda: native_activate.activate(wide[:, :64], Activation.SILU, True), 3)
    torch.testing.assert_close(mine, reference(wide[:, :64], Activation.SILU, True), atol=1e-6, rtol=2e-6)


def test_other_types_are_left_to_the_reference() -> None:
    assert native_activate.activate(torch.zeros(1, 4, dtype=torch.bfloat16), Activation.SILU, True) is None
