"""Sharded = whole: every rank holds its part and no more, and together they say what one would, for every family and every way to cut it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
HERE = str(Path(__file__).parents[1])
if HERE not in sys.path:
    sys.path.insert(0, HERE)

from split_models import Model, Ran, Split, Steps, called, expected_elements, model_of, replayed, run_split, steps_of  # noqa: E402

from windlass.core.layout import Layout  # noqa: E402
from windlass.core.model import Attention, LatentAttention  # noqa: E402
from windlass.errors import Impossible  # noqa: E402
from windlass.runtime.kernels.program import program  # noqa: E402
from windlass.runtime.nn import Decoder, ModelShard  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.multi]

EXACT, NEAR = 1e-9, 2e-4


def splits_of(model: Model) -> dict[str, Split]:
    """Every way that the model has heads and experts enough for."""
    last = model.spec.num_layers
    found = {
        "tp2": Split(Layout(tp=2)),
        "tp3": Split(Layout(tp=3)),
        "tp2 of unlike ranks": Split(Layout(tp=2), shares=(1.0, 2.2)),
        "pp2 of unlike stages": Split(Layout(pp=2), stages=((0, 1), (1, last))),
        "pp3": Split(Layout(pp=3)),
        "tp2 pp2": Split(Layout(tp=2, pp=2)),
    }
    if model.spec.attention.num_heads >= 5:
        found["tp5, more than kv heads"] = Split(Layout(tp=5))
    if model.spec.experts:
        found["ep2"] = Split(Layout(tp=2, ep=2))
        found["ep2 of unlike ranks, pp2"] = Split(Layout(tp=2, pp=2, ep=2), shares=(2.0, 1.0))
    if model.spec.experts and model.spec.attention.num_heads >= 4:
        found["ep2 tp4"] = Split(Layout(tp=4, ep=2))
    return found


@pytest.fixture(scope="module")
def model(name: str, tiny: Any) -> Model:
    return model_of(tiny.config(name))


def whole(model: Model, steps: Steps, dtype: Any) -> list[Any]:
    return called(Decoder(model.spec, model.weights(dtype)), steps)


def check(model: Model, split: Split, expected: list[Any], ran: list[Ran], bound: float) -> None:
    root, *others = ran
    for found, wanted in zip(root.logits, expected, strict=True):
        assert found.shape == wanted.shape
        assert not wanted.numel() or float((found - wanted).abs().max()) < bound
    assert all(logits.shape[0] == 0 for other in others for logits in other.logits)
    check_parts(model, split, [one.decoder for one in ran])


def check_parts(model: Model, split: Split, decoders: list[Decoder]) -> None:
    """Every rank holds what the placement gives it, to the last number, in the shapes it should have."""
    placement = split.placed(model)
    for decoder in decoders:
        shard = decoder.shard
        first, last = shard.layers(model.spec)
        assert len(decoder.layers) == last - first
        corrections = [module.correction for module in decoder.modules() if getattr(module, "correction", None) is not None]
        held = sum(tensor.numel() for tensor in (*decoder.parameters(), *corrections))
        assert held == expected_elements(model, placement, shard)
        for layer, cache, spec in zip(decoder.layers, decoder.make_caches(1), model.spec.layers[first:last], strict=True):
            mixer = spec.mixer
            assert isinstance(mixer, Attention | LatentAttention)
            heads = shard.heads(mixer.num_heads)
            dim = mixer.head_dim if isinstance(mixer, Attention) else mixer.v_head_dim
            assert layer.mixer.o.weight.shape == (model.spec.hidden_size, (heads[1] - heads[0]) * dim)
            if isinstance(mixer, Attention):
                kv = shard.kv_heads(mixer.num_kv_heads)
                assert cache.keys.shape[1] == kv[1] - kv[0]
    if split.layout.tp > 1:  # and nobody holds everything
        everything = sum(tensor.numel() for tensor in model.state.values())
        assert all(sum(one.numel() for one in decoder.parameters()) < 0.8 * everything for decoder in decoders)


def test_sharded_is_whole(name: str, model: Model, tiny: Any) -> None:
    """In float64, so that it is exact and no matter of luck. Prompts and single tokens after them, through the cache.

    Every family in the ways that ask most of it, and in one of the plainer ones, in turn; some go every way in `test_replayed`.
    """
    steps = steps_of(model, tiny)
    expected = whole(model, steps, torch.float64)
    assert float(expected[0].std()) > 0.3, "nothing to compare"
    ways = splits_of(model)
    plainer = [way for way in ways if way not in HARDEST]
    quirks = "+" in name  # of families that are cut in those ways anyway
    taken = ("tp3", "tp2 pp2", "ep2") if quirks else (*HARDEST, plainer[sum(name.encode()) % len(plainer)])
    for way, split in ways.items():
        if way not in taken:
            continue
        ran = run_split(model, split, steps, called, lambda *at: model.weights(torch.float64, *at))
        check(model, split, expected, ran, EXACT)
        assert len(ran) == split.layout.world, way


HARDEST = ("tp2 of unlike ranks", "tp2 pp2", "tp5, more than kv heads", "ep2 of unlike ranks, pp2")
RECORDED = ("llama", "falcon-7b", "bloom", "gpt2", "glm4", "glm4_moe", "gpt_oss", "deepseek_v3")


@pytest.mark.parametrize("chosen", RECORDED)
def test_replayed(tiny: Any, chosen: str) -> None:
    """The compiled operations, with what ranks say to each other between them. fp32: a sum over ranks has another order than one rank's."""
    if not program.available():
        pytest.skip("nothing is compiled here")
    model = model_of(tiny.config(chosen))
    steps = steps_of(model, tiny)
    expected = whole(model, steps, torch.float32)
    for split in splits_of(model).values():
        ran = run_split(model, split, steps, replayed, lambda *at: model.weights(torch.float32, *at))
        check(model, split, expected, ran, NEAR)


