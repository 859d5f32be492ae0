"""Names of jobs, from what they run."""

from __future__ import annotations

import pytest

from windlass.cli.launch.submit import _usual_name

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("serve ./GLM-4.5-Air-int4", "serve-GLM-4.5-Air-int4"),
        ("serve zai-org/GLM-4.6", "serve-GLM-4.6"),
        ("train run recipes/tiny.toml", "train-tiny"),
        ("bench llama.gguf --batch 1", "bench-llama"),
        ("eval --tasks gsm8k", "eval-gsm8k"),
    ],
)
def test_usual_name(command: str, expected: str) -> None:
    assert _usual_name(tuple(command.split())) == expected
