"""Ranks that torchrun starts: what its environment says, and a model that answers over two of its processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from windlass.core.layout import Layout
from windlass.errors import BadInput, Impossible

pytest.importorskip("torch")
from windlass.engine.torchrun import Started, layout_of, started

pytestmark = pytest.mark.multi

GIVEN = {"RANK": "1", "WORLD_SIZE": "4", "GROUP_RANK": "0", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_what_the_environment_says() -> None:
    here = started({**GIVEN, "TORCHELASTIC_RUN_ID": "seven", "TORCHELASTIC_RESTART_COUNT": "2"})
    assert here == Started(rank=1, world=4, node=0, address="10.0.0.1", port=29500, life="seven.2")


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"RANK": None}, "RANK is not set; start this with torchrun"), ({"WORLD_SIZE": "many"}, "not understood")],
)
def test_an_environment_that_is_not_torchruns(changes: dict[str, str | None], words: str) -> None:
    given = {name: value for name, value in {**GIVEN, **changes}.items() if value is not None}
    with pytest.raises(BadInput, match=words):
        started(given)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (Layout(), Layout(tp=4)),
        (Layout(tp=2, pp=2), Layout(tp=2, pp=2)),
        (Layout(pp=4), Layout(pp=4)),
        (Layout(tp=4, ep=2), Layout(tp=4, ep=2)),
    ],
)
def test_all_processes_are_used(asked: Layout, found: Layout) -> None:
    assert layout_of(started(GIVEN), asked) == found


def test_another_number_of_processes_is_refused() -> None:
    with pytest.raises(Impossible, match="--tp 2 --pp 1 is 2 ranks, and torchrun started 4"):
        layout_of(started(GIVEN), Layout(tp=2))


def torchrun(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        "windlass.cli.torchrun",
        *map(str, words),
    ]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", "WINDLASS_THREADS": "1"},
    )


def test_a_model_over_two_of_its_processes(smollm2: Path) -> None:
    """In fp32 the text is that of one process (tests/fleet/test_run_workers.py)."""
    words = ["--prompt", "What is the capital of France?", "--temperature", "0", "--exact", "--context", "128", "--device", "cpu"]
    done = torchrun("run", smollm2, *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "The capital of France is Paris."
    assert "Traceback" not in done.stderr and "rank 1" not in done.stderr


def test_what_cannot_be_is_one_line(tmp_path: Path) -> None:
    """The others do not wait for ever."""
    done = torchrun("run", tmp_path / "no-such-model", "--prompt", "a")
    assert done.returncode != 0
    assert [line for line in done.stderr.splitlines() if line.startswith("windlass:")], done.stderr
