"""Which log-probabilities a chat shows: those of the tokens that are its answer.

Tokens run ahead of the text, which waits until it is certain that it is no stop string. Where there may be one, the log-probabilities
wait with it: those of a stop string are never shown, as it is not.
"""

from __future__ import annotations

from collections import deque

from windlass.core.request import Delta, TokenLogprob
from windlass.wire.schema.logprobs import Offsets


class Shown:
    """Of one choice. `may_wait`: the request has stop strings."""

    def __init__(self, may_wait: bool) -> None:
        self._may_wait = may_wait
        self._text = ""
        self._offsets = Offsets()
        self._waiting: deque[TokenLogprob] = deque()

    def add(self, delta: Delta) -> list[TokenLogprob]:
        """Those that can be shown now."""
        entries = _without_stop(delta)
        if not self._may_wait:
            return list(entries)
        self._waiting.extend(entries)
        self._text += delta.content
        if delta.reasoning or delta.tool_calls:  # the tokens are no longer those of the content alone
            self._may_wait = False
        is_by_string = delta.finish_reason == "stop" and delta.stop_token_id is None
        if not self._may_wait or (delta.finish_reason is not None and not is_by_string):
            found, self._waiting = list(self._waiting), deque[TokenLogprob]()
            return found
        return self._within()

    def _within(self) -> list[TokenLogprob]:
        """As far as the text has come: a token belongs to it that begins in it."""
        found: list[TokenLogprob] = []
        while self._waiting and self._offsets.at < len(self._text):
            found.append(self._waiting.popleft())
            self._offsets.next(found[-1].token, self._text)
        return found


def _without_stop(delta: Delta) -> tuple[TokenLogprob, ...]:
    """The token that ended the answer is no part of it."""
    is_stop = delta.stop_token_id is not None and len(delta.logprobs) == len(delta.token_ids) > 0
    return delta.logprobs[:-1] if is_stop else delta.logprobs
