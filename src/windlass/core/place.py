"""Placement: which rank holds which slice of which tensor. A pure function of rules, layout, scheme and shares.

Every splittable axis is cut into one interval per tp index, only on multiples of the scheme's quantum, so that no quantization
group is split. KV heads follow the query heads they serve: a rank holds every KV head that one of its query heads needs, which
covers even splits, uneven ones and more ranks than KV heads (replication). Experts are split over ep, and each expert over the
remaining factor of tp.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd, lcm

from windlass.core.layout import Layout
from windlass.core.model import Frozen
from windlass.core.rule import Axis, AxisName, Role, Rule
from windlass.core.scheme import Scheme, Stored
from windlass.errors import Impossible

Interval = tuple[int, int]

WHOLE = frozenset({AxisName.HIDDEN, AxisName.LATENT, AxisName.SINGLE})


def cut(count: int, quantum: int, shares: Sequence[float]) -> tuple[Interval, ...]:
    """Consecutive intervals of `count` items in proportion to `shares`, cut on multiples of `quantum` (the last may be short).

    Largest-remainder method, so equal shares differ by at most one quantum; every interval gets at least one.
    """
    pieces = -(-count // quantum)
    if pieces < len(shares):
        raise Impossible(f"{count} in multiples of {quantum} gives {pieces} pieces, fewer than {len(shares)} ranks")
    total = sum(shares)
    ideal = [share / total * pieces for share in shares]
    sizes = [max(1, int(size)) for size in ideal]
    while sum(sizes) != pieces:
        step = 1 if sum(sizes) < pieces else -1
        movable = [index for index in range(len(sizes)) if step > 0 or sizes[index] > 1]
        chosen = max(movable, key=lambda index: (step * (ideal[index] - sizes[index]), -index * step))
        sizes[chosen] += step
    bounds: list[Interval] = []
    start = 0
    for size in sizes:
        stop = min(start + size * quantum, count)
        bounds.append((start, stop))
        start = stop
    return tuple(bounds)


def stored(rule: Rule, scheme: Scheme) -> Stored:
    return scheme.stored(rule.keep, rule.shape[-1], is_head=rule.role is Role.HEAD, is_lookup=rule.role is Role.LOOKUP)


def _axis_quantum(axis: Axis, rules: Iterable[Rule], scheme: Scheme) -> int:
    """Smallest number of items on which every tensor with this axis may be cut."""
    quantum = 1
    for rule in rules:
        for dim, other in enumerate(rule.axes):
            if same_axis(other, axis) and len(rule.axes) == 2:
                elements = stored(rule, scheme).quantum(dim)
                quantum = lcm(quantum, elements // gcd(elements, other.unit))
    return quantum


def same_axis(one: Axis, other: Axis) -> bool:
    """Whether two axes count the same items, perhaps with different units (heads of a query and of MLA's up-projection)."""
    return one.name is other.name and one.count == other.count


class AxisCut(Frozen):
    name: AxisName
    count: int
    quantum: int
    intervals: tuple[Interval, ...]
    """Per tp index, in items of the axis."""

    @property
    def imbalance(self) -> float:
        """Largest interval over the mean; 1.0 is even. The slowest rank sets the pace."""
        sizes = [stop - start for start, stop in self.intervals]
        return max(sizes) * len(sizes) / sum(sizes)


class Placement(Frozen):
    stages: tuple[Interval, ...]
    """Layers of each pipeline stage."""
    cuts: tuple[AxisCut, ...]
    experts: tuple[Interval, ...] = ()
    """Experts of each ep index; empty for dense models."""

    def interval(self, axis: Axis, tp_index: int) -> Interval:
        """Items of `axis` that the tp index holds; all of an axis that is not split."""
        for one in self.cuts:
            if one.name is axis.name and one.count == axis.count:
                return one.intervals[tp_index]
        return 0, axis.count

    @property
    def imbalance(self) -> float:
        return max((one.imbalance for one in self.cuts), default=1.0)


def stages_of(num_layers: int, pp: int, shares: Sequence[float] | None = None) -> tuple[Interval, ...]:
    if pp > num_layers:
        raise Impossible(f"pp {pp} has more stages than the model has layers ({num_layers})")
    return cut(num_layers, 1, shares or [1.0] * pp)


def place(
    rules: tuple[Rule, ...],
    num_layers: int,
    layout: Layout,
    scheme: Scheme,
    *,
    shares: Sequence[float] | None = None,
    stages: tuple[Interval, ...] | None = None,
) -> Placement:
    """`shares`: relative amount of work per tp index (for unequal devices); even by default."""
    weights = list(shares or [1.0] * layout.tp)
    axes = _cut_axes(rules)
    cuts = [_cut_axis(axis, rules, scheme, layout, weights) for axis in axes if axis.name is not AxisName.KV_HEADS]
    cuts += [_kv_cut(axis, rules, scheme, cuts) for axis in axes if axis.name is AxisName.KV_HEADS]
    num_experts = max((rule.num_experts for rule in rules), default=0)
    group_weights = [sum(weights[first : first + layout.expert_tp]) for first in range(0, layout.tp, layout.expert_tp)]
    if layout.ep > layout.tp:  # experts are spread over data-parallel ranks too
        group_weights = [1.0] * layout.ep
    return Placement(
        stages=stages or stages_of(num_layers, layout.pp),
        cuts=tuple(cuts),
        experts=cut(num_experts, 1, group_weights) if num_experts else (),
    )


def _cut_axis(axis: Axis, rules: tuple[Rule, ...], scheme: Scheme, layout: Layout, weights: list[float]) -> AxisCut:
    quantum = _axis_quantum(axis, rules, scheme)
    if axis.name is AxisName.EXPERT_FFN:
        # Expert groups repeat: tp index t holds shard t % expert_tp of the experts of ep index t // expert_tp.
        shards = _cut_named(axis, quantum, weights[: layout.expert_tp])
        intervals = tuple(shards[index % layout.expert_tp] for index in range(layout.tp))
    else:
        intervals = _cut_named(axis, quantum, weights)
    return AxisCut(name=axis.name, count=axis.count, quantum=quantum, intervals=intervals)


def _cut_axes(rules: tuple[Rule, ...]) -> list[Axis]:
    """Every splittable axis once, by name and count."""
    found: dict[tuple[AxisName, int], Axis] = {}
    for rule in rules:
        for axis in rule.axes:
            if axis.name not in WHOLE:
                found.setdefault((axis.name, axis.count), axis)
    return list(found.values())


def _cut_named(axis: Axis, quantum: int, weights: Sequence[float]) -> tuple[Interval, ...]:
    try:
        return cut(axis.count, quantum, weights)
    except Impossible as error:
        whole = "whole experts on each rank (ep), " if axis.name is AxisName.EXPERT_FFN else ""
        raise Impossible(
            f"tp {len(weights)} is too large for {axis.name.value} ({axis.count} x {axis.unit}): {error}; use a smaller tp, {whole}or "
            "pipeline stages (pp)"
        ) from None


def _kv_cut(axis: Axis, rules: tuple[Rule, ...], scheme: Scheme, cuts: list[AxisCut]) -> AxisCut:
    """The KV heads that the query heads need, widened to the quantum (one head, where head_dim is a multiple of the group)."""
    heads = next(other for other in cuts if other.name is AxisName.HEADS)
    quantum = _axis_quantum(axis, rules, scheme)
    step = heads.count // axis.count * quantum
    covering = tuple((start // step * quantum, min(-(-stop // step) * quantum, axis.count)) for start, stop in heads.intervals)
    return AxisCut(name=axis.name, count=axis.count, quantum=quantum, intervals=covering)


def local_shape(rule: Rule, placement: Placement, tp_index: int) -> tuple[int, ...]:
    return tuple((stop - start) * axis.unit for axis in rule.axes for start, stop in (placement.interval(axis, tp_index),))


def slices(rule: Rule, placement: Placement, tp_index: int) -> tuple[Interval, ...]:
    """The elements of our tensor that the tp index holds, one interval per dimension."""
    return tuple(
        (start * axis.unit, stop * axis.unit) for axis in rule.axes for start, stop in (placement.interval(axis, tp_index),)
    )


def local_bytes(rule: Rule, placement: Placement, scheme: Scheme, tp_index: int) -> int:
    """Bytes of one tensor (one layer, one expert) on a tp index."""
    shape = local_shape(rule, placement, tp_index)
    how = stored(rule, scheme)
    if len(shape) == 1:
        return shape[0] * how.bits // 8
    return how.matrix_bytes(shape[0], shape[1])


def local_experts(placement: Placement, layout: Layout, tp_index: int) -> int:
    if not placement.experts:
        return 0
    start, stop = placement.experts[tp_index // layout.expert_tp]
    return stop - start
