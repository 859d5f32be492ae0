"""A fleet's metrics from its hosts and the last heartbeats of its ranks."""

from __future__ import annotations

import pytest

from windlass.core.layout import Layout
from windlass.core.metrics import serving
from windlass.core.request import Info, Stats
from windlass.core.tiers.stats import TierStats
from windlass.runtime.engine.ranks.messages import RankHeartbeat
from windlass.runtime.fleet.root.describe import NodeStatus
from windlass.runtime.fleet.root.metrics import readings, with_all_tiers
from windlass.runtime.parallel.group import Count

pytestmark = pytest.mark.pure


def test_hosts_and_ranks() -> None:
    nodes = [NodeStatus("root", "", "running", 0.5), NodeStatus("b:1", "b", "lost", 0.5)]
    beats = {
        0: RankHeartbeat(10, 20, 0.0, {"tp all_reduce": Count(5, 100, 200, 1.5), "steps": Count(10, 7, 0, 0.1)}),
        1: RankHeartbeat(9, 20, 2.0, {"tp all_reduce": Count(5, 300, 400, 0.5)}),
        2: RankHeartbeat(1, 1, 1.0, {}),  # of an epoch that is over: it has no machine any more
    }
    found = readings(nodes, beats, ("root", "b:1"), Layout(tp=2))
    assert set(found) == set(serving.FLEET)
    assert found[serving.WORKER_UP] == [({"worker": "root"}, 1.0), ({"worker": "b:1"}, 0.0)]
    assert found[serving.RANK_STEPS] == [({"rank": "0", "worker": "root"}, 10), ({"rank": "1", "worker": "b:1"}, 9)]
    assert found[serving.RANK_STEP_SECONDS] == [({"rank": "1", "worker": "b:1"}, 2.0)]  # rank 0 of a GPU reports none
    collectives = [(labels["rank"], labels["collective"], value) for labels, value in found[serving.RANK_COLLECTIVE_SECONDS]]
    assert collectives == [("0", "tp all_reduce", 1.5), ("0", "steps", 0.1), ("1", "tp all_reduce", 0.5)]
    assert [value for _, value in found[serving.RANK_SENT_BYTES]] == [107, 300]


def test_ranks_of_unlike_groups_are_not_compared() -> None:
    """Stages of a pipeline have their own tensor-parallel groups; the wire of one says nothing of another's."""
    beats = {rank: RankHeartbeat(1, 1, 1.0, {"tp all_reduce": Count(1, 1, 1, 0.5), "pp send": Count()}) for rank in range(4)}
    found = readings([], beats, ("a",) * 4, Layout(tp=2, pp=2))[serving.RANK_COLLECTIVE_SECONDS]
    groups = {(labels["rank"], labels["collective"]): labels["group"] for labels, _ in found}
    assert [groups[str(rank), "tp all_reduce"] for rank in range(4)] == ["0", "0", "1", "1"]
    assert [groups[str(rank), "pp send"] for rank in range(4)] == ["0", "1", "0", "1"]


def test_tiers_of_all_ranks_are_added_up() -> None:
    """Rank 0 is in the engine's own report, and in its heartbeat too."""
    beats = {
        0: RankHeartbeat(tiers=TierStats(disk_bytes=10, read_bytes=1)),
        1: RankHeartbeat(tiers=TierStats(disk_bytes=20, read_bytes=5)),
        2: RankHeartbeat(),  # all of it in memory
    }
    info = Info(model="m", context_tokens=1, stats=Stats(tiers=TierStats(disk_bytes=10, read_bytes=2)))
    found = with_all_tiers(info, beats).stats
    assert found is not None and found.tiers == TierStats(disk_bytes=30, read_bytes=7)
    nothing = with_all_tiers(Info(model="m", context_tokens=1, stats=Stats()), {1: RankHeartbeat()}).stats
    assert nothing is not None and nothing.tiers is None
    assert with_all_tiers(Info(model="m", context_tokens=1), beats).stats is None
