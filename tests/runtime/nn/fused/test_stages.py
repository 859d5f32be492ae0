"""The fused pass of pipeline stages, each on a rank of its own, is that of the whole model: stand-ins for the kernels, threads for the ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
for folder in (Path(__file__).parents[1], Path(__file__).parents[3] / "runtime" / "parallel"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from stand_ins import StandIns  # noqa: E402
from thread_ranks import run_ranks  # noqa: E402
from tiny_fused import weights_of  # noqa: E402

from windlass.core.layout import Layout  # noqa: E402
from windlass.core.place import place  # noqa: E402
from windlass.errors import Impossible  # noqa: E402
from windlass.model.families import rules  # noqa: E402
from windlass.runtime.kernels.cuda import driver  # noqa: E402
from windlass.runtime.nn import Decoder  # noqa: E402
from windlass.runtime.nn.parallel.shard import WHOLE, ModelShard, kv_share  # noqa: E402
from windlass.runtime.parallel.groups import Groups  # noqa: E402

pytestmark = pytest.mark.cpu

CHUNKS = [[(0, 70)], [(70, 71)], [(71, 90)], [(90, 91)]]
"""More than 64 rows, one, several, one."""


def logits_of(name: str, tiny: Any, shard: ModelShard = WHOLE) -> list[Any]:
    """Of each step; empty but on the first stage."""
    spec, weights, _ = weights_of(name)
    decoder = Decoder(spec, weights, shard=shard)
    assert decoder.fused is not None and len(decoder.fused.layers) == len(range(*shard.layers(spec)))  # type: ignore[attr-defined]
    caches = decoder.make_caches(16, torch.float32)
    tokens = torch.randint(0, 96, (91,), generator=torch.Generator().manual_seed(0)).tolist()
    found = []
    with torch.inference_mode():
        for chunks in CHUNKS:
            steps = [tiny.chunk(tokens, start, stop, list(range(6))) for start, stop in chunks]
            found.append(decoder(tiny.step(steps, padding=2), caches).clone())
    return found


@pytest.mark.parametrize("name", ["glm+qk_norm", "qwen", "llama+128"])
def test_stages_are_the_whole(name: str, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense and routed layers on stages of their own, and a head that is the embedding."""
    StandIns(torch.float32).install(monkeypatch)
    spec, weights, _ = weights_of(name)
    layout = Layout(pp=2)
    placement = place(rules(spec), spec.num_layers, layout, weights.scheme, stages=((0, 1), (1, spec.num_layers)))

    def rank(_: int, groups: Groups) -> list[Any]:
        return logits_of(name, tiny, ModelShard(placement, layout, groups))

    whole, (first, last) = logits_of(name, tiny), run_ranks(layout, rank)
    assert all(one.numel() == 0 for one in last)
    for expected, found in zip(whole, first, strict=True):
        assert torch.allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_kernels_are_collected_without_other_ranks(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first step every stage compiles what it needs, by itself."""
    StandIns(torch.float32).install(monkeypatch)
    spec, weights, _ = weights_of("llama+128")
    layout = Layout(pp=2)
    placement = place(rules(spec), spec.num_layers, layout, weights.scheme)

    def rank(_: int, groups: Groups) -> tuple[int, ...]:
        decoder = Decoder(spec, weights, shard=ModelShard(placement, layout, groups))
        with torch.inference_mode():
            step = tiny.step([tiny.chunk([1, 2, 3], 0, 3, [0])])
            return tuple(decoder(step, decoder.make_caches(4, torch.float32)).shape)

    with driver.collecting():
        assert run_ranks(layout, rank) == [(0, spec.hidden_size), (3, spec.vocab_size)]


def test_parts_of_layers_are_refused(tiny: Any) -> None:
    spec, weights, _ = weights_of("glm")
    layout = Layout(tp=2)
    placement = place(rules(spec), spec.num_layers, layout, weights.scheme)
    with pytest.raises(Impossible, match="split by --pp alone"):
        run_ranks(layout, lambda _, groups: logits_of("glm", tiny, ModelShard(placement, layout, groups)))


@pytest.mark.parametrize(
    ("name", "layout", "total"),
    [
        ("glm", Layout(), 1.0),
        ("glm", Layout(tp=2), 1.0),
        ("glm", Layout(pp=2), 1.0),
        ("glm", Layout(tp=2, pp=2), 1.0),
        ("llama+deep", Layout(tp=2), 2.0),
    ],
)
def test_shares_of_the_cache(name: str, layout: Layout, total: float) -> None:
    """Two ranks that share a KV head both hold it."""
    spec, weights, _ = weights_of(name)
    placement = place(rules(spec), spec.num_layers, layout, weights.scheme)
    shares = run_ranks(layout, lambda _, groups: kv_share(ModelShard(placement, layout, groups), spec))
    assert sum(shares) == pytest.approx(total)
