"""The suite itself: what conftest.py promises."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from subprocesses import everyone

pytestmark = pytest.mark.pure

HERE = Path(__file__).parent
HUNG_SECONDS = 300


def test_files_that_are_named_for_make_quick_are_there(pytestconfig: pytest.Config) -> None:
    (shared,) = [plugin for plugin in pytestconfig.pluginmanager.get_plugins() if hasattr(plugin, "SLOW_FILES")]
    there = {str(path.relative_to(HERE).with_suffix("")) for path in HERE.rglob("test_*.py")}
    assert there >= shared.SLOW_FILES
    assert there >= shared.CHEAP_FILES
    assert not shared.SLOW_FILES & shared.CHEAP_FILES


def run_pytest(folder: Path, *words: str, ignoring_interrupts: bool = False, before: str = "", **settings: str) -> str:
    """A few tests beside a copy of our conftest, as somebody under nohup would run them."""
    (folder / "conftest.py").write_text((HERE / "conftest.py").read_text() + before)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-ra", *words, str(folder)]
    environment = os.environ | {"PYTHONPATH": str(HERE)} | settings
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if ignoring_interrupts else None
    try:
        made = subprocess.run(
            command, capture_output=True, text=True, cwd=folder, env=environment, timeout=HUNG_SECONDS, check=False
        )
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


# --- what hangs, and what is left running (time_limits.py)

AFTER_A_MOMENT = (
    "import time_limits\n(time_limits.TEST_SECONDS, time_limits.GRACE_SECONDS, time_limits.LEFT_SECONDS) = 3.0, 2.0, 2.0\n"
)
SOON_OVER = """
import subprocesses, threading, time

def pytest_runtest_logstart():
    threading.Thread(target=end_when_it_waits, daemon=True).start()

@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    global limit
    limit = config.pluginmanager.get_plugin("run limit")

def end_when_it_waits():
    while limit is not None and not any("sleep" in one.words for one in __import__("time_limits").descendants()):
        time.sleep(0.05)
    time.sleep(0.5)
    if limit is not None:
        limit.end()
"""
HANGS = """
import ctypes, signal, subprocess, threading, time

WAITS = ["sleep", "3600.0{mark}"]

def test_that_waits_for_a_child():
    with subprocess.Popen(WAITS) as child:
        child.wait()

def test_that_waits_in_a_finally():
    child = subprocess.Popen(WAITS)
    try:
        child.wait(timeout=1)
    finally:
        child.wait()

def test_whose_child_is_an_orphan_and_holds_a_pipe():
    subprocess.run("sleep 3600.0{mark} & exit", shell=True, stdout=subprocess.PIPE)

def test_that_waits_for_itself():
    threading.Event().wait()

def test_in_between():
    pass

def test_that_does_not_listen():
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    while True:
        time.sleep(0.1)

def test_in_a_function_that_keeps_the_lock_of_python():
    ctypes.PyDLL(None).sleep(3600)
"""

LEAVES = """
import subprocess

def test_that_leaves_a_process():
    subprocess.Popen(["sleep", "3600.0{mark}"], start_new_session=True)

def test_after_it():
    pass
"""


def test_what_hangs_is_ended_and_the_rest_goes_on(tmp_path: Path) -> None:
    mark = str(os.getpid())
    (tmp_path / "test_hangs.py").write_text(HANGS.replace("{mark}", mark))
    (tmp_path / "test_leaves.py").write_text(LEAVES.replace("{mark}", mark))
    shown = run_pytest(tmp_path, "-n", "4", before=AFTER_A_MOMENT)
    assert re.search("6 failed, 3 passed.* 1 error", shown), shown
    for name in (
        "that_waits_for_a_child", "that_waits_in_a_finally", "whose_child_is_an_orphan_and_holds_a_pipe", "that_waits_for_itself",
        "that_does_not_listen", "in_a_function_that_keeps_the_lock_of_python",
    ):  # fmt: skip
        assert f"FAILED test_hangs.py::test_{name}" in shown, (name, shown)
    assert "child.wait(timeout=1)" in shown or "child.wait()" in shown, "stacks are shown"
    assert f"S sleep 3600.0{mark}" in shown and "tests of test_leaves.py leave processes behind" in shown
    assert not [one for one in everyone() if f"3600.0{mark}" in one.words and not one.is_over]


def test_a_run_has_a_limit(tmp_path: Path) -> None:
    (tmp_path / "test_hangs.py").write_text(HANGS.replace("{mark}", str(os.getpid())))
    shown = run_pytest(tmp_path, "-n", "1", "-k", "for_a_child", before=SOON_OVER)
    assert "The run is over its limit of" in shown and "test_that_waits_for_a_child, for" in shown, shown
    assert "in test_that_waits_for_a_child" in shown, "stacks of the worker"
    assert not [one for one in everyone() if f"3600.0{os.getpid()}" in one.words and not one.is_over]


def test_no_test_waits_for_a_process_that_it_does_not_kill() -> None:
    """`with subprocess.Popen(...)` waits, however the block is left; `subprocesses.started` kills."""
    for path in HERE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            for item in node.items if isinstance(node, ast.With | ast.AsyncWith) else ():
                assert "Popen" not in ast.unparse(item.context_expr), f"{path}:{node.lineno}"


def test_nothing_that_is_started_compiles_all_of_windlass_again() -> None:
    assert "PYTHONDONTWRITEBYTECODE" not in os.environ and not sys.dont_write_bytecode


# --- CI


def test_a_run_ends_by_itself_before_its_job_is_ended() -> None:
    """Or nothing is shown of what hangs."""
    job = (HERE.parent / ".github" / "workflows" / "test.yml").read_text().partition("\n  docs:")[0]
    minutes, seconds = (int(re.findall(rf"{name}: (\d+)", job)[0]) for name in ("timeout-minutes", "WINDLASS_TEST_RUN_SECONDS"))
    assert seconds <= 60 * minutes - 300, "what is installed first takes minutes too"


@pytest.mark.parametrize("has_namespaces", [True, False])
@pytest.mark.parametrize(
    ("seconds", "target"), [(0, {True: "elsewhere", False: "test"}), (1600, {True: "elsewhere", False: "quick"})]
)
def test_a_slow_machine_runs_less_of_the_clone(
    tmp_path: Path, has_namespaces: bool, seconds: int, target: dict[bool, str]
) -> None:
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_text((HERE.parent / ".ci" / "run").read_text())
    programs = {"make": 'echo "make $*"', "unshare": f"exit {int(not has_namespaces)}", "git": "exit 0", "chromium": "exit 0"}
    for name, does in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SECONDS": str(seconds)}
    done = subprocess.run(
        ["bash", str(tmp_path / ".ci" / "run")], capture_output=True, text=True, env=environment, timeout=HUNG_SECONDS, check=True
    )
    first, clone = [line for line in done.stdout.splitlines() if line.startswith("make ")]
    assert first == "make test" and clone.split("/windlass ")[1].split()[0] == target[has_namespaces]
    assert ("-m quick" in clone) == (seconds > 1500 and has_namespaces)
