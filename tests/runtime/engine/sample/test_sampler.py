from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.request import GREEDY, Sampling
from windlass.runtime.engine.sample.cpu import draw_row
from windlass.runtime.engine.sample.filters import Filters, draw
from windlass.runtime.engine.sample.penalties import TokenCounts
from windlass.runtime.engine.sample.rng import uniform
from windlass.runtime.engine.sample.sampler import Sampler

pytestmark = pytest.mark.cpu


# --- the filters, as plainly as they can be said -----------------------------------------------------------------------


def kept(logits: list[float], top_k: int | None, top_p: float, min_p: float) -> dict[int, float] | None:
    """Token -> probability; None where rounding could decide (a test cannot say who is right)."""
    best = max(logits)
    weights = {token: math.exp(value - best) for token, value in enumerate(logits)}
    weights = {token: weight for token, weight in weights.items() if not min_p or weight >= min_p * (1 - 1e-9)}
    if any(min_p and abs(weight / min_p - 1) < 1e-5 for weight in weights.values()):
        return None
    order = sorted(weights, key=lambda token: (-logits[token], token))[:top_k]
    total = sum(weights[token] for token in order)
    chosen: dict[int, float] = {}
    mass = 0.0
    for token in order:
        if top_p < 1 and abs(mass - top_p * total) < 1e-5 * total:
            return None
        if top_p < 1 and mass >= top_p * total:
            break
        chosen[token] = weights[token]
        mass += weights[token]
    return {token: weight / mass for token, weight in chosen.items()}


def pick(probabilities: dict[int, float], chance: float) -> int | None:
    """By running sums in the order of ids; None at a border."""
    mass = 0.0
    for token in sorted(probabilities):
        mass += probabilities[token]
        if abs(mass - chance) < 1e-6:
            return None
        if mass > chance:
            return token
    return None


def torch_draw(logits: list[float], top_k: int | None, top_p: float, min_p: float, chance: float) -> int:
    filters = Filters(torch.tensor([top_k or len(logits)]), torch.tensor([top_p], dtype=torch.float64), torch.tensor([min_p]))
    return int(draw(torch.tensor([logits]), filters, torch.tensor([chance], dtype=torch.float64))[0])


def check_draws(logits: list[float], top_k: int | None, top_p: float, min_p: float, chances: list[float]) -> None:
    top_k = min(top_k, len(logits)) if top_k else None
    expected = kept(logits, top_k, top_p, min_p)
    for chance in chances if expected else []:
        wanted = pick(expected or {}, chance)
        if wanted is not None:
            assert draw_row(np.array(logits, np.float32), top_k, top_p, min_p, chance) == wanted
            assert torch_draw(logits, top_k, top_p, min_p, chance) == wanted


LOGITS = st.lists(st.integers(-12, 12).map(lambda value: value / 2), min_size=1, max_size=40)
"""On a coarse grid, so that equals are common."""
CHANCES = [index / 17 for index in range(17)] + [1 - 2**-50]


@given(LOGITS, st.none() | st.integers(1, 45), st.just(1.0) | st.floats(0.05, 0.99), st.just(0.0) | st.floats(0.001, 0.9))
def test_filters_leave_what_the_plain_ones_leave(logits: list[float], top_k: int | None, top_p: float, min_p: float) -> None:
    check_draws(logits, top_k, top_p, min_p, CHANCES)


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 4.0])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(None, 0.9, 0.0), (None, 0.999, 0.0), (7, 0.9, 0.0), (200, 1.0, 0.0), (3000, 0.8, 0.0), (None, 0.9, 0.01), (None, 1.0, 0.2)],
)
def test_large_vocabularies_flat_and_steep(spread: float, top_k: int | None, top_p: float, min_p: float) -> None:
    """Flat ones need more candidates than are looked at first; rounded to bf16 they have equals everywhere."""
    values = torch.randn(6000, generator=torch.Generator().manual_seed(1)) * spread
    check_draws(values.bfloat16().float().tolist(), top_k, top_p, min_p, CHANCES[::4])


def test_rows_of_a_batch_do_not_mix() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, 700, generator=generator) * 2
    top_k, top_p, min_p = [700, 5, 700, 50, 700], [1.0, 1.0, 0.7, 0.5, 1.0], [0.0, 0.0, 0.0, 0.1, 0.3]
    filters = Filters(torch.tensor(top_k), torch.tensor(top_p, dtype=torch.float64), torch.tensor(min_p))
    for chance in CHANCES:
        together = draw(logits, filters, torch.full((5,), chance, dtype=torch.float64)).tolist()
        alone = [draw_row(logits[row].numpy(), top_k[row], top_p[row], min_p[row], chance) for row in range(5)]
        assert together == alone


# --- randomness ------------------------------------------------------------------------------------------------------


