"""The integer products of many.cu, lane by lane on the CPU: what its lanes load, exchange and turn into bytes, put into a model of the tensor
core's fragments (m16n8k32 as PTX documents it), gives the product with the weights that the tiles hold."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from windlass.runtime.kernels.cuda import layout

pytestmark = pytest.mark.cpu

Words = npt.NDArray[np.uint32]
LANE = np.arange(32)
G, T = LANE // 4, LANE % 4


def shuffle_xor(v: Words, mask: int) -> Words:
    return v[LANE ^ mask]


def exchange4(v: Words) -> Words:
    """[32 lanes, 4 words], as `exchange4` of many.cu."""
    v = v.copy()
    odd, high = (LANE & 1).astype(bool), (LANE & 2).astype(bool)
    p, q = shuffle_xor(np.where(odd, v[:, 0], v[:, 1]), 1), shuffle_xor(np.where(odd, v[:, 2], v[:, 3]), 1)
    v[:, 0], v[:, 2] = np.where(odd, p, v[:, 0]), np.where(odd, q, v[:, 2])
    v[:, 1], v[:, 3] = np.where(odd, v[:, 1], p), np.where(odd, v[:, 3], q)
    p, q = shuffle_xor(np.where(high, v[:, 0], v[:, 2]), 2), shuffle_xor(np.where(high, v[:, 1], v[:, 3]), 2)
    v[:, 0], v[:, 1] = np.where(high, p, v[:, 0]), np.where(high, q, v[:, 1])
    v[:, 2], v[:, 3] = np.where(high, v[:, 2], p), np.where(high, v[:, 3], q)
    return v


def byte_perm(a: Words, b: Words, selector: int) -> Words:
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    picked = [(both >> np.uint64(8 * (selector >> 4 * i & 7)) & np.uint64(255)) << np.uint64(8 * i) for i in range(4)]
    return np.bitwise_or.reduce(picked).astype(np.uint32)


def bf16(bits: Words) -> npt.NDArray[np.float32]:
    return (bits << np.uint32(16)).view(np.float32)


def to_fixed(a: Words, b: Words) -> tuple[Words, Words, npt.NDArray[np.float64]]:
    """[32, 8] pairs each: high and low bytes [32, 8] and the step of each lane's column."""
    halves = np.concatenate([w & np.uint32(0x7FFF) for w in (a, a >> np.uint32(16), b, b >> np.uint32(16))], axis=1)
    most = halves.max(axis=1)
    most = np.maximum(most, shuffle_xor(most, 1))
    most = np.maximum(most, shuffle_xor(most, 2))
    largest = bf16(most.astype(np.uint32)).astype(np.float64)
    inverse = np.where(largest > 1e-30, np.float32(32512) / np.maximum(largest, 1e-30), 0).astype(np.float32)
    top = np.uint32(0xFFFF0000)
    n = [
        (v.astype(np.float64) * inverse[:, None] + 12582912.0).astype(np.float32).view(np.uint32)
        for v in (bf16(a), bf16(b), (a & top).view(np.float32), (b & top).view(np.float32))
    ]
    m = [w + np.uint32(128) for w in n]
    low = byte_perm(byte_perm(n[0], n[1], 0x0040), byte_perm(n[2], n[3], 0x0040), 0x5410)
    high = byte_perm(byte_perm(m[0], m[1], 0x0051), byte_perm(m[2], m[3], 0x0051), 0x5410)
    return high, low, largest / (32512 * 16)


