"""Compiles the C++ that the package ships, with the system's compiler, once per machine. Knows nothing of what it compiles.

Nothing depends on it: without a compiler every operation takes its PyTorch path, which gives the same bytes, slowly.
`WINDLASS_NO_NATIVE=1` forces that path.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent
# No -march=native: a cache directory may be shared by unlike machines, so the sources choose instructions at run time.
# No contraction: a fused multiply-add rounds once where PyTorch rounds twice.
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-w")
# Kernels that only have to be near their reference may fuse.
FAST_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-pthread", "-fno-math-errno", "-w")
COMPILERS = ("c++", "g++", "clang++")
COMPILE_SECONDS = 120


@dataclass(frozen=True)
class Outcome:
    library: ctypes.CDLL | None
    why_not: str | None = None


def library(name: str) -> ctypes.CDLL | None:
    """The compiled NAME.cpp (or all of NAME/*.cpp), or None where there is none; then `why_not` says why."""
    return _outcome(name).library


def will_compile(name: str) -> bool:
    """Whether asking for the library of NAME/*.cpp now would take the better part of a minute."""
    compiler = _compiler()
    if compiler is None or os.environ.get("WINDLASS_NO_NATIVE", "") not in ("", "0"):
        return False
    try:
        return not all((cache_folder() / _object_file(source, compiler)).is_file() for source in (SOURCES / name).glob("*.cpp"))
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return True


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
        made = _linked(name, compiler) if (SOURCES / name).is_dir() else _compiled(name, compiler)
        return Outcome(ctypes.CDLL(str(made)))
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
    file = _fingerprint([path.read_bytes() for path in sources], compiler, FLAGS) + ".so"
    command = [compiler, *FLAGS, str(SOURCES / f"{name}.cpp"), "-o"]
    try:
        return _written(cache_folder() / file, command)
    except (OSError, RuntimeError):
        # No home, or one that is read-only or full: a folder of our own, so that nobody else writes to it.
        return _written(Path(tempfile.mkdtemp(prefix="windlass-kernels-")) / file, command)


def _linked(name: str, compiler: str) -> Path:
    """A library of several files: each compiled for itself, side by side, and again only where it changed."""
    sources = sorted((SOURCES / name).glob("*.cpp"))
    try:
        return _linked_in(cache_folder(), sources, compiler)
    except (OSError, RuntimeError):
        return _linked_in(Path(tempfile.mkdtemp(prefix="windlass-kernels-")), sources, compiler)


def _linked_in(folder: Path, sources: list[Path], compiler: str) -> Path:
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = list(pool.map(lambda source: _object(source, compiler, folder), sources))
    file = _fingerprint([path.name.encode() for path in objects], compiler, ("link",)) + ".so"
    return _written(folder / file, [compiler, "-shared", "-pthread", *map(str, objects), "-o"])


def _object(source: Path, compiler: str, folder: Path) -> Path:
    return _written(folder / _object_file(source, compiler), [compiler, *FAST_FLAGS, "-c", str(source), "-o"])


def _object_file(source: Path, compiler: str) -> str:
    parts = [path.read_bytes() for path in _with_headers(source)]
    return _fingerprint(parts, compiler, FAST_FLAGS) + ".o"


def _with_headers(source: Path) -> list[Path]:
    """The file and the headers of ours that it includes, directly or not."""
    found = [source]
    for path in found:  # grows while it is read
        names = re.findall(r'^\s*#\s*include\s*"([^"]+)"', path.read_text(), re.MULTILINE)
        found += [header for name in names if (header := source.parent / name).is_file() and header not in found]
    return found


def _fingerprint(parts: list[bytes], compiler: str, flags: tuple[str, ...]) -> str:
    words = (compiler, _version(compiler), *flags, platform.machine(), platform.system())
    return hashlib.sha256(b"\0".join([*parts, *(word.encode() for word in words)])).hexdigest()[:32]


@cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=COMPILE_SECONDS).stdout


def _written(target: Path, command: list[str]) -> Path:
    """`target`, made by `command TARGET` unless it is there."""
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _alone(target):
        return target if target.is_file() else _made(target, command)


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """One process compiles, others wait for it."""
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _made(target: Path, command: list[str]) -> Path:
    # This process may be killed: a library appears whole or not at all.
    handle, temporary = tempfile.mkstemp(dir=target.parent, suffix=".tmp" + target.suffix)
    os.close(handle)
    try:
        subprocess.run([*command, temporary], capture_output=True, text=True, check=True, timeout=COMPILE_SECONDS)
        Path(temporary).replace(target)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return target


def cache_folder() -> Path:
    """XDG Base Directory Specification: $XDG_CACHE_HOME, else ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "windlass" / "kernels"
