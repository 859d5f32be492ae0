"""The decoder's logits equal transformers' own for every family, however the tokens are cut into steps and the cache into blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from windlass.core.model import ModelSpec  # noqa: E402
from windlass.errors import BadInput, Impossible  # noqa: E402
from windlass.model.families import describe  # noqa: E402
from windlass.runtime.kernels.program import program  # noqa: E402
from windlass.runtime.kernels.step import BLOCK_TOKENS  # noqa: E402
from windlass.runtime.nn import Decoder  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore")]  # warnings are transformers'

BOUND = 1e-4
"""Logits have a spread of about one; both sides compute in fp32."""
LENGTHS = (37, 9, 21)
"""Three sequences: longer than every window, within a block, over a block's end."""

Schedule = list[list[tuple[int, int]]]
"""Steps; in each, (sequence, how many of its tokens come next)."""

WHOLE: Schedule = [[(0, 37), (1, 9), (2, 21)]]
ALONE: Schedule = [[(1, 9)], [(2, 21)], [(0, 37)]]
STEP_BY_STEP: Schedule = [[(0, 30), (1, 2), (2, 13)], *([(0, 1), (1, 1), (2, 1)],) * 7, [(2, 1)]]
# Chunks that end within blocks and at their ends, together with sequences that are at single tokens, and not always in order.
CHUNKED: Schedule = [[(0, 7)], [(1, 9), (0, 9)], [(0, 1), (2, 3)], [(2, 1), (0, 15)], [(0, 1), (2, 1)], [(2, 16), (0, 4)]]
SCHEDULES = {"whole": WHOLE, "alone": ALONE, "step by step": STEP_BY_STEP, "chunked": CHUNKED}
PATHS = ("reference", "native", "recorded")
"""Plain PyTorch, the compiled operations, and a program of them that is replayed."""


def ways_of(turn: int) -> dict[str, str]:
    """Schedule -> path that the family of this number takes besides `chunked`, which it takes by all: each in turn, so that every family has every
    schedule and every path, and every schedule goes every path with a third of the families."""
    return {schedule: PATHS[(turn + number) % 3] for number, schedule in enumerate(SCHEDULES) if schedule != "chunked"}


