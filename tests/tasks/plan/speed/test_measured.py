"""The plan's predictions against what the embedded engine was measured at on one H200 (tests/data/measured_h200.toml)."""

from __future__ import annotations

import importlib.util
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.pure

_module = importlib.util.spec_from_file_location(
    "predicted_h200", Path(__file__).parents[4] / "bench" / "plan" / "predicted_h200.py"
)
assert _module is not None and _module.loader is not None
bench = importlib.util.module_from_spec(_module)
sys.modules["predicted_h200"] = bench
_module.loader.exec_module(bench)

RUNS = list(bench.measured())
BOUNDS = {"decode": 0.15, "prefill": 0.2}


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_predictions_are_near_what_was_measured(run: Any) -> None:
    assert abs(run.error) < BOUNDS[run.what], f"{run.predicted:,.0f} tokens/s predicted, {run.tokens_per_second:,.0f} measured"


@pytest.mark.parametrize("run", [run for run in RUNS if run.what == "decode"], ids=str)
def test_nothing_measured_or_predicted_passes_the_ceiling(run: Any) -> None:
    ceiling = run.speed.decode_ceiling_tokens_per_second
    assert run.tokens_per_second < ceiling and run.predicted < ceiling


def test_errors_have_no_side() -> None:
    assert abs(statistics.median(run.error for run in RUNS)) < 0.05
