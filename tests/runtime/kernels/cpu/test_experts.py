"""The fused routed feed-forward equals its parts: the products of test_native_linear.py, an activation, a weighted sum."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from windlass.core.model import Activation
from windlass.runtime.kernels import build
from windlass.runtime.kernels.arguments import ExpertsArgs
from windlass.runtime.kernels.cpu import experts as native_experts
from windlass.runtime.kernels.cpu import linear as native_linear
from windlass.runtime.kernels.ops import activate, experts
from windlass.runtime.kernels.packing.panels import Panels
from windlass.runtime.kernels.program import program

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(build.library("native") is None and not build._compiler(), reason="no C++ compiler"),
]

SETTINGS = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
KINDS = ("int4", "int4_zeros", "int4_minima", "int8", "fp8", "bfloat16", "float32")
Run = Callable[..., tuple[Tensor, ...]]
Matrix = Tensor | Panels


def stacked(kind: str, num_experts: int, num_out: int, num_in: int, seed: int) -> Matrix:
    draw = torch.Generator().manual_seed(seed)
    if kind in ("bfloat16", "float32") or num_in % 32:
        dtype = torch.float32 if kind == "float32" else torch.bfloat16
        return (torch.randn(num_experts, num_out, num_in, generator=draw) / num_in**0.5).to(dtype)
    scale = torch.float32 if kind == "fp8" else torch.float16
    return Panels.random(kind, num_out, num_in, 32, num_experts, scale, deviation=num_in**-0.5, seed=seed)


def one(matrix: Matrix, expert: int) -> Matrix:
    if isinstance(matrix, Tensor):
        return matrix[expert]
    return dataclasses.replace(matrix, data=matrix.expert_data(expert), num_experts=0)


def chosen(rows: int, num_experts: int, active: int, seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(num_experts, generator=draw)[:active] for _ in range(rows)])
    return ids.int(), torch.rand(rows, active, generator=draw)


def by_parts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Matrix, down: Matrix, activation: Activation, **more: object
) -> Tensor:
    """In fp64 where the parts are added up, expert by expert."""
    gate_up_bias, down_bias, add = more["gate_up_bias"], more["down_bias"], more["add"]
    total = (torch.zeros_like(x) if add is None else add).double()
    for row in range(len(x)):
        for expert, weight in zip(ids[row].tolist(), weights[row].tolist(), strict=True):
            inner = native_linear.linear(
                x[row : row + 1], one(gate_up, expert), None if gate_up_bias is None else gate_up_bias[expert]
            )
            hidden = activate.reference(inner, activation, True, more["clamp"])
            said = native_linear.linear(hidden, one(down, expert), None if down_bias is None else down_bias[expert])
            total[row] += weight * said[0].double()
    return total


@given(
    kinds=st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)),
    rows=st.sampled_from((1, 2, 3, 17)),
    num_experts=st.integers(1, 6),
    width=st.sampled_from((32, 64, 96, 48, 20)),
    activation=st.sampled_from(Activation),
    with_biases=st.booleans(),
    seed=st.integers(0, 50),
)
@SETTINGS
def test_equals_its_parts(
    run: Run,
    kinds: tuple[str, str],
    rows: int,
    num_experts: int,
    width: int,
    activation: Activation,
    with_biases: bool,
    seed: int,
) -> None:
    hidden, active = 64, min(num_experts, 1 + seed % 3)
    gate_up, down = (
        stacked(kinds[0], num_experts, 2 * width, hidden, seed),
        stacked(kinds[1], num_experts, hidden, width, seed + 1),
    )
    draw = torch.Generator().manual_seed(seed)
    x, (ids, weights) = torch.randn(rows, hidden, generator=draw), chosen(rows, num_experts, active, seed)
    more: dict[str, object] = dict.fromkeys(("gate_up_bias", "down_bias", "clamp", "add"))
    if with_biases:
        more = {
            "gate_up_bias": torch.randn(num_experts, 2 * width, generator=draw),
            "down_bias": torch.randn(num_experts, hidden, generator=draw),
            "clamp": 1.25,
            "add": torch.randn(rows, hidden, generator=draw),
        }
    (result,) = run(lambda: native_experts.experts(ExpertsArgs(x, ids, weights, gate_up, down, activation, **more)), rows)
    expected = by_parts(x, ids, weights, gate_up, down, activation, **more)
    # An activation that differs in its last bit may be rounded to the next of 254 steps.
    steps = 0.01 if isinstance(down, Panels) and down.kind != "fp8" else 2e-5
    assert (result - expected).abs().max() <= steps * expected.abs().max()
    reference = experts.reference(ExpertsArgs(x, ids, weights, gate_up, down, activation, **more))
    assert (result - reference).abs().max() <= 0.04 * reference.abs().max()
    if not any(isinstance(matrix, Panels) for matrix in (gate_up, down)):
        assert (result - reference).abs().max() <= 2e-5 * reference.abs().max()


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_a_result_depends_on_neither_threads_nor_other_rows(kind: str) -> None:
    gate_up, down = stacked(kind, 5, 128, 64, 1), stacked(kind, 5, 64, 64, 2)
    x, (ids, weights) = torch.randn(31, 64, generator=torch.Generator().manual_seed(3)), chosen(31, 5, 3, 4)
    found: list[Tensor] = []
    try:
        for threads in (1, 2):
            program.set_threads(threads)
            for size in (1, 2, 6, 31):
                parts = zip(x.split(size), ids.split(size), weights.split(size), strict=True)
                done = [native_experts.experts(ExpertsArgs(*part, gate_up, down, Activation.SILU)) for part in parts]
                found.append(torch.cat([part for part in done if part is not None]))
    finally:
        program.set_threads(program.num_threads())
    assert all(torch.equal(found[0], other) for other in found)


def test_rows_may_crowd_on_one_expert_or_find_theirs_elsewhere() -> None:
    """An expert that is not here (another rank's, say) adds nothing."""
    gate_up, down = stacked("int4", 4, 64, 64, 1), stacked("int4", 4, 64, 32, 2)
    x = torch.randn(40, 64)
    ids, weights = torch.full((40, 2), 3, dtype=torch.int32), torch.rand(40, 2)
    ids[:, 1] = -1
    result = native_experts.experts(ExpertsArgs(x, ids, weights, gate_up, down, Activation.GELU))
    lone = native_experts.experts(
        ExpertsArgs(x, ids[:, :1].contiguous(), weights[:, :1].contiguous(), gate_up, down, Activation.GELU)
    )
    assert torch.equal(result, lone)
    ids[:, 1] = 4
    assert torch.equal(native_experts.experts(ExpertsArgs(x, ids, weights, gate_up, down, Activation.GELU)), lone)
    add = torch.randn(40, 64)
    nobody = native_experts.experts(ExpertsArgs(x, torch.full_like(ids, -1), weights, gate_up, down, Activation.GELU, add=add))
    assert torch.equal(nobody, add)


def test_what_is_not_covered_is_left_to_the_reference() -> None:
    gate_up, down = stacked("float32", 2, 64, 32, 1), stacked("float32", 2, 32, 32, 2)
    x, (ids, weights) = torch.randn(3, 32), chosen(3, 2, 1, 0)
    assert native_experts.experts(ExpertsArgs(x, ids, weights, gate_up, down, Activation.SILU)) is not None
    assert native_experts.experts(ExpertsArgs(x, ids.long(), weights, gate_up, down, Activation.SILU)) is None
    assert native_experts.experts(ExpertsArgs(x.double(), ids, weights, gate_up, down, Activation.SILU)) is None
    assert native_experts.experts(ExpertsArgs(x, ids, weights, gate_up.double(), down, Activation.SILU)) is None
