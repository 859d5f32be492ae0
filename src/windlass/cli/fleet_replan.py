"""Who answers when a fleet asks how its machines are to share a model: the planner's formulas, or a saved plan while its machines are all here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from windlass.core.epoch import EpochPlan, Node
from windlass.core.model import ModelSpec
from windlass.core.plan import Plan
from windlass.core.rule import Rule
from windlass.core.scheme import Scheme, scheme
from windlass.plan.epoch import Asked, replan

if TYPE_CHECKING:
    from windlass.engine.protocol import Launch

USUAL_CONTEXT = 2048
"""Tokens that there must be room for where nobody says; the engine itself takes more where there is more."""

Answer = Callable[[Sequence[Node]], EpochPlan]


def replan_for(launch: Launch, planned: EpochPlan | None = None) -> Answer:
    """`planned`: what a saved plan decided, for as long as there are as many machines as it is for."""
    asked = _asked(launch)

    def answer(nodes: Sequence[Node]) -> EpochPlan:
        if planned is not None and len(nodes) == len(set(planned.nodes)):
            return planned
        return replan(asked, nodes)

    return answer


def planned_epoch(plan: Plan) -> EpochPlan:
    """A saved plan, as a fleet runs it. Its first node is the root's, in the order that ranks have them."""
    order = list(dict.fromkeys(rank.node for rank in plan.ranks))
    return EpochPlan(
        layout=plan.layout,
        nodes=tuple(order.index(rank.node) for rank in plan.ranks),
        shares=plan.shares,
        stages=plan.placement.stages if plan.placement is not None and plan.layout.pp > 1 else (),
        tokens_per_second=plan.speed.decode_tokens_per_second if plan.speed is not None else 0.0,
        rank_bytes=tuple(held.total_bytes for held in plan.memory.per_device),
        reasons=plan.reasons,
    )


def _asked(launch: Launch) -> Asked:
    spec, rules, how = _model(launch)
    return Asked(
        spec=spec,
        rules=rules,
        scheme=msgspec.structs.replace(how, kv=launch.kv),
        context_tokens=launch.context_tokens or min(USUAL_CONTEXT, spec.context_tokens),
        wanted=launch.layout if launch.layout.world > 1 else None,
    )


def _model(launch: Launch) -> tuple[ModelSpec, tuple[Rule, ...], Scheme]:
    if launch.random_weights is not None:
        from windlass.families import describe, rules

        spec = describe(launch.random_weights.config, launch.model)
        return spec, rules(spec), scheme(launch.random_weights.scheme, launch.random_weights.group)
    from windlass.weights.cuts import sizing_of
    from windlass.weights.source import open_model

    opened = open_model(Path(launch.model))
    try:
        return opened.spec, opened.rules, scheme("fp32") if launch.exact else sizing_of(opened)
    finally:
        opened.store.close()
