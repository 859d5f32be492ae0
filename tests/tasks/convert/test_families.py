"""Every family, converted and read back: packed weights within their scheme's bound, all others equal, whatever the source's layout."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from windlass.core.rule import Role, Rule
from windlass.core.scheme import GROUPS, Keep, Scheme, Stored, scheme
from windlass.runtime.weights.tensors.readers import published_source

torch = pytest.importorskip("torch")

from windlass.runtime.quant import SMALLEST_ERROR, error_bound  # noqa: E402
from windlass.tasks.convert.convert import ConvertSettings, convert  # noqa: E402 - they import torch

pytestmark = pytest.mark.cpu

FAMILIES = sorted(path.stem for path in (Path(__file__).parents[2] / "model" / "families" / "tiny").glob("*.json"))
SCHEMES = {
    **{f"int4-{group}": scheme("int4", group) for group in GROUPS},
    **{f"int4-{group}-asymmetric": scheme("int4", group, zero_points=True) for group in GROUPS},
    "int8": scheme("int8", 64),
    "fp8": scheme("fp8"),
    "bf16": scheme("bf16"),
}
# Their names say what they are; whatever the scheme, they stay as they were.
NEVER_PACKED = re.compile(
    r"norm|ln_|embed|lm_head|wte|wpe|bias$|layernorm|output_layer|mlp\.gate\.weight|router|block_sparse_moe\.gate\.weight"
)


def written_name(rule: Rule, layer: int | None, expert: int | None) -> str:
    """Experts that are only published stacked are written one by one."""
    source = published_source(rule)
    name = source.name.format(layer=layer, expert=expert)
    if not source.stacked:
        return name
    stem, _, leaf = name.rpartition(".")
    return f"{stem}.{expert}.{leaf.removesuffix('_bias')}.{'bias' if leaf.endswith('_bias') else 'weight'}"


def ours_in(converted: Any, rule: Rule, name: str) -> tuple[torch.Tensor, Stored | None]:
    """Our rows of what was written, which may be fused."""
    whole, how = converted.matrix(name)
    rows = published_source(rule).rows
    if how is None and published_source(rule).transposed:  # what is not packed lies as its name promises
        whole = whole.t()
    return (whole if rows is None else whole[[rows.stored(row) for row in range(rule.shape[0])]]), how


def check(
    converted: Any, made: tuple[Rule, ...], values: Mapping[Any, torch.Tensor], high: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """Every tensor of ours against its source. Returns relative RMS by written name."""
    errors: dict[str, list[torch.Tensor]] = {}
    for (ours, layer, expert), exact in values.items():
        rule = next(one for one in made if one.ours == ours and (layer is None or one.in_layer(layer)))
        name = written_name(rule, layer, expert)
        found, how = ours_in(converted, rule, name)
        if how is None:
            dtype = torch.float32 if rule.keep is Keep.FLOAT32 else high
            assert found.dtype == dtype, name
            assert torch.equal(found, exact.to(dtype)), name
            continue
        assert rule.keep in (Keep.QUANTIZE, Keep.EXPERT) or rule.role is Role.HEAD, name
        group = how.group or exact.shape[1]
        assert converted.group(name.removesuffix(".weight")) == how.group, name
        difference = (found.double() - exact.double()).reshape(-1, group)
        largest = exact.double().abs().reshape(-1, group).amax(dim=1)
        within = difference.square().mean(dim=1).sqrt() <= error_bound(how) * largest + SMALLEST_ERROR
        assert within.all(), name
        squares = errors.setdefault(name, [torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)])
        squares[0] += difference.square().sum()
        squares[1] += exact.double().square().sum()
    assert converted.used == converted.tensors.keys(), "nothing was written that nobody reads"
    return {name: float((error / weight).sqrt()) for name, (error, weight) in errors.items()}


def digests(folder: Path) -> dict[str, str]:
    """Of everything that a reader of the model reads."""
    files = [file for file in sorted(folder.iterdir()) if not file.name.startswith("windlass-report")]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def int4(group: int = 32) -> ConvertSettings:
    return ConvertSettings(scheme=scheme("int4", group), jobs=1)


class Sources:
    """A directory of each family, made once for all schemes."""

    def __init__(self, tiny: Any, folder: Path) -> None:
        self._tiny, self._folder = tiny, folder
        self._made: dict[str, tuple[tuple[Rule, ...], dict[Any, torch.Tensor], Path]] = {}

    def of(self, name: str) -> tuple[tuple[Rule, ...], dict[Any, torch.Tensor], Path]:
        if name not in self._made:
            config = self._tiny.config(name)
            made = self._tiny.rules(config)
            values = self._tiny.values(made)
            self._made[name] = made, values, self._tiny.write(self._folder / name, config, self._tiny.stored(made, values))
        return self._made[name]


@pytest.fixture(scope="module")
def sources(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Sources:
    return Sources(tiny, tmp_path_factory.mktemp("sources"))


@pytest.mark.parametrize("quant", SCHEMES)
@pytest.mark.parametrize("name", FAMILIES)
def test_read_back_within_the_bound(name: str, quant: str, sources: Sources, tiny: Any, tmp_path: Path) -> None:
    made, values, source = sources.of(name)
    report = convert(source, tmp_path / "out", ConvertSettings(scheme=SCHEMES[quant], jobs=1))
    measured = check(tiny.read(tmp_path / "out"), made, values)
    assert {one.name: one.relative_rms for one in report.tensors} == pytest.approx(measured, rel=1e-5)
    assert bool(measured) == (quant != "bf16")
    assert not [one for one in measured if NEVER_PACKED.search(one)]


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_that_no_group_divides_stay_as_they_are(name: str, tiny: Any, tmp_path: Path) -> None:
    """The tiny configs as they are: rows of 24, 13, 7."""
    config = json.loads((Path(__file__).parents[2] / "model" / "families" / "tiny" / f"{name}.json").read_text())
    made = tiny.rules(config)
    values = tiny.values(made)
    source = tiny.write(tmp_path / name, config, tiny.stored(made, values))
    report = convert(source, tmp_path / "out", int4())
    measured = check(tiny.read(tmp_path / "out"), made, values)
    assert measured.keys() == {one.name for one in report.tensors}
    if not any(rule.shape[-1] % 32 == 0 for rule in made if len(rule.shape) == 2):
        assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


SEVERAL_LAYOUTS = [
    "bloom", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "gpt_neox", "gpt_oss", "mixtral", "qwen3_moe",
]  # fmt: skip


def test_these_are_the_families_with_several_layouts(tiny: Any) -> None:
    several = [name for name in FAMILIES if any(len(rule.sources) > 1 for rule in tiny.rules(tiny.config(name)))]
    assert {name.partition("-")[0] for name in several} == set(SEVERAL_LAYOUTS)


@pytest.mark.parametrize("name", SEVERAL_LAYOUTS)
def test_every_layout_gives_the_same_bytes(name: str, tiny: Any, tmp_path: Path) -> None:
    """Published or as transformers holds it in memory: experts one by one or stacked, with a prefix or without, in blocks or plain."""
    config = tiny.config(name)
    made = tiny.rules(config)
    values = tiny.values(made)
    layouts = [tiny.stored(made, values, choice) for choice in (0, 9)]
    assert layouts[0].keys() != layouts[1].keys()
    found = []
    for choice, tensors in enumerate(layouts):
        source = tiny.write(tmp_path / f"in{choice}" / name, config, tensors)
        convert(source, tmp_path / f"out{choice}", int4())
        found.append(digests(tmp_path / f"out{choice}"))
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", ["falcon-40b", "glm4_moe", "gpt2", "llama"])
def test_other_floats(name: str, dtype: str, tiny: Any, tmp_path: Path) -> None:
    """What stays in high precision is 16 bits wide: fp16 stays, fp32 becomes bf16."""
    config = tiny.config(name, torch_dtype=dtype)
    made = tiny.rules(config)
    values = tiny.values(made, dtype)
    source = tiny.write(tmp_path / name, config, tiny.stored(made, values))
    convert(source, tmp_path / "out", ConvertSettings(scheme=scheme("int4", 32), jobs=1, verify=True))
    high = torch.float16 if dtype == "float16" else torch.bfloat16
    assert check(tiny.read(tmp_path / "out"), made, values, high)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["torch_dtype"] == str(high).removeprefix("torch.")


def test_old_spelling_of_the_dtype(tiny: Any, tmp_path: Path) -> None:
    """`torch.float16` means the same; the config must say what the file holds."""
    source = tiny.make(tmp_path / "llama", dtype="float16", torch_dtype="torch.float16")
    convert(source, tmp_path / "out", int4())
    converted = tiny.read(tmp_path / "out")
    assert converted.tensors["model.norm.weight"].dtype == torch.float16
    assert converted.config["torch_dtype"] == "float16"


SLICED = ConvertSettings(scheme=scheme("int4", 32), jobs=2, max_memory_bytes=1)


@pytest.fixture
def smallest_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """With SLICED every slice is 32 rows."""
    from windlass.tasks.convert import slices

    monkeypatch.setattr(slices, "SMALLEST_BYTES", 1)


@pytest.mark.usefixtures("smallest_slices")
@pytest.mark.parametrize("choice", [0, 9], ids=["published", "in memory"])
@pytest.mark.parametrize("name", ["gpt2", "gpt_oss", "glm4_moe", "mixtral"])
def test_slices_meet_without_a_seam(name: str, choice: int, tiny: Any, tmp_path: Path) -> None:
    """Rows of ours may be columns of theirs, every other row, or begin in the middle of a stack."""
    config = tiny.config(name)
    made = tiny.rules(config)
    values = tiny.values(made)
    source = tiny.write(tmp_path / name, config, tiny.stored(made, values, choice))
    convert(source, tmp_path / "out", SLICED)
    assert check(tiny.read(tmp_path / "out"), made, values)


def test_a_transposed_matrix_is_read_in_slabs(tiny: Any, tmp_path: Path) -> None:
    """40,000 stored rows are more than one read takes."""
    config = tiny.config("gpt2", n_inner=40_000, n_layer=1)
    made = tiny.rules(config)
    values = tiny.values(made)
    source = tiny.write(tmp_path / "gpt2", config, tiny.stored(made, values))
    convert(source, tmp_path / "out", int4())
    assert check(tiny.read(tmp_path / "out"), made, values)


# --- published in 8 and 4 bits ---------------------------------------------------------------------------------------


def with_fp8(
    tensors: dict[str, torch.Tensor], made: tuple[Rule, ...], blocks: bool
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Matrices of the layers in fp8 with scales beside them, and what they then mean."""
    packed_names = {
        published_source(rule).name.format(layer=layer, expert=expert)
        for rule in made
        if rule.keep in (Keep.QUANTIZE, Keep.EXPERT)
        for layer in rule.layers or ()
        for expert in range(max(rule.num_experts, 1))
    }
    torch.manual_seed(0)
    stored, meant = dict(tensors), dict(tensors)
    for name in sorted(packed_names):
        weight = tensors[name].float()
        rows, inputs = weight.shape
        if blocks:
            scale = torch.rand(-(-rows // 128), -(-inputs // 128)) * 0.001 + 0.0005
            spread = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :inputs]
        else:
            scale = spread = torch.rand(rows, 1) * 0.001 + 0.0005
        codes = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored[name], meant[name] = codes, codes.float() * spread
        stored[f"{name}_scale_inv" if blocks else f"{name}_scale"] = scale
    return stored, meant


@pytest.mark.usefixtures("smallest_slices")
@pytest.mark.parametrize("quant", ["int4-32", "bf16"])
@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "rows"])
@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3", "llama"])
def test_published_fp8(name: str, blocks: bool, quant: str, tiny: Any, tmp_path: Path) -> None:
    """Widened exactly, then packed: the same bytes as from a source in fp32 that says the same."""
    config = tiny.config(name, **({"hidden_size": 192, "intermediate_size": 160} if blocks else {}))
    made = tiny.rules(config)
    stored, meant = with_fp8(tiny.stored(made, tiny.values(made)), made, blocks)
    settings = ConvertSettings(scheme=SCHEMES[quant], jobs=1, max_memory_bytes=1)
    method = {"quant_method": "fp8", "weight_block_size": [128, 128]} if blocks else {"quant_method": "compressed-tensors"}
    convert(
        tiny.write(tmp_path / "fp8", {**config, "quantization_config": method}, stored),
        tmp_path / "a",
        settings,
    )
    convert(tiny.write(tmp_path / "fp32", config, meant), tmp_path / "b", settings)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


