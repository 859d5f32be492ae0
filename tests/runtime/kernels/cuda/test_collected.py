"""Compiled kernels are found again by their sources and definitions."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from windlass.runtime.kernels.cuda import driver

pytestmark = pytest.mark.cpu


def test_sources_are_hashed_once() -> None:
    """Whatever the definitions; another text, and other definitions, are other kernels."""
    assert driver._digest("a") == driver._digest("a") != driver._digest("b")
    assert driver._digest.cache_info().hits
