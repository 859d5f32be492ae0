"""Published fp8 and MXFP4 weights, decoded as those who published them do."""

from __future__ import annotations

import pytest
import torch

from windlass.errors import BadInput
from windlass.runtime.quant.published import fp8_blocks, fp8_rows, mxfp4

pytestmark = pytest.mark.cpu


def fp8(*shape: int) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 50).to(torch.float8_e4m3fn)


def test_fp8_with_a_scale_per_row() -> None:
    weight, scale = fp8(6, 40), torch.rand(6, 1)
    assert torch.equal(fp8_rows(weight, scale), weight.float() * scale)
    assert torch.equal(fp8_rows(weight, scale[:1], torch.bfloat16), (weight.float() * scale[0]).bfloat16())
    with pytest.raises(BadInput, match="6 rows"):
        fp8_rows(weight, scale[:3])


def test_fp8_in_blocks_is_cut_anywhere() -> None:
    """The last blocks are short both ways, and rows are decoded a few at a time."""
    weight, scale = fp8(300, 200), torch.rand(3, 2)
    whole = fp8_blocks(weight, scale)
    assert float(whole[299, 199]) == float(weight[299, 199].float() * scale[2, 1])
    assert float(whole[127, 128]) == float(weight[127, 128].float() * scale[0, 1])
    parts = [fp8_blocks(weight[start : start + 70], scale, start) for start in range(0, 300, 70)]
    assert torch.equal(torch.cat(parts), whole)
    with pytest.raises(BadInput, match="does not cover"):
        fp8_blocks(weight, scale[:2])


def test_fp8_in_blocks_is_what_transformers_makes_of_it() -> None:
    theirs = pytest.importorskip("transformers.integrations.finegrained_fp8")
    weight, scale = fp8(256, 384), torch.rand(2, 3)
    expected = theirs.Fp8Dequantize(None)._dequantize_one(weight, scale, torch.float32)
    assert torch.equal(fp8_blocks(weight, scale), expected)


def test_mxfp4_codes() -> None:
    blocks = torch.arange(16, dtype=torch.uint8).mul(17).roll(3).view(1, 1, 16)
    values = mxfp4(blocks, torch.tensor([[128]], dtype=torch.uint8))
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    by_code = [2 * value for value in (*positive, *(-value for value in positive))]
    assert values[0].tolist() == [by_code[code] for code in blocks.flatten().remainder(16).tolist() for _ in range(2)]
    low_first = mxfp4(torch.full((1, 1, 16), 0x21, dtype=torch.uint8), torch.tensor([[127]], dtype=torch.uint8))
    assert low_first[0, :2].tolist() == [0.5, 1.0]


def test_mxfp4_is_what_transformers_makes_of_it() -> None:
    theirs = pytest.importorskip("transformers.integrations.mxfp4")
    made = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 8, 4, 16), dtype=torch.uint8, generator=made)
    scales = torch.randint(1, 250, (3, 8, 4), dtype=torch.uint8, generator=made)
    expected = theirs.convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    assert torch.equal(mxfp4(blocks, scales, torch.bfloat16), expected)


def test_mxfp4_that_does_not_fit_is_refused() -> None:
    with pytest.raises(BadInput, match="MXFP4"):
        mxfp4(torch.zeros(2, 3, 16, dtype=torch.uint8), torch.zeros(2, 4, dtype=torch.uint8))
