"""Which log-probabilities a chat response includes: those of the tokens in its visible text.

Text that may become a stop string is held back, so tokens run ahead of it. With stop strings the log-probabilities are held back
as well, and those of the stop string itself are dropped.
"""

from __future__ import annotations

from collections import deque

from windlass.core.request import Delta, TokenLogprob
from windlass.wire.schema.logprobs import Offsets


class VisibleLogprobs:
    """For one choice. `may_wait`: the request has stop strings."""

    def __init__(self, may_wait: bool) -> None:
        self._may_wait = may_wait
        self._text = ""
        self._offsets = Offsets()
        self._waiting: deque[TokenLogprob] = deque()

    def add(self, delta: Delta) -> list[TokenLogprob]:
        """Those that can be sent now."""
        entries = _without_stop(delta)
        if not self._may_wait:
            return list(entries)
        self._waiting.extend(entries)
        self._text += delta.content
        if delta.reasoning or delta.tool_calls:  # from here on tokens are not only those of the content
            self._may_wait = False
        is_by_string = delta.finish_reason == "stop" and delta.stop_token_id is None
        if not self._may_wait or (delta.finish_reason is not None and not is_by_string):
            found, self._waiting = list(self._waiting), deque[TokenLogprob]()
            return found
        return self._within()

    def _within(self) -> list[TokenLogprob]:
        """Those of tokens that start within the text so far."""
        found: list[TokenLogprob] = []
        while self._waiting and self._offsets.at < len(self._text):
            found.append(self._waiting.popleft())
            self._offsets.next(found[-1].token, self._text)
        return found


def _without_stop(delta: Delta) -> tuple[TokenLogprob, ...]:
    """The stop token is not part of the text."""
    is_stop = delta.stop_token_id is not None and len(delta.logprobs) == len(delta.token_ids) > 0
    return delta.logprobs[:-1] if is_stop else delta.logprobs
