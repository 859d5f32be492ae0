"""A training run on DeepSpeed's ZeRO: the same model, losses, data and checkpoints as `train.state`, its optimizer states spread by DeepSpeed.

State is given and taken as whole tensors under our names, so a checkpoint is the same whichever engine made it: it resumes at another
world size, on another ZeRO stage or on PyTorch's own engine, and exports alike.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from windlass.core.model import ModelSpec
from windlass.core.recipe.recipe import Recipe
from windlass.core.rule import Rule
from windlass.errors import BadCheckpoint, BadInput, MissingExtra
from windlass.train import build
from windlass.train.build import settings_of, slabs_of
from windlass.train.deepspeed.config import check_recipe, deepspeed_config
from windlass.train.loop.trainer import Progress, Settings, StepReport, random_state, restore_random_state
from windlass.train.model.balance import Frame, correct, watch_all
from windlass.train.model.flops import flops_per_token
from windlass.train.model.init import FirstWeights, LoadedWeights
from windlass.train.model.model import Trained
from windlass.train.optim.master_weights import TYPES
from windlass.train.optim.optimizer import decay_groups
from windlass.train.optim.schedule import rate
from windlass.train.params.layout import Slab
from windlass.train.step import on_device, own_samples, prepare
from windlass.weights.source import OpenedModel

MOMENTS = ("exp_avg", "exp_avg_sq")


class DataRanks:
    """Ranks that differ in their samples alone."""

    def __init__(self) -> None:
        self.rank = self.dp_rank = dist.get_rank()
        self.dp_size = dist.get_world_size()

    def summed(self, numbers: Tensor) -> Tensor:
        dist.all_reduce(numbers)
        return numbers


def build_deepspeed(
    recipe: Recipe,
    spec: ModelSpec,
    rules: tuple[Rule, ...],
    batches: Any,
    *,
    base: Path,
    held_out: Any = None,
    opened: OpenedModel | None = None,
    device: torch.device | str = "cpu",
) -> DeepspeedTrainer:
    """`base`: the recipe's folder. Called by all ranks together; makes the group of one where there is no other."""
    check_recipe(recipe)
    build.check_recipe(recipe, spec)
    deepspeed = _deepspeed()
    if not dist.is_initialized():
        _join_alone()
    ranks = DataRanks()
    compute = TYPES[recipe.precision.compute]
    settings = settings_of(recipe, batches.sequence_length, ranks.dp_size)
    how = {"seed": recipe.run.seed, "device": device, "dtype": compute, "held_dtype": torch.float32}
    weights = FirstWeights(spec, rules, **how) if opened is None else LoadedWeights(opened, **how)
    model = build.model_of(recipe, spec, weights, batches.sequence_length)
    slabs = slabs_of(model, weights)
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    groups = decay_groups(parameters, slabs, recipe.optimizer.weight_decay)
    section = recipe.optimizer
    # Versions that take a step on gradients of nought to make the states must not let weights decay by it.
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=section.betas, eps=section.eps, foreach=False)
    batch = {"global_batch": settings.global_batch, "micro_batch": settings.micro_batch, "dp_size": ranks.dp_size}
    config = deepspeed_config(recipe, base, **batch)
    told = Told(model)
    if config["zero_optimization"]["stage"] == 3:
        told.name_external(deepspeed)
    engine, _, _, _ = deepspeed.initialize(model=told, optimizer=optimizer, config=config)
    _make_states(engine.optimizer)
    flops = flops_per_token(spec, rules, batches.sequence_length, next_token=recipe.model.mtp)
    return DeepspeedTrainer(engine, model, parameters, slabs, batches, settings, ranks, held_out, flops)


def _deepspeed() -> Any:
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
    except ImportError:
        raise MissingExtra("deepspeed", "deepspeed", 'run.engine = "deepspeed"') from None
    return deepspeed


