"""Conversions that are killed, interrupted and taken up again give the same bytes as one that nobody disturbed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

import msgspec

from waiting import HUNG_SECONDS
from windlass.errors import BadInput
from windlass.tasks.convert import run as run_module
from windlass.tasks.convert.convert import JOURNAL, convert

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "bench" / "convert" / "kills.py"
_module = importlib.util.spec_from_file_location("convert_kills", SCRIPT)
assert _module is not None and _module.loader is not None
bench = importlib.util.module_from_spec(_module)
_module.loader.exec_module(bench)

ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT / "src")}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bench.make_source(tmp_path_factory.mktemp("kill") / "source")


@pytest.fixture(scope="module")
def whole(source: Path) -> dict[str, Any]:
    """What an undisturbed conversion gives."""
    convert(source, source.parent / "whole", bench.SETTINGS)
    return bench.result(source.parent / "whole")


# --- killed -----------------------------------------------------------------------------------------------------------


def measured(*options: str) -> dict[str, Any]:
    """In memory, where there is such a folder: a kill loses nothing that was written, so a disk that is waited for shows no more."""
    memory = {"TMPDIR": "/dev/shm"} if os.access("/dev/shm", os.W_OK) else {}
    command = [sys.executable, str(SCRIPT), *options]
    done = subprocess.run(command, env=ENVIRONMENT | memory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_kills_at_random_moments() -> None:
    """Two hundred with `python bench/convert/kills.py`."""
    seed = str(time.time_ns())
    found = measured("--kills", "10", "--seed", seed)
    assert found["kills"] == 10
    assert found["identical"] == found["outputs"] > 0, (seed, found)


def test_an_end_at_every_kind_of_write() -> None:
    """Every tenth write, sync or rename and all of the last; then a conversion that ends many times before it is done."""
    found = measured("--points", "10")
    assert found["points"] > 150 and found["kills of the last output"] > 10
    assert found["identical"] == found["outputs"], found
    assert {
        "no weight file complete",
        "some weight files complete",
        "all weight files complete",
        "config.json written, journal not yet removed",
    } <= found["stages"].keys()


# --- interrupted ------------------------------------------------------------------------------------------------------


def stopped_after(slices: int, error: type[BaseException] = KeyboardInterrupt) -> Callable[[int], Callable[[int], None]]:
    """A progress bar that ends the conversion."""
    left = slices

    def advance(_: int) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise error

    return lambda _: advance


def test_what_was_done_is_not_done_again(
    source: Path, whole: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[str] = []
    original = run_module.pack_slice

    def counted(output: Any, unit: Any, read: Any, raw: Any, inputs: Any) -> Any:
        packed.append(unit.key)
        return original(output, unit, read, raw, inputs)

    monkeypatch.setattr(run_module, "pack_slice", counted)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        convert(source, out, bench.SETTINGS, stopped_after(20))
    journalled = {json.loads(line)["key"] for line in (out / JOURNAL).read_text().splitlines()[1:]}
    assert len(journalled) >= 19
    assert not (out / "config.json").exists()
    packed.clear()
    convert(source, out, bench.SETTINGS)
    assert packed and not journalled & set(packed)
    assert bench.result(out) == whole


def test_other_slices_are_refused(source: Path, tmp_path: Path) -> None:
    """The journal says which slices are done; rows between the old slices and the new would never be written."""
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        convert(source, out, bench.SETTINGS, stopped_after(5))
    with pytest.raises(BadInput, match="--max-memory, --jobs"):
        convert(source, out, msgspec.structs.replace(bench.SETTINGS, max_memory_bytes=60 * 2**20))
    with pytest.raises(BadInput, match="shard size"):
        convert(source, out, msgspec.structs.replace(bench.SETTINGS, max_shard_bytes=10**9))


def test_a_file_that_was_lost_is_written_again(source: Path, whole: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        convert(source, out, bench.SETTINGS, stopped_after(30))
    finished = sorted(out.glob("model-*.safetensors"))
    parts = sorted(out.glob(".model-*.part"))
    assert finished and parts
    finished[0].unlink()
    parts[0].unlink()
    convert(source, out, bench.SETTINGS)
    assert bench.result(out) == whole


def test_a_file_that_was_lost_and_interrupted_again_is_written_whole(source: Path, whole: dict[str, Any], tmp_path: Path) -> None:
    """What the journal says of a file that is gone is not true of the one that is begun in its place."""
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        convert(source, out, bench.SETTINGS, stopped_after(30))
    for lost in (*out.glob("model-*.safetensors"), *out.glob(".model-*.part")):
        lost.unlink()
    with pytest.raises(KeyboardInterrupt):
        convert(source, out, bench.SETTINGS, stopped_after(3))
    convert(source, out, bench.SETTINGS)
    assert bench.result(out) == whole


def test_bytes_are_on_disk_before_the_journal_speaks_of_them(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut loses what was not synced; a kill does not, so only the order of the calls can tell."""
    dirty: set[str] = set()
    file_of: dict[str, set[str]] = {}
    wrong: list[str] = []
    write, sync = run_module.SafetensorsWriter.write, run_module.SafetensorsWriter.sync
    record, work = run_module.Journal.record, run_module._Loop._work

    def writing(self: Any, name: str, offset: int, buffer: Any) -> None:
        dirty.add(self.part.name)
        write(self, name, offset, buffer)

    def syncing(self: Any) -> None:
        dirty.discard(self.part.name)
        sync(self)

    def working(self: Any, unit: Any) -> Any:
        file_of[unit.key] = {f".{file}.part" for file in self.shards.files_of[unit.output]}
        return work(self, unit)

    def recording(self: Any, key: str, *args: Any, **more: Any) -> None:
        wrong.extend(file_of[key] & dirty)
        record(self, key, *args, **more)

    monkeypatch.setattr(run_module.SafetensorsWriter, "write", writing)
    monkeypatch.setattr(run_module.SafetensorsWriter, "sync", syncing)
    monkeypatch.setattr(run_module._Loop, "_work", working)
    monkeypatch.setattr(run_module.Journal, "record", recording)
    # One slice at a time, or another worker's write would come between the sync and the record.
    monkeypatch.setattr(run_module, "QUEUED_PER_WORKER", 0)
    convert(source, tmp_path / "out", msgspec.structs.replace(bench.SETTINGS, jobs=1))
    assert file_of and wrong == []


