"""Checkpoints of several processes: cut by one world size and put together at another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("torch")

import checkpoint_ranks as ranks

from windlass.errors import BadCheckpoint, BadInput
from windlass.tasks.train.checkpoint.consolidate import consolidate, read_hostfile

pytestmark = pytest.mark.multi


@pytest.mark.parametrize(("saving", "loading"), [(2, 1), (1, 4)])
def test_another_world_size(tmp_path: Path, saving: int, loading: int) -> None:
    (tmp_path / "saved_by").write_text(str(saving))
    assert ranks.exit_codes(saving, ranks.save, str(tmp_path)) == [0] * saving
    written = sorted(path.name for path in (tmp_path / "run" / "step-00000003").iterdir())
    assert written == [".metadata", *(f"__{rank}_0.distcp" for rank in range(saving)), "manifest.json"]
    assert ranks.exit_codes(loading, ranks.load, str(tmp_path)) == [0] * loading


def test_parts_on_local_disks_are_brought_together(tmp_path: Path) -> None:
    (tmp_path / "saved_by").write_text("2")
    local = tmp_path / "local"
    assert ranks.exit_codes(2, ranks.save, str(tmp_path), str(local)) == [0, 0]
    assert [path for path in local.rglob("*") if path.is_file()] == []
    assert ranks.exit_codes(1, ranks.load, str(tmp_path)) == [0]


def test_a_disk_that_is_full_on_one_rank(tmp_path: Path) -> None:
    assert ranks.exit_codes(2, ranks.fill_one_disk, str(tmp_path)) == [0, 0]


# --- brought together later, from a hostfile --------------------------------------------------------------------------


SSH = """#!/bin/sh
# Stands for ssh: the last two words are a host and a command; a host is a folder of its own.
while [ "$#" -gt 2 ]; do shift; done
[ -d "$HOSTS/$1" ] || { echo "ssh: Could not resolve hostname $1" >&2; exit 255; }
ROOT="$HOSTS/$1" exec sh -c "$(printf %s "$2" | sed "s#/disk[^ ]*#\\"$HOSTS/$1&\\"#g")"
"""


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two hosts that only ssh reaches, each with the part of one rank on its disk."""
    assert ranks.exit_codes(2, ranks.save_out_of_reach, str(tmp_path), str(tmp_path / "local")) == [0, 0]
    for rank in range(2):
        host = tmp_path / "hosts" / f"node{rank}"
        host.mkdir(parents=True)
        (tmp_path / "local" / str(rank)).rename(host / "disk")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("HOSTS", str(tmp_path / "hosts"))
    (tmp_path / "hostfile").write_text("node0 slots=1\nnode1 slots=1  # the second\n")
    return tmp_path


def test_parts_of_hosts_are_brought_together(nodes: Path) -> None:
    """And loaded by one process; then nothing is left on the hosts."""
    said: list[str] = []
    (done,) = consolidate(Path("/disk"), nodes / "run", read_hostfile(nodes / "hostfile"), said.append)
    assert (done.step, done.num_hosts, done.num_files, said) == (3, 2, 3, [])
    assert [path for path in (nodes / "hosts").rglob("*") if path.is_file()] == []
    (nodes / "saved_by").write_text("2")
    assert ranks.exit_codes(1, ranks.load, str(nodes)) == [0]
    assert consolidate(Path("/disk"), nodes / "run", read_hostfile(nodes / "hostfile"), said.append) == []


def test_a_part_that_arrives_damaged_stays(nodes: Path) -> None:
    (part,) = (nodes / "hosts" / "node1" / "disk").rglob("*.distcp")
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    before = sorted(str(path) for path in (nodes / "hosts").rglob("*"))
    with pytest.raises(BadCheckpoint, match="was damaged while copying"):
        consolidate(Path("/disk"), nodes / "run", read_hostfile(nodes / "hostfile"), print)
    assert sorted(str(path) for path in (nodes / "hosts").rglob("*")) == before
    assert not (nodes / "run" / "step-00000003").exists()


def test_a_host_that_is_missing(nodes: Path) -> None:
    said: list[str] = []
    (nodes / "hostfile").write_text("node0\n")
    assert consolidate(Path("/disk"), nodes / "run", read_hostfile(nodes / "hostfile"), said.append) == []
    assert said == ["skipping step 3: no host has the parts of ranks 1"]
    (nodes / "hostfile").write_text("node7\n")
    with pytest.raises(BadInput, match="ssh to node7 failed: ssh: Could not resolve hostname node7"):
        consolidate(Path("/disk"), nodes / "run", read_hostfile(nodes / "hostfile"), print)


@pytest.mark.parametrize("text", ["", "# nobody\n", "-oProxyCommand=x\n", "a b\n", "a;b\n"])
def test_a_hostfile_that_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text(text)
    with pytest.raises(BadInput):
        read_hostfile(tmp_path / "hostfile")
