"""Builds a trainer from a recipe and a model's spec. Reads no TOML, opens no data."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from windlass.core.model import ModelSpec
from windlass.core.recipe.recipe import Recipe
from windlass.core.rule import Rule
from windlass.errors import BadInput, Impossible
from windlass.runtime.kernels.torch_compile import compile_chains
from windlass.runtime.nn.parallel.shard import WHOLE, ModelShard
from windlass.runtime.weights.load.checkpoint import CheckpointWeights
from windlass.runtime.weights.source import OpenedModel
from windlass.tasks.train.data.batches import Batches
from windlass.tasks.train.loop.torch_trainer import TorchTrainer
from windlass.tasks.train.loop.trainer import TrainerParts, TrainerSettings
from windlass.tasks.train.model.flops import flops_per_token
from windlass.tasks.train.model.init import InitialWeights, LoadedWeights
from windlass.tasks.train.model.lora import add_adapters
from windlass.tasks.train.model.model import TrainingModel, build_model
from windlass.tasks.train.optim.master_weights import COMPUTE_TYPES, MasterWeights
from windlass.tasks.train.parallel.ranks import MeshRank
from windlass.tasks.train.params.layout import ParameterLayout
from windlass.tasks.train.step import SingleRank


def build_trainer(
    recipe: Recipe,
    spec: ModelSpec,
    rules: tuple[Rule, ...],
    batches: Batches,
    *,
    held_out: Batches | None = None,
    opened: OpenedModel | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> TorchTrainer:
    """The trainer of this process. With torch.distributed initialized, all ranks call it together.

    `opened`: the checkpoint to start from, if the recipe says so. `dtype`: type of weights and activations, instead of the recipe's.
    """
    ranks = _ranks(recipe, spec, rules, torch.device(device))
    check_supported(recipe, spec)
    compile_chains(recipe.run.compile)
    compute, held = compute_types(recipe, dtype)
    if recipe.lora.rank is not None:
        return _lora_trainer(recipe, opened, batches, held_out, torch.device(device), (compute, held), ranks)
    mesh = ranks if isinstance(ranks, MeshRank) else None
    options: dict[str, Any] = {"seed": recipe.run.seed, "device": device, "dtype": compute, "held_dtype": held}
    options["share"] = mesh.weight_share if mesh is not None else None
    weights = InitialWeights(spec, rules, **options) if opened is None else LoadedWeights(opened, **options)
    model = build_recipe_model(recipe, spec, weights, batches.sequence_length, mesh.shard if mesh is not None else WHOLE)
    if mesh is not None:
        mesh.dispatch_experts(model)
    layouts = parameter_layouts(model, weights)
    fsdp_casts = mesh is not None and mesh.shard_model(model, layouts, compute)
    parts = TrainerParts(
        model=model,
        layouts=layouts,
        batches=batches,
        settings=settings_of(recipe, batches.sequence_length, ranks.dp_size),
        ranks=ranks,
        held_out=held_out,
        flops_per_token=flops_per_token(spec, rules, batches.sequence_length, next_token=recipe.model.mtp),
    )
    return TorchTrainer(parts, MasterWeights(model, held if fsdp_casts else compute))


def _lora_trainer(
    recipe: Recipe,
    opened: OpenedModel | None,
    batches: Batches,
    held_out: Batches | None,
    device: torch.device,
    types: tuple[torch.dtype, torch.dtype],
    ranks: SingleRank,
) -> TorchTrainer:
    """Trains adapters on the frozen weights of `opened`, which stay as stored (quantized ones stay quantized)."""
    if opened is None:
        raise BadInput('lora.rank needs weights to start from: set model.start = "weights", and model.path or model.name')
    if isinstance(ranks, MeshRank) and (ranks.of.tp, ranks.of.pp, ranks.of.ep, ranks.of.fsdp) != (1, 1, 1, 1):
        raise Impossible(
            "LoRA supports data parallelism with replicated weights only: set parallel.fsdp = 1, without tp, pp and ep"
        )
    compute, held = types
    weights = CheckpointWeights(opened, device=device, dtype=compute)
    # Routing is frozen too: the correction biases belong to the frozen weights.
    loss = msgspec.structs.replace(recipe.loss, bias_rate=0.0)
    model = build_model(opened.spec, weights, batches.sequence_length, loss=loss, recompute=recipe.memory.recompute or "none")
    layouts = add_adapters(model, recipe.lora, recipe.run.seed, held)
    if isinstance(ranks, MeshRank):
        ranks.shard_model(model, layouts, compute)
    parts = TrainerParts(
        model=model,
        layouts=layouts,
        batches=batches,
        settings=msgspec.structs.replace(settings_of(recipe, batches.sequence_length, ranks.dp_size), loss=loss),
        ranks=ranks,
        held_out=held_out,
        flops_per_token=flops_per_token(opened.spec, opened.rules, batches.sequence_length),
    )
    return TorchTrainer(parts, MasterWeights(model, held))


def _ranks(recipe: Recipe, spec: ModelSpec, rules: tuple[Rule, ...], device: torch.device) -> SingleRank:
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        if recipe.model.mtp and (recipe.parallel.pp or 1) > 1:
            raise Impossible("model.mtp with parallel.pp is not supported: the MTP layer needs the embeddings of the first stage")
        return MeshRank(recipe.parallel, spec, rules, device)
    degrees = {name: getattr(recipe.parallel, name) or 1 for name in ("tp", "pp", "ep", "cp", "fsdp")}
    needed = ", ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
    if needed:
        raise Impossible(f"the recipe sets {needed}, but there is only one process: start more with --nproc or torchrun")
    return SingleRank()


def build_recipe_model(
    recipe: Recipe, spec: ModelSpec, weights: InitialWeights, length: int, shard: ModelShard = WHOLE
) -> TrainingModel:
    recompute = recipe.memory.recompute or "none"
    return build_model(spec, weights, length, mtp=recipe.model.mtp, loss=recipe.loss, recompute=recompute, shard=shard)


def check_supported(recipe: Recipe, spec: ModelSpec) -> None:
    """Refuses what the trainers do not support instead of ignoring it."""
    if recipe.model.mtp and spec.next_token is None:
        raise Impossible("model.mtp is set, but this model has no MTP layer; remove it, or choose a model that has one")
    _refuse_planned_only(recipe)
    if recipe.precision.compute == "fp8":
        raise Impossible('precision.compute = "fp8" can be planned but not trained; use bf16')
    if recipe.memory.offload != "none" and recipe.run.engine == "torch":
        raise Impossible(f'memory.offload = "{recipe.memory.offload}" needs run.engine = "deepspeed"')
    if spec.dropout if recipe.model.dropout is None else recipe.model.dropout:
        raise Impossible("dropout can be planned but not trained; set model.dropout = false")


def _refuse_planned_only(recipe: Recipe) -> None:
    """Keys that the planner knows because other trainers support them."""
    parallel, precision = recipe.parallel, recipe.precision
    unsupported = {
        'precision.compute = "fp16"': precision.compute == "fp16",  # would need loss scaling
        f'precision.gradients = "{precision.gradients}"': precision.gradients != "fp32",
        "memory.flash_attention = false": not recipe.memory.flash_attention,
        "parallel.sequence_parallel = true": parallel.sequence_parallel is True,
        f"parallel.expert_tp = {parallel.expert_tp}": (parallel.expert_tp or 1) > 1,
        f'parallel.dispatch = "{parallel.dispatch}"': parallel.dispatch != "all_to_all",
        "model.mtp with lora.rank": recipe.model.mtp and recipe.lora.rank is not None,
    }
    for key in (key for key, is_set in unsupported.items() if is_set):
        raise Impossible(f"{key} can be planned but not trained; remove it")


def compute_types(recipe: Recipe, dtype: torch.dtype | None) -> tuple[torch.dtype, torch.dtype]:
    """Types of (activations, trained weights)."""
    if dtype is not None:
        return dtype, dtype
    return COMPUTE_TYPES[recipe.precision.compute], torch.float32


def parameter_layouts(model: nn.Module, weights: InitialWeights) -> dict[str, ParameterLayout]:
    """By the names of the model's parameters and buffers. Call before anything moves them: layouts are found by address."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: weights.layouts[tensor.data_ptr()] for name, tensor in tensors if tensor.data_ptr() in weights.layouts}


def settings_of(recipe: Recipe, length: int, dp_size: int) -> TrainerSettings:
    micro = recipe.batch.micro_batch or 1
    batch = recipe.batch.global_batch or _nearest(recipe.batch.tokens, length, micro * dp_size)
    return TrainerSettings(
        optimizer=recipe.optimizer,
        schedule=recipe.schedule,
        loss=recipe.loss,
        global_batch=batch,
        micro_batch=micro,
        num_steps=_num_steps(recipe, batch * length),
        validation_samples=recipe.validation.samples,
        seed=recipe.run.seed,
    )


def _nearest(tokens: int | None, length: int, unit: int) -> int:
    """The nearest multiple of `unit` sequences; one micro-batch per rank by default."""
    return unit if tokens is None else max(round(tokens / (length * unit)), 1) * unit


def _num_steps(recipe: Recipe, tokens_per_step: int) -> int:
    if recipe.schedule.steps is not None:
        return recipe.schedule.steps
    if recipe.data.tokens is None:
        raise BadInput("the recipe does not say how long to train: set schedule.steps or data.tokens")
    return -(-recipe.data.tokens // tokens_per_step)
