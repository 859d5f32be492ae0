"""Chains of small operations as one kernel each (torch.compile), where a run asks for them. Off by default: compiling takes a minute.

It concerns references that learn: what serves has kernels of its own. One switch for the process, thrown before the first step.
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
    """The same function; one kernel while the switch is on. It must be free of side effects, but for tensors it is given to change,
    and of questions to the device. `dynamic`: one kernel for tensors of every size, not one for each."""
    made: list[Callable[..., Any]] = []

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _Switch.on:
            return function(*args, **kwargs)
        if not made:
            made.append(torch.compile(function, dynamic=dynamic))
        return made[0](*args, **kwargs)

    return call  # type: ignore[return-value]
