"""Products equal their references on every instruction set: exactly quantized activations, and plain numbers within a stated bound.

The bound. An activation is off by at most half a step, amax / 254 of its block of 32 inputs, so a product is off by at most the sum
over blocks of amax / 254 * sum |weight|. On top of it come fp32 sums: blocks * 2^-23 of the sum of magnitudes is allowed for.
"""

# ruff: noqa: E402 (the folder of ggml_blocks is put on the path first)

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

KERNELS = str(Path(__file__).parents[1])
if KERNELS not in sys.path:
    sys.path.insert(0, KERNELS)

from ggml_blocks import random_rows

from windlass.core.ggml.forms import FORMS
from windlass.runtime.kernels import build
from windlass.runtime.kernels.cpu import limits as native_limits
from windlass.runtime.kernels.cpu import linear as native_linear
from windlass.runtime.kernels.ops.linear import linear
from windlass.runtime.kernels.packing import panels_reference
from windlass.runtime.kernels.packing.matrix import StackedMatrix, matrix_bytes
from windlass.runtime.kernels.packing.panel_data import KINDS
from windlass.runtime.kernels.packing.panels import Panels
from windlass.runtime.kernels.program import program

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(build.library("native") is None and not build._compiler(), reason="no C++ compiler"),
]

SETTINGS = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
PACKED = [kind for kind in KINDS if kind != "fp8"]
ROUNDING = 2.0**-23
Run = Callable[..., tuple[Tensor, ...]]


def random_panels(kind: str, num_out: int, num_in: int, group: int, seed: int = 0) -> Panels:
    dtype = torch.float32 if kind == "fp8" else (torch.bfloat16, torch.float16, torch.float32)[seed % 3]
    return Panels.random(kind, num_out, num_in, group, scale_dtype=dtype, deviation=1.0, seed=seed)


def quantized(x: Tensor) -> Tensor:
    """What activations are once they have been int8, in fp64."""
    blocks = x.view(len(x), -1, 32)
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    inverse = torch.where(largest > 0, 127 / largest, 0)
    codes = (blocks * inverse).clamp(-127, 127).round()
    return (codes.double() * (largest * torch.tensor(1 / 127)).double()).view(x.shape)


def near_ties(x: Tensor) -> Tensor:
    """The step of numbers that lie so near the middle of two codes that the last bit of a product decides which they get; else 0."""
    blocks = x.view(len(x), -1, 32).double()
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    scaled = torch.where(largest > 0, blocks * 127 / largest, 0)
    return torch.where((scaled.abs() % 1 - 0.5).abs() < 1e-4, largest / 127, 0).view(x.shape)


def magnitudes(panels: Panels, weight: Tensor) -> Tensor:
    """|code * scale| + |offset|, which is what is added up: more than |weight| where the two nearly cancel."""
    if panels.kind == "fp8":
        return weight.abs()
    if panels.form is not None:  # of every group: the largest code times the scale, and the minimum
        by_group = weight.view(panels.shape[0], -1, 16)
        return (3 * by_group.abs().amax(-1, keepdim=True)).expand_as(by_group).flatten(1)
    codes, scale, offset = panels_reference.unpack(panels, panels.data.view(panels.num_panels, -1))
    grouped = codes.view(len(codes), panels.num_groups, -1).double() * scale.double().abs().unsqueeze(-1)
    if offset is not None:
        grouped = grouped + (offset.double() * (1 if panels.kind == "int4_minima" else scale.double())).abs().unsqueeze(-1)
    return grouped.flatten(1)[: panels.shape[0]]


def check(result: Tensor, x: Tensor, panels: Panels, *added: Tensor, weight: Tensor | None = None) -> None:
    """`added`: bias and residual, whose magnitudes count one by one, since they may cancel. `weight`: of the panels, where it is known."""
    weight = panels.dense().double() if weight is None else weight
    held = x.double() if panels.kind == "fp8" else quantized(x)
    nothing = torch.zeros(1).double()
    rest, size = sum((part.double() for part in added), nothing), sum((part.abs().double() for part in added), nothing)
    rounding = (x.shape[1] / 32 + 8) * ROUNDING * (held.abs() @ magnitudes(panels, weight).T + size) + 1e-30
    ties = 0 if panels.kind == "fp8" else near_ties(x) @ weight.abs().T
    assert ((result - (held @ weight.T + rest)).abs() <= rounding + ties).all()
    steps = (x.view(len(x), -1, 32).abs().amax(dim=-1) / 254).repeat_interleave(32, dim=1).double()
    bound = steps @ weight.abs().T * (1 + 1e-4) + rounding
    assert ((result - (x.double() @ weight.T + rest)).abs() <= bound).all()


