"""One rule per tensor: its name in a checkpoint, our name, its axes. Drives counting, loading, converting and splitting.

A `Rule` describes *our* tensor, always [out, in] (or [n]), one per layer and per expert. Where a checkpoint fuses several of ours,
transposes them or stacks experts, the rule's `Source` says how ours is extracted. Several rules may read the same stored tensor
(Q, K and V of a fused projection); together they cover it exactly once, which a test checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from math import prod

from windlass.core.model import Frozen
from windlass.core.scheme import Keep


class AxisName(Enum):
    """What a dimension counts; decides how it is split over ranks (see `place`)."""

    HIDDEN = "hidden"
    LATENT = "latent"
    SINGLE = "single"
    """Replicated on every rank: routers, per-head norms, indexers."""
    VOCAB = "vocab"
    HEADS = "heads"
    KV_HEADS = "kv_heads"
    FFN = "ffn"
    EXPERT_FFN = "expert_ffn"
    SHARED_FFN = "shared_ffn"


class Axis(Frozen):
    name: AxisName
    count: int
    """Number of indivisible items: heads, channels, rows."""
    unit: int = 1
    """Elements per item: head_dim for heads."""

    @property
    def size(self) -> int:
        return self.count * self.unit


class StridedRows(Frozen):
    """Which rows of a fused tensor are ours: our row i is stored row (i // block) * stride + offset + i % block."""

    block: int
    stride: int
    offset: int

    def stored(self, row: int) -> int:
        return row // self.block * self.stride + self.offset + row % self.block


class Source(Frozen):
    """Where our tensor is stored in a checkpoint. `{layer}` and `{expert}` in the name are filled in."""

    name: str
    fused_rows: int | None = None
    """Total rows of the stored tensor, where it holds more than ours."""
    rows: StridedRows | None = None
    transposed: bool = False
    """Stored as [in, out]."""
    stacked: bool = False
    """All experts in one tensor, along its first dimension."""
    encoding: str = ""
    """Block encoding: `mxfp4` is NAME_blocks [.., in / 32, 16] and NAME_scales [.., in / 32]."""


class Role(Enum):
    MATRIX = "matrix"
    LOOKUP = "lookup"
    """An embedding table; a token reads one row."""
    HEAD = "head"
    VECTOR = "vector"


class ModelPart(Enum):
    MAIN = "main"
    NEXT_TOKEN = "next_token"
    """The multi-token-prediction layer; engines may leave it out."""


class Rule(Frozen):
    ours: str
    axes: tuple[Axis, ...]
    sources: tuple[Source, ...]
    """The published layout first; a checkpoint has exactly one of them."""
    keep: Keep
    role: Role
    layers: tuple[int, ...] | None = None
    """Layers that have this tensor; None: outside the layers."""
    num_experts: int = 0
    """One such tensor per expert; 0: not an expert's."""
    num_active: int = 0
    """Experts per token."""
    part: ModelPart = ModelPart.MAIN
    copy_of: str | None = None
    """Our name of the tensor that this one duplicates in the checkpoint."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    @property
    def elements(self) -> int:
        """Of one tensor: one layer, one expert."""
        return prod(self.shape)

    @property
    def copies(self) -> int:
        return (1 if self.layers is None else len(self.layers)) * max(self.num_experts, 1)

    def in_layer(self, layer: int) -> bool:
        return self.layers is not None and layer in self.layers


class StoredTensor(Frozen):
    """One tensor of a checkpoint in the published layout."""

    name: str
    shape: tuple[int, ...]


def stored_shape(rule: Rule, source: Source) -> tuple[int, ...]:
    shape = list(rule.shape)
    if source.fused_rows is not None:
        shape[0] = source.fused_rows
    if source.transposed:
        shape.reverse()
    return (rule.num_experts, *shape) if source.stacked else tuple(shape)


def source_names(rule: Rule, source: Source) -> Iterator[tuple[str, int | None, int | None]]:
    """(stored name, layer, expert) of every tensor the rule reads through `source`."""
    for layer in rule.layers if rule.layers is not None else (None,):
        if rule.num_experts and not source.stacked:
            for expert in range(rule.num_experts):
                yield source.name.format(layer=layer, expert=expert), layer, expert
        else:
            yield source.name.format(layer=layer), layer, None


def stored_tensors(rules: tuple[Rule, ...], choice: int = 0) -> Iterator[StoredTensor]:
    """Every tensor of a checkpoint once, in the published layout (`choice` selects an alternative source where a rule has one)."""
    seen: set[str] = set()
    for rule in rules:
        source = rule.sources[min(choice, len(rule.sources) - 1)]
        for name, _, _ in source_names(rule, source):
            if name not in seen:
                seen.add(name)
                yield from _as_stored(name, stored_shape(rule, source), source.encoding)


def _as_stored(name: str, shape: tuple[int, ...], encoding: str) -> Iterator[StoredTensor]:
    if encoding == "mxfp4":
        blocks = (*shape[:-1], shape[-1] // 32)
        yield StoredTensor(name=f"{name}_blocks", shape=(*blocks, 16))
        yield StoredTensor(name=f"{name}_scales", shape=blocks)
    else:
        yield StoredTensor(name=name, shape=shape)
