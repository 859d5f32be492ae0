"""Experts in host memory beside a GPU, on a CPU: kernels are stand-ins, the CPU's part is real. Whatever is guessed, logits keep their bits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
HERE = str(Path(__file__).parents[1])
if HERE not in sys.path:
    sys.path.insert(0, HERE)

from stand_ins_offload import BEGUN, FORESEEN, GUESSED, MISSES, RIGHT, OffloadStandIns  # noqa: E402
from tiny_fused import GLM, Lively, Widened  # noqa: E402

from windlass.core.scheme import scheme  # noqa: E402
from windlass.core.tiers.device import DeviceSplit  # noqa: E402
from windlass.model.families import describe, rules  # noqa: E402
from windlass.runtime.kernels.step import BLOCK_TOKENS  # noqa: E402
from windlass.runtime.nn import Decoder  # noqa: E402
from windlass.runtime.nn.fused.feed_forward import OffloadedFeed  # noqa: E402
from windlass.runtime.offload.device.share import library  # noqa: E402
from windlass.runtime.offload.device.weights import DeviceTier, DeviceTieredWeights  # noqa: E402

pytestmark = pytest.mark.cpu

EXPERTS, LAYERS = 32, 4
SPEC = describe(GLM | {"num_hidden_layers": LAYERS + 1, "moe_intermediate_size": 384, "intermediate_size": 384})
TOKENS = torch.randint(0, 96, (9, 90), generator=torch.Generator().manual_seed(1)).tolist()
STEPS: tuple[tuple[tuple[int, int, int], ...], ...] = (
    ((0, 0, 5),),
    ((0, 5, 6),),
    ((0, 6, 7),),
    ((1, 0, 70),),  # whole layers, in the same slots
    ((0, 7, 8),),
    ((1, 70, 71), (0, 8, 9)),
    tuple((number, 0, 1) for number in range(2, 9)),
    ((2, 1, 20),),  # more rows than are guessed for
    ((0, 9, 10),),
)
"""Sequence, first and last token of each chunk of a step."""


def weights() -> Lively:
    return Lively(SPEC, rules(SPEC), quant=scheme("int4", 128), dtype=torch.bfloat16, tiled=True)


class Offloaded:
    def __init__(self, patch: pytest.MonkeyPatch, tiny: Any, on_device: int, share: float, *, guesses: bool = True) -> None:
        source = DeviceTieredWeights(
            weights(), DeviceSplit(LAYERS, EXPERTS, on_device, has_shared=True, share=share), first_layer=1
        )
        self.decoder = Decoder(SPEC, source)
        self.tier: DeviceTier = source.finish()
        self.tiny, self.memory = tiny, self.tier._memory
        self.stand_ins = OffloadStandIns(torch.float32, self.memory.mailbox, self.tier.share)
        self.stand_ins.install(patch)
        patch.setattr(OffloadedFeed, "guesses", guesses)
        self.caches = self.decoder.make_caches(64, torch.float32)

    def run(self, chunks: tuple[tuple[int, int, int], ...]) -> Any:
        def blocks(number: int) -> list[int]:
            return list(range(number * 7, number * 7 + -(-90 // BLOCK_TOKENS)))

        step = self.tiny.step([self.tiny.chunk(TOKENS[number], first, last, blocks(number)) for number, first, last in chunks])
        with torch.inference_mode():
            return self.decoder(step, self.caches).clone()

    def totals(self) -> list[int]:
        return self.memory.totals.tolist()

    def close(self) -> None:
        self.tier.close()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tiny: Any) -> Iterator[Callable[..., Offloaded]]:
    made: list[Offloaded] = []

    def one(*given: Any, **named: Any) -> Offloaded:
        if library() is None:
            pytest.skip("no compiler")
        made.append(Offloaded(monkeypatch, tiny, *given, **named))
        return made[-1]

    yield one
    for each in made:
        each.close()


def never(chosen: Any) -> None:
    """Other experts than would be right: all rows guess the same ones, in another order."""
    chosen.copy_((chosen + 1) % EXPERTS)


def anything(chosen: Any) -> None:
    chosen.random_(0, EXPERTS)


@pytest.mark.parametrize(("on_device", "share"), [(20, 0.6), (0, 0.4), (24, 0.0), (24, 1.0), (31, 0.6), (30, 0.4)])
def test_the_same_bits_whatever_is_guessed(make: Callable[..., Offloaded], on_device: int, share: float) -> None:
    """Of an expert the CPU computes nothing, a part or everything. 31 on the device: no room for guesses; 30: for one."""
    plain = make(on_device, share, guesses=False)
    expected = [plain.run(chunks) for chunks in STEPS]
    assert plain.totals()[GUESSED] == plain.totals()[FORESEEN] == plain.stand_ins.num_ahead == 0
    for spoil in (None, never, anything):
        guessing = make(on_device, share)
        if spoil is not None:
            guessing.stand_ins.spoil = spoil
        for chunks, logits in zip(STEPS, expected, strict=True):
            assert torch.equal(guessing.run(chunks), logits), (spoil, chunks)
        totals = guessing.totals()
        assert totals[:2] == plain.totals()[:2], "the same experts are missing"
        if on_device == 31:
            assert totals[GUESSED] == 0
            continue
        assert totals[GUESSED] > 0 or spoil is anything  # which may be on the device by chance
        assert totals[RIGHT] <= totals[GUESSED] and totals[FORESEEN] <= totals[MISSES]
        assert totals[BEGUN] == (totals[GUESSED] - totals[RIGHT] if share < 1 else 0)
        saved = plain.stand_ins.num_fetched - guessing.stand_ins.num_fetched
        if share == 1:
            assert saved == guessing.stand_ins.num_ahead == 0
        else:
            assert saved == totals[RIGHT] and guessing.stand_ins.num_ahead == totals[GUESSED]


def test_as_the_model_is(make: Callable[..., Offloaded]) -> None:
    """Against float64; what the CPU gets is rounded to bf16."""
    exact = Decoder(SPEC, Widened(weights()))  # type: ignore[arg-type]
    made = make(12, 0.6)
    with torch.inference_mode():
        expected = exact(made.tiny.step([made.tiny.chunk(TOKENS[0], 0, 10)]))
    found = torch.cat([made.run(chunks) for chunks in (STEPS[0], STEPS[1], STEPS[2], STEPS[4])])
    errors = (found.double() - expected[:8]).norm(dim=-1) / expected[:8].norm(dim=-1)
    assert errors.median() < 0.05, errors  # near ties between experts stand out


def test_most_are_guessed_with_weights_as_they_are(make: Callable[..., Offloaded]) -> None:
    """Chance would be 4 of 32. Norms of these weights differ a lot from layer to layer: their quotient must be right."""
    made = make(8, 0.5)
    for chunks in STEPS[:3] * 3:
        made.run(chunks)
    totals = made.totals()
    assert totals[RIGHT] > totals[GUESSED] / 3, totals


def test_a_layer_that_misses_nothing_still_tells(make: Callable[..., Offloaded]) -> None:
    """All experts but two are on the device: most layers ask nothing, and the next layer's guess is told all the same."""
    made = make(30, 0.5)
    for chunks in STEPS[:3] * 4:
        made.run(chunks)
    assert made.stand_ins.asked_in_vain
    state = made.memory.state
    assert int(state[4]) == 8 * (LAYERS - 1), "one guess for each layer but the first, in each step of few rows"


