"""Results of requests."""

from __future__ import annotations

from typing import Literal

from windlass.core.model import Frozen

FinishReason = Literal["stop", "length", "cancelled", "error"]
"""`stop`: a stop token or string; `length`: max_tokens or the context length was reached."""


class Embedding(Frozen):
    vector: tuple[float, ...]
    """Not normalized."""
    num_tokens: int


class TokenLogprob(Frozen):
    token_id: int
    logprob: float
    """Natural, of the model's own distribution: before bias, penalties, temperature and filters."""
    rank: int = 0
    """1 for the most likely token at its position; 0: unknown."""
    token: str = ""
    """Its text, if the client has a tokenizer."""
    raw: bytes = b""
    """Its bytes, if it is part of a character; empty: the UTF-8 bytes of its text."""
    top: tuple[TokenLogprob, ...] = ()
    """The most likely tokens at this position, best first."""


class Scores(Frozen):
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...]
    """One per token; None before `start` and for the first token."""

    @property
    def total(self) -> float:
        return sum(found.logprob for found in self.logprobs if found is not None)


class ToolCall(Frozen):
    id: str
    name: str
    arguments: str
    """JSON, as the model wrote it."""


class CallPiece(Frozen):
    """The next part of a tool call that is being written. The first one of a call has its name."""

    id: str
    name: str = ""
    arguments: str = ""


class Usage(Frozen):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    reasoning_tokens: int = 0
    """Of the completion."""
    energy_joules: float | None = None
    """Attributed to the request by the server, if it was asked to; with the last of its sequences."""


class Timings(Frozen):
    queue_seconds: float = 0.0
    """From submission to the first step."""
    prefill_seconds: float = 0.0
    """From then to the first token."""
    decode_seconds: float = 0.0
    """From the first token to the last."""


class Delta(Frozen):
    """An increment of the output. Only the last one has a finish reason and timings.

    Usage comes with the last one; a first one without tokens may have it too, which says that the request was accepted.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    """Complete, except for one that the length cut off."""
    call_pieces: tuple[CallPiece, ...] = ()
    """The same calls as they are written. A client may leave them out; the pieces of a call add up to it."""
    token_ids: tuple[int, ...] = ()
    """May run ahead of the text, which is held back until a character, a tag or a stop string is complete."""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """Once, in the first delta or before it has tokens."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The stop token, last of `token_ids` and not part of the text; None if a stop string or the length ended the output."""
    usage: Usage | None = None
    timings: Timings | None = None
    notes: dict[str, str] = {}
    """How it was answered, by name: a router's decision. Once, in the first delta; a server sends them as headers."""
