"""Packing, unpacking and cutting: as compressed-tensors does it, and only where it may be cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from windlass.core.scheme import Stored, scheme
from windlass.errors import BadInput
from windlass.runtime.quant import PackedMatrix, from_tensors, kind_of, quantize, quantize_rows

pytestmark = pytest.mark.cpu

INT4 = Stored(bits=4, group=32, scale_bytes=2)
INT4_ZEROS = Stored(bits=4, group=64, scale_bytes=2, zero_points=True)
INT8 = Stored(bits=8, group=128, scale_bytes=2)
INT8_ROWS = Stored(bits=8, scale_bytes=2)
FP8 = Stored(bits=8, scale_bytes=4)
ALL = pytest.mark.parametrize("stored", [INT4, INT4_ZEROS, INT8, INT8_ROWS, FP8], ids=["int4", "int4z", "int8", "int8r", "fp8"])


def weight(rows: int = 21, inputs: int = 384, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_same(one: PackedMatrix, other: PackedMatrix) -> None:
    assert one.shape == other.shape
    mine, theirs = one.tensors(), other.tensors()
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert tensor.dtype == theirs[name].dtype
        assert torch.equal(tensor.contiguous().view(torch.uint8), theirs[name].contiguous().view(torch.uint8)), name


@ALL
def test_what_is_written_is_read_again(stored: Stored) -> None:
    packed = quantize(weight(), stored)
    assert_same(from_tensors(packed.tensors(), stored), packed)


@ALL
def test_bytes_are_those_the_planner_counts(stored: Stored) -> None:
    packed = quantize(weight(), stored)
    held = [tensor for name, tensor in packed.tensors().items() if name != "weight_shape"]
    assert sum(tensor.numel() * tensor.element_size() for tensor in held) == stored.matrix_bytes(21, 384)


@ALL
def test_blocks_of_rows_are_the_rows_of_the_whole(stored: Stored) -> None:
    whole = quantize(weight(), stored)
    for start, stop in ((0, 8), (8, 16), (16, 21)):
        assert_same(quantize_rows(weight()[start:stop], stored)[0], whole.slice(0, start, stop))


@ALL
def test_slices_are_slices(stored: Stored) -> None:
    packed = quantize(weight(), stored)
    full = packed.dequantize()
    step = packed.quantum(1) if packed.quantum(1) >= 32 else 32
    assert torch.equal(packed.slice(1, step, 2 * step).dequantize(), full[:, step : 2 * step])
    assert torch.equal(packed.slice(1, step, 384).slice(0, 8, 21).dequantize(), full[8:, step:])


@pytest.mark.parametrize(
    ("stored", "dim", "start", "stop"),
    [(INT4, 1, 16, 64), (INT4, 1, 0, 40), (INT4_ZEROS, 0, 4, 16), (INT4_ZEROS, 0, 0, 12), (INT8_ROWS, 1, 2, 8), (FP8, 0, 3, 3)],
)
def test_a_cut_through_a_group_is_refused(stored: Stored, dim: int, start: int, stop: int) -> None:
    with pytest.raises(BadInput, match="multiples of"):
        quantize(weight(), stored).slice(dim, start, stop)


@ALL
def test_matmul_is_that_of_the_unpacked(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.runtime.quant.packed.MATMUL_BLOCK_BYTES", 8 * 4 * 384)  # eight rows at a time
    packed = quantize(weight(), stored)
    x = weight(6, seed=1).double().view(2, 3, 384)
    assert torch.allclose(packed.matmul(x), x @ packed.dequantize().double().T, rtol=1e-12)


@pytest.mark.parametrize("name", ["int4", "int8", "fp8"])
def test_every_scheme_has_a_kind(name: str) -> None:
    from windlass.core.scheme import Keep

    assert kind_of(scheme(name).stored(Keep.QUANTIZE, 384)).name == name


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(BadInput, match="no packing"):
        quantize(weight(), Stored(bits=4, group=32, scale_bytes=1))
    with pytest.raises(BadInput, match="NaN"):
        quantize(torch.full((2, 64), float("nan")), INT4)


def test_tensors_that_do_not_fit_are_refused() -> None:
    tensors = quantize(weight(), INT4_ZEROS).tensors()
    with pytest.raises(BadInput, match="weight_zero_point is missing"):
        from_tensors({name: tensor for name, tensor in tensors.items() if name != "weight_zero_point"}, INT4_ZEROS)
    with pytest.raises(BadInput, match="weight_scale of a 21 x 384"):
        from_tensors({**tensors, "weight_scale": tensors["weight_scale"][:, :2]}, INT4_ZEROS)
    with pytest.raises(BadInput, match="codes of a 22 x 384"):
        from_tensors({**tensors, "weight_shape": torch.tensor([22, 384])}, INT4_ZEROS)
    with pytest.raises(BadInput, match="float of 2 bytes"):
        from_tensors({**tensors, "weight_scale": tensors["weight_scale"].float()}, INT4_ZEROS)


# --- against the package ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [INT4, INT4_ZEROS, INT8, INT8_ROWS], ids=["int4", "int4z", "int8", "int8r"])
@pytest.mark.parametrize("inputs", [384, 256])
def test_compressed_tensors_unpacks_the_same(stored: Stored, inputs: int) -> None:
    base = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    args = quantization.QuantizationArgs(
        num_bits=stored.bits,
        type="int",
        symmetric=not stored.zero_points,
        strategy="group" if stored.group else "channel",
        group_size=stored.group,
    )
    how = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    packed = quantize(weight(inputs=inputs), stored)
    theirs = base.PackedQuantizationCompressor.decompress(packed.tensors(), how)["weight"]
    assert torch.equal(theirs, packed.dequantize(theirs.dtype))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "inputs"), [(3, 64), (13, 128)])
def test_compressed_tensors_packs_the_same(bits: int, rows: int, inputs: int) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    stored = Stored(bits=bits, group=32, scale_bytes=2)
    packed = quantize(weight(rows, inputs), stored)
    codes = helpers.unpack_from_int32(packed.weight_packed, bits, torch.Size((rows, inputs)))
    assert torch.equal(codes.float() * packed.weight_scale.float().repeat_interleave(32, 1), packed.dequantize())
    assert torch.equal(helpers.pack_to_int32(codes, bits), packed.weight_packed)
    if bits == 4:
        from windlass.runtime.kernels.packing.quantize import pack_zero_points

        zeros = torch.randint(-8, 8, (rows, 4), dtype=torch.int8)
        assert torch.equal(helpers.pack_to_int32(zeros, 4, packed_dim=0), pack_zero_points(zeros))


def test_safetensors_holds_them(tmp_path: Path) -> None:
    files = pytest.importorskip("safetensors.torch")
    for stored in (INT4_ZEROS, INT8, FP8):
        packed = quantize(weight(), stored)
        files.save_file(packed.tensors(), tmp_path / "one.safetensors")
        assert_same(from_tensors(files.load_file(tmp_path / "one.safetensors"), stored), packed)
