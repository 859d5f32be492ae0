"""Text to tokens and back: encodes requests, and decodes output tokens into content, reasoning and tool calls. No torch."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from windlass.core.request import NO_EFFORT, Request, ScoreRequest, TokenLogprob, shown_integer
from windlass.errors import BadInput, TooLong
from windlass.model.families.chat.dialect import dialect
from windlass.model.text.chat.tool_convention import STYLE, has_tool_messages, system_into_user, with_tools_as_text
from windlass.model.text.grammar.tool_grammar import OutputSpec, answer_grammar
from windlass.model.text.parse.reasoning import opens_reasoning
from windlass.model.text.parse.stream import TextPiece, TextStream, special_marks
from windlass.model.text.parse.styles import CHANNELS, FINAL_CHANNEL, PLAIN, TAGS, style_tags
from windlass.model.text.tokenize.tokenizer import LONG_CHARACTERS, UNFINISHED
from windlass.runtime.engine.protocol import TokenizerData

if TYPE_CHECKING:
    from windlass.runtime.weights.text.files import ModelText

NO_TEXT = "this model has no tokenizer; add its tokenizer.json, or send token_ids"


_TOOLS = re.compile(r"\btools\b")
"""The name under which templates get them."""


class EncodedRequest(NamedTuple):
    tokens: list[int]
    """The prompt's."""
    stream: TextStream | NoText
    """Decodes the output tokens."""
    grammar: str = ""
    """Constrains the output; empty: unconstrained."""
    is_slow_grammar: bool = False
    """It takes long to compile."""


class ChatText(NamedTuple):
    """What a chat template is given, and its own text."""

    template: str
    values: dict[str, Any]


