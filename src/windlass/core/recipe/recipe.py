"""A training recipe in TOML: model, data, hardware, parallelism, optimizer. Strict: an unknown key is refused with the nearest name.

What a recipe leaves out (`None`) is chosen by the planner. Defaults that depend on the model or the hardware are in `plan.training`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, Literal, cast, get_args

import msgspec

from windlass.core.model import Frozen
from windlass.core.recipe.sections import (
    GuardSection,
    LoraSection,
    LossSection,
    OptimizerSection,
    RunSection,
    ScheduleSection,
    ValidationSection,
)
from windlass.errors import BadInput, UnknownName
from windlass.units import parse_bytes, parse_context, parse_count

Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "cpu", "nvme"]
Compute = Literal["bf16", "fp16", "fp32", "fp8"]
GradientType = Literal["fp32", "bf16", "fp16"]
Schedule = Literal["1f1b", "zero_bubble", "dualpipe"]
TensorOverlap = Literal["none", "backward", "all"]
Dispatch = Literal["all_to_all", "per_node"]
Packing = Literal["cut", "whole"]
Start = Literal["random", "weights"]

Degree = int | None


class ModelSection(Frozen):
    """Exactly one of `name` (registry or hub), `path` (a folder or config.json) and `config` (the table itself)."""

    name: str | None = None
    path: str | None = None
    config: dict[str, Any] | None = None
    mtp: bool = False
    """Also train the multi-token-prediction (MTP) layer, if the model has one."""
    start: Start = "random"
    """`weights`: start from the weights of the name or path (continued training, fine-tuning) instead of random ones."""
    dropout: bool | None = None
    """Overrides the config."""


class HardwareSection(Frozen):
    on: str | None = None
    """As for `windlass plan --on`: `128x(8xH100-80GB)@400Gb`."""


class DataSource(Frozen):
    """Token shards made by `windlass train data`."""

    path: str
    """Their directory, relative to the recipe."""
    weight: float | None = None
    """Sampling weight relative to the other sources; without weights every source is read once per epoch."""


class DataSection(Frozen):
    tokens: int | None = None
    sequence_length: int | None = None
    allow_longer_context: bool = False
    """Allow sequences longer than the model's context, to extend it."""
    sources: tuple[DataSource, ...] = ()
    packing: Packing = "cut"
    """How documents are packed into rows: `cut` splits a document at the end of a row; `whole` starts the next row with it instead."""
    seed: int = 0
    """Seed of the sample order. The same seed and shards give the same samples with any number of processes."""


class BatchSection(Frozen):
    """Batch of one optimizer step, in sequences (exact) or in tokens (rounded to what the layout can divide).

    Gradients are accumulated over global_batch / (data-parallel ranks * micro_batch) micro-batches.
    """

    global_batch: int | None = None
    tokens: int | None = None
    micro_batch: int | None = None


class ParallelSection(Frozen):
    tp: Degree = None
    cp: Degree = None
    pp: Degree = None
    ep: Degree = None
    expert_tp: Degree = None
    virtual_stages: Degree = None
    """Chunks of layers per pipeline rank (interleaved schedule); 1 is the plain schedule."""
    fsdp: Degree = None
    """Data-parallel ranks over which FSDP shards parameters, gradients and optimizer states: all of them, or 1 for none.
    With expert parallelism also data-parallel ranks / ep."""
    zero: int | None = None
    """ZeRO stage over the data-parallel ranks: 0 none, 1 optimizer states, 2 also gradients, 3 also parameters."""
    sequence_parallel: bool | None = None
    schedule: Schedule = "1f1b"
    dispatch: Dispatch = "all_to_all"
    """`per_node`: a token is sent to each node once, however many of its experts are there (DeepEP, HybridEP)."""


class OverlapSection(Frozen):
    """Which communication is overlapped with computation."""

    tp: TensorOverlap = "backward"
    """`backward`: gradient collectives overlap with the other gradient's matmul (Megatron-Core's linear layer);
    `all`: collectives are also split and pipelined with the matmuls (Transformer Engine user buffers, async TP)."""
    pp: bool = True
    dp: bool = True
    ep: bool = False


class MemorySection(Frozen):
    recompute: Recompute | None = None
    flash_attention: bool = True
    offload: Offload = "none"


class PrecisionSection(Frozen):
    compute: Compute = "bf16"
    gradients: GradientType = "fp32"


