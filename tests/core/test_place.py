"""Placement: every element of every tensor is on exactly the ranks it should be, and cuts fall only on the slice quantum."""

from __future__ import annotations

import itertools
from math import prod
from typing import NamedTuple

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from windlass.core.layout import Layout
from windlass.core.model import ModelSpec
from windlass.core.place import WHOLE, Placement, cut, local_bytes, local_experts, local_shape, place, slices, stages_of, stored
from windlass.core.rule import Axis, AxisName, Rule
from windlass.core.scheme import Scheme, scheme
from windlass.errors import Impossible
from windlass.model.families import describe, rules
from windlass.model.families.registry import known_models, spec_of

pytestmark = pytest.mark.pure

SPECS = {model.name: spec_of(model) for model in known_models()}
RULES = {name: rules(spec) for name, spec in SPECS.items()}

# --- cutting a line


@given(st.integers(1, 5000), st.integers(1, 300), st.lists(st.floats(0.1, 10), min_size=1, max_size=24))
@example(10944, 64, [1.0] * 16)
@example(10, 4, [1.0, 1.0, 1.0])
def test_cut_covers_once_on_the_quantum(count: int, quantum: int, shares: list[float]) -> None:
    pieces = -(-count // quantum)
    if pieces < len(shares):
        with pytest.raises(Impossible, match=f"gives {pieces} pieces"):
            cut(count, quantum, shares)
        return
    parts = cut(count, quantum, shares)
    assert len(parts) == len(shares)
    assert parts[0][0] == 0 and parts[-1][1] == count
    assert all(before[1] == after[0] for before, after in itertools.pairwise(parts))
    assert all(start < stop for start, stop in parts)
    assert all(start % quantum == 0 for start, _ in parts)


@given(st.integers(1, 5000), st.integers(1, 64), st.lists(st.floats(0.25, 4), min_size=1, max_size=12))
def test_cut_follows_the_shares_within_one_quantum(count: int, quantum: int, shares: list[float]) -> None:
    pieces = -(-count // quantum)
    ideal = [share / sum(shares) * pieces for share in shares]
    assume(min(ideal) >= 1)
    sizes = [-(-(stop - start) // quantum) for start, stop in cut(count, quantum, shares)]
    assert all(abs(size - want) < 1 + 1e-9 for size, want in zip(sizes, ideal, strict=True))


@given(st.integers(1, 2000), st.integers(1, 32))
def test_even_cuts_differ_by_one_at_most(count: int, ways: int) -> None:
    assume(count >= ways)
    sizes = [stop - start for start, stop in cut(count, 1, [1.0] * ways)]
    assert max(sizes) - min(sizes) <= 1


def test_cut_by_hand() -> None:
    assert cut(64, 1, [1.0] * 6) == ((0, 11), (11, 22), (22, 33), (33, 44), (44, 54), (54, 64))
    assert cut(10, 1, [3.0, 1.0, 1.0]) == ((0, 6), (6, 8), (8, 10))
    assert cut(1408, 128, [1.0] * 2) == ((0, 768), (768, 1408))
    assert cut(4, 1, [100.0, 1.0, 1.0]) == ((0, 2), (2, 3), (3, 4))  # everybody gets one


def test_stages() -> None:
    assert stages_of(80, 3) == ((0, 27), (27, 54), (54, 80))
    with pytest.raises(Impossible, match="more stages"):
        stages_of(4, 5)


# --- placing a model


class Case(NamedTuple):
    name: str
    layout: Layout
    how: Scheme
    shares: list[float] | None


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tp = draw(st.integers(1, 16))
    ep = draw(st.sampled_from([degree for degree in range(1, tp + 1) if tp % degree == 0]))
    how = scheme(
        draw(st.sampled_from(["bf16", "fp8", "int8", "int4"])),
        group=draw(st.sampled_from([None, 128, 64, 32])),
        zero_points=draw(st.booleans()),
    )
    shares = draw(st.none() | st.lists(st.floats(0.5, 4), min_size=tp, max_size=tp))
    layout = Layout(tp=tp, ep=ep, pp=draw(st.integers(1, 8)))
    return Case(draw(st.sampled_from(sorted(SPECS))), layout, how, shares)


def element_quantum(rule: Rule, how: Scheme, dim: int) -> int:
    return stored(rule, how).quantum(dim) if len(rule.axes) == 2 else 1


def smallest_quantum(axis: Axis, made: tuple[Rule, ...], how: Scheme) -> int:
    """By trying: the fewest things that are a whole number of quanta in every tensor that has them."""
    demands = {
        (other.unit, element_quantum(rule, how, dim))
        for rule in made
        for dim, other in enumerate(rule.axes)
        if (other.name, other.count) == (axis.name, axis.count)
    }
    return next(number for number in range(1, 100_000) if all(number * unit % quantum == 0 for unit, quantum in demands))


def placed(case: Case) -> Placement | None:
    """None where it is refused; a refusal must be due to an axis with fewer pieces than ranks."""
    made, spec = RULES[case.name], SPECS[case.name]
    try:
        return place(made, spec.num_layers, case.layout, case.how, shares=case.shares)
    except Impossible as error:
        assert "\n" not in str(error)
    short = case.layout.ep > max(rule.num_experts for rule in made) > 0
    for axis in {axis for rule in made for axis in rule.axes if axis.name not in WHOLE | {AxisName.KV_HEADS}}:
        ranks = case.layout.expert_tp if axis.name is AxisName.EXPERT_FFN else case.layout.tp
        short |= -(-axis.count // smallest_quantum(axis, made, case.how)) < ranks
    assert short, "refused without need"
    return None


def tiles(parts: list[tuple[int, int]], count: int) -> bool:
    """Consecutive, none empty, from 0 to count."""
    edges = [0, *(stop for _, stop in parts)]
    return [start for start, _ in parts] == edges[:-1] and edges[-1] == count and all(start < stop for start, stop in parts)


@given(cases())
def test_every_axis_is_covered(case: Case) -> None:
    placement = placed(case)
    assume(placement is not None)
    assert placement is not None
    split = {(axis.name, axis.count) for rule in RULES[case.name] for axis in rule.axes if axis.name not in WHOLE}
    assert {(made.name, made.count) for made in placement.cuts} == split
    for made in placement.cuts:
        parts = list(made.intervals)
        assert len(parts) == case.layout.tp
        if made.name is AxisName.KV_HEADS:
            continue
        per_expert = case.layout.expert_tp
        groups = [parts[first : first + per_expert] for first in range(0, len(parts), per_expert)]
        for group in groups if made.name is AxisName.EXPERT_FFN else [parts]:
            assert tiles(group, made.count)
    assert tiles(list(placement.stages), SPECS[case.name].num_layers)
    assert len(placement.stages) == case.layout.pp


@given(cases())
def test_cuts_fall_on_the_quantum_in_elements(case: Case) -> None:
    placement = placed(case)
    assume(placement is not None)
    assert placement is not None
    for rule in RULES[case.name]:
        for index in range(case.layout.tp):
            for dim, (start, stop) in enumerate(slices(rule, placement, index)):
                quantum = element_quantum(rule, case.how, dim)
                assert start % quantum == 0
                assert stop % quantum == 0 or stop == rule.shape[dim]


@given(cases())
@example(Case("Llama-2-70B", Layout(tp=6), scheme("bf16"), None))
@example(Case("Llama-2-70B", Layout(tp=16), scheme("bf16"), None))
@example(Case("StarCoder", Layout(tp=12), scheme("bf16"), None))
def test_kv_heads_are_those_that_the_query_heads_need(case: Case) -> None:
    placement = placed(case)
    assume(placement is not None)
    assert placement is not None
    kv = next((made for made in placement.cuts if made.name is AxisName.KV_HEADS), None)
    assume(kv is not None)
    assert kv is not None
    heads = next(made for made in placement.cuts if made.name is AxisName.HEADS)
    group = heads.count // kv.count
    for (first, last), (start, stop) in zip(heads.intervals, kv.intervals, strict=True):
        assert set(range(start, stop)) == {head // group for head in range(first, last)}


@given(cases())
def test_experts_are_partitioned(case: Case) -> None:
    placement = placed(case)
    assume(placement is not None)
    assert placement is not None
    experts = SPECS[case.name].experts
    if experts is None:
        assert placement.experts == ()
        assert local_experts(placement, case.layout, 0) == 0
        return
    assert len(placement.experts) == case.layout.ep
    assert tiles(list(placement.experts), experts.num_experts)
    held = [local_experts(placement, case.layout, index) for index in range(case.layout.tp)]
    assert sum(held) == experts.num_experts * case.layout.expert_tp
    assert sum(held[:: case.layout.expert_tp]) == experts.num_experts


def group_of(rule: Rule, layout: Layout) -> int:
    """Ranks that share one copy of the tensor."""
    return layout.expert_tp if rule.num_experts else layout.tp


def cut_dims(rule: Rule) -> list[int]:
    return [dim for dim, axis in enumerate(rule.axes) if axis.name not in WHOLE]


@given(cases())
def test_elements_and_bytes_add_up(case: Case) -> None:
    """Split axes: the ranks' parts are the tensor. Whole ones: a copy each. KV heads: at least the tensor."""
    placement = placed(case)
    assume(placement is not None)
    assert placement is not None
    for rule in RULES[case.name]:
        ranks, dims, how = group_of(rule, case.layout), cut_dims(rule), stored(rule, case.how)
        assert len(dims) <= 1
        elements = sum(prod(local_shape(rule, placement, index)) for index in range(ranks))
        found = sum(local_bytes(rule, placement, case.how, index) for index in range(ranks))
        whole = how.matrix_bytes(*rule.shape) if len(rule.shape) == 2 else rule.elements * how.bits // 8
        if not dims:
            assert (elements, found) == (ranks * rule.elements, ranks * whole)
        elif rule.axes[dims[0]].name is AxisName.KV_HEADS:
            assert elements >= rule.elements
            assert found >= whole
        else:
            # One scale per row: a cut along the inputs leaves every rank all the scales.
            repeated = (ranks - 1) * rule.shape[0] * how.scale_bytes if dims == [1] and how.group is None else 0
            assert (elements, found) == (rule.elements, whole + repeated)


@pytest.mark.parametrize("name", SPECS)
def test_one_device_holds_everything(name: str) -> None:
    placement = place(RULES[name], SPECS[name].num_layers, Layout(), scheme("int4"))
    assert placement.imbalance == 1.0
    for rule in RULES[name]:
        assert local_shape(rule, placement, 0) == rule.shape
        assert slices(rule, placement, 0) == tuple((0, size) for size in rule.shape)


# --- by hand


def cuts_of(
    name: str, layout: Layout, how: Scheme, shares: list[float] | None = None
) -> dict[AxisName, tuple[tuple[int, int], ...]]:
    return {made.name: made.intervals for made in place(RULES[name], SPECS[name].num_layers, layout, how, shares=shares).cuts}


def test_air_over_eight_in_int4() -> None:
    """12 heads of 128 each, one KV head each; 10,944 = 171 groups of 64 and 1,408 = 11 groups of 128 do not split evenly."""
    found = cuts_of("GLM-4.5-Air", Layout(tp=8), scheme("int4"))
    assert found[AxisName.HEADS] == tuple((12 * index, 12 * index + 12) for index in range(8))
    assert found[AxisName.KV_HEADS] == tuple((index, index + 1) for index in range(8))
    assert sorted({(stop - start) // 64 for start, stop in found[AxisName.FFN]}) == [21, 22]
    assert sorted({(stop - start) // 128 for start, stop in found[AxisName.EXPERT_FFN]}) == [1, 2]


def test_air_with_experts_spread() -> None:
    layout = Layout(tp=8, ep=4)
    placement = place(RULES["GLM-4.5-Air"], 46, layout, scheme("int4"))
    assert placement.experts == ((0, 32), (32, 64), (64, 96), (96, 128))
    found = {made.name: made.intervals for made in placement.cuts}
    assert found[AxisName.EXPERT_FFN] == ((0, 768), (768, 1408)) * 4
    assert local_experts(placement, layout, 5) == 32


def test_more_ranks_than_kv_heads() -> None:
    found = cuts_of("Llama-2-70B", Layout(tp=16), scheme("bf16"))
    assert found[AxisName.KV_HEADS] == tuple((index // 2, index // 2 + 1) for index in range(16))


def test_uneven_heads() -> None:
    """Six ranks and 64 heads: 11 or 10 each, and a KV head whose queries are on two ranks is on both."""
    found = cuts_of("Llama-2-70B", Layout(tp=6), scheme("bf16"))
    assert found[AxisName.HEADS][:2] == ((0, 11), (11, 22))
    assert found[AxisName.KV_HEADS][:2] == ((0, 2), (1, 3))


def imbalances(name: str, layout: Layout) -> dict[AxisName, float]:
    return {made.name: made.imbalance for made in place(RULES[name], SPECS[name].num_layers, layout, scheme("bf16")).cuts}


def test_imbalance() -> None:
    """Eleven heads where ten and two thirds are the mean. Equal copies, of KV heads or of experts' shards, are balanced."""
    assert imbalances("Llama-2-70B", Layout(tp=6))[AxisName.HEADS] == pytest.approx(11 * 6 / 64)
    assert set(imbalances("Llama-2-70B", Layout(tp=16)).values()) == {1.0}
    assert set(imbalances("GLM-4.5-Air", Layout(tp=8, ep=8)).values()) == {1.0}


def test_unlike_devices_take_unlike_shares() -> None:
    found = cuts_of("Llama-2-70B", Layout(tp=2), scheme("bf16"), [3.0, 1.0])
    assert found[AxisName.HEADS] == ((0, 48), (48, 64))
    assert found[AxisName.FFN] == ((0, 21504), (21504, 28672))


def test_heads_are_cut_in_whole_groups_of_the_output_projection() -> None:
    """Falcon's heads are 64 wide; groups of 128 inputs of the output projection are two heads."""
    placement = place(RULES["Falcon-40B"], 60, Layout(tp=8), scheme("int4"))
    heads = next(made for made in placement.cuts if made.name is AxisName.HEADS)
    assert heads.quantum == 2
    assert (
        next(m for m in place(RULES["Falcon-40B"], 60, Layout(tp=8), scheme("bf16")).cuts if m.name is AxisName.HEADS).quantum
        == 1
    )


def test_too_wide_is_refused_in_the_models_own_terms() -> None:
    with pytest.raises(Impossible, match=r"tp 16 is too large for expert_ffn \(1408 x 1\).*gives 11 pieces"):
        place(RULES["GLM-4.5-Air"], 46, Layout(tp=16), scheme("int4"))
    with pytest.raises(Impossible, match="heads"):
        place(RULES["GLM-4.7-Flash"], 47, Layout(tp=32), scheme("bf16"))


def odd_heads() -> ModelSpec:
    """Heads of 12, which eight zero points do not divide."""
    return describe(
        {"model_type": "llama", "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 12}
        | {"num_key_value_heads": 6, "head_dim": 12, "intermediate_size": 128, "max_position_embeddings": 64}
    )


def test_kv_heads_are_widened_to_the_quantum() -> None:
    """Packed zero points of two heads of 12 share a word, so that a KV head alone cannot be cut out."""
    made = rules(odd_heads())
    placement = place(made, 1, Layout(tp=4), scheme("int4", group=32, zero_points=True))
    kv = next(found for found in placement.cuts if found.name is AxisName.KV_HEADS)
    assert kv.quantum == 2
    assert kv.intervals == ((0, 2), (2, 4), (4, 6), (4, 6))  # queries 8, 9 and 10, 11 need one KV head each and get two
    for rule in made:
        for index in range(4):
            for dim, (start, stop) in enumerate(slices(rule, placement, index)):
                quantum = element_quantum(rule, scheme("int4", group=32, zero_points=True), dim)
                assert start % quantum == 0 and (stop % quantum == 0 or stop == rule.shape[dim])
