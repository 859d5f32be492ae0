"""A short soak of the whole program: mixed traffic, clients that leave, rubbish, engines killed. Longer: WINDLASS_SOAK_MINUTES=20."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cpu, pytest.mark.multi]


@pytest.mark.long
def test_every_request_ends_properly_and_nothing_is_left_behind(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    sys.path.insert(0, str(Path(__file__).parents[4] / "bench" / "serve"))
    import soak

    minutes = float(os.environ.get("WINDLASS_SOAK_MINUTES", "0.7"))
    found = soak.run(str(smollm2), minutes, at_once=12, kill_every=12.0)
    told = capsys.readouterr().out
    assert found == [], told
    assert "chats                      200" in told and " 0 engines killed" not in told
    with capsys.disabled():
        print(f"\n{told}")