def test_uniforms_are_uniform_and_unrelated() -> None:
    values = np.array([[uniform(seed, index) for index in range(200)] for seed in range(200)])
    assert values.min() >= 0
    assert values.max() < 1
    counts = np.histogram(values, bins=50, range=(0, 1))[0]
    assert ((counts - 800) ** 2 / 800).sum() < 100  # chi-squared, 49 degrees of freedom: 1 in 100,000
    for other in (values[1:, :], np.roll(values, 1, axis=1)[1:, :]):
        assert abs(np.corrcoef(values[:-1].ravel(), other.ravel())[0, 1]) < 0.03
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(seed=1), Sampling(temperature=0.6, seed=2), Sampling(top_k=5, seed=3), Sampling(top_p=0.7, seed=4),
        Sampling(min_p=0.1, seed=5), Sampling(temperature=1.5, top_k=20, top_p=0.9, min_p=0.02, seed=6),
    ],
)  # fmt: skip
def test_tokens_come_as_often_as_they_should(sampling: Sampling) -> None:
    logits = torch.randn(1, 60, generator=torch.Generator().manual_seed(7)) * 2
    sampler = Sampler(50)
    drawing = sampler.new_state(sampling, [])
    drawn: Counter[int] = Counter()
    num_draws = 3000
    for _ in range(num_draws):
        (token,) = sampler.sample(logits, [drawing])
        assert token is not None
        drawing.record(token)
        drawn[token] += 1
    scaled = (logits[0, :50] / sampling.temperature).tolist()
    expected = kept(scaled, sampling.top_k, sampling.top_p, sampling.min_p)
    assert expected is not None
    assert set(drawn) <= set(expected)
    common = {token: chance * num_draws for token, chance in expected.items() if chance * num_draws >= 5}
    rare = max(num_draws - sum(common.values()), 1e-9)
    squares = sum((drawn[token] - wanted) ** 2 / wanted for token, wanted in common.items())
    squares += (num_draws - sum(drawn[token] for token in common) - rare) ** 2 / max(rare, 5.0)
    freedom = len(common)
    assert squares < freedom + 5 * math.sqrt(2 * freedom) + 5


def test_a_seed_gives_the_same_tokens_whatever_else_runs() -> None:
    sampler = Sampler(300)
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(2))
    others = [GREEDY, Sampling(), Sampling(top_k=3), Sampling(top_p=0.5), Sampling(repetition_penalty=1.3)]

    def tokens(companions: list[Sampling], place: int) -> list[int | None]:
        mine = sampler.new_state(Sampling(temperature=0.8, top_p=0.95, seed=42), [])
        found: list[int | None] = []
        for step in range(6):
            drawings = [sampler.new_state(sampling, [1, 2]) for sampling in companions]
            drawings.insert(place, mine)
            rows = torch.stack([logits[step] if drawing is mine else logits[-1] for drawing in drawings])
            found.append(sampler.sample(rows, drawings)[place])
            mine.record(found[-1] or 0)
        return found

    alone = tokens([], 0)
    assert tokens(others, 3) == alone
    assert tokens(others[:2], 2) == alone
    assert len(set(alone)) > 1


def test_without_a_seed_draws_differ() -> None:
    sampler = Sampler(1000)
    logits = torch.zeros(1, 1000)
    assert len({sampler.sample(logits, [sampler.new_state(Sampling(), [])])[0] for _ in range(20)}) > 10


# --- greedy, padding, failure ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_first_of_equals_and_never_padding(dtype: torch.dtype) -> None:
    logits = torch.zeros(3, 12, dtype=dtype)
    logits[0, [4, 7]] = 5
    logits[1, 11] = 9  # padding
    logits[2, 3] = 1
    sampler = Sampler(10)
    assert sampler.sample(logits, [sampler.new_state(GREEDY, [])] * 3) == [4, 0, 3]
    assert sampler.sample(logits, [sampler.new_state(Sampling(top_k=1), [])] * 3) == [4, 0, 3]
    drawn = {sampler.sample(logits[1:2], [sampler.new_state(Sampling(seed=seed), [])])[0] for seed in range(300)}
    assert drawn == set(range(10))


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(top_p=0.5), Sampling(temperature=0.0, presence_penalty=1.0)])
def test_logits_that_are_no_numbers_are_noticed(broken: float, sampling: Sampling) -> None:
    sampler = Sampler(10)
    logits = torch.zeros(2, 10)
    logits[1, 5] = broken
    sound, failed = sampler.sample(logits, [sampler.new_state(sampling, []) for _ in range(2)])
    assert sound is not None
    assert failed is None


