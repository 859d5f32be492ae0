"""Small safetensors files, whole and damaged, built by hand so that the reader is not tested against itself."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

Entry = tuple[str, list[int], bytes]

MakeFile = Callable[..., Path]


def encode(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def build(tensors: Mapping[str, Entry], **metadata: str) -> bytes:
    entries: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    return encode(json.dumps(entries).encode(), data)


@pytest.fixture(autouse=True, scope="module")
def no_disk_is_waited_for() -> Iterator[None]:
    """What was written is there without: only a power cut could tell. It is most of the time that small conversions take."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, lambda _: None)
        yield


@pytest.fixture
def make_file(tmp_path: Path) -> MakeFile:
    """make_file("model.safetensors", a=("U8", [3], b"abc")) writes that file in a directory with a config.json."""

    def make(file: str, **tensors: Entry) -> Path:
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "config.json").write_text("{}")
        path.write_bytes(build(tensors))
        return path

    return make


@pytest.fixture
def make_index(tmp_path: Path) -> Callable[..., Path]:
    """make_index(a="model-1.safetensors") writes the index."""

    def make(name: str = "model.safetensors.index.json", **weight_map: str) -> Path:
        path = tmp_path / name
        path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
        return path

    return make
