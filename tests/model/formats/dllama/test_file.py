"""The header of `.m` files, and the order of rows for pairwise rotation."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from windlass.errors import BadCheckpoint, UnknownName
from windlass.model.formats.dllama.file import (
    KEYS,
    WeightType,
    header_bytes,
    read_header,
    read_weight_type,
    to_halves,
    to_pairs,
    weight_type,
)

pytestmark = pytest.mark.cpu


def _read(folder: Path, data: bytes) -> dict[str, int]:
    path = folder / "x.m"
    path.write_bytes(data)
    return read_header(path).values


def _header(*pairs: tuple[int, int]) -> bytes:
    return struct.pack("<ii", 0x0A00ABCD, 8 + 8 * len(pairs)) + b"".join(struct.pack("<ii", *pair) for pair in pairs)


def test_every_key_comes_back(tmp_path: Path) -> None:
    values = {name: index for index, name in enumerate(KEYS)} | {"routed_scaling_low": -7, "routed_scaling_high": 0x40040000}
    data = header_bytes(values)
    assert data[:8] == struct.pack("<ii", 0x0A00ABCD, 8 + 8 * len(KEYS)) and len(data) == 8 + 8 * len(KEYS)
    assert _read(tmp_path, data) == values


def test_own_keys_are_far_from_distributed_llamas() -> None:
    own = [number for number in KEYS.values() if number > 1000]
    assert min(own) > 0x57000000 and max(own) < 2**31 and len(set(KEYS.values())) == len(KEYS)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "byte 0: 0 bytes are too short"),
        (b"\xcd\xab", "byte 2: 2 bytes are too short"),
        (struct.pack("<ii", 0xABCD00, 8), "byte 0: old header format"),
        (b"GGUF\x03\0\0\0", "byte 0: not a Distributed Llama model: it starts with 0x46554747"),
        (struct.pack("<ii", 0x0A00ABCD, 16), "byte 4: the header claims 16 bytes of a 8-byte file"),
        (struct.pack("<ii", 0x0A00ABCD, -8), "byte 4: the header claims -8 bytes"),
        (struct.pack("<iii", 0x0A00ABCD, 12, 0), "byte 4: the header claims 12 bytes"),
        (struct.pack("<ii", 0x0A00ABCD, 80000) + bytes(79992), "byte 4: the header claims 80000 bytes"),
        (_header((2, 64), (22, 1)), "byte 16: unknown header key 22; Distributed Llama has 0 to 21"),
        (_header((2, 64), (2, 64)), r"byte 16: header key 2 \(dim\) appears twice"),
        (_header((4, 1), (2, -64)), r"byte 20: header key 2 \(dim\) is -64"),
    ],
)
def test_a_damaged_header_is_refused_with_its_byte(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(BadCheckpoint, match=f"x.m, {message}"):
        _read(tmp_path, data)


@given(st.binary(max_size=200))
def test_no_bytes_make_it_fail_otherwise(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    for candidate in (data, struct.pack("<ii", 0x0A00ABCD, 8 + len(data) // 8 * 8) + data):
        try:
            assert _read(folder, candidate).keys() <= KEYS.keys()
        except BadCheckpoint as error:
            assert "\n" not in str(error)


def test_the_weight_type_must_be_said_and_known(tmp_path: Path) -> None:
    path = tmp_path / "x.m"
    for values, message in (
        ({"dim": 64}, "does not say how weights are stored"),
        ({"weights_float_type": 4}, "unknown weights_float_type 4"),
    ):
        path.write_bytes(header_bytes(values))
        with pytest.raises(BadCheckpoint, match=message):
            read_weight_type(path, read_header(path))
    with pytest.raises(UnknownName, match="q40"):
        weight_type("q4")


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="cannot be read: No such file"):
        read_header(tmp_path / "none.m")


def test_row_bytes() -> None:
    assert [kind.row_bytes(4096) for kind in WeightType] == [16384, 8192, 2304, 4352]


def test_pairs_follow_the_rotation() -> None:
    """Row i of the first half and row i of the second become neighbours, head by head."""
    rows = torch.arange(16)[:, None]
    assert to_pairs(rows, 8).flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    assert torch.equal(to_halves(to_pairs(rows, 8), 8), rows)
    assert (to_halves(to_pairs(rows.numpy(), 4), 4) == rows.numpy()).all()
