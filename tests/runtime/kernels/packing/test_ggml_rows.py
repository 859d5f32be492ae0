"""ggml's blocks are the same numbers in every form: as stored, formed, and in panels, whichever code put them there."""

# ruff: noqa: E402 (the folder of ggml_blocks is put on the path first)

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

KERNELS = str(Path(__file__).parents[1])
if KERNELS not in sys.path:
    sys.path.insert(0, KERNELS)

from ggml_blocks import random_rows

from windlass.core.ggml.forms import FORMS, held_bits
from windlass.errors import BadInput
from windlass.model.formats.gguf.blocks import dequantize
from windlass.model.formats.gguf.header import TYPES
from windlass.runtime.kernels import build
from windlass.runtime.kernels.cpu import linear as native_linear
from windlass.runtime.kernels.packing import ggml_rows, panels_reference
from windlass.runtime.kernels.packing.packed_rows import PackedRows
from windlass.runtime.kernels.packing.panels import BLOCKS, Panels

pytestmark = pytest.mark.cpu


def reference(kind: str, rows: torch.Tensor) -> torch.Tensor:
    return dequantize(kind.upper(), rows.reshape(-1, FORMS[kind].stored_bytes)).view(len(rows), -1)


def test_the_table_is_that_of_the_file_format() -> None:
    sizes = {kind.name.lower(): (kind.elements, kind.num_bytes) for kind in TYPES.values()}
    assert {kind: (form.elements, form.stored_bytes) for kind, form in FORMS.items()}.items() <= sizes.items()


@pytest.mark.parametrize("kind", FORMS)
def test_formed_rows_are_the_same_numbers(kind: str) -> None:
    """Bits for bits, and hardly larger than in the file."""
    form, raw = FORMS[kind], random_rows(kind, 20, 3, seed=1)
    formed = ggml_rows.formed(kind, raw)
    assert torch.equal(ggml_rows.numbers(kind, formed), reference(kind, raw))
    assert formed.shape == (20, 3 * form.num_bytes) and form.num_bytes <= 1.04 * form.stored_bytes
    panels = ggml_rows.interleave(form, formed[:16], 16)
    assert torch.equal(ggml_rows.separate(form, panels, 16), formed[:16])


@pytest.mark.parametrize("kind", FORMS)
def test_packed_rows_hold_them_in_as_many_bytes(kind: str) -> None:
    form, raw = FORMS[kind], random_rows(kind, 9, 2, seed=2)
    made = PackedRows.allocate(kind, 9, 2 * form.elements, form.elements, 2, torch.float16, "cpu")
    made.put_blocks(4, raw[4:], expert=1)
    made.put_blocks(0, raw[:4], expert=1)
    assert torch.equal(made.dense(1), reference(kind, raw))
    assert made.num_bytes == 2 * 9 * 2 * form.num_bytes == 2 * 9 * 2 * form.elements * held_bits(kind.upper()) / 8


@pytest.mark.skipif(build.library("native") is None and not build._compiler(), reason="no C++ compiler")
@given(kind=st.sampled_from(list(FORMS)), rows=st.integers(1, 40), blocks=st.integers(1, 3), edge=st.integers(0, 40))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_panels_put_natively_and_by_the_reference_are_the_same_bytes(kind: str, rows: int, blocks: int, edge: int) -> None:
    form, raw = FORMS[kind], random_rows(kind, rows, blocks, seed=rows)
    native = Panels.allocate(kind, rows, blocks * form.elements, form.elements, scale_dtype=torch.float16)
    plain = dataclasses.replace(native, data=native.data.clone())
    for first, last in ((0, min(edge, rows)), (min(edge, rows), rows)):
        native.put_blocks(first, raw[first:last])
        panels_reference.put(plain, plain.data, first, BLOCKS, raw[first:last], None, None)
    assert torch.equal(native.data, plain.data)
    assert native.num_bytes == -(-rows // 16) * 16 * blocks * form.num_bytes
    index, numbers = torch.arange(rows).flip(0), reference(kind, raw)
    assert torch.equal(native.dense(), numbers)
    assert torch.equal(native.rows(index), numbers[index])
    assert torch.equal(native_linear.embed(index, native), numbers[index])


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(BadInput, match="groups of 256, not 32"):
        Panels.allocate("q4_k", 16, 256, 32)
    with pytest.raises(BadInput, match="whole groups"):
        Panels.allocate("q4_k", 16, 288, 256)
    with pytest.raises(BadInput, match="take 144 bytes each"):
        Panels.allocate("q4_k", 16, 256, 256, scale_dtype=torch.float16).put_blocks(0, torch.zeros(16, 140, dtype=torch.uint8))
