"""The DeepSpeed config of a recipe, merged with the user's JSON; unsupported settings are refused. No torch.

DeepSpeed is used for data parallelism only (ZeRO 1 to 3). A layer's experts are one tensor that ZeRO shards flat, so expert, tensor and
pipeline parallelism need `run.engine = "torch"`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import msgspec

from windlass.core.recipe.recipe import Recipe
from windlass.errors import BadInput, Impossible

SET_BY_RECIPE = {
    "train_batch_size": "batch.global_batch",
    "train_micro_batch_size_per_gpu": "batch.micro_batch",
    "gradient_accumulation_steps": "batch.global_batch and batch.micro_batch",
    "gradient_clipping": "optimizer.clip",
    "optimizer": "[optimizer]",
    "scheduler": "[schedule]",
    "bf16": "precision.compute",
    "fp16": "precision.compute",
    "activation_checkpointing": "memory.recompute",
    "steps_per_print": "the progress line",
}
"""Keys of DeepSpeed's JSON that the recipe sets, and where."""

NOT_WITH_EXPERTS = ("moe", "expert_parallel", "autoep", "tensor_parallel", "pipeline", "sequence_parallel_size", "autotp_size")


def check_deepspeed_recipe(recipe: Recipe) -> None:
    parallel = recipe.parallel
    for name in ("tp", "pp", "cp", "ep", "expert_tp"):
        degree = getattr(parallel, name)
        if degree is not None and degree > 1:
            raise Impossible(
                f'parallel.{name} = {degree} needs run.engine = "torch": with DeepSpeed only data parallelism is supported'
            )
    if recipe.optimizer.name != "adamw":
        raise Impossible(f'optimizer.name = "{recipe.optimizer.name}" needs run.engine = "torch"; with DeepSpeed use adamw')
    if recipe.precision.compute not in ("bf16", "fp32"):
        raise Impossible(f'precision.compute = "{recipe.precision.compute}" is not supported with DeepSpeed; use bf16 or fp32')
    if parallel.zero == 0:
        raise Impossible('parallel.zero = 0 does not need DeepSpeed: use 1, 2 or 3, or run.engine = "torch"')
    if recipe.memory.offload == "nvme":
        raise Impossible(
            'memory.offload = "nvme" can be planned but not trained: with DeepSpeed 0.19.8 its losses differ from "cpu" after the first '
            "step, for an unknown reason; use cpu"
        )
    if recipe.lora.rank is not None:
        raise Impossible('lora needs run.engine = "torch"')
    if recipe.run.compile:
        raise Impossible('run.compile needs run.engine = "torch"')


def deepspeed_config(recipe: Recipe, base: Path, *, global_batch: int, micro_batch: int, dp_size: int) -> dict[str, Any]:
    """`base`: the recipe's folder, which run.deepspeed is relative to."""
    stage = 3 if recipe.parallel.zero is None else recipe.parallel.zero
    zero: dict[str, Any] = {"stage": stage}
    device = recipe.memory.offload
    if device != "none":
        zero["offload_optimizer"] = {"device": device, "pin_memory": False}
        if stage == 3:
            zero["offload_param"] = {"device": device, "pin_memory": False}
    made: dict[str, Any] = {
        "train_batch_size": global_batch,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": global_batch // (micro_batch * dp_size),
        "gradient_clipping": recipe.optimizer.clip or 0.0,
        "zero_optimization": zero,
        "bf16": {"enabled": recipe.precision.compute == "bf16"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31 - 1,
    }
    return _merged(made, _read(base / recipe.run.deepspeed)) if recipe.run.deepspeed else made


def _read(path: Path) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise BadInput(f"run.deepspeed: cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput(f"run.deepspeed: {path} is not a JSON object: {error}") from None
    for key, place in SET_BY_RECIPE.items():
        if key in found and found[key] != "auto":
            raise BadInput(f'{path}: "{key}" is set by the recipe, in {place}; remove it here')
    if b'"nvme"' in path.read_bytes():
        raise Impossible(f'{path}: offload to "nvme" is not supported; use cpu')
    for key in NOT_WITH_EXPERTS:
        if key in found:
            raise Impossible(f'{path}: "{key}" is not supported: the experts of a layer are one tensor')
    return {key: value for key, value in found.items() if value != "auto"}


def _merged(made: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The user's values override ours, section by section."""
    both = dict(made)
    for key, value in given.items():
        held = both.get(key)
        nested = isinstance(held, dict) and isinstance(value, dict)
        both[key] = _merged(cast(dict[str, Any], held), cast(dict[str, Any], value)) if nested else value
    return both
