"""Panels hold exactly what was put into them, whichever code put it there, and nothing is rounded on the way."""

# ruff: noqa: E402 (the folder of whole_panels is put on the path first)

from __future__ import annotations

import dataclasses
import gc
import sys
from itertools import pairwise
from pathlib import Path

import gguf
import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

KERNELS = str(Path(__file__).parents[1])
if KERNELS not in sys.path:
    sys.path.insert(0, KERNELS)

from whole_panels import of_blocks, of_words

from windlass.core.scheme import Stored
from windlass.errors import BadInput
from windlass.runtime.kernels import build
from windlass.runtime.kernels.cpu import linear as native_linear
from windlass.runtime.kernels.packing import large_pages as memory
from windlass.runtime.kernels.packing import panels_reference, quantize
from windlass.runtime.kernels.packing.panel_data import KINDS
from windlass.runtime.kernels.packing.panels import BLOCKS, WORDS, Panels
from windlass.runtime.quant.packed import PackedMatrix, unpack_zero_points

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(build.library("native") is None and not build._compiler(), reason="no C++ compiler"),
]

SETTINGS = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
GGML = {
    "int4": gguf.GGMLQuantizationType.Q4_0,
    "int4_minima": gguf.GGMLQuantizationType.Q4_1,
    "int8": gguf.GGMLQuantizationType.Q8_0,
}


