"""Our PromQL: what it computes, and that Prometheus computes the same (promtool, where it is found)."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from pathlib import Path

import pytest
from cases import expanded, named

from waiting import HUNG_SECONDS
from windlass.errors import BadInput
from windlass.tasks.observe.history.series import SeriesStore
from windlass.tasks.observe.promql.evaluate import evaluate
from windlass.tasks.observe.promql.parse import parse, seconds_of
from windlass.tasks.observe.promql.tree import Binary, Call, Selector

pytestmark = pytest.mark.pure

SERIES = {
    'c_total{i="a"}': "0+10x20",
    'c_total{i="b"}': "0+3x5 2+4x14",
    'g{i="a"}': "5 7 1 9 4 4 8 2 6 3 5 7 9 1 2 8 8 3 1 0 4",
    'g{i="b"}': "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21",
    'h_bucket{le="0.1"}': "0+1x20",
    'h_bucket{le="1.0"}': "0+3x20",
    'h_bucket{le="+Inf"}': "0+4x20",
}
QUERIES = [
    "c_total", 'c_total{i="a"}', 'c_total{i!="a"}', 'c_total{i=~"a|b"}', "rate(c_total[5m])", "increase(c_total[10m])", "irate(c_total[3m])",
    "delta(g[7m])", "deriv(g[8m])", "predict_linear(g[8m], 600)", "changes(g[9m])", "resets(c_total[15m])", "avg_over_time(g[6m])",
    "max_over_time(g[6m])", "min_over_time(g[6m] offset 4m)", "sum_over_time(g[6m])", "count_over_time(g[6m])", "last_over_time(g[6m])",
    "quantile_over_time(0.3, g[6m])", "sum(g)", "sum by (i) (g)", "avg without (i) (g)", "max(g)", "min(g)", "count(g)", "quantile(0.5, g)",
    "stddev(g)", "topk(1, g)", "bottomk(1, g)", "g > 5", "g > bool 5", "g + 1", "2 * g - 1", "-g", "g % 3", "g / 0", "0 * g / 0",
    "c_total + on (i) g", "g and c_total > 60", 'g or c_total{i="a"} * 2', "g unless g > 5", "g / ignoring (i) group_left () sum(g)",
    "histogram_quantile(0.5, rate(h_bucket[5m]))", "histogram_quantile(0.9, rate(h_bucket[5m]))", "absent(nothing)", "absent(g)",
    'absent_over_time(nothing{x="y"}[5m])', "clamp_min(g, 3)", "clamp_max(g, 3)", "abs(g - 10)", "time()", "vector(3)", "scalar(sum(g))",
    "g != g", 'sum(rate(c_total[5m])) / sum(rate(c_total{i="a"}[5m]))', "1 - g / 100", "g offset 5m", "g == 4 or g == 21",
]  # fmt: skip
AT_SECONDS = 20 * 60.0 + 30
"""Between two samples: whether a range holds its first moment differs between Prometheus 2 and 3."""


def _store() -> SeriesStore:
    store = SeriesStore()
    for series, notation in SERIES.items():
        name, labels = named(series)
        for minute, value in enumerate(expanded(notation)):
            if value is not None:
                store.add(name, labels, 60.0 * minute, value)
    return store


def _written(labels: tuple[tuple[str, str], ...]) -> str:
    return "{" + ",".join(f'{name}="{text}"' for name, text in labels) + "}"


def _ours(query: str) -> list[tuple[tuple[tuple[str, str], ...], float]]:
    return evaluate(parse(query), _store(), AT_SECONDS)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: apt-get install prometheus)")
def test_prometheus_computes_the_same(tmp_path: Path) -> None:
    """Our results are the expected ones of a unit test of promtool, to six digits. Names of series are dropped, which we do not keep."""
    checks: list[dict[str, object]] = []
    for query in QUERIES:
        ours = [(labels, value) for labels, value in _ours(query) if math.isfinite(value)]
        rows = [{"labels": _written(labels), "value": math.floor(value * 1e6 + 0.5) / 1e6} for labels, value in ours]
        vector = f"vector({query})" if query in ("time()", "scalar(sum(g))") else query
        nameless = f'label_replace(({vector}) > -Inf < +Inf, "__name__", "", "", "")'
        checks.append({"expr": f"round({nameless}, 1e-6)", "eval_time": "20m30s", "exp_samples": rows})
    series = [{"series": name, "values": values} for name, values in SERIES.items()]
    test = {"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": checks}]}
    (tmp_path / "test.yml").write_text(json.dumps(test))
    done = subprocess.run(
        ["promtool", "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True, timeout=HUNG_SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_series_that_ended_is_gone_at_once() -> None:
    store = _store()
    store.end("g", (("i", "a"),), 60.0 * 20 + 1)
    assert [labels for labels, _ in evaluate(parse("g"), store, 60.0 * 20 + 2)] == [(("i", "b"),)]
    assert len(evaluate(parse("g"), store, 60.0 * 20)) == 2


def test_what_is_old_is_not_shown() -> None:
    assert len(evaluate(parse("g"), _store(), 60.0 * 24)) == 2 and evaluate(parse("g"), _store(), 60.0 * 26) == []


def test_precedence() -> None:
    tree = parse("a or b and c > 1 + 2 * 3")
    assert isinstance(tree, Binary) and tree.op == "or" and isinstance(tree.right, Binary) and tree.right.op == "and"
    assert parse("rate(x[5m])") == Call(function="rate", arguments=(Selector(name="x", range_seconds=300.0),))
    assert seconds_of("1h30m") == 5400.0


@pytest.mark.parametrize(
    "query",
    [
        "",
        "sum(",
        "a[5]",
        "rate(x[5m:1m])",
        "a @ 5",
        "x{y>1}",
        'label_replace(a, "b", "c", "d", "e")',
        "a ^ 2",
        "nosuch(a)",
        "rate(a)",
    ],
)
def test_what_is_not_supported_is_said(query: str) -> None:
    with pytest.raises(BadInput):
        evaluate(parse(query), _store(), 60.0)
