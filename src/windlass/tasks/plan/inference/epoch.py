"""Splits a model over the machines of a fleet epoch: layout, tp shares and pipeline stages, with the same model as a plan. Pure.

Uses every machine if possible, since the user named them. Among the layouts of all ranks, the one with the fastest predicted decode of
one sequence is chosen; machines that do not fit in any layout are left out, with a reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log

from windlass.core.hardware import spec as machines
from windlass.core.hardware.cpu import cpu_device, default_bandwidth
from windlass.core.hardware.spec import Device, Hardware
from windlass.core.layout import Layout
from windlass.core.model import ModelSpec
from windlass.core.plan import Reason
from windlass.core.ranks.epoch import EpochPlan, Node
from windlass.core.rule import Rule
from windlass.core.scheme import Scheme
from windlass.core.workload import workload
from windlass.errors import DoesNotFit, Impossible
from windlass.tasks.plan.engines.load import engine
from windlass.tasks.plan.inference.candidates import choose_stages, fit_layout, tp_shares
from windlass.tasks.plan.inference.feasible import check_layout, divisors
from windlass.tasks.plan.inference.reasons import LEAST_IMBALANCE
from windlass.tasks.plan.inference.sites import Site, whole_site
from windlass.tasks.plan.memory import Fit, MemoryModel
from windlass.tasks.plan.shards import ModelShards
from windlass.tasks.plan.speed.roofline import SpeedModel
from windlass.units import format_bytes, format_context

ALIKE = 1.15
"""Bandwidths within this ratio count as equal: measurements vary this much, and different shares mean sending different weights."""

LEAST_DIFFERENCE = 1e-6
FILLED = (0.97, 0.92, 0.86, 0.8, 0.7)
"""Fractions of a machine's memory to fill, tried in order."""


@dataclass(frozen=True)
class EpochRequest:
    """What to run: the model as stored, the context and the concurrency."""

    spec: ModelSpec
    rules: tuple[Rule, ...]
    scheme: Scheme
    """As stored in the model's files."""
    context_tokens: int
    concurrency: int = 1
    pinned: Layout | None = None
    """Layout set by the user. If too few ranks are left for it, the best layout of the remaining ranks is used."""


@dataclass(frozen=True)
class _Assignment:
    """One layout of some nodes, evaluated."""

    layout: Layout
    order: tuple[int, ...]
    """Node of each rank."""
    fit: Fit
    tokens_per_second: float
    seconds: tuple[float, ...]
    """Predicted seconds per token of each rank."""

    @property
    def short_bytes(self) -> int:
        return sum(max(held.total_bytes - held.capacity_bytes, 0) for held in self.fit.memory)

    @property
    def imbalance(self) -> float:
        return max(self.seconds) * len(self.seconds) / sum(self.seconds) if sum(self.seconds) else 1.0


def replan(request: EpochRequest, nodes: Sequence[Node]) -> EpochPlan:
    """The first node is the root and holds rank 0. Raises DoesNotFit with the missing bytes."""
    sizes = ModelShards(request.spec, request.rules)
    overflowing: list[_Assignment] = []
    refused: list[str] = []
    for left in _node_subsets(request, nodes):
        tried = list(_layouts(request, sizes, nodes, left, refused))
        fitting = [one for one in tried if not one.short_bytes]
        if fitting:
            best = min(fitting, key=_preference)
            return _plan(request, nodes, best, [one for one in fitting if one is not best], left, refused)
        overflowing += tried
    if not overflowing:
        raise Impossible(refused[0] if refused else f"{request.spec.name} cannot be split over {len(nodes)} machines")
    raise _does_not_fit(request, nodes, min(overflowing, key=lambda one: one.short_bytes))


def _node_subsets(request: EpochRequest, nodes: Sequence[Node]) -> list[list[int]]:
    """All nodes; then drop one worker after another, the smallest first.

    With a pinned layout, only subsets with that many ranks; all subsets if there is none.
    """
    left = list(range(len(nodes)))
    found = [left]
    for smallest in sorted(left[1:], key=lambda index: (nodes[index].memory_bytes, nodes[index].bandwidth)):
        left = [index for index in left if index != smallest]
        found.append(left)
    pinned = [left for left in found if request.pinned is not None and _num_ranks(nodes, left) == request.pinned.world]
    return pinned or found


def _num_ranks(nodes: Sequence[Node], left: Sequence[int]) -> int:
    return sum(nodes[index].num_ranks for index in left)


