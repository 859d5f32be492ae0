"""Tables of angles equal transformers' for every way of stretching them; rotation does what rotations do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.model import BandScaling, LinearScaling, Rope, YarnScaling
from windlass.runtime.kernels.ops.rotary import rotary_table, rotate

pytestmark = pytest.mark.cpu

CONTEXT = 32
SCALINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "linear": (LinearScaling(factor=2.5), {"rope_type": "linear", "factor": 2.5}),
    "bands": (
        BandScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_tokens=CONTEXT),
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
    "yarn": (YarnScaling(factor=4.0, original_context_tokens=CONTEXT), {"rope_type": "yarn", "factor": 4.0}),
    "yarn, fractions": (
        YarnScaling(factor=4.0, original_context_tokens=CONTEXT, truncate=False),
        {"rope_type": "yarn", "factor": 4.0, "truncate": False},
    ),
    "yarn, its own temperature": (
        YarnScaling(factor=4.0, original_context_tokens=CONTEXT, attention_factor=1.7, beta_fast=8.0, beta_slow=2.0),
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.7, "beta_fast": 8.0, "beta_slow": 2.0},
    ),
    "yarn, two temperatures": (
        YarnScaling(factor=40.0, original_context_tokens=CONTEXT, mscale=0.7, mscale_all_dim=1.3),
        {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.3},
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize(("theta", "dim"), [(10000.0, 24), (500000.0, 64), (150000.0, 10)])
def test_tables(name: str, theta: float, dim: int) -> None:
    transformers = pytest.importorskip("transformers")
    utilities = pytest.importorskip("transformers.modeling_rope_utils")
    scaling, theirs = SCALINGS[name]
    parameters = {"rope_theta": theta, "original_max_position_embeddings": CONTEXT, **theirs}
    config = transformers.LlamaConfig(head_dim=dim, max_position_embeddings=128, rope_parameters=parameters)
    frequencies, factor = utilities.ROPE_INIT_FUNCTIONS[theirs["rope_type"]](config)
    angles = torch.arange(100).float()[:, None] * frequencies
    table = rotary_table(Rope(theta=theta, rotary_dim=dim, scaling=scaling), 100)
    assert table.shape == (100, 2, dim // 2)
    torch.testing.assert_close(table, torch.stack((angles.cos(), angles.sin()), 1) * factor, atol=2e-5, rtol=0)


shapes = st.tuples(st.integers(1, 4), st.integers(1, 3), st.sampled_from([2, 6, 8]), st.integers(0, 3))


@given(shape=shapes, interleaved=st.booleans(), seed=st.integers(0, 99))
def test_rotation(shape: tuple[int, int, int, int], interleaved: bool, seed: int) -> None:
    """Lengths stay, the rest stays, position 0 stays, and products depend on the distance alone."""
    rows, heads, rotary_dim, rest = shape
    draw = torch.Generator().manual_seed(seed)
    table = rotary_table(Rope(theta=10000.0, rotary_dim=rotary_dim), 64).double()
    x, y = torch.randn(2, rows, heads, rotary_dim + rest, generator=draw, dtype=torch.float64)
    positions = torch.randint(0, 32, (rows,), generator=draw)
    turned = rotate(x, table, positions, interleaved)
    torch.testing.assert_close(turned[..., rotary_dim:], x[..., rotary_dim:])
    torch.testing.assert_close(turned.square().sum(-1), x.square().sum(-1), atol=1e-5, rtol=0)
    torch.testing.assert_close(rotate(x, table, positions * 0, interleaved), x)
    near = (turned * rotate(y, table, positions + 3, interleaved)).sum(-1)
    far = (rotate(x, table, positions + 20, interleaved) * rotate(y, table, positions + 23, interleaved)).sum(-1)
    torch.testing.assert_close(near, far, atol=1e-4, rtol=0)


def test_pairs_and_halves_differ_by_an_order() -> None:
    x, positions = torch.randn(5, 2, 8), torch.arange(5)
    table = rotary_table(Rope(theta=100.0, rotary_dim=8), 8)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    torch.testing.assert_close(rotate(x, table, positions, True)[..., order], rotate(x[..., order], table, positions, False))
