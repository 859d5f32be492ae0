"""Runs that are killed: always resumable, never a damaged checkpoint, and in the end the weights of a run nobody disturbed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest

pytest.importorskip("torch")

import tiny_run

pytestmark = pytest.mark.cpu


def measured(*options: str) -> dict[str, Any]:
    command = [sys.executable, str(tiny_run.ROOT / "bench" / "train" / "kills.py"), *options]
    done = subprocess.run(command, env=tiny_run.ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.long
def test_kills_at_random_moments() -> None:
    """Fifty with `python bench/train/kills.py`."""
    found = measured("--kills", "2", "--steps", "6", "--seed", str(time.time_ns()))
    assert found["kills"] == 2 and found["damaged"] == [] and found["identical"] == found["runs"] > 0, found


def test_an_end_at_every_kind_of_write() -> None:
    """Every eighth sync, rename, unlink and removal; all of them with `--points`."""
    found = measured("--points", "8")
    assert found["points"] > 10 and found["damaged"] == []
    assert {"before the first checkpoint", "while saving", "while removing an old one"} <= found["stages"].keys()
