"""Requests: for an answer, for the log-probabilities of a text, for its embedding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, cast

from windlass.core.model import Frozen
from windlass.core.request.constraint import Constraint
from windlass.core.request.limits import MAX_STOP_STRINGS, MAX_TOP_LOGPROBS, PRIORITIES, check_integer, check_tokens
from windlass.core.request.sampling import Sampling
from windlass.errors import BadInput

NO_EFFORT = ("none", "minimal")
"""Values of `reasoning_effort` that switch reasoning off, for templates that only have a switch."""


ADDRESS = "@"
"""With which a GROUP begins that is an address: its users may be strangers to each other, and one need not pay for another."""


class Request(Frozen):
    """Exactly one of `messages` (a chat), `prompt` (text without a template) and `token_ids`."""

    messages: tuple[dict[str, Any], ...] | None = None
    prompt: str | None = None
    token_ids: tuple[int, ...] | None = None
    tools: tuple[dict[str, Any], ...] = ()
    """Functions the model may call, in OpenAI's format; chats only."""
    tool_choice: str = "auto"
    """`none`: no calls; `auto`: the model chooses; `required`: at least one call; otherwise the name of the function to call."""
    parallel_tool_calls: bool | None = None
    """False: at most one call. None: one call if it is required, otherwise as many as the model writes."""
    continues_answer: bool = False
    """The last message is the beginning of the answer: the output continues it. Chats only."""
    thinking: bool | None = None
    """Switches reasoning on or off; None: the template's default. Chats only."""
    reasoning_effort: str | None = None
    """A value that the model's template knows; None: its default. Chats only."""
    sampling: Sampling = Sampling()
    constraint: Constraint | None = None
    max_tokens: int | None = None
    """None: until the model stops or the context is full."""
    min_tokens: int = 0
    """Stop tokens are not sampled before so many tokens."""
    stop: tuple[str, ...] = ()
    """Stop strings: the answer ends before the first one; they may span tokens and are not returned."""
    stop_token_ids: tuple[int, ...] = ()
    """In addition to the model's own."""
    ignore_eos: bool = False
    """Ignore the model's own stop tokens."""
    logprobs: int | None = None
    """Return the log-probability of every output token, and of this many most likely alternatives."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    prompt_logprobs_start: int = 0
    """The first prompt token to return them for; those before may come from the prefix cache."""
    cache_salt: str = ""
    """Cached prefixes are shared only among requests with the same salt."""
    deadline_seconds: float | None = None
    """From submission; a request that takes longer raises `core.client.Late`."""
    owner: str = ""
    """GROUP/USER: while requests are queued, the scheduler gives groups equal shares of the engine's tokens, and within a group users. A group
    is a key or, after an ADDRESS mark, an address."""
    priority: int = 0
    """Lower is more urgent: each step below doubles the share of its owner, and at equal shares it is served first."""
    adapter: str = ""
    """The name of a LoRA adapter that the engine has; empty: the model as it is."""
    model: str = ""
    """The name that the caller asked for. A router chooses by it; a client of one model ignores it."""

    def __post_init__(self) -> None:
        if (self.messages is not None) + (self.prompt is not None) + (self.token_ids is not None) != 1:
            raise self._not_one_input()
        if self.messages is None:
            self._check_no_chat()
        check_tokens("token_ids", self.token_ids)
        check_tokens("stop_token_ids", self.stop_token_ids)
        check_integer("max_tokens", self.max_tokens, 0)
        check_integer("min_tokens", self.min_tokens, 0)
        check_integer("priority", self.priority, *PRIORITIES)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise BadInput(f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}", field="min_tokens")
        if len(self.stop) > MAX_STOP_STRINGS or not all(self.stop):
            raise BadInput(
                f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are allowed, none of them empty", field="stop"
            )
        check_integer("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        check_integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_TOP_LOGPROBS)
        check_integer("prompt_logprobs_start", self.prompt_logprobs_start, 0)
        if self.deadline_seconds is not None and not (math.isfinite(self.deadline_seconds) and self.deadline_seconds > 0):
            raise BadInput(f"deadline_seconds is {self.deadline_seconds:g}; it should be more than 0", field="deadline_seconds")
        self._check_tool_choice()
        self._check_continued()

    def _check_continued(self) -> None:
        if not self.continues_answer:
            return
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or last.get("tool_calls") or not last.get("content"):
            raise BadInput(
                "only a last message with the role assistant, with text and without tool calls, can be continued",
                field="continues_answer",
            )
        if self.constraint is not None or self.tool_choice not in ("none", "auto"):
            raise BadInput(
                "an answer that is continued cannot also be constrained, since its beginning is not checked; remove one of them",
                field="continues_answer",
            )

    def _not_one_input(self) -> BadInput:
        given = [name for name in ("messages", "prompt", "token_ids") if getattr(self, name) is not None]
        found = " and ".join(given) or "none of them"
        return BadInput(
            f"a request has exactly one of messages, prompt and token_ids; this one has {found}", field=("prompt", *given)[-1]
        )

    def _check_no_chat(self) -> None:
        given = {
            "tools": bool(self.tools),
            "thinking": self.thinking is not None,
            "reasoning_effort": bool(self.reasoning_effort),
            "continues_answer": self.continues_answer,
        }
        for field in (name for name, is_given in given.items() if is_given):
            raise BadInput(f"{field} is only valid with messages; a plain prompt has no chat template", field=field)

    def _check_tool_choice(self) -> None:
        choice = self.tool_choice
        if choice in ("none", "auto"):
            return
        if not self.tools:
            raise BadInput(f"tool_choice is {choice!r}, but there are no tools", field="tool_choice")
        if choice != "required" and choice not in (names := [tool_name(tool) for tool in self.tools]):
            raise BadInput(f"tool_choice names {choice!r}, which is not among the tools: {', '.join(names)}", field="tool_choice")
        if self.constraint is not None:
            raise BadInput(
                f"tool_choice {choice!r} requires a call and the constraint an answer; remove one of them",
                field="tool_choice",
            )


def tool_name(tool: Mapping[str, Any]) -> str:
    """Of a tool with or without the `function` wrapper; empty: it has no name."""
    function: Any = tool.get("function", tool)
    name: Any = cast(Mapping[str, Any], function).get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""


class ScoreRequest(Frozen):
    """Log-probabilities of a text: exactly one of `prompt` and `token_ids`."""

    prompt: str | None = None
    token_ids: tuple[int, ...] | None = None
    start: int = 0
    """The first token to score; those before are context only."""
    top: int = 0
    """Also return this many most likely tokens at each position."""
    cache_salt: str = ""
    deadline_seconds: float | None = None
    owner: str = ""

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.token_ids is None):
            raise BadInput("a score request has exactly one of prompt and token_ids", field="prompt")
        check_tokens("token_ids", self.token_ids)
        check_integer("start", self.start, 0)
        check_integer("top", self.top, 0, MAX_TOP_LOGPROBS)


Pooling = Literal["last", "mean"]


class EmbedRequest(Frozen):
    """The embedding of a text: exactly one of `prompt` and `token_ids`."""

    prompt: str | None = None
    token_ids: tuple[int, ...] | None = None
    pooling: Pooling = "last"
    """The hidden state of the last token, or the mean over all."""
    deadline_seconds: float | None = None
    owner: str = ""

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.token_ids is None):
            raise BadInput("an embedding request has exactly one of prompt and token_ids", field="input")
        check_tokens("token_ids", self.token_ids)
