"""What can be known of a clock without asking another machine: the kernel's word, the clock of the board, and files that cannot be of the future.

The kernel knows whether something disciplines its clock (adjtimex(2)); a virtual machine's may be right without. The board's clock goes on while
the machine is off; a virtual machine's is the host's. A clock that is behind files which were written before is wrong.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from windlass.runtime.machine.proc import ReadText, read_text

STA_UNSYNC = 0x40
"""linux/timex.h"""
TIMEX_BYTES = 208
STATUS_OFFSET = 40
"""Of `status` in struct timex where a long has 8 bytes."""
WITNESSES = (Path(__file__).parent, Path("/var/log"), Path("/var/log/wtmp"), Path("/var/lib/dpkg/status"),
             Path("/var/lib/systemd/timesync/clock"), Path("/var/lib/chrony/drift"), Path("/etc/resolv.conf"), Path("/tmp"))  # fmt: skip
"""Files and folders that were changed some time ago, as their machine's clock had it."""


def clock_behind(now: float, witnesses: Iterable[Path] = WITNESSES) -> float:
    """Seconds from `now` to the newest of the files, if that is in the future; a second is left for clocks of file servers."""
    times: list[float] = []
    for file in witnesses:
        with suppress(OSError):
            times.append(file.stat().st_mtime)
    behind = max(times, default=now) - now
    return behind if behind > 1.0 else 0.0


def is_synchronized() -> bool | None:
    if not sys.platform.startswith("linux") or ctypes.sizeof(ctypes.c_long) != 8:
        return None
    words = ctypes.create_string_buffer(TIMEX_BYTES)
    call = getattr(ctypes.CDLL(None, use_errno=True), "adjtimex", None)
    if call is None or call(words) < 0:
        return None
    return not int.from_bytes(words.raw[STATUS_OFFSET : STATUS_OFFSET + 4], sys.byteorder) & STA_UNSYNC


def board_ahead(now: float, read: ReadText = read_text) -> float | None:
    """Seconds by which the board's clock is ahead; None: there is none, or it has local time (adjtime(5))."""
    text = read("/sys/class/rtc/rtc0/since_epoch").strip()
    if not text.isdecimal() or "LOCAL" in read("/etc/adjtime").split():
        return None
    return int(text) - now
