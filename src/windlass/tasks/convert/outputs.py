"""Every tensor of the new checkpoint, planned before any weight is read. Pure.

Names are those of the published checkpoint, so that other programs find their modules; a quantized matrix becomes the tensors of
the compressed-tensors layout. Stacked experts are written one by one, which is what loaders of quantized experts expect.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from windlass.core.model import Frozen, ModelSpec
from windlass.core.rule import ModelPart, Role, Rule, Source, source_names, stored_shape
from windlass.core.scheme import Keep, Scheme, Stored
from windlass.model.formats.safetensors.shards import OutTensor
from windlass.runtime.weights.tensors.readers import published_source, unstacked_name


class ConvertedTensor(Frozen):
    """One matrix or vector of the model: where its rows come from and how it is stored."""

    name: str
    """Of the published tensor."""
    shape: tuple[int, ...]
    """[out, in] (or [n]), whatever the orientation in the source, unless it is `as_stored`."""
    rule: Rule
    layer: int | None
    expert: int | None
    stored: Stored
    file_tensors: tuple[OutTensor, ...]
    """What it becomes in the new files: itself, or codes, scales, zero points and shape."""
    carried: str = ""
    """The source's block type (`Q4_0`, `Q8_0`) where its codes are copied; empty: quantized here, or not at all."""
    as_stored: bool = False
    """Written transposed, [in, out], as the source stores it."""

    @property
    def packed(self) -> bool:
        return self.stored.bits < 16

    @property
    def row_bytes(self) -> int:
        """Of the source, at 16 bits per weight: the measure for slices and progress."""
        return self.shape[-1] * 2 if len(self.shape) == 2 else 2

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")


class PackingChoices(Frozen):
    """What decides how each tensor is stored."""

    scheme: Scheme
    high_dtype: str = "BF16"
    """Dtype of tensors that are not quantized."""
    keep: tuple[str, ...] = ()
    """Substrings of module names to leave unquantized, in addition to those that always are."""
    mtp: bool = True
    carried: dict[str, str] = {}
    """Tensors that the source already stores as `Q4_0` or `Q8_0`: their codes are copied instead of quantized again."""


CARRIED_BITS = {"Q4_0": 4, "Q8_0": 8}
CARRIED_GROUP = 32


def converted_tensors(spec: ModelSpec, rules: tuple[Rule, ...], choices: PackingChoices) -> tuple[ConvertedTensor, ...]:
    """In layer order, so that files are read and written sequentially."""
    made = [
        output
        for rule in _once_per_source(rules)
        if choices.mtp or rule.part is ModelPart.MAIN
        for output in _of_rule(rule, choices)
    ]
    return tuple(sorted(made, key=lambda output: -1 if output.layer is None else output.layer))


def _once_per_source(rules: tuple[Rule, ...]) -> Iterator[Rule]:
    """Q, K and V of a fused projection are one stored tensor. Rows are quantized independently, so it stays fused."""
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
    """Unquantized tensors stored [in, out] keep that orientation, as readers of the published names expect."""
    written = tuple(msgspec.structs.replace(one, shape=shape) for one in output.file_tensors)
    return msgspec.structs.replace(output, shape=shape, file_tensors=written, as_stored=True)


def _unstacked(rule: Rule, source: Source, choices: PackingChoices) -> Iterator[ConvertedTensor]:
    """Experts that are only published stacked get names of their own: `experts.E.gate_up_proj.weight`."""
    shape = rule.shape if source.fused_rows is None else (source.fused_rows, *rule.shape[1:])
    for layer in rule.layers or ():
        for expert in range(rule.num_experts):
            yield _output(unstacked_name(source, layer, expert), shape, rule, layer, expert, choices)


def _output(
    name: str, shape: tuple[int, ...], rule: Rule, layer: int | None, expert: int | None, choices: PackingChoices
) -> ConvertedTensor:
    tied = (
        rule.copy_of is not None and rule.part is ModelPart.MAIN
    )  # readers tie it to the embedding, so it must not be quantized
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
        file_tensors=tuple(_file_tensors(name, shape, how, choices.high_dtype, "F16" if carried else "BF16")),
        carried=carried,
    )


def _file_tensors(name: str, shape: tuple[int, ...], how: Stored, high_dtype: str, scale_dtype: str) -> Iterator[OutTensor]:
    if how.bits >= 16:
        yield OutTensor(name=name, dtype="F32" if how.bits == 32 else high_dtype, shape=shape)
        return
    num_out, num_in = shape
    module = name.removesuffix(".weight")
    if how.group is None:
        yield OutTensor(name=name, dtype="F8_E4M3", shape=shape)
        yield OutTensor(name=f"{module}.weight_scale", dtype="F32", shape=(num_out, 1))
        return
    yield OutTensor(name=f"{module}.weight_packed", dtype="I32", shape=(num_out, num_in * how.bits // 32))
    yield OutTensor(name=f"{module}.weight_scale", dtype=scale_dtype, shape=(num_out, num_in // how.group))
    if how.zero_points:
        yield OutTensor(
            name=f"{module}.weight_zero_point", dtype="I32", shape=(-(-num_out * how.bits // 32), num_in // how.group)
        )
    yield OutTensor(name=f"{module}.weight_shape", dtype="I64", shape=(2,))


def total_bytes(made: tuple[ConvertedTensor, ...]) -> int:
    return sum(one.num_bytes for output in made for one in output.file_tensors)
