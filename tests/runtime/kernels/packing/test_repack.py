"""GGML blocks are the same numbers after they are laid out anew."""

from __future__ import annotations

import pytest
import torch

from windlass.core.scheme import Stored
from windlass.errors import BadInput
from windlass.runtime.kernels.packing import repack
from windlass.runtime.quant import PackedMatrix, published

pytestmark = pytest.mark.cpu


def blocks(rows: int, per_row: int, payload: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(0)
    scale = torch.randn(rows, per_row, 1, generator=made).half().view(torch.uint8)
    codes = torch.randint(0, 256, (rows, per_row, payload), generator=made, dtype=torch.uint8)
    return torch.cat((scale, codes), dim=-1)


def test_q4_0() -> None:
    raw = blocks(5, 3, 16)
    packed, scale = repack.q4_0(raw.flatten(1))
    d = raw[..., :2].contiguous().view(torch.float16).float()
    expected = torch.cat(((raw[..., 2:] & 15).float() - 8, (raw[..., 2:] >> 4).float() - 8), dim=-1) * d
    ours = PackedMatrix(Stored(bits=4, group=32, scale_bytes=2), packed, scale, None, (5, 96)).dequantize()
    assert scale.dtype is torch.float16
    assert torch.equal(ours, expected.flatten(1))


def test_mxfp4() -> None:
    made = torch.Generator().manual_seed(3)
    raw = torch.randint(0, 256, (4, 3, 16), generator=made, dtype=torch.uint8)
    exponents = torch.tensor([0, 1, 2, 100, 120, 126, 127, 128, 130, 200, 253, 254], dtype=torch.uint8).view(4, 3)
    packed, scale = repack.mxfp4(raw, exponents)
    ours = PackedMatrix(Stored(bits=8, group=32, scale_bytes=2), packed, scale, None, (4, 96)).dequantize()
    assert torch.equal(ours, published.mxfp4(raw, exponents))


def test_q8_0() -> None:
    raw = blocks(5, 3, 32)
    packed, scale = repack.q8_0(raw.flatten(1))
    d = raw[..., :2].contiguous().view(torch.float16).float()
    expected = raw[..., 2:].contiguous().view(torch.int8).float() * d
    ours = PackedMatrix(Stored(bits=8, group=32, scale_bytes=2), packed, scale, None, (5, 96)).dequantize()
    assert torch.equal(ours, expected.flatten(1))


def test_half_a_block_is_refused() -> None:
    with pytest.raises(BadInput, match="18-byte blocks"):
        repack.q4_0(torch.zeros(2, 19, dtype=torch.uint8))
