"""What a conversion will write, before it reads a byte: every weight once, the bytes a plan promises, a config that names what is packed."""

from __future__ import annotations

import re
from math import prod
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.count import count_parameters
from windlass.core.model import Layer, ModelSpec
from windlass.core.rule import Axis, AxisName, ModelPart, Role, Rule, Source
from windlass.core.scheme import GROUPS, Keep, Scheme, Stored, scheme
from windlass.model.families import rules
from windlass.model.families.registry import find, known_models, spec_of
from windlass.tasks.convert.outputs import ConvertedTensor, PackingChoices, converted_tensors, total_bytes
from windlass.tasks.convert.quantization import patterns, quantization_config
from windlass.tasks.convert.slices import COPIES, LARGEST_BYTES, ROW_MULTIPLE, SMALLEST_BYTES, row_slices, slice_bytes_for
from windlass.tasks.plan.inference.assemble import checkpoint_bytes

pytestmark = pytest.mark.pure


def distinct_models() -> list[str]:
    """Models that differ in their tensors, without the one whose files are not in this layout."""
    seen: dict[tuple[Rule, ...], str] = {}
    for model in known_models():
        spec = spec_of(model)
        if spec.family != "evo2":
            seen.setdefault(rules(spec), model.name)
    return list(seen.values())


def spec_named(name: str) -> ModelSpec:
    known = find(name)
    assert known is not None
    return spec_of(known)


def planned(name: str, how: Scheme, **choices: Any) -> tuple[ConvertedTensor, ...]:
    spec = spec_named(name)
    return converted_tensors(spec, rules(spec), PackingChoices(scheme=how, **choices))


SCHEMES = (
    scheme("int4"),
    scheme("int4", 64, zero_points=True),
    scheme("int4", 32, zero_points=True),
    scheme("int8"),
    scheme("fp8"),
    scheme("bf16"),
    msgspec.structs.replace(scheme("int4"), quantize_head=True),
)
SMALL = ["Llama-3.1-8B", "SmolLM2-135M-Instruct", "Falcon-7B", "BLOOM-176B", "glm-4-9b", "Mixtral-8x7B", "StarCoder"]


def check_counts_and_bytes(spec: ModelSpec, how: Scheme) -> None:
    made = converted_tensors(spec, rules(spec), PackingChoices(scheme=how))
    assert sum(prod(output.shape) for output in made) == count_parameters(spec, rules(spec)).checkpoint
    names = [piece.name for output in made for piece in output.file_tensors]
    assert len(set(names)) == len(names)
    shapes = sum(piece.num_bytes for output in made for piece in output.file_tensors if piece.name.endswith(".weight_shape"))
    assert total_bytes(made) - shapes == checkpoint_bytes(rules(spec), how, published=True)


@pytest.mark.parametrize("name", distinct_models())
def test_every_parameter_once_and_the_bytes_of_the_plan(name: str) -> None:
    """Two layers of each kind that the model has: its others are like them."""
    spec = spec_named(name)
    kinds: list[Layer] = []
    for layer in spec.layers:
        if kinds.count(layer) < 2:
            kinds.append(layer)
    check_counts_and_bytes(msgspec.structs.replace(spec, layers=tuple(kinds)), scheme("int4"))


def test_a_whole_model_of_many_experts() -> None:
    check_counts_and_bytes(spec_named("GLM-4.5-Air"), scheme("int4"))


@pytest.mark.parametrize(
    "how", SCHEMES, ids=lambda how: f"{how.name}-{how.group}{'-zero' * how.zero_points}{'-head' * how.quantize_head}"
)
@pytest.mark.parametrize("name", SMALL)
def test_bytes_of_the_plan_in_every_scheme(name: str, how: Scheme) -> None:
    if how.quantize_head and any(rule.role is Role.HEAD and rule.copy_of for rule in rules(spec_named(name))):
        pytest.skip("plans know no packed heads, so none that stays as it is")
    check_counts_and_bytes(spec_named(name), how)


def test_stored_copy_of_a_tied_head_is_not_packed() -> None:
    """Readers tie it to the embedding again, whatever the file holds."""
    how = msgspec.structs.replace(scheme("int4"), quantize_head=True)
    (head,) = [output for output in planned("Falcon-7B", how) if output.rule.role is Role.HEAD]
    assert not head.packed
    assert "lm_head" in check_config(planned("Falcon-7B", how), how)["ignore"]


