"""Whom do the others wait for? Two processes, one of which is slow."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")
if str(Path(__file__).parents[1]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parents[1]))

from clock_rank import run_rank
from processes import exit_codes

from windlass.tasks.train.progress import RankTimes

pytestmark = [pytest.mark.cpu, pytest.mark.multi]


def test_the_slow_rank_waits_least(tmp_path: Path) -> None:
    assert exit_codes(2, run_rank, str(tmp_path), 1) == [0, 0]
    first, slow = msgspec.json.decode((tmp_path / "times.json").read_bytes(), type=tuple[RankTimes, ...])
    assert (first.rank, slow.rank) == (0, 1) and first.steps == slow.steps == 10 and first.host
    waited = [one.collective_seconds["gradients"] for one in (first, slow)]
    assert waited[0] > waited[1]
    computed = [one.step_seconds - sum(one.collective_seconds.values()) for one in (first, slow)]
    assert computed[1] > computed[0]
