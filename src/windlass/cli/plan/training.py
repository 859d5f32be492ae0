"""`windlass plan RECIPE.toml` and `windlass plan MODEL --train`: plans a training run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from windlass.cli.plan.output import PlanOutput
from windlass.core.hardware.spec import Hardware
from windlass.core.plan import Plan, Reason
from windlass.core.recipe.recipe import Recipe, load_recipe, recipe_from
from windlass.errors import BadInput
from windlass.model.families import describe, rules
from windlass.open.hardware import machines_like, resolve_hardware, shared_by
from windlass.open.resolve import ModelDescription, describe_model, describe_path
from windlass.tasks.plan.cloud.training import smallest_cluster, training_offers
from windlass.tasks.plan.training.assemble import as_plan, prices_on
from windlass.tasks.plan.training.plan import plan_training


class TrainingArguments(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `windlass plan --train`."""

    on: str | None
    pins: dict[str, int]
    tokens: str | None
    sequence: str | None
    batch: str | None
    region: str
    cloud: bool
    all_offers: bool
    framework: str | None = None
    lora: int | None = None


def run(target: str, arguments: TrainingArguments, output: PlanOutput) -> int:
    recipe = load_recipe(target) if target.endswith(".toml") else recipe_from({"model": {"name": target}}, "--train")
    recipe = _with_arguments(recipe, arguments)
    resolved = recipe_model(recipe, target)
    spec, tensors, region = resolved.spec, resolved.rules, arguments.region
    hardware, why = _hardware(arguments.on or recipe.hardware.on, arguments.cloud, resolved, recipe)
    found = plan_training(spec, tensors, hardware, recipe, prices_on(hardware, region))
    plan = as_plan(found, spec, tensors, hardware, region)
    if arguments.cloud:
        offers = training_offers(spec, tensors, recipe, hardware.num_devices, all_offers=arguments.all_offers)
        plan = msgspec.structs.replace(plan, cloud=offers, reasons=(*why, *plan.reasons))
    return output.write(plan)


def plan_recipe(
    recipe: Recipe, target: str, on: str | None = None, region: str = "world", num_nodes: int = 1, nproc: int | None = None
) -> Plan:
    """The plan of a recipe that is about to be run, on the recipe's hardware or on this machine, or on several like it.

    `nproc`: processes of each machine; None: one a device."""
    resolved = recipe_model(recipe, target)
    named = on or recipe.hardware.on
    hardware = resolve_hardware(named)
    if not named:
        hardware = hardware if nproc is None else shared_by(hardware, nproc)
        hardware = hardware if num_nodes == 1 else machines_like(hardware, num_nodes)
    filled = with_trainer_defaults(recipe, hardware.num_devices)
    found = plan_training(resolved.spec, resolved.rules, hardware, filled, prices_on(hardware, region))
    return as_plan(found, resolved.spec, resolved.rules, hardware, region)


def with_trainer_defaults(recipe: Recipe, num_devices: int) -> Recipe:
    """Fills what the recipe leaves out with the trainer's defaults instead of the planner's choices: the plan is what will run.

    The trainer has no sequence parallelism; the planner requires it only for tp with ep. Its loss is computed in chunks. FSDP is left out
    where there is one data-parallel rank, and by default with pipeline stages (train.parallel.degrees).
    """
    if recipe.run.engine != "torch":
        return recipe
    parallel, replace = recipe.parallel, msgspec.structs.replace
    degrees = {name: getattr(parallel, name) or 1 for name in ("tp", "cp", "pp", "ep", "virtual_stages")}
    dp = num_devices // (degrees["tp"] * degrees["pp"] * degrees["cp"])
    zero = parallel.zero if parallel.zero is not None else 0 if degrees["pp"] > 1 else 3
    zero = 0 if dp <= 1 else zero
    sequence_parallel = parallel.sequence_parallel
    if sequence_parallel is None and not (degrees["tp"] > 1 and degrees["ep"] > 1):
        sequence_parallel = False
    return replace(
        recipe,
        parallel=replace(parallel, **degrees, zero=zero, sequence_parallel=sequence_parallel),
        batch=replace(recipe.batch, micro_batch=recipe.batch.micro_batch or 1),
        memory=replace(recipe.memory, recompute=recipe.memory.recompute or "none"),
        assume=replace(recipe.assume, framework="pytorch", loss="chunked", kept_products=1.0),
    )


def _hardware(named: str | None, cloud: bool, resolved: ModelDescription, recipe: Recipe) -> tuple[Hardware, tuple[Reason, ...]]:
    """With --cloud and no hardware named: the smallest cluster that fits."""
    if named or not cloud:
        return resolve_hardware(named), ()
    hardware, why = smallest_cluster(resolved.spec, resolved.rules, recipe)
    return hardware, (why,)


def _with_arguments(recipe: Recipe, arguments: TrainingArguments) -> Recipe:
    """The command line overrides the recipe. dp follows from the devices, so pinning it is refused."""
    if "dp" in arguments.pins:
        raise BadInput("--dp cannot be set for training: it is devices / (tp x cp x pp); set those instead")
    table: dict[str, Any] = msgspec.to_builtins(recipe)
    table["parallel"].update(arguments.pins)
    lengths = (("tokens", arguments.tokens), ("sequence_length", arguments.sequence))
    table["data"].update({key: value for key, value in lengths if value is not None})
    if arguments.framework is not None:
        table["assume"]["framework"] = arguments.framework
    if arguments.lora is not None:
        table["lora"]["rank"] = arguments.lora
    if arguments.batch is not None:
        table["batch"].update(tokens=arguments.batch, global_batch=None)
    return recipe_from(table, "recipe")


def recipe_model(recipe: Recipe, target: str) -> ModelDescription:
    """The model that the recipe trains."""
    source = recipe.model
    if source.config is not None:
        spec = describe(source.config, Path(target).stem, where=f"{target}: model.config")
        return ModelDescription(spec=spec, rules=rules(spec), source=target)
    if source.path is not None:
        return describe_path(Path(source.path).expanduser())
    assert source.name is not None
    return describe_model(source.name)
