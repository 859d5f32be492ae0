"""What would make a training run fit: at most one change of each kind, mildest first, each tried before it is suggested."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from windlass.core.count import count_parameters
from windlass.core.hardware.defaults import CPU_NIC_BYTES_PER_SECOND
from windlass.core.hardware.devices import nic_bandwidth
from windlass.core.hardware.spec import Hardware, Node
from windlass.core.model import Frozen, ModelSpec
from windlass.core.recipe.recipe import Recipe
from windlass.core.rule import Rule
from windlass.tasks.plan.training.frameworks import loss_of
from windlass.tasks.plan.training.memory.footprint import Footprints
from windlass.tasks.plan.training.memory.states import parameter_bytes
from windlass.tasks.plan.training.search import DEFAULT_SEQUENCE_TOKENS, something_fits
from windlass.units import format_context

MOST_TRIES = 4
SHORTEST_SEQUENCE = 1024
PINS = {
    "parallel": ("tp", "cp", "pp", "ep", "expert_tp", "virtual_stages", "zero"),
    "batch": ("micro_batch",),
    "memory": ("recompute",),
}


class RemedyCase(Frozen):
    """A run that does not fit, or a variant of it."""

    spec: ModelSpec
    rules: tuple[Rule, ...]
    hardware: Hardware
    recipe: Recipe
    footprints: Footprints | None = None
    """Of this recipe, on any hardware."""

    @property
    def fits(self) -> bool:
        return something_fits(self.spec, self.rules, self.hardware, self.recipe, self.footprints)

    def changed(self, section: str, **values: Any) -> RemedyCase:
        inner = msgspec.structs.replace(getattr(self.recipe, section), **values)
        return msgspec.structs.replace(self, recipe=msgspec.structs.replace(self.recipe, **{section: inner}), footprints=None)


Option = tuple[str, RemedyCase]


def remedies(case: RemedyCase) -> tuple[str, ...]:
    """Unpinned values were searched already, so only pins are relaxed; then states are offloaded, or devices added."""
    case = msgspec.structs.replace(case, footprints=case.footprints or Footprints(case.spec, case.rules))
    kinds = (
        _recompute, _micro_batch, _virtual_stages, _zero, _flash, _no_pins, _loss, _base, _offload, _adapters, _sequence, _devices,
    )  # fmt: skip
    working = (next((text for text, changed in kind(case) if changed.fits), None) for kind in kinds)
    return tuple(text for text in working if text)


def _recompute(case: RemedyCase) -> Iterator[Option]:
    memory = case.recipe.memory
    if memory.recompute == "none" and not memory.flash_attention:
        yield 'memory.recompute = "selective"', case.changed("memory", recompute="selective")
    if memory.recompute in ("none", "selective"):
        yield 'memory.recompute = "full"', case.changed("memory", recompute="full")


def _micro_batch(case: RemedyCase) -> Iterator[Option]:
    if (case.recipe.batch.micro_batch or 1) > 1:
        yield "batch.micro_batch = 1", case.changed("batch", micro_batch=1)


def _virtual_stages(case: RemedyCase) -> Iterator[Option]:
    fewer = (case.recipe.parallel.virtual_stages or 1) // 2
    while fewer:
        yield f"parallel.virtual_stages = {fewer}", case.changed("parallel", virtual_stages=fewer)
        fewer //= 2


def _zero(case: RemedyCase) -> Iterator[Option]:
    pinned = case.recipe.parallel.zero
    for stage in (1, 2, 3):
        if pinned is not None and stage > pinned:
            yield f"parallel.zero = {stage}", case.changed("parallel", zero=stage)


def _flash(case: RemedyCase) -> Iterator[Option]:
    if not case.recipe.memory.flash_attention:
        yield "memory.flash_attention = true", case.changed("memory", flash_attention=True)


def _no_pins(case: RemedyCase) -> Iterator[Option]:
    """Drops all pins, if more than one has to change."""
    given = [(section, name) for section, names in PINS.items() for name in names if _value(case, section, name) is not None]
    if not given:
        return
    free = case
    for section, name in given:
        free = free.changed(section, **{name: None})
    yield f"leave {', '.join(name for _, name in given)} to the planner", free


def _value(case: RemedyCase, section: str, name: str) -> object:
    return getattr(getattr(case.recipe, section), name)


def _loss(case: RemedyCase) -> Iterator[Option]:
    """The logits of a large vocabulary, whole, can be what is too much."""
    if loss_of(case.recipe) == "whole":
        yield 'assume.loss = "chunked" (as `windlass train` computes it)', case.changed("assume", loss="chunked")


def _base(case: RemedyCase) -> Iterator[Option]:
    """Frozen weights in fewer bits (QLoRA, arXiv 2305.14314)."""
    if case.recipe.lora.rank is None:
        return
    for base in ("int8", "int4")[("bf16", "int8", "int4").index(case.recipe.lora.base) :]:
        yield f'lora.base = "{base}"', case.changed("lora", base=base)


def _adapters(case: RemedyCase) -> Iterator[Option]:
    """Where the weights are given, adapters train on what holds them once."""
    if case.recipe.lora.rank is None and case.recipe.model.start == "weights":
        for base in ("bf16", "int8", "int4"):
            stored = "" if base == "bf16" else f' and lora.base = "{base}"'
            yield f"lora.rank = 16{stored} (adapters on frozen weights)", case.changed("lora", rank=16, base=base)


def _offload(case: RemedyCase) -> Iterator[Option]:
    if case.recipe.memory.offload == "none" and case.hardware.devices[0].kind != "cpu":
        free = case.changed("memory", offload="cpu")
        yield 'memory.offload = "cpu" (optimizer states in host memory)', free
        if case.recipe.parallel.zero is not None:
            yield 'memory.offload = "cpu" with parallel.zero left to the planner', free.changed("parallel", zero=None)


def _sequence(case: RemedyCase) -> Iterator[Option]:
    shorter = (case.recipe.data.sequence_length or min(DEFAULT_SEQUENCE_TOKENS, case.spec.context_tokens)) // 2
    while shorter >= SHORTEST_SEQUENCE:
        yield f"--sequence {format_context(shorter)}", case.changed("data", sequence_length=shorter)
        shorter //= 2


def _devices(case: RemedyCase) -> Iterator[Option]:
    """More of the same devices, in powers of two: with the pins, then without them, since they were for the old count. Counts that
    cannot hold the model states once are skipped; of the rest the first few are tried."""
    states = _least_bytes_each(case) * count_parameters(case.spec, case.rules).total
    capacity = case.hardware.devices[0].memory_bytes
    needed = states / (capacity * case.hardware.num_devices) if case.recipe.memory.offload == "none" else 1.0
    counts = [2**power for power in range(1, 13) if 2**power >= needed][:MOST_TRIES]
    for times in counts:
        grown = msgspec.structs.replace(case, hardware=more_devices(case.hardware, times))
        text = f"{times} times the devices ({grown.hardware.description})"
        yield text, grown
        for without, free in _no_pins(grown):
            yield f"{text}, and {without}", free


def _least_bytes_each(case: RemedyCase) -> float:
    """Per parameter, over all devices: frozen weights as they are stored, or all model states."""
    recipe, precision = case.recipe, case.recipe.precision
    if recipe.lora.rank is not None:
        return {"bf16": 2.0, "int8": 1.0, "int4": 0.5}[recipe.lora.base]
    return parameter_bytes(precision.compute, precision.gradients, recipe.optimizer.name, recipe.assume.states).total


def more_devices(hardware: Hardware, times: int) -> Hardware:
    """First in the node, up to eight; then more nodes."""
    node = hardware.nodes[0]
    device, count = node.devices[0], len(hardware.nodes) * len(node.devices) * times
    alone = len(hardware.nodes) == 1 and device.kind != "cpu"
    per_node = min(count, 8) if alone and len(node.devices) < 8 and count % min(count, 8) == 0 else len(node.devices)
    return cluster(msgspec.structs.replace(node, devices=(device,) * per_node), count // per_node, hardware.network_bandwidth)


def cluster(node: Node, num_nodes: int, network_bandwidth: float = 0.0) -> Hardware:
    """`network_bandwidth` 0: the usual network of these devices."""
    device = node.devices[0]
    usual = CPU_NIC_BYTES_PER_SECOND if device.kind == "cpu" else nic_bandwidth(device.name)
    bandwidth = (network_bandwidth or usual) if num_nodes > 1 else 0.0
    inside = device.name if device.kind == "cpu" else f"{len(node.devices)}x{device.name}"
    text = f"{num_nodes}x({inside})@{bandwidth * 8 / 1e9:g}Gb" if num_nodes > 1 else inside
    return Hardware(nodes=(node,) * num_nodes, network_bandwidth=bandwidth, description=text)
