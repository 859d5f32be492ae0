"""Converts a TrainingPlan to the common Plan, and looks up prices. Pure."""

from __future__ import annotations

import msgspec

from windlass.core.hardware.energy import grid
from windlass.core.hardware.spec import Hardware
from windlass.core.layout import Layout
from windlass.core.model import ModelSpec
from windlass.core.plan import DeviceMemoryPlan, Energy, MemoryPlan, Plan
from windlass.core.recipe.sections import Compute
from windlass.core.rule import Rule
from windlass.core.scheme import SCHEME_NAMES, Scheme, scheme
from windlass.core.workload import Workload
from windlass.tasks.plan.cost.running import cost_of, energy_of
from windlass.tasks.plan.inference.assemble import model_facts
from windlass.tasks.plan.training.plan import Prices, TrainingPlan, train_section


def prices_on(hardware: Hardware, region: str) -> Prices:
    """Price of one device-hour; None if the device has no hourly price."""
    total = cost_of(hardware.devices, 0.0).usd_per_hour
    return Prices(
        usd_per_device_hour=total / hardware.num_devices if total else None, grams_co2_per_kwh=grid(region).grams_per_kwh
    )


def as_plan(made: TrainingPlan, spec: ModelSpec, rules: tuple[Rule, ...], hardware: Hardware, region: str) -> Plan:
    """Alternatives stay in `train`: those of a Plan have decode speeds, which a training run does not have."""
    groups, job = made.layout, made.job
    rate = made.rates.tokens_per_second if made.rates else 0.0
    return Plan(
        model=model_facts(spec, rules),
        fits=made.fits,
        engine="train",
        layout=Layout(tp=groups.tp, pp=groups.pp, ep=groups.ep, dp=groups.dp),
        scheme=_scheme(job.compute),
        memory=_memory(made, hardware),
        speed=None,
        cost=cost_of(hardware.devices, rate),
        energy=_energy(made, hardware, region),
        reasons=made.reasons,
        alternatives=(),
        workload=Workload(
            context_tokens=job.sequence_tokens,
            concurrency=job.global_batch,
            prompt_tokens=job.sequence_tokens,
            new_tokens=0,
            goal="throughput",
        ),
        hardware=hardware.description,
        train=train_section(made),
        short_bytes=made.short_bytes,
        would_fit=made.would_fit,
        spec=spec,
    )


def _scheme(compute: Compute) -> Scheme:
    """The compute type as a scheme. fp16 is not a storage scheme here, but has the size of bf16."""
    return scheme(compute) if compute in SCHEME_NAMES else msgspec.structs.replace(scheme("bf16"), name=compute)


def _energy(made: TrainingPlan, hardware: Hardware, region: str) -> Energy:
    """Carbon of the whole run, failures included, per million training tokens."""
    each = 1e6 * made.run.kg_co2 / made.run.tokens
    return msgspec.structs.replace(energy_of(hardware.devices, 0.0, region), kg_co2_per_million_output_tokens=round(each, 6))


def _memory(made: TrainingPlan, hardware: Hardware) -> MemoryPlan:
    """The fullest device represents all: stages differ by an embedding at most."""
    held = made.memory
    fullest = DeviceMemoryPlan(
        name=hardware.devices[0].name,
        weights_bytes=held.total_bytes - held.activation_bytes - held.overhead_bytes,
        kv_bytes=0,
        activation_bytes=held.activation_bytes,
        overhead_bytes=held.overhead_bytes,
        total_bytes=held.total_bytes,
        capacity_bytes=held.capacity_bytes,
    )
    return MemoryPlan(
        per_device=(fullest,), host_bytes=held.host_bytes * made.num_devices, disk_bytes=held.disk_bytes * made.num_devices
    )
