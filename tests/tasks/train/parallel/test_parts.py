"""The parts a trainer is made of, each by itself: schedule, loss, balance, Muon, layouts, first weights, counted FLOPs."""

from __future__ import annotations

import sys
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
if str(Path(__file__).parents[1]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parents[1]))

from made import tiny  # noqa: E402

from windlass.core.model import Router, Scoring  # noqa: E402
from windlass.core.recipe import sections as sections  # noqa: E402
from windlass.core.recipe.sections import (  # noqa: E402
    LossSection,
    ParallelSection,
    ScheduleSection,
)
from windlass.errors import Impossible  # noqa: E402
from windlass.tasks.plan.training.time.rates import flops_per_token as planned_flops  # noqa: E402
from windlass.tasks.train.model import losses  # noqa: E402
from windlass.tasks.train.model.balance import AddAuxiliaryLoss, BalanceContext, sequence_balance  # noqa: E402
from windlass.tasks.train.model.flops import flops_per_token, utilization  # noqa: E402
from windlass.tasks.train.model.init import InitialWeights  # noqa: E402
from windlass.tasks.train.optim.muon import Muon, orthogonalize  # noqa: E402
from windlass.tasks.train.optim.optimizer import Optimizers  # noqa: E402
from windlass.tasks.train.optim.schedule import lr_factor  # noqa: E402
from windlass.tasks.train.parallel.degrees import Degrees, degrees  # noqa: E402
from windlass.tasks.train.params.layout import ParameterLayout, TensorSlice  # noqa: E402
from windlass.tasks.train.step import rank_samples  # noqa: E402

pytestmark = pytest.mark.cpu


# --- schedule


@given(
    name=st.sampled_from(["constant", "cosine", "linear", "wsd"]),
    steps=st.integers(2, 300),
    warmup=st.integers(0, 50),
    final=st.floats(0, 1),
)
def test_rates_stay_within_bounds(name: Any, steps: int, warmup: int, final: float) -> None:
    section = ScheduleSection(name=name, steps=steps, warmup_steps=min(warmup, steps - 1), final=final)
    found = [lr_factor(section, step, steps) for step in range(steps)]
    assert all(0 <= one <= 1 + 1e-12 for one in found)
    assert all(one > 0 for one in found[: section.warmup_steps])
    after = found[section.warmup_steps :]
    assert all(one >= other - 1e-12 for one, other in pairwise(after))
    assert name == "constant" or len(after) < 2 or after[-1] == pytest.approx(final)


def test_stable_then_down() -> None:
    section = ScheduleSection(name="wsd", steps=100, warmup_steps=10, decay_steps=20, final=0.0)
    found = [lr_factor(section, step, 100) for step in range(100)]
    assert found[9:80] == [1.0] * 71
    assert found[80] == pytest.approx(19 / 20)
    assert found[99] == 0


# --- loss


@pytest.mark.parametrize("rows_of_a_slice", [1000, 3])
@pytest.mark.parametrize("z", [0.0, 0.3])
def test_the_sliced_loss_is_the_plain_one(monkeypatch: pytest.MonkeyPatch, rows_of_a_slice: int, z: float) -> None:
    monkeypatch.setattr(losses, "SLICE_LOGITS", rows_of_a_slice * 17)
    source = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(shape, dtype=torch.float64, generator=source).requires_grad_() for shape in ((11, 5), (17, 5)))
    targets = torch.randint(0, 17, (11,), generator=source)
    targets[[2, 7]] = -100
    logits = hidden @ head.t()
    plain = torch.nn.functional.cross_entropy(logits, targets, reduction="sum", ignore_index=-100)
    expected = plain + z * (logits.logsumexp(-1).square() * (targets != -100)).sum()
    total, entropy = losses.head_loss(hidden, head, targets, z)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(entropy, plain)
    for one, other in zip(*(torch.autograd.grad(3 * loss, (hidden, head)) for loss in (total, expected)), strict=True):
        torch.testing.assert_close(one, other)


# --- balance


