"""Seconds that a token, and a refusal, cost a server. `python bench/speed_wire.py`; expected on a machine of 2024: see each."""

from __future__ import annotations

import timeit
from collections.abc import Callable
from typing import Any

from windlass.core.request import Delta, TokenLogprob
from windlass.wire.decode import decode
from windlass.wire.schema.chat import ChatRequest
from windlass.wire.schema.errors import ApiError
from windlass.wire.server.responses import ChatStream, CompletionStream, new_envelope


def event_seconds(kind: Any, logprobs: bool) -> float:
    """A quarter of a microsecond for plain text, six with five log-probabilities; 20 and 100 would be too many."""
    top = tuple(TokenLogprob(token_id=number, logprob=-1.0, token="word") for number in range(5))
    entry = TokenLogprob(token_id=5, logprob=-1.0, token=" word", top=top)
    delta = Delta(content=" word", token_ids=(5,), logprobs=(entry,))
    stream = kind(new_envelope("cmpl", "m"), logprobs=logprobs)
    return min(timeit.repeat(lambda: stream.event(0, delta), number=1000, repeat=5)) / 1000


def long_name_seconds() -> float:
    """A refusal of a body whose one unknown name has seven megabytes; below 0.3."""
    body = f'{{"messages":[{{"role":"user","content":"hi"}}],"{"temperatur" * 700_000}":1}}'.encode()

    def refused() -> None:
        try:
            decode(body, ChatRequest)
        except ApiError:
            return
        raise AssertionError("it was taken")

    return min(timeit.repeat(refused, number=1, repeat=3))


def measurements() -> dict[str, Callable[[], float]]:
    found: dict[str, Callable[[], float]] = {
        f"{kind.__name__}, {'five logprobs' if logprobs else 'plain text'}": lambda kind=kind, logprobs=logprobs: event_seconds(
            kind, logprobs
        )
        for kind in (ChatStream, CompletionStream)
        for logprobs in (False, True)
    }
    return {**found, "a name of megabytes refused": long_name_seconds}


if __name__ == "__main__":
    for name, measure in measurements().items():
        print(f"{name:36} {measure() * 1e6:12,.2f} µs")
