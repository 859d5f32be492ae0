"""Headers of safetensors files: what is whole is read exactly, what contradicts itself is refused with its place."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from windlass.errors import BadCheckpoint
from windlass.model.formats.safetensors.header import DTYPE_BITS, MAX_HEADER_BYTES, read_header, repeated_key

pytestmark = pytest.mark.pure


def encode(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def entry(start: int, stop: int, shape: list[Any] | None = None, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [stop - start] if shape is None else shape, "data_offsets": [start, stop]}


def file_of(path: Path, entries: dict[str, Any], num_bytes: int) -> Path:
    file = path / "model.safetensors"
    file.write_bytes(encode(json.dumps(entries).encode(), bytes(num_bytes)))
    return file


def test_a_whole_file(tmp_path: Path) -> None:
    entries = {"__metadata__": {"format": "pt"}, "b": entry(6, 18, [3, 1], "F32"), "a": entry(0, 6, [3], "BF16")}
    file = file_of(tmp_path, entries, 18)
    first = 8 + len(json.dumps(entries))
    a, b = read_header(file)
    assert (a.name, a.dtype, a.shape, a.file, a.start, a.num_bytes) == ("a", "BF16", (3,), file, first, 6)
    assert (b.name, b.dtype, b.shape, b.file, b.start, b.num_bytes) == ("b", "F32", (3, 1), file, first + 6, 12)


def test_padding_scalars_and_empty_tensors(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    header = json.dumps({"none": entry(0, 0, [0, 5]), "scalar": entry(0, 4, [], "F32"), "last": entry(4, 4, [0])}).encode()
    file.write_bytes(encode(header + b"   ", bytes(4)))
    assert {info.name: info.num_bytes for info in read_header(file)} == {"none": 0, "scalar": 4, "last": 0}


def test_a_file_without_tensors(tmp_path: Path) -> None:
    assert read_header(file_of(tmp_path, {}, 0)) == ()


def test_every_dtype_of_the_format(tmp_path: Path) -> None:
    position, entries = 0, {}
    for name, bits in DTYPE_BITS.items():
        entries[name] = entry(position, position + bits, [8], name)
        position += bits
    assert {info.dtype for info in read_header(file_of(tmp_path, entries, position))} == set(DTYPE_BITS)


HUGE = 2**62

DAMAGE: dict[str, tuple[dict[str, Any], int, str, str]] = {
    "unknown dtype": ({"a": entry(0, 4, dtype="F99")}, 4, "a", "unknown dtype 'F99'"),
    "dtype is no text": ({"a": entry(0, 4) | {"dtype": 3}}, 4, "a", "damaged header"),
    "shape is no list": ({"a": entry(0, 4) | {"shape": "4"}}, 4, "a", "damaged header"),
    "negative size": ({"a": entry(0, 4, [-4])}, 4, "a", "damaged header"),
    "fractional size": ({"a": entry(0, 4, [4.0])}, 4, "a", "damaged header"),
    "negative offset": ({"a": entry(0, 4) | {"data_offsets": [-4, 0]}}, 4, "a", "damaged header"),
    "three offsets": ({"a": entry(0, 4) | {"data_offsets": [0, 2, 4]}}, 4, "a", "damaged header"),
    "backward offsets": ({"a": entry(0, 4) | {"data_offsets": [4, 0]}}, 4, "a", "begin at 4 and end at 0"),
    "size against shape": ({"a": entry(0, 4, [3])}, 4, "a", "needs 3 bytes, its offsets give it 4"),
    "size against dtype": ({"a": entry(0, 4, [4], "F32")}, 4, "a", "needs 16 bytes, its offsets give it 4"),
    "half a byte": ({"a": entry(0, 1, [3], "F4")}, 1, "a", "whole number of bytes"),
    "dimensions overflows": ({"a": entry(0, 4, [HUGE, HUGE])}, 4, "a", "overflows"),
    "dimensions overflows to nothing": ({"a": entry(0, 0, [HUGE, HUGE, 0])}, 0, "a", "overflows"),
    "many factors": ({"a": entry(0, 4, [HUGE] * 10_000)}, 4, "a", "overflows"),
    "overlap": ({"a": entry(0, 4), "b": entry(2, 6)}, 6, "b", "overlaps 2 bytes"),
    "the same bytes": ({"a": entry(0, 4), "b": entry(0, 4)}, 4, "b", "overlaps 4 bytes"),
    "gap": ({"a": entry(0, 4), "b": entry(6, 8)}, 8, "b", "leaves a gap"),
    "gap at the start": ({"a": entry(2, 4)}, 4, "a", "leaves a gap"),
    "past the end": ({"a": entry(0, 4)}, 3, "a", "truncated"),
    "far past the end": ({"a": entry(0, 10**18)}, 3, "a", "truncated"),
    "beyond 64 bits": ({"a": entry(0, 2**70)}, 3, "a", "overflows|damaged"),
    "trailing bytes": ({"a": entry(0, 4)}, 6, "a", "2 unused bytes after the last tensor"),
    "bytes of nothing": ({}, 6, "", "6 unused bytes after"),
    "unknown field": ({"a": entry(0, 4) | {"more": 1}}, 4, "a", "damaged header"),
    "missing field": ({"a": {"dtype": "U8", "shape": [4]}}, 4, "a", "damaged header"),
    "no object": ({"a": 3}, 0, "a", "damaged header"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_refused_with_its_place(tmp_path: Path, case: str) -> None:
    entries, num_bytes, tensor, message = DAMAGE[case]
    file = file_of(tmp_path, entries, num_bytes)
    with pytest.raises(BadCheckpoint, match=message) as caught:
        read_header(file)
    assert caught.value.file == str(file) and caught.value.tensor == tensor
    assert caught.value.offset is not None and 0 <= caught.value.offset <= file.stat().st_size
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        encode(b"{}")[:9],
        encode(b"[]"),
        encode(b" {}"),
        encode(b"{'a': 1}"),
        encode(b'{"a": NaN}'),
        encode(b'{"a": ' + b"[" * 200_000),
        encode(b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        encode(b'{"__metadata__": 3}'),
        encode(b'{"__metadata__": {"a": 3}}'),
        encode(b'{"\xff": 3}'),
        encode(b'{"a": {"dtype": "\xff", "shape": [], "data_offsets": [0, 1]}}', b"a"),
        (2**64 - 1).to_bytes(8, "little") + b"{}",
        (2**63).to_bytes(8, "little") + b"{}",
    ],
)
def test_what_is_no_header(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors.*byte \d+"):
        read_header(file)


A, B = b'{"dtype":"U8","shape":[2],"data_offsets":[0,2]}', b'{"dtype":"U8","shape":[2],"data_offsets":[2,4]}'


@pytest.mark.parametrize(
    ("header", "key"),
    [
        (b'{"a":' + A + b',"a":' + B + b"}", "a"),
        (b'{"a":' + A + b',"b":' + B + b',"\\u0061":' + A + b"}", "a"),
        (b'{"a":{"dtype":"U8","dtype":"I8","shape":[4],"data_offsets":[0,4]}}', "dtype"),
        (b'{"__metadata__":{"x":"1","x":"2"},"a":' + A + b',"b":' + B + b"}", "x"),
        (b'{"__metadata__":{},"a":' + A + b',"b":' + B + b',"__metadata__":{}}', "__metadata__"),
    ],
)
def test_keys_that_stand_twice(tmp_path: Path, header: bytes, key: str) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(encode(header, bytes(4)))
    with pytest.raises(BadCheckpoint, match="listed twice in the header") as caught:
        read_header(file)
    assert caught.value.tensor == key


@pytest.mark.parametrize("name", ["a", "a:b", '"dtype":', "::::"])
def test_names_with_colons_are_not_taken_for_keys(tmp_path: Path, name: str) -> None:
    entries = {"__metadata__": {"x:y": ":"}, name: entry(0, 3), "b": entry(3, 6)}
    assert [info.name for info in read_header(file_of(tmp_path, entries, 6))] == [name, "b"]


def test_equal_keys_of_different_objects_are_no_repetition() -> None:
    assert repeated_key(b'{"a":' + A + b',"b":' + B + b"}") is None


def test_a_pointer_instead_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(BadCheckpoint, match="a Git LFS pointer"):
        read_header(file)


def test_the_error_is_one_line_and_survives_a_process_boundary() -> None:
    error = BadCheckpoint("what", Path("x.safetensors"), "a\x1b[31m\nb" * 100, 7)
    assert str(error).startswith("x.safetensors, tensor a?[31m?b") and str(error).endswith(", byte 7: what")
    assert len(str(error)) < 300 and "\n" not in str(error) and "\x1b" not in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.offset, copy.exit_code) == (str(error), 7, 2)
    assert str(BadCheckpoint("what")) == "what"


def test_a_checkpoint_is_looked_at_without_torch() -> None:
    code = "import sys, windlass.model.formats.checkpoint, windlass.model.formats.hub, windlass.model.formats.hub.local; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert not {"torch", "numpy", "huggingface_hub"} & set(done.stdout.split())


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="cannot be read: No such file"):
        read_header(tmp_path / "absent.safetensors")


def test_a_header_over_the_limit_is_not_read(tmp_path: Path) -> None:
    """A sparse file: as large as its header claims, and nothing in it."""
    file = tmp_path / "model.safetensors"
    with file.open("wb") as stream:
        stream.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        stream.truncate(MAX_HEADER_BYTES + 100)
    tracemalloc.start()
    with pytest.raises(BadCheckpoint, match="at most 100000000 are read"):
        read_header(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


def test_a_hostile_header_does_not_become_a_tree(tmp_path: Path) -> None:
    """Two megabytes of empty lists would be forty as Python objects."""
    lists = b"[" + b"[]," * 700_000 + b"[]]"
    file = tmp_path / "model.safetensors"
    file.write_bytes(encode(b'{"a":{"dtype":"U8","shape":' + lists + b',"data_offsets":[0,0]}}'))
    tracemalloc.start()
    with pytest.raises(BadCheckpoint):
        read_header(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * 2**20


# --- fuzz ------------------------------------------------------------------------------------------------------------

VALID = encode(
    json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "model.a.weight": entry(0, 12, [2, 3], "BF16"),
            "model.b.weight": entry(12, 28, [4], "F32"),
            "model.c.weight": entry(28, 33, [5], "I8"),
        }
    ).encode(),
    bytes(range(33)),
)


def consistent_or_refused(file: Path) -> None:
    try:
        infos = read_header(file)
    except BadCheckpoint as error:
        assert "\n" not in str(error) and str(file) in str(error)
        return
    position = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    for info in infos:
        assert info.start == position
        position += info.num_bytes
        bits = DTYPE_BITS[info.dtype]
        for size in info.shape:
            bits *= size
        assert bits == info.num_bytes * 8
    assert position == file.stat().st_size
    assert len({info.name for info in infos}) == len(infos)


fuzz = settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
spots = st.integers(0, len(VALID) - 1)


@fuzz
@given(st.lists(st.tuples(spots, st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    content = bytearray(VALID)
    for spot, byte in changes:
        content[spot] = byte
    (tmp_path / "model.safetensors").write_bytes(content)
    consistent_or_refused(tmp_path / "model.safetensors")


@fuzz
@given(spots, st.integers(0, 12), st.binary(max_size=12))
def test_bytes_taken_out_and_put_in(tmp_path: Path, spot: int, taken: int, put: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(VALID[:spot] + put + VALID[spot + taken :])
    consistent_or_refused(tmp_path / "model.safetensors")


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    for length in range(len(VALID)):
        file.write_bytes(VALID[:length])
        with pytest.raises(BadCheckpoint):
            read_header(file)


sizes = st.integers(-2, 9) | st.sampled_from([2**31, 2**62, 2**63, 2**64, 10**30])
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPE_BITS, "f32", ""]),
        "shape": st.lists(sizes, max_size=4),
        "data_offsets": st.lists(sizes, min_size=2, max_size=2),
    }
)


@fuzz
@given(st.dictionaries(st.text(max_size=4), entries, max_size=3), st.integers(0, 40))
def test_any_entries(tmp_path: Path, header: dict[str, Any], num_bytes: int) -> None:
    consistent_or_refused(file_of(tmp_path, header, num_bytes))
