"""Python's garbage collector, kept away from what is never garbage: imported modules."""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def importing() -> Generator[None]:
    """For imports of torch: no collection while it is imported, and none looks at it later. Nothing changes where it was imported before.

    Torch's modules are half a million objects. Measured: 1.0 s of CPU instead of 1.5 s from `import torch` to the end of the process,
    which would otherwise search all of them once more.
    """
    if "torch" in sys.modules:
        yield
        return
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
