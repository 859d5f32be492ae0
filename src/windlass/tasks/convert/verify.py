"""Reads a conversion back and compares it with the source: unquantized tensors must be equal, quantized ones within their error bound."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from windlass.errors import BadCheckpoint
from windlass.model.formats.disk.reader import TensorReader
from windlass.model.formats.safetensors.header import read_header
from windlass.runtime.quant import SMALLEST_ERROR, error_bound, from_tensors
from windlass.runtime.weights.tensors.readers import ReadRows
from windlass.tasks.convert.outputs import ConvertedTensor
from windlass.tasks.convert.pack import TORCH_DTYPES
from windlass.tasks.convert.slices import RowSlice


class WrittenFiles:
    """The output files, before config.json is written."""

    def __init__(self, directory: Path, files: Iterable[str]) -> None:
        paths = [directory / file for file in files]
        self._infos = {info.name: info for path in paths for info in read_header(path)}
        self._reader = TensorReader({path: path for path in paths})

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self._reader.read(self._infos[name], start, stop)

    def close(self) -> None:
        self._reader.close()


CALIBRATED_BOUND = 1.0
"""Calibration minimises the error of products, not of weights, so only a group unrelated to its source is detected here."""


def verify(
    outputs: tuple[ConvertedTensor, ...],
    units: tuple[RowSlice, ...],
    read: Callable[[ConvertedTensor], ReadRows],
    written: WrittenFiles,
    workers: int,
    *,
    calibrated: bool = False,
) -> int:
    """Number of tensors compared; raises at the first that differs."""
    with ThreadPoolExecutor(workers, thread_name_prefix="verify") as pool:
        checks = [
            pool.submit(_check, outputs[unit.output], unit, read(outputs[unit.output]), written, calibrated) for unit in units
        ]
        try:
            for check in checks:
                check.result()
        finally:
            pool.shutdown(cancel_futures=True)
    return len(outputs)


def _check(output: ConvertedTensor, unit: RowSlice, read: ReadRows, store: WrittenFiles, calibrated: bool) -> None:
    rows = read(unit.start, unit.stop)
    if not output.packed:
        piece = output.file_tensors[0]
        kept = store.read(piece.name, unit.start, unit.stop)
        if not torch.equal(kept, rows.to(TORCH_DTYPES[piece.dtype]).view_as(kept)):
            raise BadCheckpoint(
                f"verification failed: rows {unit.start} to {unit.stop} differ from the source", tensor=piece.name
            )
        return
    unpacked = dequantized(output, store, unit.start, unit.stop)
    group = output.stored.group or output.shape[1]
    exact = rows.float().view(-1, group)
    error = (unpacked.view(-1, group) - exact).square().mean(dim=1).sqrt()
    largest = exact.abs().amax(dim=1)
    # Copied codes represent exactly the source's values, so only fp32 rounding may differ.
    bound = 2.0**-20 if output.carried else CALIBRATED_BOUND if calibrated else error_bound(output.stored)
    worst = (error - bound * largest - SMALLEST_ERROR).argmax()
    if error[worst] > bound * largest[worst] + SMALLEST_ERROR:
        what = f"verification failed: a group in rows {unit.start} to {unit.stop} has an RMS error of {float(error[worst]):.3g}"
        what += f"; its largest weight is {float(largest[worst]):.3g}"
        raise BadCheckpoint(what, tensor=output.name)


def dequantized(output: ConvertedTensor, store: WrittenFiles, start: int, stop: int) -> Tensor:
    """Rows of a quantized output in fp32."""
    tensors: dict[str, Tensor] = {}
    for piece in output.file_tensors:
        suffix = piece.name.removeprefix(f"{output.module}.")
        if suffix == "weight_shape":
            tensors[suffix] = torch.tensor((stop - start, output.shape[1]))
        elif suffix == "weight_zero_point":
            tensors[suffix] = store.read(piece.name, start // 8, -(-stop // 8))
        else:
            tensors[suffix] = store.read(piece.name, start, stop)
    return from_tensors(tensors, output.stored).dequantize()