@given(
    kind=st.sampled_from(KINDS),
    rows=st.sampled_from((1, 2, 3, 4, 5, 7, 8, 11, 12, 13, 26)),
    num_out=st.integers(1, 70),
    groups=st.integers(1, 4),
    group=st.sampled_from((32, 64, 128)),
    with_bias=st.booleans(),
    with_add=st.booleans(),
    seed=st.integers(0, 100),
)
@example(kind="int4", rows=7, num_out=30, groups=1, group=64, with_bias=True, with_add=True, seed=32)  # bias and residual cancel
@SETTINGS
def test_packed(
    run: Run, kind: str, rows: int, num_out: int, groups: int, group: int, with_bias: bool, with_add: bool, seed: int
) -> None:
    panels = random_panels(kind, num_out, groups * group, group, seed)
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, groups * group, generator=draw) * torch.rand(rows, 1, generator=draw)
    bias = torch.randn(num_out, generator=draw) if with_bias else None
    add = torch.randn(rows, num_out + 3, generator=draw)[:, :num_out] if with_add else None
    (result,) = run(lambda: native_linear.linear(x, panels, bias, add), rows)
    check(result, x, panels, *(part for part in (bias, add) if part is not None))


def ggml_panels(kind: str, num_out: int, blocks: int, seed: int = 0) -> Panels:
    made = Panels.allocate(kind, num_out, blocks * FORMS[kind].elements, FORMS[kind].elements, scale_dtype=torch.float16)
    made.put_blocks(0, random_rows(kind, num_out, blocks, seed, 0.1))
    return made


@cache
def ggml_case(kind: str, num_out: int, blocks: int, byte: int | None = None) -> tuple[Panels, Tensor]:
    """Panels and their weight, which is the same on every instruction set; all codes and scales of one byte, or at random."""
    panels = ggml_panels(kind, num_out, blocks)
    assert panels.form is not None
    if byte is not None:
        numbers = 32 * panels.form.halves + (16 if kind == "mxfp4" else 0)
        panels.data.view(-1, panels.group_bytes)[:, numbers:] = byte
    return panels, panels.dense().double()


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.usefixtures("instruction_set")
def test_ggml_blocks(kind: str) -> None:
    """Codes and scales are exact: what is left is the rounding of activations, and of fp32 sums."""
    panels, weight = ggml_case(kind, 37, 2)
    draw = torch.Generator().manual_seed(1)
    for rows in (1, 3, 19):
        x, bias, add = (torch.randn(shape, generator=draw) for shape in ((rows, panels.shape[1]), (37,), (rows, 37)))
        check(native_linear.linear(x, panels, bias, add), x, panels, bias, add, weight=weight)


def test_stacked_parts_write_their_columns(run: Run) -> None:
    """Of unlike types, with sizes that are no whole panels; at once and replayed."""
    draw = torch.Generator().manual_seed(2)
    parts = (ggml_panels("q4_k", 37, 1), ggml_panels("q6_k", 20, 1), torch.randn(9, 256, generator=draw))
    stacked = StackedMatrix(parts)
    assert stacked.shape == (66, 256) and stacked.num_bytes == sum(matrix_bytes(part) for part in parts)
    for rows in (1, 3, 14):
        x, bias, add = (torch.randn(shape, generator=draw) for shape in ((rows, 256), (66,), (rows, 66)))
        (result,) = run(lambda x=x, bias=bias, add=add: linear(x, stacked, bias, add), rows)
        columns = [linear(x, part, bias[where].contiguous(), add[:, where].contiguous()) for part, where in stacked.columns()]
        assert torch.equal(result, torch.cat(columns, dim=1))


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.usefixtures("instruction_set")
def test_no_code_of_ggml_overflows(kind: str) -> None:
    """All codes and scales at their ends, all activations at theirs."""
    for byte in (0x00, 0xFF, 0x7F, 0x80):
        panels, weight = ggml_case(kind, 16, 1, byte)
        x = torch.tensor([[127.0], [-127.0], [127.0]]).expand(3, panels.shape[1]).contiguous()
        check(native_linear.linear(x, panels), x, panels, weight=weight)


@given(
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    rows=st.sampled_from((1, 2, 3, 5, 6, 7, 12, 13, 26)),
    num_out=st.integers(1, 70),
    num_in=st.integers(1, 300),
    padding=st.integers(0, 5),
)
@SETTINGS
def test_plain_weights(run: Run, dtype: torch.dtype, rows: int, num_out: int, num_in: int, padding: int) -> None:
    draw = torch.Generator().manual_seed(num_in)
    weight = torch.randn(num_out, num_in, generator=draw).to(dtype)
    x = torch.randn(rows, num_in + padding, generator=draw)[:, padding:]
    bias, add = torch.randn(num_out, generator=draw), torch.randn(rows, num_out, generator=draw)
    (result,) = run(lambda: native_linear.linear(x, weight, bias, add), rows)
    expected = x.double() @ weight.double().T + bias + add
    bound = 8 * ROUNDING * (x.double().abs() @ weight.double().abs().T + bias.abs() + add.abs())
    assert ((result - expected).abs() <= bound).all()


