"""CPU kernels are compiled once per machine, at first use, with a message while the user waits."""

from __future__ import annotations

import sys

MESSAGE = "compiling kernels for this machine, once (about half a minute)"


def compile_kernels(shown: bool) -> None:
    """Before the engine process starts, which would compile them silently."""
    from windlass.kernels import build

    if not build.will_compile("native"):
        return
    if not shown or not sys.stderr.isatty():
        if shown:
            print(MESSAGE, file=sys.stderr, flush=True)
        build.library("native")
        return
    from rich.console import Console

    with Console(stderr=True).status(MESSAGE):
        build.library("native")
