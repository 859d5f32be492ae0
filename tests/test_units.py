"""Numbers with units, both ways; paths from a home directory."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass import units
from windlass.errors import BadInput
from windlass.units import (
    GB,
    GIB,
    format_bandwidth,
    format_bytes,
    format_context,
    format_count,
    format_seconds,
    parse_bit_rate,
    parse_bytes,
    parse_context,
    parse_count,
    parse_path,
)

pytestmark = pytest.mark.pure


SIZES = {
    "80GB": 80 * GB, "80GiB": 80 * GIB, "80 gib": 80 * GIB, "1.5TB": 1_500_000_000_000, "200g": 200 * GB,
    "512MiB": 2**29, "7B": 7, "0.5kb": 500, "2TiB": 2**41, "1e2GB": 100 * GB,
}  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), SIZES.items())
def test_bytes_read(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("15T", 15 * 10**12), ("4096", 4096), ("500B", 500 * 10**9), ("1.4m", 1_400_000), ("2k", 2000)]
)
def test_counts_read(text: str, expected: int) -> None:
    assert parse_count(text) == expected


@pytest.mark.parametrize(("text", "expected"), [("8k", 8192), ("128K", 131072), ("1M", 1048576), ("8192", 8192), ("1.5k", 1536)])
def test_contexts_read_in_powers_of_two(text: str, expected: int) -> None:
    assert parse_context(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("400Gb", 50e9), ("400Gb/s", 50e9), ("1Gbps", 125e6), ("100Mb", 12.5e6), ("3.2Tb/s", 400e9)]
)
def test_link_speeds_are_bits(text: str, expected: float) -> None:
    assert parse_bit_rate(text) == expected


@pytest.mark.parametrize(
    "text", ["", "GB", "-1GB", "80XB", "8.GB", "eight GB", "80GB80", "1e999GB", "nan", "80", "9" * 400 + "GB"]
)
def test_sizes_refused(text: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("read", "text"), [(parse_count, "15X"), (parse_context, "8g"), (parse_bit_rate, "400"), (parse_bit_rate, "1GiB")]
)
def test_other_refusals(read: object, text: str) -> None:
    assert callable(read)
    with pytest.raises(BadInput, match=text):
        read(text)


@given(st.text(max_size=12))
def test_any_text_is_read_or_refused(text: str) -> None:
    for read in (parse_bytes, parse_count, parse_context, parse_bit_rate):
        try:
            assert read(text) >= 0
        except BadInput as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (2**20, "1 MiB"),
        (80 * GB, "74.51 GiB"),
        (2**40, "1.00 TiB"),
        (-(2**30), "-1.00 GiB"),
    ],
)
def test_bytes_written(number: float, text: str) -> None:
    assert format_bytes(number) == text


@pytest.mark.parametrize(
    ("number", "text"), [(999, "999"), (1500, "1.50k"), (106_852_251_264, "106.9B"), (12.8e9, "12.80B"), (15e12, "15.00T")]
)
def test_counts_written(number: float, text: str) -> None:
    assert format_count(number) == text


def test_contexts_written() -> None:
    assert (format_context(131072), format_context(202752), format_context(1000)) == ("128k", "198k", "1,000")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (5e-6, "5 us"),
        (0.0123, "12.3 ms"),
        (1.0, "1.0 s"),
        (119.0, "119.0 s"),
        (600, "10 min"),
        (7200, "2.0 h"),
        (86400 * 10, "10.0 days"),
    ],
)
def test_seconds_written(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_a_size_without_a_unit_is_answered_with_one() -> None:
    with pytest.raises(BadInput, match="'128' has no unit; write 128GB"):
        parse_bytes("128")


@pytest.mark.parametrize(
    ("rate", "text"), [(2.5e9, "2.50 GB/s"), (1e9, "1.00 GB/s"), (2e7, "20 MB/s"), (2.4e6, "2.4 MB/s"), (0.0, "0.0 MB/s")]
)
def test_bandwidths_written(rate: float, text: str) -> None:
    assert format_bandwidth(rate) == text


def test_the_home_of_nobody_is_one_line() -> None:
    assert parse_path("~") == Path.home() and parse_path(Path("a/~b")) == Path("a/~b")
    with pytest.raises(BadInput, match=r"^~nobody-of-that-name/x: nobody of that name has a home directory here"):
        parse_path("~nobody-of-that-name/x")


def test_nothing_else_expands_homes() -> None:
    """`Path.expanduser` ends with a traceback."""
    source = Path(units.__file__).parent
    assert [path.name for path in source.rglob("*.py") if ".expanduser(" in path.read_text()] == ["units.py"]
