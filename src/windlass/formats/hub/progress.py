"""How much of a download has arrived, by looking at the disk: it works alike for every way the bytes may come."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

SECONDS_BETWEEN_LOOKS = 0.5


class DownloadProgress:
    """Files that are expected in `directory` (blob name -> bytes); while one arrives it is called NAME.something.incomplete."""

    def __init__(self, directory: Path, expected: Mapping[str, int]) -> None:
        self._directory = directory
        self._expected = expected
        self.total_bytes = sum(expected.values())

    def done_bytes(self) -> int:
        sizes = self._sizes()
        return sum(min(sizes.get(blob, 0), num_bytes) for blob, num_bytes in self._expected.items())

    def remove_leftovers(self) -> None:
        """A killed download leaves its unfinished file, which nothing uses again once the whole one is there."""
        for file in self._directory.glob("*.incomplete"):
            blob = file.name.split(".")[0]
            if blob in self._expected and (self._directory / blob).exists():
                file.unlink(missing_ok=True)

    def _sizes(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for file in self._directory.glob("*"):
            blob = file.name.split(".")[0]
            try:
                sizes[blob] = max(sizes.get(blob, 0), file.stat().st_size)
            except OSError:  # it has just been given its name
                continue
        return sizes


@contextmanager
def reporting(arrivals: DownloadProgress, progress: Callable[[int, int], None] | None) -> Generator[None]:
    """Calls progress(bytes here, bytes in all) while the block runs, and once when it has ended well."""
    if progress is None:
        yield
        return
    ended = Event()

    def look() -> None:
        while not ended.wait(SECONDS_BETWEEN_LOOKS):
            progress(arrivals.done_bytes(), arrivals.total_bytes)

    watcher = Thread(target=look, name="download progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
    progress(arrivals.done_bytes(), arrivals.total_bytes)