def test_no_worker_writes_once_files_are_closed(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor that is closed may be another file's by the time a late worker writes to it."""
    late: list[str] = []
    write = run_module.SafetensorsWriter.write

    def slow(self: Any, name: str, offset: int, buffer: Any) -> None:
        time.sleep(0.02)
        if self._descriptor < 0:
            late.append(name)
        write(self, name, offset, buffer)

    monkeypatch.setattr(run_module.SafetensorsWriter, "write", slow)
    with pytest.raises(RuntimeError):
        convert(source, tmp_path / "out", bench.SETTINGS, stopped_after(5, RuntimeError))
    assert late == []


def command(source: Path, out: Path) -> list[str]:
    return [sys.executable, "-m", "windlass", "convert", str(source), str(out), "--quant", "int4", "--max-memory", "42MB"]


WAITING = """
import sys, time
from pathlib import Path
from windlass.tasks.convert import run
from windlass.cli import main
land, landed = run._Loop._collect_next, 0
def landing(loop):
    global landed
    land(loop)
    landed += 1
    if landed == 10:
        Path(sys.argv[1]).touch()
        time.sleep(3600)
run._Loop._collect_next = landing
main(sys.argv[2:])
"""


@pytest.fixture(scope="module")
def interrupted(source: Path) -> tuple[Path, int, str, str]:
    """Control-C in the midst of it, where it waits to be met: the directory, exit code, and what was printed. In plain PyTorch."""
    out, met = source.parent / "interrupted", source.parent / "met"
    words = [sys.executable, "-c", WAITING, str(met), *command(source, out)[3:]]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # where it is ignored, the process would inherit that
    process = subprocess.Popen(
        words, env=ENVIRONMENT | {"WINDLASS_NO_NATIVE": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    signal.signal(signal.SIGINT, before)
    try:
        deadline = time.monotonic() + HUNG_SECONDS
        while not met.exists() and process.poll() is None:
            assert time.monotonic() < deadline, "hung"
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        printed, said = process.communicate(timeout=HUNG_SECONDS)
    finally:
        process.kill()
    assert (out / JOURNAL).exists() and not (out / "config.json").exists()
    return out, process.returncode, printed, said


def test_control_c_says_one_line(interrupted: tuple[Path, int, str, str]) -> None:
    assert interrupted[2:] == ("", "windlass: interrupted\n")


def test_files_are_hashed_while_they_are_written(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashing all of a file at its end is work for one core, while the others wait."""
    hashed: list[float] = []
    finish = run_module.SafetensorsWriter.finish

    def finishing(self: Any) -> str:
        hashed.append(self._digest._position / self.num_bytes)
        return finish(self)

    monkeypatch.setattr(run_module.SafetensorsWriter, "finish", finishing)
    convert(source, tmp_path / "out", msgspec.structs.replace(bench.SETTINGS, max_shard_bytes=10**9))
    assert len(hashed) == 1 and hashed[0] > 0.5


def test_control_c_and_the_same_command_again(source: Path, interrupted: tuple[Path, int, str, str]) -> None:
    """The second run is the compiled loop's, so both loops have a share in the result."""
    out, code, _, said = interrupted
    assert code == 130 and "Traceback" not in said
    undisturbed = source.parent / "undisturbed"
    for directory in (out, undisturbed):
        done = subprocess.run(
            command(source, directory), env=ENVIRONMENT, capture_output=True, text=True, timeout=HUNG_SECONDS, check=False
        )
        assert done.returncode == 0, done.stderr
    assert bench.result(out) == bench.result(undisturbed)
