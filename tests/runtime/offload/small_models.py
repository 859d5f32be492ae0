"""Small models of every family with random weights, run through the Engine, with any placement."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from windlass.core.launch import Launch, RandomInit
from windlass.core.layout import Layout, coordinates
from windlass.core.place import place
from windlass.core.request import Sampling
from windlass.core.scheme import scheme
from windlass.core.tiers.demand import demand_of, planned_tensors
from windlass.core.tiers.values import Demand, TierPlacement, in_blocks
from windlass.model.families import describe, rules
from windlass.runtime.engine.engine import Engine
from windlass.runtime.engine.load import load_model
from windlass.runtime.engine.protocol import Submit

TINY = Path(__file__).parents[2] / "model" / "families" / "tiny"
FAMILIES = tuple(sorted(path.stem for path in TINY.glob("*.json") if path.stem not in ("evo2", "glm_moe_dsa")))
"""All that can be run."""

ONE = Layout()

Answer = list[tuple[int, float, tuple[tuple[int, float], ...]]]
"""Token, its log-probability, and those of the likeliest."""


@cache
def config(name: str) -> dict[str, Any]:
    return json.loads((TINY / f"{name}.json").read_text())


@cache
def demand(name: str, how: str = "bf16", layout: Layout = ONE, rank: int = 0) -> Demand:
    spec = describe(config(name), name)
    table, stored, at = rules(spec), scheme(how), coordinates(layout, rank)
    placement = place(table, spec.num_layers, layout, stored)
    return demand_of(planned_tensors(table, spec, placement, layout, stored, at.tp, placement.stages[at.pp]), spec)


def placed(name: str, units: frozenset[int], slots: int, how: str = "bf16", layout: Layout = ONE, rank: int = 0) -> TierPlacement:
    """These units, and, with any slots, the experts on disk."""
    found = demand(name, how, layout, rank)
    pool = found.experts if slots else None
    sizes = [in_blocks(found.units[index].num_bytes) for index in units]
    return TierPlacement(
        disk_units=tuple(unit.name for index, unit in enumerate(found.units) if index in units),
        ring_bytes=2 * max(sizes, default=0),
        num_experts=pool.num_experts if pool else 0,
        expert_bytes=in_blocks(pool.expert_bytes) if pool else 0,
        host_slots=slots if pool else 0,
        disk_experts=pool.num_experts if pool else 0,
        disk_bytes=sum(sizes) + (pool.num_experts * in_blocks(pool.expert_bytes) if pool else 0),
    )


def everything(name: str, layout: Layout, slots: int) -> tuple[TierPlacement, ...]:
    """Of each rank, all that can be is on disk."""

    def one(rank: int) -> TierPlacement:
        units = frozenset(range(len(demand(name, layout=layout, rank=rank).units)))
        return placed(name, units, slots, layout=layout, rank=rank)

    return tuple(one(rank) for rank in range(layout.world))


def launch(
    name: str, folder: Path | None = None, tiers: tuple[TierPlacement, ...] = (), how: str = "bf16", layout: Layout = ONE
) -> Launch:
    return Launch(
        layout=layout,
        model=name,
        device="cpu",
        random_weights=RandomInit(config=config(name), scheme=how),
        context_tokens=64,
        max_sequences=4,
        max_step_tokens=24,
        kv_bytes=2**20,
        disk_folder=None if folder is None else str(folder),
        tiers=tiers,
    )


def answers(engine: Engine) -> list[Answer]:
    """Of three prompts of different lengths at once, cut into several steps."""
    for number, length in enumerate((37, 5, 18)):
        prompt = [(7 * number + 3 * place) % 90 for place in range(length)]
        engine.submit(Submit(id=number, token_ids=prompt, sampling=Sampling(temperature=0.0), max_tokens=6, logprobs=2))
    found: list[Answer] = [[], [], []]
    while engine.has_work:
        for output in engine.step():
            found[output.id] += [
                (one.token_id, one.logprob, tuple((top.token_id, top.logprob) for top in one.top)) for one in output.logprobs
            ]
    assert all(len(answer) == 6 for answer in found)
    return found


@cache
def expected(name: str, how: str = "bf16") -> list[Answer]:
    return answers(load_model(launch(name, how=how))[0])