def _preference(one: _Assignment) -> tuple[float, ...]:
    """Fastest first; ties go to fewer stages, then to less expert parallelism."""
    return -round(one.tokens_per_second, 2), one.layout.pp, one.layout.ep


def _layouts(
    request: EpochRequest, sizes: ModelShards, nodes: Sequence[Node], left: Sequence[int], refused: list[str]
) -> Iterator[_Assignment]:
    for layout in _degrees(request, _num_ranks(nodes, left)):
        try:
            check_layout(engine("windlass"), request.spec, request.rules, request.scheme, layout)
            yield _assign(request, sizes, nodes, left, layout)
        except Impossible as error:
            refused.append(str(error))


def _degrees(request: EpochRequest, ranks: int) -> Iterator[Layout]:
    if request.pinned is not None and request.pinned.world == ranks:
        yield request.pinned
        return
    experts = request.spec.experts
    for tp in divisors(ranks):
        yield Layout(tp=tp, pp=ranks // tp)
        if experts is not None and tp > 1 and experts.num_experts >= tp:
            yield Layout(tp=tp, pp=ranks // tp, ep=tp)


def _assign(request: EpochRequest, sizes: ModelShards, nodes: Sequence[Node], left: Sequence[int], layout: Layout) -> _Assignment:
    """Workers follow the root from fast to slow, so that equal ones share a stage."""
    speeds = _speeds(nodes, left)
    workers = sorted(left[1:], key=lambda index: (-speeds[index], index))
    ordered = (left[0], *workers)
    order = tuple(index for index in ordered for _ in range(nodes[index].num_ranks))
    site = whole_site(_hardware([nodes[index] for index in ordered], [speeds[index] for index in ordered]))
    work = workload(min(request.context_tokens, request.spec.context_tokens), request.concurrency)
    model = MemoryModel(sizes, engine("windlass"), work, request.scheme)
    tried = [_evaluated(model, site, layout, order, shares) for shares in _shares(model, site, layout)]
    return min(tried, key=lambda one: (one.short_bytes, _preference(one)))


def _shares(model: MemoryModel, site: Site, layout: Layout) -> list[tuple[float, ...]]:
    """Candidates: by bandwidth limited by memory, then by memory alone, in case heads and groups are too coarse for the former."""
    if not tp_shares(model, site, layout):
        return [()]
    rooms = [min(site.devices[pp * layout.tp + tp].memory_bytes for pp in range(layout.pp)) for tp in range(layout.tp)]
    by_speed = [tp_shares(model, site, layout, filled) for filled in FILLED]
    return list(dict.fromkeys([*by_speed, tuple(room / sum(rooms) for room in rooms)]))


def _evaluated(model: MemoryModel, site: Site, layout: Layout, order: tuple[int, ...], shares: tuple[float, ...]) -> _Assignment:
    shares = shares if shares and max(shares) - min(shares) > LEAST_DIFFERENCE else ()
    stages = choose_stages(model, site, layout, shares)
    fit = fit_layout(model, site, layout, stages, shares, tuple(range(layout.tp)))
    speed = SpeedModel(model, site.hardware, layout, fit)
    context = model.workload.mean_decode_context
    rate, _, _ = speed.decode(1, context)
    return _Assignment(layout, order, fit, rate, tuple(speed.slot_seconds(1, context)))


# --- nodes as hardware


def _hardware(nodes: Sequence[Node], speeds: Sequence[float]) -> Hardware:
    made = tuple(
        machines.Node(devices=_devices(node, speed), ram_bytes=node.memory_bytes, disk_bytes=0, name=node.name)
        for node, speed in zip(nodes, speeds, strict=True)
    )
    if len(nodes) == 1:
        return Hardware(nodes=made)
    return Hardware(
        nodes=made,
        network_bandwidth=min(node.link_bandwidth for node in nodes),
        network_latency_seconds=max(node.link_seconds for node in nodes),
    )


def _devices(node: Node, speed: float) -> tuple[Device, ...]:
    """One per rank. Ranks of a machine share its cores, memory and bandwidth."""
    count = node.num_ranks
    if node.gpus:
        return tuple(node.gpus[rank % len(node.gpus)] for rank in range(count))
    return (cpu_device(max(node.cores // count, 1), node.memory_bytes // count, speed / count, node.name),) * count


def _bandwidth(node: Node) -> float:
    if node.gpus:
        return node.gpus[0].measured_bandwidth
    return node.bandwidth or default_bandwidth(node.cores)


def _speeds(nodes: Sequence[Node], left: Sequence[int]) -> dict[int, float]:
    """Bandwidth per node: similar ones are made equal, others rounded to a power of sqrt(ALIKE) over the slowest."""
    found = sorted((_bandwidth(nodes[index]), index) for index in left)
    slowest = lowest = found[0][0]
    made: dict[int, float] = {}
    for speed, index in found:
        lowest = lowest if speed <= lowest * ALIKE else speed
        made[index] = slowest * ALIKE ** (round(2 * log(lowest / slowest) / log(ALIKE)) / 2)
    return made


# --- reasons


def _plan(
    request: EpochRequest,
    nodes: Sequence[Node],
    best: _Assignment,
    others: list[_Assignment],
    left: Sequence[int],
    refused: list[str],
) -> EpochPlan:
    fit = best.fit
    return EpochPlan(
        layout=best.layout,
        nodes=best.order,
        shares=fit.shares,
        stages=fit.stages if best.layout.pp > 1 else (),
        tokens_per_second=round(best.tokens_per_second, 2),
        imbalance=round(best.imbalance, 3),
        rank_bytes=tuple(held.total_bytes for held in fit.memory),
        reasons=tuple(_reasons(request, nodes, best, others, left, refused)),
    )


def _reasons(
    request: EpochRequest,
    nodes: Sequence[Node],
    best: _Assignment,
    others: list[_Assignment],
    left: Sequence[int],
    refused: list[str],
) -> Iterator[Reason]:
    pinned = request.pinned is not None and best.layout == request.pinned
    if pinned:
        why = "pinned"
    elif request.pinned is not None:
        why = f"the pinned {request.pinned} needs {request.pinned.world} ranks, but {best.layout.world} are available"
    elif others:
        other = min(others, key=_preference)
        why = f"{best.tokens_per_second:.3g} tokens/s predicted; {other.layout} {other.tokens_per_second:.3g}"
    else:
        why = refused[0] if refused else "no other layout fits"
    yield Reason(choice="layout", value=str(best.layout), why=why)
    if best.fit.shares:
        shown = " / ".join(f"{share:.0%}" for share in best.fit.shares)
        yield Reason(choice="shares", value=shown, why="proportional to memory bandwidth, limited by memory size")
    if best.layout.pp > 1:
        shown = " + ".join(str(stop - start) for start, stop in best.fit.stages)
        yield Reason(choice="stages", value=f"{shown} layers", why="balanced by bandwidth, limited by memory size")
    if best.imbalance > LEAST_IMBALANCE:
        slowest = best.order[best.seconds.index(max(best.seconds))]
        why = f"{nodes[slowest].name} takes {best.imbalance - 1:.0%} longer per token than the mean"
        yield Reason(choice="imbalance", value=f"{best.imbalance:.2f}x", why=why)
    idle = [nodes[index].name for index in range(len(nodes)) if index not in left]
    if idle:
        yield Reason(choice="left out", value=", ".join(idle), why=_why_left_out(request, best))


def _why_left_out(request: EpochRequest, best: _Assignment) -> str:
    if best.layout == request.pinned:
        return f"the pinned {best.layout} uses {best.layout.world} ranks"
    return "no layout that includes them fits"


def _does_not_fit(request: EpochRequest, nodes: Sequence[Node], best: _Assignment) -> DoesNotFit:
    """Missing bytes, by machine."""
    over = [
        (nodes[index].name, held.total_bytes - held.capacity_bytes, held)
        for index, held in zip(best.order, best.fit.memory, strict=True)
        if held.total_bytes > held.capacity_bytes
    ]
    shown = ", ".join(
        f"{format_bytes(short)} on {name} (needs {format_bytes(held.total_bytes)}, has {format_bytes(held.capacity_bytes)})"
        for name, short, held in over[:4]
    )
    more = f" and on {len(over) - 4} more" if len(over) > 4 else ""
    count = len(set(best.order))
    return DoesNotFit(
        f"{request.spec.name} in {request.scheme.name} with a context of {format_context(request.context_tokens)} does not fit on "
        f"{count} machine{'s' if count > 1 else ''}: the best layout ({best.layout}) is {format_bytes(best.short_bytes)} short: {shown}{more}; "
        "add a worker, free memory, use a shorter --context, or convert the model to fewer bits",
        best.short_bytes,
    )
