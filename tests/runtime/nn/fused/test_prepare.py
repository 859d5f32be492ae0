"""Attention of new prompts is planned before the first request."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from windlass.runtime.nn.fused.prompts import padded_rows, planned_rows

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("most", [1, 256, 300, 2048, 3000, 8192])
def test_attention_is_planned_for_all_usual_lengths(most: int) -> None:
    found = planned_rows(most)
    assert {padded_rows(rows) for rows in range(1, min(most, 2048) + 1)} <= set(found)
    assert all(padded_rows(rows) == rows <= padded_rows(most) for rows in found) and len(found) == len(set(found)) < 16
