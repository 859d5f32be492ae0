"""The CPU kernels before a model is opened: compiled once per machine, with a message while the user waits; a warning where there are none."""

from __future__ import annotations

import sys

from windlass.errors import DISTRIBUTION

MESSAGE = "compiling kernels for this machine, once (about a minute)"
TIMES_SLOWER = "40 to 300"
"""Decoding with PyTorch's operations instead of the compiled kernels on two cores: tiny-glm and SmolLM2-135M (docs/reference/install.md)."""


def compile_kernels(shown: bool, device: str = "auto") -> None:
    """Before the engine process starts, which would compile them silently. `device`: as in Launch. Models on a GPU do not need them."""
    from windlass.runtime.kernels import build

    if device not in ("auto", "cpu") or (device == "auto" and _has_gpu()):
        return
    if build.will_compile("native"):
        _compile(shown)
    if build.is_disabled():
        return
    missing = build.why_not("native")
    if missing:
        print(warning(missing), file=sys.stderr, flush=True)


def warning(why: str) -> str:
    return (
        f"WARNING: no compiled CPU kernels: {why}. The answers are the same, {TIMES_SLOWER} times slower. "
        "To mend it: `apt install g++`, or on a machine that has it `make wheel` in a checkout, then here "
        f"`pip install --force-reinstall --no-deps {DISTRIBUTION.replace('-', '_')}-*.whl`"
    )


def _compile(shown: bool) -> None:
    from windlass.runtime.kernels import build

    if not shown or not sys.stderr.isatty():
        if shown:
            print(MESSAGE, file=sys.stderr, flush=True)
        build.library("native")
        return
    from rich.console import Console

    with Console(stderr=True).status(MESSAGE):
        build.library("native")


def _has_gpu() -> bool:
    """One that this PyTorch can use: its CPU builds say so in their version."""
    from importlib.metadata import version
    from pathlib import Path

    from windlass.runtime.machine.gpus import DRIVER_FILES

    return any(Path(file).exists() for file in DRIVER_FILES) and not version("torch").endswith("+cpu")
