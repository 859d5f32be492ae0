"""Requests and deltas of every kind, for properties."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st

from windlass.core.request import Constraint, Delta, Request, Sampling, TokenLogprob, ToolCall, Usage

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
names = st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True).filter(lambda name: name not in ("none", "auto", "required"))
small = st.floats(0, 1, width=32)
ids = st.integers(0, 2**20)
values = st.recursive(st.none() | st.booleans() | st.integers(-(2**53), 2**53) | texts, lambda inner: st.lists(inner, max_size=2))
objects = st.dictionaries(names, values, max_size=3)

samplings = st.builds(
    Sampling,
    temperature=st.floats(0, 5, width=32),
    top_k=st.none() | st.integers(1, 1000),
    top_p=st.floats(0.5, 1, width=32),
    min_p=small,
    repetition_penalty=st.floats(0.5, 2, width=32),
    presence_penalty=st.floats(-2, 2, width=32),
    frequency_penalty=st.floats(-2, 2, width=32),
    logit_bias=st.dictionaries(ids, st.floats(-100, 100, width=32), max_size=3),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
)
constraints = st.one_of(
    st.just(Constraint(kind="json_object")),
    st.builds(lambda value: Constraint(kind="json_schema", value=msgspec.json.encode(value).decode()), objects),
    st.builds(lambda value: Constraint(kind="regex", value=value), texts.filter(bool)),
    st.builds(lambda value: Constraint(kind="grammar", value=value), texts.filter(bool)),
    st.builds(
        lambda value: Constraint(kind="choice", value=msgspec.json.encode(value).decode()),
        st.lists(texts, min_size=1, max_size=3),
    ),
)


@st.composite
def tools(draw: st.DrawFn) -> dict[str, Any]:
    function: dict[str, Any] = {"name": draw(names)}
    if draw(st.booleans()):
        function |= {"description": draw(texts), "parameters": draw(objects), "strict": draw(st.booleans())}
    return {"type": "function", "function": function}


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    return {"id": "call_" + draw(names), "type": "function", "function": {"name": draw(names), "arguments": draw(objects)}}


@st.composite
def messages(draw: st.DrawFn) -> dict[str, Any]:
    role = draw(st.sampled_from(["system", "user", "assistant", "tool"]))
    found: dict[str, Any] = {"role": role, "content": draw(texts)}
    optional: dict[str, Any] = {"name": names}
    if role == "assistant":
        optional |= {"tool_calls": st.lists(calls(), min_size=1, max_size=2), "reasoning_content": texts.filter(bool)}
    if role == "tool":
        optional["tool_call_id"] = names
    for key, strategy in optional.items():
        if draw(st.booleans()):
            found[key] = draw(strategy)
    return found


@st.composite
def requests(draw: st.DrawFn, kind: str) -> Request:
    """`kind` is messages, prompt or token_ids; owners are the server's business."""
    fields: dict[str, Any] = {
        "sampling": draw(samplings),
        "max_tokens": draw(st.integers(0, 10**6)) if kind != "messages" else draw(st.none() | st.integers(0, 10**6)),
        "stop": tuple(draw(st.lists(texts.filter(bool), max_size=3))),
        "stop_token_ids": tuple(draw(st.lists(ids, max_size=3))),
        "ignore_eos": draw(st.booleans()),
        "logprobs": draw(st.none() | st.integers(0, 20)),
        "cache_salt": draw(texts),
        "constraint": draw(st.none() | constraints),
        "deadline_seconds": draw(st.none() | st.floats(0.5, 1000, width=32)),
    }
    if kind == "prompt":
        return Request(prompt=draw(texts), **fields)
    if kind == "token_ids":
        return Request(token_ids=tuple(draw(st.lists(ids, min_size=1, max_size=5))), **fields)
    offered = tuple(draw(st.lists(tools(), max_size=2)))
    may_choose = bool(offered) and fields["constraint"] is None
    choices = ["none", "auto", *(["required", *(tool["function"]["name"] for tool in offered)] if may_choose else [])]
    return Request(
        messages=tuple(draw(st.lists(messages(), min_size=1, max_size=3))),
        tools=offered,
        tool_choice=draw(st.sampled_from(choices)),
        thinking=draw(st.none() | st.booleans()),
        **fields,
    )


logprobs = st.builds(
    TokenLogprob,
    token_id=ids,
    logprob=st.floats(-100, 0),
    token=texts,
    top=st.lists(st.builds(TokenLogprob, token_id=ids, logprob=st.floats(-100, 0), token=texts), max_size=2).map(tuple),
)
tool_calls = st.builds(
    ToolCall, id=names.map("call_{}".format), name=names, arguments=objects.map(lambda o: msgspec.json.encode(o).decode())
)


@st.composite
def deltas(draw: st.DrawFn, with_reasoning: bool = True) -> list[Delta]:
    """A whole answer, with a log-probability and an id for every token."""
    found: list[Delta] = []
    for _ in range(draw(st.integers(0, 5))):
        entries = tuple(draw(st.lists(logprobs, max_size=2)))
        found.append(
            Delta(
                content=draw(texts),
                reasoning=draw(texts) if with_reasoning else "",
                tool_calls=tuple(draw(st.lists(tool_calls, max_size=2))) if with_reasoning else (),
                token_ids=tuple(entry.token_id for entry in entries),
                logprobs=entries,
            )
        )
    usage = draw(st.builds(Usage, prompt_tokens=ids, completion_tokens=ids, cached_tokens=ids))
    return [*found, Delta(content=draw(texts), finish_reason=draw(st.sampled_from(["stop", "length"])), usage=usage)]
