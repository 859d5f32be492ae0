"""One answer: requested, streamed to the screen, timed."""

from __future__ import annotations

import time
from collections.abc import Callable

from windlass.cli.run.screen import Screen
from windlass.core.client import SyncClient
from windlass.core.model import Frozen
from windlass.core.request import Delta, Request, ToolCall, Usage
from windlass.model.text.parse.loops import LoopDetector
from windlass.units import format_rate, format_seconds

Clock = Callable[[], float]
LOOP = "loop"
"""Finish reason of an answer that was stopped because it repeated itself."""


class TimedAnswer(Frozen):
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str = "cancelled"
    usage: Usage | None = None
    """None if it was interrupted."""
    token_ids: tuple[int, ...] = ()
    """Of the answer, as they came."""
    num_tokens: int = 0
    time_to_first_token_seconds: float | None = None
    decode_seconds: float = 0.0
    """From the first token to the last."""

    @property
    def tokens_per_second(self) -> float | None:
        """Decode speed: the first token belongs to prefill."""
        return (self.num_tokens - 1) / self.decode_seconds if self.num_tokens > 1 and self.decode_seconds > 0 else None


class AnswerBuilder:
    """Accumulates deltas, and when tokens arrived."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock, self._begin = clock, clock()
        self._first = self._last = 0.0
        self._deltas: list[Delta] = []
        self._num_tokens = 0

    def add(self, delta: Delta) -> None:
        self._deltas.append(delta)
        if delta.token_ids:
            self._last = self._clock()
            self._first = self._first or self._last
            self._num_tokens += len(delta.token_ids)

    def answer(self, finish_reason: str = "") -> TimedAnswer:
        """`finish_reason`: why it was cut off, if it was."""
        end = self._deltas[-1] if self._deltas else Delta()
        decode_seconds = end.timings.decode_seconds if end.timings is not None else self._last - self._first
        return TimedAnswer(
            content="".join(delta.content for delta in self._deltas),
            reasoning="".join(delta.reasoning for delta in self._deltas),
            tool_calls=tuple(call for delta in self._deltas for call in delta.tool_calls),
            finish_reason=finish_reason or end.finish_reason or "cancelled",
            usage=end.usage,
            token_ids=tuple(token for delta in self._deltas for token in delta.token_ids),
            num_tokens=end.usage.completion_tokens if end.usage is not None else self._num_tokens,
            time_to_first_token_seconds=self._first - self._begin if self._first else None,
            decode_seconds=decode_seconds,
        )


def answer(
    client: SyncClient, request: Request, screen: Screen | None, clock: Clock = time.perf_counter, stop_loops: bool = True
) -> TimedAnswer:
    """Streams to the end, or until the answer only repeats itself. Ctrl-C cancels the request and raises `Interrupted` with the answer so
    far."""
    builder, loops = AnswerBuilder(clock), LoopDetector()
    deltas = client.generate(request)
    try:
        for delta in deltas:
            builder.add(delta)
            if stop_loops and loops.add(delta.token_ids):
                return builder.answer(LOOP)
            if screen is not None:
                screen.reasoning(delta.reasoning)
                screen.content(delta.content)
                for call in delta.tool_calls:
                    screen.content(f"\n{call.name}({call.arguments})\n")
    except KeyboardInterrupt:
        raise Interrupted(builder.answer()) from None
    finally:
        deltas.close()
        if screen is not None:
            screen.end()
    return builder.answer()


class Interrupted(KeyboardInterrupt):
    def __init__(self, so_far: TimedAnswer) -> None:
        super().__init__()
        self.so_far = so_far


def summary(answer: TimedAnswer) -> str:
    """`42 tokens, 136 tokens/s, first after 35.0 ms; prompt of 23 tokens, 16 of them cached`."""
    parts = [f"{answer.num_tokens:,} token{'s' if answer.num_tokens != 1 else ''}"]
    if answer.tokens_per_second is not None:
        parts.append(f"{format_rate(answer.tokens_per_second)} tokens/s")
    if answer.time_to_first_token_seconds is not None:
        parts.append(f"first after {format_seconds(answer.time_to_first_token_seconds)}")
    text = ", ".join(parts)
    if answer.usage is not None:
        cached = f", {answer.usage.cached_tokens:,} of them cached" if answer.usage.cached_tokens else ""
        text += f"; prompt of {answer.usage.prompt_tokens:,}{cached}"
    endings = {
        "length": "; truncated: --max-tokens or the context is used up",
        "cancelled": "; stopped",
        LOOP: "; stopped: it only repeated itself (--allow-loops lets it; another --temperature or --seed may help)",
    }
    return text + endings.get(answer.finish_reason, "")
