"""What a rank is sent is what it reads: a folder of exactly those slices builds the very tensors that the whole checkpoint does."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")
PARALLEL = str(Path(__file__).parents[3] / "runtime" / "parallel")
if PARALLEL not in sys.path:
    sys.path.insert(0, PARALLEL)

from thread_ranks import run_ranks  # noqa: E402

from windlass.core.layout import Layout  # noqa: E402
from windlass.core.ranks.epoch import EpochPlan  # noqa: E402
from windlass.core.scheme import scheme  # noqa: E402
from windlass.errors import BadCheckpoint  # noqa: E402
from windlass.runtime.fleet.transfer.cache import WeightCache  # noqa: E402
from windlass.runtime.fleet.transfer.needed import needed, placement_of  # noqa: E402
from windlass.runtime.fleet.transfer.send import CheckpointSender  # noqa: E402
from windlass.runtime.kernels.packing.panels import Panels  # noqa: E402
from windlass.runtime.nn import Decoder, ModelShard  # noqa: E402
from windlass.runtime.parallel.groups import Groups  # noqa: E402
from windlass.runtime.weights import CheckpointWeights, OpenedModel, open_model  # noqa: E402
from windlass.runtime.weights.tensors.slices import Slice, subtract  # noqa: E402
from windlass.runtime.weights.transfer.store import open_partial  # noqa: E402
from windlass.tasks.convert.convert import ConvertSettings, convert  # noqa: E402

pytestmark = pytest.mark.cpu

TESTS = Path(__file__).parents[3]
FAMILIES = [
    path.stem
    for path in sorted((TESTS / "model" / "families" / "tiny").glob("*.json"))
    if path.stem not in ("evo2", "glm_moe_dsa")
]
FORMS = ("mxfp4", "stacked", "int4", "int4 zeros", "int8", "fp8", "Q4_1", "Q8_0", "q40", "q80")


def load(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"made_by_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def makers() -> tuple[Any, ModuleType, ModuleType]:
    pytest.importorskip("gguf")
    weights = TESTS / "runtime" / "weights"
    return (
        load(TESTS / "tasks" / "convert" / "conftest.py").Tiny(),
        load(weights / "stores" / "test_gguf.py"),
        load(weights / "stores" / "test_dllama.py"),
    )


def in_form(makers: tuple[Any, ModuleType, ModuleType], form: str, folder: Path) -> Path:
    tiny, gguf, dllama = makers
    wide = {"num_attention_heads": 12, "num_key_value_heads": 4}
    if form in ("mxfp4", "stacked"):
        return tiny.make(folder, "gpt_oss", choice=int(form == "stacked"), **wide, intermediate_size=192)
    if form.startswith("Q"):
        config = gguf.small_config("glm4moe") | wide | {"intermediate_size": 288, "moe_intermediate_size": 128}
        return gguf.write_gguf(folder.with_suffix(".gguf"), "glm4moe", config, gguf.expected_tensors(config), kind=form)
    if form.startswith("q"):
        dllama._write(folder.with_suffix(".m"), dllama.CONFIGS["glm4_moe"] | wide | {"moe_intermediate_size": 192}, form)
        return folder.with_suffix(".m")
    plain = tiny.make(folder / "plain", "glm4_moe", **wide, intermediate_size=288, moe_intermediate_size=192)
    name, *zeros = form.split()
    convert(plain, folder / "packed", ConvertSettings(scheme=scheme(name, 32, zero_points=bool(zeros)), jobs=1))
    return folder / "packed"


PLAINLY = "in-every-way"
"""Of a model that is cut in ways, too, that are parts of others."""
Way = tuple[Layout, tuple[float, ...], tuple[tuple[int, int], ...]]


def ways(opened: OpenedModel) -> dict[str, Way]:
    last, heads = opened.spec.num_layers, opened.spec.attention.num_heads
    found: dict[str, Way] = {
        "tp2 of unlike ranks": (Layout(tp=2), (1.0, 2.2), ()),
        "tp2 pp2": (Layout(tp=2, pp=2), (), ((0, 1), (1, last))),
    }
    if opened.spec.name == PLAINLY:
        found |= {"tp2": (Layout(tp=2), (), ()), "pp2": (Layout(pp=2), (), ())}
    if heads >= 3:
        found["tp3"] = Layout(tp=3), (), ()
    if opened.spec.experts:
        found["ep2"] = Layout(tp=2, ep=2), (), ()
    return found


def tensors(module: Any) -> Iterator[tuple[str, Any]]:
    """Whatever numbers a decoder holds, packed or plain."""
    for name, part in module.named_modules():
        for key, value in [*vars(part).items(), *part._parameters.items(), *part._buffers.items()]:
            if isinstance(value, Panels):
                yield f"{name}.{key}", value.data
            elif isinstance(value, torch.Tensor):
                yield f"{name}.{key}", value


def same(one: Any, other: Any) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(as_bytes(one), as_bytes(other))


def as_bytes(tensor: Any) -> Any:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def received(sending: CheckpointSender, slices: list[Slice], folder: Path) -> OpenedModel:
    """As if it had come over the network."""
    with WeightCache(folder).using(sending.catalogue) as use:
        for piece in sending.pieces(use.missing(slices)):
            use.keep(piece)
        return open_partial(Path(use.store(slices)))


def check(path: Path, folder: Path, chosen: tuple[str, ...] = ()) -> None:
    sending, opened = CheckpointSender(path), open_model(path)
    assert set(chosen) <= ways(opened).keys()
    for way, (layout, shares, stages) in ways(opened).items():
        if chosen and way not in chosen:
            continue
        placement = placement_of(opened, layout, shares, stages)

        def work(rank: int, groups: Groups, way: str = way, layout: Layout = layout, placement: Any = placement) -> int:
            slices = needed(opened, placement, layout, rank)
            parts = received(sending, slices, folder / f"{way} {rank}")
            shard = ModelShard(placement, layout, groups)

            def built(source: OpenedModel) -> dict[str, Any]:
                weights = CheckpointWeights(
                    source, placement=placement, tp_index=groups.tp.rank, layers=shard.layers(source.spec)
                )
                return dict(tensors(Decoder(source.spec, weights, shard=shard)))

            whole, mine = built(opened), built(parts)
            parts.store.close()
            assert whole.keys() == mine.keys() and len(whole) > 5
            different = [name for name in whole if not same(whole[name], mine[name])]
            assert not different, (way, rank, different[:3])
            return sending.num_bytes(slices)

        sent = run_ranks(layout, work)
        # Norms and routers are everywhere, and kv heads where their queries are; a tied table is on two stages.
        most = 1.9 if layout.pp > 1 and opened.spec.tied_head else 1.6
        assert max(sent) < 0.95 * whole_bytes(opened, sending), way
        assert sum(sent) < most * whole_bytes(opened, sending), way
    opened.store.close()
    sending.close()


def whole_bytes(opened: OpenedModel, sending: CheckpointSender) -> int:
    layout = Layout()
    return sending.num_bytes(needed(opened, placement_of(opened, layout), layout, 0))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name: str, makers: Any, tmp_path: Path) -> None:
    """Half of the ways each, by turns, so that every way has half of the families; the next test has all of both."""
    path = makers[0].make(tmp_path / "model", name)
    opened = open_model(path)
    found = [*ways(opened)][FAMILIES.index(name) % 2 :: 2]
    opened.store.close()
    check(path, tmp_path, tuple(found))


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_in_every_way(name: str, makers: Any, tmp_path: Path) -> None:
    check(makers[0].make(tmp_path / "model", name), tmp_path)


@pytest.mark.parametrize("name", ["llama-tied", "qwen3_moe"])
def test_every_way(name: str, makers: Any, tmp_path: Path) -> None:
    check(makers[0].make(tmp_path / PLAINLY, name), tmp_path, ("tp2", "pp2"))


@pytest.mark.parametrize("form", FORMS)
def test_every_form(form: str, makers: Any, tmp_path: Path) -> None:
    check(in_form(makers, form, tmp_path / "model"), tmp_path, ("tp3", "ep2"))


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_blocks_of_256(kind: str, makers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cut that falls within a block: both ranks have the block."""
    gguf, maker = pytest.importorskip("gguf"), makers[1]
    random_blocks, original = load(TESTS / "runtime" / "weights" / "load" / "test_checkpoint.py").random_blocks, gguf.quantize
    config = maker.small_config("qwen3") | {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    monkeypatch.setattr(
        gguf, "quantize", lambda data, to: random_blocks(kind, data.shape) if to.name == kind else original(data, to)
    )
    check(maker.write_gguf(tmp_path / "model.gguf", "qwen3", config, maker.expected_tensors(config), kind=kind), tmp_path)


@pytest.fixture
def sending(makers: Any, tmp_path: Path) -> Iterator[CheckpointSender]:
    made = CheckpointSender(makers[0].make(tmp_path / "model", "llama", intermediate_size=192))
    yield made
    made.close()


def test_columns_do_not_travel_whole(sending: CheckpointSender) -> None:
    """A matrix that is cut along its inputs: each rank gets its columns of every row, and no more."""
    plan = EpochPlan(layout=Layout(tp=2), nodes=(0, 1))
    found = [
        next(one for one in sending.needed(plan, rank) if one.name.endswith("layers.0.mlp.down_proj.weight")) for rank in range(2)
    ]
    assert [one.columns for one in found] == [(0, 96), (96, 192)]
    assert [one.rows for one in found] == [(0, 128), (0, 128)]


def test_ranks_together_read_everything_once(sending: CheckpointSender) -> None:
    plan = EpochPlan(layout=Layout(tp=2), nodes=(0, 1))
    first, second = (sending.needed(plan, rank) for rank in range(2))
    both = {one.name for one in first if not subtract([one], second)}
    assert both and all("norm" in name or "bias" in name for name in both), "only what is small is held twice"
    everything = [Slice(name=one.name, rows=(0, one.rows), columns=(0, one.width)) for one in sending.catalogue.tensors]
    left = [one for one in subtract(everything, [*first, *second]) if "rotary" not in one.name]
    assert left == []


def test_what_is_missing_is_named(sending: CheckpointSender, tmp_path: Path) -> None:
    plan = EpochPlan(layout=Layout(tp=2), nodes=(0, 1))
    slices = sending.needed(plan, 1)
    gone = next(one for one in slices if one.name.endswith("layers.1.self_attn.q_proj.weight"))
    with WeightCache(tmp_path / "cache").using(sending.catalogue) as use:
        for piece in sending.pieces([one for one in slices if one is not gone]):
            use.keep(piece)
        with pytest.raises(BadCheckpoint, match=r"layers\.1\.self_attn\.q_proj\.weight"):
            use.store(slices)
        parts = open_partial(use.folder)
        with pytest.raises(BadCheckpoint, match=r"q_proj.*were not received"):
            parts.store.read(gone.name, *gone.rows)
        parts.store.close()


def test_other_columns_are_no_numbers(sending: CheckpointSender, tmp_path: Path) -> None:
    slices = sending.needed(EpochPlan(layout=Layout(tp=2), nodes=(0, 1)), 1)
    parts = received(sending, slices, tmp_path / "cache")
    name = next(one.name for one in slices if one.name.endswith("layers.0.mlp.down_proj.weight"))
    rows = parts.store.read(name, 0, 128)
    assert torch.isnan(rows[:, :96]).all() and torch.isfinite(rows[:, 96:]).all()
    parts.store.close()