def test_one_fp8_scale_for_all_rows(tiny: Any, tmp_path: Path) -> None:
    config = tiny.config("llama")
    made = tiny.rules(config)
    tensors = tiny.stored(made, tiny.values(made))
    name = "model.layers.1.mlp.down_proj.weight"
    codes = (tensors[name].float() * 1000).to(torch.float8_e4m3fn)
    source = tiny.write(tmp_path / "fp8", config, {**tensors, name: codes, f"{name}_scale": torch.tensor(0.001)})
    convert(source, tmp_path / "out", ConvertSettings(scheme=scheme("bf16"), jobs=1))
    found, _ = tiny.read(tmp_path / "out").matrix(name)
    assert torch.equal(found, (codes.float() * torch.tensor(0.001)).bfloat16())


# --- other containers and choices ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "glm4_moe"])
def test_torch_files(name: str, tiny: Any, tmp_path: Path) -> None:
    """A state dict that torch saved gives what safetensors files give."""
    config = tiny.config(name)
    made = tiny.rules(config)
    tensors = tiny.stored(made, tiny.values(made))
    source = tiny.write(tmp_path / "safe" / name, config, tensors)
    folder = tmp_path / "torch" / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(tensors, folder / "pytorch_model.bin")
    for one in (source, folder):
        convert(one, tmp_path / "out" / one.parent.name, int4())
    assert digests(tmp_path / "out" / "safe") == digests(tmp_path / "out" / "torch")


