"""One console: colours on a terminal, plain text in a pipe, wide tables never cut in one."""

from __future__ import annotations

import sys
from functools import cache
from shutil import get_terminal_size

from rich.console import Console


@cache
def console() -> Console:
    width = get_terminal_size().columns if sys.stdout.isatty() else max(get_terminal_size().columns, 160)
    return Console(width=width, highlight=False)
