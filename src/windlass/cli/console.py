"""The shared console: colours on a terminal; plain text, and tables in full width, in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from functools import cache
from shutil import get_terminal_size
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.errors import MarkupError
from rich.segment import Segment
from rich.text import Text

from windlass.foreign import shown_whole


class _Console(Console):
    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Names in tables are others': only styles, which are ours, may control the terminal."""
        for segment in super().render(renderable, options):
            is_text = not segment.control and not segment.text.replace("\n", "").isprintable()
            yield Segment("\n".join(map(shown_whole, segment.text.split("\n"))), segment.style) if is_text else segment

    def render_str(self, text: str, **options: Any) -> Text:
        """A name with brackets in it may look like markup that is wrong."""
        try:
            return super().render_str(text, **options)
        except MarkupError:
            return Text(text)

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
