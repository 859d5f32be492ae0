"""No group is further off than its scheme says, whatever the weights."""

from __future__ import annotations

import pytest
import torch

from windlass.core.scheme import Stored
from windlass.runtime.quant import SMALLEST_ERROR, error_bound, quantize

pytestmark = pytest.mark.cpu

SHAPE = (64, 256)
STORED = {
    "int4-128": Stored(bits=4, group=128, scale_bytes=2),
    "int4-32": Stored(bits=4, group=32, scale_bytes=2),
    "int4-64-zeros": Stored(bits=4, group=64, scale_bytes=2, zero_points=True),
    "int8-128": Stored(bits=8, group=128, scale_bytes=2),
    "int8-rows": Stored(bits=8, scale_bytes=2),
    "fp8": Stored(bits=8, scale_bytes=4),
}


def rows() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    noise = torch.randn(SHAPE, generator=made)
    signs = noise.sign()
    largest = noise.abs().amax(1, keepdim=True)
    return {
        "gaussian": noise,
        "heavy": noise / torch.rand(SHAPE, generator=made).clamp(min=1e-4),
        "constant": noise[:, :1].expand(SHAPE).contiguous(),
        "zero": torch.zeros(SHAPE),
        "one large": torch.where(noise.abs() == largest, noise * 1e6, noise),
        "signs": signs,
        "halves": signs * torch.randint(0, 16, SHAPE, generator=made) * 0.5,
        "positive": noise.abs(),
        "subnormal": noise * 1e-40,
        "nearly subnormal": noise * 2.0**-124,
        "huge": noise / largest * 2.0**126,
    }


@pytest.mark.parametrize("weights", rows())
@pytest.mark.parametrize("scheme", STORED)
@pytest.mark.parametrize("search", ["fast", "full"])
def test_errors_stay_within_the_bound(scheme: str, weights: str, search: str) -> None:
    stored, weight = STORED[scheme], rows()[weights]
    unpacked = quantize(weight, stored, search).dequantize()
    assert torch.isfinite(unpacked).all()
    groups = (weight.double().view(-1, stored.group or SHAPE[1]), unpacked.double().view(-1, stored.group or SHAPE[1]))
    rms = (groups[0] - groups[1]).square().mean(1).sqrt()
    assert (rms <= error_bound(stored) * groups[0].abs().amax(1) + SMALLEST_ERROR).all()


@pytest.mark.parametrize("scheme", STORED)
def test_the_bound_is_not_idle(scheme: str) -> None:
    """Weights that sit halfway between codes come close to it."""
    stored = STORED[scheme]
    steps = 127.0 if stored.bits == 8 else 7.0
    halfway = torch.full(SHAPE, (steps - 0.5) / steps)
    halfway[:, :: stored.group or SHAPE[1]] = 1.0
    if scheme == "fp8":
        halfway = torch.where(halfway == 1.0, halfway, torch.tensor(432 / 448))
    if stored.bits == 4:
        halfway = torch.rand(SHAPE, generator=torch.Generator().manual_seed(0)) * 2 - 1  # a search finds a way around the worst
    error = (quantize(halfway, stored).dequantize() - halfway).square().mean().sqrt()
    assert error > (0.4 if stored.bits == 4 else 0.9) * error_bound(stored)
