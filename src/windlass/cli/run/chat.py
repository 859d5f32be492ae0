"""A chat in the terminal: lines in, answers out, and slash commands."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from windlass.cli.run.answer import Interrupted, TimedAnswer, answer, summary
from windlass.cli.run.options import ChatSettings
from windlass.cli.run.screen import Screen
from windlass.core.client import SyncClient
from windlass.core.constants import DECODE_ERRORS
from windlass.core.model import Frozen
from windlass.core.request import Info, Request, Usage
from windlass.errors import BadInput, Error, UnknownName
from windlass.units import parse_path

HELP = """/help                   show this help
/clear                  start a new chat
/system [TEXT]          set the system prompt; without TEXT show it, `/system off` removes it
/set [NAME VALUE]       temperature, top_p, top_k, min_p, seed, max_tokens, penalties, thinking, stop_loops; without NAME show them
/save FILE, /load FILE  save or load the chat as JSON
/tokens                 show how much of the context is used
/exit                   exit (or Ctrl-D, or Ctrl-C twice)
\"\"\" before and after a text sends several lines at once."""

QUOTES = '"""'
Read = Callable[[str], str]
"""Prompts for a line; raises EOFError at the end of input."""


class SavedChat(Frozen):
    """What /save writes."""

    model: str
    system: str | None
    messages: list[dict[str, Any]]


class Chat:
    def __init__(self, client: SyncClient, info: Info, settings: ChatSettings, screen: Screen, system: str | None = None) -> None:
        self._client, self._info, self._settings, self._screen = client, info, settings, screen
        self._system = system
        self._messages: list[dict[str, Any]] = []
        self._usage: Usage | None = None
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: self._say(HELP),
            "clear": self._clear,
            "system": self._set_system,
            "set": self._set,
            "save": self._save,
            "load": self._load,
            "tokens": self._tokens,
        }

    def loop(self, read: Read) -> None:
        """Until /exit, the end of input, or Ctrl-C twice with nothing between."""
        interrupted = False
        while True:
            try:
                line = self._line(read)
                interrupted = False
                if line in ("/exit", "/quit", "/bye"):
                    return
                self.take(line)
            except Interrupted as stopped:
                self._keep(stopped.so_far)
            except KeyboardInterrupt:
                self._say("")
                if interrupted:
                    return
                interrupted = True
                self._say("press Ctrl-C again, or Ctrl-D, to exit")
            except EOFError:
                self._say("")
                return

    def take(self, line: str) -> None:
        """A command or a message. Errors are printed, and the chat continues."""
        try:
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._ask(line)
        except Error as error:
            self._say(str(error))

    def _line(self, read: Read) -> str:
        line = read(">>> ").strip()
        if not line.startswith(QUOTES):
            return line
        lines = [line.removeprefix(QUOTES)]
        while not lines[-1].rstrip().endswith(QUOTES):
            lines.append(read("... "))
        lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
        return "\n".join(lines).strip()

    # --- messages

    def _ask(self, text: str) -> None:
        user = {"role": "user", "content": text}
        self._messages.append(user)
        try:
            self._keep(answer(self._client, self._request(text), self._screen, stop_loops=self._settings.stop_loops))
        except Error as error:
            self._messages.pop()
            hint = " (/clear starts a new chat)" if isinstance(error, BadInput) and len(self._messages) > 1 else ""
            raise BadInput(f"{error}{hint}") from None

    def _request(self, text: str) -> Request:
        sampling, limit = self._settings.sampling_params(), self._settings.max_tokens
        if not self._info.has_chat:
            return Request(prompt=text, sampling=sampling, max_tokens=limit)
        messages = tuple(with_system(self._system, self._messages))
        return Request(messages=messages, sampling=sampling, max_tokens=limit, thinking=self._settings.thinking)

    def _keep(self, found: TimedAnswer) -> None:
        """Keeps the answer in the history, even if it was cut off."""
        self._usage = found.usage or self._usage
        self._screen.remark(summary(found))
        if not self._info.has_chat:
            self._messages.clear()  # no history without a chat template
            return
        if not found.content and not found.reasoning and found.finish_reason == "cancelled":
            self._messages.pop()  # interrupted before the first token: drop the question too
            return
        message: dict[str, Any] = {"role": "assistant", "content": found.content}
        if found.reasoning:
            message["reasoning_content"] = found.reasoning
        self._messages.append(message)

    # --- commands

    def _command(self, line: str) -> None:
        name, _, rest = line[1:].partition(" ")
        if name.lower() not in self._commands:
            raise UnknownName("command", f"/{name}", [f"/{known}" for known in (*self._commands, "exit")])
        self._commands[name.lower()](rest.strip())

    def _clear(self, rest: str) -> None:
        self._messages.clear()
        self._usage = None
        self._say("started a new chat")

    def _set_system(self, text: str) -> None:
        if text and not self._info.has_chat:
            raise BadInput("this model has no chat template, so it takes no system prompt")
        if text:
            self._system = None if text.lower() == "off" else text.strip("\"'")
        self._say(f"system: {self._system or '-'}")

    def _set(self, rest: str) -> None:
        words = rest.split(maxsplit=1)
        if not words:
            self._say("  ".join(f"{name} {value}" for name, value in self._settings.shown().items()))
            return
        if len(words) != 2:
            raise BadInput(f"/set {words[0]} needs a value, as in `/set temperature 0.5`")
        self._settings.change(words[0], words[1])
        self._say(f"{words[0]}: {self._settings.shown()[words[0].replace('-', '_').lower()]}")

    def _save(self, rest: str) -> None:
        path = _file(rest, "/save")
        saved = SavedChat(model=self._info.model, system=self._system, messages=self._messages)
        try:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(saved), indent=2))
        except OSError as error:
            raise BadInput(f"{path} cannot be written: {error.strerror}") from None
        self._say(f"saved to {path}")

    def _load(self, rest: str) -> None:
        path = _file(rest, "/load")
        try:
            saved = msgspec.json.decode(path.read_bytes(), type=SavedChat)
        except OSError as error:
            raise BadInput(f"{path} cannot be read: {error.strerror}") from None
        except DECODE_ERRORS as error:
            raise BadInput(f"{path} is not a saved chat: {error}") from None
        self._system, self._messages, self._usage = saved.system, list(saved.messages), None
        self._say(f"loaded {len(self._messages)} messages of a chat with {saved.model}")

    def _tokens(self, rest: str) -> None:
        used = self._usage.prompt_tokens + self._usage.completion_tokens if self._usage is not None else 0
        self._say(f"{used:,} of {self._info.context_tokens:,} tokens used")

    def _say(self, text: str) -> None:
        self._screen.remark(text)


def with_system(system: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": system}, *messages] if system else list(messages)


def _file(rest: str, command: str) -> Path:
    try:
        words = shlex.split(rest)
    except ValueError:  # an unclosed quote
        words = [rest]
    if len(words) != 1:
        raise BadInput(f"{command} needs one file name")
    return parse_path(words[0])
