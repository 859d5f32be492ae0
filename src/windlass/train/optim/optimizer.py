"""The optimizers of a recipe over the parameters of a model: who decays, who is moved by what, and the norm of all gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer

from windlass.core.recipe import sections as sections
from windlass.errors import Impossible
from windlass.train.optim.muon import Muon
from windlass.train.params.layout import Slab

STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""What optimizers keep that has the parameter's shape."""


class Optimizers:
    """One or two of PyTorch's, as one."""

    def __init__(self, section: sections.OptimizerSection, parameters: Mapping[str, Tensor], slabs: Mapping[str, Slab]) -> None:
        """Both by the parameter's name in the model."""
        self.section, self.parameters = section, parameters
        self.parts: list[Optimizer] = []
        by_muon = {name for name in parameters if section.name == "muon" and _is_hidden_matrix(slabs[name])}
        if by_muon:
            self.parts.append(_muon(section, {name: parameters[name] for name in sorted(by_muon)}, slabs))
        rest = {name: parameter for name, parameter in parameters.items() if name not in by_muon}
        if rest:
            self.parts.append(_plain(section, rest, slabs))

    def step(self, lr: float) -> None:
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def states(self) -> dict[str, dict[str, Tensor]]:
        """{kind: {parameter: tensor}}; made where no step has been taken yet, so that a checkpoint has somewhere to go."""
        found: dict[str, dict[str, Tensor]] = {}
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        for part in self.parts:
            _make_states(part)
            for parameter, state in part.state.items():
                for kind in STATES:
                    if isinstance(state.get(kind), Tensor):
                        found.setdefault(kind, {})[names[id(parameter)]] = state[kind]
        return found

    def set_steps(self, count: int) -> None:
        """AdamW's own count of steps, which corrects the bias of its moments."""
        for part in self.parts:
            for state in part.state.values():
                if "step" in state:
                    state["step"].fill_(count)

    def num_steps(self) -> int:
        """How often AdamW has moved; all its parameters move together."""
        for part in self.parts:
            for state in part.state.values():
                if "step" in state:
                    return int(state["step"])
        return 0


def _is_hidden_matrix(slab: Slab) -> bool:
    """Matrices between hidden rows. Tables, heads and routers are not: one side of theirs is a choice among things."""
    name = slab.parts[0].name
    return _is_matrix(slab) and name.startswith("layers.") and not name.endswith("router.weight")


def _is_matrix(slab: Slab) -> bool:
    """Or a stack of them; a stack of experts' biases is none."""
    return len(slab.parts[0].shape) - (".experts." in slab.parts[0].name) > 1


def _decays(slab: Slab) -> bool:
    return _is_matrix(slab) and slab.parts[0].name not in ("embed.weight", "positions.weight")


def decay_groups(parameters: Mapping[str, Tensor], slabs: Mapping[str, Slab], decay: float) -> list[dict[str, Any]]:
    """Decaying ones and others; and apart, because one kernel may not mix them, those of unlike meshes."""
    groups: dict[tuple[Any, ...], list[Tensor]] = {}
    for name, parameter in parameters.items():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((_decays(slabs[name]), mesh), []).append(parameter)
    return [{"params": held, "weight_decay": decay if decays else 0.0} for (decays, _), held in groups.items()]


def _plain(section: sections.OptimizerSection, parameters: Mapping[str, Tensor], slabs: Mapping[str, Slab]) -> Optimizer:
    groups = decay_groups(parameters, slabs, section.weight_decay)
    if section.name == "sgd":
        return SGD(groups, lr=section.lr, momentum=section.momentum, foreach=False)
    on_gpu = all(parameter.is_cuda for parameter in parameters.values())
    how: dict[str, Any] = {"fused": True} if on_gpu else {"foreach": False}
    return AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps, **how)


def _muon(section: sections.OptimizerSection, parameters: Mapping[str, Tensor], slabs: Mapping[str, Slab]) -> Muon:
    if any(isinstance(parameter, DTensor) for parameter in parameters.values()):
        raise Impossible("Muon makes whole matrices orthogonal, and FSDP has cut them: train on one process, or with adamw")
    if any(part.sizes[-2:] != part.shape[-2:] for name in parameters for part in slabs[name].parts):
        raise Impossible("Muon makes whole matrices orthogonal, and tp has cut them: train on one process, or with adamw")
    splits: list[Callable[[Tensor], list[Tensor]]] = [_splitter(slabs[name]) for name in parameters]
    group = {"params": list(parameters.values()), "splits": splits}
    return Muon(
        [group],
        lr=section.lr,
        weight_decay=section.weight_decay,
        momentum=section.momentum,
        num_iterations=section.newton_schulz_steps,
    )


def _splitter(slab: Slab) -> Callable[[Tensor], list[Tensor]]:
    return lambda tensor: [part for _, part in slab.split(tensor)]


def _make_states(part: Optimizer) -> None:
    """As the first step would: a step of length nought on gradients of nought, which moves and counts nothing."""
    missing = [parameter for group in part.param_groups for parameter in group["params"] if not part.state.get(parameter)]
    if not missing or (isinstance(part, SGD) and not part.defaults["momentum"]):
        return
    kept = [(parameter, parameter.grad) for group in part.param_groups for parameter in group["params"]]
    rates = [(group, group["lr"], group["weight_decay"]) for group in part.param_groups]
    for parameter, _ in kept:
        parameter.grad = torch.zeros_like(parameter) if parameter in set(missing) else None
    for group, _, _ in rates:
        group["lr"] = group["weight_decay"] = 0.0
    part.step()
    for parameter, gradient in kept:
        parameter.grad = gradient
    for group, lr, decay in rates:
        group["lr"], group["weight_decay"] = lr, decay
    for state in part.state.values():
        if "step" in state:
            state["step"].zero_()


def squared_norm(gradients: Iterable[tuple[Tensor, float | Tensor]]) -> Tensor:
    """Sum of squares of this rank's gradients, each counted by its weight: of what several ranks hold, each counts a share."""
    shares: dict[tuple[torch.device, float], list[Tensor]] = {}
    total: Tensor | None = None
    for gradient, weight in gradients:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if isinstance(weight, Tensor):
            part = (local.square() * weight.to(local.dtype)).sum()
            total = part if total is None else total + part
        else:
            shares.setdefault((local.device, weight), []).append(local)
    for (_, weight), held in shares.items():
        part = torch.stack(torch._foreach_norm(held)).square().sum() * weight
        total = part if total is None else total + part
    assert total is not None, "a model has parameters"
    return total


def scale_gradients(parameters: Iterable[Tensor], factor: Tensor) -> None:
    held = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_(held, factor)


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