class TextProcessor:
    def __init__(self, text: ModelText) -> None:
        self._text = text
        self._dialect = dialect(text.chat_template)
        self._token_texts: dict[int, tuple[str, bytes]] = {}
        """Cache of single tokens: their text, and their bytes if they are part of a character."""

    @property
    def has_chat(self) -> bool:
        return self._text.chat_template is not None

    @cached_property
    def tools(self) -> str:
        """How the model is shown tools: by its `template`, by our `convention`, or empty: not at all."""
        template = self._text.chat_template
        return "" if template is None else "template" if _TOOLS.search(template) else "convention"

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self._text.stop_ids

    @cached_property
    def num_tokens(self) -> int:
        """One more than the largest token id."""
        return max(self._text.tokenizer.known_ids, default=-1) + 1

    def encode_request(self, request: Request, context_tokens: int | None = None, rendered: str = "") -> EncodedRequest:
        """`context_tokens`: input that is certainly longer is rejected before it is tokenized, which takes a hundred times its memory.
        `rendered`: of a chat, what the template made of one of `chat_texts`."""
        if request.messages is not None:
            return self._encode_chat(request, context_tokens, rendered)
        tokens = self.prompt_tokens(request, context_tokens)
        stream = TextStream(self._text.tokenizer, stop=request.stop, prompt=tokens)
        return EncodedRequest(tokens, stream, answer_grammar(OutputSpec(style=PLAIN, constraint=request.constraint), {}))

    def prompt_tokens(self, request: Request | ScoreRequest, context_tokens: int | None = None) -> list[int]:
        if request.token_ids is not None:
            return _check_tokens(request.token_ids, context_tokens)
        assert request.prompt is not None
        self._check_fits(request.prompt, context_tokens, "prompt")
        return self._text.tokenizer.encode(request.prompt)

    def plain_tokens(self, text: str) -> list[int]:
        """As it is: a rendered chat has its special tokens."""
        return self._text.tokenizer.encode(text, special=False)

    def describe(self) -> dict[str, Any]:
        found: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **self._text.special_tokens}
        return found | ({"chat_template": self._text.chat_template} if self._text.chat_template is not None else {})

    def decode(self, token_ids: Sequence[int]) -> str:
        unknown = set(token_ids) - self._text.tokenizer.known_ids
        for token in map(shown_integer, unknown):
            raise BadInput(f"there is no token {token}; this model's tokens are 0 to {self.num_tokens - 1}", field="token_ids")
        return self._text.tokenizer.decode(token_ids, skip_special=False)

    def vocabulary(self) -> TokenizerData:
        return TokenizerData(self._text.tokenizer.backend.to_str(), list(self._text.stop_ids))

    def _encode_chat(self, request: Request, context_tokens: int | None, rendered: str) -> EncodedRequest:
        prompt = self._with_beginning(request, rendered)
        self._check_fits(prompt, context_tokens, "messages")
        tools = _usable_tools(request)
        style = STYLE if tools and self.tools == "convention" else self._dialect.style
        starts_in_reasoning = opens_reasoning(prompt, style_tags(style)) and not request.continues_answer
        stream = TextStream(
            self._text.tokenizer,
            stop=request.stop,
            style=style,
            starts_in_reasoning=starts_in_reasoning,
            tools=tools,
            one_call=request.parallel_tool_calls is False,
            must_call=request.tool_choice not in ("auto", "none"),
            begun=request.continues_answer,
        )
        if request.continues_answer:
            return EncodedRequest(self.plain_tokens(prompt), stream)
        asked = OutputSpec(
            style=style,
            constraint=request.constraint,
            tools=tools,
            tool_choice=request.tool_choice,
            parallel=request.parallel_tool_calls is True,
            reasons="already" if starts_in_reasoning else "first" if self._may_reason(request) else "never",
        )
        return EncodedRequest(
            self.plain_tokens(prompt), stream, answer_grammar(asked, special_marks(self._text.tokenizer, style))
        )

    def _check_fits(self, text: str, context_tokens: int | None, field: str) -> None:
        """Below LONG_CHARACTERS nothing is certainly too long: tokenizers may drop spaces."""
        if context_tokens is None or len(text) < LONG_CHARACTERS:
            return
        if len(text) > (most := context_tokens * self._text.tokenizer.longest_token):
            raise TooLong(
                f"a prompt of {len(text):,} characters does not fit in {context_tokens:,} tokens (the context), "
                f"which hold at most {most:,} characters; shorten it",
                field=field,
            )

    def _may_reason(self, request: Request) -> bool:
        return self._dialect.reasons and request.thinking is not False and request.reasoning_effort not in NO_EFFORT

    def chat_texts(self, request: Request, context_tokens: int | None = None) -> list[ChatText]:
        """To be rendered, the first one that the template does not refuse."""
        template = self._text.chat_template
        if template is None:
            raise BadInput("this model has no chat template; send a prompt instead of messages", field="messages")
        messages = list(request.messages or ())
        if context_tokens is not None and len(messages) > context_tokens:
            raise TooLong(
                f"a chat of {len(messages):,} messages does not fit in {context_tokens:,} tokens (the context); leave some out",
                field="messages",
            )
        if request.continues_answer:
            messages.pop()
        tools = _usable_tools(request)
        has_past_calls = self._dialect.style in (PLAIN, TAGS) and has_tool_messages(messages)
        if self.tools != "convention" or not (tools or has_past_calls):
            return [self._chat_text(template, messages, tools, request)]
        chat = with_tools_as_text(messages, tools)
        chats = [chat, system_into_user(chat)]  # some templates refuse a system message
        return [self._chat_text(template, messages, (), request) for messages in chats]

    def _chat_text(
        self, template: str, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], request: Request
    ) -> ChatText:
        given = [self._with_past_reasoning(message) for message in messages]
        values = {"special_tokens": self._text.special_tokens, **self._variables(request)}
        return ChatText(template, {**values, "messages": given, "tools": list(tools) or None})

    def _with_beginning(self, request: Request, prompt: str) -> str:
        if not request.continues_answer or not request.messages:
            return prompt
        return prompt + self._beginning(request.messages[-1], prompt)

    def _beginning(self, message: dict[str, Any], prompt: str) -> str:
        """The answer so far, after what the template puts before an answer; reasoning that the prompt opens is closed."""
        opening, closing = style_tags(self._dialect.style)
        if self._dialect.style == CHANNELS:
            return f"{FINAL_CHANNEL}<|message|>{message['content']}"
        reasoning = message.get("reasoning_content") or ""
        if opens_reasoning(prompt, (opening, closing)):
            return f"{reasoning}{closing}\n{message['content']}"
        return f"{opening}{reasoning}{closing}\n{message['content']}" if reasoning else message["content"]

    def _with_past_reasoning(self, message: dict[str, Any]) -> dict[str, Any]:
        """Puts the reasoning before a tool call where the template expects it; next to content the template rejects it."""
        key, reasoning = self._dialect.past_reasoning, message.get("reasoning_content")
        if not key or not reasoning or not message.get("tool_calls") or message.get("content"):
            return message
        return {**message, key: reasoning}

    def _variables(self, request: Request) -> dict[str, Any]:
        """Variables of the template; those that it does not have are rejected."""
        variables: dict[str, Any] = {}
        thinking, effort = request.thinking, request.reasoning_effort
        if effort is not None and self._dialect.effort:
            variables[self._dialect.effort] = effort
        elif effort is not None and self._dialect.thinking:
            thinking = effort not in NO_EFFORT if thinking is None else thinking
        elif effort is not None and (
            self._dialect.reasons or effort != "none"
        ):  # a model that does not reason need not be told so
            raise BadInput("this model's chat template does not support reasoning_effort; leave it out", field="reasoning_effort")
        if thinking is not None:
            if not self._dialect.thinking:
                raise BadInput(
                    "this model's chat template cannot switch reasoning on or off; leave thinking out", field="thinking"
                )
            variables[self._dialect.thinking] = thinking
        return variables

    def with_text(self, entries: Sequence[TokenLogprob]) -> tuple[TokenLogprob, ...]:
        return tuple(self._with_text(entry) for entry in entries)

    def _with_text(self, entry: TokenLogprob) -> TokenLogprob:
        text, raw = self._text_of(entry.token_id)
        return msgspec.structs.replace(entry, token=text, raw=raw, top=self.with_text(entry.top))

    def _text_of(self, token: int) -> tuple[str, bytes]:
        found = self._token_texts.get(token)
        if found is None:
            text = self._text.tokenizer.decode([token], skip_special=False)
            found = self._token_texts[token] = text, self._text.tokenizer.raw(token) if UNFINISHED in text else b""
        return found


