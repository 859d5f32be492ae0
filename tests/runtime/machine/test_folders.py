"""Where the cache is."""

from __future__ import annotations

from pathlib import Path

import pytest

from windlass.runtime.machine.folders import cache_dir

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"WINDLASS_CACHE": "/w", "XDG_CACHE_HOME": "/x"}, "/w"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/windlass"),
        ({"XDG_CACHE_HOME": ""}, "/home/me/.cache/windlass"),
        ({}, "/home/me/.cache/windlass"),
    ],
)
def test_where_the_cache_is(given: dict[str, str], expected: str) -> None:
    assert str(cache_dir(given, Path("/home/me"))) == expected
