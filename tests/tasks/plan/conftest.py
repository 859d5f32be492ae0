"""Counting instead of timing: how much work a search does is the same on every machine, however busy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from cProfile import Profile
from types import CodeType
from typing import Any

import pytest


@pytest.fixture
def counted() -> Callable[[Callable[[], Any]], tuple[Any, Counter[str]]]:
    """What a call gives, and how often which of our functions was called for it, by name (`Class.method`)."""

    def run(work: Callable[[], Any]) -> tuple[Any, Counter[str]]:
        profile = Profile(builtins=False)
        profile.enable()
        try:
            found = work()
        finally:
            profile.disable()
        calls: Counter[str] = Counter()
        for entry in profile.getstats():
            if isinstance(entry.code, CodeType) and "/windlass/" in entry.code.co_filename:
                calls[entry.code.co_qualname] += entry.callcount
        return found, calls

    return run
