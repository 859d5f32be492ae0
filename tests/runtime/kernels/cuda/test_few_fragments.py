"""The products of one.cu for one to four rows, lane by lane on the CPU: how activations become bytes in shared memory, which of them a lane loads,
and which row's results it has, in the model of the tensor core's fragments of test_fragments.py."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

from test_fragments import LANE, G, T, Words, byte_perm, mma  # noqa: E402

from windlass.runtime.kernels.cuda import layout  # noqa: E402

pytestmark = pytest.mark.cpu

Numbers = npt.NDArray[np.float64]


def row_of(n: npt.NDArray[np.int64], rows: int) -> npt.NDArray[np.int64]:
    return np.minimum(n & 3, 2) if rows == 3 else n & (rows - 1)


def store_fixed(x: Numbers, group: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], float]:
    """A block of 128 inputs: its 256 bytes, where sums of each group start, and its step."""
    first = G * 16 + T * 2
    v = np.stack([x[first], x[first + 8], x[first + 1], x[first + 9]], axis=1)
    most = np.abs(v).max()
    w = np.rint(v * (32512 / most if most > 0 else 0)).astype(np.int64)
    n, m = (np.ascontiguousarray(part.astype(np.int32)).view(np.uint32) for part in (w, w + 128))
    low = byte_perm(byte_perm(n[:, 0], n[:, 1], 0x0040), byte_perm(n[:, 2], n[:, 3], 0x0040), 0x5410)
    high = byte_perm(byte_perm(m[:, 0], m[:, 1], 0x0051), byte_perm(m[:, 2], m[:, 3], 0x0051), 0x5410)
    memory = np.zeros(64, np.uint32)
    at = ((LANE >> 4) * 128 + (LANE & 3) * 16 + (LANE >> 2 & 3) * 4) // 4
    memory[at], memory[at + 16] = high, low
    lanes = group // 4
    starts = [
        [-8 * int(part[i : i + lanes].copy().view(np.int8).astype(np.int64).sum()) for part in (high, low)]
        for i in range(0, 32, lanes)
    ]
    return memory.view(np.uint8), np.array(starts), float(most / 32512)


def multiply(
    block: npt.NDArray[np.uint8], stored: list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], float]], group: int
) -> Numbers:
    """[rows, 16 rows of weights], by way of the partial sums that lanes leave in shared memory."""
    rows = len(stored)
    x_row, row = row_of(LANE >> 3, rows), row_of(LANE, rows)
    place = (LANE >> 2 & 1) * 64 + (LANE & 3) * 16
    x = [
        np.stack([stored[r][0][at + half * 128 :][:16].view(np.uint32) for r, at in zip(x_row, place, strict=True)])
        for half in range(2)
    ]
    q = [block[half * 512 :][:512].view(np.uint32).reshape(32, 4) for half in range(2)]
    scales = torch.from_numpy(block[1024:].copy()).view(torch.bfloat16).double().numpy().reshape(-1, 8, 2)
    starts = np.stack([stored[r][1] for r in row])  # [32, groups, 2]
    step = np.array([stored[r][2] for r in row])
    low, high = np.zeros(32), np.zeros(32)
    mask = np.uint32(0x0F0F0F0F)
    for number in range(4):
        words, values = q[number // 2][:, number % 2 * 2 :][:, :2], x[number // 2][:, number % 2 * 2 :][:, :2]
        if number * 32 % group == 0:
            c = starts[:, number * 32 // group][:, [0, 1, 0, 1]].copy()
        a: list[Words] = [part for w in (words[:, 0], words[:, 1]) for part in (w & mask, w >> np.uint32(4) & mask)]
        c += mma(a, [values[:, 0], values[:, 1]])
        if (number + 1) * 32 % group == 0:
            scale = scales[number * 32 // group][G]
            low += scale[:, 0] * step * (c[:, 0] * 256 + c[:, 1])
            high += scale[:, 1] * step * (c[:, 2] * 256 + c[:, 3])
    found = np.full((rows, 16), np.nan)
    writes = rows > T
    found[row[writes], G[writes]], found[row[writes], G[writes] + 8] = low[writes], high[writes]
    return found


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_products_of_few_rows(rows: int, group: int) -> None:
    generator = torch.Generator().manual_seed(group + rows)
    codes = torch.randint(-(1 << 31), 1 << 31, (16, 16), generator=generator).to(torch.int32)
    tiles = layout.repack(codes, (torch.rand(16, 128 // group, generator=generator) - 0.5).to(torch.bfloat16))
    x = torch.randn(rows, 128, generator=generator, dtype=torch.float64) * torch.tensor([1.0, 40.0, 0.0, 1e-3])[:rows, None]
    found = multiply(tiles.data[0, 0, 0].numpy(), [store_fixed(row.numpy(), group) for row in x], group)
    expected = (x @ layout.dequantize(tiles)[0].double().T).numpy()
    for row in range(rows):
        assert np.linalg.norm(found[row] - expected[row]) <= 1e-4 * np.linalg.norm(expected[row])


def test_a_quantized_matrix_is_near() -> None:
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    weight[3], weight[4, :128] = 0.0, 5.0
    found = layout.dequantize(layout.quantized(weight, rows_at_once=24))[0]
    assert (found - weight.float()).norm() < 0.12 * weight.float().norm()
    assert not found[3].any()
    torch.testing.assert_close(found[4, :128], weight[4, :128].float())
