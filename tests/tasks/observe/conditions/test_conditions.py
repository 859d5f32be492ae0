"""Conditions: what they compute, how they are written, and that Prometheus computes the same of it (promtool, where it is found)."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from pathlib import Path

import pytest
from cases import expanded, named

from waiting import HUNG_SECONDS
from windlass.tasks.observe.conditions.condition import Binary, Grouped, Mapped, Now, Where, latest, over
from windlass.tasks.observe.conditions.evaluate import evaluate
from windlass.tasks.observe.conditions.promql import promql
from windlass.tasks.observe.history.series import SeriesStore

pytestmark = pytest.mark.pure

SERIES = {
    'c_total{i="a"}': "0+10x20",
    'c_total{i="b"}': "0+3x5 2+4x14",
    'g{i="a"}': "5 7 1 9 4 4 8 2 6 3 5 7 9 1 2 8 8 3 1 0 4",
    'g{i="b"}': "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21",
}
C, G, ONLY_A = latest("c_total"), latest("g"), Where("i", "=", "a")
CONDITIONS = {
    "c_total": C,
    'c_total{i="a"}': latest("c_total", ONLY_A),
    'c_total{i!="a"}': latest("c_total", Where("i", "!=", "a")),
    'c_total{i=~"a|b"}': latest("c_total", Where("i", "=~", "a|b")),
    'c_total{i!~"a|x", j=""}': latest("c_total", Where("i", "!~", "a|x"), Where("j", "=", "")),
    "g offset 5m": latest("g", ago=300),
    "rate(c_total[5m])": over("rate", "c_total", 300),
    "increase(c_total[10m])": over("increase", "c_total", 600),
    'increase(c_total{i="b"}[18m])': over("increase", "c_total", 1080, Where("i", "=", "b")),  # with a reset
    'increase(c_total{i="a"}[100s])': over("increase", "c_total", 100, ONLY_A),
    "rate(c_total[40s])": over("rate", "c_total", 40),  # one point is none
    "avg_over_time(g[40s])": over("avg_over_time", "g", 40),
    "deriv(g[8m])": over("deriv", "g", 480),
    "predict_linear(g[8m], 600)": over("predict_linear", "g", 480, parameter=600),
    "changes(g[9m])": over("changes", "g", 540),
    "avg_over_time(g[6m])": over("avg_over_time", "g", 360),
    "min_over_time(g[6m] offset 4m)": over("min_over_time", "g", 360, ago=240),
    "count_over_time(g[6m])": over("count_over_time", "g", 360),
    "quantile_over_time(0.3, g[6m])": over("quantile_over_time", "g", 360, parameter=0.3),
    "sum(g)": Grouped("sum", G),
    "sum by (i) (g)": Grouped("sum", G, ("i",)),
    "max(g)": Grouped("max", G),
    "min(g)": Grouped("min", G),
    "bottomk(1, g)": Grouped("bottomk", G),
    "bottomk by (i) (1, g)": Grouped("bottomk", G, ("i",)),
    "g > 5": G > 5,
    "g <= 4": G <= 4,
    "g + c_total": G + C,
    "2 * g - 1": 2 * G - 1,
    "1 - g / 100": 1 - G / 100,
    "g / 0": G / 0,
    "0 * g / 0": 0 * G / 0,
    "(g + 1) / (g - c_total)": (G + 1) / (G - C),
    "g - (c_total - 1)": G - (C - 1),
    "g != g": Binary(G, "!=", G),
    "c_total - on (i) g": Binary(C, "-", G, on=("i",)),
    "g / on (j) group_left () sum(g)": Binary(G, "/", Grouped("sum", G), on=("j",), is_many=True),
    "g > on (i) (c_total > 60)": Binary(G, ">", C > 60, on=("i",)),
    "g and c_total > 60": G.also(C > 60),
    'g or on (i) c_total{i="a"}': G.or_else(latest("c_total", ONLY_A), on=("i",)),
    "g unless g > 5": G.unless(G > 5),
    "(g == 4 or g == 21) and c_total > 60": G.equals(4).or_else(G.equals(21)).also(C > 60),
    "abs(g - c_total)": Mapped("abs", G - C),
    "clamp_min(g, 5)": Mapped("clamp_min", G, 5),
    "time() - g": Now() - G,
    "vector(3)": 3.0,
}
AT_SECONDS = 20 * 60.0 + 30
"""Between two samples: whether a range holds its first moment differs between Prometheus 2 and 3."""
VALUES: dict[str, list[tuple[list[list[str]], float]]] = json.loads((Path(__file__).parent / "values.json").read_text())
"""What Prometheus computes of each, to six digits."""


def _store() -> SeriesStore:
    store = SeriesStore()
    for series, notation in SERIES.items():
        name, labels = named(series)
        for minute, value in enumerate(expanded(notation)):
            if value is not None:
                store.add(name, labels, 60.0 * minute, value)
    return store


@pytest.mark.parametrize("text", CONDITIONS)
def test_it_is_written_and_computed(text: str) -> None:
    assert promql(CONDITIONS[text]) == text
    found = [([list(pair) for pair in labels], value) for labels, value in evaluate(CONDITIONS[text], _store(), AT_SECONDS)]
    assert [labels for labels, _ in found] == [labels for labels, _ in VALUES[text]]
    assert [value for _, value in found] == pytest.approx([value for _, value in VALUES[text]], abs=1e-6, nan_ok=True)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: apt-get install prometheus)")
def test_prometheus_computes_the_same(tmp_path: Path) -> None:
    """Names of series are dropped, which we do not keep; so is what is not finite."""
    checks: list[dict[str, object]] = []
    for text, values in VALUES.items():
        rows = [
            {
                "labels": "{" + ",".join(f'{name}="{label}"' for name, label in labels) + "}",
                "value": math.floor(value * 1e6 + 0.5) / 1e6,
            }
            for labels, value in values
            if math.isfinite(value)
        ]
        nameless = f'label_replace(({text}) > -Inf < +Inf, "__name__", "", "", "")'
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
    assert [labels for labels, _ in evaluate(G, store, 60.0 * 20 + 2)] == [(("i", "b"),)]
    assert len(evaluate(G, store, 60.0 * 20)) == 2


def test_what_is_old_is_not_shown() -> None:
    assert len(evaluate(G, _store(), 60.0 * 24)) == 2 and evaluate(G, _store(), 60.0 * 26) == []
