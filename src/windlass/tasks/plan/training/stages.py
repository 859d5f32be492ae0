"""Layers of each pipeline stage. Pure."""

from __future__ import annotations

from windlass.core.model import Frozen, Layer, ModelSpec
from windlass.errors import Impossible


class Stage(Frozen):
    """One pipeline stage: its layers, and whether it has the embedding or the head."""

    first_layer: int
    num_layers: int
    has_embedding: bool
    has_head: bool

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.first_layer + self.num_layers)


def split_layers(num_layers: int, pp: int) -> tuple[int, ...]:
    """Evenly; with a remainder the last and the first stages get fewer layers, since they have the head and the embedding
    (arXiv 2407.21783, 3.3.2: 126 layers on 16 stages, one fewer on the first and the last)."""
    if pp > num_layers:
        raise Impossible(f"pp {pp} has more stages than the model has layers ({num_layers})")
    short = -num_layers % pp
    from_end = {index // 2 if index % 2 else pp - 1 - index // 2 for index in range(short)}
    return tuple(-(-num_layers // pp) - (index in from_end) for index in range(pp))


def stages(spec: ModelSpec, pp: int) -> tuple[Stage, ...]:
    made, start = list[Stage](), 0
    for index, count in enumerate(split_layers(spec.num_layers, pp)):
        made.append(Stage(first_layer=start, num_layers=count, has_embedding=index == 0, has_head=index == pp - 1))
        start += count
    return tuple(made)


def layer_kinds(spec: ModelSpec) -> tuple[tuple[Layer, ...], tuple[int, ...]]:
    """The distinct layers, and for every layer which of them it is: a model has two or three kinds and a hundred layers."""
    kinds: dict[Layer, int] = {}
    numbers = tuple(kinds.setdefault(layer, len(kinds)) for layer in spec.layers)
    return tuple(kinds), numbers
