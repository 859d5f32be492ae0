"""Bars, curves and lines of text with styles. Pure."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from typing import Literal

from windlass.foreign import shown_whole

Style = Literal["", "dim", "bold", "good", "warn", "bad", "head", "pick"]
Piece = tuple[str, Style]
Line = list[Piece]
LEVELS = "▁▂▃▄▅▆▇█"
ASCII_LEVELS = "_.:-=+*#"
"""For terminals that have no blocks."""
CODES: dict[Style, str] = {"": "", "dim": "2", "bold": "1", "good": "32", "warn": "33", "bad": "31;1", "head": "1;7", "pick": "7"}


def bar(share: float | None, width: int, is_plain: bool = False) -> str:
    """`[####....]`; nothing in plain text, where the number stands beside it."""
    if is_plain or share is None:
        return "" if is_plain else f"[{'?' * width}]"
    filled = max(0, min(width, round(share * width)))
    return f"[{'|' * filled}{'.' * (width - filled)}]"


def curve(values: Iterable[float], width: int, is_plain: bool = False) -> str:
    """The last values as a line of blocks, from the least to the largest."""
    shown = list(values)[-width:]
    if is_plain or len(shown) < 2:
        return ""
    low, high = min(shown), max(shown)
    span = high - low
    return "".join(LEVELS[min(7, int((value - low) / span * 8))] if span else LEVELS[0] for value in shown)


def level(share: float | None, warn: float, bad: float) -> Style:
    if share is None:
        return "dim"
    return "bad" if share >= bad else "warn" if share >= warn else "good"


def width_of(text: str) -> int:
    return sum(_cells(character) for character in text)


def _cells(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def encodable(text: str, encoding: str) -> str:
    """As far as this encoding can write it: a terminal may know ASCII only."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        plain = text.translate(str.maketrans(LEVELS, ASCII_LEVELS))
        return plain.encode(encoding, "replace").decode(encoding)
    return text


def cut(line: Line, width: int) -> Line:
    found: Line = []
    left = width
    for text, style in line:
        kept = ""
        for character in shown_whole(text):
            cells = _cells(character)
            if cells > left:
                break
            kept += character
            left -= cells
        if kept:
            found.append((kept, style))
    return found


def padded(text: str, width: int, right: bool = False) -> str:
    text = shown_whole(text)
    while width_of(text) > width:
        text = text[:-1]
    space = " " * (width - width_of(text))
    return space + text if right else text + space


def to_text(line: Line) -> str:
    return "".join(text for text, _ in line).rstrip()


def to_ansi(line: Line) -> str:
    return "".join(f"\x1b[{CODES[style]}m{text}\x1b[0m" if CODES[style] else text for text, style in line)


def join(pieces: Sequence[Piece | None], between: str = "  ") -> Line:
    """Without those that are None or empty."""
    found: Line = []
    for piece in pieces:
        if piece is not None and piece[0]:
            if found:
                found.append((between, ""))
            found.append(piece)
    return found
