"""How machines share a model: tables of nodes, and what the plan of an epoch makes of them."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.layout import Layout
from windlass.core.place import place
from windlass.core.ranks.epoch import EpochPlan, Node
from windlass.core.scheme import scheme
from windlass.errors import DoesNotFit, Impossible
from windlass.model.families import rules
from windlass.model.families.registry import find, spec_of
from windlass.tasks.plan.inference.epoch import EpochRequest, replan

pytestmark = pytest.mark.pure

GB = 10**9
SMALL, DENSE, EXPERTS, LATENT = "SmolLM2-135M-Instruct", "Qwen3-8B", "GLM-4.5-Air", "GLM-4.7-Flash"


@cache
def asked(name: str, quant: str = "int4", wanted: Layout | None = None, context: int = 2048) -> EpochRequest:
    known = find(name)
    assert known is not None
    spec = spec_of(known)
    group = 32 if name == SMALL else 128
    return EpochRequest(spec=spec, rules=rules(spec), scheme=scheme(quant, group), context_tokens=context, pinned=wanted)


def node(name: str, memory: float = 16, speed: float = 10, **others: object) -> Node:
    return Node(name=name, memory_bytes=int(memory * GB), bandwidth=speed * 1e9, cores=4, **others)  # type: ignore[arg-type]


def said(plan: EpochPlan, choice: str) -> str:
    return next((f"{reason.value}: {reason.why}" for reason in plan.reasons if reason.choice == choice), "")


def check(question: EpochRequest, plan: EpochPlan, nodes: list[Node]) -> None:
    """Whatever is decided: every rank has a node, the root the first, nobody more than its memory; and it can be placed so."""
    assert len(plan.nodes) == plan.layout.world and plan.nodes[0] == 0
    for number, one in enumerate(nodes):
        held = [size for rank, size in enumerate(plan.rank_bytes) if plan.nodes[rank] == number]
        assert len(held) <= one.num_ranks and sum(held) <= one.memory_bytes
    assert not plan.shares or (len(plan.shares) == plan.layout.tp and abs(sum(plan.shares) - 1) < 1e-6)
    assert not plan.stages or len(plan.stages) == plan.layout.pp
    made = place(
        question.rules,
        question.spec.num_layers,
        plan.layout,
        question.scheme,
        shares=plan.shares or None,
        stages=plan.stages or None,
    )
    assert made.stages[-1][1] == question.spec.num_layers
    assert plan.imbalance >= 0.999 and plan.tokens_per_second > 0


def planned(question: EpochRequest, *nodes: Node) -> EpochPlan:
    plan = replan(question, nodes)
    check(question, plan, list(nodes))
    return plan


def test_like_nodes_share_alike() -> None:
    plan = planned(asked(DENSE), node("root"), node("a"), node("b"))
    assert (plan.layout, plan.shares, plan.stages) == (Layout(tp=3), (), ())
    assert plan.imbalance < 1.05


def test_measuring_again_changes_nothing() -> None:
    """A few percent more or less are the noise of a measurement, and other shares would mean other weights to send."""
    first = planned(asked(DENSE), node("root", speed=10), node("a", speed=10))
    again = planned(asked(DENSE), node("root", speed=10.2), node("a", speed=9.9))
    assert (first.layout, first.shares) == (again.layout, again.shares) == (Layout(tp=2), ())


def test_quick_nodes_take_more() -> None:
    plan = planned(asked(DENSE), node("root", speed=10), node("a", speed=30))
    assert plan.layout == Layout(tp=2)
    assert plan.shares[0] == pytest.approx(0.25, abs=0.03)
    even = planned(asked(DENSE), node("root", speed=10), node("a", speed=10))
    assert plan.tokens_per_second > 1.4 * even.tokens_per_second
    assert "25%" in said(plan, "shares").replace("26%", "25%").replace("24%", "25%")


def test_small_nodes_take_less_whatever_their_speed() -> None:
    plan = planned(asked(DENSE, wanted=Layout(tp=2)), node("root", memory=16), node("a", memory=2.5, speed=40))
    assert plan.shares[1] < 0.35 and plan.rank_bytes[1] <= 2.5 * GB
    assert said(plan, "imbalance").startswith(f"{plan.imbalance:.2f}x: root"), "who is slow is said"


def test_a_node_that_is_too_small_is_left_out() -> None:
    plan = planned(asked(DENSE), node("root"), node("a"), node("tiny", memory=0.2))
    assert set(plan.nodes) == {0, 1}
    assert said(plan, "left out").startswith("tiny")


def test_unlike_stages_by_memory_and_speed() -> None:
    question = asked(DENSE, wanted=Layout(pp=2))
    even = planned(question, node("root"), node("a"))
    layers = [stop - start for start, stop in even.stages]
    assert abs(layers[0] - layers[1]) <= 6, "the head weighs on the last"
    quick = planned(question, node("root", speed=30), node("a", speed=10))
    assert quick.stages[0][1] > even.stages[0][1]
    small = planned(question, node("root", memory=3), node("a", memory=16))
    assert small.stages[0][1] < even.stages[0][1]


def test_more_ranks_than_kv_heads() -> None:
    nodes = [node(name) for name in ("root", "a", "b", "c", "d")]
    plan = planned(asked(SMALL, "int8", Layout(tp=5)), *nodes)  # 9 heads, 3 of keys and values
    assert plan.layout == Layout(tp=5) and plan.imbalance > 1.05
    assert "longer" in said(plan, "imbalance")


def test_more_ranks_than_heads_can_be_stages() -> None:
    nodes = [node(f"n{number}") for number in range(11)]
    plan = planned(asked(SMALL, "int8"), *nodes)
    assert plan.layout == Layout(pp=11)
    with pytest.raises(Impossible, match="heads"):
        replan(asked(SMALL, "int8", Layout(tp=11)), nodes)


def test_slow_links_make_stages() -> None:
    """Two sums a layer, each as long as a message takes to arrive: at a tenth of a second a token is better passed on."""
    near = planned(asked(DENSE), node("root"), node("a", link_seconds=20e-6))
    far = planned(asked(DENSE), node("root"), node("a", link_seconds=5e-3))
    assert (near.layout, far.layout) == (Layout(tp=2), Layout(pp=2))
    assert near.tokens_per_second > far.tokens_per_second


def test_what_fits_only_in_stages() -> None:
    """A latent cache has no heads to cut: every tp rank keeps all of it, every stage that of its own layers."""
    nodes = [node("root", 17, 40), node("a", 17, 40)]
    plan = planned(asked(LATENT, context=198_000), *nodes)
    assert plan.layout == Layout(pp=2) and "no other layout fits" in said(plan, "layout")
    with pytest.raises(DoesNotFit):
        replan(asked(LATENT, wanted=Layout(tp=2), context=198_000), nodes)
    assert planned(asked(LATENT), *nodes).layout == Layout(tp=2), "with a short context either does, and this one is quicker"


def test_experts_spread_where_asked_for() -> None:
    nodes = [node("root", 40, 40), node("a", 40, 40)]
    assert planned(asked(EXPERTS, wanted=Layout(tp=2, ep=2)), *nodes).layout == Layout(tp=2, ep=2)
    assert planned(asked(EXPERTS), *nodes).layout.tp == 2
    three = [*nodes, node("b", 40, 80)]  # 128 experts over three, of which one is quick
    plan = planned(asked(EXPERTS, wanted=Layout(tp=3, ep=3)), *three)
    assert plan.layout == Layout(tp=3, ep=3) and plan.shares[plan.nodes.index(2)] > 0.4


def test_what_is_missing_is_said_to_the_byte() -> None:
    nodes = [node("root", memory=2), node("a:9998", memory=2)]
    with pytest.raises(DoesNotFit, match="a:9998") as raised:
        replan(asked(DENSE), nodes)
    assert raised.value.short_bytes > 0 and "\n" not in str(raised.value)
    enough = [node("root", memory=2 + raised.value.short_bytes / GB), node("a:9998", memory=2 + raised.value.short_bytes / GB)]
    planned(asked(DENSE), *enough)


def test_a_pinned_layout_holds_while_there_are_ranks_for_it() -> None:
    question = asked(DENSE, wanted=Layout(pp=3))
    three = planned(question, node("root"), node("a"), node("b"))
    assert three.layout == Layout(pp=3) and said(three, "layout").endswith("pinned")
    two = planned(question, node("root"), node("b"))
    assert two.layout.world == 2 and "the pinned" in said(two, "layout")
    four = planned(question, node("root"), node("a"), node("b"), node("c", memory=8))
    assert four.layout == Layout(pp=3) and said(four, "left out").startswith("c:")


def test_several_ranks_a_node_sit_together() -> None:
    plan = planned(asked(DENSE, wanted=Layout(tp=2, pp=2)), node("root", num_ranks=2), node("a", num_ranks=2))
    assert plan.nodes == (0, 0, 1, 1)


def test_one_node_is_a_fleet_too() -> None:
    plan = planned(asked(DENSE), node("root"))
    assert (plan.layout, plan.nodes) == (Layout(), (0,))


@given(st.lists(st.tuples(st.floats(0.5, 20), st.floats(5, 50)), min_size=1, max_size=5))
def test_whatever_is_planned_fits(sizes: list[tuple[float, float]]) -> None:
    nodes = [node(f"n{number}", memory, speed) for number, (memory, speed) in enumerate(sizes)]
    try:
        plan = replan(asked(DENSE), nodes)
    except DoesNotFit as error:
        assert error.short_bytes > 0
        return
    check(asked(DENSE), plan, nodes)
