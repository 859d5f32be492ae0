"""A training recipe in TOML: model, data, hardware, parallelism, optimizer. Strict: an unknown key is refused with the nearest name.

What a recipe leaves out (`None`) is chosen by the planner. Defaults that depend on the model or the hardware are in `plan.training`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, cast, get_args

import msgspec

from windlass.core.constants import DECODE_ERRORS
from windlass.core.model import Frozen
from windlass.core.recipe.sections import (
    AssumeSection,
    BatchSection,
    CheckpointSection,
    DataSection,
    GuardSection,
    HardwareSection,
    LoraSection,
    LossSection,
    MemorySection,
    ModelSection,
    OptimizerSection,
    OverlapSection,
    ParallelSection,
    PrecisionSection,
    RunSection,
    ScheduleSection,
    ValidationSection,
)
from windlass.errors import BadInput, UnknownName
from windlass.units import parse_bytes, parse_context, parse_count


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
    assume: AssumeSection = AssumeSection()


def load_recipe(path: str | Path, settings: Sequence[str] = ()) -> Recipe:
    """`settings`: overrides like "optimizer.lr=1e-4"."""
    import tomllib

    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"cannot read the recipe {path}: {error.strerror}") from None
    except DECODE_ERRORS as error:
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
    except DECODE_ERRORS:
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
    if recipe.assume.kept_products > 1:
        raise BadInput(f"{origin}: assume.kept_products is {recipe.assume.kept_products:g}; it is a share, at most 1")
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
        raise BadInput(
            f"{origin}: parallel.fsdp {fsdp} shards parameters, which is ZeRO stage 3, but parallel.zero is {zero}: remove parallel.zero"
        )


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
    "assume.kept_products parallel.zero data.seed run.seed schedule.warmup_steps schedule.final optimizer.weight_decay optimizer.momentum"
    " loss.mtp loss.z loss.router_z loss.balance loss.bias_rate guard.spike".split()
)


def _why_bad(name: str, value: int | float) -> str | None:
    least = 0 if name in MAY_BE_ZERO else 1
    if isinstance(value, float) and (not isfinite(value) or value < 0 or (least and not value)):
        return f"is {value:g}; it must be a finite number {'above 0' if least else 'of at least 0'}"
    if value > LARGEST:
        return "is more than 10^18"
    return f"is {value}; it must be at least {least}" if value < least and isinstance(value, int) else None
