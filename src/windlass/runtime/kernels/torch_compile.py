"""torch.compile for chains of small operations in training. Off by default: compiling takes a minute.

Only references are compiled; serving has its own kernels. One switch per process, set before the first step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


class _Switch:
    on = False


def compile_chains(on: bool) -> None:
    _Switch.on = on


def chain(function: Function, *, dynamic: bool = False) -> Function:
    """The same function, compiled while the switch is on. It must have no side effects other than on its tensor arguments, and must not
    synchronize with the device. `dynamic`: one kernel for all tensor sizes, not one per size."""
    compiled: list[Callable[..., Any]] = []

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _Switch.on:
            return function(*args, **kwargs)
        if not compiled:
            compiled.append(torch.compile(function, dynamic=dynamic))
        return compiled[0](*args, **kwargs)

    return call  # type: ignore[return-value]