class CheckpointSection(Frozen):
    interval_minutes: float | None = None
    """None: the Young-Daly interval, but not below the planner's minimum."""
    interval_steps: int | None = None
    """Also save every N steps."""
    keep: int = 3
    """Keep the last N checkpoints."""
    milestone_steps: int | None = None
    """Checkpoints at multiples of this many steps are kept forever."""
    local: str | None = None
    """A local disk of each node, written first; parts are then copied to the run's folder, verified, and removed from the disk."""
    bandwidth: float | None = None
    """Aggregate write bandwidth of all ranks to the shared store, bytes per second, or as text: "200GB"."""
    asynchronous: bool = True
    """Training waits only for the copy to host memory."""
    restart_minutes: float = 10.0
    """From a failure to the first step after the restart."""


class Recipe(Frozen):
    model: ModelSection
    hardware: HardwareSection = HardwareSection()
    data: DataSection = DataSection()
    batch: BatchSection = BatchSection()
    parallel: ParallelSection = ParallelSection()
    overlap: OverlapSection = OverlapSection()
    memory: MemorySection = MemorySection()
    precision: PrecisionSection = PrecisionSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    loss: LossSection = LossSection()
    lora: LoraSection = LoraSection()
    checkpoint: CheckpointSection = CheckpointSection()
    validation: ValidationSection = ValidationSection()
    guard: GuardSection = GuardSection()
    run: RunSection = RunSection()


def load_recipe(path: str | Path, settings: Sequence[str] = ()) -> Recipe:
    """`settings`: overrides like "optimizer.lr=1e-4"."""
    import tomllib

    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"cannot read the recipe {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not TOML: {error}") from None
    for setting in settings:
        _set(table, setting)
    return recipe_from(table, str(path))


def _set(table: dict[str, Any], setting: str) -> None:
    """Values are parsed as TOML; what is not TOML is taken as text, so that strings need no quotes."""
    import tomllib

    key, sign, text = setting.partition("=")
    *sections, name = (part.strip() for part in key.split("."))
    if not (sign and sections and name and all(sections)):
        raise BadInput(f"--set {setting}: use the form section.key=value, for example optimizer.lr=1e-4")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    held = table
    for section in sections:
        inner: object = held.setdefault(section, {})
        if not isinstance(inner, dict):
            raise BadInput(f"--set {setting}: {section} is not a section")
        held = cast("dict[str, Any]", inner)
    held[name] = value


def recipe_from(table: dict[str, Any], origin: str = "recipe") -> Recipe:
    """A recipe from a TOML table."""
    refuse_unknown(table, Recipe, origin)
    try:
        recipe = msgspec.convert(_read_numbers(table), Recipe)
    except msgspec.ValidationError as error:
        raise BadInput(f"{origin}: {_plain(str(error))}") from None
    _check(recipe, origin)
    return _with_zero_stage(recipe)


def _with_zero_stage(recipe: Recipe) -> Recipe:
    """Sets parallel.zero from parallel.fsdp: FSDP is ZeRO stage 3."""
    parallel = recipe.parallel
    if parallel.fsdp is None or parallel.zero is not None:
        return recipe
    return msgspec.structs.replace(recipe, parallel=msgspec.structs.replace(parallel, zero=3 if parallel.fsdp > 1 else 0))


def refuse_unknown(table: dict[str, Any], kind: type[msgspec.Struct], origin: str, prefix: str = "") -> None:
    """Every key must be a field of `kind`, section by section, so that a typo never passes for a default."""
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    for key, value in table.items():
        if key not in fields:
            raise UnknownName(f"key in {origin}:", prefix + key, [prefix + name for name in fields])
        inner = fields[key]
        if isinstance(value, dict) and isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            refuse_unknown(cast("dict[str, Any]", value), inner, origin, f"{prefix}{key}.")
        if isinstance(value, list) and (one := _struct_of_many(inner)) is not None:
            for number, item in enumerate(cast("list[object]", value)):
                if isinstance(item, dict):
                    refuse_unknown(cast("dict[str, Any]", item), one, origin, f"{prefix}{key}[{number}].")


def _struct_of_many(kind: Any) -> type[msgspec.Struct] | None:
    """The struct type of a field that is a tuple of structs."""
    inside = get_args(kind)
    return inside[0] if inside and isinstance(inside[0], type) and issubclass(inside[0], msgspec.Struct) else None


def _per_second(text: str) -> int:
    return parse_bytes(text.removesuffix("/s"))


_NUMBERS = (
    ("data", "tokens", parse_count),
    ("data", "sequence_length", parse_context),
    ("batch", "tokens", parse_count),
    ("checkpoint", "bandwidth", _per_second),
)