def test_buffers_of_old_code_are_left_out(tiny: Any, tmp_path: Path) -> None:
    config = tiny.config("gpt2")
    made = tiny.rules(config)
    tensors = tiny.stored(made, tiny.values(made))
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64, dtype=torch.uint8) for layer in range(2)}
    source = tiny.write(tmp_path / "gpt2", config, {**tensors, **masks, "h.0.attn.masked_bias": torch.tensor(-1e4)})
    convert(source, tmp_path / "out", int4())
    assert not any(name.endswith((".attn.bias", ".masked_bias")) for name in tiny.read(tmp_path / "out").tensors)


def test_keep(tiny: Any, tmp_path: Path) -> None:
    """Named parts stay, are ignored by name, and their likes in other layers are packed all the same."""
    config = tiny.config("glm4_moe")
    made = tiny.rules(config)
    values = tiny.values(made)
    source = tiny.write(tmp_path / "in", config, tiny.stored(made, values))
    report = convert(
        source,
        tmp_path / "out",
        ConvertSettings(scheme=scheme("int4", 32), jobs=1, keep=("layers.1.self_attn", "shared_experts")),
    )
    packed = check(tiny.read(tmp_path / "out"), made, values).keys()
    assert "model.layers.0.self_attn.q_proj.weight" in packed
    assert "model.layers.1.self_attn.q_proj.weight" not in packed
    assert not any("shared_experts" in name for name in packed)
    converted = tiny.read(tmp_path / "out")
    for module in (
        "model.layers.1.self_attn.q_proj",
        "model.layers.2.mlp.shared_experts.up_proj",
        "model.layers.1.mlp.gate",
        "lm_head",
    ):
        assert converted.ignored(module), module
    assert not any(converted.ignored(name.removesuffix(".weight")) for name in packed)
    assert any("shared_experts" in one for one in report.kept)


