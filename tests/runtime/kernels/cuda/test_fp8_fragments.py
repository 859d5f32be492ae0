"""Attention over fp8 pages as attention.cu computes it, lane by lane on the CPU: what lanes copy, load as matrices and convert, put into models of
`ldmatrix.trans` and of the tensor core's fragments (m16n8k16 as PTX documents them), gives scores and values of the page."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from windlass.runtime.kernels import fp8_cache
from windlass.runtime.kernels.step import BLOCK_TOKENS, attention_cache

pytestmark = pytest.mark.cpu

DIM, PAGE_BYTES = 128, 2048
STAGE_BYTES = 2 * PAGE_BYTES + 2 * BLOCK_TOKENS
LANE = np.arange(32)
G, T = LANE // 4, LANE % 4
Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


def fetch_page(keys: Bytes, values: Bytes, scales: Bytes) -> Bytes:
    """A page in shared memory, copied in 16 bytes each."""
    memory = np.zeros(STAGE_BYTES, dtype=np.uint8)
    for i in range(4):
        for lane in range(32):
            c = i * 32 + lane
            t = c // 8
            memory[c * 16 :][:16] = keys[c * 16 :][:16]
            memory[PAGE_BYTES + t * 128 + ((c & 7) ^ (t // 2)) * 16 :][:16] = values[c * 16 :][:16]
    memory[2 * PAGE_BYTES :] = scales
    return memory


def load_transposed(memory: Bytes, address: npt.NDArray[np.int64]) -> list[Bytes]:
    """ldmatrix.x4.trans.b16: lane 8m + r has the address of row r of matrix m; lane l gets of each matrix rows 2(l % 4) and the next, column l / 4.

    Four registers as [32 lanes, 4 bytes]."""
    words = np.stack([memory[a : a + 16].reshape(8, 2) for a in address]).reshape(4, 8, 8, 2)  # matrix, row, column, byte
    return [np.concatenate((matrix[2 * T, G], matrix[2 * T + 1, G]), axis=1) for matrix in words]


def bank_conflicts(address: npt.NDArray[np.int64]) -> int:
    """Of the eight rows of each matrix, which are read at once."""
    banks = address.reshape(4, 8) // 16 % 8
    return sum(8 - len(set(rows)) for rows in banks.tolist())


def codes_f16(register: Bytes) -> tuple[Floats, Floats]:
    """prmt 0x3120, then two conversions: [32, 2] each."""
    ordered = register[:, [0, 2, 1, 3]]
    numbers = torch.from_numpy(np.ascontiguousarray(ordered)).view(torch.float8_e4m3fn).float().numpy()
    return numbers[:, :2], numbers[:, 2:]


def multiply(c: Floats, a: list[Floats], b0: Floats, b1: Floats) -> None:
    """m16n8k16: a four registers of [32, 2], b two, c [32, 4]; in place."""
    left, right = np.zeros((16, 16), np.float32), np.zeros((16, 8), np.float32)
    for register, (row, column) in zip(a, ((0, 0), (8, 0), (0, 8), (8, 8)), strict=True):
        for half in range(2):
            left[G + row, 2 * T + column + half] = register[:, half]
    for half in range(2):
        right[2 * T + half, G], right[2 * T + half + 8, G] = b0[:, half], b1[:, half]
    made = left @ right
    c += np.stack((made[G, 2 * T], made[G, 2 * T + 1], made[G + 8, 2 * T], made[G + 8, 2 * T + 1]), axis=1)


def fragments_of(rows: Floats) -> list[Floats]:
    """The left operand [16, 16] as four registers."""
    return [np.stack((rows[G + r, 2 * T + c], rows[G + r, 2 * T + c + 1]), axis=1) for r, c in ((0, 0), (8, 0), (0, 8), (8, 8))]


def test_a_page_of_fp8() -> None:
    draw = torch.Generator().manual_seed(0)
    cache = attention_cache(2, 1, DIM, torch.float8_e4m3fn)
    k, v = (torch.randn(2 * BLOCK_TOKENS, 1, DIM, generator=draw) * torch.rand(32, 1, 1, generator=draw) * 5 for _ in range(2))
    cache.store(k, v, torch.arange(32))
    keys, values = cache.gather(torch.tensor([0, 1]), 32)
    assert cache.values is not None and cache.scales is not None
    page = [part[1].contiguous().view(torch.uint8).numpy().reshape(-1) for part in (cache.keys, cache.values, cache.scales)]
    memory = fetch_page(*page)
    q = torch.randn(16, DIM, generator=draw).numpy()

    s = [np.zeros((32, 4), np.float32) for _ in range(2)]
    for step in range(4):
        address = (step * 32 + LANE) * 16
        assert bank_conflicts(address) == 0
        pairs = [codes_f16(register) for register in load_transposed(memory, address)]
        for h in range(2):
            left = fragments_of(q[:, (step * 2 + h) * 16 :][:, :16])
            for tile in range(2):
                multiply(s[tile], left, pairs[h * 2][tile], pairs[h * 2 + 1][tile])
    # Register r * 2 + t / 2 of tile t % 2 is row g + 8r, token 4 * (lane % 4) + t; its scales are byte t of a word.
    wanted = q @ keys[16:, 0].numpy().T
    p = np.zeros((16, 16), np.float32)
    for t in range(4):
        token = 4 * T + t
        power = fp8_cache.power(torch.from_numpy(memory[2 * PAGE_BYTES + token])).numpy()
        for r in range(2):
            found = s[t & 1][:, r * 2 + t // 2] * power
            np.testing.assert_allclose(found, wanted[G + r * 8, token], rtol=1e-4, atol=1e-4)
            # What stands in for the weight of a token, times its value's power, in the place where the second product wants it.
            value_power = fp8_cache.power(torch.from_numpy(memory[2 * PAGE_BYTES + BLOCK_TOKENS + token])).numpy()
            p[G + r * 8, (t & 1) * 8 + 2 * T + t // 2] = found * value_power

    o = [np.zeros((32, 4), np.float32) for _ in range(16)]
    for i in range(4):
        token, chunk = (LANE & 7) * 2 + (LANE // 8 & 1), i * 2 + LANE // 16
        address = PAGE_BYTES + token * 128 + (chunk ^ (token // 2)) * 16
        assert bank_conflicts(address) == 0
        pairs = [codes_f16(register) for register in load_transposed(memory, address)]
        for h in range(2):
            for tile in range(2):
                multiply(o[i * 4 + h * 2 + tile], fragments_of(p), pairs[h * 2][tile], pairs[h * 2 + 1][tile])
    gathered = np.full((16, DIM), np.nan, np.float32)
    for r in range(2):
        for i in range(0, 16, 2):
            four = np.stack((o[i][:, r * 2], o[i + 1][:, r * 2], o[i][:, r * 2 + 1], o[i + 1][:, r * 2 + 1]), axis=1)
            for j in range(4):
                gathered[G + r * 8, i * 8 + T * 4 + j] = four[:, j]
    np.testing.assert_allclose(gathered, wanted @ values[16:, 0].numpy(), rtol=1e-3, atol=1e-2)


def test_where_a_new_token_goes() -> None:
    """`key_place` and `value_place` are where `fetch_page` puts them."""
    d, t = np.meshgrid(np.arange(DIM), np.arange(BLOCK_TOKENS), indexing="ij")
    numbers = (d * 7 + t * 31) % 251
    memory = fetch_page(
        numbers.astype(np.uint8).reshape(-1), numbers.T.astype(np.uint8).reshape(-1), np.zeros(2 * BLOCK_TOKENS, np.uint8)
    )
    assert (memory[d * 16 + t] == numbers).all()
    assert (memory[PAGE_BYTES + t * 128 + ((d // 16) ^ (t // 2)) * 16 + d % 16] == numbers).all()
