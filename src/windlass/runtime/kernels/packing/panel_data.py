"""The memory layout of packed weights on the CPU: panels of 16 output rows, codes and scales in one stream.

native/panel/panel.h draws it; every instruction set shares it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.core.ggml.forms import FORMS, Form
from windlass.errors import BadInput

PANEL_ROWS = 16
BLOCK = 32
KINDS = ("int4", "int4_zeros", "int4_minima", "int8", "fp8")
"""As `Kind` in native/panel/panel.h numbers them; three types of floats follow, then `FORMS`.

(code - 8) * scale, (code - zero) * scale, code * scale + minimum, (code - 128) * scale."""
SCALES = (torch.bfloat16, torch.float16, torch.float32)
"""As `ScaleType` in native/panel/panel.h numbers them."""
CODE_BYTES = {"int4": 0.5, "int4_zeros": 0.5, "int4_minima": 0.5, "int8": 1, "fp8": 1}
GGML_NUMBERS = {"int4": 2, "int4_minima": 4, "int8": 2}
"""Bytes in front of a block's codes: an fp16 scale, and a minimum (Q4_0, Q4_1, Q8_0; ggml-common.h)."""
WORDS, BLOCKS = 0, 1
FIRST_FORM = len(KINDS) + 3


def kind_number(kind: str) -> int:
    return KINDS.index(kind) if kind in KINDS else FIRST_FORM + list(FORMS).index(kind)


def group_of(kind: str) -> int:
    """Inputs of a block, for ggml's own types."""
    return FORMS[kind].elements


def check_kind(what: str, kind: str, num_out: int, num_in: int, group: int, scale_dtype: torch.dtype) -> None:
    is_form = kind in FORMS
    if (kind not in KINDS and not is_form) or scale_dtype not in SCALES or (kind == "fp8" and scale_dtype != torch.float32):
        known = ", ".join((*KINDS, *FORMS))
        raise BadInput(f"{what} do not support {kind} with {scale_dtype} scales; kinds are {known}")
    if is_form and group != group_of(kind):
        raise BadInput(f"{what} of {kind} are in groups of {group_of(kind)}, not {group}")
    if num_out < 1 or num_in < 1 or group < 1 or num_in % group or group % BLOCK:
        raise BadInput(f"{num_in} inputs in groups of {group}: {what} need whole groups, and groups a multiple of {BLOCK}")


@dataclass(frozen=True)
class PanelData:
    """The bytes of a matrix [out, in], or of `num_experts` of them one after another, and the sizes of their parts."""

    kind: str
    shape: tuple[int, int]
    group: int
    """Inputs that share a scale; of ggml's own types, inputs of a block."""
    scale_dtype: torch.dtype
    data: Tensor
    """uint8, one dimension"""
    num_experts: int = 0

    @property
    def is_packed(self) -> bool:
        """In panels; otherwise (fp8) in rows."""
        return self.kind != "fp8"

    @property
    def form(self) -> Form | None:
        """Of ggml's own types."""
        return FORMS.get(self.kind)

    @property
    def num_groups(self) -> int:
        return self.shape[1] // self.group

    @property
    def num_panels(self) -> int:
        return -(-self.shape[0] // PANEL_ROWS)

    @property
    def codes_bytes(self) -> int:
        """Of a group's codes in a panel."""
        if self.form is not None:
            return PANEL_ROWS * 4 * self.form.words
        return int(self.group * PANEL_ROWS * CODE_BYTES[self.kind])

    @property
    def group_bytes(self) -> int:
        if self.form is not None:
            return PANEL_ROWS * self.form.num_bytes
        scales = PANEL_ROWS * self.scale_dtype.itemsize
        return self.codes_bytes + scales + {"int4_zeros": PANEL_ROWS, "int4_minima": scales}.get(self.kind, 0)

    @property
    def panel_bytes(self) -> int:
        return self.num_groups * self.group_bytes

    @property
    def row_bytes(self) -> int:
        """Of fp8: codes, then scales."""
        return self.shape[1] + 4 * self.num_groups

    @property
    def expert_bytes(self) -> int:
        return self.num_panels * self.panel_bytes if self.is_packed else self.shape[0] * self.row_bytes

    @property
    def num_bytes(self) -> int:
        return self.data.numel()

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def native_ints(self) -> list[int]:
        """How native operations are told what the memory holds."""
        return [kind_number(self.kind), SCALES.index(self.scale_dtype), *self.shape, self.group]

    def expert_data(self, expert: int | None) -> Tensor:
        if (expert is None) != (self.num_experts == 0) or not 0 <= (expert or 0) < max(self.num_experts, 1):
            raise IndexError(f"expert {expert} of {self.num_experts}")
        start = (expert or 0) * self.expert_bytes
        return self.data[start : start + self.expert_bytes]
