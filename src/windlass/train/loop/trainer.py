"""A training run: where it is, one step of it, and all of it as a dictionary that a checkpoint holds.

The dictionary has whole tensors under our names wherever one rank has them, and pieces that say where they belong elsewhere; so it does
not tell how the run was split. Knows no files, no terminal and no clock but that of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any

import msgspec
import torch
from torch import Tensor

from windlass.core.recipe.sections import LossSection, OptimizerSection, ScheduleSection
from windlass.errors import BadCheckpoint, BadInput
from windlass.train.model.balance import correct, watch_all
from windlass.train.model.model import Trained
from windlass.train.optim.master_weights import Masters
from windlass.train.optim.optimizer import Optimizers, scale_gradients, squared_norm
from windlass.train.optim.schedule import rate
from windlass.train.params.layout import Slab
from windlass.train.params.shards import whole_or_piece
from windlass.train.step import Ahead, Alone, Prepared, on_device, own_samples, prepare


class Progress(msgspec.Struct):
    step: int = 0
    """Optimizer steps that are done."""
    samples: int = 0
    """Number of the next sample."""
    tokens: int = 0
    """That were learned from."""
    seed: int = 0
    skipped: list[tuple[int, int]] = []
    """Samples (first, behind the last) that were left out: they broke the run once."""
    best_validation: float | None = None
    recent: list[float] = []
    """Losses that the next are judged by (`guard`), so that a run that goes on judges alike."""


class StepReport(msgspec.Struct, frozen=True):
    step: int
    """Steps that are done, this one included."""
    loss: float
    """Mean cross-entropy of the step's targets."""
    grad_norm: float
    """Before clipping."""
    lr: float
    tokens: int
    """Of this step, on all ranks."""
    seconds: float
    expert_load: list[list[int]]
    """[routed layers, experts]: how often each was chosen, on all ranks."""
    parts: dict[str, float]
    """What else was learned: `mtp`, `balance`, `router_z`, each as it is before its weight."""
    first_sample: int
    applied: bool
    """False: the gradient was no number, and the weights were left alone."""


class Settings(msgspec.Struct, frozen=True):
    """What a trainer needs of a recipe, with nothing left to choose."""

    optimizer: OptimizerSection
    schedule: ScheduleSection
    loss: LossSection
    global_batch: int
    micro_batch: int
    num_steps: int
    validation_samples: int = 64
    seed: int = 0


