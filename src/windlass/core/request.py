"""What a client is asked and what it answers. Values only: knows no engine, no tokenizer, no HTTP."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Literal, cast, get_args

import msgspec

from windlass.core.model import Frozen
from windlass.errors import BadInput

FinishReason = Literal["stop", "length", "cancelled", "error"]
"""`stop`: a stop token or string; `length`: max_tokens or the context is used up."""

GREEDY_BELOW = 1e-5
"""Temperatures under this take the most likely token: dividing by them would overflow."""
MAX_TOP_LOGPROBS = 128
MAX_STOP_STRINGS = 64
MAX_BIAS = 100.0
MAX_PENALTY = 2.0
"""Of presence and frequency, and of a bias: the limits of OpenAI's API."""
MAX_TEMPERATURE = 100.0
REPETITION_PENALTIES = (0.01, 100.0)
"""Far beyond these, and beyond that temperature, logits are no numbers any more."""
MAX_INTEGER = 2**31 - 1
"""Of counts, places and token ids: no model has more tokens, and no context is longer."""


def _check(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise BadInput(f"{name} is {value:g}; it should be between {low:g} and {high:g}", field=name.partition(" ")[0])


def _check_integer(name: str, value: int | None, low: int, high: int = MAX_INTEGER) -> None:
    if value is not None and not low <= value <= high:
        raise BadInput(f"{name} is {shown_integer(value)}; it should be between {low:,} and {high:,}", field=name)


def _check_tokens(name: str, tokens: Collection[int] | None) -> None:
    for token in (min(tokens), max(tokens)) if tokens else ():
        if not 0 <= token <= MAX_INTEGER:
            raise BadInput(f"{name} has token {shown_integer(token)}; token ids are 0 to {MAX_INTEGER:,} at most", field=name)


def shown_integer(value: int) -> str:
    """Python writes no integers of thousands of digits."""
    return str(value) if abs(value) < 2**64 else "a number of more than 64 bits"


class Sampling(Frozen):
    """How the next token is drawn. Applied in this order: bias, penalties, temperature, min-p, top-k, top-p."""

    temperature: float = 1.0
    """0 always takes the most likely token (the lowest id of equals)."""
    top_k: int | None = None
    """Only the k most likely; None: all."""
    top_p: float = 1.0
    """Only the most likely ones that together reach this probability."""
    min_p: float = 0.0
    """Only those at least this many times as likely as the most likely one."""
    repetition_penalty: float = 1.0
    """Logits of tokens in prompt or output: divided by it where positive, multiplied where negative (arXiv 1909.05858)."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens that the output has."""
    frequency_penalty: float = 0.0
    """Taken off as many times as the output has the token."""
    logit_bias: dict[int, float] = {}
    """Token id -> what is added to its logit."""
    seed: int | None = None
    """The same seed gives the same tokens, whatever else runs at the same time. None: a new one for every request."""

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
"""Values of `reasoning_effort` that mean no reasoning at all, where a model can only be told to reason or not."""


ConstraintKind = Literal["json_object", "json_schema", "regex", "grammar", "choice"]


class Constraint(Frozen):
    """What the whole answer must be. Reasoning that comes before an answer is free."""

    kind: ConstraintKind
    value: str = ""
    """A JSON schema, a regular expression, a grammar in Lark's form, or a JSON list of texts; nothing for `json_object`."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(ConstraintKind):
            raise _bad(f"constraint of kind {self.kind!r}; there are {', '.join(get_args(ConstraintKind))}")
        if (self.kind == "json_object") != (not self.value):
            wanted = "nothing" if self.kind == "json_object" else "a value"
            raise _bad(f"a constraint of kind {self.kind} takes {wanted}")
        if self.kind == "choice" and not self.choices:
            raise _bad("a constraint of kind choice needs at least one text to choose from")
        if self.kind == "json_schema" and not isinstance(_json(self.value, "a JSON schema"), (dict, bool)):
            raise _bad("a JSON schema is an object (or true or false)")

    @property
    def choices(self) -> tuple[str, ...]:
        """Of kind `choice`."""
        found = _json(self.value, "a list of choices")
        try:
            return msgspec.convert(found, tuple[str, ...])
        except msgspec.ValidationError:
            raise _bad("a constraint of kind choice is a JSON list of texts") from None


def _bad(words: str) -> BadInput:
    return BadInput(words, field="constraint")


def _json(text: str, what: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise _bad(f"{what} that is not valid JSON: {error}") from None
    except RecursionError:
        raise _bad(f"{what} that is nested too deeply") from None


class Request(Frozen):
    """Give exactly one of `messages` (a chat), `prompt` (text, taken as it is) and `token_ids`."""

    messages: tuple[dict[str, Any], ...] | None = None
    prompt: str | None = None
    token_ids: tuple[int, ...] | None = None
    tools: tuple[dict[str, Any], ...] = ()
    """Functions the model may call, as OpenAI's API describes them; chats only."""
    tool_choice: str = "auto"
    """`none`: the model may call nothing; `auto`: it chooses; `required`: it must call something; otherwise the name of what it must call."""
    thinking: bool | None = None
    """Whether a model that can reason first should; None leaves it to its template. Chats only."""
    reasoning_effort: str | None = None
    """How much to reason, in a word that the model's template knows; None leaves it to the template. Chats only."""
    sampling: Sampling = Sampling()
    constraint: Constraint | None = None
    max_tokens: int | None = None
    """None: until the model stops or the context is full."""
    stop: tuple[str, ...] = ()
    """The answer ends before the first of these; they may span tokens and are never given out."""
    stop_token_ids: tuple[int, ...] = ()
    """Besides the model's own."""
    ignore_eos: bool = False
    """The model's own stop tokens do not stop it."""
    logprobs: int | None = None
    """Give the log-probability of every new token, and of this many of the most likely ones there."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens, each given those before it."""
    prompt_logprobs_start: int = 0
    """Of the prompt's tokens from this one on; what lies before may come from the cache."""
    cache_salt: str = ""
    """Cached prefixes are shared only among requests with the same salt."""
    deadline_seconds: float | None = None
    """From being asked; an answer that takes longer ends with `core.client.Late`."""
    owner: str = ""
    """Where many wait, owners get equal shares of the engine's tokens."""

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
        if len(self.stop) > MAX_STOP_STRINGS or not all(self.stop):
            raise BadInput(f"stop has {len(self.stop)} texts; it may have {MAX_STOP_STRINGS}, none of them empty", field="stop")
        _check_integer("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        _check_integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_TOP_LOGPROBS)
        _check_integer("prompt_logprobs_start", self.prompt_logprobs_start, 0)
        if self.deadline_seconds is not None and not (math.isfinite(self.deadline_seconds) and self.deadline_seconds > 0):
            raise BadInput(f"deadline_seconds is {self.deadline_seconds:g}; it should be more than 0", field="deadline_seconds")
        self._check_tool_choice()

    def _check_is_chat(self) -> None:
        asked = {
            "tools": bool(self.tools),
            "thinking": self.thinking is not None,
            "reasoning_effort": bool(self.reasoning_effort),
        }
        for field in (name for name, is_asked in asked.items() if is_asked and self.messages is None):
            raise BadInput(f"{field}: only with messages; a plain prompt has no template to put it in", field=field)

    def _check_tool_choice(self) -> None:
        choice = self.tool_choice
        if choice in ("none", "auto"):
            return
        if not self.tools:
            raise BadInput(f"tool_choice is {choice!r} and there are no tools to choose from", field="tool_choice")
        if choice != "required" and choice not in (names := [tool_name(tool) for tool in self.tools]):
            raise BadInput(f"tool_choice names {choice!r}, which is none of the tools: {', '.join(names)}", field="tool_choice")
        if self.constraint is not None:
            raise BadInput(
                f"tool_choice {choice!r} asks for a call and the constraint for an answer; leave one of them out",
                field="tool_choice",
            )


def tool_name(tool: Mapping[str, Any]) -> str:
    """As the API has tools, with or without the wrapping `function`; empty: it has no name."""
    function: Any = tool.get("function", tool)
    name: Any = cast(Mapping[str, Any], function).get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""


class ScoreRequest(Frozen):
    """How likely a text is: give exactly one of `prompt` and `token_ids`."""

    prompt: str | None = None
    token_ids: tuple[int, ...] | None = None
    start: int = 0
    """The first token to be scored; those before are only context."""
    top: int = 0
    """Also the most likely tokens at each place."""
    cache_salt: str = ""

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.token_ids is None):
            raise BadInput("a request to score has exactly one of prompt and token_ids", field="prompt")
        _check_tokens("token_ids", self.token_ids)
        _check_integer("start", self.start, 0)
        _check_integer("top", self.top, 0, MAX_TOP_LOGPROBS)


class TokenLogprob(Frozen):
    token_id: int
    logprob: float
    """Natural, of the model's own distribution: before bias, penalties, temperature and filters."""
    rank: int = 0
    """1 for the most likely token at its place; 0: not counted."""
    token: str = ""
    """Its text, where the client has a tokenizer."""
    raw: bytes = b""
    """Its bytes, where its text does not say them: it is a piece of a character. Empty: those of its text."""
    top: tuple[TokenLogprob, ...] = ()
    """The most likely tokens at this place, best first."""


class Scores(Frozen):
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...]
    """One per token; None before `start` and for the very first token, which nothing precedes."""

    @property
    def total(self) -> float:
        return sum(found.logprob for found in self.logprobs if found is not None)


