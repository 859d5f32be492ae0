"""`windlass run` with a real model, in the process that users get."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from waiting import HUNG_SECONDS
from windlass.cli.run.options import RunOptions
from windlass.cli.run.session import launch_for
from windlass.core.launch import Launch
from windlass.open.progress import ByteBar

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module", autouse=True)
def _torch() -> None:
    """Looked for when the first of these tests runs: collecting them takes no torch."""
    pytest.importorskip("torch")


def windlass(*words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "windlass", *words]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=HUNG_SECONDS, check=False)


def test_smollm2_answers(smollm2: Path) -> None:
    """The answer that transformers gives on the same file in fp32."""
    made = windlass("run", str(smollm2), "--exact", "--temperature", "0", "--json", text="What is the capital of France?\n")
    assert made.returncode == 0 and made.stderr == ""
    found = json.loads(made.stdout)
    assert found["content"] == "The capital of France is Paris." and found["finish_reason"] == "stop"
    assert found["usage"] == {
        "prompt_tokens": 37,
        "completion_tokens": 8,
        "cached_tokens": 0,
        "reasoning_tokens": 0,
        "energy_joules": None,
    }
    assert found["tokens_per_second"] > 0 and found["time_to_first_token_seconds"] > 0 and found["load_seconds"] > 0


def test_a_prompt_that_is_too_long_is_one_line() -> None:
    made = windlass("run", "tiny-glm", "--context", "64", text="word " * 100)
    assert made.returncode == 2 and made.stdout == ""
    assert "does not fit in 64 tokens" in made.stderr and made.stderr.count("\n") == 1


def test_what_an_engine_is_told(tmp_path: Path) -> None:
    asked = Launch(device="cpu", kv="fp32", context_tokens=64, exact=True)
    launch = launch_for(tmp_path, RunOptions(launch=asked))
    assert (launch.model, launch.device, launch.kv, launch.context_tokens) == (str(tmp_path), "cpu", "fp32", 64)
    assert launch.exact and launch.max_sequences == 1, "one person asks"


def test_loading_moves_a_bar() -> None:
    totals: list[int] = []
    steps: list[int] = []

    def started(total: int) -> object:
        totals.append(total)
        return steps.append

    loaded = ByteBar(started)  # type: ignore[arg-type]
    for done in (0, 30, 100):
        loaded(done, 100)
    assert totals == [100] and steps == [0, 30, 70]
