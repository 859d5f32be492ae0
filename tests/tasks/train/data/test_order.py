"""Arithmetic of order: permutations are permutations, and shares are kept, wherever one looks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.tasks.train.data.order import Interleaving, permute, quotas_of

pytestmark = pytest.mark.cpu


@given(size=st.integers(1, 3000), secret=st.integers(0, 2**64 - 1))
def test_every_place_is_taken_once(size: int, secret: int) -> None:
    assert sorted(permute(np.arange(size, dtype=np.uint64), size, secret).tolist()) == list(range(size))


def test_orders_are_mixed() -> None:
    """Neighbours are as far apart as chance would have them, and two secrets agree on one place in a size."""
    size = 10_000
    one, other = (permute(np.arange(size, dtype=np.uint64), size, secret).astype(np.int64) for secret in (1, 2))
    assert abs(np.abs(np.diff(one)).mean() / size - 1 / 3) < 0.02
    assert (one == other).sum() < 10
    assert abs(np.corrcoef(np.arange(size), one)[0, 1]) < 0.05


def test_huge_sets_are_permuted_one_by_one() -> None:
    size = 3 * 10**12
    places = np.array([0, 1, 2, size - 1], dtype=np.uint64)
    found = permute(places, size, 7)
    assert len(set(found.tolist())) == 4 and found.max() < size
    assert permute(places[2:3], size, 7)[0] == found[2]


@given(quotas=st.lists(st.integers(1, 60), min_size=1, max_size=5), first=st.integers(0, 500), count=st.integers(1, 300))
def test_draws_from_anywhere_are_those_in_order(quotas: list[int], first: int, count: int) -> None:
    interleaving = Interleaving(quotas)
    seen = [0] * len(quotas)
    expected = []
    sources, numbers = interleaving.draws(0, first + count)
    for source, number in zip(sources.tolist(), numbers.tolist(), strict=True):
        assert number == seen[source]  # draws of a source are numbered without gaps
        seen[source] += 1
        expected.append((source, number))
    found = [values.tolist() for values in interleaving.draws(first, count)]
    assert list(zip(*found, strict=True)) == expected[first:]


@given(quotas=st.lists(st.integers(1, 200), min_size=2, max_size=4), period=st.integers(0, 3))
def test_a_period_has_every_quota_and_so_nearly_has_every_stretch(quotas: list[int], period: int) -> None:
    interleaving = Interleaving(quotas)
    total = sum(quotas)
    sources, _ = interleaving.draws(period * total, total)
    assert np.bincount(sources, minlength=len(quotas)).tolist() == quotas
    ahead = (
        np.cumsum(sources[:, None] == np.arange(len(quotas)), axis=0)
        - np.arange(1, total + 1)[:, None] * np.array(quotas) / total
    )
    assert np.abs(ahead).max() < 5


def test_far_out_draws_are_exact() -> None:
    interleaving = Interleaving([10**11, 3 * 10**11 + 7])
    first = 5 * 10**11
    sources, numbers = interleaving.draws(first, 4)
    assert (numbers >= 0).all()
    epoch, _ = divmod(first, interleaving.period)
    assert epoch == 1
    for source, quota in enumerate(interleaving.quotas):
        counted = first * quota / interleaving.period
        assert all(abs(number - counted) < 100 for number in numbers[sources == source].tolist())


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(1e-3, 1e3)), min_size=1, max_size=6))
def test_quotas_follow_the_weights(given: list[tuple[int, float]]) -> None:
    sizes, weights = [size for size, _ in given], [weight for _, weight in given]
    quotas = quotas_of(sizes, weights)
    assert min(quotas) >= 1
    assert sum(sizes) <= sum(quotas) <= sum(sizes) + len(sizes)
    for quota, weight in zip(quotas, weights, strict=True):
        assert abs(quota - sum(sizes) * weight / sum(weights)) <= len(sizes)
    assert quotas_of(sizes, None) == sizes
