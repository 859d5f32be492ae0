"""The trainer on DeepSpeed's ZeRO: the same model, losses, data and checkpoints as `train.loop.torch_trainer`.

The state is gathered to whole tensors under our names, so a checkpoint does not depend on the engine: it resumes at another world size,
with another ZeRO stage or on PyTorch's own engine, and exports the same.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from windlass.core.model import ModelSpec
from windlass.core.recipe.recipe import Recipe
from windlass.core.rule import Rule
from windlass.errors import MissingExtra
from windlass.runtime.weights.source import OpenedModel
from windlass.tasks.train.build import build_recipe_model, check_supported, parameter_layouts, settings_of
from windlass.tasks.train.data.batches import Batches
from windlass.tasks.train.deepspeed.config import check_deepspeed_recipe, deepspeed_config
from windlass.tasks.train.loop.trainer import TensorsByName, Trainer, TrainerParts
from windlass.tasks.train.model.balance import BalanceContext
from windlass.tasks.train.model.flops import flops_per_token
from windlass.tasks.train.model.init import InitialWeights, LoadedWeights
from windlass.tasks.train.model.model import MicroBatch, TrainingModel
from windlass.tasks.train.optim.master_weights import COMPUTE_TYPES
from windlass.tasks.train.optim.optimizer import decay_groups
from windlass.tasks.train.step import SingleRank, StepLosses, to_device

MOMENTS = ("exp_avg", "exp_avg_sq")


class DataParallelRank(SingleRank):
    """A rank of pure data parallelism: ranks differ only in their samples."""

    def __init__(self) -> None:
        self.rank = self.dp_rank = dist.get_rank()
        self.dp_size = dist.get_world_size()

    def sum_over_data(self, numbers: Tensor) -> Tensor:
        dist.all_reduce(numbers)
        return numbers

    def sum_over_data_and_stages(self, numbers: Tensor) -> Tensor:
        return self.sum_over_data(numbers)


def build_deepspeed(
    recipe: Recipe,
    spec: ModelSpec,
    rules: tuple[Rule, ...],
    batches: Batches,
    *,
    base: Path,
    held_out: Batches | None = None,
    opened: OpenedModel | None = None,
    device: torch.device | str = "cpu",
) -> DeepspeedTrainer:
    """`base`: the recipe's folder. Called by all ranks together; creates a process group of one if there is none."""
    check_deepspeed_recipe(recipe)
    check_supported(recipe, spec)
    deepspeed = _import_deepspeed()
    if not dist.is_initialized():
        _init_single_process()
    ranks = DataParallelRank()
    settings = settings_of(recipe, batches.sequence_length, ranks.dp_size)
    options: dict[str, Any] = {
        "seed": recipe.run.seed,
        "device": device,
        "dtype": COMPUTE_TYPES[recipe.precision.compute],
        "held_dtype": torch.float32,
    }
    weights = InitialWeights(spec, rules, **options) if opened is None else LoadedWeights(opened, **options)
    model = build_recipe_model(recipe, spec, weights, batches.sequence_length)
    parts = TrainerParts(
        model=model,
        layouts=parameter_layouts(model, weights),
        batches=batches,
        settings=settings,
        ranks=ranks,
        held_out=held_out,
        flops_per_token=flops_per_token(spec, rules, batches.sequence_length, next_token=recipe.model.mtp),
    )
    batch = {"global_batch": settings.global_batch, "micro_batch": settings.micro_batch, "dp_size": ranks.dp_size}
    engine = _engine(deepspeed, recipe, parts, deepspeed_config(recipe, base, **batch))
    return DeepspeedTrainer(parts, engine, deepspeed)


def _engine(deepspeed: Any, recipe: Recipe, parts: TrainerParts, config: dict[str, Any]) -> Any:
    section = recipe.optimizer
    groups = decay_groups(_trained(parts.model), parts.layouts, section.weight_decay)
    # lr 0: some DeepSpeed versions create the optimizer states with a step on zero gradients, which must not decay the weights.
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=section.betas, eps=section.eps, foreach=False)
    module = DeepspeedModule(parts.model)
    if config["zero_optimization"]["stage"] == 3:
        module.register_external_parameters(deepspeed)
    engine, _, _, _ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    _create_states(engine.optimizer)
    return engine


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _import_deepspeed() -> Any:
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
    except ImportError:
        raise MissingExtra("deepspeed", "deepspeed", 'run.engine = "deepspeed"') from None
    return deepspeed


