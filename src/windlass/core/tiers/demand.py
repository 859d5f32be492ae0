"""What a rank has to place, from its tensors and their bytes. Pure; the planner takes the bytes from the scheme, the engine from the files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from windlass.core.count import distinct_experts
from windlass.core.fused import BLOCK_INPUTS, num_blocks, slice_blocks
from windlass.core.layout import Layout
from windlass.core.model import ModelSpec
from windlass.core.place import Interval, Placement, local_bytes
from windlass.core.rule import ModelPart, Rule
from windlass.core.scheme import Scheme
from windlass.core.tiers.values import Demand, ExpertPool, Unit

STACKS = (("q", "k", "v"), ("gate", "up"))
"""Matrices that one product reads together, in this order (nn.linear.Linear)."""
STREAMED = frozenset("q k v o q_a q_b kv_a gate up down".split())
"""Matrices that only a linear layer reads. All others stay where they are computed with: routers, up-projections of a latent, indexers."""

_MATRIX = re.compile(r"(layers\.\d+\.(?:mixer|ffn|ffn\.shared))\.(\w+)\.weight")
_EXPERT = re.compile(r"layers\.(\d+)\.ffn\.experts\.(\d+)\.(?:gate|up|down)\.weight")


class HeldTensor(NamedTuple):
    name: str
    """`layers.3.mixer.q.weight`."""
    num_bytes: int
    is_lookup: bool = False
    """A step reads next to nothing of it."""


def unit_name(names: Iterable[str]) -> str | None:
    """`layers.3.mixer.q+k+v` of the tensors that are stacked; None where they cannot be streamed."""
    matched = [_MATRIX.fullmatch(name) for name in names]
    found = [match for match in matched if match is not None and match[2] in STREAMED]
    if len(found) < len(matched) or len({match[1] for match in found}) != 1:
        return None
    return f"{found[0][1]}.{'+'.join(match[2] for match in found)}"


def demand_of(tensors: Iterable[HeldTensor], spec: ModelSpec, batch: float = 1.0) -> Demand:
    """`tensors`: those of the rank, layers in order. `batch`: sequences of a decode step."""
    fixed = fixed_read = 0
    matrices: dict[str, dict[str, int]] = {}
    experts: dict[tuple[str, str], int] = {}
    for tensor in tensors:
        if (match := _EXPERT.fullmatch(tensor.name)) is not None:
            key = match[1], match[2]
            experts[key] = experts.get(key, 0) + tensor.num_bytes
        elif (match := _MATRIX.fullmatch(tensor.name)) is not None and match[2] in STREAMED:
            matrices.setdefault(match[1], {})[match[2]] = tensor.num_bytes
        else:
            fixed += tensor.num_bytes
            fixed_read += 0 if tensor.is_lookup else tensor.num_bytes
    units = [unit for module in sorted(matrices, key=_order) for unit in _units(module, matrices[module])]
    return Demand(fixed_bytes=fixed, fixed_read_bytes=fixed_read, units=tuple(units), experts=_pool(experts, spec, batch))


def dense_slices(demand: Demand, spec: ModelSpec, first_layer: int = 0) -> Demand:
    """`in_slices` of a model, or a stage of one, whose feed-forwards are alike and fill whole blocks; else as it is."""
    widths = {layer.feed_forward.intermediate_size for layer in spec.layers}
    blocks, rest = divmod(max(widths), BLOCK_INPUTS)
    if len(widths) > 1 or rest or num_blocks(max(widths)) != blocks:
        return demand
    return in_slices(demand, blocks // slice_blocks(blocks), spec.num_layers, first_layer)


def in_slices(demand: Demand, per_layer: int, num_layers: int, first_layer: int = 0) -> Demand:
    """Of layers without experts: their feed-forwards as slices, of which a step reads all, in the place of experts."""
    layers = range(first_layer, first_layer + num_layers)
    names = {f"layers.{layer}.ffn.{part}" for layer in layers for part in ("gate+up", "down")}
    size = sum(unit.num_bytes for unit in demand.units if unit.name in names)
    pool = ExpertPool(
        num_experts=num_layers * per_layer, expert_bytes=-(-size // (num_layers * per_layer)), touched=1.0, num_layers=num_layers
    )
    return msgspec.structs.replace(demand, units=tuple(unit for unit in demand.units if unit.name not in names), experts=pool)


def _order(module: str) -> tuple[int, str]:
    """By layer; the mixer comes before the feed-forward in most, and the order within a layer matters little."""
    _, layer, part = module.split(".", 2)
    return int(layer), {"mixer": "0", "ffn.shared": "1"}.get(part, "2")


def _units(module: str, sizes: dict[str, int]) -> list[Unit]:
    """Matrices of a stack, then each of the others."""
    found: list[Unit] = []
    left = dict(sizes)
    for stack in STACKS:
        members = [part for part in stack if part in left]
        if members:
            found.append(Unit(name=f"{module}.{'+'.join(members)}", num_bytes=sum(left.pop(part) for part in members)))
    return found + [Unit(name=f"{module}.{part}", num_bytes=size) for part, size in left.items()]


def _pool(experts: dict[tuple[str, str], int], spec: ModelSpec, batch: float) -> ExpertPool | None:
    if not experts or spec.experts is None:
        return None
    moe = spec.experts
    touched = distinct_experts(moe, batch) / moe.num_experts
    layers = len({layer for layer, _ in experts})
    size = max(experts.values())
    return ExpertPool(
        num_experts=len(experts),
        expert_bytes=size,
        touched=touched,
        num_layers=layers,
        rows=batch,
        blocks=num_blocks(moe.intermediate_size),
    )


def planned_tensors(
    rules: tuple[Rule, ...],
    spec: ModelSpec,
    placement: Placement,
    layout: Layout,
    scheme: Scheme,
    tp_index: int,
    layers: Interval,
) -> list[HeldTensor]:
    """The tensors of a rank, as conversion to the scheme would store them."""
    found: list[HeldTensor] = []
    first, last = placement.experts[tp_index // layout.expert_tp] if placement.experts else (0, 0)
    for rule in rules:
        if rule.part is not ModelPart.MAIN or rule.copy_of is not None:
            continue
        size = local_bytes(rule, placement, scheme, tp_index)
        if rule.layers is None:
            if _on_stage(rule.ours, spec, layers):
                found.append(HeldTensor(rule.ours, size, is_lookup=_is_lookup(rule.ours, spec)))
            continue
        for layer in rule.layers:
            if layers[0] <= layer < layers[1]:
                names = range(first, last) if rule.num_experts else (0,)
                found += [HeldTensor(rule.ours.format(layer=layer, expert=expert), size) for expert in names]
    return found


def _on_stage(name: str, spec: ModelSpec, layers: Interval) -> bool:
    is_first, is_last = layers[0] == 0, layers[1] == spec.num_layers
    if name == "embed.weight":
        return is_first or (is_last and spec.tied_head)
    return is_first if name.startswith(("embed", "positions")) else is_last


def _is_lookup(name: str, spec: ModelSpec) -> bool:
    return name == "positions.weight" or (name == "embed.weight" and not spec.tied_head)
