"""A fleet's metrics: which hosts are connected, and what each rank has done, from its last heartbeat. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from windlass.core.layout import Layout
from windlass.core.metrics import serving
from windlass.core.metrics.metric import Metric
from windlass.core.request import Info
from windlass.core.tiers.stats import total_tiers
from windlass.runtime.engine.ranks.messages import RankHeartbeat
from windlass.runtime.fleet.root.describe import NodeStatus
from windlass.runtime.fleet.root.step_times import group_of

Readings = list[tuple[dict[str, str], float]]


def readings(
    nodes: Sequence[NodeStatus], heartbeats: Mapping[int, RankHeartbeat], machines: Sequence[str], layout: Layout | None = None
) -> dict[Metric, Readings]:
    """`machines`: each rank's. `layout`: None between epochs."""
    ranks = [(_labels(rank, machines), heartbeats[rank]) for rank in sorted(heartbeats) if rank < len(machines)]
    return {
        serving.WORKER_UP: [({"worker": node.name}, float(node.state != "lost")) for node in nodes],
        serving.WORKER_SHARE: [({"worker": node.name}, node.share) for node in nodes],
        serving.RANK_STEPS: [(labels, found.steps) for labels, found in ranks],
        serving.RANK_STEP_SECONDS: [(labels, found.step_seconds) for labels, found in ranks if found.step_seconds],
        serving.RANK_COLLECTIVE_SECONDS: [
            ({**labels, "collective": name, "group": _group(layout, labels, name)}, count.seconds)
            for labels, found in ranks
            for name, count in found.counts.items()
        ],
        serving.RANK_SENT_BYTES: [(labels, sum(one.sent_bytes for one in found.counts.values())) for labels, found in ranks],
        serving.RANK_RECEIVED_BYTES: [
            (labels, sum(one.received_bytes for one in found.counts.values())) for labels, found in ranks
        ],
    }


def with_all_tiers(info: Info, heartbeats: Mapping[int, RankHeartbeat]) -> Info:
    """`info` is from the engine's process, rank 0, which knows its own tiers alone."""
    if info.stats is None:
        return info
    others = [found.tiers for rank, found in heartbeats.items() if rank]
    stats = msgspec.structs.replace(info.stats, tiers=total_tiers([info.stats.tiers, *others]))
    return msgspec.structs.replace(info, stats=stats)


def _group(layout: Layout | None, labels: Mapping[str, str], name: str) -> str:
    return "" if layout is None else str(group_of(layout, int(labels["rank"]), name))


def _labels(rank: int, machines: Sequence[str]) -> dict[str, str]:
    return {"rank": str(rank), "worker": machines[rank]}
