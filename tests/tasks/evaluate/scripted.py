"""A Client whose answers are a function of the question, and a small task to ask it. Counts what it is asked."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import msgspec

from windlass.core.client import Unavailable
from windlass.core.request import Delta, Info, Request, ScoreRequest, Scores, TokenLogprob, Usage
from windlass.errors import Error
from windlass.tasks.evaluate.run.items import Prepared, prepare
from windlass.tasks.evaluate.run.settings import Settings, Wanted
from windlass.tasks.evaluate.tasks.task import Task, parse_task

SIX_LINES = """
name = "sums"
category = "math"
source.file = "sums.jsonl"
prompt.chat = "{a} + {b} ="
answer = "{sum}"
grader = "number"
"""


def text_of(request: Request) -> str:
    return request.prompt if request.prompt is not None else str((request.messages or ())[-1]["content"])


class ScriptedClient:
    """`answer`: a text, or an error to raise, by the question's text and how often it was asked."""

    def __init__(self, answer: Callable[[str, int], str | Error], finish: str | None = "stop") -> None:
        self._answer, self._finish = answer, finish
        self.asked: Counter[str] = Counter()
        self.requests: list[Request] = []
        self.at_once = self.most_at_once = 0
        self.is_down = False
        self.num_infos = 0

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        text = text_of(request)
        self.requests.append(request)
        self.asked[text] += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(0)
            if self.is_down:
                raise Unavailable("it is down")
            found = self._answer(text, self.asked[text])
            if isinstance(found, Error):
                raise found
            yield Delta(content=found[:2])
            usage = Usage(prompt_tokens=len(text), completion_tokens=len(found))
            yield Delta(content=found[2:], finish_reason=self._finish, usage=usage)  # type: ignore[arg-type]
        finally:
            self.at_once -= 1

    async def score(self, request: ScoreRequest) -> Scores:
        """Each character is a token; the last is as likely as its place in the alphabet."""
        text = request.prompt if request.prompt is not None else "".join(map(chr, request.token_ids or ()))
        entries = [TokenLogprob(token_id=ord(char), logprob=-ord(char) / 100, token=char) for char in text]
        return Scores(token_ids=tuple(map(ord, text)), logprobs=(None, *entries[1:]))

    async def info(self) -> Info:
        self.num_infos += 1
        if self.is_down:
            raise Unavailable("it is down")
        return Info(model="scripted", context_tokens=4096, max_sequences=4)

    async def close(self) -> None:
        pass


def right(text: str, times: int) -> str:
    """The sum that was asked for."""
    a, _, b, *_ = text.split()
    return f"That makes {int(a) + int(b)}."


def write_sums(folder: Path, count: int) -> Path:
    rows = [{"a": number, "b": 7, "sum": number + 7} for number in range(count)]
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "sums.toml").write_text(SIX_LINES)
    return folder / "sums.toml"


def sums(folder: Path, count: int = 12, **changes: Any) -> Prepared:
    write_sums(folder, count)
    return prepared_of(parse_task(SIX_LINES.encode(), "sums.toml", str(folder)), **changes)


def prepared_of(task: Task, **changes: Any) -> Prepared:
    wanted = Wanted(**{name: value for name, value in changes.items() if name in Wanted.__struct_fields__})
    fields = {
        name: value for name, value in changes.items() if name in Task.__struct_fields__ and name not in Wanted.__struct_fields__
    }
    return prepare(msgspec.structs.replace(task, **fields), wanted, has_chat=True)


def settings_for(*prepared: Prepared, **changes: Any) -> Settings:
    return Settings(model="scripted", tasks=tuple(one.settings for one in prepared), **changes)