def _init_single_process() -> None:
    """DeepSpeed needs a process group; a group of one needs no rendezvous."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    os.environ.setdefault("LOCAL_RANK", "0")
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _create_states(zero: Any) -> None:
    """Creates AdamW's states before its first step, so that a checkpoint can be loaded into them; and the views by which DeepSpeed finds
    them, which it would create after that step (stage_1_and_2.py)."""
    flat = getattr(zero, "single_partition_of_fp32_groups", None) or zero.fp32_partitioned_groups_flat
    for held in flat:
        if not zero.optimizer.state.get(held):
            moments = {kind: torch.zeros_like(held) for kind in MOMENTS}
            zero.optimizer.state[held] = {"step": torch.tensor(0.0), **moments}
    if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()


class DeepspeedModule(nn.Module):
    """Returns the model's losses as a tuple of tensors, as DeepSpeed's hooks need them."""

    def __init__(self, model: TrainingModel) -> None:
        super().__init__()
        self.model = model
        self.balance: BalanceContext | None = None

    def forward(self, micro: MicroBatch) -> tuple[Tensor, ...]:
        losses = self.model(micro)
        if losses.objective.requires_grad:
            losses.objective.register_hook(self._set_scale)
        found = (losses.objective, losses.entropy)
        return found if losses.mtp is None else (*found, losses.mtp)

    def _set_scale(self, gradient: Tensor) -> None:
        """The factor on the objective, ours and DeepSpeed's, applies to auxiliary losses too; this hook runs before their backward."""
        if self.balance is not None:
            self.balance.scale = gradient.detach()

    def register_external_parameters(self, deepspeed: Any) -> None:
        """ZeRO-3 gathers a module's parameters during its own forward. The decoder's forward is never called: its embeddings and head are
        used by the model around it, so they are registered here."""
        decoder = self.model.decoder
        for held in {id(one): one for one in (decoder.table, decoder.position_table, decoder.head) if one is not None}.values():
            deepspeed.zero.register_external_parameter(self, held)


class DeepspeedTrainer(Trainer):
    def __init__(self, parts: TrainerParts, engine: Any, deepspeed: Any) -> None:
        """`deepspeed`: the module."""
        super().__init__(parts, torch.device(engine.device))
        self._deepspeed = deepspeed
        self.engine, self.parameters = engine, _trained(parts.model)
        engine.module.balance = self.balance

    def _update(self, first: int, lr: float) -> tuple[StepLosses, float]:
        """DeepSpeed averages over micro-batches and ranks; our losses are already means over the step, so they are scaled up first."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        micros = to_device(self._prepare(first), self.ranks, self.device)
        scale = len(micros) * self.ranks.dp_size
        entropies, mtp = list[Tensor](), list[Tensor]()
        for micro in micros:
            objective, entropy, *more = self.engine(micro)
            self.engine.backward(objective * scale)
            self.engine.step()
            entropies.append(entropy.detach())
            mtp += [one.detach() for one in more]
        norm = self.engine.get_global_grad_norm()
        losses = StepLosses(torch.stack(entropies).sum(), torch.stack(mtp).sum() if mtp else None)
        return losses, float("nan") if norm is None else float(norm)

    def _evaluate(self, micros: Sequence[MicroBatch]) -> Tensor:
        self.engine.eval()
        with torch.no_grad():
            entropy = torch.stack([self.engine(micro)[1] for micro in micros]).sum()
        self.engine.train()
        return entropy

    # --- checkpoint state

    @property
    def _optimizer_steps(self) -> int:
        return self.progress.step

    def _tensors(self) -> tuple[TensorsByName, dict[str, TensorsByName]]:
        """Gathered whole."""
        utils = self._deepspeed.utils
        model: TensorsByName = {}
        optimizer: dict[str, TensorsByName] = {kind: {} for kind in MOMENTS}
        for name, parameter in self.parameters.items():
            self._put(model, name, utils.safe_get_full_fp32_param(parameter))
            for kind in MOMENTS:
                self._put(optimizer[kind], name, utils.safe_get_full_optimizer_state(parameter, kind))
        for name, buffer in self._saved_buffers():
            self._put(model, name, buffer)
        return model, optimizer

    def _put(self, into: TensorsByName, name: str, tensor: Tensor) -> None:
        layout = self.layouts[name]
        into.update((part.name, view) for part, view in layout.split(tensor.detach().reshape(layout.shape)))

    def _load_tensors(self, state: dict[str, Any]) -> None:
        utils = self._deepspeed.utils
        for name, parameter in self.parameters.items():
            whole = self._joined(state["model"], name)
            utils.safe_set_full_fp32_param(parameter, whole)
            self._refresh(parameter, whole)
            for kind in MOMENTS:
                utils.safe_set_full_optimizer_state(parameter, self._joined(state["optimizer"][kind], name), kind)
        for name, buffer in self._saved_buffers():
            buffer.copy_(self._joined(state["model"], name))
        self._set_steps(int(state["optimizer_steps"]))

    def _refresh(self, parameter: Any, whole: Tensor) -> None:
        """Updates the compute copy, which DeepSpeed would refresh from the fp32 weights only after its next step."""
        with (
            torch.no_grad(),
            self._deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=hasattr(parameter, "ds_id")),
        ):
            parameter.data.copy_(whole.reshape(parameter.shape))

    def _joined(self, tensors: Mapping[str, Tensor], name: str) -> Tensor:
        layout = self.layouts[name]
        return torch.cat([tensors[part.name] for part in layout.parts], layout.dim).to(self.device)

    def _set_steps(self, count: int) -> None:
        """AdamW's step count, in the optimizer that DeepSpeed wraps."""
        inner = getattr(self.engine.optimizer, "optimizer", self.engine.optimizer)
        for held in inner.state.values():
            if "step" in held:
                held["step"] = torch.full_like(held["step"], float(count)) if isinstance(held["step"], Tensor) else count
