"""One console: colours on a terminal, plain text in a pipe, wide tables never cut in one."""

from __future__ import annotations

import sys
from functools import cache
from shutil import get_terminal_size

from rich.console import Console


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Rich would leave with exit code 1; a reader that went away is no error, and `cli.run` knows it."""
        raise BrokenPipeError


@cache
def console() -> Console:
    width = get_terminal_size().columns if sys.stdout.isatty() else max(get_terminal_size().columns, 160)
    return _Console(width=width, highlight=False)
