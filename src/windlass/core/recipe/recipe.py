"""What to train, on what and how: a recipe a person writes in TOML. Strict: every unknown key is refused with the nearest name.

A recipe is a request, so what it leaves out (`None`) is for the planner to choose; a plan has no such holes. Knows no defaults
that depend on a model or on hardware; those are `plan.training`'s. A trainer adds sections here, it does not read TOML itself.
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
    """Train the multi-token-prediction layer too, where the model has one."""
    start: Start = "random"
    """`weights`: go on from the weights that the name or the path has (continued training, fine-tuning), instead of from chance."""
    dropout: bool | None = None
    """Overrides what the config says."""


class HardwareSection(Frozen):
    on: str | None = None
    """As `windlass plan --on` takes it: `128x(8xH100-80GB)@400Gb`."""


class DataSource(Frozen):
    """Token shards that `windlass train data` made."""

    path: str
    """Their folder, seen from the recipe's."""
    weight: float | None = None
    """Its share of the samples, in proportion to the others'; without weights every source is read through once an epoch."""


class DataSection(Frozen):
    tokens: int | None = None
    sequence_length: int | None = None
    allow_longer_context: bool = False
    """Sequences may pass the model's own context: its context is being extended."""
    sources: tuple[DataSource, ...] = ()
    packing: Packing = "cut"
    """How documents fill rows: `cut` wherever a row ends, or `whole`, where a document that does not fit begins the next row."""
    seed: int = 0
    """Of the order of samples. The same seed and shards give the same samples, whatever the number of processes."""


class BatchSection(Frozen):
    """Of one optimizer step, counted in sequences (exact) or in tokens (a wish: the nearest that layouts can cut is taken).

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
    """Chunks of layers per pipeline rank; 1 is the plain schedule."""
    fsdp: Degree = None
    """Data-parallel ranks over which FSDP spreads parameters, gradients and optimizer states; all of them, or 1: every rank has all.
    With experts spread by ep, also data-parallel ranks / ep."""
    zero: int | None = None
    """0 nothing, 1 optimizer states, 2 and gradients, 3 and parameters are spread over the data-parallel ranks."""
    sequence_parallel: bool | None = None
    schedule: Schedule = "1f1b"
    dispatch: Dispatch = "all_to_all"
    """`per_node`: a token goes to each node once however many of its experts live there (DeepEP, HybridEP)."""


class OverlapSection(Frozen):
    """Which communication the trainer hides behind computation."""

    tp: TensorOverlap = "backward"
    """`backward`: gradient collectives run beside the other gradient's matrix product (Megatron-Core's linear layer);
    `all`: also cut into pieces and pipelined with the products (Transformer Engine user buffers, async TP)."""
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
    """None: Young and Daly's, but not under the planner's floor."""
    interval_steps: int | None = None
    """Also after so many steps."""
    keep: int = 3
    """The last so many stay."""
    milestone_steps: int | None = None
    """Those of every so many steps stay for ever."""
    local: str | None = None
    """A disk of each node that is written first; parts are brought together in the run's folder, checked, and then removed here."""
    bandwidth: float | None = None
    """Bytes per second that all ranks together write to the shared store, or as text: "200GB"."""
    asynchronous: bool = True
    """Training waits only for the copy to host memory."""
    restart_minutes: float = 10.0
    """From a failure to the first new step."""


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
    """`settings`: "optimizer.lr=1e-4", which win over what the file says."""
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
    """Values are read as TOML reads them; what is no TOML is text, so that nobody has to quote for two readers."""
    import tomllib

    key, sign, text = setting.partition("=")
    *sections, name = (part.strip() for part in key.split("."))
    if not (sign and sections and name and all(sections)):
        raise BadInput(f"--set {setting}: write it as section.key=value, for example optimizer.lr=1e-4")
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
    """A recipe from the table a TOML file (or a program) holds."""
    refuse_unknown(table, Recipe, origin)
    try:
        recipe = msgspec.convert(_read_numbers(table), Recipe)
    except msgspec.ValidationError as error:
        raise BadInput(f"{origin}: {_plain(str(error))}") from None
    _check(recipe, origin)
    return _with_stage(recipe)


def _with_stage(recipe: Recipe) -> Recipe:
    """FSDP is ZeRO's third stage, by which planning knows it."""
    parallel = recipe.parallel
    if parallel.fsdp is None or parallel.zero is not None:
        return recipe
    return msgspec.structs.replace(recipe, parallel=msgspec.structs.replace(parallel, zero=3 if parallel.fsdp > 1 else 0))


def refuse_unknown(table: dict[str, Any], kind: type[msgspec.Struct], origin: str, prefix: str = "") -> None:
    """Every key must be a field of `kind`, section by section, so that a typing mistake never passes for a default."""
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
    """What a field that is a tuple of structs has in it."""
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
    _check_alone(recipe, origin)
    for name, value in _numbers(recipe):
        if wrong := _why_bad(name, value):
            raise BadInput(f"{origin}: {name} {wrong}")


def _check_degrees(recipe: Recipe, origin: str) -> None:
    fsdp, zero = recipe.parallel.fsdp, recipe.parallel.zero
    if fsdp is not None and fsdp > 1 and zero not in (None, 3):
        raise BadInput(f"{origin}: parallel.fsdp {fsdp} spreads parameters, which is ZeRO stage 3, but parallel.zero is {zero}")


def _check_optimizer(recipe: Recipe, origin: str) -> None:
    for beta in recipe.optimizer.betas:
        if not 0 <= beta < 1:
            raise BadInput(f"{origin}: optimizer.betas has {beta:g}; both must be from 0 up to, and not, 1")
    schedule = recipe.schedule
    ends = schedule.warmup_steps + (schedule.decay_steps or 0)
    if schedule.steps is not None and ends > schedule.steps:
        raise BadInput(
            f"{origin}: schedule.steps is {schedule.steps}, but warming up and going down take {ends}; make those shorter"
        )
    if schedule.decay_steps is not None and schedule.name != "wsd":
        raise BadInput(f'{origin}: schedule.decay_steps is for name = "wsd" alone, and the schedule is {schedule.name}')
    if schedule.final > 1:
        raise BadInput(f"{origin}: schedule.final is {schedule.final:g}; it is a part of the highest rate, at most 1")


def _check_alone(recipe: Recipe, origin: str) -> None:
    """Keys that mean nothing without another."""
    if recipe.lora.rank is None and recipe.lora != LoraSection():
        raise BadInput(f"{origin}: [lora] has no rank, so that all weights would learn; give lora.rank, or leave the section out")
    if recipe.run.deepspeed is not None and recipe.run.engine != "deepspeed":
        raise BadInput(f'{origin}: run.deepspeed is for run.engine = "deepspeed", and the engine is {recipe.run.engine}')


LARGEST = 10**18
"""Beyond any run; larger numbers are typing mistakes, and would overflow where they are divided."""


def _numbers(recipe: Recipe) -> Iterator[tuple[str, int | float]]:
    """Every number of every section, by its full key."""
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
