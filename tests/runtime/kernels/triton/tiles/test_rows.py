"""Packed rows hold the very numbers that panels hold of the same codes."""

# ruff: noqa: E402 (the folder of whole_panels is put on the path first)

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import gguf
import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

KERNELS = str(Path(__file__).parents[2])
if KERNELS not in sys.path:
    sys.path.insert(0, KERNELS)

from whole_panels import of_words

from windlass.errors import BadInput
from windlass.runtime.kernels.packing.packed_rows import PackedRows
from windlass.runtime.kernels.packing.panel_data import KINDS

pytestmark = pytest.mark.cpu

GGML = {
    "int4": gguf.GGMLQuantizationType.Q4_0,
    "int4_minima": gguf.GGMLQuantizationType.Q4_1,
    "int8": gguf.GGMLQuantizationType.Q8_0,
}


def words(kind: str, rows: int, num_in: int, group: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes, scales and offsets at random, all values of them."""
    draw = torch.Generator().manual_seed(seed)
    dtype = torch.float32 if kind == "fp8" else (torch.bfloat16, torch.float16, torch.float32)[seed % 3]
    scale = torch.randn(rows, num_in // group, generator=draw).to(dtype)
    if kind == "fp8":
        codes = torch.randint(0, 256, (rows, num_in), generator=draw, dtype=torch.uint8)
        codes[codes & 127 == 127] = 0  # not numbers
        return codes.view(torch.float8_e4m3fn), scale, None
    size = num_in * (8 if kind == "int8" else 4) // 8
    codes = torch.randint(0, 256, (rows, size), generator=draw, dtype=torch.uint8).view(torch.int32)
    if kind == "int4_zeros":
        return codes, scale, torch.randint(-8, 8, scale.shape, generator=draw, dtype=torch.int8)
    return codes, scale, torch.randn(scale.shape, generator=draw).to(dtype) if kind == "int4_minima" else None


@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(1, 50),
    groups=st.integers(1, 3),
    group=st.sampled_from((32, 64, 96, 128)),
    cuts=st.lists(st.integers(0, 50), max_size=3),
    seed=st.integers(0, 100),
)
def test_they_are_those_of_panels(kind: str, rows: int, groups: int, group: int, cuts: list[int], seed: int) -> None:
    codes, scale, offset = words(kind, rows, groups * group, group, seed)
    made = PackedRows.allocate(kind, rows, groups * group, group, scale_dtype=scale.dtype, device="cpu")
    for first, last in pairwise(sorted({0, rows, *(min(cut, rows) for cut in cuts)})):
        made.put(first, codes[first:last], scale[first:last], None if offset is None else offset[first:last])
    panels = of_words(kind, codes, scale, offset)
    assert torch.equal(made.dense(), panels.dense())
    assert torch.equal(made.dense(dtype=torch.bfloat16), panels.dense(dtype=torch.bfloat16))
    index = torch.randint(0, rows, (5,), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(made.rows(index.int()), panels.rows(index))


@pytest.mark.parametrize("kind", GGML)
def test_blocks_of_ggml(kind: str) -> None:
    weight = numpy.random.default_rng(2).normal(size=(37, 96)).astype(numpy.float32)
    blocks = gguf.quants.quantize(weight, GGML[kind])
    made = PackedRows.allocate(kind, 37, 96, 32, scale_dtype=torch.float16, device="cpu")
    for first, last in ((0, 5), (5, 37)):
        made.put_blocks(first, torch.from_numpy(blocks[first:last]))
    assert torch.equal(made.dense(), torch.from_numpy(gguf.quants.dequantize(blocks, GGML[kind])))


def test_fp8_takes_scales_of_blocks() -> None:
    codes, _, _ = words("fp8", 300, 256, 128, seed=3)
    scale = torch.rand(3, 2) + 0.5
    made = PackedRows.allocate("fp8", 300, 256, 128, scale_dtype=torch.float32, device="cpu")
    made.put(0, codes, scale)
    assert torch.equal(made.dense(), codes.float() * scale.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_experts(kind: str) -> None:
    parts = [words(kind, 20, 64, 32, seed=3 * expert) for expert in range(3)]
    made = PackedRows.allocate(kind, 20, 64, 32, 3, parts[0][1].dtype, device="cpu")
    for expert, part in enumerate(parts):
        made.put(0, *part, expert=expert)
    for expert, part in enumerate(parts):
        assert torch.equal(made.dense(expert), of_words(kind, *part).dense())
    with pytest.raises(IndexError):
        made.dense()
    with pytest.raises(IndexError):
        made.dense(3)


@pytest.mark.parametrize("kind", KINDS)
def test_random_weights_deviate_as_asked(kind: str) -> None:
    dtype = torch.float32 if kind == "fp8" else torch.float16
    made, again = (PackedRows.random(kind, 100, 256, 64, 2, dtype, "cpu", deviation=0.05, seed=4) for _ in range(2))
    numbers = torch.stack([made.dense(0), made.dense(1)])
    assert numbers.std().item() == pytest.approx(0.05, rel=0.05)
    assert abs(numbers.mean().item()) < 0.006, "codes of -8 .. 7 have a mean of -0.5"
    assert not torch.equal(numbers[0], numbers[1])
    assert torch.equal(again.dense(1), numbers[1])


def test_bytes() -> None:
    assert PackedRows.allocate("int4", 250, 512, 128, device="cpu").nbytes == 250 * 512 * 4.125 / 8
    assert PackedRows.allocate("int4_zeros", 4, 512, 32, 3, device="cpu").nbytes == 3 * 4 * (256 + 16 * 3)
    assert PackedRows.allocate("fp8", 250, 512, 128, 2, torch.float32, "cpu").num_bytes == 2 * 250 * (512 + 16)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(BadInput, match="whole groups"):
        PackedRows.allocate("int4", 16, 100, 32, device="cpu")
    with pytest.raises(BadInput, match="kinds are int4"):
        PackedRows.allocate("int3", 16, 64, 32, device="cpu")
    made = PackedRows.allocate("int4", 16, 64, 32, device="cpu")
    codes, scale, _ = words("int4", 16, 64, 32)
    with pytest.raises(BadInput, match=r"rows 8\.\.24"):
        made.put(8, codes, scale)
    with pytest.raises(BadInput, match="scale of 16 rows"):
        made.put(0, codes, scale.half())
    with pytest.raises(BadInput, match="no offsets"):
        made.put(0, codes, scale, scale)
    with pytest.raises(BadInput, match="GGML blocks"):
        made.put_blocks(0, torch.zeros(16, 36, dtype=torch.uint8))
    with pytest.raises(BadInput, match="36 bytes"):
        PackedRows.allocate("int4", 16, 64, 32, 0, torch.float16, "cpu").put_blocks(0, torch.zeros(16, 34, dtype=torch.uint8))
