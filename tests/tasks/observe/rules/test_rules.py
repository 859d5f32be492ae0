"""The rules as Prometheus gets them: a change of a condition shows here as a change of its text."""

from __future__ import annotations

from pathlib import Path

import pytest

from windlass.tasks.observe.render.rules import rules_file
from windlass.tasks.observe.rules.all_rules import all_groups

pytestmark = pytest.mark.pure
WRITTEN = Path(__file__).parent / "rules.yml"


def test_rules_are_written_as_before() -> None:
    """A rule that should change: write the file again, and read the difference."""
    assert rules_file(all_groups()) == WRITTEN.read_text()
