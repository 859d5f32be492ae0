"""Dashboards and rules name only metrics that exist."""

from __future__ import annotations

import json
import re

import pytest

from windlass.core.metrics.node import RENAMED
from windlass.core.metrics.vocabulary import METRICS, SERIES
from windlass.errors import BadInput
from windlass.tasks.observe.charts import CHARTS
from windlass.tasks.observe.conditions.promql import promql
from windlass.tasks.observe.dashboards.boards import BOARDS
from windlass.tasks.observe.dashboards.panel import COLUMNS, INSTANCES, board_json
from windlass.tasks.observe.rules.all_rules import all_groups
from windlass.tasks.observe.rules.plan import PLANNED
from windlass.tasks.observe.rules.rule import Objectives

pytestmark = pytest.mark.pure

RECORDED = {rule.name for group in all_groups() for rule in group.recordings}
KNOWN = set(SERIES) | RECORDED | set(PLANNED) | set(RENAMED.values()) | {"up", "ALERTS"}
QUERIES = {
    **{
        f"{board.title}: {panel.title} {index}": query.expr
        for board in BOARDS
        for panel in board.panels
        for index, query in enumerate(panel.queries)
    },
    **{rule.name: promql(rule.condition) for group in all_groups() for rule in (*group.recordings, *group.alerts)},
    **{chart.title: promql(chart.shown) for chart in CHARTS},
}


WORDS = {"and", "or", "unless", "offset"}
LISTS = r"\b(?:by|on|group_left) \([^)]*\)"
SELECTOR = re.compile(r"(?<![\w.$])([A-Za-z_:][\w:]*)(?:\{([^}]*)\})?(?!\w|\s*\()")


def _selectors(query: str) -> list[tuple[str, set[str]]]:
    """Of every series in a query: its name, and the labels that it is chosen by."""
    found = [(one[1], one[2] or "") for one in SELECTOR.finditer(re.sub(LISTS, "", query))]
    return [(name, set(re.findall(r'(\w+)[=!]~?=?"', inside))) for name, inside in found if name not in WORDS]


def test_selectors_are_found() -> None:
    query = '1e6 * sum by (a) (rate(x{b=~"c.d", e!="f"}[$__rate_interval])) / on (g) group_left () y offset 5m or vector(z:m)'
    assert _selectors(query) == [("x", {"b", "e"}), ("y", set()), ("z:m", set())]


@pytest.mark.parametrize("name", QUERIES)
def test_every_metric_exists_and_every_label_is_its_own(name: str) -> None:
    found = _selectors(QUERIES[name])
    assert found
    for metric, labels in found:
        assert metric in KNOWN, metric
        if metric in SERIES:
            assert labels <= {*SERIES[metric].labels, "job", "instance", "le"}, metric
    grouped = re.match(r"\w+ by \(([^)]*)\)", QUERIES[name])
    if grouped and len(found) == 1 and found[0][0] in SERIES:
        assert set(grouped[1].split(", ")) <= {*SERIES[found[0][0]].labels, "job", "instance", "le"}


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_panels_do_not_overlap_and_use_no_angular(board: object) -> None:
    made = board_json(board)  # type: ignore[arg-type]
    taken: set[tuple[int, int]] = set()
    for panel in made["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken and place["x"] + place["w"] <= COLUMNS
        taken |= cells
        assert panel["type"] in ("timeseries", "stat", "gauge", "table", "heatmap", "bargauge", "state-timeline")
        assert all(
            INSTANCES in target["expr"] or ":" in target["expr"] or "ALERTS" in target["expr"] or "[1h]" in target["expr"]
            for target in panel["targets"]
        )
    assert len({panel["id"] for panel in made["panels"]}) == len(made["panels"])
    assert json.loads(json.dumps(made)) == made and 36 <= made["schemaVersion"] <= 41 and made["uid"]


def test_every_metric_of_ours_is_on_a_dashboard_or_in_a_rule() -> None:
    used = {name for query in QUERIES.values() for name, _ in _selectors(query)}
    unused = {name for name in METRICS if not set(METRICS[name].series) & used and name.startswith("windlass_")}
    assert unused <= {
        "windlass_key_requests_total",
        "windlass_kv_cache_blocks",
        "windlass_kv_cache_cached_blocks",
        "windlass_rank_steps_total",
        "windlass_rank_step_seconds_total",
        "windlass_exporter_seconds_total",
    }


def test_an_objective_that_is_no_bound_is_refused() -> None:
    with pytest.raises(BadInput, match="bound"):
        Objectives(first_token_seconds=3.0)
