"""What others wrote (names in files and requests, messages of libraries, their errors), before it reaches a terminal or a log.

Every such text goes through here. What is left has no control characters and escapes, which could command a terminal, no marks that turn the
direction of writing around, nothing invisible, and is no longer than a reader needs.
"""

from __future__ import annotations

MAX_NAME = 200
MAX_MESSAGE, MAX_LINES = 1_000, 100
PANIC = "PanicException"
"""The name of PyO3's exception, a BaseException: a library in Rust has failed in a way that it did not expect. Its class cannot be imported."""


def shown(text: object, most: int = MAX_NAME) -> str:
    """On one line; the end of a long text is kept too, for it often says more than the middle."""
    found = str(text)
    if len(found) > most:
        found = f"{found[: most * 2 // 3]}...{found[-(most // 3) :]}"
    return shown_whole(found)


def shown_whole(text: str) -> str:
    """Where a table or a screen cuts it."""
    return text if text.isprintable() else "".join(mark if mark.isprintable() else "?" for mark in text)


def shown_lines(text: object, most: int = MAX_MESSAGE) -> str:
    """A message of ours, whose own lines are kept."""
    return "\n".join(shown(line, most) for line in str(text).split("\n")[:MAX_LINES])


def is_failure(error: BaseException) -> bool:
    """Of code, a library's panic among them; not an interrupt, an exit or a cancelled task."""
    return isinstance(error, Exception) or type(error).__name__ == PANIC
