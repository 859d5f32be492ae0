"""Prompts and decoding on machines of their own: how many of each a rate of requests needs, and what passing the KV cache on costs. Pure.

A *unit* is what an engine runs one server on: the hardware of `--on` for decoding, of `--prefill-on` for prompts. Both hold all weights. A prompt
is read in a prefill unit, its KV cache goes over the network to a decode unit, and tokens come from there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf

import msgspec

from windlass.core.hardware.defaults import network_bandwidth
from windlass.core.hardware.spec import Hardware
from windlass.core.plan import DisaggregatedPlan, PoolPlan
from windlass.errors import BadInput, Impossible
from windlass.tasks.plan.engines.load import NAMES, engine
from windlass.tasks.plan.inference.candidates import Candidate, most_sequences
from windlass.tasks.plan.inference.search.best import search
from windlass.tasks.plan.inference.search.request import LoadRequest, PlanRequest
from windlass.tasks.plan.inference.sites import whole_site
from windlass.tasks.plan.speed.load import STEPS, ServedLoad
from windlass.tasks.plan.speed.serving import pace

LINK_SHARE = 0.8
"""Of the network's specification that large transfers reach (as collectives do, tasks/plan/engines)."""
DEFAULT_ENGINE = "vllm"


@dataclass(frozen=True)
class PrefillUnit:
    """One server that only reads prompts, one after the other or several in a step."""

    seconds: float
    """Of the server, per prompt."""
    first_seconds: float
    """Of a prompt that nobody is before."""

    def wait(self, rate: float) -> float:
        """Mean wait before a prompt's turn: Pollaczek-Khinchine for exponential service, as in speed/load.py; inf if they come too fast."""
        busy = rate * self.seconds
        return busy / (1 - busy) * self.seconds if busy < 1 else inf

    def most_within(self, seconds: float) -> float:
        """Highest rate at which prompts are read within `seconds`, the wait included."""
        low, high = 0.0, 1 / self.seconds
        for _ in range(STEPS):
            middle = (low + high) / 2
            if self.first_seconds + self.wait(middle) <= seconds:
                low = middle
            else:
                high = middle
        return low


def disaggregate(request: PlanRequest, prefill_on: Hardware) -> DisaggregatedPlan:
    """The load of `request`, decoded on its hardware and prefilled on `prefill_on`: units of each kind, and the times that result."""
    load = request.load
    if load is None:
        raise BadInput("--prefill-on needs a load: add --rate 5/s (and limits, like --ttft 2s --tpot 50ms)")
    request = replace(request, engine=_able(request.engine), goal="throughput", concurrency=None, load=None)
    decode, prefill = _pool(request), _prefill_pool(replace(request, hardware=prefill_on, new_tokens=1), load.first_seconds)
    num_bytes, link = cache_bytes(decode), _link(request.hardware, prefill_on, prefill, decode)
    return _sized(load, _prefill_unit(prefill), ServedLoad(decode.times, _most(decode)), num_bytes, link, (prefill, decode))


def _prefill_pool(request: PlanRequest, first_seconds: float) -> Candidate:
    """The layout that reads most prompts in time: stages read most of them, tensor parallelism the single one soonest."""
    found = [_pool(request), _pool(replace(request, goal="latency"))]
    return max(found, key=lambda one: _prefill_unit(one).most_within(first_seconds))


def _able(name: str) -> str:
    able = [one for one in NAMES if engine(one).disaggregates]
    if name != "auto" and engine(name).name not in able:
        raise BadInput(f"{name} cannot read prompts on other machines than it decodes on; use --engine {', '.join(able)}")
    return DEFAULT_ENGINE if name == "auto" else name


def _pool(request: PlanRequest) -> Candidate:
    found = search(request).best
    if not found.fits:
        raise Impossible(
            f"{request.spec.name} does not fit {request.hardware.description}: each pool holds all weights; name larger units, or use fewer bits"
        )
    return found


def cache_bytes(found: Candidate) -> float:
    """Of a whole prompt's KV cache (or latents)."""
    sizes, layers = found.times.model.sizes, (0, found.spec.num_layers)
    return sizes.cache_bytes(layers, found.workload.prompt_tokens, found.scheme, windowed=True)


def _link(decode_on: Hardware, prefill_on: Hardware, prefill: Candidate, decode: Candidate) -> float:
    """Bytes per second between two replicas: each device sends its part, and the side with fewer devices or slower NICs decides."""
    sides = ((prefill_on, prefill), (decode_on, decode))
    rates = [(one.network_bandwidth or network_bandwidth(one.nodes)) * found.layout.tp * found.layout.pp for one, found in sides]
    return min(rates) * LINK_SHARE


def _prefill_unit(found: Candidate) -> PrefillUnit:
    """Replicas of a unit share its prompts."""
    each = pace(found.times)
    return PrefillUnit(found.workload.prompt_tokens / each.prompt_rate / found.layout.dp, each.first_seconds)


def _most(found: Candidate) -> int:
    """Sequences of one replica at once, at their mean length."""
    work = msgspec.structs.replace(found.workload, concurrency=found.layout.dp, waiting=0)
    room = most_sequences(
        found.times.model.sizes, whole_site(found.times.hardware), found.engine, found.scheme, found.layout, work
    )
    return max((room or found).workload.concurrency // found.layout.dp, 1)


def _sized(
    load: LoadRequest, unit: PrefillUnit, decoding: ServedLoad, num_bytes: float, link: float, pools: tuple[Candidate, Candidate]
) -> DisaggregatedPlan:
    transfer, replicas = num_bytes / link, pools[1].layout.dp
    prefill_rate = min(unit.most_within(load.first_seconds - transfer - decoding.step(1)), pools[0].layout.dp / transfer)
    decode_rate = decoding.most_decoding(load.between_seconds) * replicas
    units = tuple(ceil(load.rate / most - 1e-9) if most > 1e-9 else 0 for most in (prefill_rate, decode_rate))
    within = all(units)
    at = load.rate / max(units[1], 1) / replicas
    in_flight, between = decoding.decoding_at(at)
    first = unit.first_seconds + unit.wait(load.rate / max(units[0], 1)) + transfer + decoding.step(1)
    rates = (prefill_rate, decode_rate)
    made = [
        PoolPlan(
            units=count,
            engine=one.engine.name,
            scheme=one.scheme.name,
            layout=one.layout,
            most_requests_per_second=round(most, 3),
        )
        for count, one, most in zip(units, pools, rates, strict=True)
    ]
    return DisaggregatedPlan(
        prefill=made[0], decode=made[1], requests_per_second=load.rate, kv_bytes=round(num_bytes), transfer_seconds=round(transfer, 5),
        link_bytes_per_second=link, time_to_first_token_seconds=round(min(first, 1e9), 4), time_per_token_seconds=round(between, 5),
        in_flight=round(in_flight * replicas * max(units[1], 1), 1), within=within,
    )  # fmt: skip
