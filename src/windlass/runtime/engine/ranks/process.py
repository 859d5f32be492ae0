"""Starts a rank process: `python -m windlass.runtime.engine.ranks.follower FD`, FD being its socket to the supervisor. No torch."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import IO


def start_rank(threads: int, output: IO[bytes] | None = None) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A process that waits for its RankJob. Linux kills it with the thread that started it, so call this from a thread that stays.

    `threads`: PyTorch's; kernels divide WINDLASS_THREADS (or all cores) themselves. `output`: a file for its stdout and stderr.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        process = subprocess.Popen(
            # -P: the current directory is not on sys.path.
            [sys.executable, "-P", "-m", "windlass.runtime.engine.ranks.follower", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            process_group=0,  # Ctrl-C in a terminal is for the parent
        )
    return process, ours