def test_balance_is_one_where_all_are_alike() -> None:
    chosen = torch.tensor([[0, 1], [2, 3], [1, 2], [3, 0]])
    router = Router(scoring=Scoring.SIGMOID)
    assert sequence_balance(torch.zeros(4, 4), chosen, router, 4) == pytest.approx(1.0)
    # all the same two of four, and liked: more than one
    liked = torch.tensor([[9.0, 9.0, -9.0, -9.0]] * 4)
    assert sequence_balance(liked, torch.tensor([[0, 1]] * 4), router, 4) == pytest.approx(2.0, abs=1e-3)
    assert sequence_balance(liked, torch.tensor([[0, 1]] * 4), router, 2).shape == (2,)


def test_balance_is_the_papers() -> None:
    """arXiv 2412.19437, equations 17 to 20, written out."""
    source = torch.Generator().manual_seed(0)
    logits = torch.randn(12, 5, generator=source)
    chosen = logits.topk(2).indices
    expected = []
    for sequence in range(2):
        rows = range(6 * sequence, 6 * sequence + 6)
        total = 0.0
        for expert in range(5):
            f = 5 / (2 * 6) * sum(expert in chosen[row] for row in rows)
            p = sum(float(logits[row].sigmoid()[expert] / logits[row].sigmoid().sum()) for row in rows) / 6
            total += f * p
        expected.append(total)
    assert sequence_balance(logits, chosen, Router(scoring=Scoring.SIGMOID), 6).tolist() == pytest.approx(expected)


def test_a_loss_that_hangs_on_something_learns() -> None:
    carrier, weight = torch.ones(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    frame = BalanceContext(LossSection())
    carried = AddAuxiliaryLoss.apply(carrier, weight.square(), frame)
    assert torch.equal(carried, carrier)
    carried.sum().backward()
    assert carrier.grad.tolist() == [1, 1, 1]
    assert weight.grad == 4
    frame.scale = 3.0
    AddAuxiliaryLoss.apply(carrier, weight.square(), frame).sum().backward()
    assert weight.grad == 4 + 12


# --- Muon


def test_muon_is_torchs_own() -> None:
    source = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=source) for shape in ((6, 10), (9, 4))]
    ours, theirs = ([torch.nn.Parameter(weight.clone()) for weight in weights] for _ in range(2))
    one = Muon(ours, lr=0.1, weight_decay=0.05, momentum=0.9)
    other = torch.optim.Muon(theirs, lr=0.1, weight_decay=0.05, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        for mine, yours in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape, generator=source)
            yours.grad = mine.grad.clone()
        one.step()
        other.step()
    for mine, yours in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, yours, rtol=0.02, atol=5e-3)  # both work in bf16


