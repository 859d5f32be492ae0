"""The optimizers of a recipe: parameter groups, weight decay, optimizer states and the gradient norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer

from windlass.core.recipe import sections as sections
from windlass.errors import Impossible
from windlass.tasks.train.optim.muon import Muon
from windlass.tasks.train.params.layout import ParameterLayout

STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""Optimizer states with the parameter's shape."""


class Optimizers:
    """One or two PyTorch optimizers as one (Muon plus AdamW)."""

    def __init__(
        self, section: sections.OptimizerSection, parameters: Mapping[str, Tensor], layouts: Mapping[str, ParameterLayout]
    ) -> None:
        """`parameters` and `layouts`: by the parameter's name in the model."""
        self.section, self.parameters = section, parameters
        self.parts: list[Optimizer] = []
        by_muon = {name for name in parameters if section.name == "muon" and _is_hidden_matrix(layouts[name])}
        if by_muon:
            self.parts.append(_muon(section, {name: parameters[name] for name in sorted(by_muon)}, layouts))
        rest = {name: parameter for name, parameter in parameters.items() if name not in by_muon}
        if rest:
            self.parts.append(_plain(section, rest, layouts))

    def step(self, lr: float) -> None:
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def states(self) -> dict[str, dict[str, Tensor]]:
        """{kind: {parameter: tensor}}; created if there was no step yet, so that a checkpoint can be loaded into them."""
        found: dict[str, dict[str, Tensor]] = {}
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        for part in self.parts:
            _create_states(part)
            for parameter, state in part.state.items():
                for kind in STATES:
                    if isinstance(state.get(kind), Tensor):
                        found.setdefault(kind, {})[names[id(parameter)]] = state[kind]
        return found

    def set_steps(self, count: int) -> None:
        """AdamW's step count, for its bias correction."""
        for part in self.parts:
            for state in part.state.values():
                if "step" in state:
                    state["step"].fill_(count)

    def num_steps(self) -> int:
        """AdamW's step count; the same for all parameters."""
        for part in self.parts:
            for state in part.state.values():
                if "step" in state:
                    return int(state["step"])
        return 0


def _is_hidden_matrix(layout: ParameterLayout) -> bool:
    """Matrices of layers; not embeddings, heads and routers."""
    name = layout.parts[0].name
    return _is_matrix(layout) and name.startswith("layers.") and not name.endswith("router.weight")


def _is_matrix(layout: ParameterLayout) -> bool:
    """A matrix, or stacked expert matrices; not stacked expert biases."""
    return len(layout.parts[0].shape) - (".experts." in layout.parts[0].name) > 1


def _decays(layout: ParameterLayout) -> bool:
    return _is_matrix(layout) and layout.parts[0].name not in ("embed.weight", "positions.weight")


def decay_groups(parameters: Mapping[str, Tensor], layouts: Mapping[str, ParameterLayout], decay: float) -> list[dict[str, Any]]:
    """With and without decay; and separate groups per device mesh, because fused kernels cannot mix meshes."""
    groups: dict[tuple[Any, ...], list[Tensor]] = {}
    for name, parameter in parameters.items():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((_decays(layouts[name]), mesh), []).append(parameter)
    return [{"params": held, "weight_decay": decay if decays else 0.0} for (decays, _), held in groups.items()]


def _plain(
    section: sections.OptimizerSection, parameters: Mapping[str, Tensor], layouts: Mapping[str, ParameterLayout]
) -> Optimizer:
    groups = decay_groups(parameters, layouts, section.weight_decay)
    if section.name == "sgd":
        return SGD(groups, lr=section.lr, momentum=section.momentum, foreach=False)
    on_gpu = all(parameter.is_cuda for parameter in parameters.values())
    how: dict[str, Any] = {"fused": True} if on_gpu else {"foreach": False}
    return AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps, **how)


def _muon(section: sections.OptimizerSection, parameters: Mapping[str, Tensor], layouts: Mapping[str, ParameterLayout]) -> Muon:
    if any(isinstance(parameter, DTensor) for parameter in parameters.values()):
        raise Impossible("Muon needs whole matrices, but FSDP shards them: train with one process, or use adamw")
    if any(part.sizes[-2:] != part.shape[-2:] for name in parameters for part in layouts[name].parts):
        raise Impossible("Muon needs whole matrices, but tp splits them: train with one process, or use adamw")
    splits: list[Callable[[Tensor], list[Tensor]]] = [_splitter(layouts[name]) for name in parameters]
    group = {"params": list(parameters.values()), "splits": splits}
    return Muon(
        [group],
        lr=section.lr,
        weight_decay=section.weight_decay,
        momentum=section.momentum,
        num_iterations=section.newton_schulz_steps,
    )


def _splitter(layout: ParameterLayout) -> Callable[[Tensor], list[Tensor]]:
    return lambda tensor: [part for _, part in layout.split(tensor)]


def _create_states(part: Optimizer) -> None:
    """A step with zero gradients and zero learning rate, which creates the states and changes nothing."""
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
    """Weighted sum of squares of this rank's gradients; the weights account for values that several ranks hold."""
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