def test_experts_that_move_between_steps(make: Callable[..., Offloaded]) -> None:
    """As a swap leaves tables and memory. The guess of the last step says nothing of where experts are now."""
    found: list[list[Any]] = []
    for guesses in (False, True):
        made = make(20, 0.6, guesses=guesses)
        found.append([])
        for number, chunks in enumerate(STEPS[:3] * 3):
            found[-1].append(made.run(chunks))
            for layer in range(LAYERS):
                _swap(made, layer, number)
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert made.totals()[RIGHT] > 0


def _swap(made: Offloaded, layer: int, number: int) -> None:
    """Of an expert on the device and one in host memory."""
    memory = made.memory
    table, whole, host = memory.table[layer], memory.whole_table[layer], memory.host[layer]
    here = [expert for expert in range(EXPERTS) if table[expert] >= 0][number % 20]
    away = [expert for expert in range(EXPERTS) if table[expert] < 0][number % 12]
    slot, place = int(table[here]), -1 - int(table[away])
    mine = [part.data[slot].clone() for part in (memory.slots.gate_up, memory.slots.down)]
    memory.slots.gate_up.data[slot] = host.gate_up[place]
    memory.slots.down.data[slot] = torch.cat((host.down_share[place], host.down[place]), dim=1)
    host.put(place, *mine)
    table[here], table[away] = -1 - place, slot
    whole[here], whole[away] = int(whole[away]), slot
