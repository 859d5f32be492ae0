"""Why a save failed, in one line; and what is no failure of a disk but a mistake of the program."""

from __future__ import annotations

from torch.distributed.checkpoint.api import CheckpointException

from windlass.errors import Error


def first_cause(error: BaseException) -> BaseException:
    """DCP wraps the errors of ranks in a BaseException."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def disk_error(error: BaseException) -> str | None:
    """A disk or network error in one line; None: a programming error."""
    if isinstance(error, CheckpointException):
        reasons = [disk_error(failure[0]) for failure in error.failures.values()]
        return next((reason for reason in reasons if reason is not None), None)
    if isinstance(error, OSError):
        return f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}"
    return str(error) if isinstance(error, Error) else None
