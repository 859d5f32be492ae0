"""DeepSpeed's own configuration out of a recipe, with a user's JSON on top; what it cannot do here is refused, not ignored. No torch.

Only data parallelism is DeepSpeed's here (ZeRO 1 to 3). A layer's experts are one tensor, which ZeRO cuts flat over the ranks: it has
no notion of experts, so expert, tensor and pipeline parallelism stay with `run.engine = "torch"`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import msgspec

from windlass.core.recipe.recipe import Recipe
from windlass.errors import BadInput, Impossible

RECIPE_SAYS = {
    "train_batch_size": "batch.global_batch",
    "train_micro_batch_size_per_gpu": "batch.micro_batch",
    "gradient_accumulation_steps": "batch.global_batch and batch.micro_batch",
    "gradient_clipping": "optimizer.clip",
    "optimizer": "[optimizer]",
    "scheduler": "[schedule]",
    "bf16": "precision.compute",
    "fp16": "precision.compute",
    "activation_checkpointing": "memory.recompute",
    "steps_per_print": "the live line",
}
"""Keys of DeepSpeed's JSON that would contradict a recipe, and where it has them."""

NOT_WITH_EXPERTS = ("moe", "expert_parallel", "autoep", "tensor_parallel", "pipeline", "sequence_parallel_size", "autotp_size")


def check_deepspeed_recipe(recipe: Recipe) -> None:
    parallel = recipe.parallel
    for name in ("tp", "pp", "cp", "ep", "expert_tp"):
        degree = getattr(parallel, name)
        if degree is not None and degree > 1:
            raise Impossible(
                f'parallel.{name} = {degree} needs run.engine = "torch": DeepSpeed here spreads states over data-parallel ranks only, '
                "and cuts experts without knowing them"
            )
    if recipe.optimizer.name != "adamw":
        raise Impossible(f'optimizer.name = "{recipe.optimizer.name}" needs run.engine = "torch"; DeepSpeed here moves by adamw')
    if recipe.precision.compute not in ("bf16", "fp32"):
        raise Impossible(
            f'precision.compute = "{recipe.precision.compute}" is not trained by DeepSpeed here; choose bf16 or fp32'
        )
    if parallel.zero == 0:
        raise Impossible('parallel.zero = 0 spreads nothing, which needs no DeepSpeed: choose 1, 2 or 3, or run.engine = "torch"')
    if recipe.memory.offload == "nvme":
        raise Impossible(
            'memory.offload = "nvme" is planned and not trained: with DeepSpeed 0.19.8 its losses were not those of "cpu" from the second '
            "step on, and nobody knows why; choose cpu"
        )
    if recipe.lora.rank is not None:
        raise Impossible('lora needs run.engine = "torch"')
    if recipe.run.compile:
        raise Impossible('run.compile needs run.engine = "torch"')


def deepspeed_config(recipe: Recipe, base: Path, *, global_batch: int, micro_batch: int, dp_size: int) -> dict[str, Any]:
    """`base`: the recipe's folder, from which its JSON is seen."""
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
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"run.deepspeed: {path} is not JSON with keys: {error}") from None
    for key, place in RECIPE_SAYS.items():
        if key in found and found[key] != "auto":
            raise BadInput(f'{path}: "{key}" is said by the recipe, in {place}; leave it out here')
    if b'"nvme"' in path.read_bytes():
        raise Impossible(f'{path}: offload to "nvme" is not trained here; choose cpu')
    for key in NOT_WITH_EXPERTS:
        if key in found:
            raise Impossible(f'{path}: "{key}" is not done here: DeepSpeed gets the experts of a layer as one tensor')
    return {key: value for key, value in found.items() if value != "auto"}


def _merged(made: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The user's word counts, section by section."""
    both = dict(made)
    for key, value in given.items():
        held = both.get(key)
        nested = isinstance(held, dict) and isinstance(value, dict)
        both[key] = _merged(cast(dict[str, Any], held), cast(dict[str, Any], value)) if nested else value
    return both
