"""The operator's log. Writing never fails: a full disk or a closed pipe loses lines, not requests.

Keys and paths chosen by clients are never written; prompts only with --log-prompts.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from typing import TextIO

from windlass.foreign import shown

MAX_PROMPT_CHARACTERS = 2000
MAX_LINE = 2 * MAX_PROMPT_CHARACTERS
PATH = re.compile(r"(?:~|\.{1,2})?/(?:[^\s/:'\"]+/)+([^\s/:'\"]*)")


class Log:
    """`stream` None: the current standard error."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self.lost = 0
        """Lines that could not be written."""
        self.status = ""
        """The status line at the bottom of a terminal; set by `show_status`."""

    def line(self, text: str) -> None:
        cleared = "\r\x1b[K" if self.status else ""
        self._write(f"{cleared}{time.strftime('%H:%M:%S')} {shown(text, MAX_LINE)}\n{self.status}")

    def show_status(self, text: str) -> None:
        """For terminals only."""
        self.status = shown(text, MAX_LINE)
        self._write(f"\r\x1b[K{self.status}")

    def end_status(self) -> None:
        if self.status:
            self.status = ""
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        stream = sys.stderr if self._stream is None else self._stream
        try:
            stream.write(text)
            stream.flush()
        except (OSError, ValueError, AttributeError):  # full disk, closed pipe; closed file; no stream at all
            self.lost += 1


class LogHandler(logging.Handler):
    """uvicorn's messages as one line each, without tracebacks, which quote client data."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        try:
            kind = record.exc_info[0].__name__ if record.exc_info and record.exc_info[0] else ""
            lines = record.getMessage().splitlines()
        except (TypeError, ValueError):
            return
        if lines and lines[0].startswith("Traceback"):  # keep the exception type, which is in the last line
            lines = [lines[-1].partition(":")[0]]
            if lines[0].endswith("CancelledError"):  # a forced exit does not wait for the tasks it cancels
                return
        self._log.line(f"{lines[0] if lines else ''}{f': {kind}' if kind else ''}")


def strip_paths(text: str) -> str:
    """`/home/me/models/x.gguf` -> `x.gguf`: logs that others read should not reveal paths."""
    return PATH.sub(r"\1", text)


def access_line(method: str, route: str, status: int, seconds: float, details: str = "") -> str:
    return f"{method} {route} {status} {seconds:.3f} s{f', {details}' if details else ''}"


def error_location(error: BaseException) -> str:
    """File, line and function where it was raised, without any values."""
    trace, place = error.__traceback__, "?"
    while trace is not None:
        code = trace.tb_frame.f_code
        place = f"{code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno} {code.co_name}"
        trace = trace.tb_next
    return place