def _join_alone() -> None:
    """DeepSpeed wants a group, and a group of one needs nobody to meet."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    os.environ.setdefault("LOCAL_RANK", "0")
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _make_states(zero: Any) -> None:
    """AdamW's, before its first step, so that a checkpoint has somewhere to go; and the views by which DeepSpeed finds them, which it would
    make after that step (stage_1_and_2.py)."""
    flat = getattr(zero, "single_partition_of_fp32_groups", None) or zero.fp32_partitioned_groups_flat
    for held in flat:
        if not zero.optimizer.state.get(held):
            moments = {kind: torch.zeros_like(held) for kind in MOMENTS}
            zero.optimizer.state[held] = {"step": torch.tensor(0.0), **moments}
    if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()


class Told(nn.Module):
    """The model with its losses as a tuple, in which DeepSpeed finds tensors to hang its hooks on."""

    def __init__(self, model: Trained) -> None:
        super().__init__()
        self.model = model
        self.frame: Frame | None = None

    def forward(self, micro: Any) -> tuple[Tensor, ...]:
        losses = self.model(micro)
        if losses.objective.requires_grad:
            losses.objective.register_hook(self._hear)
        said = (losses.objective, losses.entropy)
        return said if losses.ahead is None else (*said, losses.ahead)

    def _hear(self, gradient: Tensor) -> None:
        """By what the objective was multiplied, here and by DeepSpeed; it is differentiated before what hangs on layers."""
        if self.frame is not None:
            self.frame.scale = gradient.detach()

    def name_external(self, deepspeed: Any) -> None:
        """Under ZeRO-3 a module's tensors are whole while its own forward runs. The decoder's is never called; the tables that it holds are
        used by the model around it, and that must be said."""
        decoder = self.model.decoder
        for held in {id(one): one for one in (decoder.table, decoder.position_table, decoder.head) if one is not None}.values():
            deepspeed.zero.register_external_parameter(self, held)


class DeepspeedTrainer:
    """`train.state.Trainer`, as the loop knows it."""

    def __init__(
        self,
        engine: Any,
        model: Trained,
        parameters: Mapping[str, Tensor],
        slabs: Mapping[str, Slab],
        batches: Any,
        settings: Settings,
        ranks: DataRanks,
        held_out: Any,
        flops: float,
    ) -> None:
        self.engine, self.model, self.parameters, self.slabs = engine, model, parameters, slabs
        self.batches, self.settings, self.ranks, self.held_out = batches, settings, ranks, held_out
        self.flops_per_token = flops
        self.frame, self.watches = watch_all(model, settings.loss)
        engine.module.frame = self.frame
        self.progress = Progress(seed=settings.seed)
        self.device = torch.device(engine.device)
        whole = ranks.dp_size * settings.micro_batch
        if settings.global_batch % whole:
            raise BadInput(
                f"batch.global_batch {settings.global_batch} cannot be shared out: {ranks.dp_size} data-parallel ranks take "
                f"micro-batches of {settings.micro_batch}, so it must be a multiple of {whole}"
            )

    @property
    def done(self) -> bool:
        return self.progress.step >= self.settings.num_steps

    def step(self) -> StepReport:
        began, settings, first = perf_counter(), self.settings, self.progress.samples
        lr = settings.optimizer.lr * rate(settings.schedule, self.progress.step, settings.num_steps)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        self._start()
        entropy, ahead = self._learn(first)
        norm = self.engine.get_global_grad_norm()
        norm = float("nan") if norm is None else float(norm)
        applied = norm == norm and abs(norm) != float("inf")
        loads = list(self.ranks.summed(torch.stack([watch.load for watch in self.watches]))) if self.watches else []
        if applied:
            correct(self.watches, loads, settings.loss.bias_rate)
        tokens = settings.global_batch * self.batches.sequence_length
        self.progress.step += 1
        self.progress.samples = first + settings.global_batch
        self.progress.tokens += tokens
        return StepReport(
            step=self.progress.step,
            loss=float(self.ranks.summed(entropy)),
            grad_norm=norm,
            lr=lr,
            tokens=tokens,
            seconds=perf_counter() - began,
            expert_load=[load.tolist() for load in loads],
            parts={} if ahead is None else {"mtp": float(self.ranks.summed(ahead))},
            first_sample=first,
            applied=applied,
        )

    def _learn(self, first: int) -> tuple[Tensor, Tensor | None]:
        """DeepSpeed takes means over micro-batches and ranks, where our losses are means over the whole step already and add up."""
        start, count = own_samples(first, self.settings.global_batch, self.ranks.dp_rank, self.ranks.dp_size)
        micros = self._micros(self.batches, start, count)
        scale = len(micros) * self.ranks.dp_size
        entropies, aheads = list[Tensor](), list[Tensor]()
        for micro in micros:
            objective, entropy, *ahead = self.engine(micro)
            self.engine.backward(objective * scale)
            self.engine.step()
            entropies.append(entropy.detach())
            aheads += [one.detach() for one in ahead]
        return torch.stack(entropies).sum(), torch.stack(aheads).sum() if aheads else None

    def _micros(self, batches: Any, first: int, count: int) -> list[Any]:
        prepared = prepare(batches, first, count, self.settings.micro_batch, self.model.next_token is not None)
        return on_device(prepared, self.ranks, self.device)

    def _start(self) -> None:
        self.frame.length, self.frame.num_samples = self.batches.sequence_length, self.settings.global_batch
        for watch in self.watches:
            watch.start_step()

    def validate(self) -> float:
        if self.held_out is None:
            raise BadInput("there is no held-out data to look at: prepare it with `windlass train data --validation`")
        micro_batch, size = self.settings.micro_batch, self.ranks.dp_size
        count = -(-self.settings.validation_samples // (size * micro_batch)) * micro_batch
        self._start()
        micros = self._micros(self.held_out, self.ranks.dp_rank * count, count)
        self.engine.eval()
        with torch.no_grad():
            said = torch.stack([self.engine(micro)[1] for micro in micros]).sum()
        self.engine.train()
        return float(self.ranks.summed(said))

    def skip(self) -> None:
        first = self.progress.samples
        self.progress.samples = first + self.settings.global_batch
        self.progress.skipped.append((first, self.progress.samples))

    # --- as a dictionary

    def state(self) -> dict[str, Any]:
        """Whole tensors, gathered; all ranks call it together."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        model: dict[str, Any] = {}
        optimizer: dict[str, dict[str, Any]] = {kind: {} for kind in MOMENTS}
        for name, parameter in self.parameters.items():
            self._put(model, name, safe_get_full_fp32_param(parameter))
            for kind in MOMENTS:
                self._put(optimizer[kind], name, safe_get_full_optimizer_state(parameter, kind))
        for name, buffer in self.model.named_buffers():
            if name in self.slabs:
                self._put(model, name, buffer)
        return {
            "model": model,
            "optimizer": optimizer,
            "optimizer_steps": self.progress.step,
            "progress": msgspec.json.encode(self.progress).decode(),
            "rng": {str(self.ranks.rank): random_state(self.device)},
        }

    def _put(self, into: dict[str, Any], name: str, tensor: Tensor) -> None:
        for part, view in self.slabs[name].split(tensor.detach().reshape(self.slabs[name].shape)):
            into[part.name] = view

    def load(self, state: dict[str, Any]) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        try:
            self.progress = msgspec.json.decode(state["progress"], type=Progress)
        except (KeyError, TypeError, msgspec.DecodeError) as error:
            raise BadCheckpoint(f"its progress cannot be read: {error}") from None
        for name, parameter in self.parameters.items():
            whole = self._joined(state["model"], name)
            safe_set_full_fp32_param(parameter, whole)
            self._refresh(parameter, whole)
            for kind in MOMENTS:
                safe_set_full_optimizer_state(parameter, self._joined(state["optimizer"][kind], name), kind)
        for name, buffer in self.model.named_buffers():
            if name in self.slabs:
                buffer.copy_(self._joined(state["model"], name))
        self._set_steps(int(state["optimizer_steps"]))
        restore_random_state(state["rng"].get(str(self.ranks.rank)), self.device)

    def _refresh(self, parameter: Any, whole: Tensor) -> None:
        """What the model computes with, which DeepSpeed would make from the fp32 weights only after its next step."""
        import deepspeed

        with (
            torch.no_grad(),
            deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=hasattr(parameter, "ds_id")),
        ):
            parameter.data.copy_(whole.reshape(parameter.shape))

    def _joined(self, tensors: Mapping[str, Tensor], name: str) -> Tensor:
        slab = self.slabs[name]
        return torch.cat([tensors[part.name] for part in slab.parts], slab.dim).to(self.device)

    def _set_steps(self, count: int) -> None:
        """AdamW's own count, in the optimizer that DeepSpeed has wrapped."""
        inner = getattr(self.engine.optimizer, "optimizer", self.engine.optimizer)
        for held in inner.state.values():
            if "step" in held:
                held["step"] = torch.full_like(held["step"], float(count)) if isinstance(held["step"], Tensor) else count
