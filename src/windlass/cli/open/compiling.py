"""CPU kernels are compiled once per machine, at first use; who waits for that is told."""

from __future__ import annotations

import sys

WORDS = "compiling kernels for this machine, once (about half a minute)"


def compile_kernels(shown: bool) -> None:
    """Here, before an engine's process would do it without a word."""
    from windlass.kernels import build

    if not build.will_compile("native"):
        return
    if not shown or not sys.stderr.isatty():
        if shown:
            print(WORDS, file=sys.stderr, flush=True)
        build.library("native")
        return
    from rich.console import Console

    with Console(stderr=True).status(WORDS):
        build.library("native")
