"""The vocabulary keeps Prometheus' conventions, and the text format is read as it is written."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.metrics import serving
from windlass.core.metrics.exposition import Sample, read, sample_line, text_of
from windlass.core.metrics.metric import counter
from windlass.core.metrics.vocabulary import ALL, METRICS, SERIES

pytestmark = pytest.mark.pure

UNITS = "seconds|bytes|ratio|joules|watts|tokens|celsius|kwh|usd"


@pytest.mark.parametrize("name", [name for name in METRICS if name.startswith("windlass_")])
def test_our_names_keep_the_conventions(name: str) -> None:
    found = METRICS[name]
    assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
    assert name.endswith("_total") == (found.kind == "counter")
    assert (found.kind == "histogram") == bool(found.buckets)
    assert found.help.endswith((".", "even."))
    assert list(found.buckets) == sorted(found.buckets)
    if found.kind == "histogram":
        assert re.search(rf"_({UNITS})$", name)


def test_no_name_twice() -> None:
    assert len(ALL) == len(METRICS) > 100 and set(serving.FLEET) < set(ALL)


def test_a_histogram_has_three_series() -> None:
    name = "windlass_time_to_first_token_seconds"
    assert {f"{name}_bucket", f"{name}_count", f"{name}_sum"} <= set(SERIES) and name not in SERIES


LABEL_TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"))


@given(LABEL_TEXT, st.floats(allow_nan=False))
def test_what_is_written_is_read(text: str, value: float) -> None:
    made = text_of([(counter("a_total", "Help with \\ and\nlines.", "x"), [({"x": text}, value)])])
    assert list(read(made)) == [Sample("a_total", (("x", text),), value)]


def test_odd_values_and_lines() -> None:
    assert sample_line("a", {}, math.nan) == "a NaN" and sample_line("a", {}, math.inf) == "a +Inf"
    assert sample_line("a", {}, 3.0) == "a 3" and sample_line("a", {}, 0.1) == "a 0.1"
    text = (
        '# HELP a x\n# TYPE a counter\na{b="c",d="e\\"f"} 1.5 1700000000000\nno sample here at all\nvllm:b_total 2\na{b="c"} x\n'
    )
    assert list(read(text)) == [Sample("a", (("b", "c"), ("d", 'e"f')), 1.5), Sample("vllm:b_total", (), 2.0)]
