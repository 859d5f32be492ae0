"""A rank whose neighbour ends: one line, not a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from lost_rank import LOST, run_rank
from processes import exit_codes

from windlass.tasks.train.loop.lost import OutOfDeviceMemory, plain_errors

pytestmark = pytest.mark.cpu


@pytest.mark.multi
def test_a_rank_that_is_killed_is_told_of(tmp_path: Path) -> None:
    assert exit_codes(2, run_rank, str(tmp_path)) == [LOST, -9]
    said = (tmp_path / "said").read_text()
    assert said.startswith("the connection to another rank broke (") and "continue with --resume" in said and "\n" not in said


def test_a_mistake_of_the_program_stays_one() -> None:
    with pytest.raises(RuntimeError, match="shapes") as caught, plain_errors("runs"):
        raise RuntimeError("shapes do not match")
    assert type(caught.value) is RuntimeError


def test_a_full_gpu() -> None:
    with (
        pytest.raises(OutOfDeviceMemory, match=r"Tried to allocate 2.00 GiB; lower batch\.micro_batch") as caught,
        plain_errors("runs"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory, Tried to allocate 2.00 GiB. GPU 0 has ...")
    assert caught.value.exit_code == 3