def test_each_expert_is_made_orthogonal_by_itself() -> None:
    stack = torch.randn(3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = orthogonalize(stack)
    for expert in range(3):
        torch.testing.assert_close(whole[expert], orthogonalize(stack[expert]))
        values = torch.linalg.svdvals(whole[expert])
        assert 0.5 < float(values.min()) <= float(values.max()) < 1.5


def test_what_muon_moves() -> None:
    """Matrices and stacks of them; experts' biases, one below another, are none. A slice is not a matrix to be made orthogonal."""

    def layout(name: str, *held: tuple[int, int]) -> ParameterLayout:
        return ParameterLayout((TensorSlice(name, tuple(stop - start for start, stop in held), held),), 0)

    layouts = {
        "up": layout("layers.0.ffn.experts.up.weight", (0, 2), (0, 4), (0, 3)),
        "bias": layout("layers.0.ffn.experts.up.bias", (0, 2), (0, 4)),
        "o": layout("layers.0.mixer.o.weight", (0, 4), (0, 4)),
    }
    parameters = {name: torch.nn.Parameter(torch.zeros(one.shape)) for name, one in layouts.items()}
    by_muon, _ = Optimizers(sections.OptimizerSection(name="muon"), parameters, layouts).parts
    assert {id(one) for one in by_muon.param_groups[0]["params"]} == {id(parameters["up"]), id(parameters["o"])}
    cut = {"o": ParameterLayout((TensorSlice("layers.0.mixer.o.weight", (4, 4), ((0, 4), (0, 2))),), 0)}
    with pytest.raises(Impossible, match="tp splits them"):
        Optimizers(sections.OptimizerSection(name="muon"), {"o": torch.nn.Parameter(torch.zeros(4, 2))}, cut)


# --- layouts


@given(
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    starts=st.lists(st.integers(0, 5), min_size=4, max_size=4),
    world=st.integers(1, 5),
)
def test_rows_that_fsdp_leaves_are_found_again(sizes: list[int], starts: list[int], world: int) -> None:
    """Cut a parameter of several tensors in any number of chunks: every row of every tensor is in exactly one, where it says."""
    parts = tuple(
        TensorSlice(str(number), (20, 3), ((start, start + size), (0, 3)))
        for number, (size, start) in enumerate(zip(sizes, starts, strict=False))
    )
    layout = ParameterLayout(parts, 0)
    parameter = torch.arange(prod(layout.shape)).view(layout.shape)
    wholes = {part.name: torch.full((20, 3), -1) for part in parts}
    for part, view in layout.split(parameter):
        wholes[part.name][slice(*part.held[0])] = view
    chunk = -(-layout.shape[0] // world)
    seen = 0
    for rank in range(world):
        first = min(rank * chunk, layout.shape[0])
        local = parameter[first : first + chunk]
        for part, view in layout.split_rows(local, first):
            assert torch.equal(wholes[part.name][slice(*part.held[0])], view)
            seen += view.shape[0]
    assert seen == layout.shape[0]


# --- first weights


def test_first_weights_depend_on_names_alone() -> None:
    spec, rules = tiny("glm4_moe")
    one, other = InitialWeights(spec, rules), InitialWeights(spec, rules)
    other.matrix("layers.1.mixer.o.weight")  # asked in another order
    for made in (one, other):
        made.matrix("embed.weight")
    assert torch.equal(one.matrix("layers.0.mixer.q.weight"), other.matrix("layers.0.mixer.q.weight"))
    assert not torch.equal(one.matrix("layers.1.mixer.q.weight"), one.matrix("layers.0.mixer.q.weight"))
    assert float(one.matrix("embed.weight").detach().std()) == pytest.approx(0.02, rel=0.1)
    assert float(one.matrix("layers.0.mixer.o.weight").detach().std()) == pytest.approx(0.02 / 6**0.5, rel=0.1)
    assert one.vector("norm.weight").tolist() == [1.0] * 24
    assert not one.vector("layers.1.ffn.router.correction").requires_grad


# --- who does what


@given(batch=st.integers(1, 8), size=st.integers(1, 8), first=st.integers(0, 100))
def test_every_sample_is_somebodys(batch: int, size: int, first: int) -> None:
    shares = [rank_samples(first, batch * size, rank, size) for rank in range(size)]
    assert [sample for start, count in shares for sample in range(start, start + count)] == list(
        range(first, first + batch * size)
    )


@pytest.mark.parametrize(
    ("parallel", "world", "expected"),
    [
        ({}, 4, Degrees(pp=1, copies=4, ep=1, tp=1, fsdp=4)),
        ({"zero": 0}, 4, Degrees(pp=1, copies=4, ep=1, tp=1, fsdp=1)),
        ({"tp": 2, "pp": 2}, 8, Degrees(pp=2, copies=2, ep=1, tp=2, fsdp=1)),
        ({"ep": 4, "fsdp": 2}, 8, Degrees(pp=1, copies=2, ep=4, tp=1, fsdp=2)),
    ],
)
def test_degrees(parallel: dict[str, int], world: int, expected: Degrees) -> None:
    assert degrees(ParallelSection(**parallel), world) == expected


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"tp": 3}, "needs a multiple of 3 processes"),
        ({"ep": 3}, "must divide the number of data-parallel ranks"),
        ({"fsdp": 3}, "it may be 1, 8"),
        ({"cp": 2}, "can be planned but not trained"),
        ({"schedule": "dualpipe"}, "1f1b"),
        ({"zero": 1}, "deepspeed"),
        ({"virtual_stages": 2}, "interleaved"),
    ],
)
def test_layouts_that_do_not_divide(parallel: dict[str, Any], words: str) -> None:
    with pytest.raises(Impossible, match=words):
        degrees(ParallelSection(**parallel), 8)


def test_flops_are_the_plans() -> None:
    spec, rules = tiny("glm4_moe", num_nextn_predict_layers=1)
    for ahead in (False, True):
        expected = planned_flops(spec, rules, 64, next_token=ahead).model
        assert flops_per_token(spec, rules, 64, next_token=ahead) == expected
    assert utilization(6e9, 1000, 1e13) == pytest.approx(0.6)
