"""Compiles the C++ that the package ships, with the system's compiler, once per machine. Knows nothing of what it compiles.

Nothing depends on it: without a compiler every operation takes its PyTorch path, which gives the same bytes, slowly.
`WINDLASS_NO_NATIVE=1` forces that path.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent
# No -march=native: a cache directory may be shared by unlike machines, so the sources choose instructions at run time.
# No contraction: a fused multiply-add rounds once where PyTorch rounds twice.
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-w")
COMPILERS = ("c++", "g++", "clang++")
COMPILE_SECONDS = 120


@dataclass(frozen=True)
class Outcome:
    library: ctypes.CDLL | None
    why_not: str | None = None


def library(name: str) -> ctypes.CDLL | None:
    """The compiled NAME.cpp, or None where there is none; then `why_not` says why."""
    return _outcome(name).library


def why_not(name: str) -> str | None:
    """One line for the user on why NAME runs on the slow path; None where it does not."""
    return _outcome(name).why_not


def _outcome(name: str) -> Outcome:
    if os.environ.get("WINDLASS_NO_NATIVE", "") not in ("", "0"):
        return Outcome(None, "compiled kernels are off (WINDLASS_NO_NATIVE is set): the same results, slower")
    return _load(name)


@cache
def _load(name: str) -> Outcome:
    compiler = _compiler()
    if compiler is None:
        return Outcome(None, "no C++ compiler found: the same results, slower; install g++ or clang++, or set CXX")
    try:
        return Outcome(ctypes.CDLL(str(_compiled(name, compiler))))
    except subprocess.SubprocessError as error:
        said = getattr(error, "stderr", None) or str(error)
        return Outcome(
            None, f"{compiler} could not compile {name}.cpp ({said.strip().splitlines()[0]}): the same results, slower"
        )
    except OSError as error:
        return Outcome(None, f"the compiled {name} could not be loaded ({error}): the same results, slower")


def _compiler() -> str | None:
    wanted = (os.environ.get("CXX", ""), *COMPILERS)
    return next((found for name in wanted if name and (found := shutil.which(name))), None)


def _compiled(name: str, compiler: str) -> Path:
    """The shared library, from the cache or made now."""
    sources = sorted(path for path in SOURCES.glob(f"{name}*") if path.suffix in (".cpp", ".h"))
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=COMPILE_SECONDS).stdout
    parts = [path.read_bytes() for path in sources]
    parts += [text.encode() for text in (compiler, version, *FLAGS, platform.machine(), platform.system())]
    file = hashlib.sha256(b"\0".join(parts)).hexdigest()[:32] + ".so"
    source = SOURCES / f"{name}.cpp"
    try:
        return _made(source, compiler, cache_folder(), file)
    except (
        OSError,
        RuntimeError,
    ):  # no home, or one that is read-only or full; a folder of our own, so that nobody else writes to it
        return _made(source, compiler, Path(tempfile.mkdtemp(prefix="windlass-kernels-")), file)


def _made(source: Path, compiler: str, folder: Path, file: str) -> Path:
    target = folder / file
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    # Another process may be compiling too, and this one may be killed: a library appears whole or not at all.
    handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
    os.close(handle)
    try:
        command = [compiler, *FLAGS, str(source), "-o", temporary]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=COMPILE_SECONDS)
        Path(temporary).replace(target)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return target


def cache_folder() -> Path:
    """XDG Base Directory Specification: $XDG_CACHE_HOME, else ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "windlass" / "kernels"
