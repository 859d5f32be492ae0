"""Log-probabilities in the two forms of the API, both ways.

Chats have an object per token. Completions have four lists, and an offset into the text for every token: `Offsets`.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from windlass.core.request import TokenLogprob
from windlass.wire.schema.chat import ChatLogprob, ChatLogprobs, TopLogprob
from windlass.wire.schema.completions import CompletionLogprobs

LOWEST = -9999.0
"""Written for what is less likely than that: JSON has no infinity. OpenAI's API does the same."""
PIECE = "\N{REPLACEMENT CHARACTER}"
"""In the text of tokens that are parts of a character."""
NO_ID = -1
"""The id of a token that a server gave as text only."""


# --- chats -----------------------------------------------------------------------------------------------------------


def chat_logprobs(entries: Sequence[TokenLogprob], with_ids: bool = False) -> ChatLogprobs:
    return ChatLogprobs(content=[_chat_entry(entry, with_ids) for entry in entries])


def _chat_entry(entry: TokenLogprob, with_ids: bool) -> ChatLogprob:
    return ChatLogprob(
        token=entry.token,
        logprob=max(entry.logprob, LOWEST),
        bytes=_bytes(entry),
        top_logprobs=[
            TopLogprob(
                token=other.token,
                logprob=max(other.logprob, LOWEST),
                bytes=_bytes(other),
                token_id=other.token_id if with_ids else UNSET,
            )
            for other in entry.top
        ],
        token_id=entry.token_id if with_ids else UNSET,
    )


def _bytes(entry: TokenLogprob) -> list[int] | None:
    if entry.raw:
        return list(entry.raw)
    return None if PIECE in entry.token else list(entry.token.encode())


def read_chat_logprobs(found: ChatLogprobs | None, token_ids: Sequence[int] = ()) -> tuple[TokenLogprob, ...]:
    """`token_ids`: of these tokens, where the server gave them."""
    entries = (found.content or []) if found is not None else []
    ids = token_ids if len(token_ids) == len(entries) else [NO_ID] * len(entries)
    return tuple(
        TokenLogprob(
            token_id=number if entry.token_id is UNSET else entry.token_id,
            logprob=entry.logprob,
            token=entry.token,
            raw=_raw(entry),
            top=tuple(_read_top(other) for other in entry.top_logprobs),
        )
        for entry, number in zip(entries, ids, strict=True)
    )


def _read_top(entry: TopLogprob) -> TokenLogprob:
    number = NO_ID if entry.token_id is UNSET else entry.token_id
    return TokenLogprob(token_id=number, logprob=entry.logprob, token=entry.token, raw=_raw(entry))


def _raw(entry: ChatLogprob | TopLogprob) -> bytes:
    """Only what the text does not say."""
    try:
        raw = bytes(entry.bytes or ())
    except ValueError:
        return b""
    return b"" if raw == entry.token.encode() else raw


# --- completions -----------------------------------------------------------------------------------------------------


class Offsets:
    """Where in the text each token begins.

    A character may be cut into several tokens, whose own texts are of no use; they all begin where it does. So do tokens that are not
    in the text at all, such as the one that ends an answer.
    """

    def __init__(self, start: int = 0) -> None:
        self.at = start
        """Where the next one begins, as far as it is known."""
        self._pieces = 0
        """Characters that came in pieces since the place was last certain, at most."""

    def next(self, token: str, text: str) -> int:
        """`text`: all of it, as far as it is known; tokens may run ahead of it."""
        if PIECE in token:
            return self._piece(token)
        if self._pieces:
            return self._behind_pieces(token, text)
        begin = self.at
        # Some tokenizers leave the space out of a token that stands alone.
        space = 1 if token and text.startswith(" ", begin) and not token.startswith(" ") else 0
        known = text[begin + space : begin + space + len(token)]
        if token.startswith(known):  # what is not known yet is believed
            self.at = begin + space + len(token)
        return begin

    def _behind_pieces(self, token: str, text: str) -> int:
        begin = text.find(token, self.at, self.at + self._pieces + len(token)) if token else -1
        if begin < 0:
            return self.at
        self.at, self._pieces = begin + len(token), 0
        return begin

    def _piece(self, token: str) -> int:
        self._pieces += len(token)
        return self.at


def completion_logprobs(
    entries: Sequence[TokenLogprob | None], offsets: Offsets, text: str, first: str = ""
) -> CompletionLogprobs:
    """`first`: the text of a token that has no log-probability, because nothing precedes it."""
    tokens = [first if entry is None else entry.token for entry in entries]
    return CompletionLogprobs(
        tokens=tokens,
        token_logprobs=[None if entry is None else max(entry.logprob, LOWEST) for entry in entries],
        top_logprobs=[None if entry is None else _top(entry) for entry in entries],
        text_offset=[offsets.next(token, text) for token in tokens],
    )


def _top(entry: TokenLogprob) -> dict[str, float]:
    """The most likely ones and the token itself. Of tokens with the same text the likeliest counts."""
    found: dict[str, float] = {}
    for other in (*entry.top, entry):
        found[other.token] = max(other.logprob, found.get(other.token, LOWEST))
    return found


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    if not first.tokens:
        return second
    return CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=(first.top_logprobs or []) + (second.top_logprobs or []),
        text_offset=first.text_offset + second.text_offset,
    )


def read_completion_logprobs(found: CompletionLogprobs | None, token_ids: Sequence[int] = ()) -> tuple[TokenLogprob | None, ...]:
    """The likeliest ones best first; texts only, but for the token itself where the server gave its id."""
    if found is None:
        return ()
    count = len(found.tokens)
    ids = token_ids if len(token_ids) == count else [NO_ID] * count
    tops = found.top_logprobs if found.top_logprobs else [None] * count
    return tuple(
        None
        if logprob is None
        else TokenLogprob(token_id=number, logprob=logprob, token=token, top=_read_tops(top, token, number))
        for token, logprob, top, number in zip(found.tokens, found.token_logprobs, tops, ids, strict=True)
    )


def _read_tops(top: dict[str, float] | None, token: str, token_id: int) -> tuple[TokenLogprob, ...]:
    ordered = sorted((top or {}).items(), key=lambda entry: -entry[1])
    return tuple(
        TokenLogprob(token_id=token_id if text == token else NO_ID, logprob=logprob, token=text) for text, logprob in ordered
    )
