"""A plan's predictions as recordings, so that dashboards show them beside what is measured. Only there if a plan was given."""

from __future__ import annotations

from windlass.core.plan import Plan
from windlass.tasks.observe.rules.rule import Group, Recording

TOKENS = "windlass:planned_decode:tokens_per_second"
FIRST_TOKEN = "windlass:planned_first_token:seconds"
POWER = "windlass:planned_power:watts"
COST = "windlass:planned_cost:usd_per_hour"
PLANNED = (TOKENS, FIRST_TOKEN, POWER, COST)


def plan_group(plan: Plan) -> Group:
    values = {POWER: plan.energy.watts, COST: plan.cost.usd_per_hour}
    if plan.speed is not None:
        values |= {TOKENS: plan.speed.decode_tokens_per_second, FIRST_TOKEN: plan.speed.time_to_first_token_seconds}
    about = f"{plan.model.name} on {plan.hardware}"
    recordings = tuple(Recording(name, value, f"Planned: {about}.") for name, value in values.items())
    return Group("windlass-plan", recordings=recordings)
