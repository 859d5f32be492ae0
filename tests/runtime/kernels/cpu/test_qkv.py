"""Norm, rotation and storing of queries, keys and values in C++ equal plain PyTorch's, down to the bits in a bf16 cache."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from windlass.runtime.kernels.arguments import LatentArgs, QkvArgs
from windlass.runtime.kernels.cpu import qkv as native_qkv
from windlass.runtime.kernels.ops import latent, qkv
from windlass.runtime.kernels.program import program
from windlass.runtime.kernels.step import BLOCK_TOKENS, KvCache, attention_cache, latent_cache

pytestmark = pytest.mark.cpu
SETTINGS = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
NUM_BLOCKS = 5

Made = tuple[Tensor, ...] | None


def draw(seed: int) -> Callable[..., Tensor]:
    made = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=made)


def places(rows: int, seed: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {
        "positions": torch.randint(0, 50, (rows,), generator=made).int(),
        "slots": torch.randperm(NUM_BLOCKS * BLOCK_TOKENS, generator=made)[:rows].int(),
    }


def both_ways(
    operation: Callable[[KvCache | None], Made], fresh: Callable[[], KvCache | None], rows: int
) -> list[tuple[Made, KvCache | None]]:
    """At once and replayed, each with a cache of its own."""
    caches = fresh(), fresh()
    at_once = operation(caches[0])
    with program.record(torch.tensor([rows], dtype=torch.int32)) as recorded:
        later = operation(caches[1])
    recorded.run()
    return [(at_once, caches[0]), (later, caches[1])]


def assert_same_cache(mine: KvCache | None, wanted: KvCache | None) -> None:
    if mine is None or wanted is None:
        assert mine is wanted
        return
    if mine.scales is not None and wanted.scales is not None:
        for one, other in zip(mine.parts, wanted.parts, strict=True):
            assert (one.view(torch.uint8) != other.view(torch.uint8)).float().mean() < 0.01
        return
    for one, other in ((mine.keys, wanted.keys), (mine.values, wanted.values)):
        if one is None or other is None:
            assert one is other
        else:
            # What was rounded to bf16 may have been on the edge between two numbers.
            torch.testing.assert_close(one.float(), other.float(), atol=1e-6, rtol=2**-7 if one.dtype == torch.bfloat16 else 2e-6)
            assert (one != other).float().mean() < 0.01 or one.dtype == torch.float32


@SETTINGS
@given(
    rows=st.integers(1, 40),
    heads=st.sampled_from((1, 3, 9)),
    kv_heads=st.sampled_from((1, 3)),
    half=st.sampled_from((0, 1, 4, 16, 24, 32)),
    rest=st.sampled_from((0, 8, 33)),
    interleaved=st.booleans(),
    normed=st.booleans(),
    dtype=st.sampled_from((None, torch.float32, torch.bfloat16, torch.float8_e4m3fn)),
    seed=st.integers(0, 99),
)
@example(rows=33, heads=4, kv_heads=4, half=16, rest=64, interleaved=True, normed=True, dtype=torch.float8_e4m3fn, seed=0)
@example(rows=1, heads=9, kv_heads=3, half=32, rest=0, interleaved=False, normed=False, dtype=torch.bfloat16, seed=0)
@example(rows=33, heads=4, kv_heads=4, half=16, rest=64, interleaved=True, normed=True, dtype=torch.bfloat16, seed=0)
@pytest.mark.usefixtures("kernel_mode")
def test_splitting(
    rows: int,
    heads: int,
    kv_heads: int,
    half: int,
    rest: int,
    interleaved: bool,
    normed: bool,
    dtype: torch.dtype | None,
    seed: int,
) -> None:
    numbers, dim = draw(seed), 2 * half + rest or 16
    x, table = numbers(rows, (heads + 2 * kv_heads) * dim), numbers(50, 2, half) if half else None
    norms = (numbers(dim), numbers(dim)) if normed else None
    how = {"norms": norms, "eps": 1e-5, "table": table, "interleaved": interleaved, **places(rows, seed)}

    def fresh() -> KvCache | None:
        return None if dtype is None else attention_cache(NUM_BLOCKS, kv_heads, dim, dtype)

    wanted_cache = fresh()
    wanted = qkv.reference(QkvArgs(x.clone(), heads, kv_heads, dim, cache=wanted_cache, **how))
    copies = iter((x.clone(), x.clone()))
    for mine, cache in both_ways(
        lambda cache: native_qkv.split_qkv(QkvArgs(next(copies), heads, kv_heads, dim, cache=cache, **how)), fresh, rows
    ):
        assert mine is not None
        for one, other in zip(mine, wanted, strict=True):
            torch.testing.assert_close(one, other, atol=3e-6, rtol=3e-6)
        assert_same_cache(cache, wanted_cache)


@pytest.mark.usefixtures("kernel_mode")
def test_a_bf16_cache_holds_the_nearest_even_number() -> None:
    """No rotation, no norm: what lies in the cache is PyTorch's own rounding, infinities and all."""
    numbers = draw(0)(16, 3 * 64) * 10 ** draw(1)(16, 3 * 64)
    edges = torch.tensor([float("inf"), float("-inf"), 0.0, -0.0, 3.4e38, 1.00390625, 1.01171875, 1e-39])
    numbers[0, 64:72], numbers[0, 128:136] = edges, edges
    how = {"norms": None, "eps": 1e-5, "table": None, "interleaved": False, **places(16, 0)}
    mine, wanted = attention_cache(NUM_BLOCKS, 1, 64, torch.bfloat16), attention_cache(NUM_BLOCKS, 1, 64, torch.bfloat16)
    assert native_qkv.split_qkv(QkvArgs(numbers.clone(), 1, 1, 64, cache=mine, **how)) is not None
    qkv.reference(QkvArgs(numbers, 1, 1, 64, cache=wanted, **how))
    assert mine.values is not None and wanted.values is not None
    assert torch.equal(mine.keys.view(torch.int16), wanted.keys.view(torch.int16))
    assert torch.equal(mine.values.view(torch.int16), wanted.values.view(torch.int16))