@pytest.mark.parametrize("mtp", [True, False])
def test_multi_token_prediction_layer(mtp: bool, tiny: Any, tmp_path: Path) -> None:
    config = tiny.config("glm4_moe", num_nextn_predict_layers=1)
    made = tiny.rules(config)
    values = tiny.values(made)
    source = tiny.write(tmp_path / "in", config, tiny.stored(made, values))
    convert(source, tmp_path / "out", ConvertSettings(scheme=scheme("int4", 32), jobs=1, mtp=mtp))
    converted = tiny.read(tmp_path / "out")
    assert any(name.startswith("model.layers.3.") for name in converted.tensors) == mtp
    assert converted.config["num_nextn_predict_layers"] == int(mtp)
    assert any(key[1] == 3 for key in values), "the source has the layer"
    check(tiny.read(tmp_path / "out"), made, {key: value for key, value in values.items() if mtp or key[1] != 3})


def test_dropping_the_extra_layer_does_not_hide_unknown_tensors(tiny: Any, tmp_path: Path) -> None:
    """The extra layer is number 3; so is an expert."""
    from windlass.errors import BadCheckpoint

    config = tiny.config("glm4_moe", num_nextn_predict_layers=1)
    made = tiny.rules(config)
    tensors = {**tiny.stored(made, tiny.values(made)), "model.layers.1.mlp.experts.3.gate_proj.adapter": torch.zeros(8, 8)}
    with pytest.raises(BadCheckpoint, match="adapter"):
        convert(
            tiny.write(tmp_path / "in", config, tensors),
            tmp_path / "out",
            ConvertSettings(scheme=scheme("int4", 32), jobs=1, mtp=False),
        )


