"""Every rank gets its slices, and the slices of all ranks are the whole: even and uneven tp, experts spread, in every form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from windlass.core.layout import Layout  # noqa: E402
from windlass.core.place import Placement, place, stored  # noqa: E402
from windlass.core.rule import AxisName, ModelPart, Role  # noqa: E402
from windlass.core.scheme import Scheme, scheme  # noqa: E402
from windlass.runtime.kernels.packing.panels import Panels  # noqa: E402
from windlass.runtime.weights import CheckpointWeights, OpenedModel, open_model  # noqa: E402
from windlass.runtime.weights.schemes import sizing_scheme  # noqa: E402
from windlass.runtime.weights.tensors.tensor_index import TensorIndex  # noqa: E402
from windlass.tasks.convert.convert import ConvertSettings, convert  # noqa: E402

pytestmark = pytest.mark.cpu

BF16, INT4, INT8, FP8 = scheme("bf16"), scheme("int4", 32), scheme("int8", 32), scheme("fp8")
LAYOUTS: dict[str, tuple[Layout, tuple[float, ...] | None]] = {
    "tp2": (Layout(tp=2), None),
    "tp3": (Layout(tp=3), (3.0, 2.0, 1.0)),
    "tp4 ep2": (Layout(tp=4, ep=2), None),
    "tp3 ep3": (Layout(tp=3, ep=3), (1.0, 2.0, 1.0)),
}
SOURCES = {
    "plain": BF16, "fused": BF16, "transposed": BF16, "interleaved": BF16, "mxfp4": INT8, "latent": BF16,
    "int4": INT4, "int4 zeros": scheme("int4", 32, zero_points=True), "fp8": FP8, "Q4_1": INT4, "q80": INT8,
}  # fmt: skip


@pytest.fixture(scope="module")
def sources(tiny: Any, gguf_maker: ModuleType, dllama_maker: ModuleType, tmp_path_factory: Any) -> Callable[[str], OpenedModel]:
    """Wide enough that three ranks have something of everything."""
    folder = tmp_path_factory.mktemp("sources")
    made: dict[str, OpenedModel] = {}
    wide = {"num_attention_heads": 12, "num_key_value_heads": 4}

    def path(name: str) -> Path:
        target = folder / name.replace(" ", "-")
        match name:
            case "plain":
                return tiny.make(target, "glm4_moe", **wide, intermediate_size=288, moe_intermediate_size=192)
            case "fused":
                return tiny.make(target, "falcon-40b", num_attention_heads=12, num_kv_heads=4, hidden_size=384)
            case "transposed":
                return tiny.make(target, "gpt2", n_head=12, n_embd=384)
            case "interleaved":
                return tiny.make(target, "gpt_oss", choice=1, **wide, intermediate_size=192)
            case "mxfp4":
                return tiny.make(target, "gpt_oss", **wide, intermediate_size=192)
            case "latent":
                return tiny.make(target, "deepseek_v3", num_attention_heads=12, num_key_value_heads=12, moe_intermediate_size=192)
            case "Q4_1":
                config = gguf_maker.small_config("glm4moe") | {"num_attention_heads": 12, "num_key_value_heads": 4}
                config |= {"intermediate_size": 288, "moe_intermediate_size": 128}
                return gguf_maker.write_gguf(
                    target.with_suffix(".gguf"), "glm4moe", config, gguf_maker.expected_tensors(config), kind="Q4_1"
                )
            case "q80":
                config = dllama_maker.CONFIGS["glm4_moe"] | wide | {"moe_intermediate_size": 192}
                dllama_maker._write(target.with_suffix(".m"), config, "q80")
                return target.with_suffix(".m")
            case _:
                convert(Path(opened("plain").name), target, settings(SOURCES[name]))
                return target

    def opened(name: str) -> OpenedModel:
        if name not in made:
            made[name] = open_model(path(name))
        return made[name]

    return opened


def settings(how: Scheme) -> ConvertSettings:
    return ConvertSettings(scheme=how, jobs=1)


def placement_of(opened: OpenedModel, layout: Layout, how: Scheme, shares: tuple[float, ...] | None) -> Placement:
    return place(opened.rules, opened.spec.num_layers, layout, how, shares=shares)


def plain(found: Any, expert: int | None = None) -> torch.Tensor:
    if isinstance(found, Panels):
        return found.dense(expert)
    return found if expert is None else found[expert]


@pytest.mark.parametrize(("source", "layout"), [*((source, "tp3") for source in SOURCES), ("plain", "tp2"), ("int4", "tp2")])
def test_slices_are_the_whole(sources: Any, source: str, layout: str) -> None:
    opened = sources(source)
    ways, shares = LAYOUTS[layout]
    placed = placement_of(opened, ways, SOURCES[source], shares)
    whole = CheckpointWeights(opened, keep_quantized=False)
    ranks = [CheckpointWeights(opened, placement=placed, tp_index=index) for index in range(ways.tp)]
    num_panels = 0
    for rule in opened.rules:
        if rule.part is not ModelPart.MAIN or rule.copy_of is not None or rule.num_experts:
            continue
        name = rule.ours.format(layer=rule.layers[-1] if rule.layers else None)
        expected = whole.vector(name) if len(rule.axes) == 1 else whole.matrix(name)
        rebuilt, covered = torch.full_like(expected, torch.nan), torch.zeros_like(expected)
        for index, rank in enumerate(ranks):
            found = rank.vector(name) if len(rule.axes) == 1 else rank.matrix(name)
            num_panels += isinstance(found, Panels)
            slots = tuple(
                slice(start * axis.unit, stop * axis.unit)
                for axis in rule.axes
                for start, stop in (placed.interval(axis, index),)
            )
            assert tuple(found.shape) == tuple(expected[slots].shape), name
            rebuilt[slots] = plain(found).float()
            covered[slots] += 1
            if (
                source == "fp8" and name.endswith("ffn.down.weight") and not isinstance(found, Panels)
            ):  # a row may be cut within a block of 32; then it is plain
                assert torch.equal(rebuilt[slots], expected[slots].bfloat16().float()), name
                rebuilt[slots] = expected[slots]
        assert torch.equal(rebuilt, expected), name
        cut_once = any(axis.name in (AxisName.HEADS, AxisName.FFN, AxisName.VOCAB, AxisName.SHARED_FFN) for axis in rule.axes)
        assert not cut_once or covered.max() == 1, f"{name}: nobody reads what another rank has"
    assert bool(num_panels) == (source not in ("plain", "fused", "transposed", "interleaved", "mxfp4", "latent"))


@pytest.mark.parametrize(
    ("source", "layout"),
    [
        *((source, "tp4 ep2") for source in ("plain", "interleaved", "mxfp4", "int4", "int4 zeros", "fp8", "Q4_1", "q80")),
        *((source, layout) for source in ("plain", "int4") for layout in ("tp2", "tp3", "tp3 ep3")),
    ],
)
def test_experts_are_spread_and_cut(sources: Any, source: str, layout: str) -> None:
    opened = sources(source)
    ways, shares = LAYOUTS[layout]
    placed = placement_of(opened, ways, SOURCES[source], shares)
    whole = CheckpointWeights(opened, keep_quantized=False)
    layer = opened.spec.num_layers - 1
    for parts in (("gate", "up"), ("down",)):
        expected = whole.experts(layer, *parts)
        biases = whole.expert_vectors(layer, *parts)
        rebuilt = torch.full_like(expected, torch.nan)
        for index in range(ways.tp):
            rank = CheckpointWeights(opened, placement=placed, tp_index=index)
            found = rank.experts(layer, *parts)
            first, last = placed.experts[index // ways.expert_tp]
            start, stop = next(cut for cut in placed.cuts if cut.name is AxisName.EXPERT_FFN).intervals[index]
            for local, expert in enumerate(range(first, last)):
                numbers = plain(found, local).float()
                if parts == ("down",):
                    rebuilt[expert][:, start:stop] = numbers
                else:
                    rebuilt[expert].unflatten(0, (2, -1))[:, start:stop] = numbers.unflatten(0, (2, -1))
                if biases is not None:
                    cut = biases[expert].view(len(parts), -1)
                    local_bias = rank.expert_vectors(layer, *parts)[local].view(len(parts), -1)
                    assert torch.equal(local_bias, cut if parts == ("down",) else cut[:, start:stop])
        assert torch.equal(rebuilt, expected)
        packed = source not in ("plain", "interleaved")
        assert isinstance(CheckpointWeights(opened, placement=placed).experts(layer, *parts), Panels) == packed


def test_only_its_own_rows_are_read(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A half of the heads is a half of the bytes; a matrix cut along its inputs is read whole."""
    opened = open_model(tiny.make(tmp_path / "model", "mistral"))
    placed = placement_of(opened, Layout(tp=2), BF16, None)
    read: dict[str, int] = {}
    original = type(opened.store).read_into
    monkeypatch.setattr(
        type(opened.store),
        "read_into",
        lambda self, name, offset, buffer: (read.__setitem__(name, buffer.nbytes), original(self, name, offset, buffer))[1],
    )
    weights = CheckpointWeights(opened, placement=placed, tp_index=1)
    weights.matrix("layers.0.mixer.q.weight", "layers.0.mixer.k.weight", "layers.0.mixer.v.weight")
    assert read == {
        f"model.layers.0.self_attn.{part}_proj.weight": rows * 128 * 2 for part, rows in (("q", 64), ("k", 32), ("v", 32))
    }