@pytest.mark.parametrize("kind", [*PACKED, *FORMS])
def test_a_result_depends_on_neither_threads_nor_other_rows_nor_instructions(kind: str) -> None:
    native = build.library("native")
    assert native is not None
    panels = ggml_panels(kind, 50, 2) if kind in FORMS else random_panels(kind, 50, 192, 64)
    x = torch.randn(29, panels.shape[1], generator=torch.Generator().manual_seed(5))
    found: dict[int, Tensor] = {}
    try:
        for isa in range(native.windlass_use_instruction_set(2) + 1):
            native.windlass_use_instruction_set(isa)
            for threads in (1, 2):
                program.set_threads(threads)
                together = native_linear.linear(x, panels)
                alone = torch.cat([native_linear.linear(row, panels) for row in x.split(1)])
                pairs = torch.cat([native_linear.linear(some, panels) for some in x.split(5)])
                assert torch.equal(together, alone) and torch.equal(together, pairs)
                assert torch.equal(found.setdefault(isa, together), together)
    finally:
        native.windlass_use_instruction_set(-1)
        program.set_threads(program.num_threads())
    # Plain code has no fused multiply-add to rely on.
    assert all(torch.equal(found[1], other) for isa, other in found.items() if isa > 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sign", [1, -1])
def test_nothing_overflows(run: Run, kind: str, sign: int) -> None:
    """All codes at their ends, all activations at theirs."""
    for byte in (0x00, 0xFF, 0x0F, 0xF0, 0x80, 0x7E):
        panels = random_panels(kind, 16, 128, 32)
        if kind == "fp8":
            panels.data.view(16, -1)[:, :128] = byte if byte & 127 != 127 else 0xFE
        else:
            panels.data.view(-1, panels.group_bytes)[:, : panels.codes_bytes] = byte
        x = torch.full((3, 128), 127.0 * sign)
        (result,) = run(lambda x=x, panels=panels: native_linear.linear(x, panels), 3)
        check(result, x, panels)


def test_every_number_of_fp8(run: Run) -> None:
    """Subnormals too; a product with unit vectors shows each."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes & 127 == 127] = 0
    panels = Panels.allocate("fp8", 8, 32, 32, scale_dtype=torch.float32)
    panels.put(0, codes.view(8, 32).view(torch.float8_e4m3fn), torch.ones(8, 1))
    for rows in (32, 6):
        units = torch.eye(32)[:rows].contiguous()
        (result,) = run(lambda units=units: native_linear.linear(units, panels), rows)
        assert torch.equal(result, panels.dense().T[:rows])


@pytest.mark.usefixtures("instruction_set")
def test_what_is_not_a_number_is_not_hidden() -> None:
    panels = random_panels("int4", 16, 64, 32)
    for bad in (float("nan"), float("inf"), -float("inf")):
        x = torch.ones(3, 64)
        x[1, 40] = bad
        result = native_linear.linear(x, panels)
        assert not result[1].isfinite().any()
        assert result[[0, 2]].isfinite().all()


def test_rows_of_nothing_and_of_almost_nothing(run: Run) -> None:
    panels = random_panels("int4_minima", 20, 64, 32)
    x = torch.zeros(4, 64)
    x[1] = 1e-38
    x[2] = 1e-30
    (result,) = run(lambda: native_linear.linear(x, panels), 4)
    assert torch.equal(result[:2], torch.zeros(2, 20))
    check(result, x, panels)


def test_fewer_rows_than_recorded() -> None:
    panels, counter = random_panels("int4", 40, 64, 32), torch.tensor([20], dtype=torch.int32)
    x = torch.randn(20, 64)
    with program.record(counter) as recorded:
        result = native_linear.linear(x, panels)
    for rows in (20, 1, 5, 0, 13):
        expected = native_linear.linear(x[:rows], panels) if rows else torch.empty(0, 40)
        counter[0] = rows
        recorded.run()
        assert torch.equal(result[:rows], expected)


def test_limits_of_the_machine_are_measured() -> None:
    assert 1e8 < native_limits.read_bytes_per_second(torch.ones(2**20, dtype=torch.int64)) < 1e13
    assert 1e8 < native_limits.int8_operations_per_second(times=20) < 1e15


def test_what_is_not_covered_is_left_to_the_reference() -> None:
    weight = torch.randn(8, 32)
    assert native_linear.linear(torch.randn(2, 32).double(), weight) is None
    assert native_linear.linear(torch.randn(2, 32), weight.double()) is None
    assert native_linear.linear(torch.randn(2, 8), weight.T) is None
    assert native_linear.linear(torch.randn(2, 16), weight) is None
    assert native_linear.linear(torch.randn(2, 2, 32), weight) is None
