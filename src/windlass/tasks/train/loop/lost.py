"""Errors of torch that end a rank and are no mistakes of the program: another rank is gone, or a GPU's memory is full. No torch."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager

from windlass.errors import Error

BROKEN_CONNECTION = re.compile(r"gloo/transport|connection (closed|reset)|broken pipe|timed out waiting|socket", re.IGNORECASE)
"""What gloo says when the process at the other end has ended; it raises plain RuntimeErrors."""


class RankLost(Error):
    exit_code = 4


class OutOfDeviceMemory(Error):
    exit_code = 3


@contextmanager
def plain_errors(checkpoints: object) -> Generator[None]:
    """One line for each of them. `checkpoints`: their folder."""
    import torch
    import torch.distributed as dist

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfDeviceMemory(
            f'the GPU\'s memory is full: {_first_sentence(error)}; lower batch.micro_batch, or set memory.recompute = "full"'
        ) from None
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or (dist.is_initialized() and BROKEN_CONNECTION.search(str(error)))):
            raise
        raise RankLost(
            f"the connection to another rank broke ({_first_sentence(error)}); why it ended, it says itself, or the kernel's log does."
            f" Checkpoints are in {checkpoints}; continue with --resume"
        ) from None


def _first_sentence(error: BaseException) -> str:
    """Without the source file that it begins with."""
    lines = str(error).splitlines() or [type(error).__name__]
    return re.sub(r"^\[[^\]]*\]\s*", "", lines[0]).split(". ")[0].rstrip(".")
