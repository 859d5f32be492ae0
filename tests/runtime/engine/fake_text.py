"""A tokenizer of 64 single characters, with and without a chat template. No torch."""

from __future__ import annotations

import string
from contextlib import suppress

import tokenizers

from windlass.core.request import Request
from windlass.errors import BadInput
from windlass.model.text.chat.template import render_chat
from windlass.model.text.tokenize.tokenizer import Tokenizer
from windlass.runtime.engine.client.text_processor import EncodedRequest, TextProcessor
from windlass.runtime.weights.text.files import ModelText, SamplingDefaults

CHARACTERS = (string.ascii_lowercase + string.ascii_uppercase + string.digits + " .")[:64]
TEMPLATE = "{% for message in messages %}{{ message.role[0] }}.{{ message.content }}{% endfor %}a."
THINKING_TEMPLATE = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}N{% endif %}{# <tool_call> </think> #}"


def model_text(template: str | None = TEMPLATE, stop_ids: tuple[int, ...] = ()) -> ModelText:
    vocabulary = {character: number for number, character in enumerate(CHARACTERS)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.decoder = tokenizers.decoders.Fuse()
    return ModelText(
        tokenizer=Tokenizer(backend, {}),
        chat_template=template,
        special_tokens={},
        stop_ids=stop_ids,
        defaults=SamplingDefaults(),
    )


def ids(text: str) -> list[int]:
    return [CHARACTERS.index(character) for character in text]


def words(token_ids: list[int]) -> str:
    return "".join(CHARACTERS[token] for token in token_ids)


def rendered(processor: TextProcessor, request: Request) -> str:
    """A chat, in this process; clients have it done in another."""
    *others, last = processor.chat_texts(request)
    for text in others:
        with suppress(BadInput):
            return render_chat(text.template, **text.values)
    return render_chat(last.template, **last.values)


def encoded(processor: TextProcessor, request: Request) -> EncodedRequest:
    return processor.encode_request(request, rendered=rendered(processor, request) if request.messages is not None else "")
