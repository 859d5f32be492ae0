"""Who answers a fleet: a saved plan while its machines are here, the planner's formulas when they are not."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from windlass.core.launch import Launch, RandomInit
from windlass.core.layout import Layout
from windlass.core.ranks.epoch import EpochPlan, Node, planned_epoch
from windlass.errors import Impossible
from windlass.model.bundled.models import find_bundled
from windlass.open.fleet import Replanner, check_split, crowded_note, open_fleet
from windlass.tasks.plan.inference.assemble import make_plan
from windlass.tasks.plan.inference.search.request import PlanRequest

pytestmark = pytest.mark.cpu

CONFIG = json.loads((Path(__file__).parents[1] / "model" / "families" / "tiny" / "llama.json").read_text())
LAUNCH = Launch(model="tiny", random_weights=RandomInit(config=CONFIG, scheme="bf16"))
NODES = [Node(name=name, memory_bytes=8 * 10**9, bandwidth=1e10) for name in ("root", "a", "b")]


def saved() -> EpochPlan:
    """Three unlike machines, as `windlass plan --save` has them."""
    from windlass.core.hardware.parse import parse_hardware
    from windlass.model.families import describe, rules

    spec = describe(CONFIG, "tiny")
    unlike = parse_hardware("1x(cpu:2,ram=8GB,bw=20GB)+2x(cpu:2,ram=8GB,bw=10GB)@1Gb")
    question = PlanRequest(spec=spec, rules=rules(spec), hardware=unlike, context_tokens=64, quant="bf16", pins={"tp": 3})
    return planned_epoch(make_plan(question))


def test_a_saved_plan_is_what_is_run() -> None:
    plan = saved()
    assert plan.layout == Layout(tp=3) and plan.nodes == (0, 1, 2)
    assert plan.shares[0] == pytest.approx(0.5, abs=0.02) and plan.tokens_per_second > 0
    launch = msgspec.structs.replace(LAUNCH, workers=("a:9998", "b:9998"), layout=plan.layout, planned=plan)
    assert Replanner(launch).replan(NODES) is plan


def test_when_a_machine_of_it_is_gone_the_rest_is_planned_anew() -> None:
    launch = msgspec.structs.replace(LAUNCH, workers=("a:9998", "b:9998"), layout=Layout(tp=3), planned=saved())
    found = Replanner(launch).replan(NODES[:2])
    assert found.layout.world == 2 and set(found.nodes) == {0, 1}
    assert any("the pinned" in reason.why for reason in found.reasons)


def test_what_an_operator_is_told() -> None:
    plan = saved()
    assert any("tokens/s predicted" in line for line in plan.remarks)
    assert any(line.startswith("shares 50%") for line in plan.remarks)


@pytest.mark.parametrize(("ranks", "cores", "said"), [(8, 2, True), (3, 2, True), (2, 2, False), (1, 1, False), (2, 1, True)])
def test_more_ranks_than_cores_are_said(ranks: int, cores: int, said: bool) -> None:
    note = crowded_note(Layout(tp=4, pp=2), ranks, cores)
    assert bool(note) == said
    assert not said or (f"{ranks} processes" in note and "tp=4" in note)


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        (Layout(tp=4, pp=2), "heads"),
        (Layout(tp=2), "whole experts on each rank"),
        (Layout(tp=2, ep=2), "shared_ffn"),
        (Layout(pp=2), ""),
        (Layout(pp=9), ""),
        (Layout(pp=10), "more stages than the model has layers"),
    ],
)
def test_a_split_that_cannot_be_is_refused_before_anything_starts(layout: Layout, why: str) -> None:
    """tiny-glm: 8 heads of 32 and experts of 128, in groups of 128."""
    launch = Launch(model=str(find_bundled("tiny-glm")), device="cpu", layout=layout)
    said: list[str] = []
    if why:
        with pytest.raises(Impossible, match=why):
            open_fleet(launch, lambda _: None, said.append)
    else:
        check_split(launch)
    assert not said, "that it would be slow"


def test_a_split_of_random_weights_is_checked_too() -> None:
    check_split(LAUNCH)
    with pytest.raises(Impossible, match="heads"):
        check_split(msgspec.structs.replace(LAUNCH, layout=Layout(tp=64)))
