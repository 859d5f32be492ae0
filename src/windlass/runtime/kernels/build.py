"""The C++ kernels under native/ as shared libraries: from the wheel (lib/), else compiled with the system's compiler, once per machine.

Both are keyed by their sources, flags and machine type, so that neither is used for other sources than its own. Without wheel and compiler every
operation falls back to PyTorch: the same results, many times slower. `WINDLASS_NO_NATIVE=1` forces that. Knows no operation.
The build backend (`hatch_build.py`) loads this file by itself to fill lib/, so it imports nothing else of Windlass.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

NATIVE = Path(__file__).parent / "native"
SHIPPED = Path(__file__).parent / "lib"
"""Libraries that came with the wheel."""
# No -march=native: a cache folder may be shared by machines of different types, so the sources choose instructions at run time.
# No contraction: a fused multiply-add rounds once where PyTorch rounds twice.
EXACT_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-pthread", "-ffp-contract=off", "-w")
# Kernels that only have to be near their reference may fuse.
FAST_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-pthread", "-fno-math-errno", "-w")
COMPILERS = ("c++", "g++", "clang++")
COMPILE_SECONDS = 300


@dataclass(frozen=True)
class Library:
    """Which sources make a library, and how they are compiled."""

    folders: tuple[str, ...]
    """Under native/."""
    flags: tuple[str, ...]

    @property
    def sources(self) -> list[Path]:
        return sorted(source for folder in self.folders for source in (NATIVE / folder).glob("*.cpp"))


LIBRARIES = {
    "loader": Library(("loader",), FAST_FLAGS),
    "native": Library(("attention", "ggml", "links", "ops", "panel", "program", "simd"), FAST_FLAGS),
    "quantize": Library(("quantize",), EXACT_FLAGS),
    "tiles": Library(("tiles",), FAST_FLAGS),
}


@dataclass(frozen=True)
class LoadResult:
    library: ctypes.CDLL | None
    why_not: str | None = None


def library(name: str) -> ctypes.CDLL | None:
    """The compiled library NAME (see LIBRARIES), or None; then `why_not` says why."""
    return _result(name).library


def origin(name: str) -> str:
    """Where the library NAME would come from, in words; compiles nothing."""
    if is_disabled():
        return "off (WINDLASS_NO_NATIVE is set)"
    if shipped(name) is not None:
        return "from the wheel"
    compiler = _compiler()
    if compiler is None:
        return "none: no wheel with kernels, no C++ compiler"
    return f"compiled by {compiler}{' at first use' if will_compile(name) else ''}"


def shipped(name: str) -> Path | None:
    """The wheel's library, if it was built from the sources that are here."""
    file = SHIPPED / shipped_name(name)
    return file if file.is_file() else None


def shipped_name(name: str) -> str:
    """Keyed by the sources, not by the compiler: here it need not exist."""
    wanted = LIBRARIES[name]
    files = sorted({path for source in wanted.sources for path in _with_headers(source)})
    return f"{name}-{_digest([path.read_bytes() for path in files], *wanted.flags, platform.machine(), platform.system())}.so"


def will_compile(name: str) -> bool:
    """Whether asking for the library NAME now would compile it, which takes up to a minute."""
    compiler = _compiler()
    if compiler is None or is_disabled() or shipped(name) is not None:
        return False
    try:
        return not any(_is_compiled_in(folder(), LIBRARIES[name], compiler) for folder in (cache_folder, temporary_folder))
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return True


def _is_compiled_in(folder: Path, wanted: Library, compiler: str) -> bool:
    suffix = ".so" if len(wanted.sources) == 1 else ".o"
    return all((folder / (_source_key(source, compiler, wanted.flags) + suffix)).is_file() for source in wanted.sources)


def why_not(name: str) -> str | None:
    """One line for the user on why NAME runs without compiled kernels; None where it does not."""
    return _result(name).why_not


def is_disabled() -> bool:
    return os.environ.get("WINDLASS_NO_NATIVE", "") not in ("", "0")


def _result(name: str) -> LoadResult:
    if is_disabled():
        return LoadResult(None, "compiled kernels are disabled (WINDLASS_NO_NATIVE is set): same results, slower")
    return _load(name)


@cache
def _load(name: str) -> LoadResult:
    found = shipped(name)
    if found is not None:
        with suppress(OSError):  # of another libc: compiled here, then
            return LoadResult(ctypes.CDLL(str(found)))
    compiler = _compiler()
    if compiler is None:
        return LoadResult(
            None, "no kernels came with this installation, and there is no C++ compiler: install g++ or clang++, or set CXX"
        )
    try:
        return _load_compiled(LIBRARIES[name], compiler)
    except subprocess.SubprocessError as error:
        message = getattr(error, "stderr", None) or str(error)
        first_line = message.strip().splitlines()[0]
        return LoadResult(None, f"{compiler} could not compile the {name} kernels ({first_line}): same results, slower")
    except OSError as error:
        return LoadResult(None, f"the compiled {name} kernels could not be loaded ({error}): same results, slower")


