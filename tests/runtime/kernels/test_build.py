"""A missing, broken or forbidden compiler costs speed and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from windlass.runtime.kernels import build

pytestmark = pytest.mark.cpu

# Each environment in a process of its own, forked from one that has imported torch and has compiled nothing.
PROGRAM = """
import hashlib, json, os, sys, torch
from windlass.runtime.kernels import build; from windlass.runtime.kernels.packing import quantize

def work():
    weight = torch.randn(40, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    digest = hashlib.sha256()
    for done in (quantize.int4(weight, 128), quantize.int4(weight, 32, zero_points=True), quantize.int8(weight, 64), quantize.fp8(weight)):
        digest.update(done.codes.view(torch.uint8).numpy().tobytes() + done.scale.view(torch.uint8).numpy().tobytes())
        digest.update(repr(done.statistics).encode())
    return [f"{quantize.instruction_set()} {digest.hexdigest()}", str(build.why_not("quantize"))]

torch.set_num_threads(1)
for line in sys.stdin:
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        with open(reading) as said:
            print(said.read(), flush=True)
        os.wait()
        continue
    os.environ.update(json.loads(line))
    os.write(writing, json.dumps(work()).encode())
    os._exit(0)
"""

Run = Callable[..., list[str]]

# Compiles once and copies afterwards: where the library is kept is tested here, over and over, and not how it is compiled.
COMPILER = """#!/bin/sh
[ "$1" = --version ] && exec "{compiler}" --version
for target; do :; done
if [ -f "{kept}" ]; then cp "{kept}" "$target"; else "{compiler}" "$@" && cp "$target" "{kept}"; fi
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """What the program says in such an environment."""
    folder = tmp_path_factory.mktemp("compiler")
    compiler = folder / "c++"
    compiler.write_text(COMPILER.format(compiler=build._compiler(), kept=folder / "kept.so"))
    compiler.chmod(0o700)
    started = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stdin, stdout = started.stdin, started.stdout
    assert stdin is not None and stdout is not None

    def asked(**environment: str) -> list[str]:
        print(json.dumps({"CXX": str(compiler)} | environment), file=stdin, flush=True)
        return json.loads(stdout.readline())

    try:
        yield asked
    finally:
        started.kill()
        started.communicate()


@pytest.fixture(scope="module")
def slow(run: Run) -> list[str]:
    return run(WINDLASS_NO_NATIVE="1")


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler")
def test_the_library_is_made_once_and_gives_the_same(run: Run, tmp_path: Path, slow: list[str]) -> None:
    first = run(XDG_CACHE_HOME=str(tmp_path))
    assert first[1] == "None"
    assert first[0].split()[1] == slow[0].split()[1]
    made = list(tmp_path.rglob("*"))
    assert [path.suffix for path in made if path.is_file() and path.suffix != ".lock"] == [".so"]
    before = next(path for path in made if path.suffix == ".so").stat().st_mtime_ns
    assert run(XDG_CACHE_HOME=str(tmp_path)) == first
    assert next(path for path in tmp_path.rglob("*.so")).stat().st_mtime_ns == before


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler")
def test_a_cache_that_cannot_be_written_is_done_without(run: Run, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    (tmp_path / "temporary").mkdir()
    assert run(XDG_CACHE_HOME=str(blocked), TMPDIR=str(tmp_path / "temporary"))[1] == "None"


def test_native_code_can_be_forbidden(slow: list[str]) -> None:
    assert slow[0].startswith("torch ")
    assert "WINDLASS_NO_NATIVE" in slow[1]


def test_no_compiler_is_said(run: Run, tmp_path: Path, slow: list[str]) -> None:
    said = run(PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path), CXX="")
    assert said[0] == slow[0]
    assert "install g++" in said[1]


def test_a_compiler_that_fails_is_said(run: Run, tmp_path: Path, slow: list[str]) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "no headers" >&2\nexit 1\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    said = run(PATH=f"{tmp_path}:/usr/bin:/bin", XDG_CACHE_HOME=str(tmp_path), CXX=str(compiler))
    assert said[0] == slow[0]
    assert "no headers" in said[1]


def test_a_compiler_that_is_there_compiles_the_kernels() -> None:
    """Tests of native operations are left out where nothing is compiled; a mistake in the sources must not hide behind that."""
    if build._compiler() is None or os.environ.get("WINDLASS_NO_NATIVE", "") not in ("", "0"):
        pytest.skip("no compiler, or compiled kernels are off")
    assert build.why_not("native") is None
    assert not build.will_compile("native")


@pytest.mark.skipif(build._compiler() is None, reason="no C++ compiler")
def test_a_cache_that_cannot_be_written_compiles_once_and_leaves_one_folder(run: Run, tmp_path: Path) -> None:
    blocked, temporary = tmp_path / "file", tmp_path / "temporary"
    blocked.write_text("")
    temporary.mkdir()
    environment = {"XDG_CACHE_HOME": str(blocked), "TMPDIR": str(temporary)}
    assert run(**environment)[1] == "None"
    made = {path: path.stat().st_mtime_ns for path in temporary.rglob("*.so")}
    assert [path.name for path in temporary.iterdir()] == [f"windlass-kernels-{os.getuid()}"] and len(made) == 1
    assert run(**environment)[1] == "None"
    assert {path: path.stat().st_mtime_ns for path in temporary.rglob("*.so")} == made


@pytest.mark.skipif(build._compiler() is None, reason="no C++ compiler")
def test_a_temporary_folder_that_others_can_write_is_not_used(run: Run, tmp_path: Path) -> None:
    blocked, temporary = tmp_path / "file", tmp_path / "temporary"
    blocked.write_text("")
    theirs = temporary / f"windlass-kernels-{os.getuid()}"
    theirs.mkdir(parents=True)
    theirs.chmod(0o777)
    assert run(XDG_CACHE_HOME=str(blocked), TMPDIR=str(temporary))[1] == "None"
    assert list(theirs.iterdir()) == [] and list(temporary.iterdir()) == [theirs]


def test_a_shipped_library_is_keyed_by_its_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The wheel's library is used only for the sources that it was compiled from."""
    monkeypatch.setattr(build, "SHIPPED", tmp_path)
    copied = tmp_path / "native"
    shutil.copytree(build.NATIVE, copied)
    monkeypatch.setattr(build, "NATIVE", copied)
    name = build.shipped_name("native")
    assert build.shipped("native") is None
    (tmp_path / name).write_text("")
    assert build.shipped("native") == tmp_path / name and not build.will_compile("native")
    assert build.origin("native") == "from the wheel"
    header = copied / "simd" / "vector.h"
    header.write_text(header.read_text() + "// changed\n")
    assert build.shipped_name("native") != name and build.shipped("native") is None
    monkeypatch.setattr(build.platform, "machine", lambda: "another")
    assert build.shipped_name("native") != name


def test_a_shipped_library_that_does_not_load_is_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of another libc: the wheel's file is there and of no use."""
    if build._compiler() is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(build, "SHIPPED", tmp_path)
    (tmp_path / build.shipped_name("quantize")).write_text("not a library")
    build._load.cache_clear()
    try:
        assert build.why_not("quantize") is None
    finally:
        build._load.cache_clear()
