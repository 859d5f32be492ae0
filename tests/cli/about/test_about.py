"""`version`, `devices`, `completion`, `ps`, `stop`, and help in words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from windlass import __version__
from windlass.cli import execute as run
from windlass.cli.about import running
from windlass.cli.about.completion import complete_model
from windlass.errors import DISTRIBUTION, BadInput, UnknownName

pytestmark = pytest.mark.pure


def test_version_says_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["version", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["windlass"], found["distribution"]) == (__version__, DISTRIBUTION)
    assert {"python", "torch", "cpu kernels"} <= found.keys()
    assert run(["version"]) == 0
    assert f"windlass         {__version__}" in capsys.readouterr().out


def test_devices_are_those_that_plans_take(capsys: pytest.CaptureFixture[str]) -> None:
    from windlass.core.hardware.devices import names

    assert run(["devices", "--json"]) == 0
    listed = [row["name"] for row in json.loads(capsys.readouterr().out)]
    assert sorted(listed) == sorted(names())
    assert run(["devices", "4090"]) == 0
    shown = capsys.readouterr().out
    assert "RTX-4090" in shown and "H200" not in shown
    for written in ("rtx4090", "RTX 4090", "rtx_4090"):
        assert run(["devices", written]) == 0
        assert "RTX-4090" in capsys.readouterr().out
    assert run(["devices", "abacus"]) == 2
    assert "windlass devices" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == 0
    assert "_WINDLASS_COMPLETE" in capsys.readouterr().out


def test_completion_of_an_unknown_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", "csh"]) == 2
    assert "unknown shell 'csh'" in capsys.readouterr().err


@pytest.mark.parametrize(("typed", "expected"), [("windlass pl", "plan"), ("windlass run tiny", "tiny-glm")])
def test_a_shell_completes_commands_and_models(typed: str, expected: str) -> None:
    words = typed.split()
    setting = {"_WINDLASS_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run(
        [sys.executable, "-m", "windlass"], env=os.environ | setting, capture_output=True, text=True, timeout=300
    )
    assert expected in done.stdout.split()


def test_models_complete_in_any_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    (tmp_path / "windlass" / "models" / "glm-mine").mkdir(parents=True)
    found = complete_model("glm-")
    assert {"GLM-4.5-Air", "glm-mine"} <= set(found) and "Qwen3-8B" not in found


ROWS = [
    {"pid": 7, "command": "serve", "model": "./GLM-4.5-Air-int4", "url": None, "memory_bytes": 1, "started": 0.0},
    {"pid": 9, "command": "worker", "model": "", "url": None, "memory_bytes": 1, "started": 0.0},
]


@pytest.mark.parametrize(
    ("wanted", "pids"), [("7", [7]), ("GLM-4.5-Air-int4", [7]), ("./GLM-4.5-Air-int4", [7]), ("9", [9]), ("all", [7, 9])]
)
def test_what_is_stopped(wanted: str, pids: list[int]) -> None:
    assert running.chosen(ROWS, wanted) == pids


def test_what_cannot_be_stopped() -> None:
    with pytest.raises(UnknownName, match=r"GLM-4\.5-Air-int4"):
        running.chosen(ROWS, "GLM")
    with pytest.raises(BadInput, match="nothing runs"):
        running.chosen([], "x")


SLEEPER = "import sys, time; sys.argv[0] = 'windlass'; print('ready', flush=True); time.sleep(600)"


def test_a_running_server_is_listed_and_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A process with a server's command line stands in for one: what is read is the command line."""
    script = tmp_path / "windlass"
    script.write_text(SLEEPER)
    arguments = ["serve", f"model-{os.getpid()}", "--port", "8123"]
    process = subprocess.Popen([sys.executable, str(script), *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        assert run(["ps", "--json"]) == 0
        row = next(row for row in json.loads(capsys.readouterr().out) if row["pid"] == process.pid)
        assert (row["command"], row["model"], row["url"]) == ("serve", arguments[1], "http://127.0.0.1:8123")
        assert row["memory_bytes"] > 0
        assert run(["ps"]) == 0 and arguments[1] in capsys.readouterr().out
        from threading import Thread

        Thread(target=process.wait, daemon=True).start()  # or it stays a zombie, whose command line is empty anyway
        assert run(["stop", arguments[1]]) == 0
        assert process.wait(60) != 0
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize("command", [[], ["run"], ["plan"], ["train", "run"], ["convert"], ["models", "pull"]])
def test_help_shows_no_python_types(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert not [kind for kind in ("<bool>", "<str>", "<int>", "<list", "<path>") if kind in shown]
    assert "--help" in shown


@pytest.mark.parametrize(
    ("typed", "hint"),
    [(["help"], "`windlass --help`"), (["serv", "x"], "`windlass --help`"), (["run", "--promt"], "`windlass run --help`")],
)
def test_a_usage_error_names_help_that_exists(typed: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(typed) == 2
    assert f"(see {hint})" in capsys.readouterr().err