@pytest.mark.parametrize("quant", ["int4-128", "int8", "fp8"])
def test_quantized_head(quant: str, tiny: Any, tmp_path: Path) -> None:
    import msgspec

    config = tiny.config("llama")
    made = tiny.rules(config)
    values = tiny.values(made)
    source = tiny.write(tmp_path / "in", config, tiny.stored(made, values))
    how: Scheme = msgspec.structs.replace(SCHEMES[quant], quantize_head=True)
    convert(source, tmp_path / "out", ConvertSettings(scheme=how, jobs=1))
    assert "lm_head.weight" in check(tiny.read(tmp_path / "out"), made, values)
    converted = tiny.read(tmp_path / "out")
    assert not converted.ignored("lm_head") and converted.ignored("model.embed_tokens")


# --- the same bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("smallest_slices")
@pytest.mark.parametrize("quant", ["int4-32-asymmetric", "int8", "fp8", "bf16"])
def test_workers_and_memory_do_not_change_a_byte(quant: str, tiny: Any, tmp_path: Path) -> None:
    source = tiny.make(tmp_path / "in", "glm4_moe", intermediate_size=1000)
    found = []
    for jobs, memory in ((1, 2 * 10**9), (2, 2 * 10**9), (2, 100_000), (1, 1)):
        out = tmp_path / f"out-{jobs}-{memory}"
        convert(source, out, ConvertSettings(scheme=SCHEMES[quant], jobs=jobs, max_memory_bytes=memory))
        found.append(digests(out))
    assert found[1:] == found[:1] * 3


def test_without_the_compiled_loop(tiny: Any, tmp_path: Path) -> None:
    """WINDLASS_NO_NATIVE=1 turns to torch and gives the same bytes."""
    source = tiny.make(tmp_path / "in", "glm4_moe")
    quants = [("int4",), ("int4", "--asymmetric", "--group", "32"), ("int8",), ("fp8",)]
    commands = [
        ["convert", str(source), str(tmp_path / "plain" / str(number)), "--json", "--quant", *words]
        for number, words in enumerate(quants)
    ]
    script = f"from windlass.cli import execute as run\nfor words in {commands!r}: assert run(words) == 0"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "WINDLASS_NO_NATIVE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert '"instruction_set": "torch"' in done.stdout
    for number, words in enumerate(quants):
        how = scheme(words[0], 32 if "32" in words else 128, zero_points="--asymmetric" in words)
        report = convert(source, tmp_path / "fast" / str(number), ConvertSettings(scheme=how, jobs=1))
        assert report.instruction_set != "torch"
        assert digests(tmp_path / "fast" / str(number)) == digests(tmp_path / "plain" / str(number)), words
