"""Keys: where they come from, and which one was sent."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.errors import BadInput
from windlass.tasks.serve.api_key import ApiKey, named_keys
from windlass.tasks.serve.http.api_keys import key_number, read_keys
from windlass.tasks.serve.settings import ServerSettings

pytestmark = pytest.mark.pure
KEYS = ("alpha", "beta")
NAMED_KEYS = named_keys(KEYS)


@pytest.mark.parametrize(
    ("header", "number"),
    [
        (b"Bearer alpha", 1),
        (b"bearer beta", 2),
        (b"Bearer  beta ", 2),
        (b"Bearer gamma", None),
        (b"Bearer alph", None),
        (b"Bearer alphaa", None),
        (b"Basic alpha", None),
        (b"alpha", None),
        (b"Bearer ", None),
        (b"Bearer \xff\xfe", None),
        (b"", None),
    ],
)
def test_which_key_was_sent(header: bytes, number: int | None) -> None:
    assert key_number([(b"host", b"x"), (b"authorization", header)], NAMED_KEYS) == number


def test_without_keys_nothing_is_asked_for() -> None:
    assert key_number([], ()) == 0
    assert key_number([], NAMED_KEYS) is None


@given(st.binary(max_size=20))
def test_nothing_but_a_key_opens(sent: bytes) -> None:
    expected = {b"alpha": 1, b"beta": 2}.get(sent.strip())
    assert key_number([(b"authorization", b"Bearer " + sent)], NAMED_KEYS) == expected


def test_a_word_is_a_key_and_a_file_is_many(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nalpha\n\n  beta  \nalpha\n")
    assert read_keys("secret", {}) == ("secret",)
    assert read_keys(str(file), {}) == KEYS
    assert read_keys(None, {"WINDLASS_API_KEY": str(file)}) == KEYS
    assert read_keys(None, {"WINDLASS_API_KEY": "one"}) == ("one",)
    assert read_keys("given", {"WINDLASS_API_KEY": "one"}) == ("given",)
    assert read_keys(None, {}) == ()


@pytest.mark.parametrize("content", ["", "# nothing\n", "schl\u00fcssel\n", "two words\n"])
def test_a_file_that_has_no_usable_key_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "keys"
    file.write_text(content)
    with pytest.raises(BadInput) as raised:
        read_keys(str(file), {})
    assert "two words" not in str(raised.value) and "schl" not in str(raised.value)


@pytest.mark.parametrize(
    "word", ["keys.txt", "Keys.KEY", "./keys", "~/keys", "etc/keys", "/etc/windlass/keys", "api.json", ".keys"]
)
def test_a_files_name_that_is_mistyped_does_not_become_the_key(word: str) -> None:
    for told, environment in ((word, {}), (None, {"WINDLASS_API_KEY": word})):
        with pytest.raises(BadInput, match="looks like a file"):
            read_keys(told, environment)


@pytest.mark.parametrize("key", ["sk-abc.def", "YWJj+ZGVm==", "a.b.c", "v1.local"])
def test_a_key_may_have_dots_in_it(key: str) -> None:
    assert read_keys(key, {}) == (key,)


def test_an_empty_key_is_refused_rather_than_taken_for_none() -> None:
    with pytest.raises(BadInput):
        read_keys("", {})


@pytest.mark.parametrize("key", ["", "a b", "schl\u00fcssel", "x" * 5000, "tab\t"])
def test_settings_refuse_what_cannot_go_through_a_header_and_do_not_repeat_it(key: str) -> None:
    with pytest.raises(BadInput) as raised:
        ServerSettings(api_keys=(key,))
    assert not key or key not in str(raised.value)


# --- keys with names -------------------------------------------------------------------------------------------------

NAMED = """
[[key]]
name = "alice"
key = "alpha"
requests_per_minute = 60
expires = 2027-01-31

[[key]]
name = "ops"
sha256 = "f44e64e75f3948e9f73f8dfa94721c4ce8cbb4f265c4790c702b2d41cfbf2753"
role = "admin"
"""


def test_a_file_names_keys_and_their_limits(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(NAMED)
    alice, ops = read_keys(str(file))
    assert isinstance(alice, ApiKey) and isinstance(ops, ApiKey)
    assert (alice.name, alice.role, alice.requests_per_minute, ops.role) == ("alice", "user", 60, "admin")
    assert key_number([(b"x-api-key", b"alpha")], (alice, ops)) == 1
    assert key_number([(b"authorization", b"Bearer beta")], (alice, ops)) == 2
    assert not alice.is_expired(datetime(2027, 1, 30, 23, 59, tzinfo=UTC))
    assert alice.is_expired(datetime(2027, 1, 31, tzinfo=UTC))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[key]]\nname = 'a'", "either key or sha256"),
        ("[[key]]\nname = 'a'\nkey = 'secret'\nsha256 = '00'", "either key or sha256"),
        ("[[key]]\nname = 'a b'\nkey = 'secret'", "letters, digits"),
        ("[[key]]\nname = 'a'\nkey = 'secret'\nrole = 'root'", "is invalid"),
        ("[[key]]\nname = 'a'\nkey = 'secret'\nlimit = 3", "is invalid"),
        ("[[key]]\nname = 'a'\nkey = 'secret'\ntokens_per_day = 0", "at least 1"),
        ("key = []", "contains no key"),
        ("key = [", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_one_line_without_the_key(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(BadInput, match=message) as refused:
        read_keys(str(file))
    assert "secret" not in str(refused.value)


def test_two_keys_of_one_name_are_refused() -> None:
    with pytest.raises(BadInput, match="two API keys are named a"):
        ServerSettings(api_keys=(ApiKey(name="a", key="x"), ApiKey(name="a", key="y")))


@pytest.mark.parametrize(
    "keys",
    [
        (ApiKey(name="a", key="x"), ApiKey(name="b", key="x")),
        (ApiKey(name="a", key="x"), ApiKey(name="b", sha256=hashlib.sha256(b"x").hexdigest())),
        ("x", ApiKey(name="b", key="x")),
    ],
)
def test_two_names_of_one_key_are_refused(keys: tuple[ApiKey | str, ...]) -> None:
    with pytest.raises(BadInput, match="are the same key"):
        ServerSettings(api_keys=keys)


def test_the_hash_of_no_key_is_refused() -> None:
    """A request without a key would match it."""
    with pytest.raises(BadInput, match="empty text"):
        ApiKey(name="a", sha256=hashlib.sha256(b"").hexdigest())


def test_the_name_of_a_plain_key_does_not_depend_on_the_others() -> None:
    [_, beta], [alone] = named_keys(("alpha", "beta")), named_keys(("beta",))
    assert beta.name == alone.name != named_keys(("alpha",))[0].name
    assert "beta" not in beta.name
