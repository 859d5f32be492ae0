"""What a parameter is made of: parts of our tensors, by our names, and where they lie in the whole. Pure.

A decoder stacks tensors (Q, K and V are one parameter) and a rank holds slices of them. Checkpoints know neither: they hold whole
tensors under our names (`layers.3.mixer.q.weight`; a layer's experts stacked as `layers.3.ffn.experts.gate.weight`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from windlass.core.place import Interval


@dataclass(frozen=True)
class Part:
    """This rank's slice of one of our tensors."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    held: tuple[Interval, ...]
    """Per dimension."""

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.held)

    @property
    def is_whole(self) -> bool:
        return self.sizes == self.shape


@dataclass(frozen=True)
class Slab:
    """A parameter: parts one after another along `dim`."""

    parts: tuple[Part, ...]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0].sizes
        total = sum(part.sizes[self.dim] for part in self.parts)
        return (*first[: self.dim], total, *first[self.dim + 1 :])

    def split(self, parameter: Tensor) -> list[tuple[Part, Tensor]]:
        """Views of the parameter (or of anything of its shape), one per part."""
        return list(zip(self.parts, parameter.split([part.sizes[self.dim] for part in self.parts], self.dim), strict=True))

    def split_rows(self, local: Tensor, first: int) -> list[tuple[Part, Tensor]]:
        """The same of rows first, first + 1... of the parameter alone: what FSDP leaves here. Parts without a row are left out."""
        last = first + local.shape[0]
        if self.dim != 0:
            cut = Slab(tuple(_of_rows(part, first, last) for part in self.parts), self.dim)
            return [(part, tensor) for part, tensor in cut.split(local) if tensor.numel()]
        ends = list(accumulate(part.sizes[0] for part in self.parts))
        found: list[tuple[Part, Tensor]] = []
        for part, stop in zip(self.parts, ends, strict=True):
            start = stop - part.sizes[0]
            low, high = max(first, start), min(last, stop)
            if low < high:
                found.append((_of_rows(part, low - start, high - start), local[low - first : high - first]))
        return found


def _of_rows(part: Part, first: int, last: int) -> Part:
    start = part.held[0][0]
    return Part(part.name, part.shape, ((start + first, start + last), *part.held[1:]))
