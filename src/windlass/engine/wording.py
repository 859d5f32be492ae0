"""Text on top of tokens: a request's words to token ids, and a stream of token ids to the parts of an answer. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from windlass.core.request import Request, ScoreRequest, TokenLogprob
from windlass.errors import BadInput
from windlass.families.dialect import dialect
from windlass.text.chat import render_chat
from windlass.text.reasoning import opens_reasoning
from windlass.text.stream import Piece, TextStream

if TYPE_CHECKING:
    from windlass.weights.text_of import ModelText

NO_TEXT = "this model has no tokenizer, so it takes token_ids only; give its tokenizer.json, or ask with token_ids"


class Wording:
    def __init__(self, text: ModelText) -> None:
        self._text = text
        self._dialect = dialect(text.chat_template)

    @property
    def has_chat(self) -> bool:
        return self._text.chat_template is not None

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self._text.stop_ids

    def opened(self, request: Request) -> tuple[list[int], TextStream]:
        """The prompt's tokens, and what makes text of the answer's."""
        if request.messages is not None:
            return self._opened_chat(request)
        tokens = self.prompt_tokens(request)
        return tokens, TextStream(self._text.tokenizer, stop=request.stop, prompt=tokens)

    def prompt_tokens(self, request: Request | ScoreRequest) -> list[int]:
        if request.token_ids is not None:
            return list(request.token_ids)
        assert request.prompt is not None
        return self._text.tokenizer.encode(request.prompt)

    def _opened_chat(self, request: Request) -> tuple[list[int], TextStream]:
        prompt = self._rendered(request)
        stream = TextStream(
            self._text.tokenizer,
            stop=request.stop,
            style=self._dialect.style,
            starts_in_reasoning=opens_reasoning(prompt),
            tools=request.tools,
        )
        return self._text.tokenizer.encode(prompt, special=False), stream

    def _rendered(self, request: Request) -> str:
        template = self._text.chat_template
        if template is None:
            raise BadInput("this model has no chat template; ask with a prompt instead of messages")
        variables: dict[str, Any] = {}
        if request.thinking is not None:
            if not self._dialect.thinking:
                raise BadInput("this model's chat template has no switch for reasoning; leave thinking out")
            variables[self._dialect.thinking] = request.thinking
        return render_chat(
            template,
            request.messages or (),
            tools=request.tools or None,
            special_tokens=self._text.special_tokens,
            **variables,
        )

    def with_text(self, entries: Sequence[TokenLogprob]) -> tuple[TokenLogprob, ...]:
        return tuple(self._with_text(entry) for entry in entries)

    def _with_text(self, entry: TokenLogprob) -> TokenLogprob:
        text = self._text.tokenizer.decode([entry.token_id], skip_special=False)
        return msgspec.structs.replace(entry, token=text, top=self.with_text(entry.top))


class NoWording:
    """Tokens in, tokens out."""

    has_chat = False
    stop_ids: tuple[int, ...] = ()

    def opened(self, request: Request) -> tuple[list[int], TextStream | Silent]:
        if request.stop:
            raise BadInput("stop strings need a tokenizer, which this model does not have; use stop_token_ids")
        return self.prompt_tokens(request), Silent()

    def prompt_tokens(self, request: Request | ScoreRequest) -> list[int]:
        if request.token_ids is None:
            raise BadInput(NO_TEXT)
        return list(request.token_ids)

    def with_text(self, entries: Sequence[TokenLogprob]) -> tuple[TokenLogprob, ...]:
        return tuple(entries)


class Silent:
    """A TextStream that has no words."""

    def push(self, token_ids: Sequence[int]) -> Piece:
        return Piece()

    def finish(self) -> Piece:
        return Piece()
