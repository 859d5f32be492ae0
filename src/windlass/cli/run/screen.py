"""Streams an answer to the terminal: reasoning dim, content plain.

Only the answer goes to standard output, so that it can be piped; everything else goes to standard error.
"""

from __future__ import annotations

import re
import sys
from typing import TextIO

from windlass.foreign import shown_lines

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""All but tab and line feed: model output must not control the terminal."""


class Screen:
    def __init__(self, out: TextIO | None = None, remarks: TextIO | None = None) -> None:
        self._out, self._remarks = out or sys.stdout, remarks or sys.stderr
        self.is_terminal = self._out.isatty()
        self._dim = False
        self._written = ""
        """The last text, to know whether the line is complete."""

    def reasoning(self, text: str) -> None:
        """Only on a terminal; a pipe gets the answer alone."""
        if text and self.is_terminal:
            self._shade(True)
            self._write(text)

    def content(self, text: str) -> None:
        if not text:
            return
        if self._dim:
            self._shade(False)
            self._write("\n\n")
        self._write(text)

    def end(self) -> None:
        """Leaves the cursor at the start of a line."""
        self._shade(False)
        if self._written and not self._written.endswith("\n"):
            self._write("\n")
        self._written = ""

    def remark(self, text: str) -> None:
        line = shown_lines(text)
        shaded = f"{DIM}{line}{PLAIN}" if _shades(self._remarks) else line
        print(shaded, file=self._remarks, flush=True)

    def _shade(self, dim: bool) -> None:
        if dim != self._dim and _shades(self._out):
            self._out.write(DIM if dim else PLAIN)
            self._out.flush()
        self._dim = dim

    def _write(self, text: str) -> None:
        self._out.write(CONTROL.sub("\N{REPLACEMENT CHARACTER}", text) if self.is_terminal else text)
        self._out.flush()
        self._written = text


def _shades(stream: TextIO) -> bool:
    from os import environ

    return stream.isatty() and "NO_COLOR" not in environ and environ.get("TERM", "") != "dumb"
