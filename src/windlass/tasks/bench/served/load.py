"""What is asked of a server: how many users or which rate, how long prompts and answers are, and when to stop. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from windlass.core.model import Frozen
from windlass.errors import BadInput

REQUESTS_PER_USER, MIN_REQUESTS = 4, 16
"""Of a closed loop where neither a number nor a time is given: the first and the last answer of each user are not steady."""
POISSON_SECONDS = 60.0
MAX_AT_ONCE = 4096


class Load(Frozen):
    """Either a closed loop of `at_once` users, each of whom sends its next request when an answer is complete, or Poisson arrivals."""

    prompt_tokens: int
    new_tokens: int
    at_once: int = 0
    rate: float = 0.0
    """Poisson arrivals per second; 0: a closed loop."""
    requests: int | None = None
    """Stop after so many requests; else after `seconds`."""
    seconds: float | None = None

    @property
    def name(self) -> str:
        return f"{self.rate:g}/s" if self.rate else str(self.at_once)

    @property
    def shape(self) -> str:
        return f"{self.prompt_tokens:,} + {self.new_tokens:,}"

    @property
    def title(self) -> str:
        return f"{self.rate:g} requests/s" if self.rate else f"{self.at_once} at once"


class Shape(Frozen):
    prompt_tokens: int
    new_tokens: int


TABLE: dict[int, Shape] = {
    1: Shape(prompt_tokens=1024, new_tokens=128),
    8: Shape(prompt_tokens=1024, new_tokens=128),
    32: Shape(prompt_tokens=1024, new_tokens=256),
    64: Shape(prompt_tokens=1024, new_tokens=256),
    128: Shape(prompt_tokens=1024, new_tokens=256),
    256: Shape(prompt_tokens=512, new_tokens=128),
}
"""The loads that servers are compared by (docs/guides/bench.md)."""
PRESETS = ("table",)
FULL = Shape(prompt_tokens=1024, new_tokens=256)
"""What --prompt-tokens and --new-tokens scale: the longest of the table."""
POISSON = Shape(prompt_tokens=1024, new_tokens=128)


class LoadOptions(Frozen):
    """As on the command line."""

    preset: str | None = None
    at_once: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    requests: int | None = None
    seconds: float | None = None


def make_loads(options: LoadOptions) -> tuple[Load, ...]:
    """Without any option, the table."""
    _check(options)
    if options.preset is not None or not (options.at_once or options.rates):
        closed = [(users, _scaled(shape, options)) for users, shape in _rows(options.at_once)]
    else:
        closed = [(users, _given(table_shape(users), options)) for users in options.at_once]
    loads = [_closed(users, shape, options) for users, shape in closed]
    return tuple(loads + [_poisson(rate, _given(POISSON, options), options) for rate in options.rates])


def fitted(loads: Sequence[Load], context_tokens: int) -> tuple[Load, ...]:
    """Prompts and answers shortened until the longest of the table would fit, so that a load is the same whichever others there are.
    0: the context is not known."""
    longest = FULL.prompt_tokens + FULL.new_tokens
    if not context_tokens or longest <= context_tokens:
        return tuple(loads)

    def part(tokens: int, least: int) -> int:
        return max(tokens * context_tokens // longest, least)

    return tuple(
        msgspec.structs.replace(load, prompt_tokens=part(load.prompt_tokens, 1), new_tokens=part(load.new_tokens, 2))
        for load in loads
    )


def table_shape(at_once: int) -> Shape:
    """Of the table's row with the most users that are not more than these."""
    return TABLE[max(users for users in TABLE if users <= at_once)]


def _rows(at_once: Sequence[int]) -> list[tuple[int, Shape]]:
    missing = [users for users in at_once if users not in TABLE]
    if missing:
        raise BadInput(f"--load table has no row for {missing[0]} at once; it has {', '.join(map(str, TABLE))}; leave --load out")
    return [(users, TABLE[users]) for users in at_once or TABLE]


def _scaled(shape: Shape, options: LoadOptions) -> Shape:
    prompt = _part(shape.prompt_tokens, FULL.prompt_tokens, options.prompt_tokens, least=1)
    return Shape(prompt_tokens=prompt, new_tokens=_part(shape.new_tokens, FULL.new_tokens, options.new_tokens, least=2))


def _part(tokens: int, full: int, given: int | None, least: int) -> int:
    return tokens if given is None else max(tokens * given // full, least)


def _given(shape: Shape, options: LoadOptions) -> Shape:
    return Shape(prompt_tokens=options.prompt_tokens or shape.prompt_tokens, new_tokens=options.new_tokens or shape.new_tokens)


def _closed(users: int, shape: Shape, options: LoadOptions) -> Load:
    requests = options.requests
    if requests is None and options.seconds is None:
        requests = max(REQUESTS_PER_USER * users, MIN_REQUESTS)
    return _load(shape, at_once=users, requests=requests, seconds=options.seconds)


def _poisson(rate: float, shape: Shape, options: LoadOptions) -> Load:
    seconds = options.seconds
    if seconds is None and options.requests is None:
        seconds = POISSON_SECONDS
    return _load(shape, rate=rate, requests=options.requests, seconds=seconds)


def _load(shape: Shape, **more: object) -> Load:
    return msgspec.convert({**msgspec.structs.asdict(shape), **more}, Load)


def _check(options: LoadOptions) -> None:
    if options.preset is not None and options.preset not in PRESETS:
        raise BadInput(f"--load is {' or '.join(PRESETS)}, not {options.preset!r}")
    if options.preset is not None and options.rates:
        raise BadInput("--load table is a closed loop; leave --load out to measure at a --rate")
    if options.requests is not None and options.seconds is not None:
        raise BadInput("--requests and --seconds both say when to stop; give one of them")
    if options.requests is not None and options.requests < 1:
        raise BadInput(f"--requests is {options.requests}; it must be at least 1")
    if options.seconds is not None and not (0 < options.seconds < math.inf):
        raise BadInput(f"--seconds is {options.seconds:g}; it must be above 0")
    if options.prompt_tokens is not None and options.prompt_tokens < 1:
        raise BadInput(f"--prompt-tokens is {options.prompt_tokens}; it must be at least 1")
    if options.new_tokens is not None and options.new_tokens < 2:
        raise BadInput(f"--new-tokens is {options.new_tokens}; it must be at least 2, for there to be a time between tokens")


def parse_at_once(text: str) -> tuple[int, ...]:
    """`1,8,32`."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise BadInput(f"--at-once must be a list of integers like 1,8,32, not {text!r}") from None
    if not all(1 <= users <= MAX_AT_ONCE for users in found):
        raise BadInput(f"--at-once must be from 1 to {MAX_AT_ONCE}, not {text!r}")
    return tuple(dict.fromkeys(found))


def parse_rates(text: str) -> tuple[float, ...]:
    """`0.5,2`: requests per second."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise BadInput(f"--rate must be requests per second like 2 or 0.5,1,2, not {text!r}") from None
    if not all(0 < rate < math.inf for rate in found):
        raise BadInput(f"--rate must be above 0, not {text!r}")
    return tuple(dict.fromkeys(found))
