"""How a parameter maps to slices of our tensors. Pure.

The decoder fuses tensors (Q, K and V are one parameter) and a rank holds slices of them. Checkpoints hold the whole, unfused tensors
under our names (`layers.3.mixer.q.weight`; a layer's experts stacked as `layers.3.ffn.experts.gate.weight`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from windlass.core.place import Interval


@dataclass(frozen=True)
class TensorSlice:
    """This rank's slice of one of our tensors."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    held: tuple[Interval, ...]
    """Interval per dimension."""

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.held)

    @property
    def is_whole(self) -> bool:
        return self.sizes == self.shape


@dataclass(frozen=True)
class ParameterLayout:
    """A parameter: slices concatenated along `dim`."""

    parts: tuple[TensorSlice, ...]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0].sizes
        total = sum(part.sizes[self.dim] for part in self.parts)
        return (*first[: self.dim], total, *first[self.dim + 1 :])

    def split(self, parameter: Tensor) -> list[tuple[TensorSlice, Tensor]]:
        """Views of the parameter (or of any tensor of its shape), one per slice."""
        return list(zip(self.parts, parameter.split([part.sizes[self.dim] for part in self.parts], self.dim), strict=True))

    def split_rows(self, local: Tensor, first: int) -> list[tuple[TensorSlice, Tensor]]:
        """The same for rows first, first + 1... only, as FSDP shards a parameter. Slices without a row are left out."""
        last = first + local.shape[0]
        if self.dim != 0:
            cut = ParameterLayout(tuple(_of_rows(part, first, last) for part in self.parts), self.dim)
            return [(part, tensor) for part, tensor in cut.split(local) if tensor.numel()]
        ends = list(accumulate(part.sizes[0] for part in self.parts))
        found: list[tuple[TensorSlice, Tensor]] = []
        for part, stop in zip(self.parts, ends, strict=True):
            start = stop - part.sizes[0]
            low, high = max(first, start), min(last, stop)
            if low < high:
                found.append((_of_rows(part, low - start, high - start), local[low - first : high - first]))
        return found


def _of_rows(part: TensorSlice, first: int, last: int) -> TensorSlice:
    start = part.held[0][0]
    return TensorSlice(part.name, part.shape, ((start + first, start + last), *part.held[1:]))
