"""While a program is recorded, a PyTorch call that computes would be lost on replay: it raises instead."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class NotRecordable(Exception):
    """A computation that is not a native operation was met while recording; the caller runs the model eagerly instead."""


# They compute nothing: other views of the same memory, or memory without content.
_ALLOWED = frozenset(
    "aten." + name
    for name in (
        "view", "_unsafe_view", "_reshape_alias", "slice", "select", "t", "transpose", "permute", "unsqueeze", "squeeze",
        "expand", "as_strided", "alias", "detach", "split", "split_with_sizes", "unbind", "narrow", "unfold", "empty",
        "empty_strided", "chunk", "view_as", "flatten", "unflatten", "lift_fresh",
    )
)  # fmt: skip


class OnlyViews(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        if name not in _ALLOWED:
            raise NotRecordable(f"{name} computes with PyTorch; only native operations can be recorded")
        return func(*args, **(kwargs or {}))
