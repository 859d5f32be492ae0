"""The suite itself: what conftest.py promises."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

HERE = Path(__file__).parent
HUNG_SECONDS = 300


def test_files_that_are_named_for_make_quick_are_there(pytestconfig: pytest.Config) -> None:
    (shared,) = [plugin for plugin in pytestconfig.pluginmanager.get_plugins() if hasattr(plugin, "SLOW_FILES")]
    there = {str(path.relative_to(HERE).with_suffix("")) for path in HERE.rglob("test_*.py")}
    assert there >= shared.SLOW_FILES
    assert there >= shared.CHEAP_FILES
    assert not shared.SLOW_FILES & shared.CHEAP_FILES


def run_pytest(folder: Path, *words: str, ignoring_interrupts: bool = False) -> str:
    """A few tests beside a copy of our conftest, as somebody under nohup would run them."""
    (folder / "conftest.py").write_text((HERE / "conftest.py").read_text())
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-ra", *words, str(folder)]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if ignoring_interrupts else None
    try:
        made = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=HUNG_SECONDS, check=False)
    finally:
        if ignoring_interrupts:
            signal.signal(signal.SIGINT, before)
    return made.stdout + made.stderr


MISSING = """
import pytest

def test_one(): pytest.importorskip("no_such_package.inner")
def test_two(): pytest.importorskip("no_such_package")
def test_three(): pytest.skip("no moon today")
def test_four(): pass
"""


def test_what_is_missing_is_one_line(tmp_path: Path) -> None:
    """Of several tests and files, whether a test skips itself or its module cannot be imported. Ours are never optional."""
    for name in ("test_a.py", "test_b.py"):
        (tmp_path / name).write_text(MISSING)
    for name in ("test_c.py", "test_d.py"):
        (tmp_path / name).write_text("import sys; sys.modules['deepspeed'] = None\nimport deepspeed\n")
    (tmp_path / "test_e.py").write_text("import windlass.no_such_module\n")
    shown = run_pytest(tmp_path, "--continue-on-collection-errors")
    lines = [line for line in shown.splitlines() if line.startswith("SKIPPED")]
    assert len([line for line in lines if line.endswith(": no_such_package is not installed")]) == 1, shown
    assert len([line for line in lines if line.endswith(": no moon today")]) == 1 and "SKIPPED [4]" in shown
    assert sum("deepspeed is not installed" in line for line in lines) == 1 and len(lines) == 3
    assert "ERROR" in shown and "no_such_module" in shown and "2 passed" in shown


INTERRUPTED = """
import signal, subprocess, sys

def test_a_child_can_be_interrupted():
    child = subprocess.Popen([sys.executable, "-c", "import signal; print('ready', flush=True); signal.pause()"], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"ready\\n"
    child.send_signal(signal.SIGINT)
    assert child.wait(60) != 0
"""


def test_children_can_be_interrupted_under_nohup(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(INTERRUPTED)
    assert "1 passed" in run_pytest(tmp_path, ignoring_interrupts=True)


def test_nothing_that_is_started_compiles_all_of_windlass_again() -> None:
    assert "PYTHONDONTWRITEBYTECODE" not in os.environ and not sys.dont_write_bytecode
