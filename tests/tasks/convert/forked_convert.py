"""`windlass convert` in processes that are forked from one that has imported torch: importing it takes longer than any of these conversions."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

CONTEXT: Any = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch", "torch.distributed", "windlass.runtime.nn", "windlass.runtime.weights", "windlass.tasks.convert.convert"]
)


class Converting:
    """As subprocess.Popen has it, as far as it is needed."""

    def __init__(self, words: list[str], environment: Mapping[str, str]) -> None:
        self.args = words
        self._files = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        # By number of the parent: both processes have the same files.
        paths = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in self._files]
        self._process = CONTEXT.Process(target=converted, args=(words, dict(environment), paths), daemon=True)
        self._process.start()
        self._said: tuple[str, str] | None = None

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    poll = returncode.fget

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it has ended."""
        self._process.join(timeout)
        return self._process.exitcode is not None

    def communicate(self) -> tuple[str, str]:
        self.wait()
        if self._said is None:
            found = []
            for file in self._files:
                file.seek(0)
                found.append(file.read().decode())
                file.close()
            self._said = found[0], found[1]
        return self._said


def converted(words: list[str], environment: dict[str, str], paths: list[str]) -> None:
    """In the new process, in the place of `python -m windlass convert WORDS`."""
    for descriptor, path in enumerate(paths, start=1):
        opened = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert "huggingface_hub" not in sys.modules, "it reads the environment when it is imported"
    from windlass.cli import main

    main(["convert", *words])
