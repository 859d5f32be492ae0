"""Requests that an engine answers before it is ready: every kind of step runs once, so that no user waits for kernels to be compiled,
libraries to be loaded and graphs to be captured."""

from __future__ import annotations

from windlass.core.request import GREEDY, Sampling
from windlass.runtime.engine.protocol import Submit
from windlass.runtime.engine.schedule.scheduler import SchedulerLimits

PROMPTS = (2, 40, 80, 128, 200, 320, 500, 700, 1000, 1200, 1500, 1700, 2048, 4096, 8192)
"""Tokens: the kernels and the shape of their work differ between these."""
FEW_PROMPTS, SHORT_PROMPTS = (40,), (2,)
BEGUN = (20, 700)
"""Tokens of a prompt beyond a whole step: attention of prompts that have begun differs for few and for many of them."""
SAMPLED = Sampling(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, presence_penalty=0.1, seed=1)
NUM_TOKENS = 3
MEASURED_PROMPT, MEASURED_TOKENS = 24, 18


def warm_up_requests(limits: SchedulerLimits, num_tokens: int, *, few: bool = False, short: bool = False) -> list[list[Submit]]:
    """`few`: where weights are copied for every step, each prompt takes seconds; no more than those without which kernels would be missing.
    `short`: where they are read from disk besides, every prompt of some length reads all of them; kernels of prompts are compiled without one.

    In groups: a group is submitted when the one before it has a token, so that prompts are read beside decoding sequences."""
    most = min(limits.max_step_tokens, limits.longest_sequence - NUM_TOKENS)
    prompts = SHORT_PROMPTS if short else FEW_PROMPTS if few else PROMPTS
    lengths = sorted({min(length, most) for length in prompts if length <= limits.max_step_tokens})
    lengths += [
        length
        for length in (limits.max_step_tokens + rest for rest in BEGUN)
        if length <= limits.longest_sequence - NUM_TOKENS and not short
    ]
    greedy = [_request(number, length, GREEDY, num_tokens) for number, length in enumerate(lengths) if length > 0]
    usual = min(SHORT_PROMPTS[0] if short else 64, most)
    plain, sampled = (_request(len(lengths) + i, usual, how, num_tokens) for i, how in enumerate((Sampling(), SAMPLED)))
    return [*([request] for request in greedy), [plain], [sampled]] if most > 0 else []


def measured_request(number: int, limits: SchedulerLimits, num_tokens: int) -> Submit | None:
    """Greedy, of so many tokens that the median of its steps' times can be had; None: no sequence may be so long."""
    if limits.longest_sequence < MEASURED_PROMPT + MEASURED_TOKENS:
        return None
    tokens = [(number + 5 * place) % num_tokens for place in range(MEASURED_PROMPT)]
    return Submit(id=-1 - number, token_ids=tokens, sampling=GREEDY, max_tokens=MEASURED_TOKENS)


def _request(number: int, length: int, sampling: Sampling, num_tokens: int) -> Submit:
    """No two begin alike, so that nothing of one is found in the prefix cache."""
    tokens = [(number + 7 * place) % num_tokens for place in range(length)]
    return Submit(id=-1 - number, token_ids=tokens, sampling=sampling, max_tokens=NUM_TOKENS, logprobs=None if number % 4 else 2)
