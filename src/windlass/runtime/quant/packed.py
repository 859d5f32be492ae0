"""A quantized matrix [out, in] as checkpoints store it.

Tensors are as compressed-tensors has them (https://github.com/vllm-project/compressed-tensors, `pack_quantized` and
`naive_quantized`): value = (code - zero point) * scale, codes packed along the input, zero points along the output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm

import torch
from torch import Tensor

from windlass.core.scheme import Stored
from windlass.errors import BadInput
from windlass.runtime.kernels.packing.quantize import unpack_zero_points
from windlass.runtime.quant.kind import FP8, INT4, PackingKind, kind_of

MATMUL_BLOCK_BYTES = 32 * 2**20
"""Dequantized rows that `matmul` keeps at a time."""


@dataclass(frozen=True)
class PackedMatrix:
    stored: Stored
    weight_packed: Tensor
    weight_scale: Tensor
    weight_zero_point: Tensor | None
    shape: tuple[int, int]

    @property
    def kind(self) -> PackingKind:
        return kind_of(self.stored)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Exact products of code and scale, then one rounding to `dtype`: what compressed-tensors gives in the scale's own type."""
        return self._rows(0, self.shape[0]).to(dtype)

    def matmul(self, x: Tensor) -> Tensor:
        """x [.., in] to [.., out]: dequantized in blocks of rows, in x's dtype. The reference for faster kernels."""
        out = x.new_empty(*x.shape[:-1], self.shape[0])
        step = max(8, MATMUL_BLOCK_BYTES // (4 * self.shape[1]) // 8 * 8)
        for start in range(0, self.shape[0], step):
            stop = min(start + step, self.shape[0])
            out[..., start:stop] = x @ self._rows(start, stop).to(x.dtype).T
        return out

    def quantum(self, dim: int) -> int:
        """Slices along `dim` must start and end on multiples of this: whole groups, and whole words."""
        return lcm(self.stored.quantum(dim), self.kind.codes_per_word if dim == 1 else 1)

    def slice(self, dim: int, start: int, stop: int) -> PackedMatrix:
        """Rows (dim 0) or inputs (dim 1) start .. stop, still packed."""
        size, quantum = self.shape[dim], self.quantum(dim)
        if not 0 <= start < stop <= size or start % quantum or (stop % quantum and stop != size):
            raise BadInput(f"cannot slice {start}:{stop} of {size} along dim {dim}: slices must fall on multiples of {quantum}")
        return self._slice_rows(start, stop) if dim == 0 else self._slice_inputs(start, stop)

    def tensors(self) -> dict[str, Tensor]:
        """By name suffix in a checkpoint."""
        found = {self.kind.codes_suffix: self.weight_packed, "weight_scale": self.weight_scale}
        if self.kind is not FP8:
            found["weight_shape"] = torch.tensor(self.shape, dtype=torch.int64)
        if self.weight_zero_point is not None:
            found["weight_zero_point"] = self.weight_zero_point
        return found

    def _rows(self, start: int, stop: int) -> Tensor:
        """Rows in fp32; `start` is a multiple of eight where there are zero points."""
        scale = self.weight_scale[start:stop].float()
        codes = self._codes(start, stop).view(stop - start, scale.shape[1], -1)
        if self.weight_zero_point is not None:
            zeros = unpack_zero_points(self.weight_zero_point[start // 8 : -(-stop // 8)], stop - start)
            codes = codes - zeros.unsqueeze(-1)
        return (codes * scale.unsqueeze(-1)).view(stop - start, self.shape[1])

    def _codes(self, start: int, stop: int) -> Tensor:
        words = self.weight_packed[start:stop]
        if self.kind is FP8:
            return words.float()
        stored = words.contiguous().view(torch.uint8)
        if self.kind is INT4:
            stored = torch.stack((stored & 15, stored >> 4), dim=-1).flatten(1)
        return stored[:, : self.shape[1]].float() - float(self.kind.offset)

    def _slice_rows(self, start: int, stop: int) -> PackedMatrix:
        zeros = None if self.weight_zero_point is None else self.weight_zero_point[start // 8 : -(-stop // 8)]
        return PackedMatrix(
            self.stored, self.weight_packed[start:stop], self.weight_scale[start:stop], zeros, (stop - start, self.shape[1])
        )

    def _slice_inputs(self, start: int, stop: int) -> PackedMatrix:
        per_word = self.kind.codes_per_word
        codes = self.weight_packed[:, start // per_word : -(-stop // per_word)].contiguous()
        scale, zeros = self.weight_scale, self.weight_zero_point
        if self.stored.group is not None:
            first, last = start // self.stored.group, stop // self.stored.group
            scale = scale[:, first:last].contiguous()
            zeros = None if zeros is None else zeros[:, first:last].contiguous()
        return PackedMatrix(self.stored, codes, scale, zeros, (self.shape[0], stop - start))


def from_tensors(tensors: Mapping[str, Tensor], stored: Stored) -> PackedMatrix:
    """The inverse of `PackedMatrix.tensors`; raises BadInput for inconsistent tensors."""
    kind = kind_of(stored)
    wanted = [kind.codes_suffix, "weight_scale", *([] if kind is FP8 else ["weight_shape"])]
    wanted += ["weight_zero_point"] if stored.zero_points else []
    missing = [name for name in wanted if name not in tensors]
    if missing:
        raise BadInput(f"an {kind.name} matrix needs {', '.join(wanted)}; {', '.join(missing)} is missing")
    codes, scale = tensors[kind.codes_suffix], tensors["weight_scale"]
    shape = tuple(codes.shape) if kind is FP8 else tuple(int(size) for size in tensors["weight_shape"])
    if len(shape) != 2:
        raise BadInput(f"an {kind.name} matrix has two dimensions, not {len(shape)}: {shape}")
    zeros = tensors["weight_zero_point"] if stored.zero_points else None
    packed = PackedMatrix(stored, codes, scale, zeros, (shape[0], shape[1]))
    _check(packed)
    return packed


def _check(packed: PackedMatrix) -> None:
    kind, (rows, inputs) = packed.kind, packed.shape
    group = packed.stored.group or inputs
    groups = inputs // group if group else 0
    expected = {"codes": (packed.weight_packed, (rows, -(-inputs // kind.codes_per_word)), kind.codes_dtype)}
    expected["weight_scale"] = (packed.weight_scale, (rows, groups), packed.weight_scale.dtype)
    if packed.weight_zero_point is not None:
        expected["weight_zero_point"] = (packed.weight_zero_point, (-(-rows // 8), groups), torch.int32)
    for name, (tensor, shape, dtype) in expected.items():
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise BadInput(
                f"{name} of a {rows} x {inputs} {kind.name} matrix in groups of {group} should be {dtype} {shape}, "
                f"not {tensor.dtype} {tuple(tensor.shape)}"
            )
    if packed.weight_scale.element_size() != packed.stored.scale_bytes or not packed.weight_scale.is_floating_point():
        raise BadInput(f"weight_scale should be a float of {packed.stored.scale_bytes} bytes, not {packed.weight_scale.dtype}")