def _read_numbers(table: dict[str, Any]) -> dict[str, Any]:
    """`tokens = "15T"` and `sequence_length = "8k"` are allowed; everything inside is a plain number."""
    read = dict(table)
    for section, key, parse in _NUMBERS:
        held: object = read.get(section)
        if isinstance(held, dict):
            fields = dict(cast("dict[str, Any]", held))
            if isinstance(fields.get(key), str):
                fields[key] = parse(fields[key])
            read[section] = fields
    return read


def _plain(message: str) -> str:
    """msgspec says "Expected `int`, got `str` - at `$.parallel.tp`"; the key goes first."""
    what, _, where = message.partition(" - at `$")
    return f"{where.strip('.`')}: {what[:1].lower()}{what[1:]}" if where else what


def _check(recipe: Recipe, origin: str) -> None:
    given = [name for name in ("name", "path", "config") if getattr(recipe.model, name) is not None]
    if len(given) != 1:
        raise BadInput(f"{origin}: [model] needs exactly one of name, path and config; it has {' and '.join(given) or 'none'}")
    if recipe.batch.global_batch is not None and recipe.batch.tokens is not None:
        raise BadInput(f"{origin}: [batch] takes global_batch (sequences) or tokens, not both")
    if recipe.parallel.zero not in (None, 0, 1, 2, 3):
        raise BadInput(f"{origin}: parallel.zero is {recipe.parallel.zero}; ZeRO has stages 0, 1, 2 and 3")
    _check_degrees(recipe, origin)
    _check_optimizer(recipe, origin)
    _check_dependent_keys(recipe, origin)
    for name, value in _numbers(recipe):
        if wrong := _why_bad(name, value):
            raise BadInput(f"{origin}: {name} {wrong}")


def _check_degrees(recipe: Recipe, origin: str) -> None:
    fsdp, zero = recipe.parallel.fsdp, recipe.parallel.zero
    if fsdp is not None and fsdp > 1 and zero not in (None, 3):
        raise BadInput(f"{origin}: parallel.fsdp {fsdp} shards parameters, which is ZeRO stage 3, but parallel.zero is {zero}")


def _check_optimizer(recipe: Recipe, origin: str) -> None:
    for beta in recipe.optimizer.betas:
        if not 0 <= beta < 1:
            raise BadInput(f"{origin}: optimizer.betas has {beta:g}; both must be at least 0 and less than 1")
    schedule = recipe.schedule
    ends = schedule.warmup_steps + (schedule.decay_steps or 0)
    if schedule.steps is not None and ends > schedule.steps:
        raise BadInput(
            f"{origin}: schedule.steps {schedule.steps} is shorter than warmup plus decay ({ends}); use more steps or shorten them"
        )
    if schedule.decay_steps is not None and schedule.name != "wsd":
        raise BadInput(f'{origin}: schedule.decay_steps needs schedule.name = "wsd"; it is "{schedule.name}"')
    if schedule.final > 1:
        raise BadInput(f"{origin}: schedule.final is {schedule.final:g}; it is a fraction of the peak learning rate, at most 1")


def _check_dependent_keys(recipe: Recipe, origin: str) -> None:
    """Keys that need another key."""
    if recipe.lora.rank is None and recipe.lora != LoraSection():
        raise BadInput(f"{origin}: [lora] has no rank, so all weights would be trained; set lora.rank or remove the section")
    if recipe.run.deepspeed is not None and recipe.run.engine != "deepspeed":
        raise BadInput(f'{origin}: run.deepspeed needs run.engine = "deepspeed"; it is "{recipe.run.engine}"')


LARGEST = 10**18
"""Larger numbers are typos, and would overflow in divisions."""


def _numbers(recipe: Recipe) -> Iterator[tuple[str, int | float]]:
    """Every number of every section, with its full key."""
    for section in recipe.__struct_fields__:
        for key in getattr(recipe, section).__struct_fields__:
            value: object = getattr(getattr(recipe, section), key)
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield f"{section}.{key}", value


MAY_BE_ZERO = frozenset(
    "parallel.zero data.seed run.seed schedule.warmup_steps schedule.final optimizer.weight_decay optimizer.momentum"
    " loss.mtp loss.z loss.router_z loss.balance loss.bias_rate guard.spike".split()
)


def _why_bad(name: str, value: int | float) -> str | None:
    least = 0 if name in MAY_BE_ZERO else 1
    if isinstance(value, float) and (not isfinite(value) or value < 0 or (least and not value)):
        return f"is {value:g}; it must be a finite number {'above 0' if least else 'of at least 0'}"
    if value > LARGEST:
        return "is more than 10^18"
    return f"is {value}; it must be at least {least}" if value < least and isinstance(value, int) else None
