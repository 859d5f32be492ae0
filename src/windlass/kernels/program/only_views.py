"""While a program is recorded, a PyTorch call that computes would be lost on replay: it raises instead.

A call is allowed if it only looks (shapes, types, addresses), gives another view of memory that it was given, or makes memory without
content. Watching functions, as here, and not dispatched operators spares an import of 67 MB that the latter brings along.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode


class NotRecordable(Exception):
    """A computation that is not a native operation was met while recording; the caller runs the model eagerly instead."""


LOOKING = frozenset(
    (
        "__get__", "__len__", "_set_grad_enabled", "__hash__", "data_ptr", "dim", "element_size", "get_device", "is_contiguous", "is_floating_point",
        "nelement", "numel", "size", "storage_offset", "stride", "untyped_storage",
    )
)  # fmt: skip
WITHOUT_CONTENT = frozenset(("empty", "from_numpy"))
CHANGING = frozenset(("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__iand__", "__ior__", "__ixor__"))


class OnlyViews(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = getattr(func, "__name__", str(func)), kwargs or {}
        in_place = name in CHANGING or (name.endswith("_") and not name.endswith("__")) or given.get("out") is not None
        if in_place:
            raise _refused(name)
        result = func(*args, **given)
        if name in WITHOUT_CONTENT or _is_view(name, result, (args, given)):
            return result
        raise _refused(name)


def _is_view(name: str, result: Any, given: Any) -> bool:
    made = list(_tensors(result))
    if not made:
        return name in LOOKING
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


def _refused(name: str) -> NotRecordable:
    return NotRecordable(f"{name} computes with PyTorch; only native operations can be recorded")
