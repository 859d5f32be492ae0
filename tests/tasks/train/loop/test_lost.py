"""A rank whose neighbour ends: one line, not a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from lost_rank import LOST, run_rank
from processes import exit_codes

from windlass.tasks.train.loop.lost import OutOfDeviceMemory, RankLost, plain_errors

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


@pytest.mark.parametrize(
    "error", [RuntimeError("[../gloo/transport/tcp/pair.cc:598] Connection closed by peer"), dist.DistNetworkError("timed out")]
)
def test_ranks_that_do_not_meet(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no group yet, or no more."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RankLost, match="the connection to another rank broke"), plain_errors("runs"):
        raise error


def test_a_process_that_is_alone_has_no_connection() -> None:
    with pytest.raises(RuntimeError, match="socket") as caught, plain_errors("runs"):
        raise RuntimeError("a socket of the program")
    assert type(caught.value) is RuntimeError
