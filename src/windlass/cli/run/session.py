"""From the command line's words to an engine, a question or a chat, and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from windlass.cli.open.plan import Wanted, wanted
from windlass.cli.run.answer import Answer, answer, summary
from windlass.cli.run.chat import Chat, with_system
from windlass.cli.run.options import RunOptions, Settings, settings_from
from windlass.cli.run.screen import Screen
from windlass.cli.run.terminal import keyboard
from windlass.core.client import SyncClient
from windlass.core.request import Info, Request
from windlass.errors import BadInput
from windlass.open.generation import read_generation_config
from windlass.open.resolve import model_files
from windlass.units import format_bytes, format_context, format_seconds

Opener = Callable[[Wanted, bool], AbstractContextManager[SyncClient]]
"""What is wanted, and whether progress is shown -> a client that is ready."""


def start(word: str, options: RunOptions, opener: Opener | None = None) -> int:
    prompt = _prompt(options)
    if prompt is None and options.as_json:
        raise BadInput("--json gives one answer: say --prompt TEXT, or pipe a text in")
    path = model_files(word, shown=not options.as_json)
    asked = wanted(path, options)
    settings = settings_from(options, read_generation_config(path))
    with (opener or _real)(asked, not options.as_json) as client:
        info = client.info()
        _check_system(options, info)
        if prompt is not None:
            return _one(client, info, settings, prompt, options)
        return _chat(client, info, settings, options)


def _real(asked: Wanted, shown: bool) -> AbstractContextManager[SyncClient]:
    from windlass.cli.run.engine import open_client

    return open_client(asked, shown)


def _prompt(options: RunOptions) -> str | None:
    """Given, or piped in; None: there is somebody to chat with."""
    if options.prompt is not None or sys.stdin.isatty():
        text = options.prompt
    else:
        text = sys.stdin.read().strip("\n")
    if text is not None and not text.strip():
        raise BadInput("the prompt is empty; say --prompt TEXT, pipe a text in, or start a chat from a terminal")
    return text


def _check_system(options: RunOptions, info: Info) -> None:
    if not info.has_text:
        raise BadInput(f"{info.model} has no tokenizer: copy tokenizer.json (or the .t file) from where the model came from")
    if options.system is not None and not info.has_chat:
        raise BadInput(f"{info.model} has no chat template, so --system has no place; put it into the prompt")


def request_for(info: Info, settings: Settings, prompt: str, system: str | None) -> Request:
    """A base model, which has no chat template, is given the text as it is."""
    sampling, limit = settings.made(), settings.max_tokens
    if not info.has_chat:
        return Request(prompt=prompt, sampling=sampling, max_tokens=limit)
    messages = tuple(with_system(system, [{"role": "user", "content": prompt}]))
    return Request(messages=messages, sampling=sampling, max_tokens=limit, thinking=settings.thinking)


def _one(client: SyncClient, info: Info, settings: Settings, prompt: str, options: RunOptions) -> int:
    screen = Screen()
    found = answer(client, request_for(info, settings, prompt, options.system), None if options.as_json else screen)
    if options.as_json:
        text = msgspec.json.format(msgspec.json.encode(as_json(found, info)), indent=2).decode()
        sys.stdout.write(text + "\n")
    else:
        screen.remark(summary(found))
    return 0


def as_json(found: Answer, info: Info) -> dict[str, Any]:
    return {
        "model": info.model,
        **msgspec.to_builtins(found),
        "tokens_per_second": found.tokens_per_second,
        "load_seconds": info.load_seconds,
    }


def _chat(client: SyncClient, info: Info, settings: Settings, options: RunOptions) -> int:
    screen = Screen()
    screen.remark(greeting(info))
    if not info.has_chat:
        screen.remark("a base model without a chat template: what you type is continued as plain text")
    with keyboard() as read:
        Chat(client, info, settings, screen, options.system).loop(read)
    return 0


def greeting(info: Info) -> str:
    parts = [info.model]
    if info.scheme or info.device:
        parts.append(f"{info.scheme} on {info.device}" if info.scheme and info.device else info.scheme or info.device)
    if info.weights_bytes:
        parts.append(f"{format_bytes(info.weights_bytes)} of weights")
    parts.append(f"{format_context(info.context_tokens)} context")
    if info.load_seconds:
        parts.append(f"ready in {format_seconds(info.load_seconds)}")
    return f"{', '.join(parts)}; /help for commands"
