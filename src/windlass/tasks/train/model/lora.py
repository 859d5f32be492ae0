"""LoRA adapters on frozen weights (arXiv 2106.09685); on quantized ones QLoRA (arXiv 2305.14314).

Each target matrix W becomes W + (alpha / rank) B A, where only A [rank, in] and B [out, rank] are trained; B starts at zero, so the
model starts unchanged. Quantized weights are dequantized on use and never kept. Knows no files.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from math import sqrt
from typing import Any, cast

import torch
from torch import Tensor, nn

from windlass.core.recipe.sections import LoraSection
from windlass.errors import BadInput
from windlass.runtime.kernels.ops.activate import activate
from windlass.runtime.kernels.ops.experts import expert_product as frozen_product
from windlass.runtime.nn.feed_forward import FeedForward
from windlass.runtime.nn.linear import Linear
from windlass.runtime.nn.mixers.attention import AttentionMixer
from windlass.runtime.nn.mixers.latent import LatentAttentionMixer
from windlass.runtime.nn.moe import Experts, MixtureOfExperts
from windlass.tasks.train.model.model import TrainingModel
from windlass.tasks.train.params.layout import ParameterLayout, TensorSlice


class Adapter(nn.Module):
    """B A for one matrix, or for all experts."""

    def __init__(self, name: str, shape: tuple[int, ...], rank: int, like: Tensor, seed: int) -> None:
        """`shape`: [.., out, in]"""
        super().__init__()
        self.name = name
        *many, out, into = shape
        source = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        first = (torch.rand(*many, rank, into, generator=source) * 2 - 1) / sqrt(into)  # as in PEFT
        self.a = nn.Parameter(first.to(like))
        self.b = nn.Parameter(torch.zeros(*many, out, rank).to(like))

    def forward(self, x: Tensor, expert: int | None = None) -> Tensor:
        a, b = (self.a, self.b) if expert is None else (self.a[expert], self.b[expert])
        return (x @ a.t().to(x.dtype)) @ b.t().to(x.dtype)


class AdaptedLinear(nn.Module):
    """Replaces nn.linear.Linear, which may be several fused matrices."""

    def __init__(self, base: Linear, adapters: list[Adapter], scale: float) -> None:
        super().__init__()
        self.base, self.adapters, self.scale = base, nn.ModuleList(adapters), scale

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        more = torch.cat([adapter(x) for adapter in self.adapters], dim=-1) * self.scale
        return self.base(x, add) + more


class AdaptedExperts(nn.Module):
    """Replaces nn.moe.Experts. Adapters act before the activation too, so experts run one by one."""

    def __init__(self, base: Experts, adapters: dict[str, Adapter], scale: float) -> None:
        super().__init__()
        self.base, self.adapters, self.scale = base, nn.ModuleDict(adapters), scale

    def forward(self, x: Tensor, ids: Tensor, shares: Tensor, add: Tensor | None = None) -> Tensor:
        chosen = ids.flatten().long()
        order = chosen.argsort(stable=True)
        rows, first, outputs = order // ids.shape[1], 0, [x[:0]]
        for expert, count in enumerate(chosen.bincount().tolist()):
            if count:
                outputs.append(self._expert(x[rows[first : first + count]], expert))
                first += count
        weighted = torch.cat(outputs) * shares.flatten()[order, None].to(x.dtype)
        total = torch.zeros_like(x).index_add(0, rows, weighted)
        return total if add is None else total + add

    def _expert(self, x: Tensor, expert: int) -> Tensor:
        base, adapters = self.base, self.adapters
        inner = frozen_product(x, base.gate_up, base.gate_up_bias, expert)
        more = torch.cat((adapters["gate"](x, expert), adapters["up"](x, expert)), dim=-1)
        hidden = activate(inner + self.scale * more, base.moe.activation, True, base.moe.clamp)
        return frozen_product(hidden, base.down, base.down_bias, expert) + self.scale * adapters["down"](hidden, expert)


def add_adapters(model: TrainingModel, section: LoraSection, seed: int, dtype: torch.dtype) -> dict[str, ParameterLayout]:
    """Freezes the model and adds adapters to its targets. Returns the layouts of the trained parameters."""
    assert section.rank is not None
    model.requires_grad_(False)
    device = next(model.buffers(), torch.zeros(0)).device
    builder = _AdapterBuilder(section, seed, torch.empty(0, dtype=dtype, device=device))
    first = model.decoder.shard.layers(model.decoder.spec)[0]
    for number, layer in enumerate(model.decoder.layers):
        name = f"layers.{first + number}"
        if "attention" in section.targets:
            builder.attention(layer.mixer, f"{name}.mixer")
        builder.feed_forward(layer, f"{name}.ffn")
    layouts = {
        name: ParameterLayout(
            (TensorSlice(f"{_owner(model, name)}.lora_{name[-1]}.weight", tuple(parameter.shape), _all(parameter)),), 0
        )
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    if not layouts:
        raise BadInput(
            f"lora.targets ({', '.join(section.targets) or 'none'}) match nothing in this model: nothing would be trained"
        )
    return layouts


class _AdapterBuilder:
    def __init__(self, section: LoraSection, seed: int, like: Tensor) -> None:
        assert section.rank is not None
        self.section, self.seed, self.like, self.scale = section, seed, like, section.alpha / section.rank

    def attention(self, mixer: Any, name: str) -> None:
        if isinstance(mixer, AttentionMixer):
            heads, kv = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
            mixer.qkv = self.linear(mixer.qkv, (f"{name}.q", heads), (f"{name}.k", kv), (f"{name}.v", kv))
        elif isinstance(mixer, LatentAttentionMixer):
            if isinstance(mixer.q, nn.Sequential):
                down, _, up = cast("tuple[Linear, nn.Module, Linear]", tuple(mixer.q))
                mixer.q[0], mixer.q[2] = self.linear(down, (f"{name}.q_a", None)), self.linear(up, (f"{name}.q_b", None))
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
    """Our name of the matrix that an adapter parameter belongs to."""
    owner = model.get_submodule(parameter.rpartition(".")[0])
    assert isinstance(owner, Adapter)
    return owner.name


def _all(parameter: Tensor) -> tuple[tuple[int, int], ...]:
    return tuple((0, size) for size in parameter.shape)


def _shape(matrix: Any) -> tuple[int, int]:
    """[out, in] of each matrix."""
    return (matrix.shape[-2], matrix.shape[-1])
