"""The ring of buffers: places of matrices in use never overlap, whatever the sizes; and a stream gives the right bytes at every use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from windlass.core.tiers.values import BLOCK_BYTES  # noqa: E402
from windlass.errors import BadInput  # noqa: E402
from windlass.runtime.offload.stream.ring import ring_layout  # noqa: E402
from windlass.runtime.offload.stream.stream import MatrixStream, StreamedBlock  # noqa: E402
from windlass.runtime.offload.tiers.reader import DirectReader  # noqa: E402

pytestmark = pytest.mark.cpu

SIZES = st.lists(st.integers(1, 6), min_size=1, max_size=8)


@given(SIZES, st.integers(0, 20))
def test_a_place_is_not_reused_before_it_is_given_back(sizes: list[int], more: int) -> None:
    ring_bytes = max(sizes) * 2 + more
    layout = ring_layout(sizes, ring_bytes)
    assert all(offset >= 0 and offset + size <= ring_bytes for offset, size in zip(layout.offsets, sizes, strict=True))
    for use in range(3 * len(sizes)):
        here = use % len(sizes)
        for earlier in range(max(use - layout.waits_for[here] + 1, 0), use):
            other = earlier % len(sizes)
            apart = layout.offsets[other] + sizes[other] <= layout.offsets[here]
            assert apart or layout.offsets[here] + sizes[here] <= layout.offsets[other]


def stream_of(folder: Path, sizes: list[int], ring_blocks: int) -> MatrixStream:
    """Block i of the file is filled with i + 1."""
    path, blocks, offset = folder / "file", [], 0
    with path.open("wb") as file:
        for number, size in enumerate(sizes):
            file.write(bytes([number + 1]) * size * BLOCK_BYTES)
            blocks.append(StreamedBlock(offset, size * BLOCK_BYTES))
            offset += size * BLOCK_BYTES
    reader = DirectReader(os.open(path, os.O_RDONLY), str(path), depth=2, piece_bytes=2 * BLOCK_BYTES)
    return MatrixStream(reader, blocks, ring_blocks * BLOCK_BYTES)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SIZES, st.integers(0, 10), st.data())
def test_every_use_finds_its_bytes(tmp_path: Path, sizes: list[int], more: int, data: st.DataObject) -> None:
    stream = stream_of(tmp_path, sizes, 2 * max(sizes) + more)
    interrupted = data.draw(st.integers(0, len(sizes) - 1))
    for step in range(4):
        for index in range(len(sizes)):
            if step == 2 and index > interrupted:
                break
            stream.before(index)
            assert (stream.memory(index) == index + 1).all()
            stream.after(index)
    assert stream.num_restarts == (0 if interrupted == len(sizes) - 1 else 1)
    stream._reader.close()


def test_a_file_that_was_cut_is_one_line(tmp_path: Path) -> None:
    stream = stream_of(tmp_path, [2, 3], 6)
    stream.before(0)
    os.truncate(tmp_path / "file", BLOCK_BYTES)
    with pytest.raises(BadInput, match=r"ends at byte .* remove it and start again"):
        for index in (0, 1, 0, 1):
            stream.before(index)
            stream.after(index)
    stream._reader.close()