@pytest.fixture(params=["reference", "native"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Plain PyTorch, and the compiled operations."""
    if request.param == "reference":
        monkeypatch.setenv("WINDLASS_NO_NATIVE", "1")
    return request.param


class Recorded:
    """The decoder as a list of native operations on buffers that are refilled: recorded once, on rubbish, and replayed."""

    def __init__(self, decoder: Any, caches: Sequence[Any], tiny: Any) -> None:
        most = sum(LENGTHS) + 5
        self.step = tiny.step([tiny.chunk([0], 0, 1, [0] * 4)], padding=most)
        self.step = dataclasses.replace(self.step, blocks=torch.full((most, 4), 2**30, dtype=torch.int32))
        with program.record(self.step.counts[0:1]) as self.program:
            self.logits = decoder(self.step, caches)

    def __call__(self, step: Any) -> Any:
        for field in dataclasses.fields(step):
            to, source = getattr(self.step, field.name), getattr(step, field.name)
            if isinstance(source, torch.Tensor):
                to[tuple(slice(size) for size in source.shape)] = source
        self.program.run()
        return self.logits[: int(step.counts[2])].clone()


class Sequences:
    """Random tokens, and blocks for them taken from the cache in no order."""

    def __init__(self, decoder: Any, seed: int = 0) -> None:
        chance = torch.Generator().manual_seed(seed)
        # A model of sparse attention is exact up to what its indexer picks.
        self.lengths = [min(length, decoder.context_tokens) for length in LENGTHS]
        self.tokens = [torch.randint(0, decoder.spec.vocab_size, (length,), generator=chance).tolist() for length in self.lengths]
        needed = [-(-length // BLOCK_TOKENS) for length in self.lengths]
        self.num_blocks = sum(needed) + 3
        self.blocks = [part.tolist() for part in torch.randperm(self.num_blocks, generator=chance)[: sum(needed)].split(needed)]

    def steps(self, schedule: Schedule, tiny: Any) -> Iterator[list[tuple[int, Any]]]:
        done = [0] * len(self.lengths)
        for step in schedule:
            chunks = []
            for sequence, count in step:
                stop = min(done[sequence] + count, self.lengths[sequence])
                if stop > done[sequence]:
                    chunks.append((sequence, tiny.chunk(self.tokens[sequence], done[sequence], stop, self.blocks[sequence])))
                done[sequence] = stop
            if chunks:
                yield chunks
        assert done == self.lengths


def rubbish(caches: Sequence[Any]) -> None:
    """A slot that is read before it is written shows."""
    for cache in caches:
        cache.keys.normal_(std=50)
        if cache.values is not None:
            cache.values.normal_(std=50)


def served(
    decoder: Any, sequences: Sequences, schedule: Schedule, tiny: Any, dtype: Any = torch.float32, recorded: bool = False
) -> list[Any]:
    """Logits of every token of every sequence, through the cache."""
    caches = decoder.make_caches(sequences.num_blocks, dtype)
    rubbish(caches)
    forward = Recorded(decoder, caches, tiny) if recorded else partial(decoder, caches=caches)
    found: list[list[Any]] = [[] for _ in sequences.lengths]
    with torch.no_grad():
        for number, chunks in enumerate(sequences.steps(schedule, tiny)):
            step = tiny.step([chunk for _, chunk in chunks], padding=number % 3)
            logits = forward(step).split([chunk.stop - chunk.start for _, chunk in chunks])
            for (sequence, _), part in zip(chunks, logits, strict=True):
                found[sequence].append(part)
    return [torch.cat(parts) for parts in found]


def largest_difference(pair: Any, sequences: Sequences, found: list[Any]) -> float:
    expected = [pair.expected(tokens) for tokens in sequences.tokens]
    return max(float((one - other).abs().max()) for one, other in zip(expected, found, strict=True))


def check_served(pair: Any, tiny: Any, schedule: str, path: str) -> None:
    if path == "recorded" and not program.available():
        pytest.skip("nothing is compiled here")
    sequences = Sequences(pair.ours)
    with pytest.MonkeyPatch.context() as patch:
        if path == "reference":
            patch.setenv("WINDLASS_NO_NATIVE", "1")
        found = served(pair.ours, sequences, SCHEDULES[schedule], tiny, recorded=path == "recorded")
    assert largest_difference(pair, sequences, found) < BOUND


@pytest.mark.parametrize("way", PATHS)
def test_chunked(pair: Any, tiny: Any, way: str) -> None:
    """Chunks and single tokens together, by every path: nothing computes outside of operations that a replay repeats."""
    check_served(pair, tiny, "chunked", way)


@pytest.mark.parametrize("schedule", [schedule for schedule in SCHEDULES if schedule != "chunked"])
def test_served(name: str, pair: Any, tiny: Any, schedule: str) -> None:
    """Batches of unlike lengths, prefill whole, token by token, over blocks in no order."""
    check_served(pair, tiny, schedule, ways_of(tiny.names.index(name))[schedule])


def test_every_schedule_goes_every_path(tiny: Any) -> None:
    ways = [ways_of(turn) for turn in range(len(tiny.names))]
    assert len({(schedule, path) for way in ways for schedule, path in way.items()}) == 3 * len(PATHS)
    assert all(set(way.values()) == set(PATHS) for way in ways)


def test_without_a_cache(pair: Any, tiny: Any, path: str) -> None:
    """As in training and scoring: every sequence at once, each by itself."""
    sequences = Sequences(pair.ours)
    chunks = [tiny.chunk(tokens, 0, length) for tokens, length in zip(sequences.tokens, sequences.lengths, strict=True)]
    with torch.no_grad():
        logits = pair.ours(tiny.step(chunks, padding=2))
    assert largest_difference(pair, sequences, list(logits.split(sequences.lengths))) < BOUND


def test_the_comparison_would_notice(tiny: Any) -> None:
    """One token or one layer's weight changed is far beyond the bound."""
    pair = tiny.pair("glm4_moe")
    sequences = Sequences(pair.ours)
    found = served(pair.ours, sequences, WHOLE, tiny)
    sequences.tokens[2][3] += 1 if sequences.tokens[2][3] == 0 else -1
    assert largest_difference(pair, sequences, found) > 100 * BOUND


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_only_the_wanted_logits(tiny: Any, name: str, path: str) -> None:
    decoder = tiny.pair(name).ours
    tokens = list(range(20))
    with torch.no_grad():
        every = decoder(tiny.step([tiny.chunk(tokens, 0, 20)]))
        some = decoder(tiny.step([tiny.chunk(tokens, 0, 20)], logit_rows=[19, 0, 7], padding=1))
        hidden = decoder.forward_hidden(tiny.step([tiny.chunk(tokens, 0, 20)]))
    assert every.dtype == some.dtype == torch.float32
    torch.testing.assert_close(some, every[[19, 0, 7]])
    torch.testing.assert_close(decoder.logits(hidden), every)


@pytest.mark.parametrize("recorded", [False, True])
def test_a_chunk_of_which_no_logits_are_wanted(tiny: Any, path: str, recorded: bool) -> None:
    """As in the middle of a long prompt."""
    if recorded and not program.available():
        pytest.skip("nothing is compiled, or it is switched off")
    pair, tokens = tiny.pair("glm4_moe"), list(range(20))
    caches = pair.ours.make_caches(2, torch.float32)
    forward = Recorded(pair.ours, caches, tiny) if recorded else partial(pair.ours, caches=caches)
    with torch.no_grad():
        assert forward(tiny.step([tiny.chunk(tokens, 0, 13)], logit_rows=[])).shape == (0, 101)
        last = forward(tiny.step([tiny.chunk(tokens, 13, 20)], logit_rows=[6]))
    assert float((last - pair.expected(tokens)[-1:]).abs().max()) < BOUND


@pytest.mark.parametrize("name", ["glm4_moe", "gpt_oss", "glm4_moe_lite"])
def test_a_half_precision_cache_is_near(tiny: Any, name: str, path: str) -> None:
    """bf16 keys and values have 8 bits: 0.4 % of each."""
    pair = tiny.pair(name)
    sequences = Sequences(pair.ours)
    difference = largest_difference(pair, sequences, served(pair.ours, sequences, CHUNKED, tiny, torch.bfloat16))
    assert BOUND < difference < 0.1


def test_a_prefix_that_another_sequence_stored(tiny: Any, path: str) -> None:
    """Two sequences whose first block is the same share it; the second starts behind it."""
    pair = tiny.pair("qwen3")
    first = [token % 101 for token in range(3, 40)]
    second = first[:BLOCK_TOKENS] + [token % 101 for token in range(50, 70)]
    caches = pair.ours.make_caches(8, torch.float32)
    with torch.no_grad():
        pair.ours(tiny.step([tiny.chunk(first, 0, len(first), [5, 1, 3])]), caches)
        logits = pair.ours(tiny.step([tiny.chunk(second, BLOCK_TOKENS, len(second), [5, 0, 7])]), caches)
    assert float((logits - pair.expected(second)[BLOCK_TOKENS:]).abs().max()) < BOUND


def test_convolutions_are_planned_and_not_run(tiny: Any) -> None:
    spec: ModelSpec = describe(tiny.config("evo2"))
    with pytest.raises(Impossible, match="convolutions"):
        Decoder(spec, NoWeights())


class NoWeights:
    """Whatever is asked for, one number."""

    device, dtype = "cpu", torch.float32

    def matrix(self, *names: str) -> Any:
        return torch.zeros(1, 1)

    def vector(self, *names: str) -> Any:
        return torch.zeros(1)

    experts = expert_vectors = matrix


def test_sparse_attention_runs_as_far_as_it_is_exact(tiny: Any) -> None:
    decoder = tiny.pair("glm_moe_dsa").ours
    assert decoder.context_tokens == 16
    with pytest.raises(BadInput, match="17 tokens"):
        decoder(tiny.step([tiny.chunk(list(range(17)), 0, 17)]))
    with pytest.raises(Impossible, match="sparse attention"):
        Decoder(decoder.spec, NoWeights(), context_tokens=17)


def test_learned_positions_end(tiny: Any) -> None:
    spec = tiny.pair("gpt2").ours.spec
    with pytest.raises(Impossible, match="64"):
        Decoder(spec, NoWeights(), context_tokens=65)


def test_dense_weights_are_frozen_parameters(tiny: Any) -> None:
    decoder = tiny.pair("llama-tied").ours
    assert decoder.head is decoder.table
    assert not any(parameter.requires_grad for parameter in decoder.parameters())
    assert sum(parameter.numel() for parameter in decoder.parameters()) == sum(
        parameter.numel() for parameter in tiny.pair("llama-tied").theirs.parameters()
    )
