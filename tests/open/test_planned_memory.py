"""What a plan says of a GGUF file's weights is what the loader holds: embedding, head and stacked experts included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from windlass.cli import execute
from windlass.model.bundled.models import find_bundled

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("kind", ["Q4_K_M", "Q8_0", "Q4_0"])
def test_planned_weights_are_loaded_weights(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from windlass.runtime.weights.load.checkpoint import CheckpointWeights
    from windlass.runtime.weights.source import open_source
    from windlass.tasks.convert.gguf.convert import to_gguf

    source = find_bundled("tiny-glm")
    assert source is not None
    made = to_gguf(open_source(source), tmp_path / "tiny.gguf", kind, lambda total: lambda done: None)
    opened = open_source(Path(made.model))
    held = CheckpointWeights(opened, device="cpu").memory_bytes()
    opened.store.close()
    assert execute(["plan", made.model, "--on", "cpu:2,ram=8GB", "--engine", "windlass", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["memory"]["per_device"][0]["weights_bytes"]
    assert planned == pytest.approx(held, rel=0.02)
