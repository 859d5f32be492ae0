"""How fast a folder's disk reads, measured with a small file that has no name."""

from __future__ import annotations

import os
import time
from pathlib import Path

from windlass.errors import BadInput
from windlass.formats.disk.atomic import write_errors, write_fully
from windlass.offload.tiers.file import direct, unnamed_file
from windlass.offload.tiers.memory import page_aligned, view
from windlass.offload.tiers.reader import DirectReader, wait

SAMPLE_BYTES = 2**26
LEAST_SPEED = 20e6
"""Bytes per second; a disk that is slower would make a token take minutes."""


def disk_speed(folder: Path) -> float:
    """Bytes per second. A part of a second."""
    memory = view(page_aligned(SAMPLE_BYTES))
    with write_errors(folder, SAMPLE_BYTES):
        writing, part = unnamed_file(folder)
        try:
            write_fully(writing, memory, 0)
            os.fsync(writing)
            os.posix_fadvise(writing, 0, 0, os.POSIX_FADV_DONTNEED)
            reading = os.open(f"/proc/self/fd/{writing}", os.O_RDONLY)
        finally:
            os.close(writing)
            if part is not None:
                part.unlink()
    reader = DirectReader(direct(reading), str(folder))
    try:
        began = time.perf_counter()
        wait(reader.read(0, memory))
        return SAMPLE_BYTES / (time.perf_counter() - began)
    finally:
        reader.close()


def check_speed(folder: Path, speed: float, step_bytes: int) -> None:
    if speed < LEAST_SPEED:
        raise BadInput(
            f"{folder} reads {speed / 1e6:.0f} MB/s, so that a token would take {step_bytes / speed:,.0f} s; "
            "choose a --disk-folder on a faster disk"
        )