def test_progress_ends_at_the_total(tiny: Any, tmp_path: Path) -> None:
    opened = open_model(tiny.make(tmp_path / "model", "mistral"))
    seen: list[tuple[int, int]] = []
    weights = CheckpointWeights(opened, progress=lambda done, total: seen.append((done, total)))
    for rule in opened.rules:
        for layer in rule.layers or (None,):
            name = rule.ours.format(layer=layer)
            _ = weights.vector(name) if len(rule.axes) == 1 else weights.matrix(name)
            _ = weights.vector(name) if len(rule.axes) == 1 else weights.matrix(name)  # twice counts once
    total = sum(
        (tmp_path / "model" / file).stat().st_size
        for file in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    )
    assert seen[0][0] == 0 and seen[-1][0] == seen[-1][1]
    assert seen == sorted(seen) and 0.9 * total < seen[-1][1] <= total


def test_a_stage_counts_its_own_layers(tiny: Any, tmp_path: Path) -> None:
    opened = open_model(tiny.make(tmp_path / "model", "mistral", num_hidden_layers=3))
    totals = [CheckpointWeights(opened, layers=layers).total_bytes() for layers in ((0, 1), (1, 2), (2, 3), (0, 3))]
    assert sum(totals[:3]) == totals[3] and totals[1] < totals[2] < totals[0] + totals[1]


@pytest.mark.parametrize(
    ("name", "expected"),
    {
        "plain": ("bf16", None), "mxfp4": ("int8", 32), "int4": ("int4", 32), "int4 zeros": ("int4", 32), "fp8": ("fp8", None),
        "Q4_1": ("int4", 32), "q80": ("int8", 32),
    }.items(),
)  # fmt: skip
def test_how_large_it_is(sources: Callable[[str], OpenedModel], name: str, expected: tuple[str, int | None]) -> None:
    """The scheme that predictions of memory are made with is what most weights take here: within 15 %, but for the tables."""
    opened = sources(name)
    found = sizing_scheme(opened)
    assert (found.name, found.group) == expected and found.zero_points == (name == "int4 zeros")
    matrices = [
        ours
        for ours in TensorIndex(opened.rules).held(opened.spec, (0, opened.spec.num_layers), None)
        if ours.rule.role is Role.MATRIX
    ]
    predicted = sum(stored(ours.rule, found).matrix_bytes(*ours.shape) for ours in matrices)  # type: ignore[call-arg]
    weights = CheckpointWeights(opened)
    actual = sum(weights._memory_bytes(weights._find(ours)) for ours in matrices)
    assert predicted == pytest.approx(actual, rel=0.15)