@pytest.mark.usefixtures("kernel_mode")
def test_an_fp8_cache_holds_what_the_reference_codes() -> None:
    """Bit for bit: magnitudes of all sizes, ties, subnormals, nothing at all, infinities and what is not a number."""
    numbers = draw(0)(40, 3 * 64) * torch.exp2(
        torch.randint(-60, 60, (40, 1), generator=torch.Generator().manual_seed(0)).float()
    )
    ties = torch.arange(0, 448, 7) / 16
    numbers[0, 64:], numbers[1, 64:] = torch.cat((ties, -ties)), 0.0
    numbers[2, 64:72] = torch.tensor([float("inf"), float("-inf"), 0.0, -0.0, 3.4e38, 1.5, 1e-39, 1.0])
    numbers[3, 130], numbers[4, 70], numbers[5, 64:] = float("nan"), 448.0, 2.0**-9
    how = {"norms": None, "eps": 1e-5, "table": None, "interleaved": False, **places(40, 0)}
    mine, wanted = (attention_cache(NUM_BLOCKS, 1, 64, torch.float8_e4m3fn) for _ in range(2))
    assert native_qkv.split_qkv(QkvArgs(numbers.clone(), 1, 1, 64, cache=mine, **how)) is not None
    qkv.reference(QkvArgs(numbers, 1, 1, 64, cache=wanted, **how))
    for one, other in zip(mine.parts, wanted.parts, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.usefixtures("instruction_set")
def test_what_is_not_a_number_stays_so() -> None:
    """Whichever of its many forms it has: rounding must not carry it over into another number."""
    numbers = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, 0x7FC00000], dtype=torch.int32).view(torch.float32).repeat(24)[None]
    cache = attention_cache(NUM_BLOCKS, 1, 32, torch.bfloat16)
    where = {"positions": torch.zeros(1, dtype=torch.int32), "slots": torch.zeros(1, dtype=torch.int32)}
    native_qkv.split_qkv(QkvArgs(numbers, 1, 1, 32, norms=None, eps=1e-5, table=None, interleaved=False, cache=cache, **where))
    assert cache.values is not None
    assert cache.keys[0, 0, :, 0].isnan().all() and cache.values[0, 0, 0].isnan().all()


@SETTINGS
@given(
    rows=st.integers(1, 20),
    heads=st.sampled_from((1, 2, 5)),
    latent_dim=st.sampled_from((1, 16, 24, 64)),
    half=st.sampled_from((1, 4, 16, 32)),
    nope=st.sampled_from((0, 8, 24)),
    interleaved=st.booleans(),
    dtype=st.sampled_from((None, torch.float32, torch.bfloat16)),
    seed=st.integers(0, 99),
)
@pytest.mark.usefixtures("kernel_mode")
def test_joining_latents(
    rows: int, heads: int, latent_dim: int, half: int, nope: int, interleaved: bool, dtype: torch.dtype | None, seed: int
) -> None:
    numbers = draw(seed)
    absorbed, q = numbers(rows, heads, latent_dim), numbers(rows, heads, nope + 2 * half)
    kv, norm, table = numbers(rows, latent_dim + 2 * half), numbers(latent_dim), numbers(50, 2, half)
    how = {"norm": norm, "eps": 1e-6, "table": table, "interleaved": interleaved, **places(rows, seed)}

    def fresh() -> KvCache | None:
        return None if dtype is None else latent_cache(NUM_BLOCKS, latent_dim, 2 * half, dtype)

    wanted_cache = fresh()
    wanted = latent.reference(LatentArgs(absorbed, q, kv, cache=wanted_cache, **how))
    for mine, cache in both_ways(
        lambda cache: native_qkv.join_latent(LatentArgs(absorbed, q, kv, cache=cache, **how)), fresh, rows
    ):
        assert mine is not None
        for one, other in zip(mine, wanted, strict=True):
            torch.testing.assert_close(one, other, atol=3e-6, rtol=3e-6)
        assert_same_cache(cache, wanted_cache)


def test_rows_that_are_not_there_are_not_stored() -> None:
    x, cache = draw(0)(9, 3 * 16), attention_cache(NUM_BLOCKS, 1, 16, torch.float32)
    how = {"norms": None, "eps": 1e-5, "table": None, "interleaved": False, **places(9, 0)}
    with program.record(torch.tensor([2], dtype=torch.int32)) as recorded:
        native_qkv.split_qkv(QkvArgs(x, 1, 1, 16, cache=cache, **how))
    assert (cache.keys == 0).all(), "nothing runs while it is recorded"
    recorded.run()
    stored = cache.keys.permute(0, 3, 1, 2).reshape(-1, 16)
    assert torch.equal(stored[how["slots"][:2].long()], x[:2, 16:32])
    assert (stored != 0).any(1).sum() == 2
