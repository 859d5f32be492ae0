"""`windlass plan --train` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from windlass.cli import execute as run
from windlass.tasks.plan.training.job import TrainingJob
from windlass.tasks.plan.training.time.candidates import Evaluator

pytestmark = pytest.mark.pure

ON = ("--on", "8xH100-80GB")
MOST_ALONE, MOST_OF_A_THOUSAND = 30_000, 100_000
"""Jobs that a search may look at, for all kinds of devices on offer together: 20,984 and 70,886 when this was written."""


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["plan", *arguments, "--json"]) in (0, 3)
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--train", "--quant", "int4"], "--quant is for inference plans"),
        (["--train", "--quant", "auto"], "--quant is for inference plans"),
        (["--train", "--engine", "vllm"], "--engine"),
        (["--train", "--context", "8k"], "--context"),
        (["--train", "--concurrency", "2"], "--concurrency"),
        (["--train", "--kv", "fp8"], "--kv"),
        (["--train", "--goal", "cost"], "--goal"),
        (["--train", "--group", "64"], "--group"),
        (["--train", "--prompt-tokens", "1k"], "--prompt-tokens"),
        (["--train", "--new-tokens", "1k"], "--new-tokens"),
        (["--train", "--dp", "2"], "--dp cannot be set"),
        (["--tokens", "1T"], "--tokens is for training plans"),
        (["--sequence", "4k"], "--sequence is for training plans"),
        (["--batch", "4M"], "--batch is for training plans"),
        (["--train", "--sequence", "256k"], "sequence length 262,144 exceeds the 131,072 tokens of Llama-3.1-8B"),
    ],
)
def test_flags_of_the_other_half_are_refused(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "Llama-3.1-8B", *ON, *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and words in printed.err and printed.err.count("\n") == 1


def test_the_json_of_a_training_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[model]\nname = "Llama-3.1-8B"\n[precision]\ncompute = "fp8"\n[parallel]\ncp = 2\n')
    plan = planned(capsys, str(recipe), *ON)
    assert plan["scheme"]["name"] == "fp8"
    assert plan["train"]["cp"] == plan["train"]["layout"]["cp"] == 2
    assert "PUE 1.1" in plan["energy"]["grid"]
    assert plan["alternatives"] == []  # they would have to tell decoding speeds
    assert plan["train"]["alternatives"][0]["step_seconds"] > plan["train"]["step_seconds"]
    assert plan["would_fit"] == []


def test_a_pin_is_a_pin_wherever_it_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, "Llama-3.1-8B", "--train", *ON, "--tp", "2")
    assert [told["why"] for told in plan["reasons"] if told["choice"] == "tp"] == ["pinned"]


def test_remedies_are_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, "Llama-3.1-70B", "--train", *ON)
    assert not plan["fits"]
    assert plan["would_fit"] == plan["train"]["would_fit"]
    assert all(isinstance(text, str) for text in plan["would_fit"])


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[TrainingJob]:
    """Jobs of which a search asked whether they fit, as they come."""
    jobs: list[TrainingJob] = []
    plain = Evaluator.fits

    def fits(self: Evaluator, job: TrainingJob) -> bool:
        jobs.append(job)
        return plain(self, job)

    monkeypatch.setattr(Evaluator, "fits", fits)
    return jobs


def test_cloud_without_hardware(capsys: pytest.CaptureFixture[str], looked_at: list[TrainingJob]) -> None:
    plan = planned(capsys, "GLM-4.6", "--train", "--cloud")
    assert plan["fits"] and plan["cloud"]
    assert plan["reasons"][0]["choice"] == "devices"
    assert {offer["num_devices"] for offer in plan["cloud"]} == {64}
    assert 0 < len(looked_at) < MOST_ALONE


def test_offers_for_a_thousand_devices_are_searched_coarsely(
    capsys: pytest.CaptureFixture[str], looked_at: list[TrainingJob]
) -> None:
    plan = planned(capsys, "GLM-4.6", "--train", "--cloud", "--on", "128x(8xH800)@400Gb")
    assert len({offer["device"] for offer in plan["cloud"]}) >= 5
    assert 0 < len(looked_at) < MOST_OF_A_THOUSAND


def test_small_runs_are_not_rounded_away(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "SmolLM2-135M-Instruct", "--train", "--on", "1xRTX-4090", "--tokens", "100M"]) == 0
    printed = capsys.readouterr().out
    assert " kWh" in printed and " kg CO2" in printed
    assert "0 MWh" not in printed and " 0 kg" not in printed
    assert "decode" not in printed
