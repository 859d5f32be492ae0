"""How the machines there are now share a model: the layout, shares and stages of an epoch, by the same formulas as a plan. Pure.

Every machine that was named takes part where it can: who names a worker wants it used. Among the layouts of all ranks the one that is
predicted to decode one sequence soonest is taken; machines that have no room for anything are left out, and said.
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
from windlass.plan.engines import ENGINES
from windlass.plan.inference.candidates import choose_stages, fit_layout, tp_shares
from windlass.plan.inference.feasible import check_layout, divisors
from windlass.plan.inference.reasons import LEAST_IMBALANCE
from windlass.plan.inference.sites import Site, whole_site
from windlass.plan.memory import Fit, MemoryModel
from windlass.plan.shards import ModelShards
from windlass.plan.speed.roofline import SpeedModel
from windlass.units import format_bytes, format_context

ALIKE = 1.15
"""Speeds that differ by less are the same: measuring twice gives as much, and other shares mean other weights to send."""

LEAST_DIFFERENCE = 1e-6
FILLED = (0.97, 0.92, 0.86, 0.8, 0.7)
"""Of a machine's room, what is tried in turn."""


@dataclass(frozen=True)
class EpochRequest:
    """What is to run, and what it must have room for."""

    spec: ModelSpec
    rules: tuple[Rule, ...]
    scheme: Scheme
    """As its files store it."""
    context_tokens: int
    concurrency: int = 1
    wanted: Layout | None = None
    """That the user pinned. When there are no longer so many ranks, the best for those that are left is taken."""


@dataclass(frozen=True)
class _Assignment:
    """One layout of some nodes, evaluated."""

    layout: Layout
    order: tuple[int, ...]
    """Of each rank: its node."""
    fit: Fit
    tokens_per_second: float
    seconds: tuple[float, ...]
    """Of each rank, for one token."""

    @property
    def short_bytes(self) -> int:
        return sum(max(held.total_bytes - held.capacity_bytes, 0) for held in self.fit.memory)

    @property
    def imbalance(self) -> float:
        return max(self.seconds) * len(self.seconds) / sum(self.seconds) if sum(self.seconds) else 1.0


def replan(asked: EpochRequest, nodes: Sequence[Node]) -> EpochPlan:
    """The first node is the root's, which has the first rank. Raises DoesNotFit with the bytes that are missing."""
    sizes = ModelShards(asked.spec, asked.rules)
    lacking: list[_Assignment] = []
    refused: list[str] = []
    for left in _parties(asked, nodes):
        tried = list(_layouts(asked, sizes, nodes, left, refused))
        fitting = [one for one in tried if not one.short_bytes]
        if fitting:
            best = min(fitting, key=_preference)
            return _plan(asked, nodes, best, [one for one in fitting if one is not best], left, refused)
        lacking += tried
    if not lacking:
        raise Impossible(refused[0] if refused else f"{asked.spec.name} cannot be split over {len(nodes)} machines")
    raise _missing(asked, nodes, min(lacking, key=lambda one: one.short_bytes))


def _parties(asked: EpochRequest, nodes: Sequence[Node]) -> list[list[int]]:
    """All of them; then without one worker after another, the smallest first: what it could hold is missed least.

    Where the user pinned a layout, those that make up as many ranks; where nobody does any more, as if nothing were pinned.
    """
    left = list(range(len(nodes)))
    found = [left]
    for smallest in sorted(left[1:], key=lambda index: (nodes[index].memory_bytes, nodes[index].bandwidth)):
        left = [index for index in left if index != smallest]
        found.append(left)
    pinned = [left for left in found if asked.wanted is not None and _num_ranks(nodes, left) == asked.wanted.world]
    return pinned or found


def _num_ranks(nodes: Sequence[Node], left: Sequence[int]) -> int:
    return sum(nodes[index].num_ranks for index in left)


def _preference(one: _Assignment) -> tuple[float, ...]:
    """Soonest first; ties go to fewer stages, then to plainer experts."""
    return -round(one.tokens_per_second, 2), one.layout.pp, one.layout.ep


def _layouts(
    asked: EpochRequest, sizes: ModelShards, nodes: Sequence[Node], left: Sequence[int], refused: list[str]
) -> Iterator[_Assignment]:
    for layout in _degrees(asked, _num_ranks(nodes, left)):
        try:
            check_layout(ENGINES["windlass"], asked.spec, asked.rules, asked.scheme, layout)
            yield _seated(asked, sizes, nodes, left, layout)
        except Impossible as error:
            refused.append(str(error))


