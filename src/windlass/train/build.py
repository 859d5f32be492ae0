"""From a recipe and a model's description to a trainer that stands before its first step. Reads no TOML, opens no data."""

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
from windlass.kernels.torch_compile import compile_chains
from windlass.nn.parallel.shard import WHOLE, Shard
from windlass.train.loop.trainer import Settings, Trainer
from windlass.train.model.flops import flops_per_token
from windlass.train.model.init import FirstWeights, LoadedWeights
from windlass.train.model.lora import adapt
from windlass.train.model.model import Trained, build_model
from windlass.train.optim.master_weights import TYPES, Masters
from windlass.train.parallel.ranks import Ranks
from windlass.train.params.layout import Slab
from windlass.train.step import Alone
from windlass.weights.load.checkpoint import CheckpointWeights
from windlass.weights.source import OpenedModel


def build_trainer(
    recipe: Recipe,
    spec: ModelSpec,
    rules: tuple[Rule, ...],
    batches: Any,
    *,
    held_out: Any = None,
    opened: OpenedModel | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Trainer:
    """Of this process; where torch.distributed is up, of a rank among others, which all call this alike.

    `opened`: the checkpoint to go on from, where the recipe does. `dtype`: everything in it, instead of as the recipe says.
    """
    ranks = _ranks(recipe, spec, rules, torch.device(device))
    check_recipe(recipe, spec)
    compile_chains(recipe.run.compile)
    compute, held = compute_types(recipe, dtype)
    if recipe.lora.rank is not None:
        return _adapted(recipe, opened, batches, held_out, torch.device(device), compute, held, ranks)
    share = None if isinstance(ranks, Alone) else ranks.share_of_weights
    how = {"seed": recipe.run.seed, "device": device, "dtype": compute, "held_dtype": held, "share": share}
    weights = FirstWeights(spec, rules, **how) if opened is None else LoadedWeights(opened, **how)
    model = model_of(recipe, spec, weights, batches.sequence_length, WHOLE if isinstance(ranks, Alone) else ranks.shard)
    if not isinstance(ranks, Alone):
        ranks.dispatch_experts(model)
    slabs = slabs_of(model, weights)
    casts_itself = not isinstance(ranks, Alone) and ranks.arrange(model, slabs, compute)
    return Trainer(
        model,
        slabs,
        Masters(model, held if casts_itself else compute),
        batches,
        settings_of(recipe, batches.sequence_length, ranks.dp_size),
        ranks=ranks,
        held_out=held_out,
        flops_per_token=flops_per_token(spec, rules, batches.sequence_length, next_token=recipe.model.mtp),
    )


def _adapted(
    recipe: Recipe,
    opened: OpenedModel | None,
    batches: Any,
    held_out: Any,
    device: torch.device,
    compute: torch.dtype,
    held: torch.dtype,
    ranks: Alone | Ranks,
) -> Trainer:
    """Adapters beside the weights of `opened`, which stay as they are stored: packed ones stay packed."""
    if opened is None:
        raise BadInput(
            'lora.rank is set, but there is nothing to adapt: set model.start = "weights", and model.path or model.name'
        )
    if not isinstance(ranks, Alone) and (ranks.of.tp, ranks.of.pp, ranks.of.ep, ranks.of.fsdp) != (1, 1, 1, 1):
        raise Impossible(
            "adapters are trained with every rank holding the frozen weights: set parallel.fsdp = 1, without tp, pp and ep"
        )
    weights = CheckpointWeights(opened, device=device, dtype=compute)
    # Who is chosen stays as it is, too: corrections belong to the frozen weights.
    loss = msgspec.structs.replace(recipe.loss, bias_rate=0.0)
    model = build_model(opened.spec, weights, batches.sequence_length, loss=loss, recompute=recipe.memory.recompute or "none")
    slabs = adapt(model, recipe.lora, recipe.run.seed, held)
    if not isinstance(ranks, Alone):
        ranks.arrange(model, slabs, compute)
    settings = msgspec.structs.replace(settings_of(recipe, batches.sequence_length, ranks.dp_size), loss=loss)
    flops = flops_per_token(opened.spec, opened.rules, batches.sequence_length)
    return Trainer(model, slabs, Masters(model, held), batches, settings, ranks=ranks, held_out=held_out, flops_per_token=flops)


def _ranks(recipe: Recipe, spec: ModelSpec, rules: tuple[Rule, ...], device: torch.device) -> Alone | Ranks:
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        if recipe.model.mtp and (recipe.parallel.pp or 1) > 1:
            raise Impossible(
                "model.mtp with parallel.pp: the layer that guesses ahead needs the table of tokens, which the first stage has"
            )
        return Ranks(recipe.parallel, spec, rules, device)
    asked = {name: getattr(recipe.parallel, name) for name in ("tp", "pp", "ep", "cp", "fsdp")}
    wanted = ", ".join(f"{name} {degree}" for name, degree in asked.items() if (degree or 1) > 1)
    if wanted:
        raise Impossible(
            f"the recipe asks for {wanted}, and there is one process: start as many as it takes, with --nproc or torchrun"
        )
    return Alone()


def model_of(recipe: Recipe, spec: ModelSpec, weights: FirstWeights, length: int, shard: Shard = WHOLE) -> Trained:
    """As the recipe says, whichever engine trains it."""
    recompute = recipe.memory.recompute or "none"
    return build_model(spec, weights, length, mtp=recipe.model.mtp, loss=recipe.loss, recompute=recompute, shard=shard)


def check_recipe(recipe: Recipe, spec: ModelSpec) -> None:
    """What the recipe asks for and nothing here does is refused, not ignored."""
    if recipe.model.mtp and spec.next_token is None:
        raise Impossible(
            "model.mtp is set, but this model has no layer that guesses ahead; leave it out, or name a model that has one"
        )
    _refuse_planned_only(recipe)
    if recipe.precision.compute == "fp8":
        raise Impossible('precision.compute = "fp8" can be planned, but nothing here trains in it; choose bf16')
    if recipe.memory.offload != "none" and recipe.run.engine == "torch":
        raise Impossible(f'memory.offload = "{recipe.memory.offload}" needs run.engine = "deepspeed"')
    if spec.dropout if recipe.model.dropout is None else recipe.model.dropout:
        raise Impossible("dropout can be planned, but nothing here trains with it; set model.dropout = false")


def _refuse_planned_only(recipe: Recipe) -> None:
    """Keys that plans understand, because other trainers have them."""
    parallel, precision = recipe.parallel, recipe.precision
    asked = {
        'precision.compute = "fp16"': precision.compute == "fp16",  # its gradients vanish unless losses are scaled
        f'precision.gradients = "{precision.gradients}"': precision.gradients != "fp32",
        "memory.flash_attention = false": not recipe.memory.flash_attention,
        "parallel.sequence_parallel = true": parallel.sequence_parallel is True,
        f"parallel.expert_tp = {parallel.expert_tp}": (parallel.expert_tp or 1) > 1,
        f'parallel.dispatch = "{parallel.dispatch}"': parallel.dispatch != "all_to_all",
        "model.mtp with lora.rank": recipe.model.mtp and recipe.lora.rank is not None,
    }
    for key in (key for key, is_asked in asked.items() if is_asked):
        raise Impossible(f"{key} can be planned, but nothing here trains with it; leave it out")


def compute_types(recipe: Recipe, dtype: torch.dtype | None) -> tuple[torch.dtype, torch.dtype]:
    """(of activations, of what learns)"""
    if dtype is not None:
        return dtype, dtype
    return TYPES[recipe.precision.compute], torch.float32


def slabs_of(model: nn.Module, weights: FirstWeights) -> dict[str, Slab]:
    """By the names of the model's parameters and buffers; while they are where the weights put them."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: weights.slabs[tensor.data_ptr()] for name, tensor in tensors if tensor.data_ptr() in weights.slabs}


def settings_of(recipe: Recipe, length: int, dp_size: int) -> Settings:
    micro = recipe.batch.micro_batch or 1
    batch = recipe.batch.global_batch or _nearest(recipe.batch.tokens, length, micro * dp_size)
    return Settings(
        optimizer=recipe.optimizer,
        schedule=recipe.schedule,
        loss=recipe.loss,
        global_batch=batch,
        micro_batch=micro,
        num_steps=_num_steps(recipe, batch * length),
        validation_samples=recipe.validation.samples,
        seed=recipe.run.seed,
    )


def _nearest(tokens: int | None, length: int, whole: int) -> int:
    """Sequences of about so many tokens that can be shared out; one micro-batch each where nobody says."""
    return whole if tokens is None else max(round(tokens / (length * whole)), 1) * whole


def _num_steps(recipe: Recipe, tokens_per_step: int) -> int:
    if recipe.schedule.steps is not None:
        return recipe.schedule.steps
    if recipe.data.tokens is None:
        raise BadInput("the recipe does not say how long to train: give schedule.steps, or data.tokens")
    return -(-recipe.data.tokens // tokens_per_step)
