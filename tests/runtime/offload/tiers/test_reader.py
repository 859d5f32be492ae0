"""Direct reads, by native threads and by Python's: what arrives, in which order, what is left out, and what failed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from windlass.errors import BadInput  # noqa: E402
from windlass.runtime.kernels.program.reads import Priority  # noqa: E402
from windlass.runtime.offload.tiers import reader as module  # noqa: E402
from windlass.runtime.offload.tiers.memory import page_aligned, view  # noqa: E402
from windlass.runtime.offload.tiers.reader import DirectReader, burst_speed, sequential_speed  # noqa: E402

pytestmark = pytest.mark.cpu

BLOCK = 4096
NUM_BLOCKS = 64


@pytest.fixture(params=["native", "python"])
def file(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if request.param == "python":
        monkeypatch.setattr(module, "available", lambda: False)
    elif not module.available():
        pytest.skip("no compiled kernels")
    path = tmp_path / "file"
    path.write_bytes(b"".join(bytes([number]) * BLOCK for number in range(NUM_BLOCKS)))
    return path


def opened(path: Path, depth: int = 4, piece_bytes: int = 3 * BLOCK) -> DirectReader:
    return DirectReader(os.open(path, os.O_RDONLY), path.name, depth, piece_bytes)


def test_many_at_a_time(file: Path) -> None:
    reader, memory = opened(file), page_aligned(2 * NUM_BLOCKS * BLOCK)
    places = [(7 * number) % NUM_BLOCKS for number in range(2 * NUM_BLOCKS)]
    sizes = [min(number % 5 + 1, NUM_BLOCKS - place) for number, place in enumerate(places)]
    buffers = [page_aligned(size * BLOCK) for size in sizes]
    reads = [reader.read(place * BLOCK, view(buffer), Priority(place % 3)) for place, buffer in zip(places, buffers, strict=True)]
    for read, place, size, buffer in zip(reads, places, sizes, buffers, strict=True):
        read.wait()
        assert read.done() and read.settle()
        assert buffer.view(-1, BLOCK).unique(dim=1)[:, 0].tolist() == list(range(place, place + size))
    assert reader.counts.num_bytes == sum(sizes) * BLOCK and reader.counts.busy_seconds > 0
    assert memory.numel() and sequential_speed(reader, NUM_BLOCKS * BLOCK, 0.01) > 0
    reader.close()


def test_bursts_begin_together_at_random_places(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a layer asks for the experts that it misses: the next ones when all are there."""
    reader, events, places = opened(file), [], [number * BLOCK for number in range(NUM_BLOCKS - 2)]
    read = reader.read

    def noted(offset: int, buffer: memoryview) -> module.Read:
        found = read(offset, buffer)
        events.append(offset)
        monkeypatch.setattr(found, "wait", lambda wait=found.wait: (wait(), events.append("over")))
        return found

    monkeypatch.setattr(reader, "read", noted)
    monkeypatch.setattr(module, "BURST_SECONDS", 0.0)
    assert burst_speed(reader, places, [view(page_aligned(2 * BLOCK)) for _ in range(3)]) > 0
    bursts = [events[first : first + 6] for first in range(0, len(events), 6)]
    assert len(bursts) == module.BURST_ROUNDS and all(burst[3:] == ["over"] * 3 for burst in bursts)
    asked = [offset for burst in bursts for offset in burst[:3]]
    assert set(asked) <= set(places) and len(set(asked)) > 3 and asked != sorted(asked)
    assert reader.counts.num_bytes == len(asked) * 2 * BLOCK
    reader.close()


def test_what_has_not_begun_is_left_out(file: Path) -> None:
    """Nothing begins while the only thread waits for a pipe: a read from it ends when somebody writes."""
    first, last = os.pipe()
    reader = DirectReader(first, "pipe", depth=1)
    buffers = [view(page_aligned(BLOCK)) for _ in range(3)]
    # A pipe cannot be read at an offset: every read fails, and those that were cancelled before do not.
    reads = [reader.read(0, buffer) for buffer in buffers]
    for read in reads:
        read.cancel()
    assert not any(read.settle() for read in reads)
    before = reader.counts
    assert before.num_bytes == 0 and reader.counts.busy_seconds == before.busy_seconds, "nothing is in flight any more"
    with pytest.raises(BadInput, match="pipe cannot be read at byte 0"):
        reader.read(0, buffers[0]).wait()
    reader.close()
    os.close(last)
    assert file.exists()


def test_a_file_that_ends(file: Path) -> None:
    reader = opened(file)
    os.truncate(file, 5 * BLOCK)
    good, bad = (reader.read(place * BLOCK, view(page_aligned(4 * BLOCK))) for place in (0, 3))
    good.wait()
    # Its two pieces are read at the same time: either may fail first.
    with pytest.raises(BadInput, match=f"ends at byte ({5 * BLOCK}|{6 * BLOCK})"):
        bad.wait()
    assert good.settle() and not bad.settle()
    reader.close()


def test_closing_waits_for_what_has_begun(file: Path) -> None:
    reader = opened(file, depth=1)
    reads = [reader.read(0, view(page_aligned(NUM_BLOCKS * BLOCK)), Priority.IDLE) for _ in range(8)]
    reads[-1].hurry()
    reader.close()
    assert all(read.done() for read in reads)
