"""Several rows of one sequence in a decode step, and the MTP layer, in the pass made of a GPU's kernels (stand-ins of them, on a CPU)."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
HERE = str(Path(__file__).parents[1])
if HERE not in sys.path:
    sys.path.insert(0, HERE)

from stand_ins import StandIns  # noqa: E402
from tiny_fused import GLM, Lively, Widened  # noqa: E402

from windlass.core.scheme import scheme  # noqa: E402
from windlass.model.families import describe, rules  # noqa: E402
from windlass.runtime.kernels.step import Step  # noqa: E402
from windlass.runtime.nn import Decoder  # noqa: E402
from windlass.runtime.nn.fused import mtp as fused_mtp  # noqa: E402
from windlass.runtime.nn.mtp_pass import MtpPass  # noqa: E402

pytestmark = pytest.mark.cpu

LENGTH = 40


class Models:
    """A model with an MTP layer: on stand-ins of the kernels in fp32, and in float64."""

    def __init__(self, patch: pytest.MonkeyPatch, tiny: Any) -> None:
        self.tiny = tiny
        spec = describe(GLM | {"num_nextn_predict_layers": 1})
        weights = Lively(spec, rules(spec), quant=scheme("int4", 64), dtype=torch.bfloat16, tiled=True)
        assert weights.tiled
        self.exact = Decoder(spec, Widened(weights), mtp=True)  # type: ignore[arg-type]
        stand_ins = StandIns(torch.float32)
        stand_ins.install(patch)
        patch.setattr(fused_mtp, "torch", patch_of(torch.float32))
        self.decoder = Decoder(spec, weights, mtp=True)
        assert self.decoder.fused is not None and self.decoder.mtp is not None and self.exact.mtp is not None
        self.decoder.fused.hidden = self.decoder.normed = torch.zeros(128, spec.hidden_size)
        self.caches = self.decoder.make_caches(8, torch.float32)
        self.mtp = MtpPass(self.decoder, self.decoder.mtp, 128, "cpu")
        self.mtp.inputs = self.mtp.inputs.float()
        self.mtp_cache = self.decoder.mtp.make_cache(8, torch.float32, "cpu")
        self.exact_mtp = MtpPass(self.exact, self.exact.mtp, 128, "cpu")
        self.exact_cache = self.exact.mtp.make_cache(8, torch.float64, "cpu")
        self.tokens = torch.randint(0, 96, (LENGTH + 1,), generator=torch.Generator().manual_seed(5)).tolist()

    def step(self, tokens: list[int], start: int, stop: int) -> Step:
        return self.tiny.step([self.tiny.chunk(tokens, start, stop, [3, 5, 1])])

    def chained(self, tokens: list[int], start: int, stop: int) -> Step:
        """Each token as a sequence of its own."""
        rows = [self.tiny.chunk(tokens, place, place + 1, [3, 5, 1]) for place in range(start, stop)]
        return replace(self.tiny.step(rows), is_chained=True)


def patch_of(half: Any) -> Any:
    from stand_ins import Torch

    return Torch(half)


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch, tiny: Any) -> Models:
    return Models(monkeypatch, tiny)


def near(found: Any, expected: Any) -> None:
    errors = (found.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert found.shape == expected.shape
    assert errors.max() < 1e-4, errors


@pytest.mark.parametrize("rows", [2, 5, 12])
def test_rows_of_one_sequence_see_each_other(models: Models, rows: int) -> None:
    with torch.inference_mode():
        expected = models.exact(models.step(models.tokens, 0, LENGTH))
        models.decoder(models.step(models.tokens, 0, LENGTH - rows), models.caches)
        near(models.decoder(models.chained(models.tokens, LENGTH - rows, LENGTH), models.caches), expected[LENGTH - rows :])


def test_a_rejected_draft_leaves_nothing(models: Models) -> None:
    with torch.inference_mode():
        expected = models.exact(models.step(models.tokens, 0, LENGTH))
        models.decoder(models.step(models.tokens, 0, 20), models.caches)
        models.decoder(models.chained([*models.tokens[:21], 1, 2, 3], 20, 24), models.caches)
        near(models.decoder(models.chained(models.tokens, 21, 24), models.caches), expected[21:24])


def test_the_mtp_layer_equals_the_decoder_in_float64(models: Models) -> None:
    """A prompt, one token, several, several as rows that are chained; hidden states of the main pass."""
    tokens, following = models.tokens, models.tokens[1:]
    with torch.inference_mode():
        models.exact(models.step(tokens, 0, LENGTH), models.exact.make_caches(8, torch.float64))
        hidden = models.exact.normed
        assert hidden is not None and models.decoder.normed is not None
        models.exact_mtp.inputs = hidden
        expected = models.exact_mtp(models.step(following, 0, LENGTH), [models.exact_cache])
        states = models.exact_mtp.outputs
        for start, stop, chained in ((0, 30, False), (30, 31, False), (31, 34, False), (34, LENGTH, True)):
            make = models.chained if chained else models.step
            models.decoder(make(tokens, start, stop), models.caches)
            near(models.decoder.normed[: stop - start], hidden[start:stop])
            models.mtp.inputs = models.decoder.normed
            near(models.mtp(make(following, start, stop), [models.mtp_cache]), expected[start:stop])
            near(models.mtp.outputs, states[start:stop])


def test_the_first_position_has_no_embedding(models: Models) -> None:
    with torch.inference_mode():
        models.exact_mtp.inputs = torch.randn(128, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        one, other = (models.exact_mtp(models.step([first, 4], 0, 2), [models.exact_cache]) for first in (7, 9))
    assert torch.equal(one, other)
