"""Loads from options: the table, its scaling, defaults, and mistakes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.errors import BadInput
from windlass.tasks.bench.served.load import TABLE, LoadOptions, fitted, make_loads, parse_at_once, parse_rates

pytestmark = pytest.mark.pure

Row = tuple[int, float, int, int, int | None, float | None]


def made(**options: Any) -> list[Row]:
    loads = make_loads(LoadOptions(**options))
    return [(one.at_once, one.rate, one.prompt_tokens, one.new_tokens, one.requests, one.seconds) for one in loads]


def test_without_options_it_is_the_table() -> None:
    assert made() == made(preset="table") == [
        (1, 0, 1024, 128, 16, None),
        (8, 0, 1024, 128, 32, None),
        (32, 0, 1024, 256, 128, None),
        (64, 0, 1024, 256, 256, None),
        (128, 0, 1024, 256, 512, None),
        (256, 0, 512, 128, 1024, None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"preset": "table", "at_once": (8, 256)}, [(8, 0, 1024, 128, 32, None), (256, 0, 512, 128, 1024, None)]),
        ({"prompt_tokens": 64, "new_tokens": 32, "at_once": (1,), "preset": "table"}, [(1, 0, 64, 16, 16, None)]),
        ({"at_once": (1,), "prompt_tokens": 64, "new_tokens": 32}, [(1, 0, 64, 32, 16, None)]),
        ({"at_once": (4, 300)}, [(4, 0, 1024, 128, 16, None), (300, 0, 512, 128, 1200, None)]),
        ({"at_once": (2,), "seconds": 5.0}, [(2, 0, 1024, 128, None, 5.0)]),
        ({"at_once": (2,), "requests": 3}, [(2, 0, 1024, 128, 3, None)]),
        ({"rates": (0.5,)}, [(0, 0.5, 1024, 128, None, 60.0)]),
        ({"rates": (2.0,), "requests": 9, "prompt_tokens": 7}, [(0, 2.0, 7, 128, 9, None)]),
        ({"at_once": (1,), "rates": (2.0,)}, [(1, 0, 1024, 128, 16, None), (0, 2.0, 1024, 128, None, 60.0)]),
    ],
)
def test_loads(options: dict[str, Any], expected: list[Row]) -> None:
    assert made(**options) == expected


def test_the_table_scales_as_a_whole() -> None:
    assert [(prompt, new) for _, _, prompt, new, *_ in made(prompt_tokens=128, new_tokens=64)] == [
        (shape.prompt_tokens // 8, shape.new_tokens // 4) for shape in TABLE.values()
    ]
    assert {new for _, _, _, new, *_ in made(new_tokens=2)} == {2}, "an answer has at least two tokens"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"preset": "chair"}, "--load is table"),
        ({"preset": "table", "at_once": (3,)}, "no row for 3"),
        ({"preset": "table", "rates": (1.0,)}, "closed loop"),
        ({"requests": 1, "seconds": 1.0}, "one of them"),
        ({"requests": 0}, "--requests"),
        ({"seconds": 0.0}, "--seconds"),
        ({"seconds": float("nan")}, "--seconds"),
        ({"prompt_tokens": 0}, "--prompt-tokens"),
        ({"new_tokens": 1}, "--new-tokens"),
    ],
)
def test_mistakes(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(BadInput, match=expected):
        made(**options)


def test_lists() -> None:
    assert parse_at_once("1,8,32,8") == (1, 8, 32) and parse_rates("0.5,2") == (0.5, 2.0)
    for text in ("", "a", "0", "-1", "1,,2", "1.5", "99999"):
        with pytest.raises(BadInput, match="--at-once"):
            parse_at_once(text)
    for text in ("", "a", "0", "-1", "1,,2", "nan", "inf"):
        with pytest.raises(BadInput, match="--rate"):
            parse_rates(text)


@given(st.integers(0, 3000), st.lists(st.sampled_from(sorted(TABLE)), min_size=1, unique=True))
def test_loads_are_shortened_alike_until_they_fit(context: int, at_once: list[int]) -> None:
    loads = make_loads(LoadOptions(at_once=tuple(at_once)))
    found = fitted(loads, context)
    longest = max(shape.prompt_tokens + shape.new_tokens for shape in TABLE.values())
    if not context or longest <= context:
        assert found == loads
        return
    for before, after in zip(loads, found, strict=True):
        assert (after.at_once, after.requests) == (before.at_once, before.requests)
        assert after.prompt_tokens >= 1 and after.new_tokens >= 2
        # Of 3, a prompt of 2.4 and an answer of 0.6 that is 2 at least.
        assert after.prompt_tokens + after.new_tokens <= max(context, 4)
        assert abs(after.prompt_tokens - before.prompt_tokens * context / longest) <= 1
