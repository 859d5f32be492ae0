"""`windlass plan RECIPE.toml` and `windlass plan MODEL --train`: a training run, planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from windlass.cli.plan.output import Output
from windlass.core.hardware.spec import Hardware
from windlass.core.plan import Plan, Reason
from windlass.core.recipe.recipe import Recipe, load_recipe, recipe_from
from windlass.errors import BadInput
from windlass.families import describe, rules
from windlass.open.hardware import resolve_hardware
from windlass.open.resolve import ModelDescription, describe_model, describe_path
from windlass.plan.cloud.training import smallest_cluster, training_offers
from windlass.plan.training.assemble import as_plan, prices_on
from windlass.plan.training.plan import plan_training


def run(
    target: str,
    *,
    on: str | None,
    pins: dict[str, int],
    tokens: str | None,
    sequence: str | None,
    batch: str | None,
    region: str,
    cloud: bool,
    all_offers: bool,
    output: Output,
) -> int:
    recipe = load_recipe(target) if target.endswith(".toml") else _from_flags(target)
    recipe = _with_flags(recipe, pins, tokens, sequence, batch)
    resolved = recipe_model(recipe, target)
    spec, tensors = resolved.spec, resolved.rules
    hardware, why = _hardware(on or recipe.hardware.on, cloud, resolved, recipe)
    made = plan_training(spec, tensors, hardware, recipe, prices_on(hardware, region))
    plan = as_plan(made, spec, tensors, hardware, region)
    if cloud:
        found = training_offers(spec, tensors, recipe, hardware.num_devices, all_offers=all_offers)
        plan = msgspec.structs.replace(plan, cloud=found, reasons=(*why, *plan.reasons))
    return output.write(plan)


def planned(recipe: Recipe, target: str, on: str | None = None, region: str = "world") -> Plan:
    """The plan of a recipe that is about to be run, on its own hardware or on this machine."""
    resolved = recipe_model(recipe, target)
    hardware = resolve_hardware(on or recipe.hardware.on)
    asked = as_run(recipe, hardware.num_devices)
    made = plan_training(resolved.spec, resolved.rules, hardware, asked, prices_on(hardware, region))
    return as_plan(made, resolved.spec, resolved.rules, hardware, region)


def as_run(recipe: Recipe, num_devices: int) -> Recipe:
    """With what the trainer takes where a recipe is silent, instead of what a planner would choose: what is planned is what is run.

    The trainer keeps whole rows between tensor-parallel regions; planners ask for sequence parallelism only where experts are spread too.
    """
    if recipe.run.engine != "torch":
        return recipe
    asked, replace = recipe.parallel, msgspec.structs.replace
    degrees = {name: getattr(asked, name) or 1 for name in ("tp", "cp", "pp", "ep", "virtual_stages")}
    zero = asked.zero if asked.zero is not None else 3 if num_devices > 1 else 0
    shared = asked.sequence_parallel
    if shared is None and not (degrees["tp"] > 1 and degrees["ep"] > 1):
        shared = False
    return replace(
        recipe,
        parallel=replace(asked, **degrees, zero=zero, sequence_parallel=shared),
        batch=replace(recipe.batch, micro_batch=recipe.batch.micro_batch or 1),
        memory=replace(recipe.memory, recompute=recipe.memory.recompute or "none"),
    )


def _hardware(named: str | None, cloud: bool, resolved: ModelDescription, recipe: Recipe) -> tuple[Hardware, tuple[Reason, ...]]:
    """With --cloud and nothing named, the smallest cluster that fits; this machine's devices say nothing about offers."""
    if named or not cloud:
        return resolve_hardware(named), ()
    hardware, why = smallest_cluster(resolved.spec, resolved.rules, recipe)
    return hardware, (why,)


def _from_flags(target: str) -> Recipe:
    return recipe_from({"model": {"name": target}}, "--train")


def _with_flags(recipe: Recipe, pins: dict[str, int], tokens: str | None, sequence: str | None, batch: str | None) -> Recipe:
    """The command line wins over the recipe. dp follows from the devices, so pinning it is refused."""
    if "dp" in pins:
        raise BadInput("--dp follows from the devices in training (devices / tp / cp / pp); pin the others")
    table: dict[str, Any] = msgspec.to_builtins(recipe)
    table["parallel"].update(pins)
    for section, key, value in (("data", "tokens", tokens), ("data", "sequence_length", sequence), ("batch", "tokens", batch)):
        if value is not None:
            table[section][key] = value
    if batch is not None:
        table["batch"]["global_batch"] = None
    return recipe_from(table, "recipe")


def recipe_model(recipe: Recipe, target: str) -> ModelDescription:
    """What the recipe trains."""
    source = recipe.model
    if source.config is not None:
        spec = describe(source.config, Path(target).stem, where=f"{target}: model.config")
        return ModelDescription(spec=spec, rules=rules(spec), source=target)
    if source.path is not None:
        return describe_path(Path(source.path).expanduser())
    assert source.name is not None
    return describe_model(source.name)