def load_x(x: torch.Tensor) -> tuple[Words, Words, npt.NDArray[np.float64]]:
    """x bf16 [8, 128] as the lanes read and exchange it."""
    words = x.contiguous().view(torch.int16).numpy().view(np.uint32).reshape(8, 64)
    parts = []
    for offset in (0, 8):
        halves = [
            exchange4(np.stack([words[g, (half * 64 + t * 16 + offset) // 2 :][:4] for g, t in zip(G, T, strict=True)]))
            for half in range(2)
        ]
        parts.append(np.concatenate(halves, axis=1))
    return to_fixed(parts[0], parts[1])


def signed_bytes(words: Words) -> npt.NDArray[np.int64]:
    """[32] words to [32, 4]."""
    return np.ascontiguousarray(words).view(np.int8).reshape(32, 4).astype(np.int64)


def mma(a: list[Words], b: list[Words]) -> npt.NDArray[np.int64]:
    """m16n8k32: lane (g, t) has of A rows g, g + 8, g, g + 8 and inputs 4t.., 4t.., 16 + 4t.., 16 + 4t..; of B column g and inputs 4t.., 16 + 4t..;
    of the result [32, 4] rows g, g, g + 8, g + 8 and columns 2t, 2t + 1, 2t, 2t + 1."""
    left, right = np.zeros((16, 32), np.int64), np.zeros((32, 8), np.int64)
    for i in range(4):
        left[(G + 8 * (i % 2))[:, None], 16 * (i // 2) + 4 * T[:, None] + np.arange(4)] = signed_bytes(a[i])
    for i in range(2):
        right[16 * i + 4 * T[:, None] + np.arange(4), G[:, None]] = signed_bytes(b[i])
    c = left @ right
    return np.stack([c[G, 2 * T], c[G, 2 * T + 1], c[G + 8, 2 * T], c[G + 8, 2 * T + 1]], axis=1)


def codes_bytes(q: Words) -> Words:
    return (q & np.uint32(0xF0F0F0F0)) ^ np.uint32(0x80808080)


def multiply_fixed(block: npt.NDArray[np.uint8], x: torch.Tensor, group: int) -> npt.NDArray[np.float64]:
    """[32, 4] sums of one block, as the lanes hold them."""
    high, low, mine = load_x(x)
    step = np.stack([mine[T * 8], mine[T * 8 + 4]], axis=1)
    q = np.concatenate([block[half * 512 :][:512].view(np.uint32).reshape(32, 4) for half in range(2)], axis=1)
    scales = torch.from_numpy(block[1024:].copy()).view(torch.bfloat16).double().numpy().reshape(-1, 8, 2)
    acc = np.zeros((32, 4))
    upper, lower = np.zeros((32, 4), np.int64), np.zeros((32, 4), np.int64)
    for p in range(4):
        words = [q[:, 2 * p], q[:, 2 * p + 1]]
        a = [codes_bytes(w << np.uint32(4) if i == 0 else w) for w in words for i in range(2)]
        upper += mma(a, [high[:, 2 * p], high[:, 2 * p + 1]])
        lower += mma(a, [low[:, 2 * p], low[:, 2 * p + 1]])
        if (p + 1) * 32 % group == 0:
            whole = upper * 256 + lower
            assert np.abs(whole).max(initial=0) < 1 << 30
            factor = scales[p * 32 // group][G][:, [0, 0, 1, 1]]
            acc += factor * step[:, [0, 1, 0, 1]] * whole
            upper[:], lower[:] = 0, 0
    return acc


def through_partial_sums(acc: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """[8 columns, 16 rows] by way of the shared memory in which warps leave their sums."""
    memory = np.full(160, np.nan)
    at = T * 40 + G
    for i, offset in enumerate((0, 20, 8, 28)):
        memory[at + offset] = acc[:, i]
    result = np.zeros((8, 16))
    for lane in LANE:
        result[lane // 4, lane % 4 * 4 :][:4] = memory[lane // 4 * 20 + lane % 4 * 4 :][:4]
    return result


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("paired", [False, True])
def test_integer_products_of_eight_rows(group: int, paired: bool) -> None:
    generator = torch.Generator().manual_seed(group)
    codes = torch.randint(-(1 << 31), 1 << 31, (32, 16), generator=generator).to(torch.int32)
    scales = (torch.rand(32, 128 // group, generator=generator) - 0.5).to(torch.bfloat16)
    tiles = layout.repack(codes, scales, paired=paired)
    weights = layout.dequantize(tiles)[0].double()
    x = torch.randn(8, 128, generator=generator)
    x[2], x[3, 5], x[4] = 0.0, 1000.0, x[4] * 1e-20
    x = x.to(torch.bfloat16)
    for tile in range(2):
        rows = (
            torch.cat((torch.arange(8) + tile * 8, torch.arange(8) + 16 + tile * 8)) if paired else torch.arange(16) + tile * 16
        )
        actual = through_partial_sums(multiply_fixed(tiles.data[0, tile, 0].numpy(), x, group))
        expected = (x.double() @ weights[rows].T).numpy()
        errors = np.linalg.norm(actual - expected, axis=1) / np.maximum(np.linalg.norm(expected, axis=1), 1e-30)
        assert errors.max() < 2e-4  # the row with one large input: 5e-5 without
        assert not actual[2].any()


def test_largest_sums_fit() -> None:
    codes = torch.zeros(16, 16, dtype=torch.int32)  # every weight -8
    tiles = layout.repack(codes, torch.ones(16, 1, dtype=torch.bfloat16))
    x = torch.full((8, 128), -3.0, dtype=torch.bfloat16)
    actual = through_partial_sums(multiply_fixed(tiles.data[0, 0, 0].numpy(), x, 128))
    np.testing.assert_allclose(actual, 8 * 3 * 128, rtol=1e-6)
