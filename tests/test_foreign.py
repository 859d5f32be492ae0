"""What others wrote reaches a terminal as plain text of limited length."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.errors import BadCheckpoint, UnknownName
from windlass.foreign import MAX_LINES, MAX_MESSAGE, MAX_NAME, is_failure, shown, shown_lines

pytestmark = pytest.mark.pure

HOSTILE = "\x1b]0;title\x07\x1b[31m\u202eabc\u2066\x9b2J\u200b\r\n\x00\ud800"


@given(st.text() | st.just(HOSTILE))
def test_a_name_is_one_printable_line(text: str) -> None:
    found = shown(text)
    assert found.isprintable()
    assert len(found) == len(text) or len(text) > MAX_NAME
    if text.isprintable() and len(text) <= MAX_NAME:
        assert found == text


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    found = shown("begin " + "x" * 5_000 + " end")
    assert found.startswith("begin ") and found.endswith(" end") and len(found) <= MAX_NAME + 3


def test_a_message_keeps_its_lines() -> None:
    assert shown_lines("one\ntwo \x1b[2J") == "one\ntwo ?[2J"
    found = shown_lines("x" * 5_000 + "\ny" * 5_000)
    assert len(found.split("\n")) == MAX_LINES and len(found.split("\n")[0]) <= MAX_MESSAGE + 3


def test_errors_quote_names_that_way() -> None:
    for error in (BadCheckpoint("is damaged", "file", HOSTILE * 100), UnknownName("model", HOSTILE * 100, ["one"])):
        assert str(error).isprintable() and len(str(error)) < 2 * MAX_NAME


def test_a_panic_is_a_failure_and_an_interrupt_is_none() -> None:
    panic = type("PanicException", (BaseException,), {})
    assert is_failure(panic()) and is_failure(ValueError())
    assert not is_failure(KeyboardInterrupt()) and not is_failure(SystemExit()) and not is_failure(GeneratorExit())
