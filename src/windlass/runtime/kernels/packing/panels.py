"""Packed weights for the CPU kernels: panels of 16 output rows (panel_data.py). Knows no files.

Rows are written slice by slice as they are loaded (`put`, `put_blocks`). Repacking is lossless, and the same with or without a compiler
(panels_reference.py).
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from windlass.core.constants import FP8_BLOCK
from windlass.errors import BadInput
from windlass.runtime.kernels.packing import panels_reference
from windlass.runtime.kernels.packing.ggml_rows import check_blocks
from windlass.runtime.kernels.packing.large_pages import memory
from windlass.runtime.kernels.packing.panel_data import (
    BLOCK,
    BLOCKS,
    CODE_BYTES,
    GGML_NUMBERS,
    PANEL_ROWS,
    WORDS,
    PanelData,
    check_kind,
)
from windlass.runtime.kernels.program import program


class Panels(PanelData):
    """Packed weights: a matrix [out, in], or `num_experts` of them. Rows are written in place as they are loaded."""

    @staticmethod
    def allocate(
        kind: str, num_out: int, num_in: int, group: int, num_experts: int = 0, scale_dtype: torch.dtype = torch.bfloat16
    ) -> Panels:
        """An uninitialized matrix, to be filled by `put`."""
        check_kind("panels", kind, num_out, num_in, group, scale_dtype)
        empty = Panels(kind, (num_out, num_in), group, scale_dtype, torch.empty(0, dtype=torch.uint8), num_experts)
        data = memory(empty.expert_bytes * max(num_experts, 1))
        if empty.is_packed and num_out % PANEL_ROWS:  # padding rows must not be random bits, which may be NaN
            data.view(max(num_experts, 1), -1)[:, -empty.panel_bytes :] = 0
        return Panels(kind, (num_out, num_in), group, scale_dtype, data, num_experts)

    @staticmethod
    def random(
        kind: str,
        num_out: int,
        num_in: int,
        group: int,
        num_experts: int = 0,
        scale_dtype: torch.dtype = torch.bfloat16,
        *,
        deviation: float = 0.02,
        seed: int = 0,
    ) -> Panels:
        """Random weights with about the given standard deviation; for benchmarks."""
        made = Panels.allocate(kind, num_out, num_in, group, num_experts, scale_dtype)
        assert made.form is None, "random weights of ggml's own types are not needed on the CPU"
        # Standard deviation of 16 and of 256 uniform codes; of magnitudes between 0.5 and 1; and of the scales.
        spread = {"int8": sqrt((256**2 - 1) / 12), "fp8": 0.75}.get(kind, sqrt((16**2 - 1) / 12)) * (1 if kind == "fp8" else 1.04)
        if not program.available():
            panels_reference.randomize(made, deviation / spread, seed)
            return made
        pieces = (made.num_panels if made.is_packed else num_out) * max(num_experts, 1)
        program.emit("panels_random", [made.data], [*made.native_ints, seed], [deviation / spread], rows=pieces, counted=False)
        return made

    def put(self, first_row: int, codes: Tensor, scale: Tensor, offset: Tensor | None = None, expert: int | None = None) -> None:
        """Writes rows from `first_row` on.

        codes: int32 as compressed-tensors packs them along the input, or float8_e4m3fn [n, in]. scale: [n, groups] in `scale_dtype`.
        offset: zero points of -8 .. 7, [n, groups] of any type (int4_zeros), or minima [n, groups] in `scale_dtype` (int4_minima).
        fp8 also takes a scale for every 128 rows, [ceil(n / 128), groups].
        """
        self._check_rows(first_row, codes.shape[0])
        if not self.is_packed and scale.shape[0] != codes.shape[0]:
            scale = scale.repeat_interleave(FP8_BLOCK, dim=0)[: codes.shape[0]]
        if self.kind == "int4_zeros" and offset is not None:
            offset = offset.to(torch.int8)
        self._check_tensors(codes, scale, offset)
        self._write(
            first_row, WORDS, codes.contiguous(), scale.contiguous(), None if offset is None else offset.contiguous(), expert
        )

    def put_blocks(self, first_row: int, blocks: Tensor, expert: int | None = None) -> None:
        """Writes rows of GGML's blocks (uint8 [n, blocks * size]): Q4_0 to int4, Q4_1 to int4_minima, Q8_0 to int8, others to their own kind."""
        self._check_rows(first_row, blocks.shape[0])
        if self.form is not None:
            check_blocks(self.form, self.shape[1], blocks)
            self._write(first_row, BLOCKS, blocks.contiguous(), None, None, expert)
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
        self._write(first_row, BLOCKS, blocks.contiguous(), None, None, expert)

    def expert(self, number: int) -> Panels:
        """One of several matrices, in the same memory."""
        return Panels(self.kind, self.shape, self.group, self.scale_dtype, self.expert_data(number))

    def dense(self, expert: int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Dequantized [out, in]: exact products of code and scale (and one sum with a minimum) in fp32, then one rounding."""
        return panels_reference.dense(self, expert).to(dtype)

    def rows(self, index: Tensor) -> Tensor:
        """Some rows of a matrix as fp32, in plain PyTorch."""
        return panels_reference.rows(self, index)

    def _write(
        self, first_row: int, source: int, codes: Tensor, scale: Tensor | None, offset: Tensor | None, expert: int | None
    ) -> None:
        to = self.expert_data(expert)
        if not program.available() or program.is_recording():
            panels_reference.put(self, to, first_row, source, codes, scale, offset)
            return
        strides = [_row_bytes(tensor) for tensor in (codes, scale, offset)]
        ints = [*self.native_ints, first_row, source, *strides]
        program.emit("panels_put", [to, codes, scale, offset], ints, rows=codes.shape[0], counted=False)

    def _check_rows(self, first_row: int, num_rows: int) -> None:
        if not 0 <= first_row <= first_row + num_rows <= self.shape[0]:
            raise BadInput(f"rows {first_row}..{first_row + num_rows} are outside of a matrix of {self.shape[0]} rows")

    def _check_tensors(self, codes: Tensor, scale: Tensor, offset: Tensor | None) -> None:
        rows, words = codes.shape[0], int(self.shape[1] * CODE_BYTES[self.kind]) // 4
        wanted = {"codes": (codes, (rows, words), torch.int32), "scale": (scale, (rows, self.num_groups), self.scale_dtype)}
        if not self.is_packed:
            wanted["codes"] = (codes, (rows, self.shape[1]), torch.float8_e4m3fn)
        if offset is not None:
            kind = torch.int8 if self.kind == "int4_zeros" else self.scale_dtype
            wanted["offset"] = (offset, (rows, self.num_groups), kind)
        if (offset is None) != (self.kind not in ("int4_zeros", "int4_minima")):
            raise BadInput(f"{self.kind} {'needs' if offset is None else 'has no'} offsets")
        for name, (tensor, shape, dtype) in wanted.items():
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise BadInput(
                    f"{name} of {rows} rows of {self.kind} should be {dtype} {shape}, not {tensor.dtype} {tuple(tensor.shape)}"
                )


def _row_bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.stride(0) * tensor.element_size()
