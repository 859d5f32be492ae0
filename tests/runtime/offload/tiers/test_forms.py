"""A matrix, or a stack of unlike ones, is the same after it has been bytes."""

from __future__ import annotations

import pytest
import torch

from windlass.runtime.kernels.packing.matrix import StackedMatrix
from windlass.runtime.kernels.packing.panels import Panels
from windlass.runtime.offload.tiers.forms import ALIGNMENT, stacked_bytes, stacked_forms, stacked_in

pytestmark = pytest.mark.cpu


def panels(kind: str, rows: int) -> Panels:
    made = Panels.allocate(kind, rows, 256, 256, scale_dtype=torch.float16)
    made.data.copy_(torch.arange(made.num_bytes) % 61)
    return made


def block_of(matrix: torch.Tensor | Panels | StackedMatrix) -> torch.Tensor:
    forms = stacked_forms(matrix)
    block = torch.zeros(forms[-1].at + forms[-1].num_bytes, dtype=torch.uint8)
    for form, part in zip(forms, stacked_bytes(matrix), strict=True):
        block[form.at : form.at + form.num_bytes] = torch.frombuffer(bytearray(part), dtype=torch.uint8)
    return block


def test_a_stack_lies_part_after_part() -> None:
    stacked = StackedMatrix((panels("q4_k", 20), panels("q6_k", 7), torch.randn(3, 256)))
    forms = stacked_forms(stacked)
    assert all(form.at % ALIGNMENT == 0 for form in forms)
    found = stacked_in(forms, block_of(stacked))
    assert isinstance(found, StackedMatrix)
    first, second, third = found.parts
    assert isinstance(first, Panels) and (first.kind, first.shape) == ("q4_k", (20, 256))
    assert torch.equal(first.data, stacked.parts[0].data)
    assert isinstance(second, Panels) and torch.equal(second.data, stacked.parts[1].data)
    assert isinstance(third, torch.Tensor) and torch.equal(third, stacked.parts[2])


def test_a_single_matrix_is_itself() -> None:
    matrix = panels("iq2_xs", 33)
    found = stacked_in(stacked_forms(matrix), block_of(matrix))
    assert isinstance(found, Panels) and torch.equal(found.data, matrix.data)