def words(kind: str, rows: int, num_in: int, group: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor | None, torch.dtype]:
    """Codes, scales and offsets at random, all values of them."""
    draw = torch.Generator().manual_seed(seed)
    dtype = torch.float32 if kind == "fp8" else (torch.bfloat16, torch.float16, torch.float32)[seed % 3]
    scale = torch.randn(rows, num_in // group, generator=draw).to(dtype)
    if kind == "fp8":
        codes = torch.randint(0, 256, (rows, num_in), generator=draw, dtype=torch.uint8)
        codes[codes & 127 == 127] = 0  # not numbers
        return codes.view(torch.float8_e4m3fn), scale, None, dtype
    size = num_in * (8 if kind == "int8" else 4) // 8
    codes = torch.randint(0, 256, (rows, size), generator=draw, dtype=torch.uint8).view(torch.int32)
    if kind == "int4_zeros":
        return codes, scale, torch.randint(-8, 8, scale.shape, generator=draw, dtype=torch.int8), dtype
    return codes, scale, torch.randn(scale.shape, generator=draw).to(dtype) if kind == "int4_minima" else None, dtype


@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(1, 50),
    groups=st.integers(1, 3),
    group=st.sampled_from((32, 64, 128)),
    cuts=st.lists(st.integers(0, 50), max_size=3),
    seed=st.integers(0, 100),
)
@SETTINGS
def test_slices_put_natively_and_by_the_reference_are_the_same_bytes(
    kind: str, rows: int, groups: int, group: int, cuts: list[int], seed: int
) -> None:
    codes, scale, offset, dtype = words(kind, rows, groups * group, group, seed)
    native = Panels.allocate(kind, rows, groups * group, group, scale_dtype=dtype)
    plain = dataclasses.replace(native, data=native.data.clone())
    edges = sorted({0, rows, *(min(cut, rows) for cut in cuts)})
    for first, last in pairwise(edges):
        part = (codes[first:last], scale[first:last], None if offset is None else offset[first:last])
        native.put(first, *part)
        panels_reference.put(plain, plain.data, first, WORDS, *part)
    assert torch.equal(native.data, plain.data)
    index = torch.randint(0, rows, (5,), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(native.rows(index), native.dense()[index])
    assert torch.equal(native_linear.embed(index, native), native.dense()[index])
    assert torch.equal(native_linear.embed(index.int(), native), native.dense()[index])


@pytest.mark.parametrize("group", [32, 64, 128, None])
@pytest.mark.parametrize("kind", ["int4", "int4_zeros", "int8"])
def test_numbers_are_those_of_compressed_tensors(kind: str, group: int | None) -> None:
    if group is None and kind != "int8":
        pytest.skip("int4 has groups")
    weight = torch.randn(83, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    if kind == "int8":
        done = quantize.int8(weight, group)
    else:
        done = quantize.int4(weight, group or 0, zero_points=kind == "int4_zeros")
    zeros = None if done.zero_point is None else unpack_zero_points(done.zero_point, 83)
    panels = of_words(kind, done.codes, done.scale, zeros)
    stored = Stored(bits=8 if kind == "int8" else 4, group=group, scale_bytes=2, zero_points=zeros is not None)
    packed = PackedMatrix(stored, done.codes, done.scale, done.zero_point, (83, 256))
    assert torch.equal(panels.dense(), packed.dequantize())
    assert torch.equal(panels.dense(dtype=torch.bfloat16), packed.dequantize(torch.bfloat16))


@pytest.mark.parametrize("kind", GGML)
def test_numbers_are_those_of_ggml(kind: str) -> None:
    weight = numpy.random.default_rng(2).normal(size=(37, 96)).astype(numpy.float32)
    blocks = gguf.quants.quantize(weight, GGML[kind])
    panels = of_blocks(kind, torch.from_numpy(blocks), 96)
    assert torch.equal(panels.dense(), torch.from_numpy(gguf.quants.dequantize(blocks, GGML[kind])))
    plain = dataclasses.replace(panels, data=torch.zeros_like(panels.data))
    for first, last in ((0, 5), (5, 30), (30, 37)):
        panels_reference.put(plain, plain.data, first, BLOCKS, torch.from_numpy(blocks[first:last]), None, None)
    assert torch.equal(panels.data, plain.data)


def test_fp8_takes_scales_of_blocks() -> None:
    codes, _, _, _ = words("fp8", 300, 256, 128, seed=3)
    scale = torch.rand(3, 2) + 0.5
    panels = Panels.allocate("fp8", 300, 256, 128, scale_dtype=torch.float32)
    panels.put(0, codes, scale)
    expected = codes.float() * scale.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)
    assert torch.equal(panels.dense(), expected)
    assert torch.equal(native_linear.embed(torch.arange(300), panels), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_lie_one_after_another(kind: str) -> None:
    num_experts, rows = 3, 20
    stacked = None
    for expert in range(num_experts):
        codes, scale, offset, dtype = words(kind, rows, 64, 32, seed=3 * expert)
        stacked = stacked or Panels.allocate(kind, rows, 64, 32, num_experts, dtype)
        stacked.put(0, codes, scale, offset, expert=expert)
    assert stacked is not None
    for expert in range(num_experts):
        codes, scale, offset, _ = words(kind, rows, 64, 32, seed=3 * expert)
        assert torch.equal(stacked.dense(expert), of_words(kind, codes, scale, offset).dense())
    with pytest.raises(IndexError):
        stacked.dense()
    with pytest.raises(IndexError):
        stacked.dense(3)


def test_bits_per_weight() -> None:
    """32 codes and an fp16 scale are 4.5 bits a weight, as in GGML; 128 are 4.125."""
    assert Panels.allocate("int4", 256, 512, 32).num_bytes == 256 * 512 * 4.5 / 8
    assert Panels.allocate("int4", 256, 512, 128).num_bytes == 256 * 512 * 4.125 / 8
    assert Panels.allocate("int4_minima", 256, 512, 32, scale_dtype=torch.float16).num_bytes == 256 * 512 * 5 / 8
    assert Panels.allocate("int8", 256, 512, 512).num_bytes == 256 * (512 + 2)
    assert Panels.allocate("fp8", 250, 512, 128, 2, torch.float32).num_bytes == 2 * 250 * (512 + 16)
    assert Panels.allocate("int4", 250, 512, 32).num_bytes == 256 * 512 * 4.5 / 8, "the last panel is whole"


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_random_weights_deviate_as_asked(kind: str, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr("windlass.runtime.kernels.program.program.available", lambda: False)
    dtype = torch.float32 if kind == "fp8" else torch.float16
    made = Panels.random(kind, 100, 256, 64, num_experts=2, scale_dtype=dtype, deviation=0.05, seed=4)
    numbers = torch.stack([made.dense(0), made.dense(1)])
    assert numbers.std().item() == pytest.approx(0.05, rel=0.05)
    assert abs(numbers.mean().item()) < 0.006, "codes of -8 .. 7 have a mean of -0.5"
    assert not torch.equal(numbers[0], numbers[1])
    again = Panels.random(kind, 100, 256, 64, num_experts=2, scale_dtype=dtype, deviation=0.05, seed=4)
    assert torch.equal(torch.stack([again.dense(0), again.dense(1)]), numbers)


def test_small_matrices_share_memory_that_is_given_back() -> None:
    some = [Panels.random("int4", 512, 512, 32, seed=seed) for seed in range(3)]
    assert memory._slab is not None
    slab = memory._slab()
    assert slab is not None
    for panels in some:
        assert slab.ctypes.data <= panels.data.data_ptr() < slab.ctypes.data + slab.nbytes
        assert panels.data.data_ptr() % memory.ALIGNMENT == 0
    first = some[0].dense()
    some[1].data.fill_(0)
    assert torch.equal(some[0].dense(), first), "neighbours do not overlap"
    del slab, panels
    some.clear()
    gc.collect()
    assert memory._slab() is None


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(BadInput, match="whole groups"):
        Panels.allocate("int4", 16, 100, 32)
    with pytest.raises(BadInput, match="kinds are int4"):
        Panels.allocate("int3", 16, 64, 32)
    panels = Panels.allocate("int4", 16, 64, 32)
    codes, scale, _, _ = words("int4", 16, 64, 32)
    with pytest.raises(BadInput, match=r"rows 8\.\.24"):
        panels.put(8, codes, scale)
    with pytest.raises(BadInput, match="scale of 16 rows"):
        panels.put(0, codes, scale.half())
    with pytest.raises(BadInput, match="no offsets"):
        panels.put(0, codes, scale, scale)
    with pytest.raises(BadInput, match="GGML blocks"):
        panels.put_blocks(0, torch.zeros(16, 36, dtype=torch.uint8))
    with pytest.raises(BadInput, match="36 bytes"):
        Panels.allocate("int4", 16, 64, 32, scale_dtype=torch.float16).put_blocks(0, torch.zeros(16, 34, dtype=torch.uint8))
