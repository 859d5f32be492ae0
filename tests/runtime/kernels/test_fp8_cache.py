"""Keys and values as e4m3 codes with a power of two each."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.runtime.kernels import fp8_cache
from windlass.runtime.kernels.step import BLOCK_TOKENS, KvCache, attention_cache, latent_cache

pytestmark = pytest.mark.cpu

SEEDS = st.integers(0, 2**31 - 1)


def vectors(seed: int, exponent: int, count: int = 20, dim: int = 24) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(count, dim, generator=draw) * 2.0**exponent


@given(seed=SEEDS, exponent=st.integers(-25, 35))
@settings(deadline=None)
def test_the_largest_fits_and_no_smaller_power_would_do(seed: int, exponent: int) -> None:
    x = vectors(seed, exponent)
    codes, scales = fp8_cache.quantize(x)
    largest = x.abs().amax(-1) / fp8_cache.power(scales)
    assert (largest <= fp8_cache.LARGEST).all() and (largest > fp8_cache.LARGEST / 2).all()
    assert codes.float().isfinite().all()


@given(seed=SEEDS, exponent=st.integers(-25, 35))
@settings(deadline=None)
def test_what_is_read_is_near_and_exact_in_bf16(seed: int, exponent: int) -> None:
    """Half a unit in the fourth bit, or of the smallest code."""
    x = vectors(seed, exponent)
    codes, scales = fp8_cache.quantize(x)
    read = fp8_cache.dequantize(codes, scales)
    assert ((read - x).abs() <= torch.maximum(x.abs() / 16, fp8_cache.power(scales)[:, None] * 2**-10)).all()
    assert torch.equal(read.bfloat16().float(), read)
    again, same = fp8_cache.quantize(read)
    assert torch.equal(fp8_cache.dequantize(again, same), read)


def test_powers_of_two_change_the_power_alone() -> None:
    x = vectors(0, 0)
    codes, scales = fp8_cache.quantize(x)
    for exponent in (-30, -1, 7, 30):
        more, others = fp8_cache.quantize(x * 2.0**exponent)
        assert torch.equal(more.view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(others.int(), scales.int() + exponent)


def test_edges() -> None:
    """Nothing, what just fits, what just does not, and magnitudes beyond all powers."""
    rows = [[0.0, 0.0], [448.0, 1.0], [448.5, 1.0], [2.0**60, 1.0], [2.0**-60, 0.0], [float("inf"), 1.0]]
    codes, scales = fp8_cache.quantize(torch.tensor(rows))
    assert scales.tolist() == [87, 127, 128, 167, 87, 167]
    assert codes.float()[:, 0].tolist() == [0.0, 448.0, 224.0, 448.0, 0.0, 448.0]
    spoilt, _ = fp8_cache.quantize(torch.tensor([float("nan"), 1.0]))
    assert spoilt.float()[0].isnan()


@pytest.mark.parametrize("latent", [False, True])
def test_a_cache_gives_back_what_it_was_given(latent: bool) -> None:
    heads, dim, tokens = (1, 24, 50) if latent else (3, 16, 50)
    cache = latent_cache(8, 16, 8, torch.float8_e4m3fn) if latent else attention_cache(8, heads, dim, torch.float8_e4m3fn)
    draw = torch.Generator().manual_seed(0)
    blocks = torch.randperm(8, generator=draw).int()
    places = torch.arange(tokens)
    slots = blocks[places // BLOCK_TOKENS] * BLOCK_TOKENS + places % BLOCK_TOKENS
    keys, values = (torch.randn(tokens, heads, dim, generator=draw) * torch.rand(tokens, heads, 1) * 100 for _ in range(2))
    cache.store(keys, None if latent else values, slots)
    wanted = [fp8_cache.dequantize(*fp8_cache.quantize(part)) for part in (keys, values)]
    found = cache.gather(blocks, tokens)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[0][..., :16] if latent else wanted[1])
    if not latent:
        part: KvCache = cache.of_heads(slice(1, 2))
        assert torch.equal(part.gather(blocks, tokens)[1], wanted[1][:, 1:2])
