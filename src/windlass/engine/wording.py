"""Text on top of tokens: a request's words to token ids, and a stream of token ids to the parts of an answer. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from windlass.core.request import NO_EFFORT, Request, ScoreRequest, TokenLogprob
from windlass.engine.protocol import Vocabulary
from windlass.errors import BadInput
from windlass.families.dialect import dialect
from windlass.text.call_grammar import Asked, answer_grammar
from windlass.text.chat import render_chat
from windlass.text.reasoning import opens_reasoning
from windlass.text.stream import Piece, TextStream, special_marks
from windlass.text.styles import PLAIN, style_tags

if TYPE_CHECKING:
    from windlass.weights.text_of import ModelText

NO_TEXT = "this model has no tokenizer, so it takes token_ids only; give its tokenizer.json, or ask with token_ids"


class Opened(NamedTuple):
    tokens: list[int]
    """The prompt's."""
    stream: TextStream | Silent
    """Makes text of the answer's tokens."""
    grammar: str = ""
    """What the answer must be; empty: anything."""


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

    def opened(self, request: Request) -> Opened:
        if request.messages is not None:
            return self._opened_chat(request)
        tokens = self.prompt_tokens(request)
        stream = TextStream(self._text.tokenizer, stop=request.stop, prompt=tokens)
        return Opened(tokens, stream, answer_grammar(Asked(style=PLAIN, constraint=request.constraint), {}))

    def prompt_tokens(self, request: Request | ScoreRequest) -> list[int]:
        if request.token_ids is not None:
            return list(request.token_ids)
        assert request.prompt is not None
        return self._text.tokenizer.encode(request.prompt)

    def chat_tokens(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return self._encoded(self._rendered(Request(messages=tuple(map(dict, messages)))))

    def decoded(self, token_ids: Sequence[int]) -> str:
        text_of = self._text.tokenizer.backend.id_to_token
        for token in token_ids:
            if not 0 <= token < 2**32 or text_of(token) is None:
                raise BadInput(f"there is no token {token}; this model's tokens are 0 to {self._text.tokenizer.vocab_size - 1}")
        return self._text.tokenizer.decode(token_ids, skip_special=False)

    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self._text.tokenizer.backend.to_str(), list(self._text.stop_ids))

    def _opened_chat(self, request: Request) -> Opened:
        prompt = self._rendered(request)
        style, tools = self._dialect.style, _shown_tools(request)
        starts_in_reasoning = opens_reasoning(prompt, style_tags(style))
        stream = TextStream(
            self._text.tokenizer,
            stop=request.stop,
            style=style,
            starts_in_reasoning=starts_in_reasoning,
            tools=tools,
        )
        asked = Asked(
            style=style,
            constraint=request.constraint,
            tools=tools,
            tool_choice=request.tool_choice,
            reasons="already" if starts_in_reasoning else "first" if self._may_reason(request) else "never",
        )
        return Opened(self._encoded(prompt), stream, answer_grammar(asked, special_marks(self._text.tokenizer, style)))

    def _encoded(self, prompt: str) -> list[int]:
        return self._text.tokenizer.encode(prompt, special=False)

    def _may_reason(self, request: Request) -> bool:
        return self._dialect.reasons and request.thinking is not False and request.reasoning_effort not in NO_EFFORT

    def _rendered(self, request: Request) -> str:
        template = self._text.chat_template
        if template is None:
            raise BadInput("this model has no chat template; ask with a prompt instead of messages")
        return render_chat(
            template,
            [self._recalling(message) for message in request.messages or ()],
            tools=_shown_tools(request) or None,
            special_tokens=self._text.special_tokens,
            **self._variables(request),
        )

    def _recalling(self, message: dict[str, Any]) -> dict[str, Any]:
        """Reasoning that led to a call, where the template looks for it; beside content it would be refused."""
        key, thought = self._dialect.past_reasoning, message.get("reasoning_content")
        if not key or not thought or not message.get("tool_calls") or message.get("content"):
            return message
        return {**message, key: thought}

    def _variables(self, request: Request) -> dict[str, Any]:
        """Of the template's own; what it does not have is refused."""
        variables: dict[str, Any] = {}
        thinking, effort = request.thinking, request.reasoning_effort
        if effort is not None and self._dialect.effort:
            variables[self._dialect.effort] = effort
        elif effort is not None and self._dialect.thinking:
            thinking = effort not in NO_EFFORT if thinking is None else thinking
        elif effort is not None:
            raise BadInput("this model's chat template has no measure of reasoning; leave reasoning_effort out")
        if thinking is not None:
            if not self._dialect.thinking:
                raise BadInput("this model's chat template has no switch for reasoning; leave thinking out")
            variables[self._dialect.thinking] = thinking
        return variables

    def with_text(self, entries: Sequence[TokenLogprob]) -> tuple[TokenLogprob, ...]:
        return tuple(self._with_text(entry) for entry in entries)

    def _with_text(self, entry: TokenLogprob) -> TokenLogprob:
        text = self._text.tokenizer.decode([entry.token_id], skip_special=False)
        return msgspec.structs.replace(entry, token=text, top=self.with_text(entry.top))


class NoWording:
    """Tokens in, tokens out."""

    has_chat = False
    stop_ids: tuple[int, ...] = ()

    def opened(self, request: Request) -> Opened:
        if request.stop:
            raise BadInput("stop strings need a tokenizer, which this model does not have; use stop_token_ids")
        if request.constraint is not None:
            raise BadInput("a constraint needs a tokenizer, which this model does not have")
        return Opened(self.prompt_tokens(request), Silent())

    def prompt_tokens(self, request: Request | ScoreRequest) -> list[int]:
        if request.token_ids is None:
            raise BadInput(NO_TEXT)
        return list(request.token_ids)

    def chat_tokens(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        raise BadInput(NO_TEXT)

    def decoded(self, token_ids: Sequence[int]) -> str:
        raise BadInput("this model has no tokenizer, so its tokens cannot be told as text")

    def vocabulary(self) -> Vocabulary:
        raise BadInput(NO_TEXT)

    def with_text(self, entries: Sequence[TokenLogprob]) -> tuple[TokenLogprob, ...]:
        return tuple(entries)


def _shown_tools(request: Request) -> tuple[dict[str, Any], ...]:
    """Tools that may not be called are not spoken of."""
    return () if request.tool_choice == "none" else request.tools


class Silent:
    """A TextStream that has no words."""

    def push(self, token_ids: Sequence[int]) -> Piece:
        return Piece()

    def finish(self) -> Piece:
        return Piece()