def _degrees(asked: EpochRequest, ranks: int) -> Iterator[Layout]:
    if asked.wanted is not None and asked.wanted.world == ranks:
        yield asked.wanted
        return
    experts = asked.spec.experts
    for tp in divisors(ranks):
        yield Layout(tp=tp, pp=ranks // tp)
        if experts is not None and tp > 1 and experts.num_experts >= tp:
            yield Layout(tp=tp, pp=ranks // tp, ep=tp)


def _seated(asked: EpochRequest, sizes: ModelShards, nodes: Sequence[Node], left: Sequence[int], layout: Layout) -> _Assignment:
    """Workers follow the root from quick to slow, so that alike ones share a stage."""
    speeds = _speeds(nodes, left)
    workers = sorted(left[1:], key=lambda index: (-speeds[index], index))
    seated = (left[0], *workers)
    order = tuple(index for index in seated for _ in range(nodes[index].num_ranks))
    site = whole_site(_hardware([nodes[index] for index in seated], [speeds[index] for index in seated]))
    work = workload(min(asked.context_tokens, asked.spec.context_tokens), asked.concurrency)
    model = MemoryModel(sizes, ENGINES["windlass"], work, asked.scheme)
    tried = [_evaluated(model, site, layout, order, shares) for shares in _shares(model, site, layout)]
    return min(tried, key=lambda one: (one.short_bytes, _preference(one)))


def _shares(model: MemoryModel, site: Site, layout: Layout) -> list[tuple[float, ...]]:
    """By speed as far as memory goes; and by memory alone, where heads and groups are too coarse for that."""
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
    rate, _, _ = speed.decode(1, context, model.engine)
    return _Assignment(layout, order, fit, rate, tuple(speed.seat_seconds(1, context)))


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
    """One for each rank. Ranks of a machine share its cores, its memory and how quickly that is read."""
    count = node.num_ranks
    if node.gpus:
        return tuple(node.gpus[rank % len(node.gpus)] for rank in range(count))
    return (cpu_device(max(node.cores // count, 1), node.memory_bytes // count, speed / count, node.name),) * count


def _bandwidth(node: Node) -> float:
    if node.gpus:
        return node.gpus[0].measured_bandwidth
    return node.bandwidth or default_bandwidth(node.cores)


def _speeds(nodes: Sequence[Node], left: Sequence[int]) -> dict[int, float]:
    """Bandwidths; those that are alike are made equal, and the others are so many times ALIKE's root quicker than the slowest."""
    found = sorted((_bandwidth(nodes[index]), index) for index in left)
    slowest = lowest = found[0][0]
    made: dict[int, float] = {}
    for speed, index in found:
        lowest = lowest if speed <= lowest * ALIKE else speed
        made[index] = slowest * ALIKE ** (round(2 * log(lowest / slowest) / log(ALIKE)) / 2)
    return made


# --- what is said of it


def _plan(
    asked: EpochRequest,
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
        reasons=tuple(_reasons(asked, nodes, best, others, left, refused)),
    )


def _reasons(
    asked: EpochRequest,
    nodes: Sequence[Node],
    best: _Assignment,
    others: list[_Assignment],
    left: Sequence[int],
    refused: list[str],
) -> Iterator[Reason]:
    pinned = asked.wanted is not None and best.layout == asked.wanted
    if pinned:
        why = "asked for"
    elif asked.wanted is not None:
        why = f"{asked.wanted} was asked for, which is {asked.wanted.world} ranks, and there are {best.layout.world}"
    elif others:
        other = min(others, key=_preference)
        why = f"{best.tokens_per_second:.3g} tokens/s predicted; {other.layout} {other.tokens_per_second:.3g}"
    else:
        why = refused[0] if refused else "no other layout has room"
    yield Reason(choice="layout", value=str(best.layout), why=why)
    if best.fit.shares:
        shown = " / ".join(f"{share:.0%}" for share in best.fit.shares)
        yield Reason(choice="shares", value=shown, why="as quickly as each reads its memory, as far as it has room")
    if best.layout.pp > 1:
        shown = " + ".join(str(stop - start) for start, stop in best.fit.stages)
        yield Reason(choice="stages", value=f"{shown} layers", why="the slowest is as quick as can be, and none overflows")
    if best.imbalance > LEAST_IMBALANCE:
        slowest = best.order[best.seconds.index(max(best.seconds))]
        why = f"{nodes[slowest].name} takes {best.imbalance - 1:.0%} longer for its part than the mean"
        yield Reason(choice="imbalance", value=f"{best.imbalance:.2f}x", why=why)
    idle = [nodes[index].name for index in range(len(nodes)) if index not in left]
    if idle:
        yield Reason(choice="left out", value=", ".join(idle), why=_why_left_out(asked, best))


def _why_left_out(asked: EpochRequest, best: _Assignment) -> str:
    if best.layout == asked.wanted:
        return f"{best.layout} is {best.layout.world} ranks"
    return "with them no layout fits or can be cut"


def _missing(asked: EpochRequest, nodes: Sequence[Node], best: _Assignment) -> DoesNotFit:
    """Exactly what would have to be free, and where."""
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
        f"{asked.spec.name} in {asked.scheme.name} with a context of {format_context(asked.context_tokens)} does not fit "
        f"{count} machine{'s' if count > 1 else ''}: at best ({best.layout}) {format_bytes(best.short_bytes)} are missing: {shown}{more}; "
        "add a worker, free memory, ask for a shorter --context, or convert it to fewer bits",
        best.short_bytes,
    )
