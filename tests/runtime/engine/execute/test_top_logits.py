"""A few of the largest logits are enough for what is drawn, to the token; and where they are not, all are asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from windlass.core.request import GREEDY, Sampling  # noqa: E402
from windlass.runtime.engine.execute.top_logits import candidates_of  # noqa: E402
from windlass.runtime.engine.sample.sampler import Sampler  # noqa: E402

pytestmark = pytest.mark.cpu

TOKENS = 300


def asked(sampling: Sampling, *, guide: Any = None, **submit: Any) -> SimpleNamespace:
    drawing = Sampler(TOKENS).new_state(sampling, [1, 2], guide)
    return SimpleNamespace(
        sampling_state=drawing, submit=SimpleNamespace(**{"logprobs": None, "prompt_logprobs": None, **submit})
    )


def chunk(request: SimpleNamespace, num_logits: int = 1) -> Any:
    return SimpleNamespace(sequence=SimpleNamespace(request=request), num_logits=num_logits)


def test_how_many_are_wanted() -> None:
    greedy, some = asked(GREEDY), asked(Sampling(temperature=1.0, top_k=40, top_p=0.9))
    everything = [
        asked(Sampling(temperature=1.0)),
        asked(Sampling(temperature=1.0, top_p=0.5)),
        asked(Sampling(temperature=1.0, top_k=40, presence_penalty=0.5)),
        asked(Sampling(temperature=0.0, repetition_penalty=1.2)),
        asked(Sampling(temperature=0.0, logit_bias={7: 1.0})),
        asked(GREEDY, logprobs=0),
        asked(GREEDY, prompt_logprobs=2),
        asked(GREEDY, guide=SimpleNamespace()),
    ]
    assert candidates_of([chunk(greedy)]) == candidates_of([chunk(greedy), chunk(greedy)]) == 1
    assert candidates_of([chunk(greedy), chunk(some)]) == 40
    for one in everything:
        assert candidates_of([chunk(one)]) == candidates_of([chunk(greedy), chunk(one), chunk(some)]) == 0
        assert candidates_of([chunk(greedy), chunk(one, num_logits=0)]) == 1  # its prompt is still being read
    assert candidates_of([]) == 0


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    top_k=st.sampled_from([1, 2, 7, 64]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 10**6),
)


@given(samplings, st.integers(0, 99), st.sampled_from([1.0, 4.0]), st.integers(1, 3))
def test_the_same_tokens_are_drawn(sampling: Sampling, seed: int, digits: float, ranks: int) -> None:
    """Of logits with many equals too. Every rank tells of its own largest, and the first has all of its own."""
    whole = torch.randn(TOKENS, generator=torch.Generator().manual_seed(seed)).mul(digits).round() / digits
    request = asked(sampling)
    count = candidates_of([chunk(request)])
    assert count in (1, sampling.top_k)
    known = torch.full_like(whole, -torch.inf)
    for rank, part in enumerate(whole.chunk(ranks)):
        first = rank * len(whole.chunk(ranks)[0])
        ids = torch.argsort(part, descending=True, stable=True)[: count if rank else None] + first
        known[ids] = whole[ids]
    drawn = [Sampler(TOKENS).sample(row[None], [asked(sampling).sampling_state]) for row in (whole, known)]
    assert drawn[0] == drawn[1]
