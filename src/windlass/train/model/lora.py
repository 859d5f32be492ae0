"""Adapters beside frozen weights, packed or plain (LoRA, arXiv 2106.09685; on packed ones QLoRA, arXiv 2305.14314).

Each of our matrices W that is a target becomes W + (alpha / rank) B A, where only A [rank, in] and B [out, rank] learn; B begins at
nought, so the model begins as it was. Packed numbers are unpacked where they are needed and never kept. Knows no files.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from windlass.core.recipe.sections import LoraSection
from windlass.errors import BadInput
from windlass.kernels.ops.activate import activate
from windlass.kernels.ops.experts import _product as frozen_product
from windlass.nn.feed_forward import FeedForward
from windlass.nn.linear import Linear
from windlass.nn.mixers.attention import Attention
from windlass.nn.mixers.latent import LatentAttention
from windlass.nn.moe import Experts, MixtureOfExperts
from windlass.train.model.model import Trained
from windlass.train.params.layout import Part, Slab


class Adapter(nn.Module):
    """B A, of one matrix or of every expert's."""

    def __init__(self, name: str, shape: tuple[int, ...], rank: int, like: Tensor, seed: int) -> None:
        """`shape`: [.., out, in]"""
        super().__init__()
        self.name = name
        *many, out, into = shape
        source = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        first = (torch.rand(*many, rank, into, generator=source) * 2 - 1) / sqrt(into)  # as PEFT draws it
        self.a = nn.Parameter(first.to(like))
        self.b = nn.Parameter(torch.zeros(*many, out, rank).to(like))

    def forward(self, x: Tensor, expert: int | None = None) -> Tensor:
        a, b = (self.a, self.b) if expert is None else (self.a[expert], self.b[expert])
        return (x @ a.t().to(x.dtype)) @ b.t().to(x.dtype)


class AdaptedLinear(nn.Module):
    """In the place of nn.linear.Linear, which may be several of our matrices below each other."""

    def __init__(self, base: Linear, adapters: list[Adapter], scale: float) -> None:
        super().__init__()
        self.base, self.adapters, self.scale = base, nn.ModuleList(adapters), scale

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        more = torch.cat([adapter(x) for adapter in self.adapters], dim=-1) * self.scale
        return self.base(x, add) + more


class AdaptedExperts(nn.Module):
    """In the place of nn.moe.Experts. Adapters act before the activation too, so experts are gone through one by one."""

    def __init__(self, base: Experts, adapters: dict[str, Adapter], scale: float) -> None:
        super().__init__()
        self.base, self.adapters, self.scale = base, nn.ModuleDict(adapters), scale

    def forward(self, x: Tensor, ids: Tensor, shares: Tensor, add: Tensor | None = None) -> Tensor:
        chosen = ids.flatten().long()
        order = chosen.argsort(stable=True)
        rows, first, said = order // ids.shape[1], 0, [x[:0]]
        for expert, count in enumerate(chosen.bincount().tolist()):
            if count:
                said.append(self._said(x[rows[first : first + count]], expert))
                first += count
        weighed = torch.cat(said) * shares.flatten()[order, None].to(x.dtype)
        total = torch.zeros_like(x).index_add(0, rows, weighed)
        return total if add is None else total + add

    def _said(self, x: Tensor, expert: int) -> Tensor:
        base, adapters = self.base, self.adapters
        inner = frozen_product(x, base.gate_up, base.gate_up_bias, expert)
        more = torch.cat((adapters["gate"](x, expert), adapters["up"](x, expert)), dim=-1)
        hidden = activate(inner + self.scale * more, base.moe.activation, True, base.moe.clamp)
        return frozen_product(hidden, base.down, base.down_bias, expert) + self.scale * adapters["down"](hidden, expert)


