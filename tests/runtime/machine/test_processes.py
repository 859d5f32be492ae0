"""Commands that run on this machine, from a made-up /proc."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from windlass.runtime.machine.processes import running_commands, windlass_arguments

pytestmark = pytest.mark.pure


def process(proc: Path, pid: int, parent: int, line: str, kib: int = 100) -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "cmdline").write_text(line.replace(" ", "\0") + "\0")
    (folder / "stat").write_text(f"{pid} (a) name (x)) S {parent} 1 1")
    (folder / "status").write_text(f"Name:\tx\nVmRSS:\t{kib} kB\n")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("windlass serve X", ("serve", "X")),
        ("/usr/bin/python3 /usr/bin/windlass serve X", ("serve", "X")),
        ("python -m windlass run X", ("run", "X")),
        ("python -u -m windlass run X", ("run", "X")),
        ("vim windlass", ()),
        ("python", ()),
        ("", ()),
    ],
)
def test_which_lines_are_ours(line: str, expected: tuple[str, ...]) -> None:
    assert windlass_arguments(line.split()) == expected


def test_a_command_counts_what_it_started(tmp_path: Path) -> None:
    process(tmp_path, 100, 1, "python /bin/windlass serve X")
    process(tmp_path, 101, 100, "python -c engine", kib=1000)
    process(tmp_path, 102, 101, "python -m windlass worker", kib=10)
    process(tmp_path, 200, 1, "bash")
    process(tmp_path, os.getpid(), 1, "windlass ps")
    (tmp_path / "meminfo").write_text("")
    found = running_commands(tmp_path)
    assert [(one.pid, one.arguments, one.memory_bytes) for one in found] == [(100, ("serve", "X"), 1110 * 1024)]