def _compiler() -> str | None:
    names = (os.environ.get("CXX", ""), *COMPILERS)
    return next((path for name in names if name and (path := shutil.which(name))), None)


def _load_compiled(wanted: Library, compiler: str) -> LoadResult:
    """From the cache, or compiled now. A cache that cannot be written (no home folder, read-only, full) is replaced by one temporary
    folder per user; where that is not ours either, the library is compiled for this process alone and removed at once."""
    for folder in (cache_folder, temporary_folder):
        with suppress(OSError, RuntimeError):
            return LoadResult(ctypes.CDLL(str(_compiled_in(folder(), wanted, compiler))))
    with tempfile.TemporaryDirectory(prefix="windlass-kernels-") as alone:
        return LoadResult(ctypes.CDLL(str(_compiled_in(Path(alone), wanted, compiler))))


def build_shipped(folder: Path) -> list[Path]:
    """For the build backend: every library, compiled into `folder` under the name it is looked for. Raises without a compiler."""
    compiler = _compiler()
    if compiler is None:
        raise FileNotFoundError("no C++ compiler")
    return [_built(name, wanted, compiler, folder) for name, wanted in LIBRARIES.items()]


def _built(name: str, wanted: Library, compiler: str, folder: Path) -> Path:
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = list(pool.map(lambda source: _object(source, compiler, wanted.flags, folder / "objects"), wanted.sources))
    target = folder / shipped_name(name)
    target.unlink(missing_ok=True)
    _written(target, [compiler, "-shared", "-pthread", "-s", *map(str, objects), "-o"])
    target.chmod(0o755)  # a temporary file is its maker's alone
    return target


def _compiled_in(folder: Path, wanted: Library, compiler: str) -> Path:
    sources, flags = wanted.sources, wanted.flags
    if len(sources) == 1:
        file = folder / f"{_source_key(sources[0], compiler, flags)}.so"
        return _written(file, [compiler, *flags, "-shared", *_input(sources[0])])
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = list(pool.map(lambda source: _object(source, compiler, flags, folder), sources))
    file = _fingerprint([path.name.encode() for path in objects], compiler, ("link",)) + ".so"
    return _written(folder / file, [compiler, "-shared", "-pthread", *map(str, objects), "-o"])


def _object(source: Path, compiler: str, flags: tuple[str, ...], folder: Path) -> Path:
    """Each source is compiled by itself, in parallel with the others, and again only where it changed."""
    file = folder / f"{_source_key(source, compiler, flags)}.o"
    return _written(file, [compiler, *flags, "-c", *_input(source)])


def _input(source: Path) -> list[str]:
    return [f"-I{NATIVE}", str(source), "-o"]


def _source_key(source: Path, compiler: str, flags: tuple[str, ...]) -> str:
    return _fingerprint([path.read_bytes() for path in _with_headers(source)], compiler, flags)


def _with_headers(source: Path) -> list[Path]:
    """The file and the headers under native/ that it includes, directly or not."""
    files = [source]
    for path in files:  # grows while it is read
        names = re.findall(r'^\s*#\s*include\s*"([^"]+)"', path.read_text(), re.MULTILINE)
        files += [header for name in names if (header := NATIVE / name).is_file() and header not in files]
    return files


def _fingerprint(parts: list[bytes], compiler: str, flags: tuple[str, ...]) -> str:
    return _digest(parts, compiler, _version(compiler), *flags, platform.machine(), platform.system())


def _digest(parts: list[bytes], *settings: str) -> str:
    return hashlib.sha256(b"\0".join([*parts, *(value.encode() for value in settings)])).hexdigest()[:32]


@cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=COMPILE_SECONDS).stdout


def _written(target: Path, command: list[str]) -> Path:
    """`target`, made by `command TARGET` unless it exists."""
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target):
        return target if target.is_file() else _made(target, command)


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """One process compiles; others wait for it."""
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _made(target: Path, command: list[str]) -> Path:
    # This process may be killed: the file appears complete or not at all.
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


def temporary_folder() -> Path:
    """One per user, kept between runs. Refused unless it is ours alone: a library that others can write is code that they can run."""
    folder = Path(tempfile.gettempdir()) / f"windlass-kernels-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o077:
        raise PermissionError(f"{folder} is not private")
    return folder
