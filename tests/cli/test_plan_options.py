"""Options of `windlass plan` for inference: loads, drafts, explanations, and refusals in one line."""

from __future__ import annotations

import json

import pytest

from windlass.cli import execute

pytestmark = pytest.mark.pure


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = execute(["plan", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_every_prediction_has_an_interval(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = plan(capsys, "GLM-4.5-Air", "--on", "1xH200", "--quant", "int4", "--json")
    speed = json.loads(out)["speed"]
    for name in ("decode", "prefill", "sustained"):
        low, high = speed[f"{name}_range"]
        assert low < speed[f"{name}_tokens_per_second"] <= high
    assert "rows" in speed["basis"]


def test_explain_and_load(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = plan(
        capsys, "GLM-4.5-Air", "--on", "1xH200", "--quant", "int4", "--explain", "--rate", "2/s", "--ttft", "1s", "--tpot", "50ms"
    )
    assert code == 0 and "a decode step" in out and "2/s fit" in out


APART = (
    "Llama-3.3-70B-Instruct",
    "--on",
    "2x(4xH100)@400Gb",
    "--prefill-on",
    "2xH100",
    "--rate",
    "4/s",
    "--ttft",
    "2s",
    "--tpot",
    "60ms",
)


def test_prompts_on_machines_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = plan(capsys, *APART)
    assert code == 0 and "prefill:" in out and "of KV cache a prompt" in out
    _, out, _ = plan(capsys, *APART, "--json")
    apart = json.loads(out)["disaggregated"]
    assert apart["within"] and apart["prefill"]["units"] >= 1 and apart["decode"]["units"] >= 1
    assert 0 < apart["transfer_seconds"] < apart["time_to_first_token_seconds"] <= 2


def test_the_first_line_warns_of_what_was_never_run(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = plan(capsys, "Llama-3.1-8B", "--on", "2xA100", "--engine", "windlass")
    assert out.splitlines()[0].startswith("not run yet: Windlass was never run on")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("Llama-3.1-8B", "--on", "1xH200", "--ttft", "1s"), "add --rate"),
        (("Llama-3.1-8B", "--on", "1xH200", "--rate", "many"), "requests per second"),
        (("Llama-3.1-8B", "--on", "1xH200", "--rate", "5/s", "--tpot", "soon"), "is not a time"),
        (("Llama-3.1-8B", "--on", "1xH200", "--cached-prefix", "1.5"), "--cached-prefix from 0"),
        (("Llama-3.1-8B", "--on", "1xH200", "--prefill-on", "1xH200"), "add --rate"),
        (("Llama-3.1-8B", "--on", "1xH200", "--prefill-on", "1xH2000", "--rate", "1/s"), "unknown device"),
        (
            ("Llama-3.1-8B", "--on", "1xH200", "--prefill-on", "1xH200", "--rate", "1/s", "--engine", "llama.cpp"),
            "other machines",
        ),
        (("Llama-3.3-70B-Instruct", "--on", "4xH200", "--prefill-on", "1xRTX-3060", "--rate", "1/s"), "does not fit"),
        (("Llama-3.1-8B", "--on", "1xH200", "--engine", "vlm"), "unknown engine"),
        (("--on", "1xH200"), "say which model"),
        (("--calibrate", "--on", "1xH200"), "--on is"),
    ],
)
def test_refusals_are_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str) -> None:
    code, _, err = plan(capsys, *arguments)
    assert code != 0 and words in err and len(err.strip().splitlines()) == 1
