"""A chat shows the log-probabilities of its own tokens: not of what ended it, and none is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.request import Delta, TokenLogprob, Usage
from windlass.wire.server.responses import chat_response, new_envelope
from windlass.wire.server.visible_logprobs import VisibleLogprobs

pytestmark = pytest.mark.pure

USAGE = Usage(prompt_tokens=1, completion_tokens=1)
END = Delta(finish_reason="stop", usage=USAGE)


def entry(token: str) -> TokenLogprob:
    return TokenLogprob(token_id=1, logprob=-0.5, token=token)


def delta(content: str, *tokens: str) -> Delta:
    return Delta(content=content, token_ids=(1,) * len(tokens), logprobs=tuple(map(entry, tokens)))


def shown(*deltas: Delta, may_wait: bool = True) -> list[str]:
    state = VisibleLogprobs(may_wait)
    return [found.token for one in deltas for found in state.add(one)]


def test_tokens_of_a_stop_string_are_not_shown() -> None:
    deltas = [delta("a", "a"), delta("", "EN"), delta("", "D"), END]
    assert shown(*deltas) == ["a"]
    choice = chat_response(new_envelope("x", "m"), [deltas], logprobs=True, has_stops=True).choices[0]
    assert choice.logprobs is not None and [one.token for one in choice.logprobs.content or ()] == ["a"]


def test_what_only_looked_like_one_is_shown_with_its_text() -> None:
    state = VisibleLogprobs(may_wait=True)
    found = [[one.token for one in state.add(piece)] for piece in (delta("a", "a"), delta("", "EN"), delta("EN E", " E"))]
    assert found == [["a"], [], ["EN", " E"]]


def test_a_token_that_begins_in_the_text_is_shown() -> None:
    assert shown(delta("ab", "a"), delta("", "bEN", "D"), END) == ["a", "bEN"]


def test_an_answer_that_ends_by_itself_shows_all_of_it() -> None:
    by_length = Delta(content="", finish_reason="length", usage=USAGE)
    assert shown(delta("a", "a"), delta("", "EN"), by_length) == ["a", "EN"]
    token = Delta(token_ids=(9,), logprobs=(entry("<end>"),), finish_reason="stop", stop_token_id=9, usage=USAGE)
    assert shown(delta("a", "a"), delta("", "EN"), token) == ["a", "EN"]
    assert shown(delta("a", "a"), delta("", "EN"), token, may_wait=False) == ["a", "EN"]


def test_reasoning_and_calls_are_not_waited_for() -> None:
    thought = Delta(reasoning="hm", token_ids=(1,), logprobs=(entry("hm"),))
    assert shown(delta("", "<think>"), thought, delta("", "EN"), END) == ["<think>", "hm", "EN"]


@given(st.lists(st.text(max_size=4), max_size=8), st.data())
def test_none_of_the_texts_own_is_lost_however_late_the_text_comes(tokens: list[str], data: st.DataObject) -> None:
    text, deltas, at = "".join(tokens), list[Delta](), 0
    known = 0
    for token in tokens:
        known += len(token)
        upto = data.draw(st.integers(at, known))
        deltas.append(delta(text[at:upto], token))
        at = upto
    end = Delta(content=text[at:], finish_reason="length", usage=USAGE)
    assert shown(*deltas, end) == tokens
    by_string = Delta(content=text[at:], finish_reason="stop", usage=USAGE)
    found = shown(*deltas, by_string)
    assert found == tokens[: len(found)] and not "".join(tokens[len(found) :])
