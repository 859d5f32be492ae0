"""Damaged configs: describing either works, and then counting does, or raises BadConfig in one line; nothing else, and never with much work."""

from __future__ import annotations

import copy
from cProfile import Profile
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from windlass.core.count import count_parameters, forward_flops
from windlass.core.layout import Layout
from windlass.core.model import kv_bytes_per_token
from windlass.core.place import place
from windlass.core.scheme import scheme
from windlass.errors import BadConfig, Impossible
from windlass.model.families import MODEL_TYPES, describe, rules
from windlass.model.families.registry import known_models, published_config

pytestmark = pytest.mark.pure

CONFIGS = {model.name: published_config(model) for model in known_models()}
KEYS = sorted({key for values in CONFIGS.values() for key in values})
OTHER_KEYS = [key for key in KEYS if key != "model_type"]
MOST_CALLS = 200_000
"""Of functions, for one config: the largest that is taken, 4,096 layers of 65,536 experts, needs 43,435. Nothing is done expert by expert."""

numbers = [
    0,
    1,
    -1,
    2,
    3,
    7,
    2**31,
    2**63,
    2**64,
    10**30,
    0.0,
    -0.0,
    0.5,
    1e-300,
    1e300,
    float("nan"),
    float("inf"),
    float("-inf"),
]
texts = ["", "1", "silu", "\x00", "é\n" * 100]
nests = [[], {}, [[]], {"type": "yarn"}, [1] * 5000, ["full"] * 78]
edges = st.sampled_from([*numbers, *texts, *nests, True, False, None])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | edges,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10) | st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=8,
)


@st.composite
def damaged(draw: st.DrawFn) -> dict[str, Any]:
    """A published config with keys dropped, replaced, added, or scaled, and its nested objects likewise."""
    values = copy.deepcopy(CONFIGS[draw(st.sampled_from(sorted(CONFIGS)))])
    for _ in range(draw(st.integers(1, 4))):
        target = values
        nested = [value for value in values.values() if isinstance(value, dict)]
        if nested and draw(st.booleans()):
            target = draw(st.sampled_from(nested))
        keys = sorted(target) or KEYS
        key = draw(st.sampled_from(keys))
        kind = draw(st.sampled_from(["drop", "replace", "edge", "nudge", "add", "retype"]))
        if kind == "drop":
            target.pop(key, None)
        elif kind == "replace":
            target[key] = copy.deepcopy(draw(json_values))
        elif kind == "edge":
            target[key] = copy.deepcopy(draw(edges))
        elif kind == "nudge" and isinstance(target.get(key), int):
            target[key] = target[key] * draw(st.sampled_from([0, 2, 3, -1, 1000])) + draw(st.integers(-2, 2))
        elif kind == "add":
            target[draw(st.sampled_from(KEYS))] = copy.deepcopy(draw(edges))
        else:
            values["model_type"] = draw(st.sampled_from([*MODEL_TYPES, "none"]))
    return values


def read_or_refuse(values: object) -> None:
    profile = Profile(builtins=False)
    with profile:
        _read_or_refuse(values)
    assert sum(entry.callcount for entry in profile.getstats()) < MOST_CALLS


def _read_or_refuse(values: object) -> None:
    try:
        spec = describe(values)
    except BadConfig as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 1000
    else:
        made = rules(spec)
        count = count_parameters(spec, made)
        assert 0 < count.active <= count.total <= count.checkpoint
        assert kv_bytes_per_token(spec) >= 0
        assert 0 < forward_flops(spec, made, 128).total < float("inf")
        assert msgspec.json.decode(msgspec.json.encode(spec), type=type(spec)) == spec
        try:
            place(made, spec.num_layers, Layout(tp=2), scheme("int4"))
        except Impossible as error:
            assert "\n" not in str(error)


@settings(max_examples=100)
@given(damaged())
@example(CONFIGS["Llama-2-70B"] | {"num_hidden_layers": 4096})
@example(CONFIGS["DeepSeek-V3"] | {"n_routed_experts": 65536, "num_hidden_layers": 4096, "n_group": 1, "topk_group": 1})
@example(CONFIGS["gpt-oss-120b"] | {"quantization_config": {"quant_method": []}})
@example(CONFIGS["Mistral-7B-v0.1"] | {"model_type": "é\n"})
@example(CONFIGS["Mistral-7B-v0.1"] | {"line\nbreak": 1})
def test_damaged_configs(values: dict[str, Any]) -> None:
    read_or_refuse(values)


@given(
    json_values
    | st.fixed_dictionaries({"model_type": st.sampled_from(sorted(MODEL_TYPES))}, optional=dict.fromkeys(OTHER_KEYS, edges))
)
def test_any_json(values: object) -> None:
    read_or_refuse(values)


UNPRINTABLE = 10**5000  # Python refuses to write out more than 4,300 digits


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": UNPRINTABLE},
        {"rope_theta": UNPRINTABLE},
        {"rope_scaling": {"type": "linear", "factor": UNPRINTABLE}},
        {"eos_token_id": [UNPRINTABLE]},
        {"surprise": [UNPRINTABLE]},
        {"model_type": UNPRINTABLE},
        {"model_type": "bloom", "n_head": 64, "num_attention_heads": UNPRINTABLE},
    ],
    ids=lambda changes: list(changes)[-1],
)
def test_endless_numbers(changes: dict[str, Any]) -> None:
    with pytest.raises(BadConfig, match="too large to print"):
        describe(CONFIGS["Llama-2-70B"] | changes)


def test_deeply_nested_values_are_refused() -> None:
    deep: Any = 0
    for _ in range(100_000):
        deep = [deep]
    for key in ("hidden_size", "surprise", "rope_scaling", "eos_token_id", "quantization_config"):
        with pytest.raises(BadConfig, match=key):
            describe(CONFIGS["Llama-2-70B"] | {key: deep})
