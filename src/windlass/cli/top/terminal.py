"""The terminal: the other screen, single keys, only lines that changed. Left as it was found, whatever ends us."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Sequence
from types import FrameType, TracebackType

from windlass.tasks.observe.top.draw import Line, encodable, to_ansi, to_text

ENTER, LEAVE = "\x1b[?1049h\x1b[?25l\x1b[2J", "\x1b[?25h\x1b[?1049l"
KEYS = {b"\x1b[A": "up", b"\x1b[B": "down", b"\x1bOA": "up", b"\x1bOB": "down", b"\r": "enter", b"\n": "enter", b"\x1b": "escape",
        b"\x7f": "backspace", b"\x08": "backspace"}  # fmt: skip


def _ended(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


def keys_in(data: bytes) -> list[str]:
    """Several keys may come at once: pasted, or typed quickly."""
    found: list[str] = []
    while data:
        known = next((sequence for sequence in KEYS if data.startswith(sequence)), None)
        if known is not None:
            found.append(KEYS[known])
            data = data[len(known) :]
        else:
            text = data.decode("utf-8", "replace")
            found.append(text[0])
            data = text[1:].encode()
    return found


class Terminal:
    def __init__(self, has_color: bool = True) -> None:
        self._has_color = has_color
        self._input, self._saved = sys.stdin.fileno(), None
        self._drawn: list[str] = []
        self._size = (0, 0)
        self._typed: list[str] = []
        self._wake_read, self._wake_write = os.pipe()

    def __enter__(self) -> Terminal:
        self._saved = termios.tcgetattr(self._input)
        tty.setcbreak(self._input)
        signal.signal(signal.SIGWINCH, self._resized)
        signal.signal(signal.SIGTERM, _ended)
        self._write(ENTER)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._write(LEAVE)
        if self._saved is not None:
            termios.tcsetattr(self._input, termios.TCSADRAIN, self._saved)
        signal.signal(signal.SIGWINCH, signal.SIG_DFL)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _resized(self, number: int, frame: FrameType | None) -> None:
        os.write(self._wake_write, b"w")

    @property
    def size(self) -> tuple[int, int]:
        found = shutil.get_terminal_size((80, 24))
        return max(found.columns, 20), max(found.lines, 4)

    def draw(self, lines: Sequence[Line]) -> None:
        made = [to_ansi(line) if self._has_color else to_text(line) for line in lines]
        if self.size != self._size:
            self._size, self._drawn = self.size, []
            self._write("\x1b[2J")
        changed = [
            f"\x1b[{row + 1};1H{text}\x1b[K"
            for row, text in enumerate(made)
            if row >= len(self._drawn) or self._drawn[row] != text
        ]
        rest = f"\x1b[{len(made) + 1};1H\x1b[J" if len(made) < len(self._drawn) else ""
        self._drawn = made
        self._write("".join(changed) + rest)

    def key(self, seconds: float) -> str:
        """The next key; empty when the time is over or the size has changed."""
        if self._typed:
            return self._typed.pop(0)
        ready, _, _ = select.select([self._input, self._wake_read], [], [], seconds)
        if self._wake_read in ready:
            os.read(self._wake_read, 64)
            return ""
        if self._input not in ready:
            return ""
        data = os.read(self._input, 64)
        self._typed = keys_in(data) if data else ["q"]  # nothing: the terminal is gone
        return self._typed.pop(0) if self._typed else ""

    @staticmethod
    def _write(text: str) -> None:
        if text:
            os.write(sys.stdout.fileno(), encodable(text, sys.stdout.encoding).encode(sys.stdout.encoding))
