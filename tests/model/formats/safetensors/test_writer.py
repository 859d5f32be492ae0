"""Written files: the same bytes whatever the order, thread or interruption, and readable by the safetensors package."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from windlass.errors import BadInput, DoesNotFit
from windlass.model.formats.disk import atomic as disk
from windlass.model.formats.disk.atomic import require_free, write_atomically
from windlass.model.formats.safetensors import writer
from windlass.model.formats.safetensors.header import read_header
from windlass.model.formats.safetensors.shards import OutTensor, SafetensorsShard, plan_shards, write_index
from windlass.model.formats.safetensors.writer import SafetensorsWriter, file_digest

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[4]


def out(name: str, dtype: str, *shape: int) -> OutTensor:
    return OutTensor(name=name, dtype=dtype, shape=shape)


TENSORS = (out("a", "F32", 3, 4), out("b", "I32", 5), out("c", "F16", 7), out("none", "F32", 0, 3), out("d", "U8", 9))


def content(tensor: OutTensor) -> bytes:
    return random.Random(tensor.name).randbytes(tensor.num_bytes)


def write_whole(path: Path) -> str:
    shard_writer = SafetensorsWriter(path, TENSORS)
    for tensor in TENSORS:
        shard_writer.write(tensor.name, 0, content(tensor))
    return shard_writer.finish()


# --- layout ----------------------------------------------------------------------------------------------------------


def test_one_shard_and_several() -> None:
    tensors = [out(f"t{number}", "U8", 10) for number in range(5)]
    assert [shard.file for shard in plan_shards(tensors)] == ["model.safetensors"]
    shards = plan_shards(tensors, max_shard_bytes=25)
    assert [shard.file for shard in shards] == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert [[tensor.name for tensor in shard.tensors] for shard in shards] == [["t0", "t1"], ["t2", "t3"], ["t4"]]
    assert shards == plan_shards(iter(tensors), max_shard_bytes=25)


def test_a_tensor_larger_than_a_shard_is_alone() -> None:
    shards = plan_shards([out("a", "U8", 1), out("b", "U8", 100), out("c", "U8", 1)], max_shard_bytes=10)
    assert [[tensor.name for tensor in shard.tensors] for shard in shards] == [["a"], ["b"], ["c"]]


def test_order_is_kept_unless_a_tensor_would_be_misaligned() -> None:
    even = [out("a", "U8", 4), out("b", "F32", 1), out("c", "BF16", 2)]
    assert [tensor.name for tensor in plan_shards(even)[0].tensors] == ["a", "b", "c"]
    odd = [out("a", "U8", 3), out("b", "F32", 1), out("c", "U8", 1), out("d", "F32", 1)]
    assert [tensor.name for tensor in plan_shards(odd)[0].tensors] == ["b", "d", "a", "c"]


@pytest.mark.parametrize("tensors", [[out("a", "U8", 1)] * 2, [out("__metadata__", "U8", 1)], [out("a", "F4", 3)]])
def test_what_cannot_be_written(tensors: list[OutTensor]) -> None:
    with pytest.raises(BadInput):
        plan_shards(tensors)


def test_the_index(tmp_path: Path) -> None:
    shards = plan_shards([out("b", "F32", 2), out("a", "U8", 8)], max_shard_bytes=8)
    path = write_index(tmp_path, shards)
    assert path is not None and json.loads(path.read_text()) == {
        "metadata": {"total_size": 16},
        "weight_map": {"a": "model-00002-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"},
    }
    assert write_index(tmp_path, shards[:1]) is None
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


# --- one file --------------------------------------------------------------------------------------------------------


def test_readable_by_the_package_and_by_ourselves(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    digest = write_whole(path)
    found = load_file(path)
    assert found.keys() == {tensor.name for tensor in TENSORS}
    for tensor in TENSORS:
        assert found[tensor.name].tobytes() == content(tensor) and found[tensor.name].shape == tensor.shape
    assert [info.name for info in read_header(path)] == [tensor.name for tensor in TENSORS]
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest() == file_digest(path)
    assert json.loads(path.read_bytes()[8:].split(b"}}", 1)[0] + b"}}")["__metadata__"] == {"format": "pt"}


def test_numpy_arrays_of_any_shape(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    shard_writer = SafetensorsWriter(tmp_path / "x.safetensors", [out("a", "I32", 3, 4), out("none", "F32", 0)])
    shard_writer.write("a", 0, array.data)
    shard_writer.write("none", 0, np.empty((0,), dtype=np.float32).data)
    shard_writer.finish()
    assert (load_file(tmp_path / "x.safetensors")["a"] == array).all()


def test_nothing_looks_finished_before_it_is(tmp_path: Path) -> None:
    shard_writer = SafetensorsWriter(tmp_path / "model.safetensors", TENSORS)
    shard_writer.write("a", 0, bytes(48))
    shard_writer.sync()
    assert [file.name for file in tmp_path.iterdir()] == [".model.safetensors.part"]
    assert not list(tmp_path.glob("*.safetensors"))
    shard_writer.discard()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("seed", range(5))
def test_any_order_and_thread_gives_the_same_bytes(tmp_path: Path, seed: int) -> None:
    expected = write_whole(tmp_path / "expected")
    pieces = [(tensor, start) for tensor in TENSORS for start in range(0, tensor.num_bytes, 5)]
    random.Random(seed).shuffle(pieces)
    shard_writer = SafetensorsWriter(tmp_path / "found", TENSORS)

    def write(piece: tuple[OutTensor, int]) -> None:
        tensor, start = piece
        shard_writer.write(tensor.name, start, content(tensor)[start : start + 5])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, pieces))
    assert shard_writer.finish() == expected == file_digest(tmp_path / "found")
    assert (tmp_path / "found").read_bytes() == (tmp_path / "expected").read_bytes()


def test_bytes_in_order_are_not_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise AssertionError

    monkeypatch.setattr(writer.os, "preadv", refuse)
    digest = write_whole(tmp_path / "x")
    monkeypatch.undo()
    assert digest == file_digest(tmp_path / "x")


def test_bytes_written_twice_are_hashed_as_they_are(tmp_path: Path) -> None:
    shard_writer = SafetensorsWriter(tmp_path / "x", TENSORS)
    for tensor in TENSORS:
        shard_writer.write(tensor.name, 0, bytes(tensor.num_bytes))
    for tensor in TENSORS:
        shard_writer.write(tensor.name, 0, content(tensor))
    assert shard_writer.finish() == file_digest(tmp_path / "x") == write_whole(tmp_path / "y")


@pytest.mark.parametrize(("offset", "length"), [(-1, 4), (45, 4), (0, 49)])
def test_a_write_past_the_tensor(tmp_path: Path, offset: int, length: int) -> None:
    shard_writer = SafetensorsWriter(tmp_path / "x", TENSORS)
    with pytest.raises(IndexError, match="which has 48"):
        shard_writer.write("a", offset, bytes(length))
    shard_writer.discard()


# --- interruption ----------------------------------------------------------------------------------------------------


def test_going_on_with_a_part(tmp_path: Path) -> None:
    first = SafetensorsWriter(tmp_path / "x", TENSORS)
    assert not first.resumed
    first.write("a", 0, content(TENSORS[0]))
    first.close()
    second = SafetensorsWriter(tmp_path / "x", TENSORS)
    assert second.resumed
    for tensor in TENSORS[1:]:
        second.write(tensor.name, 0, content(tensor))
    assert second.finish() == write_whole(tmp_path / "y")


def test_a_part_of_another_file(tmp_path: Path) -> None:
    SafetensorsWriter(tmp_path / "x", TENSORS).close()
    for others in ([out("other", "F32", 400)], [out("a", "F32", 3, 4)]):
        with pytest.raises(BadInput, match="unfinished file of another conversion; delete it or use another output directory"):
            SafetensorsWriter(tmp_path / "x", others)


def test_a_part_interrupted_as_it_was_begun(tmp_path: Path) -> None:
    expected = write_whole(tmp_path / "y")
    whole = (tmp_path / "y").read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for length in (0, 5, 8, header - 1, header, len(whole) - 1):
        (tmp_path / ".x.part").write_bytes(whole[:length])
        shard_writer = SafetensorsWriter(tmp_path / "x", TENSORS)
        assert not shard_writer.resumed
        shard_writer.close()
        (tmp_path / ".x.part").unlink()
    assert write_whole(tmp_path / "x") == expected


KILLED = """
import os, random, signal, sys
from pathlib import Path
from windlass.model.formats.disk.journal import Journal
from windlass.model.formats.safetensors.shards import OutTensor, plan_shards
from windlass.model.formats.safetensors.writer import SafetensorsWriter, file_digest

