"""How a model is opened: contradictions are refused before anything is loaded, and a job survives the wire."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from windlass.core.launch import Launch, RankJob, check_launch
from windlass.core.layout import Layout
from windlass.core.ranks.address import parse_address, parse_workers, worker_address
from windlass.core.ranks.rendezvous import KEY_BYTES, Meeting
from windlass.errors import BadInput

pytestmark = pytest.mark.pure

SECRET = "secret"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, r"--device is cpu, cuda \(an NVIDIA or AMD GPU\) or mps \(Apple\), not 'tpu'"),
        ({"kv": "int3"}, "--kv is bf16, fp8 or fp32, not 'int3'"),
        ({"context_tokens": 1}, "at least 2 tokens"),
        ({"layout": Layout(tp=3, ep=2)}, "--ep 2 must divide --tp 3"),
        ({"layout": Layout(tp=2), "sync": "int3"}, "--sync is exact or int8"),
        ({"sync": "int8"}, "for several ranks"),
        ({"secret_file": SECRET}, "--secret-file needs --workers"),
        ({"workers": ("a:1",)}, "--workers needs --secret-file"),
        ({"workers": ("a:1",), "secret_file": SECRET, "layout": Layout(tp=3)}, "cannot be divided evenly over 2 machines"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        check_launch(Launch(**options))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"device": "cuda:1", "kv": "fp32", "context_tokens": 2},
        {"layout": Layout(tp=4, ep=2), "sync": "int8"},
        {"workers": ("a:1",), "secret_file": SECRET, "layout": Layout(tp=4)},
    ],
)
def test_what_can_be_is_let_through(options: dict[str, Any]) -> None:
    check_launch(Launch(**options))


def test_ranks_are_divided_over_machines() -> None:
    assert Launch().is_single and Launch().ranks_per_machine == 1
    assert not Launch(layout=Layout(pp=2)).is_single
    assert Launch(workers=("a:1", "b:1"), layout=Layout(tp=6)).ranks_per_machine == 2


def test_a_job_survives_the_wire() -> None:
    meeting = Meeting(key=bytes(KEY_BYTES), hosts=("", "b"), machines=(0, 1))
    job = RankJob(
        launch=Launch(model="/m", workers=("a:1",), secret_file=SECRET), rank=1, meeting=meeting, stages=((0, 2), (2, 4))
    )
    assert (
        msgspec.msgpack.decode(msgspec.msgpack.encode(job, enc_hook=str), type=RankJob, dec_hook=lambda kind, text: kind(text))
        == job
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [("10.0.0.7:9998", ("10.0.0.7", 9998)), ("[fd00::7]:1", ("fd00::7", 1)), ("box", ("box", 9998)), ("[::1]", ("::1", 9998))],
)
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    assert worker_address(text) == expected


@pytest.mark.parametrize("text", ["", ":1", "a:", "a:b", "a:99999", "a:0", "fd00::7", "a:1,a:1", ",", "a:¹"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(BadInput, match="--workers"):
        parse_workers(text)


def test_a_listener_needs_its_port() -> None:
    assert parse_address("0.0.0.0:0", "--listen") == ("0.0.0.0", 0)
    with pytest.raises(BadInput, match="--listen takes HOST:PORT"):
        parse_address("0.0.0.0", "--listen")
