"""Deltas -> events -> deltas: nothing is lost, in whatever pieces the bytes come; and the shapes are those of OpenAI's own client."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import wire_values
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.client import Unavailable
from windlass.core.request import CallPiece, Delta, TokenLogprob, ToolCall, Usage
from windlass.wire.client.stream_reader import ChatReader, CompletionReader, Reader
from windlass.wire.schema.chat import ChatChunk, ChatResponse
from windlass.wire.schema.completions import CompletionResponse
from windlass.wire.schema.errors import ApiError
from windlass.wire.server.responses import (
    ChatStream,
    CompletionStream,
    Echo,
    Envelope,
    chat_response,
    completion_response,
    error_event,
    new_envelope,
)
from windlass.wire.sse import DONE, EventParser

pytestmark = pytest.mark.pure

COST, COST_WITH_LOGPROBS = 8, 60
"""Calls for a token: a few to fill in its text, and a few for each log-probability."""
ENVELOPE = Envelope(id="chatcmpl-1", model='a "model"', created=1)
USAGE = Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1)
END = Delta(finish_reason="stop", usage=USAGE)
cuts = st.lists(st.integers(0, 10**6), max_size=12)


def joined(deltas: list[Delta]) -> dict[str, Any]:
    """What an answer is, however it was cut."""
    return {
        "content": "".join(delta.content for delta in deltas),
        "reasoning": "".join(delta.reasoning for delta in deltas),
        "tool_calls": [call for delta in deltas for call in delta.tool_calls],
        "token_ids": [token for delta in deltas for token in delta.token_ids],
        "logprobs": [entry for delta in deltas for entry in delta.logprobs],
        "end": (deltas[-1].finish_reason, deltas[-1].usage),
    }


def read(stream: bytes, reader: Reader, cuts: list[int] | None = None) -> list[Delta]:
    parser, found = EventParser(), list[Delta]()
    edges = [0, *sorted(cut % (len(stream) + 1) for cut in cuts or ()), len(stream)]
    for begin, end in itertools.pairwise(edges):
        found += [delta for data in parser.feed(stream[begin:end]) if data != DONE and (delta := reader.add(data)) is not None]
    return [*found, reader.end()]


def chunks(stream: bytes) -> list[Any]:
    *found, done = EventParser().feed(stream)
    assert done == DONE
    return [msgspec.json.decode(data) for data in found]


# --- chats -----------------------------------------------------------------------------------------------------------


@given(wire_values.deltas(), cuts)
def test_a_streamed_chat_comes_back(deltas: list[Delta], cuts: list[int]) -> None:
    stream = ChatStream(ENVELOPE, include_usage=True, logprobs=True, token_ids=True)
    sent = b"".join(stream.event(0, delta) for delta in deltas) + stream.ending()
    assert joined(read(sent, ChatReader(), cuts)) == joined(deltas)


@given(wire_values.deltas())
def test_chunks_add_up_to_the_whole_response(deltas: list[Delta]) -> None:
    stream = ChatStream(ENVELOPE, include_usage=True, logprobs=True, token_ids=True)
    streamed = joined(read(b"".join(stream.event(0, delta) for delta in deltas) + stream.ending(), ChatReader()))
    whole = chat_response(ENVELOPE, [deltas], logprobs=True, token_ids=True)
    message = whole.choices[0].message
    assert (message.content or "") == streamed["content"]
    assert (message.reasoning_content or "") == streamed["reasoning"]
    assert [call.function.arguments for call in message.tool_calls or ()] == [call.arguments for call in streamed["tool_calls"]]
    assert whole.choices[0].token_ids == streamed["token_ids"]
    assert msgspec.json.decode(msgspec.json.encode(whole), type=ChatResponse) == whole


def test_the_events_of_a_chat() -> None:
    stream = ChatStream(ENVELOPE)
    first = stream.event(0, Delta(content="Hé", token_ids=(1,)))
    assert stream.event(0, Delta(token_ids=(2,))) == b""  # nothing to tell yet
    found = chunks(first + stream.event(0, END) + stream.ending())
    assert [chunk["choices"] for chunk in found] == [
        [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "Hé"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}],
    ]
    for chunk in found:
        del chunk["choices"]
        assert chunk == {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": 'a "model"'}


def test_usage_comes_last_and_is_null_before() -> None:
    stream = ChatStream(ENVELOPE, n=2, include_usage=True)
    sent = b"".join(stream.event(index, delta) for index in (1, 0) for delta in (Delta(content="x"), END))
    *before, last = chunks(sent + stream.ending())
    assert {chunk["usage"] for chunk in before} == {None}
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 3,  # of the one prompt that both choices share
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert [chunk["choices"][0]["index"] for chunk in before] == [1, 1, 1, 0, 0, 0]


CALLS = (ToolCall(id="1", name="f", arguments="{}"), ToolCall(id="2", name="g", arguments='{"a":1}'))


def test_calls_are_numbered_and_end_with_a_word_of_their_own() -> None:
    stream = ChatStream(ENVELOPE)
    sent = stream.event(0, Delta(tool_calls=CALLS[:1])) + stream.event(0, Delta(tool_calls=CALLS[1:])) + stream.event(0, END)
    found = chunks(sent + stream.ending())
    assert [call["index"] for chunk in found for call in chunk["choices"][0]["delta"].get("tool_calls", ())] == [0, 1]
    assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"
    whole = msgspec.to_builtins(chat_response(ENVELOPE, [[Delta(tool_calls=CALLS), END]]))["choices"][0]
    assert (whole["message"]["content"], whole["finish_reason"]) == (None, "tool_calls")
    cut = chat_response(ENVELOPE, [[Delta(tool_calls=CALLS), Delta(finish_reason="length", usage=USAGE)]])
    assert cut.choices[0].finish_reason == "length"


@pytest.mark.parametrize("reason", ["cancelled", "error"])
def test_an_answer_that_was_cut_short_is_an_error(reason: Any) -> None:
    with pytest.raises(Unavailable):
        ChatStream(ENVELOPE).event(0, Delta(finish_reason=reason))
    with pytest.raises(Unavailable):
        completion_response(ENVELOPE, [[Delta(finish_reason=reason)]])


def test_openais_client_reads_them() -> None:
    pytest.importorskip("openai")
    from openai.types import Completion
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    entry = TokenLogprob(token_id=1, logprob=-1.0, token="x", top=(TokenLogprob(token_id=2, logprob=-0.5, token="y"),))
    deltas = [Delta(content="x", reasoning="r", tool_calls=CALLS, token_ids=(1,), logprobs=(entry,)), END]
    stream = ChatStream(ENVELOPE, include_usage=True, logprobs=True)
    for chunk in chunks(b"".join(stream.event(0, delta) for delta in deltas) + stream.ending()):
        ChatCompletionChunk.model_validate(chunk, strict=True)
    ChatCompletion.model_validate(msgspec.to_builtins(chat_response(ENVELOPE, [deltas], logprobs=True)), strict=True)
    ChatCompletion.model_validate(msgspec.to_builtins(chat_response(ENVELOPE, [[END]])), strict=True)
    texts = CompletionStream(ENVELOPE, include_usage=True, logprobs=True)
    for chunk in chunks(b"".join(texts.event(0, delta) for delta in deltas) + texts.ending())[:-1]:
        # the stream's chunks have a null where the whole answer's finish_reason is a word
        Completion.model_validate(chunk | {"choices": [one | {"finish_reason": "stop"} for one in chunk["choices"]]}, strict=True)
    Completion.model_validate(msgspec.to_builtins(completion_response(ENVELOPE, [deltas], logprobs=True)), strict=True)


# --- completions -----------------------------------------------------------------------------------------------------


@given(wire_values.deltas(with_reasoning=False), cuts)
def test_a_streamed_completion_comes_back(deltas: list[Delta], cuts: list[int]) -> None:
    stream = CompletionStream(ENVELOPE, include_usage=True, logprobs=True, token_ids=True)
    found = joined(read(b"".join(stream.event(0, delta) for delta in deltas) + stream.ending(), CompletionReader(), cuts))
    expected = joined(deltas)
    assert {**found, "logprobs": None} == {**expected, "logprobs": None}
    assert [(one.token, one.logprob, one.token_id) for one in found["logprobs"]] == [
        (one.token, one.logprob, one.token_id) for one in expected["logprobs"]
    ]


WORDS = st.lists(st.text("abc é", min_size=1, max_size=4), min_size=1, max_size=6)


@given(WORDS, WORDS, st.data())
def test_streamed_and_whole_completions_say_the_same(prompt: list[str], answer: list[str], data: Any) -> None:
    """With echo and log-probabilities, whatever tokens come together."""
    deltas, place = list[Delta](), 0
    while place < len(answer):
        size = data.draw(st.integers(1, 3))
        deltas.append(_said(answer[place : place + size], prompt if place == 0 else None))
        place += size
    deltas.append(END)
    echo = Echo(text="".join(prompt), first_token=prompt[0])
    stream = CompletionStream(ENVELOPE, logprobs=True, echoes=[echo])
    found = chunks(b"".join(stream.event(0, delta) for delta in deltas) + stream.ending())
    whole = msgspec.to_builtins(completion_response(ENVELOPE, [deltas], logprobs=True, echoes=[echo]))["choices"][0]
    assert "".join(chunk["choices"][0]["text"] for chunk in found) == whole["text"] == "".join(prompt + answer)
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [one for chunk in found for one in chunk["choices"][0]["logprobs"][name]] == whole["logprobs"][name]
    assert whole["logprobs"]["tokens"] == prompt + answer
    assert whole["logprobs"]["token_logprobs"][0] is None
    everything = prompt + answer
    assert whole["logprobs"]["text_offset"] == [len("".join(everything[:number])) for number in range(len(everything))]


def _said(words: list[str], prompt: list[str] | None) -> Delta:
    entries = tuple(TokenLogprob(token_id=1, logprob=-1.0, token=word) for word in words)
    of_prompt = None if prompt is None else (None, *(TokenLogprob(token_id=1, logprob=-2.0, token=word) for word in prompt[1:]))
    return Delta(content="".join(words), token_ids=(1,) * len(words), logprobs=entries, prompt_logprobs=of_prompt)


def test_echo_without_log_probabilities() -> None:
    stream = CompletionStream(ENVELOPE, num_choices=2, n=2, echoes=[Echo(text="Once"), Echo(text="Twice")])
    sent = b"".join(stream.event(index, delta) for index in (0, 1) for delta in (Delta(content=" upon"), END))
    found = chunks(sent + stream.ending())
    texts = ["".join(chunk["choices"][0]["text"] for chunk in found if chunk["choices"][0]["index"] == index) for index in (0, 1)]
    assert texts == ["Once upon", "Twice upon"]


def test_a_prompt_alone() -> None:
    """What evaluation harnesses ask for: echo, logprobs and no new token."""
    entries = (
        None,
        TokenLogprob(token_id=2, logprob=-0.5, token=" is", top=(TokenLogprob(token_id=3, logprob=-0.1, token="!"),)),
    )
    end = Delta(prompt_logprobs=entries, finish_reason="length", usage=Usage(prompt_tokens=2, completion_tokens=0))
    found = completion_response(ENVELOPE, [[end]], logprobs=True, echoes=[Echo(text="It is", first_token="It")]).choices[0]
    assert msgspec.to_builtins(found) == {
        "index": 0,
        "text": "It is",
        "finish_reason": "length",
        "logprobs": {
            "tokens": ["It", " is"],
            "token_logprobs": [None, -0.5],
            "top_logprobs": [None, {"!": -0.1, " is": -0.5}],
            "text_offset": [0, 2],
        },
    }


def test_an_empty_delta_before_the_prompts_log_probabilities_echoes_nothing() -> None:
    stream = CompletionStream(ENVELOPE, logprobs=True, echoes=[Echo(text="It is", first_token="It")])
    assert stream.event(0, Delta()) == b""


def test_usage_of_several_prompts() -> None:
    found = completion_response(ENVELOPE, [[END]] * 4, n=2).usage
    assert msgspec.to_builtins(found) == {
        "prompt_tokens": 6,
        "completion_tokens": 8,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


# --- what other servers write ----------------------------------------------------------------------------------------


def test_calls_in_pieces_and_reasoning_by_another_name() -> None:
    reader = ChatReader()
    pieces = [
        '{"choices":[{"delta":{"role":"assistant","content":null,"reasoning":"hm"}}]}',
        '{"choices":[{"delta":{"tool_calls":[{"index":0,"id":"a","type":"function","function":{"name":"f","arguments":""}}]}}]}',
        '{"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{\\"x\\""}}]}}]}',
        '{"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":":1}"}}]}}],"created":1.5,"extra":{}}',
        '{"choices":[{"delta":{"tool_calls":[{"index":1,"id":"b","function":{"name":"g","arguments":"{}"}}]}}]}',
        '{"choices":[{"delta":{},"finish_reason":"tool_calls","stop_reason":null}],"usage":null}',
        '{"choices":[],"usage":{"prompt_tokens":1,"total_tokens":3,"completion_tokens":2,"prompt_tokens_details":null}}',
    ]
    found = [delta for piece in pieces if (delta := reader.add(piece.encode())) is not None]
    assert found == [Delta(reasoning="hm")]
    assert reader.end() == Delta(
        tool_calls=(ToolCall(id="a", name="f", arguments='{"x":1}'), ToolCall(id="b", name="g", arguments="{}")),
        finish_reason="stop",
        usage=Usage(prompt_tokens=1, completion_tokens=2),
    )


def test_a_stream_that_ends_without_an_end_broke() -> None:
    reader = ChatReader()
    reader.add(b'{"choices":[{"delta":{"content":"x"}}]}')
    with pytest.raises(Unavailable, match="interrupted"):
        reader.end()


def test_errors_in_the_middle() -> None:
    [data] = EventParser().feed(error_event("the engine crashed"))
    for reader in (ChatReader(), CompletionReader()):
        with pytest.raises(Unavailable, match="the engine crashed"):
            reader.add(data)
        with pytest.raises(Unavailable, match="invalid response"):
            reader.add(b"<html>")
    with pytest.raises(ApiError):
        ChatReader().add(b'{"error":{"message":"too long","type":"invalid_request_error"}}')


@given(st.binary(max_size=60))
def test_whatever_a_server_writes_is_a_delta_or_an_error(data: bytes) -> None:
    for reader in (ChatReader(), CompletionReader()):
        with contextlib.suppress(Unavailable):
            reader.add(data)


# --- speed -----------------------------------------------------------------------------------------------------------


def test_the_token_that_ended_a_chat_has_no_logprob() -> None:
    """It is no part of the answer; its id is still told."""
    words, stop = [TokenLogprob(token_id=number, logprob=-0.5, token=f"w{number}") for number in (1, 2)], 9
    end = TokenLogprob(token_id=stop, logprob=-0.1, token="<|im_end|>")
    usage = Usage(prompt_tokens=1, completion_tokens=3)
    deltas = [
        Delta(content="w1", token_ids=(1,), logprobs=(words[0],)),
        Delta(content="w2", token_ids=(2, stop), logprobs=(words[1], end), finish_reason="stop", stop_token_id=stop, usage=usage),
    ]
    choice = chat_response(ENVELOPE, [deltas], logprobs=True, token_ids=True).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [entry.token for entry in choice.logprobs.content] == ["w1", "w2"] and choice.token_ids == [1, 2, 9]
    stream = ChatStream(ENVELOPE, logprobs=True)
    assert b"im_end" not in b"".join(stream.event(0, delta) for delta in deltas)
    alone = Delta(token_ids=(stop,), logprobs=(end,), finish_reason="stop", stop_token_id=stop, usage=usage)
    assert b"im_end" not in ChatStream(ENVELOPE, logprobs=True).event(0, alone)
    by_length = [Delta(content="w1", token_ids=(1,), logprobs=(words[0],), finish_reason="length", usage=usage)]
    kept = chat_response(ENVELOPE, [by_length], logprobs=True).choices[0].logprobs
    assert kept is not None and kept.content is not None and len(kept.content) == 1


def num_calls(work: Callable[[], Any]) -> int:
    """Of functions, ours and the language's, that it makes."""
    counts: Counter[str] = Counter()
    before = sys.getprofile()
    sys.setprofile(lambda _, event, __: counts.update([event]))
    try:
        work()
    finally:
        sys.setprofile(before)
    return counts["call"] + counts["c_call"]


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("kind", [ChatStream, CompletionStream])
def test_a_token_costs_little(kind: Any, logprobs: bool) -> None:
    """Few calls, and the thousandth token no more of them than the second. How long they take: bench/speed_wire.py."""
    top = tuple(TokenLogprob(token_id=number, logprob=-1.0, token="word") for number in range(5))
    entry = TokenLogprob(token_id=5, logprob=-1.0, token=" word", top=top)
    delta = Delta(content=" word", token_ids=(5,), logprobs=(entry,))
    stream = kind(new_envelope("cmpl", "m"), logprobs=logprobs)
    counts = [num_calls(lambda: stream.event(0, delta)) for _ in range(1000)]
    assert counts[1] == counts[999] <= (COST_WITH_LOGPROBS if logprobs else COST), counts[:3]
    assert msgspec.json.decode(
        EventParser().feed(stream.event(0, delta))[0], type=ChatChunk if kind is ChatStream else CompletionResponse
    )


