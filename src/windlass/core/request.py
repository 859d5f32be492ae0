"""Requests to a Client and its results. Values only: knows no engine, no tokenizer, no HTTP."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Literal, cast, get_args

import msgspec

from windlass.core.model import Frozen
from windlass.core.tiers.stats import TierStats
from windlass.errors import BadInput

FinishReason = Literal["stop", "length", "cancelled", "error"]
"""`stop`: a stop token or string; `length`: max_tokens or the context length was reached."""

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow."""
MAX_TOP_LOGPROBS = 128
MAX_STOP_STRINGS = 64
MAX_BIAS = 100.0
MAX_PENALTY = 2.0
"""OpenAI's limits of logit_bias and of the presence and frequency penalties."""
MAX_TEMPERATURE = 100.0
REPETITION_PENALTIES = (0.01, 100.0)
"""Far beyond these, and beyond that temperature, logits overflow."""
PRIORITIES = (-4, 4)
MAX_INTEGER = 2**31 - 1
"""Of counts, positions and token ids: larger than any vocabulary or context."""


def _check(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise BadInput(f"{name} is {value:g}; it should be between {low:g} and {high:g}", field=name.partition(" ")[0])


def _check_integer(name: str, value: int | None, low: int, high: int = MAX_INTEGER) -> None:
    if value is not None and not low <= value <= high:
        raise BadInput(f"{name} is {shown_integer(value)}; it should be between {low:,} and {high:,}", field=name)


def _check_tokens(name: str, tokens: Collection[int] | None) -> None:
    for token in (min(tokens), max(tokens)) if tokens else ():
        if not 0 <= token <= MAX_INTEGER:
            raise BadInput(f"{name} has token {shown_integer(token)}; token ids are between 0 and {MAX_INTEGER:,}", field=name)


def shown_integer(value: int) -> str:
    """Python refuses to print integers of thousands of digits."""
    return str(value) if abs(value) < 2**64 else "a number of more than 64 bits"


class Sampling(Frozen):
    """Sampling parameters, applied in this order: bias, penalties, temperature, min-p, top-k, top-p."""

    temperature: float = 1.0
    """0 is greedy (the lowest id of equally likely tokens)."""
    top_k: int | None = None
    """Sample from the k most likely tokens; None: from all."""
    top_p: float = 1.0
    """Sample from the most likely tokens up to this total probability."""
    min_p: float = 0.0
    """Minimum probability, relative to the most likely token."""
    repetition_penalty: float = 1.0
    """Logits of tokens in prompt or output: divided by it where positive, multiplied where negative (arXiv 1909.05858)."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence of the token in the output."""
    logit_bias: dict[int, float] = {}
    """Token id -> value added to its logit."""
    seed: int | None = None
    """The same seed gives the same tokens, whatever else is in the batch. None: random per request."""

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _check_integer("top_k", self.top_k, 1)
        if not 0.0 < self.top_p <= 1.0:
            raise BadInput(f"top_p is {self.top_p:g}; it should be more than 0 and at most 1", field="top_p")
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("repetition_penalty", self.repetition_penalty, *REPETITION_PENALTIES)
        _check("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check_tokens("logit_bias", self.logit_bias)
        for token, bias in self.logit_bias.items():
            _check(f"logit_bias of token {token}", bias, -MAX_BIAS, MAX_BIAS)
        _check_integer("seed", self.seed, -(2**63), 2**64 - 1)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


GREEDY = Sampling(temperature=0.0)
NO_EFFORT = ("none", "minimal")
"""Values of `reasoning_effort` that switch reasoning off, for templates that only have a switch."""


ConstraintKind = Literal["json_object", "json_schema", "regex", "grammar", "choice"]


class Constraint(Frozen):
    """Constrains the whole answer; reasoning before it is free."""

    kind: ConstraintKind
    value: str = ""
    """A JSON schema, a regular expression, a grammar in Lark or GBNF syntax, or a JSON list of strings; empty for `json_object`."""
    is_strict: bool = True
    """Rejects a JSON schema with keywords that cannot be enforced token by token; otherwise the rest of it is enforced."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(ConstraintKind):
            raise _bad(f"unknown constraint kind {self.kind!r}; use {', '.join(get_args(ConstraintKind))}")
        if (self.kind == "json_object") != (not self.value):
            needs = "takes no value" if self.kind == "json_object" else "needs a value"
            raise _bad(f"a constraint of kind {self.kind} {needs}")
        if self.kind == "choice" and not self.choices:
            raise _bad("a constraint of kind choice needs at least one string")
        if self.kind == "json_schema" and not isinstance(_json(self.value, "the JSON schema"), (dict, bool)):
            raise _bad("a JSON schema should be an object (or true or false)")

    @property
    def choices(self) -> tuple[str, ...]:
        """Of kind `choice`."""
        found = _json(self.value, "the list of choices")
        try:
            return msgspec.convert(found, tuple[str, ...])
        except msgspec.ValidationError:
            raise _bad("the value of a constraint of kind choice should be a JSON list of strings") from None


def _bad(message: str) -> BadInput:
    return BadInput(message, field="constraint")


def _json(text: str, what: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise _bad(f"{what} is not valid JSON: {error}") from None
    except RecursionError:
        raise _bad(f"{what} is nested too deeply") from None


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
    """GROUP/USER: while requests are queued, the scheduler gives groups equal shares of the engine's tokens, and within a group users."""
    priority: int = 0
    """Lower is more urgent: each step below doubles the share of its owner, and at equal shares it is served first."""
    adapter: str = ""
    """The name of a LoRA adapter that the engine has; empty: the model as it is."""
    model: str = ""
    """The name that the caller asked for. A router chooses by it; a client of one model ignores it."""

    def __post_init__(self) -> None:
        given = [name for name in ("messages", "prompt", "token_ids") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise BadInput(
                f"a request has exactly one of messages, prompt and token_ids; this one has {found}", field=("prompt", *given)[-1]
            )
        self._check_is_chat()
        _check_tokens("token_ids", self.token_ids)
        _check_tokens("stop_token_ids", self.stop_token_ids)
        _check_integer("max_tokens", self.max_tokens, 0)
        _check_integer("min_tokens", self.min_tokens, 0)
        _check_integer("priority", self.priority, *PRIORITIES)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise BadInput(f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}", field="min_tokens")
        if len(self.stop) > MAX_STOP_STRINGS or not all(self.stop):
            raise BadInput(
                f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are allowed, none of them empty", field="stop"
            )
        _check_integer("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        _check_integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_TOP_LOGPROBS)
        _check_integer("prompt_logprobs_start", self.prompt_logprobs_start, 0)
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

    def _check_is_chat(self) -> None:
        given = {
            "tools": bool(self.tools),
            "thinking": self.thinking is not None,
            "reasoning_effort": bool(self.reasoning_effort),
            "continues_answer": self.continues_answer,
        }
        for field in (name for name, is_given in given.items() if is_given and self.messages is None):
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

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.token_ids is None):
            raise BadInput("a score request has exactly one of prompt and token_ids", field="prompt")
        _check_tokens("token_ids", self.token_ids)
        _check_integer("start", self.start, 0)
        _check_integer("top", self.top, 0, MAX_TOP_LOGPROBS)


Pooling = Literal["last", "mean"]


class EmbedRequest(Frozen):
    """The embedding of a text: exactly one of `prompt` and `token_ids`."""

    prompt: str | None = None
    token_ids: tuple[int, ...] | None = None
    pooling: Pooling = "last"
    """The hidden state of the last token, or the mean over all."""

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.token_ids is None):
            raise BadInput("an embedding request has exactly one of prompt and token_ids", field="input")
        _check_tokens("token_ids", self.token_ids)


class Embedding(Frozen):
    vector: tuple[float, ...]
    """Not normalized."""
    num_tokens: int


class TokenLogprob(Frozen):
    token_id: int
    logprob: float
    """Natural, of the model's own distribution: before bias, penalties, temperature and filters."""
    rank: int = 0
    """1 for the most likely token at its position; 0: unknown."""
    token: str = ""
    """Its text, if the client has a tokenizer."""
    raw: bytes = b""
    """Its bytes, if it is part of a character; empty: the UTF-8 bytes of its text."""
    top: tuple[TokenLogprob, ...] = ()
    """The most likely tokens at this position, best first."""


class Scores(Frozen):
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...]
    """One per token; None before `start` and for the first token."""

    @property
    def total(self) -> float:
        return sum(found.logprob for found in self.logprobs if found is not None)


class ToolCall(Frozen):
    id: str
    name: str
    arguments: str
    """JSON, as the model wrote it."""


class CallPiece(Frozen):
    """The next part of a tool call that is being written. The first one of a call has its name."""

    id: str
    name: str = ""
    arguments: str = ""


class Usage(Frozen):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    reasoning_tokens: int = 0
    """Of the completion."""
    energy_joules: float | None = None
    """Attributed to the request by the server, if it was asked to; with the last of its sequences."""


class Timings(Frozen):
    queue_seconds: float = 0.0
    """From submission to the first step."""
    prefill_seconds: float = 0.0
    """From then to the first token."""
    decode_seconds: float = 0.0
    """From the first token to the last."""


class Delta(Frozen):
    """An increment of the output. Only the last one has a finish reason and timings.

    Usage comes with the last one; a first one without tokens may have it too, which says that the request was accepted.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    """Complete, except for one that the length cut off."""
    call_pieces: tuple[CallPiece, ...] = ()
    """The same calls as they are written. A client may leave them out; the pieces of a call add up to it."""
    token_ids: tuple[int, ...] = ()
    """May run ahead of the text, which is held back until a character, a tag or a stop string is complete."""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """Once, in the first delta or before it has tokens."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The stop token, last of `token_ids` and not part of the text; None if a stop string or the length ended the output."""
    usage: Usage | None = None
    timings: Timings | None = None
    notes: dict[str, str] = {}
    """How it was answered, by name: a router's decision. Once, in the first delta; a server sends them as headers."""


class DeviceMemory(Frozen):
    name: str
    used_bytes: int
    """By all processes."""
    total_bytes: int
    own_bytes: int = 0
    """By the engine alone."""


class Stats(Frozen):
    """Current state and counters of an engine since its start."""

    waiting: int = 0
    running: int = 0
    num_blocks: int = 0
    blocks_used: int = 0
    """Held by running sequences; cached blocks are not counted."""
    blocks_cached: int = 0
    """Free blocks that hold a cached prefix."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    late: int = 0
    """Cancelled because their deadline passed."""
    drafted: int = 0
    """Tokens that speculation guessed and a step verified, and how many of them were right."""
    accepted: int = 0
    process_bytes: int = 0
    """Resident memory of the engine process; 0: unknown."""
    devices: tuple[DeviceMemory, ...] = ()
    """Accelerators in use, if known."""
    tiers: TierStats | None = None
    """Where weights are and how they are read; None: all are in the first tier."""


class Info(Frozen):
    model: str
    context_tokens: int
    """Prompt and output together."""
    vocab_size: int = 0
    max_sequences: int = 1
    stop_token_ids: tuple[int, ...] = ()
    has_text: bool = True
    """Has a tokenizer; otherwise token ids only."""
    has_chat: bool = True
    tools: str = "template"
    """How the model is shown tools: by its chat `template`, by our plain `convention`, or empty: not at all."""
    device: str = ""
    scheme: str = ""
    kv: str = ""
    weights_bytes: int = 0
    kv_bytes: int = 0
    load_seconds: float = 0.0
    details: Mapping[str, str] = {}
    stats: Stats | None = None
