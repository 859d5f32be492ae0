"""Programs whose words are followed while they run, with the time of each line."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from typing import Any, NamedTuple

from waiting import HUNG_SECONDS


class Line(NamedTuple):
    at: float
    """time.monotonic"""
    text: str


class Followed:
    """Standard error and output of a process that was started with both in one pipe."""

    def __init__(self, process: subprocess.Popen[Any], name: str) -> None:
        self.process, self.name = process, name
        self.lines: list[Line] = []
        self._more = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as words:
            for text in words:
                with self._more:
                    self.lines.append(Line(time.monotonic(), text.rstrip()))
                    self._more.notify_all()
        with self._more:
            self._more.notify_all()

    def until(self, pattern: str, since: float = 0.0) -> Line:
        """The first line after `since` that has the pattern in it."""
        end = time.monotonic() + HUNG_SECONDS
        with self._more:
            while True:
                found = next((line for line in self.lines if line.at >= since and re.search(pattern, line.text)), None)
                if found is not None:
                    return found
                left, ended = end - time.monotonic(), not self._thread.is_alive()
                how = "ended" if ended else "hung"
                assert left > 0 and not ended, f"{self.name} {how} and did not say {pattern!r}:\n{self.said}"
                self._more.wait(min(left, 0.5))

    @property
    def said(self) -> str:
        begin = self.lines[0].at if self.lines else 0.0
        return "\n".join(f"{line.at - begin:7.2f} {self.name}: {line.text}" for line in self.lines)

    def ended(self) -> int:
        """Its exit status."""
        try:
            status = self.process.wait(HUNG_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} hung instead of ending:\n{self.said}") from None
        self._thread.join(HUNG_SECONDS)
        return status
