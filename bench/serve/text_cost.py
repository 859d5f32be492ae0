"""What the server's process costs with the engine's own client: messages of an engine, tokens to text, parsers of reasoning and calls, events.

Run: python bench/serve/text_cost.py [MODEL] [--rounds 5]     MODEL: a directory with a tokenizer; tiny-glm if none is given

A stand-in gives each of 16 sequences a token every 4 ms, as messages in the engine's own format; it takes part of the time that is measured. Beside
it: CPU time of a request of two tokens, one after another, and how long its first token takes, connection included.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from speed import chat, cpu_seconds, loaded, serving

from windlass.core.request import Info, Timings, Usage
from windlass.runtime.engine.client.client import EngineClient
from windlass.runtime.engine.protocol import (
    Cancel,
    EngineReady,
    Finish,
    InfoReply,
    InfoRequest,
    MessageReader,
    PrefillStats,
    SequenceOutput,
    StepOutputs,
    Submit,
    encode_frame,
)
from windlass.runtime.weights.text.files import model_text

PATH = "/v1/chat/completions"
SEQUENCES, TOKENS, REQUESTS = 16, 400, 200
TEXT = (
    "The planner counts a model's parameters and says which layout fits. It gives a reason for every choice - naïve café, 東京. "
    * 20
)


class StandIn:
    """An EngineTransport: every sequence gets a token at every step."""

    def __init__(self, token_ids: list[int], seconds: float) -> None:
        self._token_ids, self._seconds = token_ids, seconds
        self._left: dict[int, tuple[int, int]] = {}
        self._reader = MessageReader()
        self._info = Info(model="stand-in", context_tokens=100_000, vocab_size=2**20, max_sequences=SEQUENCES)

    def open(self, receive: Callable[[Any], None], lost: Callable[[Any], None]) -> None:
        self._receive, self._loop = receive, asyncio.get_running_loop()
        self._loop.call_soon(self._report, EngineReady(self._info))
        self._timer = self._loop.call_soon(self._tick)

    def send(self, command: Any) -> None:
        match command:
            case InfoRequest():
                self._loop.call_soon(self._report, InfoReply(command.id, self._info))
            case Submit():
                self._left[command.id] = (0, command.max_tokens or 1)
                self._report(StepOutputs([SequenceOutput(command.id, [])]))
                if not self._seconds:
                    self._loop.call_soon(self._step)
            case Cancel():
                self._left.pop(command.id, None)
            case _:
                pass

    def kill(self) -> None: ...

    async def close(self) -> None:
        self._timer.cancel()

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._seconds or 0.002, self._tick)
        self._step()

    def _step(self) -> None:
        outputs = [self._output(number, *counts) for number, counts in list(self._left.items())]
        if outputs:
            self._report(StepOutputs(outputs))

    def _output(self, number: int, done: int, wanted: int) -> SequenceOutput:
        token = self._token_ids[(done + 7 * number) % len(self._token_ids)]
        prefill = None if done else PrefillStats(0, 0.0, 0.0)
        if done + 1 < wanted:
            self._left[number] = (done + 1, wanted)
            return SequenceOutput(number, [token], prefill=prefill)
        del self._left[number]
        finish = Finish("length", Usage(prompt_tokens=9, completion_tokens=wanted), Timings())
        return SequenceOutput(number, [token], prefill=prefill, finish=finish)

    def _report(self, message: Any) -> None:
        for report in self._reader.reports(encode_frame(message)):
            self._receive(report)


def main() -> None:
    parser = argparse.ArgumentParser()
    bundled = Path(__file__).parents[2] / "src" / "windlass" / "model" / "bundled" / "tiny-glm"
    parser.add_argument("model", nargs="?", type=Path, default=bundled)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    text = model_text(asked.model)
    token_ids = text.tokenizer.encode(TEXT, special=False)
    found: list[tuple[float, float, float]] = []
    for _ in range(asked.rounds):
        with serving(lambda: EngineClient(lambda: StandIn(token_ids, 0.004), text)) as server:
            before = cpu_seconds()
            loaded(server.url, PATH, [chat(TOKENS) for _ in range(SEQUENCES)], SEQUENCES)
            a_token = (cpu_seconds() - before) / (SEQUENCES * TOKENS)
        with serving(lambda: EngineClient(lambda: StandIn(token_ids, 0.0), text)) as server:
            before = cpu_seconds()
            answers, _ = loaded(server.url, PATH, [chat(2) for _ in range(REQUESTS)], 1)
            a_request = (cpu_seconds() - before) / REQUESTS
        found.append((a_token, a_request, statistics.median(first for _, first, _, _ in answers)))
    for name, unit, values in zip(
        ("CPU a token", "CPU a request", "first token"), (1e6, 1e6, 1e3), zip(*found, strict=True), strict=True
    ):
        shown = " us" if unit == 1e6 else " ms"
        print(f"{name}: {unit * statistics.median(values):.2f}{shown} ({unit * min(values):.2f} to {unit * max(values):.2f})")


if __name__ == "__main__":
    main()
