"""In `batch_invariant` a row's result is the same bits however many rows there are, and wherever it stands among them.

With 1 to 70 rows, for every kind of weight, on every instruction set; two threads share the work out in other ways for other numbers of rows.
Attention has its own such tests in test_attention.py: there, what must not matter is how a sequence is cut.
"""

# ruff: noqa: E402 (the folder of ggml_blocks is put on the path first)

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

KERNELS = str(Path(__file__).parents[1])
if KERNELS not in sys.path:
    sys.path.insert(0, KERNELS)

from ggml_blocks import random_rows

from windlass.core.ggml.forms import FORMS
from windlass.core.model import Activation, Router, Scoring
from windlass.runtime.kernels import build
from windlass.runtime.kernels.arguments import ExpertsArgs, LatentArgs, QkvArgs
from windlass.runtime.kernels.cpu import activate, experts, heads, linear, norm, qkv, route
from windlass.runtime.kernels.packing.panel_data import KINDS
from windlass.runtime.kernels.packing.panels import Panels
from windlass.runtime.kernels.program import program
from windlass.runtime.kernels.step import attention_cache, latent_cache

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(build.library("native") is None and not build._compiler(), reason="no C++ compiler"),
    pytest.mark.usefixtures("instruction_set"),
]

MOST = 70
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Matrix = Tensor | Panels


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def made(kind: str, num_out: int, num_in: int, num_experts: int = 0, seed: int = 0) -> Matrix:
    """Rounded to whole blocks of the packed kinds."""
    if kind in FLOATS:
        shape = (num_experts, num_out, num_in) if num_experts else (num_out, num_in)
        return (torch.randn(shape, generator=drawn(seed)) / num_in**0.5).to(FLOATS[kind])
    if kind in FORMS:
        elements = FORMS[kind].elements
        blocks = -(-num_in // elements)
        panels = Panels.allocate(kind, num_out, blocks * elements, elements, num_experts, torch.float16)
        for expert in range(max(num_experts, 1)):
            panels.put_blocks(0, random_rows(kind, num_out, blocks, seed + expert, 0.1), expert if num_experts else None)
        return panels
    scale = torch.float32 if kind == "fp8" else torch.float16
    return Panels.random(kind, num_out, -(-num_in // 32) * 32, 32, num_experts, scale, deviation=0.1, seed=seed)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    program.set_threads(1)
    yield
    program.set_threads(program.num_threads())


def check(compute: Callable[[int, int], Tensor | None], counts: Iterable[int] = range(1, MOST)) -> None:
    """`compute` of rows first..last."""
    with program.batch_invariant():
        whole = compute(0, MOST)
        assert whole is not None, "there is no native operation for this"
        for count in counts:
            first = count * 31 % (MOST - count + 1)
            some = compute(first, first + count)
            assert some is not None and torch.equal(some, whole[first : first + count]), (count, first)


@pytest.mark.parametrize(
    ("kind", "num_in"),
    [*((kind, 200) for kind in (*FLOATS, *KINDS, *FORMS)), *((kind, width) for kind in (*FLOATS, "fp8") for width in (96, 4224))],
)
def test_linear(kind: str, num_in: int) -> None:
    """Rows of floats that fit into the nearest cache, those that do not, and those that end in a part of a vector."""
    weight = made(kind, 21, num_in)
    x = torch.randn(MOST, weight.shape[-1], generator=drawn(1))
    bias, add = torch.randn(21, generator=drawn(2)), torch.randn(MOST, 21, generator=drawn(3))
    check(lambda first, last: linear.linear(x[first:last], weight, bias, add[first:last]))


@pytest.mark.parametrize("kind", [*FLOATS, *KINDS, *FORMS])
def test_experts(kind: str) -> None:
    """Rows crowd on some experts, so that one has many rows where another has one."""
    width = 256 if kind in FORMS else 64
    gate_up = made(kind, 2 * width, 64, 5, seed=1)
    down = made(kind, gate_up.shape[-1], width, 5, seed=2)
    x = torch.randn(MOST, gate_up.shape[-1], generator=drawn(3))
    ids = torch.stack([torch.randperm(5, generator=drawn(row))[:3].sort().values for row in range(MOST)]).int()
    ids[: MOST // 2, 0] = 4
    ids[: MOST // 2, 1:] = ids[: MOST // 2, 1:] % 4
    weights = torch.rand(MOST, 3, generator=drawn(4))

    def compute(first: int, last: int) -> Tensor | None:
        return experts.experts(ExpertsArgs(x[first:last], ids[first:last], weights[first:last], gate_up, down, Activation.SILU))

    check(compute)


@pytest.mark.parametrize("kind", [*FLOATS, "fp8", "int4", "int8", "q4_k"])
def test_two_threads(kind: str) -> None:
    program.set_threads(2)
    weight = made(kind, 300, 200)
    x = torch.randn(MOST, weight.shape[-1], generator=drawn(1))
    check(lambda first, last: linear.linear(x[first:last], weight), (1, 2, 3, 12, 13, 40))


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms(kind: str) -> None:
    x, weight = torch.randn(MOST, 333, generator=drawn()), torch.rand(333, generator=drawn(1))
    check(lambda first, last: norm.norm(x[first:last], weight, None, 1e-5, kind))


def test_sums_and_activations() -> None:
    x, y = torch.randn(MOST, 333, generator=drawn()), torch.randn(MOST, 333, generator=drawn(1))
    check(lambda first, last: norm.add(x[first:last], y[first:last]))
    for activation in Activation:
        wide = torch.randn(MOST, 2 * 77, generator=drawn(2))
        check(lambda first, last, wide=wide, how=activation: activate.activate(wide[first:last], how, True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_matrix_per_head(dtype: torch.dtype) -> None:
    x = torch.randn(MOST, 3, 40, generator=drawn())
    weight = torch.randn(3, 40, 50, generator=drawn(1)).to(dtype)
    check(lambda first, last: heads.heads_matmul(x[first:last], weight))


@pytest.mark.parametrize("scoring", list(Scoring))
def test_routes(scoring: Scoring) -> None:
    logits, correction = torch.randn(MOST, 64, generator=drawn()), torch.randn(64, generator=drawn(1)) * 0.1
    router = Router(scoring=scoring, renormalize=True, scale=2.5, num_groups=4, num_chosen_groups=2)

    def compute(first: int, last: int) -> Tensor | None:
        found = route.route(logits[first:last], correction, router, 6)
        return None if found is None else torch.cat([part.float() for part in found], dim=1)

    check(compute)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_what_enters_the_cache(dtype: torch.dtype) -> None:
    """Queries, and keys and values as they are stored."""
    dim, table = 40, torch.randn(MOST, 2, 10, generator=drawn())
    x, norms = torch.randn(MOST, 4 * dim, generator=drawn(1)), (torch.rand(dim), torch.rand(dim))
    places = torch.randperm(MOST, generator=drawn(2)).int()

    def compute(first: int, last: int) -> Tensor | None:
        cache, slots = attention_cache(5, 1, dim, dtype), places[first:last]
        args = QkvArgs(x[first:last].clone(), 2, 1, dim, norms, 1e-5, table, False, slots, cache, slots)
        found = qkv.split_qkv(args)
        keys, values = cache.gather(torch.arange(5, dtype=torch.int32), 80)
        stored = [part.float().flatten(1)[slots.long()] for part in (keys, values) if part is not None]
        return None if found is None else torch.cat([found[0].flatten(1), *stored], dim=1)

    check(compute)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_what_enters_a_latent_cache(dtype: torch.dtype) -> None:
    latent, rope, table = 48, 16, torch.randn(MOST, 2, 8, generator=drawn())
    absorbed, q = torch.randn(MOST, 3, latent, generator=drawn(1)), torch.randn(MOST, 3, 20 + rope, generator=drawn(2))
    kv, gain, places = torch.randn(MOST, latent + rope, generator=drawn(3)), torch.rand(latent), torch.arange(MOST).int()

    def compute(first: int, last: int) -> Tensor | None:
        cache, slots, rows = latent_cache(5, latent, rope, dtype), places[first:last], slice(first, last)
        found = qkv.join_latent(LatentArgs(absorbed[rows], q[rows], kv[rows], gain, 1e-5, table, True, slots, cache, slots))
        stored = cache.gather(torch.arange(5, dtype=torch.int32), 80)[0].float().flatten(1)[slots.long()]
        return None if found is None else torch.cat([found[0].flatten(1), stored], dim=1)

    check(compute)


def test_a_row_alone_may_be_faster_where_nothing_is_promised() -> None:
    """Else the option would cost nothing, and there would be no need to ask."""
    weight, x = made("bfloat16", 21, 200), torch.randn(2, 200, generator=drawn(1))
    usual, alone = linear.linear(x, weight), linear.linear(x[:1], weight)
    assert usual is not None and alone is not None and not torch.equal(usual[:1], alone)
    with program.record(torch.tensor([1], dtype=torch.int32)) as recorded, program.batch_invariant():
        kept = linear.linear(x, weight)
    recorded.run()
    assert kept is not None and torch.equal(kept[:1], usual[:1])
