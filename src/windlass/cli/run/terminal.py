"""Line input with editing and a persistent history, on a terminal."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

MAX_LINES = 1000


def history_file() -> Path:
    """$XDG_STATE_HOME/windlass/history (specifications.freedesktop.org/basedir-spec)."""
    state = os.environ.get("XDG_STATE_HOME", "")
    return (Path(state) if Path(state).is_absolute() else Path.home() / ".local" / "state") / "windlass" / "history"


@contextmanager
def keyboard() -> Generator[Callable[[str], str]]:
    """Yields a function that reads a line. Editing works even if the history cannot be saved."""
    try:
        import readline
    except ImportError:  # not on every system
        yield input
        return
    file = history_file()
    readline.set_auto_history(True)
    readline.set_history_length(MAX_LINES)
    with suppress(OSError):
        readline.read_history_file(file)
    try:
        yield input
    finally:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch(mode=0o600, exist_ok=True)  # prompts are private
            readline.write_history_file(file)
