"""Each fault made for real is found and named by `windlass check`; the same machine without it gives no alarm."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import injected

pytestmark = [
    pytest.mark.multi,
    pytest.mark.long,
    pytest.mark.skipif(bool(injected.missing()), reason=injected.missing() or "-"),
]


@pytest.mark.parametrize("fault", injected.FAULTS, ids=str)
def test_a_fault_is_found_and_named(fault: injected.Fault, tmp_path: Path) -> None:
    injected.found(fault, tmp_path)


def test_without_a_fault_nothing_is_found(tmp_path: Path) -> None:
    assert [row for row in injected.report(None, tmp_path)["checks"] if row["state"] == "fail"] == []
