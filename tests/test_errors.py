"""Errors: exit codes, and messages that say what to do."""

from __future__ import annotations

import pytest

from windlass.errors import BadConfig, BadInput, DoesNotFit, Error, Impossible, MissingExtra, UnknownName

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadInput("x"), 2),
        (BadConfig("x"), 2),
        (Impossible("x"), 2),
        (UnknownName("device", "H1000", ["H100"]), 2),
        (MissingExtra("torch", "run", "running"), 2),
        (DoesNotFit("x", 7), 3),
    ],
)
def test_exit_codes(error: Error, code: int) -> None:
    assert isinstance(error, Error)
    assert error.exit_code == code


def test_input_errors_are_one_kind() -> None:
    for kind in (BadConfig, Impossible, UnknownName):
        assert issubclass(kind, BadInput)
    assert not issubclass(DoesNotFit, BadInput)


def test_unknown_names_offer_the_nearest() -> None:
    message = str(UnknownName("device", "h200-sxm", ["H100-80GB", "H200", "A100-40GB"]))
    assert message.startswith("unknown device 'h200-sxm'; did you mean H200")


def test_unknown_names_without_a_near_one_list_what_is_known() -> None:
    assert str(UnknownName("region", "zzzz", ["Iceland", "Norway"])) == "unknown region 'zzzz'; known: Iceland, Norway"


def test_a_shortfall_carries_its_bytes() -> None:
    assert DoesNotFit("3 bytes short", 3).short_bytes == 3


def test_a_missing_extra_says_how_to_install_it() -> None:
    assert (
        str(MissingExtra("starlette", "serve", "serving"))
        == "serving needs starlette, which is not installed: pip install 'windlass-llm[serve]'"
    )
