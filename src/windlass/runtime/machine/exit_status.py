"""Why a child process ended: its exit status as text, and the last line it wrote."""

from __future__ import annotations

import os
import signal

TAIL_BYTES, MAX_CHARACTERS = 2000, 300
SHELL_SIGNAL = 128
"""A shell, and our guard, report a signal as this plus its number."""


def describe_exit(status: int) -> str:
    """`exited with status 1`, `was killed by SIGKILL (likely out of memory)`. As subprocess reports it: negative for a signal."""
    number = -status if status < 0 else status - SHELL_SIGNAL if status > SHELL_SIGNAL else 0
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"exited with status {status}"
    hint = " (likely out of memory)" if number == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def last_line(descriptor: int) -> str:
    """Of a file that a process writes its output to; its position is not changed."""
    size = os.fstat(descriptor).st_size
    written = os.pread(descriptor, TAIL_BYTES, max(size - TAIL_BYTES, 0))
    lines = written.decode(errors="replace").split("\n")
    return next((line.strip()[:MAX_CHARACTERS] for line in reversed(lines) if line.strip()), "")
