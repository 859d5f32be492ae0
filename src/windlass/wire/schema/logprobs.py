"""Log-probabilities in the API's two formats, written and read.

Chats have an object per token. Completions have four parallel lists, including each token's offset in the text (`Offsets`).
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from windlass.core.client import Unavailable
from windlass.core.request import TokenLogprob
from windlass.wire.schema.chat import ChatLogprob, ChatLogprobs, TopLogprob
from windlass.wire.schema.completions import CompletionLogprobs

LOWEST = -9999.0
"""The lower bound that is written: JSON has no infinity. OpenAI's API does the same."""
PIECE = "\N{REPLACEMENT CHARACTER}"
"""Appears in the text of tokens that are part of a character."""
NO_ID = -1
"""The id of a token whose server returned only its text."""


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
    """`token_ids`: of these tokens, if the server returned them."""
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
    """Empty if the text already determines them."""
    try:
        raw = bytes(entry.bytes or ())
    except ValueError:
        return b""
    return b"" if raw == entry.token.encode() else raw


# --- completions -----------------------------------------------------------------------------------------------------


class Offsets:
    """The offset of each token in the text.

    The tokens of a character that is split over several have unusable texts; they all get the character's offset. Tokens that are
    not in the text, such as the stop token, get the current offset.
    """

    def __init__(self, start: int = 0) -> None:
        self.at = start
        """The next token's offset, as far as it is known."""
        self._pieces = 0
        """Upper bound on the characters of partial tokens since the offset was last certain."""

    def next(self, token: str, text: str) -> int:
        """`text`: the whole text so far; tokens may run ahead of it."""
        if PIECE in token:
            return self._piece(token)
        if self._pieces:
            return self._after_pieces(token, text)
        begin = self.at
        # Some tokenizers drop the leading space of a token decoded alone.
        space = 1 if token and text.startswith(" ", begin) and not token.startswith(" ") else 0
        known = text[begin + space : begin + space + len(token)]
        if token.startswith(known):  # what is beyond the known text is assumed to match
            self.at = begin + space + len(token)
        return begin

    def _after_pieces(self, token: str, text: str) -> int:
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
    """`first`: the text of the first prompt token, which has no log-probability."""
    tokens = [first if entry is None else entry.token for entry in entries]
    return CompletionLogprobs(
        tokens=tokens,
        token_logprobs=[None if entry is None else max(entry.logprob, LOWEST) for entry in entries],
        top_logprobs=[None if entry is None else _top(entry) for entry in entries],
        text_offset=[offsets.next(token, text) for token in tokens],
    )


def _top(entry: TokenLogprob) -> dict[str, float]:
    """The top tokens and the token itself; of tokens with the same text the most likely one."""
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
    """Top tokens are sorted best first; their ids are unknown, except the token's own if the server returned it."""
    if found is None:
        return ()
    count = len(found.tokens)
    ids = token_ids if len(token_ids) == count else [NO_ID] * count
    tops = found.top_logprobs if found.top_logprobs else [None] * count
    if len(found.token_logprobs) != count or len(tops) != count:
        raise Unavailable("invalid response from the server: its lists of tokens and log-probabilities have different lengths")
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
