"""Fixtures; what they are made of is in browsed.py beside this, which needs playwright."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if str(Path(__file__).parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent))

if TYPE_CHECKING:
    from browsed import Served, Visit


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    from browsed import Stage, serve

    yield from serve(Stage())


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from browsed import launched

    with launched() as browser:
        yield browser


@pytest.fixture(scope="module")
def profile(browser: Any) -> Any:
    """For visits that leave nothing behind: a new one, or only a new page in it, costs as much as a test."""
    from browsed import new_profile

    return new_profile(browser)


@pytest.fixture
def visit(browser: Any, profile: Any, served: Served) -> Iterator[Visit]:
    from browsed import Visit

    visit = Visit(browser, served.url, profile)
    yield visit
    visit.close()


@pytest.fixture
def page(visit: Visit) -> Any:
    from browsed import expect

    page = visit.open()
    expect(page.locator("#model")).to_have_value("stage")
    return page
