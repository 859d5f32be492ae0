"""Converting with samples: every family's layers are passed through, and what comes out answers more nearly as the source does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.cpu

torch = pytest.importorskip("torch")

from windlass.core.scheme import scheme  # noqa: E402
from windlass.runtime.kernels.step import Step  # noqa: E402
from windlass.runtime.nn.decoder import Decoder  # noqa: E402
from windlass.runtime.weights import CheckpointWeights, open_model  # noqa: E402
from windlass.tasks.convert.calibration import Calibration  # noqa: E402
from windlass.tasks.convert.convert import ConvertSettings, convert  # noqa: E402

SAMPLES = tuple(
    tuple(int(token) for token in row) for row in torch.randint(0, 64, (8, 32), generator=torch.Generator().manual_seed(0))
)


def step_of(samples: torch.Tensor) -> Step:
    count, length = samples.shape
    nothing = torch.zeros(0, dtype=torch.int32)
    return Step(
        tokens=samples.flatten().int(),
        positions=torch.arange(length, dtype=torch.int32).repeat(count),
        slots=nothing,
        starts=torch.arange(0, count * length + 1, length, dtype=torch.int32),
        lengths=torch.full((count,), length, dtype=torch.int32),
        blocks=nothing,
        logit_rows=torch.arange(count * length, dtype=torch.int32),
        counts=torch.tensor([count * length, count, count * length], dtype=torch.int32),
    )


@torch.no_grad()
def logits(folder: Path, samples: torch.Tensor) -> torch.Tensor:
    opened = open_model(folder)
    try:
        return Decoder(opened.spec, CheckpointWeights(opened, keep_quantized=False), 64)(step_of(samples))
    finally:
        opened.store.close()


def settings(**changes: Any) -> ConvertSettings:
    return ConvertSettings(**{"scheme": scheme("int4", 32), "jobs": 2, "samples": SAMPLES, **changes})


FAMILIES = ["llama", "glm4_moe", "glm4", "deepseek_v3", "gpt_oss", "falcon-40b", "bloom", "gpt_neox", "qwen3_moe"]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_matrix_of_a_layer_is_known_by_its_inputs(name: str, tiny: Any, tmp_path: Path) -> None:
    """Except the latent's up-projection, which the decoder keeps in another form, and what lies outside the layers."""
    from windlass.tasks.convert.outputs import PackingChoices, converted_tensors

    opened = open_model(tiny.make(tmp_path / "in", name))
    planned = [
        one for one in converted_tensors(opened.spec, opened.rules, PackingChoices(scheme=scheme("int4", 32))) if one.packed
    ]
    planned = [one for one in planned if one.layer is not None and one.layer < opened.spec.num_layers]
    calibration = Calibration(opened, torch.tensor(SAMPLES))
    calibration.expect(planned)
    for output in planned:
        known = calibration.inputs(output)
        if output.rule.ours.endswith(("kv_b.weight",)) or ".indexer." in output.rule.ours:
            assert known is None
        elif output.expert is None:
            assert known is not None, output.name
            assert known.factor.shape == (output.shape[1], output.shape[1]), output.name
    for output in planned:
        calibration.done(output)
    assert not calibration._inputs and not calibration._moments
    opened.store.close()


@pytest.mark.parametrize("name", ["llama", "glm4_moe"])
def test_answers_are_nearer(name: str, tiny: Any, tmp_path: Path) -> None:
    source = tiny.make(tmp_path / "in", name, vocab_size=64)
    convert(source, tmp_path / "plain", settings(samples=()))
    report = convert(source, tmp_path / "calibrated", settings(verify=True))
    assert any("calibrated on" in note for note in report.notes)
    samples = torch.tensor(SAMPLES)
    exact = logits(source, samples)
    errors = [float((logits(tmp_path / folder, samples) - exact).square().mean()) for folder in ("plain", "calibrated")]
    assert errors[1] < 0.8 * errors[0]


def test_the_same_bytes_however_many_workers(tiny: Any, tmp_path: Path) -> None:
    source = tiny.make(tmp_path / "in", "glm4_moe", vocab_size=64)
    for jobs in (1, 2):
        convert(source, tmp_path / f"out-{jobs}", settings(jobs=jobs))
    files = sorted(path.name for path in (tmp_path / "out-1").glob("*.safetensors"))
    for file in files:
        assert (tmp_path / "out-1" / file).read_bytes() == (tmp_path / "out-2" / file).read_bytes()
