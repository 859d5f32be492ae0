"""Reading text files of /proc and /sys."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

ReadText = Callable[[str], str]
"""A path -> its text; empty if it cannot be read."""


def read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def field_bytes(text: str, field: str) -> int | None:
    """`MemTotal:  32000 kB` in /proc/meminfo, `VmRSS:  900 kB` in /proc/PID/status."""
    match = re.search(rf"^{re.escape(field)}:\s*(\d+)\s*kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else None