def test_calls_are_streamed_in_pieces() -> None:
    """The first piece of a call has id and name; the whole call at the end adds nothing."""
    stream = ChatStream(new_envelope("chatcmpl", "m"))
    call = ToolCall(id="a", name="f", arguments='{"k": 1}')
    whole = ToolCall(id="b", name="g", arguments="{}")
    deltas = [
        Delta(call_pieces=(CallPiece(id="a", name="f", arguments='{"k"'),), token_ids=(1,)),
        Delta(call_pieces=(CallPiece(id="a", arguments=": 1}"),), tool_calls=(call,), token_ids=(2,)),
        Delta(tool_calls=(whole,), token_ids=(3,), finish_reason="stop", usage=USAGE),
    ]
    data = b"".join(stream.event(0, delta) for delta in deltas)
    chunks = [msgspec.json.decode(one) for one in EventParser().feed(data)]
    pieces = [piece for chunk in chunks for piece in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert pieces == [
        {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": '{"k"'}},
        {"index": 0, "function": {"arguments": ": 1}"}},
        {"index": 1, "id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("make", [ChatStream, CompletionStream])
def test_usage_in_every_chunk_grows_to_the_last(make: Any) -> None:
    stream = make(new_envelope("x", "m"), include_usage=True, continuous_usage=True)
    accepted = Usage(prompt_tokens=3, completion_tokens=0)
    deltas = [
        Delta(usage=accepted),
        Delta(content="a", token_ids=(1,)),
        Delta(content="b", token_ids=(2,), finish_reason="stop", usage=USAGE),
    ]
    data = b"".join(stream.event(0, delta) for delta in deltas) + stream.ending()
    chunks = [msgspec.json.decode(one) for one in EventParser().feed(data)[:-1]]
    counts = [(chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"]) for chunk in chunks]
    assert counts == sorted(counts) and counts[0] == (3, 1) and counts[-1] == (3, 2)


def test_the_fingerprint_is_in_every_response() -> None:
    envelope = new_envelope("chatcmpl", "m", "fp_1")
    deltas = [Delta(content="a", token_ids=(1,), finish_reason="stop", usage=USAGE)]
    assert chat_response(envelope, [deltas]).system_fingerprint == "fp_1"
    [first, *_] = EventParser().feed(ChatStream(envelope).event(0, deltas[0]))
    assert msgspec.json.decode(first)["system_fingerprint"] == "fp_1"
