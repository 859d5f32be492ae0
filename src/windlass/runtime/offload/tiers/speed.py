"""Whether a folder's disk is fast enough to read weights from while a model runs."""

from __future__ import annotations

from pathlib import Path

from windlass.errors import BadInput
from windlass.model.formats.disk.atomic import write_errors
from windlass.runtime.machine.disk import SAMPLE_BYTES, read_speed

LEAST_SPEED = 20e6
"""Bytes per second; a disk that is slower would make a token take minutes."""


def disk_speed(folder: Path) -> float:
    """Bytes per second of direct reads; about half a second."""
    with write_errors(folder, SAMPLE_BYTES):
        return read_speed(folder)


def check_speed(folder: Path, speed: float, step_bytes: int) -> None:
    if speed < LEAST_SPEED:
        raise BadInput(
            f"{folder} reads {speed / 1e6:.0f} MB/s, so that a token would take {step_bytes / speed:,.0f} s; "
            "choose a --disk-folder on a faster disk"
        )