def test_high_precision() -> None:
    """Router, norms, embeddings and the head in 16 bits, the router's correction in 32."""
    made = planned("GLM-4.5-Air", scheme("int4"))
    dtypes = {output.name: output.file_tensors[0].dtype for output in made if not output.packed}
    assert dtypes["model.layers.1.mlp.gate.e_score_correction_bias"] == "F32"
    for name in ("model.layers.1.mlp.gate.weight", "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert dtypes[name] == "BF16"
    assert {output.name for output in made if output.packed} == {
        output.name for output in made if output.rule.keep in (Keep.QUANTIZE, Keep.EXPERT)
    }
    assert all("norm" not in output.name and "embed" not in output.name for output in made if output.packed)


@pytest.mark.parametrize("name", ["GLM-4.5-Air", "INTELLECT-3"])
def test_pieces_of_a_packed_expert(name: str) -> None:
    """As vLLM's loaders of packed experts have them: one by one, eight codes to a word along the input."""
    expert = next(
        output for output in planned(name, scheme("int4")) if output.name == "model.layers.3.mlp.experts.7.down_proj.weight"
    )
    module = "model.layers.3.mlp.experts.7.down_proj"
    assert [(piece.name, piece.dtype, piece.shape) for piece in expert.file_tensors] == [
        (f"{module}.weight_packed", "I32", (4096, 1408 // 8)),
        (f"{module}.weight_scale", "BF16", (4096, 1408 // 128)),
        (f"{module}.weight_shape", "I64", (2,)),
    ]


def test_zero_points_are_packed_along_the_output() -> None:
    expert = next(
        one for one in planned("GLM-4.5-Air", scheme("int4", zero_points=True)) if one.name.endswith("experts.7.down_proj.weight")
    )
    assert {piece.name.rpartition(".")[2]: piece.shape for piece in expert.file_tensors}["weight_zero_point"] == (4096 // 8, 11)


def test_stacked_experts_are_written_one_by_one() -> None:
    """gpt-oss publishes them only stacked, gate and up in turns."""
    made = {output.name: output.shape for output in planned("gpt-oss-120b", scheme("int4"))}
    assert made["model.layers.0.mlp.experts.127.gate_up_proj.weight"] == (2 * 2880, 2880)
    assert made["model.layers.0.mlp.experts.127.gate_up_proj.bias"] == (2 * 2880,)
    assert made["model.layers.35.mlp.experts.0.down_proj.bias"] == (2880,)


def test_without_the_next_token_layer() -> None:
    spec = spec_named("GLM-4.5-Air")
    made = planned("GLM-4.5-Air", scheme("int4"), mtp=False)
    main = [rule for rule in rules(spec) if rule.part is ModelPart.MAIN]
    assert sum(prod(output.shape) for output in made) == sum(rule.elements * rule.copies for rule in main)
    assert not any(f".{spec.num_layers}." in output.name.partition(".mlp.")[0] for output in made)


# --- the config ------------------------------------------------------------------------------------------------------


def matches(entries: list[str], module: str) -> bool:
    """As compressed-tensors does it: a pattern from the start of the name, or the name itself."""
    return any(re.match(entry[3:], module) if entry.startswith("re:") else entry == module for entry in entries)


def check_config(made: tuple[ConvertedTensor, ...], how: Scheme) -> dict[str, Any]:
    """What is kept is ignored, what is packed is not, and each is in the one group whose size it has."""
    config = quantization_config(made, how)
    assert config is not None
    named = {key: group for key, group in config["config_groups"].items() if group["targets"] != ["Linear"]}
    rest = next(group for group in config["config_groups"].values() if group["targets"] == ["Linear"])
    for output in made:
        if len(output.shape) != 2 or not output.name.endswith(".weight"):
            continue
        assert matches(config["ignore"], output.module) != output.packed, output.name
        if output.packed:
            groups = [group for group in named.values() if matches(group["targets"], output.module)] or [rest]
            assert [group["weights"]["group_size"] for group in groups] == [output.stored.group], output.name
    return config


@pytest.mark.parametrize("name", ["GLM-4.5-Air", "GLM-4.7-Flash", "Qwen3-30B-A3B", "gpt-oss-120b", *SMALL])
def test_config_names_what_is_packed(name: str) -> None:
    check_config(planned(name, scheme("int4")), scheme("int4"))


def test_largest_models_need_few_words() -> None:
    """59,000 matrices are a dozen patterns."""
    config = check_config(planned("GLM-5", scheme("int4")), scheme("int4"))
    assert len(config["ignore"]) < 20 and len(config["config_groups"]) == 1


def test_smaller_group_of_one_matrix() -> None:
    """Rows of 10,944 are divided by 64 and not by 128."""
    config = check_config(planned("GLM-4.5-Air", scheme("int4")), scheme("int4"))
    groups = config["config_groups"]
    assert groups["group_0"]["targets"] == ["Linear"] and groups["group_0"]["weights"]["group_size"] == 128
    assert groups["group_1"]["targets"] == ["model.layers.0.mlp.down_proj"] and groups["group_1"]["weights"]["group_size"] == 64
    assert len(groups) == 2


@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct", "BLOOM-176B", "StarCoder"])
def test_tied_head_is_ignored(name: str) -> None:
    made = planned(name, scheme("int4"))
    assert not any(output.rule.role is Role.HEAD for output in made)
    assert "lm_head" in check_config(made, scheme("int4"))["ignore"]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (scheme("int4"), ("pack-quantized", 4, "int", "group", True)),
        (scheme("int4", zero_points=True), ("pack-quantized", 4, "int", "group", False)),
        (scheme("int8"), ("pack-quantized", 8, "int", "group", True)),
        (scheme("fp8"), ("float-quantized", 8, "float", "channel", True)),
    ],
)
def test_words_of_the_scheme(how: Scheme, expected: tuple[Any, ...]) -> None:
    config = quantization_config(planned("Llama-3.1-8B", how), how)
    assert config is not None
    weights = config["config_groups"]["group_0"]["weights"]
    assert (config["format"], weights["num_bits"], weights["type"], weights["strategy"], weights["symmetric"]) == expected


def test_nothing_packed_is_no_config() -> None:
    assert quantization_config(planned("Llama-3.1-8B", scheme("bf16")), scheme("bf16")) is None


WORDS = st.sampled_from(
    [
        "layers.1.",
        "layers.1",
        "self_attn",
        "down_proj",
        "layers.0.mlp",
        "experts.3",
        "experts.3.",
        "shared",
        "proj.weight",
        "lm_head",
        "zz",
        "4",
    ]
)


@given(st.lists(WORDS, max_size=3), st.sampled_from(GROUPS), st.booleans())
def test_config_with_anything_kept(keep: list[str], group: int, head: bool) -> None:
    how = msgspec.structs.replace(scheme("int4", group), quantize_head=head)
    made = planned("Mixtral-8x7B", how, keep=tuple(keep)) + planned("SmolLM2-135M-Instruct", how, keep=tuple(keep))[2:]
    unique = tuple({output.name: output for output in made}.values())
    if any(output.packed for output in unique):
        check_config(unique, how)


MODULES = st.lists(
    st.builds(
        lambda parts, leaf: ".".join([*parts, leaf]),
        st.lists(st.sampled_from(["a", "b", "0", "1", "12", "x#y", "q.w"]), max_size=4),
        st.sampled_from(["gate", "gate_up", "1", "proj+", "[k]"]),
    ),
    max_size=8,
    unique=True,
)


@given(MODULES, MODULES)
def test_patterns_name_theirs_and_no_others(modules: list[str], others: list[str]) -> None:
    others = [other for other in others if other not in modules]
    made = patterns(modules, others)
    assert all(matches(made, module) for module in modules)
    assert not any(matches(made, other) for other in others)


# --- slices ------------------------------------------------------------------------------------------------------------


def output_of(shape: tuple[int, ...]) -> ConvertedTensor:
    axes = tuple(Axis(name=AxisName.HIDDEN, count=size) for size in shape)
    rule = Rule(ours="a.weight", axes=axes, sources=(Source(name="a.weight"),), keep=Keep.QUANTIZE, role=Role.MATRIX)
    return ConvertedTensor(
        name="a.weight", shape=shape, rule=rule, layer=None, expert=None, stored=Stored(bits=16), file_tensors=()
    )


SHAPES = st.one_of(
    st.tuples(st.integers(1, 300_000)), st.tuples(st.integers(1, 300_000), st.integers(1, 65_536)), st.just((151_552, 4096))
)


@given(st.lists(SHAPES, max_size=4), st.integers(1, 2**40), st.integers(1, 128))
def test_slices_cover_every_row_once_within_the_memory(shapes: list[tuple[int, ...]], memory_bytes: int, jobs: int) -> None:
    made = tuple(output_of(shape) for shape in shapes)
    slice_bytes = slice_bytes_for(memory_bytes, jobs)
    assert SMALLEST_BYTES <= slice_bytes <= LARGEST_BYTES
    assert slice_bytes == SMALLEST_BYTES or slice_bytes * COPIES * jobs <= memory_bytes
    found = list(row_slices(made, slice_bytes))
    assert len({unit.key for unit in found}) == len(found)
    for index, output in enumerate(made):
        own = [unit for unit in found if unit.output == index]
        assert [unit.start for unit in own] == [0, *(unit.stop for unit in own[:-1])]
        assert own[-1].stop == output.shape[0]
        assert all(unit.start % ROW_MULTIPLE == 0 and unit.start < unit.stop for unit in own)
        if len(output.shape) == 2:
            rows = max(slice_bytes // output.row_bytes, ROW_MULTIPLE)
            assert all(unit.stop - unit.start <= rows for unit in own)
