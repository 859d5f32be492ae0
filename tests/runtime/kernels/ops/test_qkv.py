"""Queries, keys and values out of one product, and where they go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from windlass.core.model import Rope
from windlass.runtime.kernels.arguments import LatentArgs, QkvArgs
from windlass.runtime.kernels.ops.latent import reference as join_latent
from windlass.runtime.kernels.ops.qkv import reference, split_qkv
from windlass.runtime.kernels.ops.rotary import rotary_table, rotate
from windlass.runtime.kernels.step import BLOCK_TOKENS, attention_cache, latent_cache

pytestmark = pytest.mark.cpu

HEADS, KV_HEADS, DIM, ROWS = 6, 2, 8, 5
POSITIONS = torch.tensor([0, 7, 3, 20, 1], dtype=torch.int32)
SLOTS = torch.tensor([33, 15, 16, 2, 47], dtype=torch.int32)
TABLE = rotary_table(Rope(theta=100.0, rotary_dim=4), 32)


def product() -> Any:
    return torch.randn(ROWS, (HEADS + 2 * KV_HEADS) * DIM, generator=torch.Generator().manual_seed(0))


def plain(**changes: Any) -> Any:
    how = {"norms": None, "eps": 1e-6, "table": None, "interleaved": False, "positions": POSITIONS}
    return reference(QkvArgs(product(), HEADS, KV_HEADS, DIM, **(how | changes)))


def test_cut() -> None:
    qkv = product()
    for found, part, heads in zip(plain(), qkv.split((HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM), 1), (6, 2, 2), strict=True):
        assert torch.equal(found, part.reshape(ROWS, heads, DIM))


def test_norms_then_rotation_of_queries_and_keys() -> None:
    q, k, v = plain()
    norms = torch.rand(2, DIM) + 0.5
    found = plain(norms=tuple(norms), table=TABLE, interleaved=True)
    for part, weight, result in ((q, norms[0], found[0]), (k, norms[1], found[1])):
        normed = functional.rms_norm(part, (DIM,), weight, 1e-6)
        torch.testing.assert_close(result, rotate(normed, TABLE, POSITIONS, True))
    assert torch.equal(found[2], v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stored(dtype: torch.dtype) -> None:
    cache = attention_cache(3, KV_HEADS, DIM, dtype)
    _, k, v = plain(table=TABLE, cache=cache, slots=SLOTS)
    keys, values = cache.gather(torch.tensor([0, 1, 2]), 3 * BLOCK_TOKENS)
    assert torch.equal(keys[SLOTS.long()], k.to(dtype))
    assert torch.equal(values[SLOTS.long()], v.to(dtype))
    others = [slot for slot in range(3 * BLOCK_TOKENS) if slot not in SLOTS.tolist()]
    assert not keys[others].any()
    assert not values[others].any()


def test_blocks_in_another_order() -> None:
    cache = attention_cache(3, KV_HEADS, DIM, torch.float32)
    plain(cache=cache, slots=SLOTS)
    whole, _ = cache.gather(torch.tensor([0, 1, 2]), 48)
    turned, _ = cache.gather(torch.tensor([2, 0]), 20)
    assert torch.equal(turned, torch.cat((whole[32:], whole[:4])))


@pytest.mark.parametrize("interleaved", [True, False])
def test_choice(interleaved: bool) -> None:
    """Whoever computes, the numbers are these."""
    caches = [attention_cache(3, KV_HEADS, DIM, torch.float32) for _ in range(2)]
    how = {"norms": tuple(torch.rand(2, DIM)), "eps": 1e-5, "table": TABLE, "interleaved": interleaved, "positions": POSITIONS}
    expected = reference(QkvArgs(product(), HEADS, KV_HEADS, DIM, **how, cache=caches[0], slots=SLOTS))
    found = split_qkv(QkvArgs(product(), HEADS, KV_HEADS, DIM, **how, cache=caches[1], slots=SLOTS))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(caches[1].keys, caches[0].keys)
    torch.testing.assert_close(caches[1].values, caches[0].values)


def test_latent() -> None:
    """The latent is normed, what carries the position turns, and both lie side by side in the cache."""
    latent, rope = 6, 2 * TABLE.shape[-1]
    draw = torch.Generator().manual_seed(0)
    absorbed = torch.randn(ROWS, HEADS, latent, generator=draw)
    q, kv = torch.randn(ROWS, HEADS, 3 + rope, generator=draw), torch.randn(ROWS, latent + rope, generator=draw)
    weight, cache = torch.rand(latent) + 0.5, latent_cache(3, latent, rope, torch.float32)
    queries, keys = join_latent(
        LatentArgs(
            absorbed, q, kv, norm=weight, eps=1e-6, table=TABLE, interleaved=True, positions=POSITIONS, cache=cache, slots=SLOTS
        )
    )
    assert torch.equal(queries[..., :latent], absorbed)
    torch.testing.assert_close(queries[..., latent:], rotate(q[..., 3:], TABLE, POSITIONS, True))
    torch.testing.assert_close(keys[:, 0, :latent], functional.rms_norm(kv[:, :latent], (latent,), weight, 1e-6))
    torch.testing.assert_close(keys[..., latent:], rotate(kv[:, None, latent:], TABLE, POSITIONS, True))
    stored, values = cache.gather(torch.tensor([0, 1, 2]), 48)
    assert torch.equal(stored[SLOTS.long()], keys)
    assert torch.equal(values, stored[..., :latent])
