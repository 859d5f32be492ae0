"""The shared console: colours on a terminal; plain text, and tables in full width, in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from shutil import get_terminal_size

from rich.console import Console


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Rich would exit with code 1; `cli.execute` handles it."""
        raise BrokenPipeError


@cache
def console() -> Console:
    width = get_terminal_size().columns if sys.stdout.isatty() else max(get_terminal_size().columns, 160)
    return _Console(width=width, highlight=False)


@contextmanager
def working(what: str) -> Generator[None]:
    """A line on a terminal's standard error while something takes a while; gone when it is done."""
    if not sys.stderr.isatty():
        yield
        return
    with Console(stderr=True).status(what):
        yield
