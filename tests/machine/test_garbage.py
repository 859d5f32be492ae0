"""Imports without garbage collections."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.pure

COUNTED = """
import gc
from windlass.machine.garbage import importing

collections = []
gc.callbacks.append(lambda phase, about: collections.append(about["generation"]))
with importing():
    made = [[] for _ in range(100_000)]
    assert not collections and not gc.isenabled()
assert gc.isenabled() and gc.get_freeze_count() > 100_000
gc.collect()
assert collections and not any(one is made for one in gc.get_objects())
gc.disable()
with importing():
    pass
assert not gc.isenabled()
"""


def test_nothing_is_collected_and_what_was_made_is_not_looked_at_again() -> None:
    """In a process of its own: what is frozen stays so."""
    subprocess.run([sys.executable, "-c", COUNTED], check=True)


FAILED = """
import gc
from windlass.machine.garbage import importing

try:
    with importing():
        import no_such_module
except ModuleNotFoundError:
    assert gc.isenabled() and gc.get_freeze_count()
"""

THERE = """
import gc, sys
from windlass.machine.garbage import importing

sys.modules["torch"] = gc
with importing():
    assert gc.isenabled()
assert not gc.get_freeze_count()
"""


@pytest.mark.parametrize("script", [FAILED, THERE], ids=["an import that fails", "torch is there already"])
def test_collections_go_on(script: str) -> None:
    subprocess.run([sys.executable, "-c", script], check=True)
