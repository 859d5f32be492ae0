"""Download progress from file sizes on disk, independent of the transfer method."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

POLL_SECONDS = 0.5


class DownloadProgress:
    """`expected`: blob name -> bytes in `directory`; unfinished files are called NAME.*.incomplete."""

    def __init__(self, directory: Path, expected: Mapping[str, int]) -> None:
        self._directory = directory
        self._expected = expected
        self.total_bytes = sum(expected.values())

    def done_bytes(self) -> int:
        sizes = self._sizes()
        return sum(min(sizes.get(blob, 0), num_bytes) for blob, num_bytes in self._expected.items())

    def remove_leftovers(self) -> None:
        """Deletes .incomplete files of killed downloads whose blob is now complete."""
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
            except OSError:  # it has just been renamed
                continue
        return sizes


@contextmanager
def reporting(download: DownloadProgress, progress: Callable[[int, int], None] | None) -> Generator[None]:
    """Calls progress(bytes done, total bytes) while the block runs, and once more on success."""
    if progress is None:
        yield
        return
    ended = Event()

    def poll() -> None:
        while not ended.wait(POLL_SECONDS):
            progress(download.done_bytes(), download.total_bytes)

    watcher = Thread(target=poll, name="download progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
    progress(download.done_bytes(), download.total_bytes)
