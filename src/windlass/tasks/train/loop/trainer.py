"""What trainers have in common: progress, one optimizer step, validation, and the state that a checkpoint holds.

The state has tensors under our names: whole ones where one rank has all of them, else shards with their offsets. So it does not depend
on how the run was split, nor on the engine. Knows no files and no terminal.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from time import perf_counter
from typing import Any

import msgspec
import torch
from torch import Tensor

from windlass.core.recipe.sections import LossSection, OptimizerSection, ScheduleSection
from windlass.errors import BadCheckpoint, BadInput
from windlass.tasks.train.data.batches import Batches
from windlass.tasks.train.model.balance import attach_balancers, update_biases
from windlass.tasks.train.model.model import MicroBatch, TrainingModel
from windlass.tasks.train.optim.schedule import lr_factor
from windlass.tasks.train.params.layout import ParameterLayout
from windlass.tasks.train.progress import StepReport, TrainingProgress
from windlass.tasks.train.step import PreparedStep, SingleRank, StepLosses, prepare, rank_samples, to_device

TensorsByName = dict[str, Any]


class TrainerSettings(msgspec.Struct, frozen=True):
    """What a trainer needs of a recipe, with all defaults resolved."""

    optimizer: OptimizerSection
    schedule: ScheduleSection
    loss: LossSection
    global_batch: int
    micro_batch: int
    num_steps: int
    validation_samples: int = 64
    seed: int = 0


class TrainerParts(msgspec.Struct, frozen=True):
    """What every trainer is built from."""

    model: TrainingModel
    layouts: Mapping[str, ParameterLayout]
    """Of every trained parameter and router bias, by its name in the model."""
    batches: Batches
    settings: TrainerSettings
    ranks: SingleRank
    held_out: Batches | None = None
    flops_per_token: float = 0.0
    """As the planner counts them."""


class Trainer(ABC):
    """The engine-independent half of a trainer. `TorchTrainer` and `DeepspeedTrainer` update the weights."""

    def __init__(self, parts: TrainerParts, device: torch.device) -> None:
        self.model, self.layouts, self.settings, self.ranks = parts.model, parts.layouts, parts.settings, parts.ranks
        self.batches, self.held_out, self.flops_per_token = parts.batches, parts.held_out, parts.flops_per_token
        self.device = device
        self.balance, self.balancers = attach_balancers(self.model, self.settings.loss)
        self.progress = TrainingProgress(seed=self.settings.seed)
        _check_batch(self.settings, self.ranks.dp_size)

    # --- of an engine

    @abstractmethod
    def _update(self, first: int, lr: float) -> tuple[StepLosses, float]:
        """Trains on the step whose first sample is `first`. Returns the losses and the gradient norm; not finite: not applied."""

    @abstractmethod
    def _evaluate(self, micros: Sequence[MicroBatch]) -> Tensor:
        """Sum of this rank's cross-entropy, without training."""

    @abstractmethod
    def _tensors(self) -> tuple[TensorsByName, dict[str, TensorsByName]]:
        """Model tensors and optimizer states by kind, under our names."""

    @abstractmethod
    def _load_tensors(self, state: dict[str, Any]) -> None: ...

    @property
    @abstractmethod
    def _optimizer_steps(self) -> int: ...

    # --- training

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self.settings.optimizer.lr * lr_factor(self.settings.schedule, self.progress.step, self.settings.num_steps)

    @property
    def done(self) -> bool:
        return self.progress.step >= self.settings.num_steps

    def step(self) -> StepReport:
        began, first, lr = perf_counter(), self.progress.samples, self.lr
        self._start_step()
        losses, norm = self._update(first, lr)
        applied = isfinite(norm)
        loads = self._expert_loads()
        if applied:
            update_biases(self.balancers, loads, self.settings.loss.bias_rate)
        entropy, parts = self._reduced_losses(losses)
        tokens = self._advance()
        every_load = [load.tolist() for load in self.ranks.gather_loads(loads)]
        seconds = perf_counter() - began
        return StepReport(
            step=self.progress.step,
            loss=entropy,
            grad_norm=norm,
            lr=lr,
            tokens=tokens,
            seconds=seconds,
            expert_load=every_load,
            parts=parts,
            first_sample=first,
            applied=applied,
            ranks=self.ranks.end_step(seconds),
        )

    def validate(self) -> float:
        """Mean cross-entropy of held-out samples, always the same ones."""
        if self.held_out is None:
            raise BadInput("there is no held-out data: prepare the data with `windlass train data --validation 0.01`")
        micro_batch, ranks = self.settings.micro_batch, self.ranks
        count = -(-self.settings.validation_samples // (ranks.dp_size * micro_batch)) * micro_batch
        self._start_step()
        prepared = prepare(self.held_out, ranks.dp_rank * count, count, micro_batch, self._has_mtp)
        entropy = self._evaluate(to_device(prepared, ranks, self.device))
        return float(ranks.sum_over_data_and_stages(entropy))

    def skip(self) -> None:
        """Skips the next step's samples."""
        first = self.progress.samples
        self.progress.samples = first + self.settings.global_batch
        self.progress.skipped.append((first, self.progress.samples))

    def _start_step(self) -> None:
        self.balance.length, self.balance.num_samples = self.batches.sequence_length, self.settings.global_batch
        self.balance.owns_losses = self.ranks.owns_losses
        for balancer in self.balancers:
            balancer.start_step()

    def _prepare(self, first: int) -> PreparedStep:
        """This rank's samples of the step that begins at `first`."""
        start, count = rank_samples(first, self.settings.global_batch, self.ranks.dp_rank, self.ranks.dp_size)
        return prepare(self.batches, start, count, self.settings.micro_batch, self._has_mtp)

    @property
    def _has_mtp(self) -> bool:
        return self.model.mtp is not None

    def _advance(self) -> int:
        tokens = self.settings.global_batch * self.batches.sequence_length
        self.progress.step += 1
        self.progress.samples += self.settings.global_batch
        self.progress.tokens += tokens
        return tokens

    def _expert_loads(self) -> list[Tensor]:
        if not self.balancers:
            return []
        return list(self.ranks.sum_over_data(torch.stack([balancer.load for balancer in self.balancers])))

    def _reduced_losses(self, losses: StepLosses) -> tuple[float, dict[str, float]]:
        """Cross-entropy and auxiliary losses over all ranks, in one reduction and one device synchronization."""
        zero = torch.zeros_like(losses.entropy)
        balance, z = (sum((getattr(one, name).to(zero.dtype) for one in self.balancers), zero) for name in ("balance", "z"))
        counted = zero + len(self.balancers) / self.ranks.dp_size
        mtp = zero if losses.mtp is None else losses.mtp
        summed = self.ranks.sum_over_data_and_stages(torch.stack([losses.entropy, mtp, balance, z, counted]))
        entropy, mtp_loss, balance_loss, z_loss, layers = summed.tolist()
        parts = {"mtp": mtp_loss} if self._has_mtp else {}
        if layers and (self.settings.loss.balance or self.settings.loss.router_z):
            parts |= {"balance": balance_loss / layers, "router_z": z_loss / layers}
        return entropy, parts

    # --- checkpoint state

    def state(self) -> dict[str, Any]:
        """For a checkpoint to save, or to load into in place; `load` then takes what is not a tensor. All ranks call it together."""
        model, optimizer = self._tensors()
        return {
            "model": model,
            "optimizer": optimizer,
            "optimizer_steps": self._optimizer_steps,
            "progress": msgspec.json.encode(self.progress).decode(),
            "rng": {str(self.ranks.rank): random_state(self.device)},
        }

    def _saved_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Router biases."""
        return ((name, buffer) for name, buffer in self.model.named_buffers() if name in self.layouts)

    def load(self, state: dict[str, Any]) -> None:
        """After a checkpoint was loaded into `state()`."""
        try:
            self.progress = msgspec.json.decode(state["progress"], type=TrainingProgress)
        except (KeyError, TypeError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadCheckpoint(f"its progress cannot be read: {error}") from None
        self._load_tensors(state)
        restore_random_state(state["rng"].get(str(self.ranks.rank)), self.device)


def _check_batch(settings: TrainerSettings, dp_size: int) -> None:
    unit = dp_size * settings.micro_batch
    if settings.global_batch % unit:
        raise BadInput(
            f"batch.global_batch {settings.global_batch} is not a multiple of {unit}:"
            f" {dp_size} data-parallel ranks x micro-batch {settings.micro_batch}"
        )


def random_state(device: torch.device) -> dict[str, Tensor]:
    found = {"cpu": torch.get_rng_state()}
    return found | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def restore_random_state(state: Mapping[str, Tensor] | None, device: torch.device) -> None:
    """A rank that the saving run did not have keeps its own state."""
    if not state:
        return
    torch.set_rng_state(state["cpu"].cpu())
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