tensors = [OutTensor(name=f"t{i}", dtype="U8", shape=(5000,)) for i in range(20)]

def work(folder):
    journal = Journal(folder / "journal", {"seed": 1})
    for shard in plan_shards(tensors, 30_000):
        if journal.done(shard.file):
            continue
        if (folder / shard.file).exists():  # complete, but killed before that was recorded
            journal.record(shard.file, file_digest(folder / shard.file))
            continue
        writer = SafetensorsWriter(folder / shard.file, shard.tensors)
        for tensor in shard.tensors:
            if writer.resumed and journal.done(tensor.name):
                continue
            data = random.Random(tensor.name).randbytes(5000)
            for start in range(0, 5000, 1000):
                writer.write(tensor.name, start, data[start : start + 1000])
            writer.sync()
            journal.record(tensor.name)
        journal.record(shard.file, writer.finish())
    print(*journal.records().values(), flush=True)

def dying_after(changes):
    def counted(function, is_write):
        def call(*args, **more):
            nonlocal changes
            changes -= 1
            if changes == 0:
                if is_write:
                    function(args[0], args[1][: len(args[1]) // 2], *args[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **more)
        return call
    for name in ("write", "pwrite", "fsync", "fdatasync", "ftruncate", "posix_fallocate"):
        setattr(os, name, counted(getattr(os, name), "write" in name))
    Path.replace, Path.unlink = counted(Path.replace, False), counted(Path.unlink, False)

def finishes(folder, changes):
    child = os.fork()
    if not child:
        dying_after(changes)
        work(folder)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or status == 0, status
    return status == 0

draw = random.Random(sys.argv[2])
kills = [0, 0, 0, 0]
for number in range(len(kills)):
    folder = Path(sys.argv[1]) / f"killed-{number}"
    folder.mkdir()
    while not finishes(folder, draw.randint(1, 40)):
        kills[number] += 1
Path(sys.argv[1], "whole").mkdir()
work(Path(sys.argv[1], "whole"))
print(*kills)
"""


def test_killed_at_random_moments(tmp_path: Path) -> None:
    """Writer and journal together: whatever change to the disk is the last one of a process, or half of it, the files end up the same."""
    seed = str(random.Random().getrandbits(32))
    command, environment = [sys.executable, "-c", KILLED, str(tmp_path), seed], os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (seed, done.stderr)
    *found, kills = done.stdout.splitlines()
    assert len(found) == 5 and len(set(found)) == 1, seed
    assert all(int(count) > 3 for count in kills.split())
    whole = {file.name: file.read_bytes() for file in (tmp_path / "whole").glob("*.safetensors")}
    for killed in tmp_path.glob("killed-*"):
        assert {file.name: file.read_bytes() for file in killed.glob("*.safetensors")} == whole, seed
        assert not list(killed.glob(".*.part"))


# --- the disk --------------------------------------------------------------------------------------------------------


def test_free_room(tmp_path: Path) -> None:
    require_free(tmp_path / "not" / "there" / "yet", 1)
    with pytest.raises(DoesNotFit, match=r"not enough disk space: .* needs") as caught:
        require_free(tmp_path, 10**18)
    assert caught.value.short_bytes > 10**17


def test_a_disk_that_is_full_when_a_file_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writer.os, "posix_fallocate", full)
    with pytest.raises(DoesNotFit, match="disk full"):
        SafetensorsWriter(tmp_path / "x", TENSORS)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard_writer = SafetensorsWriter(tmp_path / "x", TENSORS)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk.os, "pwrite", full)
    with pytest.raises(DoesNotFit, match="disk full") as caught:
        shard_writer.write("a", 0, bytes(48))
    assert caught.value.short_bytes == 48
    shard_writer.discard()


def test_a_file_system_without_preallocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    expected = write_whole(tmp_path / "y")
    monkeypatch.setattr(writer.os, "posix_fallocate", unsupported)
    assert write_whole(tmp_path / "x") == expected


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be written: No such file"):
        SafetensorsWriter(tmp_path / "absent" / "x", TENSORS)
    with pytest.raises(BadInput, match="cannot be written: No such file"):
        write_atomically(tmp_path / "absent" / "x", b"")


def test_small_files_are_replaced_whole(tmp_path: Path) -> None:
    write_atomically(tmp_path / "config.json", b"old")
    write_atomically(tmp_path / "config.json", b"new")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("config.json", b"new")]


def test_a_shard_counts_its_bytes() -> None:
    assert SafetensorsShard(file="x", tensors=TENSORS).num_bytes == 48 + 20 + 14 + 9
