"""What the server asks about an adapter before an engine sees it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from windlass.cli.serve import adapter_check
from windlass.cli.serve.adapter_check import PROBLEM, check_adapter
from windlass.model.bundled.models import find_bundled

pytestmark = pytest.mark.cpu


def adapter(folder: Path, rank: int) -> Path:
    """Whose matrices have another rank than its configuration says, unless it is 4."""
    import torch
    from safetensors.torch import save_file

    from windlass.runtime.weights.adapters import published_matrices
    from windlass.runtime.weights.source import open_model

    model = find_bundled("tiny-glm")
    assert model is not None
    module, (_, (out, into)) = next(iter(published_matrices(open_model(model).rules).items()))
    folder.mkdir()
    named = {f"base_model.model.{module}.lora_A.weight": (rank, into), f"base_model.model.{module}.lora_B.weight": (out, rank)}
    save_file({name: torch.ones(shape) for name, shape in named.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    return folder


@pytest.mark.parametrize(("rank", "code"), [(4, 0), (5, PROBLEM)])
def test_an_adapter_is_checked_against_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int, code: int
) -> None:
    folder = adapter(tmp_path / "tone", rank)
    monkeypatch.setattr(sys, "argv", ["", str(find_bundled("tiny-glm")), str(folder)])
    assert adapter_check.main() == code
    said = capsys.readouterr().out
    assert ("this model needs" in said) == bool(code)
    assert str(tmp_path) not in said


@pytest.mark.parametrize(
    ("code", "out", "said"),
    [(0, "", ""), (PROBLEM, "adapter x: bad\n", "was refused: adapter x: bad"), (-11, "", "could not be checked")],
)
def test_what_the_process_says_is_passed_on(monkeypatch: pytest.MonkeyPatch, code: int, out: str, said: str) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, code, out, "")

    monkeypatch.setattr(subprocess, "run", run)
    found = check_adapter(Path("model"), Path("folder"))
    assert found.startswith(said) and bool(found) == bool(said)
