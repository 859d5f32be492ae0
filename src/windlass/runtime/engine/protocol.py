"""Messages between an engine and its client, across processes or threads: token ids, never text. No torch.

On a socket each message is a frame (core/ranks/frames.py) of msgpack with fixed types; nothing is unpickled. One message carries the new
tokens of all sequences of a step.
"""

from __future__ import annotations

from typing import Any

import msgspec

from windlass import errors
from windlass.core.client import Broken, Busy, Late, Unavailable
from windlass.core.ranks.frames import FrameReader, frame
from windlass.core.request import FinishReason, Info, Sampling, Timings, TokenLogprob, Usage
from windlass.runtime.parallel.group import GroupLost

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
    """In llguidance's format; empty: unconstrained. Needs TokenizerData first."""
    is_slow_grammar: bool = False
    """It takes long to compile: others do not wait for it."""
    deadline_seconds: float | None = None
    """Counted from arrival."""
    owner: str = ""
    generated: list[int] = []
    """Output tokens that an engine which was lost had already returned; this one continues after them."""
    min_tokens: int = 0
    """Stop tokens are not sampled before so many."""
    pooling: str = ""
    """`last` or `mean`: an embedding is wanted, and no output."""
    priority: int = 0
    adapter: str = ""


class TokenizerData(EngineMessage, frozen=True):
    """The tokenizer, for grammars: sent once per engine, before the first request that needs it."""

    tokenizer_json: str
    stop_token_ids: list[int] = []


class Cancel(EngineMessage, frozen=True):
    id: int


class InfoRequest(EngineMessage, frozen=True):
    id: int


class AddAdapter(EngineMessage, frozen=True):
    """Answered with AdapterChanged when requests may name it, or RequestRejected; the engine runs on."""

    id: int
    name: str
    folder: str


class RemoveAdapter(EngineMessage, frozen=True):
    """Answered with AdapterChanged when no request has it any more and its memory is free."""

    id: int
    name: str


Command = Submit | TokenizerData | Cancel | InfoRequest | AddAdapter | RemoveAdapter


# --- from the engine


class Finish(msgspec.Struct, frozen=True, array_like=True):
    reason: FinishReason
    usage: Usage
    timings: Timings
    stop_token_id: int | None = None
    """None if a grammar or the length ended it."""
    error: str = ""
    error_kind: str = ""
    """`Late`, or the name of a class in windlass.errors; empty: an engine failure."""
    error_field: str = ""
    """Of a BadInput."""


class PrefillStats(msgspec.Struct, frozen=True, array_like=True):
    """Sent with the first token."""

    cached_tokens: int
    queue_seconds: float
    prefill_seconds: float


class SequenceOutput(msgspec.Struct, frozen=True, array_like=True):
    """Output of one step for one sequence. The first one, without tokens, says that the request was accepted."""

    id: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[TokenLogprob | None] | None = None
    prefill: PrefillStats | None = None
    finish: Finish | None = None
    embedding: list[float] | None = None


class StepOutputs(EngineMessage, frozen=True):
    outputs: list[SequenceOutput]


class RequestRejected(EngineMessage, frozen=True):
    """An invalid request; the engine continues."""

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
    """Reply to InfoRequest."""

    id: int
    info: Info


class AdapterChanged(EngineMessage, frozen=True):
    """Reply to AddAdapter and RemoveAdapter."""

    id: int


class EngineFailed(EngineMessage, frozen=True):
    """The last message: the engine could not be loaded, or failed."""

    kind: str
    message: str
    short_bytes: int = 0
    field: str = ""


Report = StepOutputs | RequestRejected | LoadProgress | EngineReady | InfoReply | AdapterChanged | EngineFailed


# --- errors between processes

_WITH_MESSAGE = {kind.__name__: kind for kind in (errors.BadConfig, errors.Impossible, errors.TooLong)}


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


def as_error(failure: RequestRejected | EngineFailed) -> errors.Error:
    """The error raised in the engine, to be raised here; anything but a user error is an engine failure."""
    if failure.kind == "DoesNotFit":
        return errors.DoesNotFit(failure.message, failure.short_bytes)
    if failure.kind == Busy.__name__:
        return Busy(failure.message)
    kind: Any = getattr(errors, failure.kind, None) if failure.kind else None
    if not isinstance(kind, type) or not issubclass(kind, errors.Error):
        return Unavailable(f"the engine failed: {failure.message}")
    return errors.Error(failure.message) if kind is errors.Error else _bad_input(failure.kind, failure.message, failure.field)


def _bad_input(kind: str, message: str, field: str) -> errors.BadInput:
    """Classes whose constructor builds a message become BadInput: the message is complete already."""
    kind_class = _WITH_MESSAGE.get(kind, errors.BadInput)
    return kind_class(message, field=field)


def timeout_message(seconds: float | None) -> str:
    return f"request timed out after {seconds or 0:.3g} s; raise the timeout or lower max_tokens"


def finish_error(finish: Finish) -> errors.Error:
    """The error of a request that finished with reason `error`."""
    if finish.error_kind == Late.__name__:
        return Late(finish.error)
    if finish.error_kind:
        return _bad_input(finish.error_kind, finish.error, finish.error_field)
    return Broken(f"the request failed: {finish.error}")


# --- on a socket

_encode = msgspec.msgpack.Encoder().encode
_decode_command = msgspec.msgpack.Decoder(Command).decode
_decode_report = msgspec.msgpack.Decoder(Report).decode


def encode_frame(message: Command | Report) -> bytes:
    return frame(_encode(message))


class MessageReader:
    """Splits a byte stream into messages."""

    def __init__(self) -> None:
        self._frames = FrameReader(MAX_MESSAGE_BYTES)

    def commands(self, data: bytes) -> list[Command]:
        return [_decode_command(body) for body in self._frames.push(data)]

    def reports(self, data: bytes) -> list[Report]:
        return [_decode_report(body) for body in self._frames.push(data)]