class Trainer:
    def __init__(
        self,
        model: Trained,
        slabs: Mapping[str, Slab],
        masters: Masters,
        batches: Any,
        settings: Settings,
        *,
        ranks: Any = None,
        held_out: Any = None,
        flops_per_token: float = 0.0,
    ) -> None:
        """`slabs`: of every parameter and correction, by its name in the model. `batches` and `held_out`: train.data.Batches."""
        self.model, self.slabs, self.masters, self.settings = model, slabs, masters, settings
        self.batches, self.held_out, self.ranks = batches, held_out, ranks or Alone()
        self.optimizer = Optimizers(settings.optimizer, masters.of, slabs)
        self.frame, self.watches = watch_all(model, settings.loss)
        self.progress = Progress(seed=settings.seed)
        self.flops_per_token = flops_per_token
        """Counted as plans count them."""
        self.device = next(iter(masters.of.values())).device
        self._share = own_samples(0, settings.global_batch, self.ranks.dp_rank, self.ranks.dp_size)
        _check_batch(settings, self.ranks.dp_size)
        self._ahead = Ahead(self._prepare)

    # --- learning

    @property
    def lr(self) -> float:
        """Of the next step."""
        return self.settings.optimizer.lr * rate(self.settings.schedule, self.progress.step, self.settings.num_steps)

    @property
    def done(self) -> bool:
        return self.progress.step >= self.settings.num_steps

    def step(self) -> StepReport:
        began, settings, first = perf_counter(), self.settings, self.progress.samples
        lr = self.lr
        self._start()
        prepared = self._ahead.take(first, first + settings.global_batch)
        sums = self.ranks.run(self.model, on_device(prepared, self.ranks, self.device))
        self.ranks.finish(self.masters.of)
        norm = self._clip()
        applied = bool(torch.isfinite(norm))
        if applied:
            self.optimizer.step(lr)
            self.masters.refresh()
        self.optimizer.zero_grad()
        loads = self._loads()
        if applied:
            correct(self.watches, loads, settings.loss.bias_rate)
        tokens = settings.global_batch * self.batches.sequence_length
        entropy, parts = self._told(sums)
        self.progress.step += 1
        self.progress.samples = first + settings.global_batch
        self.progress.tokens += tokens
        return StepReport(
            step=self.progress.step,
            loss=entropy,
            grad_norm=float(norm),
            lr=lr,
            tokens=tokens,
            seconds=perf_counter() - began,
            expert_load=[load.tolist() for load in self.ranks.routed(loads)],
            parts=parts,
            first_sample=first,
            applied=applied,
        )

    def validate(self) -> float:
        """Mean cross-entropy of held-out samples, always the same ones."""
        if self.held_out is None:
            raise BadInput("there is no held-out data to look at: prepare it with `windlass train data --validation`")
        size = self.ranks.dp_size
        count = -(-self.settings.validation_samples // (size * self.settings.micro_batch)) * self.settings.micro_batch
        self._start()
        prepared = prepare(self.held_out, self.ranks.dp_rank * count, count, self.settings.micro_batch, self._guesses)
        said = self.ranks.look(self.model, on_device(prepared, self.ranks, self.device))
        return float(self.ranks.told(said))

    def skip(self) -> None:
        """The next step's samples are left out: they broke it."""
        first = self.progress.samples
        self.progress.samples = first + self.settings.global_batch
        self.progress.skipped.append((first, self.progress.samples))

    def _start(self) -> None:
        self.frame.length, self.frame.num_samples = self.batches.sequence_length, self.settings.global_batch
        self.frame.owns_losses = self.ranks.owns_losses
        for watch in self.watches:
            watch.start_step()

    @property
    def _guesses(self) -> bool:
        return self.model.next_token is not None

    def _prepare(self, first: int) -> Prepared:
        """This rank's samples of the step that begins at `first`."""
        offset, count = self._share
        return prepare(self.batches, first + offset, count, self.settings.micro_batch, self._guesses)

    def _clip(self) -> Tensor:
        """The norm over all weights of all ranks; where it is too long, gradients are made shorter, alike everywhere."""
        held = self.masters.of.items()
        shares = ((parameter.grad, self.ranks.share(name)) for name, parameter in held if parameter.grad is not None)
        norm = self.ranks.summed_over_all(squared_norm(shares)).sqrt()
        limit = self.settings.optimizer.clip
        if limit is not None:
            scale_gradients(self.masters.of.values(), (limit / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def _loads(self) -> list[Tensor]:
        if not self.watches:
            return []
        return list(self.ranks.summed(torch.stack([watch.load for watch in self.watches])))

    def _told(self, sums: Any) -> tuple[float, dict[str, float]]:
        """Numbers of all ranks, asked of the device once."""
        wide, none = sums.entropy.dtype, torch.zeros_like(sums.entropy)
        balance, z = (sum((getattr(watch, name).to(wide) for watch in self.watches), none) for name in ("balance", "z"))
        counted = none + len(self.watches) / self.ranks.dp_size
        ahead = none if sums.ahead is None else sums.ahead
        entropy, *rest, layers = self.ranks.told(torch.stack([sums.entropy, ahead, balance, z, counted])).tolist()
        parts = {"mtp": rest[0]} if self.model.next_token is not None else {}
        if layers and (self.settings.loss.balance or self.settings.loss.router_z):
            parts |= {"balance": rest[1] / layers, "router_z": rest[2] / layers}
        return entropy, parts

    # --- as a dictionary

    def state(self) -> dict[str, Any]:
        """For a checkpoint to hold, or to be filled from one in place; then `load` takes what is not a tensor."""
        model: dict[str, Any] = {}
        for name, parameter in self.masters.of.items():
            self._put(model, name, parameter)
        for name, buffer in self.model.named_buffers():
            if name in self.slabs:
                self._put(model, name, buffer)
        optimizer: dict[str, dict[str, Any]] = {}
        for kind, tensors in self.optimizer.states().items():
            held: dict[str, Any] = optimizer.setdefault(kind, {})
            for name, tensor in tensors.items():
                self._put(held, name, tensor)
        return {
            "model": model,
            "optimizer": optimizer,
            "optimizer_steps": self.optimizer.num_steps(),
            "progress": msgspec.json.encode(self.progress).decode(),
            "rng": {str(self.ranks.rank): random_state(self.device)},
        }

    def load(self, state: dict[str, Any]) -> None:
        """After a checkpoint has filled what `state` gave: tensors are in place, the rest is taken from here."""
        try:
            self.progress = msgspec.json.decode(state["progress"], type=Progress)
        except (KeyError, TypeError, msgspec.DecodeError) as error:
            raise BadCheckpoint(f"its progress cannot be read: {error}") from None
        self.optimizer.set_steps(int(state["optimizer_steps"]))
        self.masters.refresh()
        restore_random_state(state["rng"].get(str(self.ranks.rank)), self.device)

    def _put(self, into: dict[str, Any], name: str, tensor: Tensor) -> None:
        for part, view in self.ranks.places(self.slabs[name], tensor.detach()):
            into[part.name] = whole_or_piece(part, view, self.ranks.owned(part))


def _check_batch(settings: Settings, dp_size: int) -> None:
    whole = dp_size * settings.micro_batch
    if settings.global_batch % whole:
        raise BadInput(
            f"batch.global_batch {settings.global_batch} cannot be shared out: {dp_size} data-parallel ranks take micro-batches of"
            f" {settings.micro_batch}, so it must be a multiple of {whole}"
        )


def random_state(device: torch.device) -> dict[str, Tensor]:
    found = {"cpu": torch.get_rng_state()}
    return found | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def restore_random_state(state: Mapping[str, Tensor] | None, device: torch.device) -> None:
    """A rank that the saving run did not have begins its own."""
    if not state:
        return
    torch.set_rng_state(state["cpu"].cpu())
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