class TokenOnlyProcessor:
    """For a model without a tokenizer: tokens in, tokens out."""

    has_chat = False
    tools = ""
    stop_ids: tuple[int, ...] = ()
    num_tokens = sys.maxsize
    """Not known here."""

    def chat_texts(self, request: Request, context_tokens: int | None = None) -> list[ChatText]:
        raise BadInput(NO_TEXT, field="messages")

    def encode_request(self, request: Request, context_tokens: int | None = None, rendered: str = "") -> EncodedRequest:
        if request.stop:
            raise BadInput("stop strings need a tokenizer, which this model does not have; use stop_token_ids", field="stop")
        if request.constraint is not None:
            raise BadInput("a constraint needs a tokenizer, which this model does not have", field="constraint")
        return EncodedRequest(self.prompt_tokens(request, context_tokens), NoText())

    def prompt_tokens(self, request: Request | ScoreRequest, context_tokens: int | None = None) -> list[int]:
        if request.token_ids is None:
            raise BadInput(NO_TEXT, field="prompt" if request.prompt is not None else "messages")
        return _check_tokens(request.token_ids, context_tokens)

    def plain_tokens(self, text: str) -> list[int]:
        raise BadInput(NO_TEXT)

    def describe(self) -> dict[str, Any]:
        raise BadInput(NO_TEXT)

    def decode(self, token_ids: Sequence[int]) -> str:
        raise BadInput("this model has no tokenizer, so its tokens cannot be decoded", field="token_ids")

    def vocabulary(self) -> TokenizerData:
        raise BadInput(NO_TEXT)

    def with_text(self, entries: Sequence[TokenLogprob]) -> tuple[TokenLogprob, ...]:
        return tuple(entries)


def _check_tokens(token_ids: Sequence[int], context_tokens: int | None) -> list[int]:
    if context_tokens is not None and len(token_ids) > context_tokens:
        raise TooLong(
            f"prompt of {len(token_ids):,} tokens does not fit in {context_tokens:,} tokens (the context); shorten it",
            field="token_ids",
        )
    return list(token_ids)


def _usable_tools(request: Request) -> tuple[dict[str, Any], ...]:
    """With tool_choice `none` the model is not shown the tools."""
    return () if request.tool_choice == "none" else request.tools


class NoText:
    """A TextStream without a tokenizer."""

    num_reasoning_tokens = 0

    def push(self, token_ids: Sequence[int]) -> TextPiece:
        return TextPiece()

    def finish(self) -> TextPiece:
        return TextPiece()
