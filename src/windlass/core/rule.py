"""One row per tensor: its name in a checkpoint, its name here, its axes. Drives counting, loading, converting and splitting.

A `Rule` speaks of *our* tensor, always [out, in] (or [n]), one per layer and per expert. Where a checkpoint fuses several of
ours into one, or transposes, or stacks experts, its `Source` says how ours is cut out of theirs. Several rules may read the
same stored tensor (Q, K and V of a fused projection); together they cover it exactly once, which a test checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from math import prod

from windlass.core.model import Frozen
from windlass.core.scheme import Keep


class AxisName(Enum):
    """What a dimension counts. The name decides how it is split over ranks (see `place`)."""

    HIDDEN = "hidden"
    LATENT = "latent"
    SINGLE = "single"
    """Small things every rank holds whole: routers, per-head norms, indexers."""
    VOCAB = "vocab"
    HEADS = "heads"
    KV_HEADS = "kv_heads"
    FFN = "ffn"
    EXPERT_FFN = "expert_ffn"
    SHARED_FFN = "shared_ffn"


class Axis(Frozen):
    name: AxisName
    count: int
    """How many indivisible things there are: heads, channels, rows."""
    unit: int = 1
    """Elements of each: head_dim for heads."""

    @property
    def size(self) -> int:
        return self.count * self.unit


class StridedRows(Frozen):
    """Which rows of a fused tensor are ours: row i of ours is row (i // block) * stride + offset + i % block of theirs."""

    block: int
    stride: int
    offset: int

    def stored(self, row: int) -> int:
        return row // self.block * self.stride + self.offset + row % self.block


class Source(Frozen):
    """Where our tensor lies in a checkpoint. `{layer}` and `{expert}` in the name are filled in."""

    name: str
    fused_rows: int | None = None
    """Rows of the stored tensor when it holds more than ours."""
    rows: StridedRows | None = None
    transposed: bool = False
    """Stored as [in, out]."""
    stacked: bool = False
    """All experts in one tensor, the expert first."""
    encoding: str = ""
    """Stored in blocks rather than plainly: `mxfp4` is NAME_blocks [.., in / 32, 16] and NAME_scales [.., in / 32]."""


class Role(Enum):
    MATRIX = "matrix"
    LOOKUP = "lookup"
    """A table of which a token reads one row."""
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
    """Published layout first; a checkpoint has exactly one of them."""
    keep: Keep
    role: Role
    layers: tuple[int, ...] | None = None
    """Layers that have this tensor; None: it belongs to the whole model."""
    num_experts: int = 0
    """One such tensor per expert; 0: none of it is expert-specific."""
    num_active: int = 0
    """Experts a token passes."""
    part: ModelPart = ModelPart.MAIN
    copy_of: str | None = None
    """The checkpoint stores it, but it is another of our tensors again."""

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
    """One tensor of a checkpoint as the published layout names it."""

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
    """Every tensor of a checkpoint, once, in the published layout (`choice` picks the alternative where a rule has one)."""
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