class ToolCall(Frozen):
    id: str
    name: str
    arguments: str
    """JSON, as the model wrote it."""


class Usage(Frozen):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Of the prompt, those whose keys and values were still there from an earlier request."""


class Timings(Frozen):
    queue_seconds: float = 0.0
    """From being handed to the engine to its first step."""
    prefill_seconds: float = 0.0
    """From then to the first token."""
    decode_seconds: float = 0.0
    """From the first token to the last."""


class Delta(Frozen):
    """A piece of an answer. The last one, and only it, has a finish reason, usage and timings."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    token_ids: tuple[int, ...] = ()
    """May run ahead of the text, which waits until a character, a tag or a stop string is certain."""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """Once, before or with the first token."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The token that ended it, the last of `token_ids` and no part of the text; None where a stop string or the length did."""
    usage: Usage | None = None
    timings: Timings | None = None


class DeviceMemory(Frozen):
    name: str
    used_bytes: int
    """By everybody."""
    total_bytes: int
    own_bytes: int = 0
    """By the engine, of that."""


class Stats(Frozen):
    """What an engine is doing and has done since it started."""

    waiting: int = 0
    running: int = 0
    num_blocks: int = 0
    blocks_used: int = 0
    """Held by sequences; blocks only kept for later requests are not counted."""
    blocks_cached: int = 0
    """Free, with a prefix in them that a request may still find."""
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
    """Ended by their deadline."""
    process_bytes: int = 0
    """Of memory, that the engine's process holds; 0: not known."""
    devices: tuple[DeviceMemory, ...] = ()
    """Accelerators in use, where it is known."""


class Info(Frozen):
    model: str
    context_tokens: int
    """Prompt and answer together."""
    vocab_size: int = 0
    max_sequences: int = 1
    stop_token_ids: tuple[int, ...] = ()
    has_text: bool = True
    """Takes and gives text; otherwise token ids only."""
    has_chat: bool = True
    device: str = ""
    scheme: str = ""
    kv: str = ""
    weights_bytes: int = 0
    kv_bytes: int = 0
    load_seconds: float = 0.0
    details: Mapping[str, str] = {}
    stats: Stats | None = None
