"""Clients of a server that may be disturbed: they ask the same things again and again, streaming, and keep all that comes, with its time."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

SECONDS_TO_ANSWER = 300.0
"""Past it, an answer hangs: it is asked for while epochs end and begin, beside whatever else the machine does."""
Connect = Callable[[], socket.socket]


@dataclass(frozen=True)
class Question:
    prompt: str
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0

    def body(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": 1.0,
            "seed": self.seed,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }


@dataclass
class Answer:
    text: str = ""
    tokens: list[int] = field(default_factory=list[int])
    times: list[float] = field(default_factory=list[float])
    """Of every piece."""
    finish: str = ""
    error: str = ""
    began: float = 0.0

    @property
    def longest_gap(self) -> float:
        """Between pieces: while it was being answered."""
        return max((later - earlier for earlier, later in pairwise(self.times)), default=0.0)

    @property
    def longest_pause(self) -> float:
        """Between pieces, and before the first."""
        moments = [self.began, *self.times]
        return max((later - earlier for earlier, later in pairwise(moments)), default=0.0)


def ask(connect: Connect, question: Question, answer: Answer) -> Answer:
    """Over a connection of its own, into `answer`. What goes wrong is in it too."""
    answer.began = time.monotonic()
    connection = http.client.HTTPConnection("localhost")
    try:
        connection.sock = connect()
        connection.request("POST", "/v1/completions", json.dumps(question.body()), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            answer.error = f"status {response.status}: {response.read(500)!r}"
            return answer
        _read(response, answer)
    except (OSError, http.client.HTTPException, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    return answer


def _read(response: http.client.HTTPResponse, answer: Answer) -> None:
    ended = False
    while line := response.readline():
        data = line.decode().strip().removeprefix("data: ")
        if data == "[DONE]":
            ended = True
        elif data:
            _add(json.loads(data), answer)
    if not ended and not answer.error:
        answer.error = "the stream ended in the middle"


def _add(event: dict[str, Any], answer: Answer) -> None:
    if "error" in event:
        answer.error = str(event["error"])
        return
    for choice in event["choices"]:
        answer.text += choice["text"]
        answer.tokens += choice.get("token_ids") or []
        answer.finish = choice["finish_reason"] or answer.finish
    answer.times.append(time.monotonic())


class Clients:
    """One thread for each question, which asks it until told to stop; what is being answered then is waited for."""

    def __init__(self, connect: Connect, questions: Sequence[Question]) -> None:
        self.answers: list[list[Answer]] = [[] for _ in questions]
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(connect, question, answers), daemon=True)
            for question, answers in zip(questions, self.answers, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self, connect: Connect, question: Question, answers: list[Answer]) -> None:
        while not self._stop.is_set():
            answers.append(Answer())
            if ask(connect, question, answers[-1]).error:
                time.sleep(0.2)

    @property
    def num_pieces(self) -> int:
        """That have come so far, to all."""
        return sum(len(answer.times) for answers in self.answers for answer in list(answers))

    def stop(self) -> list[list[Answer]]:
        self._stop.set()
        end = time.monotonic() + SECONDS_TO_ANSWER
        for number, thread in enumerate(self._threads):
            thread.join(max(end - time.monotonic(), 0.1))
            assert not thread.is_alive(), f"client {number} hung: it got no whole answer after the last event"
        return self.answers


def ask_all(connect: Connect, questions: Sequence[Question]) -> list[Answer]:
    """Each once, all at the same time."""
    answers = [Answer(error="it hung") for _ in questions]

    def one(number: int) -> None:
        answers[number] = ask(connect, questions[number], Answer())

    threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in range(len(questions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS_TO_ANSWER)
    return answers
