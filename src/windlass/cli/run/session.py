"""`windlass run` from its options to an exit code: opens the model, then one answer or a chat."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from windlass.cli.run.answer import TimedAnswer, answer, summary
from windlass.cli.run.chat import Chat, with_system
from windlass.cli.run.options import ChatSettings, RunOptions, settings_from
from windlass.cli.run.screen import Screen
from windlass.cli.run.terminal import keyboard
from windlass.core.client import SyncClient
from windlass.core.launch import Launch
from windlass.core.request import Info, Request
from windlass.errors import BadInput
from windlass.open.client import open_client, require_torch
from windlass.open.compile import compile_kernels
from windlass.open.generation import generation_defaults
from windlass.open.plan import apply_plan, read_plan
from windlass.open.progress import ByteBar, byte_progress, node_progress
from windlass.open.resolve import runnable_files
from windlass.units import format_bytes, format_context, format_seconds

STDIN = "-"
Opener = Callable[[Launch, bool], AbstractContextManager[SyncClient]]
"""A Launch and whether progress is shown -> a client that is ready."""


def start(model: str, options: RunOptions, opener: Opener | None = None) -> int:
    prompt = _prompt(options)
    if prompt is None and options.as_json:
        raise BadInput("--json prints one answer: add --prompt TEXT, or pipe in a text")
    path = runnable_files(model, shown=not options.as_json)
    launch = launch_for(path, options)
    settings = settings_from(options, generation_defaults(path))
    with (opener or ready_client)(launch, not options.as_json) as client:
        info = client.info()
        _check_system(options, info)
        if prompt is not None:
            return _one(client, info, settings, prompt, options)
        return _chat(client, info, settings, options)


def launch_for(path: Path, options: RunOptions) -> Launch:
    """One sequence at a time, unless a plan says more."""
    launch = msgspec.structs.replace(options.launch, model=str(path), max_sequences=1)
    return launch if options.plan is None else apply_plan(launch, read_plan(options.plan))


@contextmanager
def ready_client(launch: Launch, shown: bool) -> Generator[SyncClient]:
    """A client whose model is loaded, with a progress bar meanwhile. Its process ends with the block."""
    require_torch("running a model")
    compile_kernels(shown, launch.device)
    with ExitStack() as bars:
        if launch.is_single:
            started = bars.enter_context(byte_progress(f"loading {Path(launch.model).name}", shown))
            client = SyncClient(open_client(launch, ByteBar(started)))
        else:
            nodes = bars.enter_context(node_progress(shown))
            client = SyncClient(open_client(launch, None, nodes, _remark if shown else lambda _: None))
        try:
            offloaded = client.info().details.get("offload")
        except BaseException:
            client.close()
            raise
    if offloaded and shown:
        _remark(offloaded)
    with client:
        yield client


def _remark(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _prompt(options: RunOptions) -> str | None:
    """From --prompt or standard input; None: an interactive chat."""
    if options.prompt not in (None, STDIN) or (options.prompt is None and sys.stdin.isatty()):
        text = options.prompt
    else:
        text = sys.stdin.read().strip("\n")
    if text is not None and not text.strip():
        raise BadInput("the prompt is empty; use --prompt TEXT, pipe in a text, or start a chat from a terminal")
    return text


def _check_system(options: RunOptions, info: Info) -> None:
    if not info.has_text:
        raise BadInput(f"{info.model} has no tokenizer; copy tokenizer.json (or the .t file) next to the model")
    if options.system is not None and not info.has_chat:
        raise BadInput(f"{info.model} has no chat template, so --system cannot be used; put it into the prompt")


def request_for(info: Info, settings: ChatSettings, prompt: str, system: str | None) -> Request:
    """A base model, without a chat template, gets the text as it is."""
    sampling, limit = settings.sampling_params(), settings.max_tokens
    if not info.has_chat:
        return Request(prompt=prompt, sampling=sampling, max_tokens=limit)
    messages = tuple(with_system(system, [{"role": "user", "content": prompt}]))
    return Request(messages=messages, sampling=sampling, max_tokens=limit, thinking=settings.thinking)


def _one(client: SyncClient, info: Info, settings: ChatSettings, prompt: str, options: RunOptions) -> int:
    screen = Screen()
    request = request_for(info, settings, prompt, options.system)
    found = answer(client, request, None if options.as_json else screen, stop_loops=settings.stop_loops)
    if options.as_json:
        text = msgspec.json.format(msgspec.json.encode(as_json(found, info)), indent=2).decode()
        sys.stdout.write(text + "\n")
    else:
        screen.remark(f"{summary(found)}; {numbers(settings)}")
    return 0


def as_json(found: TimedAnswer, info: Info) -> dict[str, Any]:
    return {
        "model": info.model,
        **msgspec.to_builtins(found),
        "tokens_per_second": found.tokens_per_second,
        "load_seconds": info.load_seconds,
    }


def _chat(client: SyncClient, info: Info, settings: ChatSettings, options: RunOptions) -> int:
    screen = Screen()
    screen.remark(greeting(info))
    screen.remark(f"sampling: {numbers(settings)}; /set changes it")
    if not info.has_chat:
        screen.remark("a base model without a chat template: it continues what you type as plain text")
    with keyboard() as read:
        Chat(client, info, settings, screen, options.system).loop(read)
    return 0


def numbers(settings: ChatSettings) -> str:
    """`temperature 0.7, top_p 0.95`."""
    return ", ".join(f"{name} {value:g}" for name, value in settings.sampling.items())


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
