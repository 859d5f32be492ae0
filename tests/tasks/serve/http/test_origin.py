"""Whose pages may ask, and by which names."""

from __future__ import annotations

import pytest

from windlass.tasks.serve.http.origin import allows_host, allows_origin, cors_headers, host_name, is_local, own_names

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.5.5.5", True),
        ("localhost", True),
        ("::1", True),
        ("[::1]", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.5", False),
        ("example.org", False),
    ],
)
def test_what_only_this_machine_reaches(host: str, local: bool) -> None:
    assert is_local(host) == local


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("localhost:8000", "localhost"),
        ("LOCALHOST", "localhost"),
        ("[::1]:8000", "::1"),
        ("evil.example.", "evil.example"),
        ("user@localhost", ""),
        ("localhost:18431, evil.com", ""),
        ("localhost:8000:9", ""),
        ("localhost/path", ""),
        ("localhost ", ""),
        ("[::1", ""),
        ("[bad", ""),
        ("", ""),
    ],
)
def test_the_name_in_a_host_header(header: str, name: str) -> None:
    assert host_name(header) == name


@pytest.mark.parametrize(
    ("header", "bound", "allowed", "answer"),
    [
        ("localhost:8000", "127.0.0.1", (), True),
        ("127.0.0.1:8000", "127.0.0.1", (), True),
        ("[::1]:8000", "::1", (), True),
        ("evil.example:8000", "127.0.0.1", (), False),
        ("localhost.evil.example", "127.0.0.1", (), False),
        ("", "127.0.0.1", (), False),
        ("evil@localhost", "127.0.0.1", (), False),
        ("localhost:18431, evil.com", "127.0.0.1", (), False),
        (None, "127.0.0.1", (), True),
        ("evil.example", "0.0.0.0", (), True),
        ("evil.example", "0.0.0.0", ("good.example",), False),
        ("good.example:443", "0.0.0.0", ("good.example",), True),
        ("good.example", "127.0.0.1", ("good.example",), True),
    ],
)
def test_which_names_a_server_answers_to(header: str | None, bound: str, allowed: tuple[str, ...], answer: bool) -> None:
    assert allows_host(header, own_names(bound, allowed)) == answer


@pytest.mark.parametrize(
    ("origin", "host", "allowed", "answer"),
    [
        (None, "localhost:8000", (), True),
        ("http://localhost:8000", "localhost:8000", (), True),
        ("http://localhost:3000", "localhost:8000", (), False),
        ("http://evil.example", "localhost:8000", (), False),
        ("null", "localhost:8000", (), False),
        ("http://evil.example", None, (), False),
        ("http://[", "localhost:8000", (), False),
        ("https://app.example", "localhost:8000", ("https://app.example",), True),
        ("https://other.example", "localhost:8000", ("https://app.example",), False),
        ("https://other.example", "localhost:8000", ("*",), True),
    ],
)
def test_whose_pages_may_ask(origin: str | None, host: str | None, allowed: tuple[str, ...], answer: bool) -> None:
    assert allows_origin(origin, host, allowed) == answer


def test_other_sites_are_told_nothing_by_default() -> None:
    assert cors_headers("https://app.example", ()) == []
    assert cors_headers(None, ("*",)) == []
    assert (b"access-control-allow-origin", b"https://app.example") in cors_headers("https://app.example", ("*",))


@pytest.mark.parametrize(
    ("wished", "allowed"),
    [
        (None, b"authorization, content-type"),
        (
            "authorization, content-type, x-stainless-os,x-stainless-lang",
            b"authorization, content-type, x-stainless-os,x-stainless-lang",
        ),
        ("x: y", b"authorization, content-type"),
        ("a\r\nset-cookie: b", b"authorization, content-type"),
        ("", b"authorization, content-type"),
        ("\u00e9", b"authorization, content-type"),
        ("x," * 5000 + "x", b"authorization, content-type"),
    ],
)
def test_a_page_may_send_the_headers_that_it_names(wished: str | None, allowed: bytes) -> None:
    found = dict(cors_headers("https://app.example", ("*",), wished))
    assert found[b"access-control-allow-headers"] == allowed
    assert found[b"access-control-expose-headers"].startswith(b"retry-after")
    assert b"DELETE" in found[b"access-control-allow-methods"]
    assert int(found[b"access-control-max-age"]) > 0
