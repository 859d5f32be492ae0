"""What our own look at a client's constraint did not expect is no fault of the server: the client is told, and the operator's log has where."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Generator
from contextlib import contextmanager

from windlass.errors import Error
from windlass.model.text.grammar.compile import bad_constraint

_log = logging.getLogger("windlass")


@contextmanager
def looking() -> Generator[None]:
    """Around a look. Errors that it expects pass; memory that is used up is no constraint's doing."""
    try:
        yield
    except (Error, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - whatever a schema has where nobody looked for it
        _log.warning("a look at a constraint failed: %s in %s", type(error).__name__, _place(error))
        raise bad_constraint("the constraint cannot be understood; simplify it") from None


def _place(error: BaseException) -> str:
    """Without any values, which are the client's."""
    found = "?"
    for frame, line in traceback.walk_tb(error.__traceback__):
        found = f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{line} {frame.f_code.co_name}"
    return found
