"""Tests here share a module that stands beside them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)


@pytest.fixture(scope="session", autouse=True)
def server_ends() -> Iterator[None]:
    import hub_processes

    yield
    hub_processes.stop_server()
