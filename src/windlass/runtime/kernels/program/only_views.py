"""Forbids PyTorch computation while a program is recorded, since a replay would skip it.

A call is allowed if it only inspects tensors (shape, dtype, address), returns a view of its inputs, or allocates uninitialized memory.
TorchFunctionMode is used rather than TorchDispatchMode, whose import takes 67 MB.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode


class NotRecordable(Exception):
    """A PyTorch computation was called while recording; the caller falls back to eager execution."""


INSPECTING = frozenset(
    (
        "__get__", "__len__", "_set_grad_enabled", "__hash__", "data_ptr", "dim", "element_size", "get_device", "is_contiguous", "is_floating_point",
        "nelement", "numel", "size", "storage_offset", "stride", "untyped_storage",
    )
)  # fmt: skip
ALLOCATING = frozenset(("empty", "from_numpy"))
IN_PLACE = frozenset(("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__iand__", "__ior__", "__ixor__"))


class OnlyViews(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = getattr(func, "__name__", str(func)), kwargs or {}
        in_place = name in IN_PLACE or (name.endswith("_") and not name.endswith("__")) or given.get("out") is not None
        if in_place:
            raise _not_recordable(name)
        result = func(*args, **given)
        if name in ALLOCATING or _is_view(name, result, (args, given)):
            return result
        raise _not_recordable(name)


def _is_view(name: str, result: Any, given: Any) -> bool:
    made = list(_tensors(result))
    if not made:
        return name in INSPECTING
    memory = {tensor.untyped_storage().data_ptr() for tensor in _tensors(given)}
    return all(tensor.untyped_storage().data_ptr() in memory for tensor in made)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)


def _not_recordable(name: str) -> NotRecordable:
    return NotRecordable(f"{name} is a PyTorch computation; only native operations can be recorded")
