"""`windlass plan RECIPE.toml` and `windlass plan MODEL --train`: a training run, planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from windlass.cli.plan_output import Output
from windlass.cli.resolve import Resolved, from_path, resolve_hardware, resolve_model
from windlass.core.energy import grid
from windlass.core.hardware import Hardware
from windlass.core.layout import Layout
from windlass.core.plan import Alternative, Cost, DeviceMemory, Energy, Memory, Plan
from windlass.core.recipe import Recipe, load_recipe, recipe_from
from windlass.core.scheme import scheme
from windlass.core.workload import Workload
from windlass.errors import BadInput
from windlass.families import describe, rules
from windlass.plan.assemble import model_facts
from windlass.plan.cost import cost_of, per_million
from windlass.plan.training.plan import Prices, TrainingPlan, plan_training, train_section
from windlass.plan.training_cloud import training_offers


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
    resolved = _model(recipe, target)
    hardware = resolve_hardware(on or recipe.hardware.on)
    priced = cost_of(hardware.devices, 0.0)
    per_device = priced.usd_per_hour / hardware.num_devices if priced.usd_per_hour else None
    prices = Prices(usd_per_device_hour=per_device, grams_co2_per_kwh=grid(region).grams_per_kwh)
    made = plan_training(resolved.spec, resolved.rules, hardware, recipe, prices)
    plan = _as_plan(made, resolved, hardware, priced, region)
    if cloud:
        found = training_offers(resolved.spec, resolved.rules, recipe, hardware.num_devices, all_offers=all_offers)
        plan = msgspec.structs.replace(plan, cloud=found)
    return output.write(plan)


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


def _model(recipe: Recipe, target: str) -> Resolved:
    source = recipe.model
    if source.config is not None:
        spec = describe(source.config, Path(target).stem, where=f"{target}: model.config")
        return Resolved(spec=spec, rules=rules(spec), source=target)
    if source.path is not None:
        return from_path(Path(source.path).expanduser())
    assert source.name is not None
    return resolve_model(source.name)


def _as_plan(made: TrainingPlan, resolved: Resolved, hardware: Hardware, priced: Cost, region: str) -> Plan:
    groups = made.layout
    rate = made.rates.tokens_per_second_per_device * hardware.num_devices if made.rates else 0.0
    found = grid(region)
    watts = sum(device.watts for device in hardware.devices)
    return Plan(
        model=model_facts(resolved.spec, resolved.rules),
        fits=made.fits,
        engine="train",
        layout=Layout(tp=groups.tp, pp=groups.pp, ep=groups.ep, dp=groups.dp),
        scheme=scheme("bf16"),
        memory=_memory(made, hardware),
        speed=None,
        cost=msgspec.structs.replace(priced, usd_per_million_output_tokens=round(per_million(priced.usd_per_hour, rate), 4)),
        energy=Energy(
            watts=watts,
            kg_co2_per_million_output_tokens=round(made.run.kg_co2 / made.run.tokens * 1e6, 6),
            grid=f"{found.name}, {found.grams_per_kwh:g} g/kWh",
        ),
        reasons=made.reasons,
        alternatives=_alternatives(made),
        workload=Workload(
            context_tokens=made.job.sequence_tokens,
            concurrency=made.job.global_batch,
            prompt_tokens=made.job.sequence_tokens,
            new_tokens=0,
            goal="throughput",
        ),
        hardware=hardware.description,
        train=train_section(made),
        short_bytes=made.short_bytes,
        would_fit=(made.would_fit,) if made.would_fit else (),
        spec=resolved.spec,
    )


def _memory(made: TrainingPlan, hardware: Hardware) -> Memory:
    """The fullest device stands for all: stages differ by an embedding at most."""
    held = made.memory
    weights = held.total_bytes - held.activation_bytes - held.overhead_bytes
    fullest = DeviceMemory(
        name=hardware.devices[0].name,
        weights_bytes=weights,
        kv_bytes=0,
        activation_bytes=held.activation_bytes,
        overhead_bytes=held.overhead_bytes,
        total_bytes=held.total_bytes,
        capacity_bytes=held.capacity_bytes,
    )
    return Memory(
        per_device=(fullest,), host_bytes=held.host_bytes * made.num_devices, disk_bytes=held.disk_bytes * made.num_devices
    )


def _alternatives(made: TrainingPlan) -> tuple[Alternative, ...]:
    return tuple(
        Alternative(
            layout=Layout(tp=other.layout.tp, pp=other.layout.pp, ep=other.layout.ep, dp=other.layout.dp),
            scheme=made.job.compute,
            engine="train",
            decode_tokens_per_second=0.0,
            prefill_tokens_per_second=round(made.job.tokens_per_step / other.step_seconds, 1),
            free_bytes=max(made.memory.capacity_bytes - other.total_bytes, 0),
            why_not=f"{other.why_not}; micro-batch {other.micro_batch}, ZeRO {other.zero}, recompute {other.recompute}",
        )
        for other in made.alternatives
    )
