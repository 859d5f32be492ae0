"""Packed weights for the Triton kernels: row-major codes, and separate scales. Plain PyTorch, on any device.

The same interface as Panels, so that loaders can fill either. Repacking is lossless.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt

import torch
from torch import Tensor

from windlass.core.constants import FP8_BLOCK
from windlass.core.ggml.forms import FORMS, Form
from windlass.errors import BadInput
from windlass.runtime.kernels.packing import ggml_rows
from windlass.runtime.kernels.packing.ggml_rows import check_blocks
from windlass.runtime.kernels.packing.panel_data import BLOCK, CODE_BYTES, GGML_NUMBERS, check_kind

ZERO = {"int4": 8, "int8": 128}
"""The zero point, where it is constant."""


@dataclass(frozen=True)
class PackedRows:
    """A matrix [out, in], or `num_experts` of them. A value is (code - zero) * scale, or code * scale + minimum (int4_minima)."""

    kind: str
    shape: tuple[int, int]
    group: int
    """Inputs that share a scale."""
    data: Tensor
    """uint8 [matrices, out, bytes]: int8 and fp8 one code to a byte. Of 4-bit codes every 32 are 16 bytes, the first 16 codes in the
    low halves and the others in the high ones (as in GGML's blocks): a kernel masks a tile once and has two contiguous runs. Of ggml's own
    types a row is its blocks in the form of core/ggml/forms.py."""
    scale: Tensor
    """[matrices, out, groups]; ggml's own types have their scales in `data` (core/ggml/forms.py), and this is empty."""
    offset: Tensor | None
    """[matrices, out, groups]: zero points of 0 .. 15 as uint8 (int4_zeros), or minima in the type of the scales (int4_minima)."""
    num_experts: int = 0

    @staticmethod
    def allocate(
        kind: str,
        num_out: int,
        num_in: int,
        group: int,
        num_experts: int = 0,
        scale_dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cuda",
    ) -> PackedRows:
        """An uninitialized matrix, to be filled by `put`."""
        check_kind("packed rows", kind, num_out, num_in, group, scale_dtype)
        form = FORMS.get(kind)
        matrices, groups = max(num_experts, 1), 0 if form else num_in // group
        row_bytes = num_in // group * form.num_bytes if form else int(num_in * CODE_BYTES[kind])
        offset_dtype = {"int4_zeros": torch.uint8, "int4_minima": scale_dtype}.get(kind)
        return PackedRows(
            kind=kind,
            shape=(num_out, num_in),
            group=group,
            data=torch.empty((matrices, num_out, row_bytes), dtype=torch.uint8, device=device),
            scale=torch.empty((matrices, num_out, groups), dtype=scale_dtype, device=device),
            offset=None if offset_dtype is None else torch.empty((matrices, num_out, groups), dtype=offset_dtype, device=device),
            num_experts=num_experts,
        )

    @staticmethod
    def random(
        kind: str,
        num_out: int,
        num_in: int,
        group: int,
        num_experts: int = 0,
        scale_dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cuda",
        *,
        deviation: float = 0.02,
        seed: int = 0,
    ) -> PackedRows:
        """Random weights with about the given standard deviation, made on the device; for benchmarks."""
        made = PackedRows.allocate(kind, num_out, num_in, group, num_experts, scale_dtype, device)
        draw = torch.Generator(device=made.device).manual_seed(seed)
        made.data.random_(0, 256, generator=draw)
        if made.form is not None:
            ggml_rows.randomize_numbers(kind, made.data, deviation)
            return made
        if kind == "fp8":  # magnitudes of 0.5 to 1
            made.data.bitwise_and_(0x87).bitwise_or_(0x30)
            made.scale.fill_(deviation / 0.75)
            return made
        # Standard deviation of uniform codes, and of the scales.
        spread = 1.04 * sqrt(((256 if kind == "int8" else 16) ** 2 - 1) / 12)
        made.scale.uniform_(0.5, 1.5, generator=draw).mul_(deviation / spread)
        if made.offset is not None:
            made.offset.copy_(made.scale * -7.5) if kind == "int4_minima" else made.offset.random_(7, 9, generator=draw)
        return made

    @property
    def scale_dtype(self) -> torch.dtype:
        return self.scale.dtype

    @property
    def dtype(self) -> torch.dtype:
        """Of the codes. Not a floating-point dtype, so that operations which need one reject these weights."""
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def form(self) -> Form | None:
        """Of ggml's own types."""
        return FORMS.get(self.kind)

    @property
    def num_groups(self) -> int:
        return self.shape[1] // self.group

    @property
    def nbytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in (self.data, self.scale, self.offset) if part is not None)

    num_bytes = nbytes

    def put(self, first_row: int, codes: Tensor, scale: Tensor, offset: Tensor | None = None, expert: int | None = None) -> None:
        """Writes rows from `first_row` on; from any device.

        codes: int32 as compressed-tensors packs them along the input, or float8_e4m3fn [n, in]. scale: [n, groups] in `scale_dtype`.
        offset: zero points of -8 .. 7, [n, groups] of any type (int4_zeros), or minima [n, groups] in `scale_dtype` (int4_minima).
        fp8 also takes a scale for every 128 rows, [ceil(n / 128), groups].
        """
        if self.kind == "fp8" and scale.shape[0] != codes.shape[0]:
            scale = scale.repeat_interleave(FP8_BLOCK, dim=0)[: codes.shape[0]]
        self._check_tensors(codes, scale, offset)
        stored = codes.to(self.device).contiguous().view(torch.uint8)
        if self.kind.startswith("int4"):
            stored = _halves_apart(stored)
        if self.kind == "int4_zeros" and offset is not None:
            offset = (offset.to(self.device, torch.int8) + 8).to(torch.uint8)
        self._write(first_row, stored, scale, offset, expert)

    def put_experts(self, first: int, codes: Tensor, scale: Tensor) -> None:
        """Writes whole matrices from expert `first` on: `put` with a dimension before the rows. Experts lie one below the other."""
        num_out, num_in = self.shape
        data, scales = self.data.view(1, -1, self.data.shape[2]), self.scale.view(1, -1, self.scale.shape[2])
        tall = replace(self, shape=(self.num_experts * num_out, num_in), data=data, scale=scales, num_experts=0)
        tall.put(first * num_out, codes.flatten(0, 1), scale.flatten(0, 1))

    def put_blocks(self, first_row: int, blocks: Tensor, expert: int | None = None) -> None:
        """Writes rows of GGML's blocks (uint8 [n, blocks * size]): Q4_0 to int4, Q4_1 to int4_minima, Q8_0 to int8, others to their own kind."""
        if self.form is not None:
            check_blocks(self.form, self.shape[1], blocks)
            self._write(first_row, ggml_rows.formed(self.kind, blocks.to(self.device)), self.scale[0, :0], None, expert)
            return
        numbers = GGML_NUMBERS.get(self.kind, 0)
        row_bytes = self.shape[1] // BLOCK * (numbers + int(BLOCK * CODE_BYTES[self.kind]))
        if not numbers or self.group != BLOCK or self.scale_dtype != torch.float16:
            raise BadInput(
                f"GGML blocks cannot be packed as {self.kind} in groups of {self.group} with {self.scale_dtype} scales"
            )
        if blocks.dtype != torch.uint8 or blocks.shape[1] != row_bytes:
            raise BadInput(
                f"rows of {self.shape[1]} inputs take {row_bytes} bytes each, not {tuple(blocks.shape)} of {blocks.dtype}"
            )
        parts = blocks.to(self.device).view(len(blocks), self.num_groups, -1)
        scale, minimum = (parts[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1) for at in (0, numbers - 2))
        codes = parts[..., numbers:].flatten(1)
        offset = minimum if self.kind == "int4_minima" else None
        self._write(first_row, codes ^ 128 if self.kind == "int8" else codes, scale, offset, expert)

    def expert(self, number: int) -> PackedRows:
        """One of several matrices, in the same memory."""
        only = slice(self._matrix(number), number + 1)
        offset = None if self.offset is None else self.offset[only]
        return replace(self, data=self.data[only], scale=self.scale[only], offset=offset, num_experts=0)

    def dense(self, expert: int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Dequantized [out, in]: exact products of code and scale (and one sum with a minimum) in fp32, then one rounding."""
        return self._numbers(self._matrix(expert), slice(None)).to(dtype)

    def rows(self, index: Tensor) -> Tensor:
        """Some rows of a matrix as fp32."""
        return self._numbers(self._matrix(None), index.long())

    def _numbers(self, matrix: int, index: slice | Tensor) -> Tensor:
        if self.form is not None:
            return ggml_rows.numbers(self.kind, self.data[matrix][index])
        codes, scale = self.data[matrix][index], self.scale[matrix][index].float().unsqueeze(-1)
        offset = None if self.offset is None else self.offset[matrix][index].float().unsqueeze(-1)
        if self.kind == "fp8":
            numbers = codes.view(torch.float8_e4m3fn).float()
        else:
            numbers = (_codes(codes) if self.kind.startswith("int4") else codes).float()
        grouped = numbers.view(len(codes), self.num_groups, self.group)
        if self.kind == "int4_minima":
            return (grouped * scale + offset).flatten(1)
        zero = offset if self.kind == "int4_zeros" else ZERO.get(self.kind, 0)
        return ((grouped - zero) * scale).flatten(1)

    def _matrix(self, expert: int | None) -> int:
        if (expert is None) != (self.num_experts == 0) or not 0 <= (expert or 0) < max(self.num_experts, 1):
            raise IndexError(f"expert {expert} of {self.num_experts}")
        return expert or 0

    def _write(self, first_row: int, codes: Tensor, scale: Tensor, offset: Tensor | None, expert: int | None) -> None:
        if not 0 <= first_row <= first_row + len(codes) <= self.shape[0]:
            raise BadInput(f"rows {first_row}..{first_row + len(codes)} are outside of a matrix of {self.shape[0]} rows")
        matrix = self._matrix(expert)
        for whole, part in ((self.data, codes), (self.scale, scale), (self.offset, offset)):
            if whole is not None and part is not None:
                whole[matrix, first_row : first_row + len(part)].copy_(part)

    def _check_tensors(self, codes: Tensor, scale: Tensor, offset: Tensor | None) -> None:
        rows, words = codes.shape[0], int(self.shape[1] * CODE_BYTES[self.kind]) // 4
        wanted = {"codes": (codes, (rows, words), torch.int32), "scale": (scale, (rows, self.num_groups), self.scale_dtype)}
        if self.kind == "fp8":
            wanted["codes"] = (codes, (rows, self.shape[1]), torch.float8_e4m3fn)
        if offset is not None:
            kind = offset.dtype if self.kind == "int4_zeros" else self.scale_dtype
            wanted["offset"] = (offset, (rows, self.num_groups), kind)
        if (offset is None) != (self.offset is None):
            raise BadInput(f"{self.kind} {'needs' if offset is None else 'has no'} offsets")
        for name, (tensor, shape, dtype) in wanted.items():
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise BadInput(
                    f"{name} of {rows} rows of {self.kind} should be {dtype} {shape}, not {tensor.dtype} {tuple(tensor.shape)}"
                )


def _halves_apart(stored: Tensor) -> Tensor:
    """Bytes of neighbours, [n, in / 2], to bytes of codes that lie 16 apart."""
    codes = torch.stack((stored & 15, stored >> 4), dim=-1).view(len(stored), -1, 2, 16)
    return (codes[:, :, 0] | (codes[:, :, 1] << 4)).flatten(1)


def _codes(stored: Tensor) -> Tensor:
    """The inverse, to one code per byte."""
    halves = stored.view(len(stored), -1, 1, 16)
    return torch.cat((halves & 15, halves >> 4), dim=2).flatten(1)
