"""Messages between an engine and its client, across processes or threads: token ids, never text. No torch.

On a socket each message is a frame (core/frames.py) of msgpack with fixed types; nothing is unpickled. One message carries the new
tokens of all sequences of a step.
"""

from __future__ import annotations

from typing import Any

import msgspec

from windlass import errors
from windlass.core.client import Broken, Busy, Late, Unavailable
from windlass.core.frames import FrameReader, frame
from windlass.core.request import FinishReason, Info, Sampling, Timings, TokenLogprob, Usage
from windlass.parallel.group import GroupLost

MAX_MESSAGE_BYTES = 2**30


class EngineMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


# --- to the engine


class Submit(EngineMessage, frozen=True):
    id: int
    token_ids: list[int]
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    """None: until a stop token, or the context is full."""
    stop_token_ids: list[int] = []
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    cache_salt: str = ""
    grammar: str = ""
    """In llguidance's form; empty: any answer will do. A `TokenizerData` must have come before."""
    deadline_seconds: float | None = None
    """From when it arrives."""
    owner: str = ""
    generated: list[int] = []
    """Tokens of the answer that were given out before, by an engine that was lost: this one takes them for its own and goes on after them."""


class TokenizerData(EngineMessage, frozen=True):
    """What the tokens say, for grammars: once in an engine's life, before the first request that needs it."""

    tokenizer_json: str
    stop_token_ids: list[int] = []


class Cancel(EngineMessage, frozen=True):
    id: int


class InfoRequest(EngineMessage, frozen=True):
    id: int


Command = Submit | TokenizerData | Cancel | InfoRequest


# --- from the engine


class Finish(msgspec.Struct, frozen=True, array_like=True):
    reason: FinishReason
    usage: Usage
    timings: Timings
    stop_token_id: int | None = None
    """None where a grammar or the length ended it."""
    error: str = ""
    error_kind: str = ""
    """`Late` or the name of a class in windlass.errors; empty: the engine's own failure."""
    error_field: str = ""
    """Of a BadInput."""


class PrefillStats(msgspec.Struct, frozen=True, array_like=True):
    """What is known with the first token."""

    cached_tokens: int
    queue_seconds: float
    prefill_seconds: float


class SequenceOutput(msgspec.Struct, frozen=True, array_like=True):
    """What a step brought to one sequence."""

    id: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[TokenLogprob | None] | None = None
    prefill: PrefillStats | None = None
    finish: Finish | None = None


class StepOutputs(EngineMessage, frozen=True):
    outputs: list[SequenceOutput]


class RequestRejected(EngineMessage, frozen=True):
    """A request that cannot be: the engine goes on."""

    id: int
    kind: str
    message: str
    short_bytes: int = 0
    field: str = ""


class LoadProgress(EngineMessage, frozen=True):
    done_bytes: int
    total_bytes: int


class EngineReady(EngineMessage, frozen=True):
    info: Info


class InfoReply(EngineMessage, frozen=True):
    """To InfoRequest."""

    id: int
    info: Info


class EngineFailed(EngineMessage, frozen=True):
    """The last message: the engine could not be made, or broke."""

    kind: str
    message: str
    short_bytes: int = 0
    field: str = ""


Report = StepOutputs | RequestRejected | LoadProgress | EngineReady | InfoReply | EngineFailed


# --- errors across the border

_WHOLE = {kind.__name__: kind for kind in (errors.BadConfig, errors.Impossible, errors.TooLong)}


def describe_error(error: BaseException) -> dict[str, Any]:
    """For Refused and Failed."""
    is_ours = isinstance(error, errors.Error | GroupLost)
    message = str(error) if is_ours else f"{type(error).__name__}: {_first_line(error)}"
    return {
        "kind": type(error).__name__ if is_ours else "",
        "message": message,
        "short_bytes": getattr(error, "short_bytes", 0),
        "field": getattr(error, "field", ""),
    }


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or ["no reason given"])[0][:300]


def as_error(told: RequestRejected | EngineFailed) -> errors.Error:
    """What was raised there, to be raised here; what is not the user's to mend is the engine's failure."""
    if told.kind == "DoesNotFit":
        return errors.DoesNotFit(told.message, told.short_bytes)
    if told.kind == Busy.__name__:
        return Busy(told.message)
    kind: Any = getattr(errors, told.kind, None) if told.kind else None
    if not isinstance(kind, type) or not issubclass(kind, errors.Error):
        return Unavailable(f"the engine failed: {told.message}")
    return errors.Error(told.message) if kind is errors.Error else _bad_input(told.kind, told.message, told.field)


def _bad_input(kind: str, message: str, field: str) -> errors.BadInput:
    """Some errors are made of parts; their message already says all of them."""
    made = _WHOLE.get(kind, errors.BadInput)
    return made(message, field=field)


def timeout_message(seconds: float | None) -> str:
    return f"the answer was not whole after {seconds or 0:.3g} s, its deadline; allow more time, or ask for fewer tokens"


def finish_error(finish: Finish) -> errors.Error:
    """Of a request that ended with one."""
    if finish.error_kind == Late.__name__:
        return Late(finish.error)
    if finish.error_kind:
        return _bad_input(finish.error_kind, finish.error, finish.error_field)
    return Broken(f"the answer could not be computed: {finish.error}")


# --- on a socket

_encode = msgspec.msgpack.Encoder().encode
_decode_command = msgspec.msgpack.Decoder(Command).decode
_decode_report = msgspec.msgpack.Decoder(Report).decode


def encode_frame(message: Command | Report) -> bytes:
    return frame(_encode(message))


class MessageReader:
    """Bytes as they arrive to whole messages."""

    def __init__(self) -> None:
        self._frames = FrameReader(MAX_MESSAGE_BYTES)

    def commands(self, data: bytes) -> list[Command]:
        return [_decode_command(body) for body in self._frames.push(data)]

    def reports(self, data: bytes) -> list[Report]:
        return [_decode_report(body) for body in self._frames.push(data)]
