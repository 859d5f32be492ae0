"""The roofline against published serving tables: a ceiling must lie above what anybody measured, and predictions near it."""

from __future__ import annotations

import importlib.util
import statistics
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[4]
_module = importlib.util.spec_from_file_location("published_serving", ROOT / "bench" / "plan" / "published_serving.py")
assert _module is not None and _module.loader is not None
bench = importlib.util.module_from_spec(_module)
_module.loader.exec_module(bench)

TABLES: list[dict[str, Any]] = tomllib.loads((ROOT / "tests/data/published_serving.toml").read_text())["table"]
ROWS = [(table, *row) for table in TABLES for row in table["rows"]]


@pytest.mark.parametrize(
    ("table", "prompt", "new", "published"), ROWS, ids=lambda value: str(value.get("model") if isinstance(value, dict) else value)
)
def test_ceiling_is_above_the_published_rate(table: dict[str, Any], prompt: int, new: int, published: float) -> None:
    assert bench.predict(table, prompt, new).speed.decode_ceiling_tokens_per_second > published


def test_dense_predictions_are_near() -> None:
    """No constant is fitted to these tables, so this bound is wide; docs/reference/plan.md has every row."""
    errors = [
        abs(bench.predict(table, prompt, new).speed.sustained_tokens_per_second / published - 1)
        for table, prompt, new, published in ROWS
        if "ShareGPT" not in table["source"]
    ]
    assert statistics.median(errors) < 0.25
