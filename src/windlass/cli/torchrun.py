"""`torchrun --nproc-per-node 2 -m windlass.cli.torchrun run MODEL ...`: any command that runs a model, over the processes torchrun starts.

The first of them is the command; the others are ranks of its engine. Several machines need the model at the same path.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from windlass.errors import Error

if TYPE_CHECKING:
    from windlass.core.layout import Layout
    from windlass.engine.protocol import Launch

MARK = "WINDLASS_TORCHRUN"
"""Set for the command, and for what it starts: a process that merely has torchrun somewhere above it is not meant."""


def main(argv: list[str]) -> int:
    from windlass.cli import run
    from windlass.engine.torchrun import done, follow, started

    try:
        here = started(os.environ)
        if here.rank:
            return follow(here)
    except Error as error:
        print(f"windlass: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    os.environ[MARK] = "1"
    status = run(argv)
    done(here, status)
    return status


def is_torchrun() -> bool:
    return MARK in os.environ


def adapted(launch: Launch, asked: Layout) -> Launch:
    """What was asked for, over torchrun's processes."""
    import msgspec

    from windlass.engine.torchrun import LOAD, layout_of, started

    return msgspec.structs.replace(launch, layout=layout_of(started(os.environ), asked), loader=LOAD)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
