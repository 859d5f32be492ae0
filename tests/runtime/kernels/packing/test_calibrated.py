"""Rounding that keeps products: against plain rounding, and against its definition."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.cpu

torch = pytest.importorskip("torch")

from windlass.core.scheme import Stored  # noqa: E402
from windlass.runtime.kernels.packing.calibrated import inputs_from  # noqa: E402
from windlass.runtime.quant import quantize_rows  # noqa: E402


def correlated(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    """Inputs as layers see them: few directions carry most, and some inputs are much larger than others."""
    chance = torch.Generator().manual_seed(seed)
    few = torch.randn(rows, width // 8, generator=chance) @ torch.randn(width // 8, width, generator=chance)
    sizes = torch.exp(torch.randn(width, generator=chance))
    return (few + 0.3 * torch.randn(rows, width, generator=chance)) * sizes


def stored(group: int, zero_points: bool) -> Stored:
    return Stored(bits=4, group=group, scale_bytes=2, zero_points=zero_points)


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("group", [32, 64])
def test_products_change_less_than_by_plain_rounding(group: int, zero_points: bool) -> None:
    x, unseen = correlated(2500, 128).split((2000, 500))
    weight = torch.randn(48, 128, generator=torch.Generator().manual_seed(1)) * 0.05
    how = stored(group, zero_points)
    plain, _ = quantize_rows(weight, how)
    made, statistics = quantize_rows(weight, how, inputs=inputs_from(x.T @ x))
    exact = unseen @ weight.T
    errors = [float((unseen @ packed.dequantize().T - exact).square().mean().sqrt()) for packed in (plain, made)]
    assert errors[1] < 0.6 * errors[0]
    assert statistics.num_unusable == 0
    found = (made.dequantize() - weight).square().sum()
    assert statistics.squared_error == pytest.approx(float(found), rel=1e-3)


@pytest.mark.parametrize("zero_points", [False, True])
def test_unrelated_inputs_are_rounded_for_themselves(zero_points: bool) -> None:
    """Nothing to make good with: the same codes as without, in every group."""
    weight = torch.randn(16, 96, generator=torch.Generator().manual_seed(2))
    plain, _ = quantize_rows(weight, stored(32, zero_points))
    made, _ = quantize_rows(weight, stored(32, zero_points), inputs=inputs_from(torch.eye(96) * 3.0))
    assert torch.equal(made.dequantize(), plain.dequantize())


def test_rows_do_not_know_each_other() -> None:
    x = correlated(300, 64)
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(3))
    known = inputs_from(x.T @ x)
    whole, _ = quantize_rows(weight, stored(32, False), inputs=known)
    half, _ = quantize_rows(weight[16:], stored(32, False), inputs=known)
    assert torch.equal(whole.weight_packed[16:], half.weight_packed)


def test_inputs_that_never_came() -> None:
    x = correlated(300, 64)
    x[:, 10:20] = 0
    known = inputs_from(x.T @ x)
    assert torch.isfinite(known.factor).all()
    assert torch.isfinite(inputs_from(torch.zeros(32, 32)).factor).all()
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(4))
    made, _ = quantize_rows(weight, stored(32, False), inputs=known)
    assert torch.isfinite(made.dequantize()).all()


def test_damaged_weights_are_counted() -> None:
    weight = torch.randn(8, 32)
    weight[3, 5] = float("nan")
    _, statistics = quantize_rows(weight, stored(32, False), inputs=inputs_from(torch.eye(32)))
    assert statistics.num_unusable >= 1
