"""The pass made of a GPU's kernels, on a CPU: launches are stand-ins made of the kernels' references, everything between them is real.

In fp32 it equals the decoder with the same weights in float64 to 1e-4 of each row's norm (3e-6 is seen): there the choice of experts cannot
differ by rounding. In bf16, as on the device, it is as near as bf16 allows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
HERE = str(Path(__file__).parents[1])
if HERE not in sys.path:
    sys.path.insert(0, HERE)

from stand_ins import LAUNCHES, StandIns  # noqa: E402
from tiny_fused import MODELS, weights_of  # noqa: E402

from windlass.runtime.kernels.step import BLOCK_TOKENS, Step  # noqa: E402
from windlass.runtime.nn import Decoder  # noqa: E402
from windlass.runtime.nn.fused.feed_forward import _three_parts  # noqa: E402

pytestmark = pytest.mark.cpu

EXACT, ROUNDED = 1e-4, 0.05


def tokens_of(seed: int, count: int) -> list[int]:
    return torch.randint(0, 96, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class Case:
    """Sequences of a model, their logits, and a decoder on stand-ins that reads them in whatever steps."""

    def __init__(self, name: str, patch: pytest.MonkeyPatch, tiny: Any, half: Any = torch.float32, kv: Any = None) -> None:
        spec, weights, self.exact = weights_of(name)
        self.stand_ins, self.tiny = StandIns(half), tiny
        self.stand_ins.install(patch)
        self.decoder = Decoder(spec, weights)
        assert self.decoder.fused is not None
        self.caches = self.decoder.make_caches(64, kv or half)
        for cache_ in self.caches:  # what was there before
            for part in cache_.parts:
                part.random_(0, 120) if part.dtype == torch.uint8 else part.copy_(torch.randn(part.shape))
        self.bound = EXACT if half is torch.float32 else ROUNDED
        self._known: dict[int, tuple[list[int], Any, list[int]]] = {}

    def sequence(self, number: int, length: int) -> tuple[list[int], Any, list[int]]:
        """Tokens, logits and blocks; the blocks of different sequences are mixed."""
        if number not in self._known:
            tokens = tokens_of(number, length)
            with torch.inference_mode():
                logits = self.exact(self.tiny.step([self.tiny.chunk(tokens, 0, length)]))
            used = sum(len(blocks) for _, _, blocks in self._known.values())
            order = torch.randperm(64, generator=torch.Generator().manual_seed(1)).tolist()
            self._known[number] = tokens, logits, order[used : used + -(-length // BLOCK_TOKENS)]
        return self._known[number]

    def run(self, *chunks: tuple[int, int, int], last_only: bool = False) -> None:
        """Tokens start..stop of each sequence in one step, and all (or the last) of their logits compared."""
        with torch.inference_mode():
            found, expected = self._ran(chunks, last_only)
        assert found.dtype is torch.float32
        errors = (found.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
        worst = errors.max() if self.bound == EXACT else errors.median()
        assert worst < self.bound, f"{chunks}: {errors}"  # NaN fails too

    def _ran(self, chunks: tuple[tuple[int, int, int], ...], last_only: bool) -> tuple[Any, Any]:
        known = [(self.sequence(number, 0), start, stop) for number, start, stop in chunks]
        ends = torch.tensor([stop - start for _, start, stop in chunks]).cumsum(0) - 1
        step: Step = self.tiny.step(
            [self.tiny.chunk(tokens, start, stop, blocks) for (tokens, _, blocks), start, stop in known],
            logit_rows=ends.tolist() if last_only else None,
            padding=3,
        )
        expected = torch.cat([logits[start:stop] for (_, logits, _), start, stop in known])
        return self.decoder(step, self.caches), expected[ends] if last_only else expected


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch, tiny: Any) -> Callable[..., Case]:
    return lambda name, half=torch.float32, kv=None: Case(name, monkeypatch, tiny, half, kv)


@pytest.mark.parametrize("name", MODELS)
def test_equals_the_decoder_in_float64(case: Callable[..., Case], name: str) -> None:
    """Prompts of one row, of 2 to 64 and of more; tokens one by one, alone and together; both in one step; prompts in chunks."""
    made = case(name)
    for number, length in enumerate((90, 40, 20, 6, 2, 3, 37, 18, 50, 17, 1, 131)):
        made.sequence(number, length)
    made.run((0, 0, 70))  # more than 64 rows
    made.run((0, 70, 71))
    made.run((1, 0, 1))  # a prompt of one token
    made.run((1, 1, 9))  # a chunk of 8 after it
    made.run((0, 71, 72), (1, 9, 30))  # a token beside a chunk
    made.run((2, 0, 19), (3, 0, 5), (4, 0, 1), (5, 0, 2))  # prompts together
    made.run((0, 72, 73), (1, 30, 31), (2, 19, 20), (3, 5, 6), (4, 1, 2), (5, 2, 3))  # one token of each
    made.run((6, 0, 36), (7, 0, 17), (8, 0, 49), (9, 0, 16), last_only=True)  # more than 64 rows of several
    made.run((0, 73, 74), (1, 31, 32), (6, 36, 37), (7, 17, 18), (8, 49, 50), (9, 16, 17), (10, 0, 1), (0, 73, 74), (1, 31, 32))
    made.run((11, 0, 130), last_only=True)  # enough for units of 64 rows of each expert
    made.run((11, 130, 131))
    made.run((0, 74, 75), (1, 32, 40), (6, 0, 36), (7, 0, 17))  # a token, a chunk of a begun prompt, new prompts
    made.run((0, 75, 90), (8, 40, 50), last_only=True)  # two chunks, and only what follows them


@pytest.mark.parametrize("name", ["glm", "glm+qk_norm", "glm+128", "llama"])
def test_as_near_as_bf16_allows(case: Callable[..., Case], name: str) -> None:
    """Types as they are on the device. Rows whose experts were chosen otherwise are further off: the median counts."""
    made = case(name, torch.bfloat16)
    for number, length in enumerate((80, 31, 8)):
        made.sequence(number, length)
    made.run((0, 0, 79))
    made.run((0, 79, 80))
    made.run((1, 0, 30), (2, 0, 7))
    made.run((1, 30, 31), (2, 7, 8), (0, 79, 80))


@pytest.mark.parametrize("name", ["glm", "llama"])
def test_a_cache_in_fp8(case: Callable[..., Case], name: str) -> None:
    """Keys and values have 4 significant bits: off by as much, and not by more than bf16 allows on average."""
    made = case(name, torch.bfloat16, torch.float8_e4m3fn)
    for number, length in enumerate((80, 31, 8)):
        made.sequence(number, length)
    made.run((0, 0, 60))
    made.run((0, 60, 79))  # after what is in the cache
    made.run((0, 79, 80))
    made.run((1, 0, 30), (2, 0, 7))
    made.run((1, 30, 31), (2, 7, 8), (0, 79, 80))


def test_every_launch_has_had_its_turn(case: Callable[..., Case]) -> None:
    called: set[str] = set()
    for name in ("glm+qk_norm", "llama", "glm+128"):
        made = case(name)
        made.sequence(0, 131), made.sequence(1, 20)
        for chunks in (((0, 0, 130),), ((1, 0, 12),), ((1, 12, 13),), ((0, 130, 131), (1, 13, 14))):
            made.run(*chunks)
        called |= made.stand_ins.called
    assert called == {name for names in LAUNCHES.values() for name in names}


def test_many_prompts_at_once(case: Callable[..., Case]) -> None:
    """More than are worth a call of attention each."""
    made = case("llama")
    for number in range(17):
        made.sequence(number, 3)
    made.run(*((number, 0, 2 + number % 2) for number in range(17)))
    made.run(*((number, 2, 3) for number in range(17)))


@pytest.mark.parametrize(("name", "expected"), [("glm", {20: 8, 90: 8, 150: 64, 290: 64}), ("qwen", {20: 8, 70: 16, 290: 48})])
def test_items_grow_with_the_rows(case: Callable[..., Case], name: str, expected: dict[int, int]) -> None:
    """Experts of few rows are not multiplied in units of many. Groups of 64 and of 128: the latter in integers."""
    made = case(name)
    made.sequence(0, 300)
    for rows, size in expected.items():
        made.stand_ins.item_rows.clear()
        made.run((0, 0, rows), last_only=True)
        assert size in made.stand_ins.item_rows, (rows, made.stand_ins.item_rows)


def test_a_step_that_wants_no_logits(case: Callable[..., Case], tiny: Any) -> None:
    made = case("llama")
    tokens, _, blocks = made.sequence(0, 70)
    with torch.inference_mode():
        for start, stop in ((0, 66), (66, 67), (67, 69)):
            assert made.decoder(tiny.step([tiny.chunk(tokens, start, stop, blocks)], logit_rows=[]), made.caches).shape == (0, 96)
    made.run((0, 69, 70))


def test_experts_touched(case: Callable[..., Case]) -> None:
    made = case("qwen")
    made.sequence(0, 40)
    made.run((0, 0, 12))
    fused = made.decoder.fused
    ids = [fused.layers[index].feed._more_routes.ids[:12] for index in range(2)]
    assert fused.experts_touched(12) == sum(len(set(chosen.flatten().tolist())) for chosen in ids) / 2
    assert fused.experts_touched(65) is None
    assert case("llama").decoder.fused.experts_touched(1) is None


def test_a_router_in_three_parts_loses_nothing() -> None:
    router = torch.randn(32, 256, generator=torch.Generator().manual_seed(0)) * 0.1
    parts = _three_parts(router)
    assert parts.dtype is torch.bfloat16 and parts.shape == (96, 256)
    assert (parts.view(3, 32, 256).double().sum(0) - router.double()).abs().max() < router.abs().max() * 2**-23


def test_shared_experts_lie_once_in_memory(case: Callable[..., Case]) -> None:
    """The module that loads and counts them sees the same numbers as before."""
    _, weights, _ = weights_of("glm")
    feed = case("glm").decoder.layers[1].feed_forward
    assert feed.gate_up.data.untyped_storage().data_ptr() == feed.shared.up.weight.data.untyped_storage().data_ptr()
    assert torch.equal(feed.gate_up.data, weights.experts(1, "gate", "up").data)
    assert torch.equal(feed.shared.down.weight.data, weights.matrix("layers.1.ffn.shared.down.weight").data)
