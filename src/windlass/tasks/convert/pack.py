"""Quantizes one slice of rows into the bytes to write. Stateless; thread-safe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.errors import BadCheckpoint
from windlass.model.formats.safetensors.header import DTYPE_BITS
from windlass.runtime.kernels.packing import repack
from windlass.runtime.kernels.packing.calibrated import CalibrationInputs
from windlass.runtime.kernels.packing.quantize import INPUTS
from windlass.runtime.kernels.packing.statistics import Statistics
from windlass.runtime.quant import quantize_rows
from windlass.runtime.weights.tensors.readers import ReadRows
from windlass.tasks.convert.outputs import ConvertedTensor
from windlass.tasks.convert.slices import RowSlice

TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}

RawBlocks = Callable[[int, int], Tensor]
"""Rows start..stop as the source stores them, uint8 [rows, bytes]."""


@dataclass(frozen=True)
class PackedRows:
    """Bytes for the new files as (tensor, offset in it, bytes), and the quantization error."""

    writes: tuple[tuple[str, int, memoryview], ...]
    statistics: Statistics

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for _, _, part in self.writes)


def pack_slice(
    output: ConvertedTensor, unit: RowSlice, read: ReadRows, raw: RawBlocks | None, inputs: CalibrationInputs | None = None
) -> PackedRows:
    """`inputs`: second moments of the matrix's inputs, from `convert.calibration`."""
    if output.carried:
        assert raw is not None
        codes, scale = (repack.q4_0 if output.carried == "Q4_0" else repack.q8_0)(raw(unit.start, unit.stop))
        _check_finite(output, unit, scale)
        return _packed(output, unit, [codes, scale], Statistics())
    rows = read(unit.start, unit.stop)
    if output.packed:
        return _quantized(output, unit, rows, inputs)
    piece = output.file_tensors[0]
    kept = rows.to(TORCH_DTYPES[piece.dtype])
    _check_finite(output, unit, kept)  # after the cast: a narrower float may overflow
    return _packed(output, unit, [kept], _rounding(rows, kept))


def _rounding(rows: Tensor, kept: Tensor) -> Statistics:
    """Error of casting to a narrower float; zero where the dtype did not change."""
    if rows.dtype == kept.dtype:
        return Statistics()
    exact = rows.double()
    return Statistics(float((exact - kept.double()).square().sum()), float(exact.square().sum()))


def _quantized(output: ConvertedTensor, unit: RowSlice, rows: Tensor, inputs: CalibrationInputs | None) -> PackedRows:
    made, statistics = quantize_rows(rows if rows.dtype in INPUTS else rows.float(), output.stored, inputs=inputs)
    if statistics.num_unusable:
        raise _unusable(output, unit, statistics.num_unusable)
    tensors = [made.weight_packed, made.weight_scale]
    return _packed(output, unit, tensors if made.weight_zero_point is None else [*tensors, made.weight_zero_point], statistics)


def _check_finite(output: ConvertedTensor, unit: RowSlice, numbers: Tensor) -> None:
    """Looks at minimum and maximum only (NaN propagates to both): twenty times faster than isfinite on every element."""
    if numbers.numel() and not all(torch.isfinite(end) for end in torch.aminmax(numbers)):
        raise _unusable(output, unit, int((~torch.isfinite(numbers)).sum()))


def _unusable(output: ConvertedTensor, unit: RowSlice, count: int) -> BadCheckpoint:
    what = f"{count} values in rows {unit.start} to {unit.stop} are NaN, infinite or overflow the output type"
    return BadCheckpoint(f"{what}; the source is damaged, or --quant needs a wider type", tensor=output.name)


def _packed(output: ConvertedTensor, unit: RowSlice, tensors: list[Tensor], statistics: Statistics) -> PackedRows:
    """Offsets of each tensor's rows. Zero points are packed eight rows to a word, so theirs start at an eighth."""
    writes: list[tuple[str, int, memoryview]] = []
    for piece, tensor in zip(output.file_tensors, tensors, strict=False):
        start = unit.start
        if piece.name.endswith("_zero_point"):
            start = unit.start * output.stored.bits // 32
        width = piece.shape[1] if len(piece.shape) == 2 else 1
        writes.append((piece.name, start * width * (DTYPE_BITS[piece.dtype] // 8), _bytes(tensor)))
    last = output.file_tensors[-1]
    if last.name.endswith(".weight_shape") and unit.start == 0:
        writes.append((last.name, 0, _bytes(torch.tensor(output.shape, dtype=torch.int64))))
    return PackedRows(tuple(writes), statistics)


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(torch.uint8).reshape(-1).numpy().data
