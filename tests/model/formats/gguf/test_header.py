"""GGUF headers, sound and damaged: one clear error each, and never memory for what a length merely claims."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path

import pytest

from windlass.errors import BadInput
from windlass.model.formats.gguf.header import TYPES, read_header

pytestmark = pytest.mark.pure

UINT8, UINT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, FLOAT64 = 0, 4, 6, 7, 8, 9, 10, 12


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, items: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + items


def info(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def gguf(pairs: list[bytes], infos: list[bytes], data: bytes = b"", version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(infos), len(pairs)) + b"".join(pairs) + b"".join(infos)
    return head + bytes(-len(head) % 32) + data


PAIRS = [
    pair("general.architecture", STRING, text("example")),
    pair("a.flag", BOOL, b"\x01"),
    pair("a.number", UINT32, struct.pack("<I", 7)),
    pair("a.large", UINT64, struct.pack("<Q", 2**40)),
    pair("a.float", FLOAT32, struct.pack("<f", 0.5)),
    pair("a.double", FLOAT64, struct.pack("<d", 0.1)),
    pair("a.words", ARRAY, array(STRING, 2, text("one") + text("zwölf"))),
    pair("a.bytes", ARRAY, array(UINT8, 3, b"\x01\x02\x03")),
    pair("a.nested", ARRAY, array(ARRAY, 2, array(UINT8, 1, b"\x05") + array(STRING, 1, text("x")))),
]
INFOS = [info("plain", (3,), 0, 0), info("blocks", (64, 2), 2, 32)]  # 12 bytes; 2 rows of 2 blocks of 18
SOUND = gguf(PAIRS, INFOS, bytes(32 + 72))


def write(directory: Path, content: bytes) -> Path:
    file = directory / "model.gguf"
    file.write_bytes(content)
    return file


@pytest.mark.parametrize("version", [2, 3])
def test_every_kind_of_value_is_read(tmp_path: Path, version: int) -> None:
    header = read_header(write(tmp_path, gguf(PAIRS, INFOS, bytes(104), version)))
    assert header.version == version
    assert header.metadata == {
        "general.architecture": "example",
        "a.flag": True,
        "a.number": 7,
        "a.large": 2**40,
        "a.float": 0.5,
        "a.double": 0.1,
        "a.words": ["one", "zwölf"],
        "a.bytes": [1, 2, 3],
        "a.nested": [[5], ["x"]],
    }


def test_tensors_are_placed_in_the_file(tmp_path: Path) -> None:
    tensors = read_header(write(tmp_path, SOUND)).tensors
    blocks = tensors["blocks"]
    assert tensors["plain"].shape == (3,)
    assert (blocks.shape, blocks.type.name, blocks.num_rows, blocks.row_bytes) == ((2, 64), "Q4_0", 2, 36)
    assert blocks.start == tensors["plain"].start + 32 == len(SOUND) - 72


def test_alignment_is_respected(tmp_path: Path) -> None:
    head = gguf([pair("general.alignment", UINT32, struct.pack("<I", 64))], [info("t", (1,), 0, 0)])
    file = write(tmp_path, head + bytes(-len(head) % 64) + bytes(4))
    assert read_header(file).tensors["t"].start % 64 == 0


HUGE = struct.pack("<Q", 2**62)
DAMAGED = {
    "empty": b"",
    "another file": b"PK\x03\x04" + bytes(64),
    "version 1": b"GGUF" + struct.pack("<I", 1) + bytes(64),
    "big-endian": b"GGUF" + struct.pack(">I", 3) + bytes(64),
    "more tensors than bytes": b"GGUF" + struct.pack("<I", 3) + HUGE + bytes(64),
    "more keys than bytes": b"GGUF" + struct.pack("<IQ", 3, 0) + HUGE + bytes(64),
    "a long key": b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + HUGE + bytes(64),
    "a long array": gguf([pair("k", ARRAY, array(UINT8, 2**60, b""))], [], bytes(64)),
    "an unknown value type": gguf([pair("k", 99, b"")], [], bytes(64)),
    "an array of unknown type": gguf([pair("k", ARRAY, array(99, 1, b""))], [], bytes(64)),
    "nesting": gguf([pair("k", ARRAY, array(ARRAY, 1, b"") * 100_000)], [], bytes(64)),
    "a string that is not UTF-8": gguf([pair("k", STRING, text(b"\xff\xfe"))], [], bytes(64)),
    "a key twice": gguf([pair("k", BOOL, b"\0")] * 2, [], bytes(64)),
    "a bad alignment": gguf([pair("general.alignment", UINT32, struct.pack("<I", 33))], [], bytes(64)),
    "alignment that is text": gguf([pair("general.alignment", STRING, text("32"))], [], bytes(64)),
    "no dimensions": gguf([], [info("t", (), 0, 0)], bytes(64)),
    "too many dimensions": gguf([], [info("t", (1,) * 5, 0, 0)], bytes(64)),
    "a dimension of zero": gguf([], [info("t", (0, 4), 0, 0)], bytes(64)),
    "a huge tensor": gguf([], [info("t", (2**40, 2**40), 0, 0)], bytes(64)),
    "an unknown tensor type": gguf([], [info("t", (4,), 4, 0)], bytes(64)),
    "a row of part of a block": gguf([], [info("t", (33,), 2, 0)], bytes(64)),
    "an unaligned tensor": gguf([], [info("t", (4,), 0, 4)], bytes(64)),
    "a tensor beyond the file": gguf([], [info("t", (4,), 0, 64)], bytes(64)),
    "a tensor twice": gguf([], [info("t", (4,), 0, 0), info("t", (4,), 0, 32)], bytes(64)),
    "tensors over each other": gguf([], [info("t", (16,), 0, 0), info("u", (8,), 0, 32)], bytes(64)),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED.keys())
def test_damage_is_one_clear_line(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(BadInput, match=r"model\.gguf.*byte \d+") as caught:
        read_header(write(tmp_path, content))
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        read_header(tmp_path / "none.gguf")


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    for length in range(len(SOUND)):
        with pytest.raises(BadInput):
            read_header(write(tmp_path, SOUND[:length]))


def test_mutations_are_read_or_refused(tmp_path: Path) -> None:
    """Any change of bytes: a header, or BadInput, and little memory."""
    chance = random.Random(3)
    tracemalloc.start()
    for _ in range(500):
        content = bytearray(SOUND)
        for _ in range(chance.choice([1, 1, 2, 8])):
            content[chance.randrange(len(content))] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
        try:
            read_header(write(tmp_path, bytes(content)))
        except BadInput as error:
            assert "\n" not in str(error)
    assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    tracemalloc.stop()


def test_claims_within_a_large_file_cost_no_memory(tmp_path: Path) -> None:
    """A sparse gigabyte makes claims plausible by size; the limits still hold."""
    for claim in (array(UINT8, 2**29, b""), array(STRING, 2**26, b""), array(ARRAY, 2**25, b"")):
        file = write(tmp_path, gguf([pair("k", ARRAY, claim)], []))
        with file.open("r+b") as stream:
            stream.truncate(2**30)
        tracemalloc.start()
        with pytest.raises(BadInput, match="items"):
            read_header(file)
        assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
        tracemalloc.stop()


def test_block_sizes_are_those_of_ggml() -> None:
    gguf_package = pytest.importorskip("gguf")
    for number, kind in TYPES.items():
        theirs = gguf_package.GGMLQuantizationType(number)
        assert (kind.name, (kind.elements, kind.num_bytes)) == (theirs.name, tuple(gguf_package.GGML_QUANT_SIZES[theirs]))
