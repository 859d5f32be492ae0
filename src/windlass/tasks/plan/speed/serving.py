"""From the times of single steps to the figures of a plan: decode, prompts, sustained output, bursts of requests."""

from __future__ import annotations

from math import exp, log
from typing import NamedTuple

from windlass.core.plan import Speed
from windlass.tasks.plan.shards import touched_share
from windlass.tasks.plan.speed.interval import Kind, kind_of, spread_of
from windlass.tasks.plan.speed.roofline import SpeedModel
from windlass.tasks.plan.speed.step import StepTime

EULER = 0.577
CHAT_SHAPE, CHAT_SCALE = 0.85, 1 / 1.088
"""Answers of chat logs as a Weibull distribution, scale in mean lengths (1 / Gamma(1 + 1 / shape)): of 1,000 answers of 200 tokens on average the
longest has about 2,000, as in the ShareGPT set that serving benchmarks draw from."""
DRAIN_POINTS = 16


class Pace(NamedTuple):
    """One replica with as many sequences as run at once."""

    batch: int
    rate: float
    """Output tokens per second while decoding."""
    step_seconds: float
    prompt_rate: float
    """Prompt tokens per second, with short prompts sharing a step."""
    first_seconds: float
    """Of one prompt alone, to its first token."""
    chunk: int
    """Prompt tokens of a step that reads prompts."""
    worst: StepTime
    """The slowest stage of a step."""


def pace(times: SpeedModel) -> Pace:
    work = times.model.workload
    batch = times.model.sequences(times.layout)
    rate, seconds, worst = times.decode(batch, work.mean_decode_context)
    prompt = work.computed_prompt_tokens
    alone, _ = times.prefill(prompt, 1)
    prompts = _together(min(batch, times.step_tokens // prompt), alone / work.new_tokens, 1 / rate)
    together, slowest_stage = times.prefill(prompt, prompts)
    through = (slowest_stage if batch >= times.layout.pp > 1 else together) / prompts
    one = seconds if batch == 1 else times.decode(1, work.prompt_tokens)[1]
    chunk = min(prompt * prompts, times.step_tokens)
    return Pace(batch, rate, seconds, work.prompt_tokens / through, alone + one, chunk, worst)


def sustained_rate(found: Pace, prompt: int, new: int, rides: float) -> float:
    """Output tokens per second of one replica in a steady stream: every `new` tokens of output need `prompt` tokens of prompt."""
    return 1 / (1 / found.rate + prompt / new / found.prompt_rate - saved_by_riding(found, prompt, new, rides))


def saved_by_riding(found: Pace, prompt: int, new: int, rides: float) -> float:
    """Seconds per output token: in an engine that mixes, sequences that decode ride along in steps that read prompts, and get `rides` of a token
    there for nothing."""
    return rides * prompt / new * min(found.batch / found.chunk, found.rate / found.prompt_rate) / found.rate


def _together(most: int, prompt_seconds: float, token_seconds: float) -> int:
    """Prompts that share a step: as many as fit in where steps are mostly prompts, one where they are mostly decoding and prompts come singly."""
    return max(1, round(most * prompt_seconds / (prompt_seconds + token_seconds)))


def speed(times: SpeedModel) -> Speed:
    work, found = times.model.workload, pace(times)
    ceiling, _, _ = times.decode(found.batch, 0, lossless=True)
    busy = min(times.layout.dp, work.concurrency)  # one sequence keeps only one replica busy
    sustained = (
        _burst(times, found) if work.requests else sustained_rate(found, work.prompt_tokens, work.new_tokens, times.engine.rides)
    )
    experts = times.spec.experts
    decode, prefill, sustained = found.rate * busy, found.prompt_rate * busy, sustained * busy
    many = Kind.BURST if work.requests and work.spread else Kind.SERVING
    return Speed(
        decode_tokens_per_second=round(decode, 3),
        decode_ceiling_tokens_per_second=round(max(ceiling * busy, decode), 3),
        prefill_tokens_per_second=round(prefill, 1),
        sustained_tokens_per_second=round(sustained, 3),
        time_to_first_token_seconds=round(found.first_seconds, 6),
        bound_by=found.worst.bound_by,
        step_seconds=found.step_seconds,
        concurrency=work.concurrency,
        decode_bytes_per_step=round(_step_bytes(times, found.batch)),
        distinct_experts=round(touched_share(times.spec, found.batch) * experts.num_experts, 1) if experts else 0.0,
        breakdown={name: value for name, value in found.worst.parts.items() if value},
        decode_range=spread_of(times, kind_of(times, "decode")).around(decode, ceiling * busy),
        prefill_range=spread_of(times, kind_of(times, "prompt")).around(prefill),
        sustained_range=spread_of(times, many if found.batch > 1 else kind_of(times, "decode")).around(sustained),
        basis=spread_of(times, kind_of(times, "decode")).basis,
    )


def _burst(times: SpeedModel, found: Pace) -> float:
    """Output tokens per second of one replica over a burst: all requests arrive at once, and it ends when the last one does.

    Answers of equal length end together. Of answers as in a chat log a few are many times the mean, so the batch shrinks while those are finished.
    """
    work = times.model.workload
    requests = max(work.requests // times.layout.dp, 1)
    running = min(found.batch, requests)
    prompts = requests * work.prompt_tokens / found.prompt_rate
    if not work.spread:
        waves, rest = divmod(requests, running)
        decoding = work.new_tokens * (waves * _step(times, running) + (_step(times, rest) if rest else 0.0))
    else:
        decoding = work.new_tokens * ((requests - running) / running * _step(times, running) + _drain(times, running))
    riding = (
        (requests - running) * work.new_tokens * saved_by_riding(found, work.prompt_tokens, work.new_tokens, times.engine.rides)
    )
    return requests * work.new_tokens / (prompts + decoding - riding)


def _drain(times: SpeedModel, running: int) -> float:
    """Mean answer lengths until the last of `running` sequences ends: the integral of the step over a batch that decays."""
    end = CHAT_SCALE * (log(running) + EULER) ** (1 / CHAT_SHAPE) if running > 1 else 1.0
    middles = [(index + 0.5) / DRAIN_POINTS * end for index in range(DRAIN_POINTS)]
    left = [max(round(running * exp(-((point / CHAT_SCALE) ** CHAT_SHAPE))), 1) for point in middles]
    return sum(_step(times, batch) for batch in left) * end / DRAIN_POINTS


def _step(times: SpeedModel, batch: int) -> float:
    work = times.model.workload
    return batch / times.decode(batch, work.mean_decode_context)[0]


def _step_bytes(times: SpeedModel, batch: int) -> float:
    """Weights and KV cache that one replica reads per step, over all its devices."""
    total, context = 0.0, round(times.model.workload.mean_decode_context)
    share = touched_share(times.spec, batch)
    for slot in times.fit.slots:
        total += times.step_bytes(slot, share, context, batch)
    return total