def test_alone_nothing_is_said(tiny: Any) -> None:
    """A whole decoder is one stretch of operations, with no stop in it, and adds the stream within its products."""
    if not program.available():
        pytest.skip("nothing is compiled here")
    model = model_of(tiny.config("llama"))
    decoder, steps = Decoder(model.spec, model.weights(torch.float32)), steps_of(model, tiny)
    caches = decoder.make_caches(4, torch.float32)
    with program.record(steps[0][0].counts[0:1]) as recorded:
        decoder(steps[0][0], caches)
    assert recorded.num_calls == 0
    each = ["norm", "linear", "split_qkv", "attention", "linear", "norm", "linear", "activate", "linear"]
    assert recorded.names == ["embed", *each * model.spec.num_layers, "gather", "norm", "linear"]


def test_the_comparison_would_notice(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias that every rank adds, heads that ask the wrong keys, experts under others' numbers."""
    for chosen, mistake in (
        ("gpt2", lambda: monkeypatch.setattr(ModelShard, "adds_bias", property(lambda shard: True))),
        ("llama", lambda: monkeypatch.setattr("windlass.runtime.nn.mixers.attention.spans_of", lambda *_: ())),
        ("glm4_moe", lambda: monkeypatch.setattr(ModelShard, "experts", lambda *_: (0, 5))),
    ):
        model = model_of(tiny.config(chosen))
        steps = steps_of(model, tiny)[:1]
        expected = whole(model, steps, torch.float64)
        split = Split(Layout(tp=2, ep=2 if model.spec.experts else 1), shares=(2.0, 1.0))
        good = run_split(model, split, steps, called, lambda *at, model=model: model.weights(torch.float64, *at))
        assert float((good[0].logits[0] - expected[0]).abs().max()) < EXACT
        mistake()
        bad = run_split(model, split, steps, called, lambda *at, model=model: model.weights(torch.float64, *at))
        assert float((bad[0].logits[0] - expected[0]).abs().max()) > 1e-3, chosen
        monkeypatch.undo()


def test_what_cannot_be_split(tiny: Any) -> None:
    model = model_of(tiny.config("llama"))
    with pytest.raises(Impossible, match="ep 2 exceeds tp 1"):
        ModelShard(layout=Layout(ep=2, dp=2))

    def tiled(placement: Any, tp_index: int) -> Any:
        weights = model.weights(torch.float32, placement, tp_index)
        weights.tiled = True
        return weights

    with pytest.raises(Impossible, match="split by --pp alone"):
        run_split(model, Split(Layout(tp=2)), [], called, tiled)
