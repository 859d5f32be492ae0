"""Carbon intensity by the hour, from files."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.hardware.hourly import parse_hourly
from windlass.errors import BadInput

pytestmark = pytest.mark.pure
DAY = "".join(f"{hour},{100 + hour}\n" for hour in range(24))


def test_hours_of_a_day() -> None:
    found = parse_hourly(DAY, "day.csv")
    assert found.at(0.0) == 100 and found.at(5 * 86400 + 13 * 3600 + 59) == 113


def test_given_hours_in_any_zone() -> None:
    found = parse_hourly("time,grams\n1970-01-01T02:00,50\n1970-01-01 05:30+02:00,70\n1970-01-01T03:45Z,90\n", "t.csv")
    assert (found.at(2 * 3600), found.at(3 * 3600), found.at(4 * 3600)) == (50, 80, None), "two half hours are a mean"


def test_an_export_with_other_columns() -> None:
    heading = "Datetime (UTC),Country,Carbon Intensity gCO2eq/kWh (direct),Carbon intensity gCO2eq/kWh (Life cycle)"
    assert parse_hourly(f"{heading}\n1970-01-01 00:00:00,Nowhere,10,25.5\n", "e.csv").at(1.0) == 25.5


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("hour,grams\n", "nothing below"),
        ("1,\0\n", "x.csv"),
        ("a,b\n1,2\n", "no column of times"),
        ("1,2\n", "0 to 23, each once"),
        (DAY + "3,5\n", "0 to 23, each once"),
        ("2026-01-01T00:00,-4\n", "line 1: '-4' is no intensity"),
        ("2026-01-01T00:00,nan\n", "line 1"),
        ("2026-01-01T00:00\n", "1 columns"),
        ("2026-13-01T00:00,5\n", "neither an hour"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        parse_hourly(text, "x.csv")


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        found = parse_hourly(text, "x.csv")
    except BadInput:
        return
    assert found.by_time or found.by_hour_of_day