HUGE = [
    (Sampling(temperature=1e-4, seed=1), 1e37),
    (Sampling(temperature=1e-4, top_k=3, seed=1), 1e37),
    (Sampling(temperature=1e-4, top_p=0.5, seed=1), 1e37),
    (Sampling(temperature=0.0, repetition_penalty=0.01), 1e37),
    (Sampling(repetition_penalty=0.01, min_p=0.1, seed=1), 1e37),
    (Sampling(seed=1), -math.inf),
    (Sampling(top_k=2, top_p=0.5, seed=1), -math.inf),
]


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize(("sampling", "value"), HUGE)
def test_what_is_no_number_after_penalties_and_temperature_fails_its_row_only(sampling: Sampling, value: float) -> None:
    sampler = Sampler(10)
    logits = torch.zeros(2, 10)
    logits[1] = value
    drawings = [sampler.new_state(sampling, [4]) for _ in range(2)]
    sound, failed = sampler.sample(logits, drawings)
    assert sound is not None
    assert failed is None


@pytest.mark.parametrize(("sampling", "value"), HUGE)
def test_the_same_where_a_device_draws(sampling: Sampling, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.runtime.engine.sample.sampler._on_host", lambda _: False)
    test_what_is_no_number_after_penalties_and_temperature_fails_its_row_only(sampling, value)


# --- penalties and bias ----------------------------------------------------------------------------------------------


def penalized(logits: list[float], sampling: Sampling, prompt: list[int], output: list[int]) -> list[float]:
    found = list(logits)
    for token, bias in sampling.logit_bias.items():
        if token < len(found):
            found[token] += bias
    for token in set(prompt + output):
        penalty = sampling.repetition_penalty
        found[token] = found[token] / penalty if found[token] > 0 else found[token] * penalty
    for token in set(output):
        found[token] -= sampling.frequency_penalty * output.count(token) + sampling.presence_penalty
    return found


TOKENS = st.lists(st.integers(0, 19), max_size=30)


@given(
    st.lists(st.floats(-5, 5), min_size=20, max_size=20), TOKENS, TOKENS,
    st.sampled_from([0.5, 1.0, 1.3]), st.sampled_from([-1.0, 0.0, 2.0]), st.sampled_from([-0.5, 0.0, 0.7]),
    st.dictionaries(st.integers(0, 25), st.floats(-100, 100), max_size=4),
)  # fmt: skip
def test_penalties_are_the_plain_ones(
    logits: list[float], prompt: list[int], output: list[int], repetition: float, presence: float, frequency: float, bias: dict[int, float]
) -> None:  # fmt: skip
    """Seen through what is drawn: greedily, with everything else switched off, beside a row without penalties."""
    sampling = Sampling(
        temperature=0.0, repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency, logit_bias=bias
    )
    sampler = Sampler(20)
    drawing = sampler.new_state(sampling, prompt)
    for token in output:
        drawing.record(token)
    rows = torch.tensor([logits, logits])
    found = sampler.sample(rows, [sampler.new_state(GREEDY, []), drawing])
    expected = penalized(rows[0].tolist(), sampling, prompt, output)
    assert found[1] is not None
    assert expected[found[1]] == pytest.approx(max(expected), abs=1e-4)
    assert found[0] == int(np.argmax(rows[0].numpy()))
    assert rows[0].tolist() == rows[1].tolist()  # the model's logits stay as they were


def test_counts_grow_with_the_output() -> None:
    counts = TokenCounts([3, 3, 5])
    for token in [5, *range(100, 160), 5]:
        counts.add(token)
    found = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert found == {3: 0.0, 5: 2.0} | dict.fromkeys(range(100, 160), 1.0)


def test_a_bias_can_force_and_forbid() -> None:
    sampler = Sampler(50)
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    force, forbid = Sampling(logit_bias={17: 100.0}), Sampling(logit_bias=dict.fromkeys(range(49), -100.0))
    assert sampler.sample(logits, [sampler.new_state(force, [])]) == [17]
    assert sampler.sample(logits, [sampler.new_state(forbid, [])]) == [49]


# --- log-probabilities -----------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_model_without_padding() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(5)) * 3
    logits[:, 30:] = 50  # padding
    found = Sampler(30).logprobs(logits, [4, 0, 29], top=5)
    expected = logits[:, :30].double().log_softmax(-1)
    for row, (token, entry) in enumerate(zip([4, 0, 29], found, strict=True)):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(expected[row, token]), abs=1e-5)
        assert entry.rank == int((expected[row] > expected[row, token]).sum()) + 1
        best = expected[row].sort(descending=True)
        assert [top.token_id for top in entry.top] == best.indices[:5].tolist()
        assert [top.logprob for top in entry.top] == pytest.approx(best.values[:5].tolist(), abs=1e-5)
        assert [top.rank for top in entry.top] == [1, 2, 3, 4, 5]


def test_more_top_logprobs_than_tokens() -> None:
    (found,) = Sampler(3).logprobs(torch.tensor([[1.0, 2.0, 2.0, 9.0]]), [0], top=20)
    assert [top.token_id for top in found.top] == [1, 2, 0]
