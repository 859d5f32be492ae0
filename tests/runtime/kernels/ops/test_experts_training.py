"""One product for all experts, against a loop over them: what they say and every gradient. On the CPU, where the same operators exist."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from windlass.core.model import Activation  # noqa: E402
from windlass.runtime.kernels.arguments import ExpertsArgs  # noqa: E402
from windlass.runtime.kernels.ops import experts_training  # noqa: E402
from windlass.runtime.kernels.ops.experts import reference  # noqa: E402

pytestmark = pytest.mark.cpu

ROWS, HIDDEN, WIDTH, EXPERTS, ACTIVE = 37, 16, 24, 6, 3


def inputs(*, elsewhere: bool = False, idle: bool = False) -> tuple[Any, ...]:
    """`elsewhere`: some ids are other ranks'. `idle`: expert 2 gets nothing."""
    source = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(EXPERTS + 4 * elsewhere, generator=source)[:ACTIVE] for _ in range(ROWS)]).int()
    if elsewhere:
        ids -= 2
    if idle:
        ids[ids == 2] = 3
    shapes = ((ROWS, HIDDEN), (ROWS, ACTIVE), (EXPERTS, 2 * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH))
    x, shares, gate_up, down = (torch.randn(shape, generator=source).requires_grad_() for shape in shapes)
    return x, ids, shares, gate_up, down


@pytest.mark.parametrize("case", [{}, {"elsewhere": True}, {"idle": True}], ids=["all here", "some elsewhere", "one idle"])
@pytest.mark.parametrize("activation", [Activation.SILU, Activation.CLAMPED_SWIGLU])
def test_one_product_is_the_loop(case: dict[str, bool], activation: Activation) -> None:
    x, ids, shares, gate_up, down = inputs(**case)
    learning = (x, shares, gate_up, down)
    expected = reference(ExpertsArgs(x, ids, shares, gate_up, down, activation, clamp=1.5, add=x))
    found = experts_training.experts(ExpertsArgs(x, ids, shares, gate_up, down, activation, clamp=1.5, add=x))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    for one, other in zip(*(torch.autograd.grad((said * weight).sum(), learning) for said in (found, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)


def test_slots_are_aligned_and_nobody_shares_one() -> None:
    _, ids, *_ = inputs(elsewhere=True)
    places = experts_training.arranged(ids, EXPERTS)
    ends = places.ends.tolist()
    assert all(end % experts_training.ALIGNED_ROWS == 0 for end in ends)
    assert sorted(ends) == ends
    assert ends[-1] < len(places.rows)
    used = places.slots[places.is_local]
    assert len(used.unique()) == len(used)
    begins = [0, *ends[:-1]]
    for choice, slot in enumerate(places.slots.tolist()):
        expert = int(ids.flatten()[choice])
        if 0 <= expert < EXPERTS:
            assert begins[expert] <= slot < ends[expert]
            assert places.rows[slot] == choice // ACTIVE
        else:
            assert slot >= ends[-1]