def adapt(model: Trained, section: LoraSection, seed: int, dtype: torch.dtype) -> dict[str, Slab]:
    """Freezes the model and puts adapters beside its targets. The slabs of what learns, by parameter."""
    assert section.rank is not None
    model.requires_grad_(False)
    device = next(model.buffers(), torch.zeros(0)).device
    make = _Maker(section, seed, torch.empty(0, dtype=dtype, device=device))
    first = model.decoder.shard.layers(model.decoder.spec)[0]
    for number, layer in enumerate(model.decoder.layers):
        name = f"layers.{first + number}"
        if "attention" in section.targets:
            make.attention(layer.mixer, f"{name}.mixer")
        make.feed_forward(layer, f"{name}.ffn")
    slabs = {
        name: Slab((Part(f"{_owner(model, name)}.lora_{name[-1]}.weight", tuple(parameter.shape), _all(parameter)),), 0)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    if not slabs:
        raise BadInput(
            f"lora.targets ({', '.join(section.targets) or 'none'}) names nothing that this model has: nothing would learn"
        )
    return slabs


class _Maker:
    def __init__(self, section: LoraSection, seed: int, like: Tensor) -> None:
        assert section.rank is not None
        self.section, self.seed, self.like, self.scale = section, seed, like, section.alpha / section.rank

    def attention(self, mixer: Any, name: str) -> None:
        if isinstance(mixer, Attention):
            heads, kv = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
            mixer.qkv = self.linear(mixer.qkv, (f"{name}.q", heads), (f"{name}.k", kv), (f"{name}.v", kv))
        elif isinstance(mixer, LatentAttention):
            if isinstance(mixer.q, nn.Sequential):
                mixer.q[0], mixer.q[2] = (
                    self.linear(mixer.q[0], (f"{name}.q_a", None)),
                    self.linear(mixer.q[2], (f"{name}.q_b", None)),
                )
            else:
                mixer.q = self.linear(mixer.q, (f"{name}.q", None))
            mixer.kv = self.linear(mixer.kv, (f"{name}.kv_a", None))
        mixer.o = self.linear(mixer.o, (f"{name}.o", None))

    def feed_forward(self, layer: Any, name: str) -> None:
        feed = layer.feed_forward
        if isinstance(feed, MixtureOfExperts):
            if "experts" in self.section.targets:
                feed.experts = self.experts(feed.experts, name)  # type: ignore[arg-type]
            feed, name = feed.shared, f"{name}.shared"
        if isinstance(feed, FeedForward) and "feed_forward" in self.section.targets:
            out = _shape(feed.up.weight)[0]
            parts = [(f"{name}.gate", out // 2), (f"{name}.up", out // 2)] if feed.gated else [(f"{name}.up", out)]
            feed.up, feed.down = self.linear(feed.up, *parts), self.linear(feed.down, (f"{name}.down", None))

    def linear(self, base: Linear, *parts: tuple[str, int | None]) -> Any:
        out, into = _shape(base.weight)
        made = [Adapter(name, (rows or out, into), self._rank, self.like, self.seed) for name, rows in parts]
        return AdaptedLinear(base, made, self.scale)

    def experts(self, base: Experts, name: str) -> AdaptedExperts:
        num, (out, into), (hidden, width) = base.moe.num_experts, _shape(base.gate_up), _shape(base.down)
        shapes = {"gate": (num, out // 2, into), "up": (num, out // 2, into), "down": (num, hidden, width)}
        made = {
            part: Adapter(f"{name}.experts.{part}", shape, self._rank, self.like, self.seed) for part, shape in shapes.items()
        }
        return AdaptedExperts(base, made, self.scale)

    @property
    def _rank(self) -> int:
        assert self.section.rank is not None
        return self.section.rank


def adapters(model: nn.Module) -> Iterator[Adapter]:
    return (module for module in model.modules() if isinstance(module, Adapter))


def _owner(model: nn.Module, parameter: str) -> str:
    """Our name of the matrix that a parameter of an adapter belongs to."""
    owner = model.get_submodule(parameter.rpartition(".")[0])
    assert isinstance(owner, Adapter)
    return owner.name


def _all(parameter: Tensor) -> tuple[tuple[int, int], ...]:
    return tuple((0, size) for size in parameter.shape)


def _shape(matrix: Any) -> tuple[int, int]:
    """[out, in], of each where there are several."""
    return (matrix.shape[-2], matrix.shape[-1])
