"""What a conversion will write: every tensor of the new checkpoint, known before a byte is read. Pure.

Names are those of the published checkpoint, so that other programs find their modules; a packed matrix becomes the tensors of the
compressed-tensors layout. Experts stacked in one tensor are written one by one, as loaders of packed experts expect them.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import msgspec

from windlass.core.model import Frozen, ModelSpec
from windlass.core.rule import ModelPart, Role, Rule, Source, source_names, stored_shape
from windlass.core.scheme import Keep, Scheme, Stored
from windlass.weights.tensors.readers import published_source, unstacked_name

DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "I32": 4, "I64": 8}


class Piece(Frozen):
    """One tensor in the new files."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


class ConvertedTensor(Frozen):
    """One matrix or vector of the model: where its rows come from and what it becomes."""

    name: str
    """Of the published tensor."""
    shape: tuple[int, ...]
    """[out, in] (or [n]), whatever the orientation in the source, unless it is `as_stored`."""
    rule: Rule
    layer: int | None
    expert: int | None
    stored: Stored
    pieces: tuple[Piece, ...]
    carried: str = ""
    """The source's blocks, where their codes are copied."""
    as_stored: bool = False
    """Rows are the source's own, [in, out]."""

    @property
    def packed(self) -> bool:
        return self.stored.bits < 16

    @property
    def row_bytes(self) -> int:
        """Of the source, in 16 bits: what a slice of rows is measured in."""
        return self.shape[-1] * 2 if len(self.shape) == 2 else 2

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")


class PackingChoices(Frozen):
    """What the user decides about a conversion."""

    scheme: Scheme
    high_dtype: str = "BF16"
    """Of what stays in high precision."""
    keep: tuple[str, ...] = ()
    """Modules (by a part of their name) that are not packed, beside those that never are."""
    mtp: bool = True
    carried: dict[str, str] = {}
    """Tensors whose source already holds them in blocks of ours (`Q4_0`, `Q8_0`): codes are copied, not rounded again."""


CARRIED_BITS = {"Q4_0": 4, "Q8_0": 8}
CARRIED_GROUP = 32


def converted_tensors(spec: ModelSpec, rules: tuple[Rule, ...], choices: PackingChoices) -> tuple[ConvertedTensor, ...]:
    """In the order of the layers, so that files can be read and written from front to back."""
    made = [
        output
        for rule in _once_per_source(rules)
        if choices.mtp or rule.part is ModelPart.MAIN
        for output in _of_rule(rule, choices)
    ]
    return tuple(sorted(made, key=lambda output: -1 if output.layer is None else output.layer))


def _once_per_source(rules: tuple[Rule, ...]) -> Iterator[Rule]:
    """Q, K and V of a fused projection are one stored tensor: rows are packed one by one, so it is packed as it lies."""
    seen: set[tuple[str, tuple[int, ...] | None]] = set()
    for rule in rules:
        key = (published_source(rule).name, rule.layers)
        if key not in seen:
            seen.add(key)
            yield rule


def _of_rule(rule: Rule, choices: PackingChoices) -> Iterator[ConvertedTensor]:
    source = published_source(rule)
    if source.stacked:
        yield from _unstacked(rule, source, choices)
        return
    shape = stored_shape(rule, source)
    for name, layer, expert in source_names(rule, source):
        output = _output(name, shape[::-1] if source.transposed else shape, rule, layer, expert, choices)
        yield _as_stored(output, shape) if source.transposed and not output.packed else output


def _as_stored(output: ConvertedTensor, shape: tuple[int, ...]) -> ConvertedTensor:
    """What is stored [in, out] and not packed stays so: its name promises it to every reader."""
    pieces = tuple(msgspec.structs.replace(piece, shape=shape) for piece in output.pieces)
    return msgspec.structs.replace(output, shape=shape, pieces=pieces, as_stored=True)


def _unstacked(rule: Rule, source: Source, choices: PackingChoices) -> Iterator[ConvertedTensor]:
    """Experts that are only ever published stacked get names of their own: `experts.E.gate_up_proj.weight`."""
    shape = rule.shape if source.fused_rows is None else (source.fused_rows, *rule.shape[1:])
    for layer in rule.layers or ():
        for expert in range(rule.num_experts):
            yield _output(unstacked_name(source, layer, expert), shape, rule, layer, expert, choices)


def _output(
    name: str, shape: tuple[int, ...], rule: Rule, layer: int | None, expert: int | None, choices: PackingChoices
) -> ConvertedTensor:
    tied = rule.copy_of is not None and rule.part is ModelPart.MAIN  # readers tie it again, and a packed head cannot be tied
    kept = tied or len(shape) != 2 or not name.endswith(".weight") or any(part in name for part in choices.keep)
    how = Stored(bits=32 if rule.keep is Keep.FLOAT32 else 16)
    if not kept:
        how = choices.scheme.stored(rule.keep, shape[-1], is_head=rule.role is Role.HEAD)
    blocks = choices.carried.get(name, "")
    carried = blocks if how.bits == CARRIED_BITS.get(blocks) and how.group else ""
    if carried:
        how = Stored(bits=how.bits, group=CARRIED_GROUP, scale_bytes=2)
    return ConvertedTensor(
        name=name,
        shape=shape,
        rule=rule,
        layer=layer,
        expert=expert,
        stored=how,
        pieces=tuple(_pieces(name, shape, how, choices.high_dtype, "F16" if carried else "BF16")),
        carried=carried,
    )


def _pieces(name: str, shape: tuple[int, ...], how: Stored, high_dtype: str, scale_dtype: str) -> Iterator[Piece]:
    if how.bits >= 16:
        yield Piece(name=name, dtype="F32" if how.bits == 32 else high_dtype, shape=shape)
        return
    num_out, num_in = shape
    module = name.removesuffix(".weight")
    if how.group is None:
        yield Piece(name=name, dtype="F8_E4M3", shape=shape)
        yield Piece(name=f"{module}.weight_scale", dtype="F32", shape=(num_out, 1))
        return
    yield Piece(name=f"{module}.weight_packed", dtype="I32", shape=(num_out, num_in * how.bits // 32))
    yield Piece(name=f"{module}.weight_scale", dtype=scale_dtype, shape=(num_out, num_in // how.group))
    if how.zero_points:
        yield Piece(name=f"{module}.weight_zero_point", dtype="I32", shape=(-(-num_out * how.bits // 32), num_in // how.group))
    yield Piece(name=f"{module}.weight_shape", dtype="I64", shape=(2,))


def total_bytes(made: tuple[ConvertedTensor, ...]) -> int:
    return sum(piece.num_bytes for output in made for piece in output.pieces)
