"""Tiny models of every family, with every quirk on: transformers' own, with random weights, beside our decoder of the same weights."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")

from windlass.model.families import describe, rules  # noqa: E402
from windlass.runtime.kernels.step import BLOCK_TOKENS, Step  # noqa: E402

FOLDER = Path(__file__).parents[2] / "model" / "families" / "tiny"
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}

# Quirks that the tiny configs leave off: another config with these keys changed.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama+linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}}),
    "llama+gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "qwen3+yarn": ("qwen3", {"rope_parameters": YARN}),
    "qwen3+attention_factor": ("qwen3", {"rope_parameters": {**YARN, "attention_factor": 1.7, "beta_fast": 8.0}}),
    "qwen3_moe+scores_as_they_are": ("qwen3_moe", {"norm_topk_prob": False}),
    "glm4_moe+groups": (
        "glm4_moe",
        {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "norm_topk_prob": False},
    ),
    "deepseek_v3+groups": (
        "deepseek_v3",
        {
            "n_routed_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4,
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 16.0},
        },
    ),
    "glm4_moe_lite+full_query": ("glm4_moe_lite", {"q_lora_rank": None}),
    "gpt2+exact_gelu": ("gpt2", {"activation_function": "gelu"}),
    "falcon-40b+biases": ("falcon-40b", {"bias": True}),
    "mixtral+window": ("mixtral", {"sliding_window": 8}),
    "gpt_oss+small_clamp": ("gpt_oss", {"swiglu_limit": 0.5}),
}  # fmt: skip


def config_of(name: str) -> dict[str, Any]:
    base, changes = VARIANTS.get(name, (name, {}))
    return {**json.loads((FOLDER / f"{base}.json").read_text()), **changes}


NAMES = [path.stem for path in sorted(FOLDER.glob("*.json")) if path.stem != "evo2"] + list(VARIANTS)


class Pair:
    """Two implementations of one model."""

    def __init__(self, theirs: Any, ours: Any, state: Mapping[str, Any]) -> None:
        self.theirs, self.ours, self.state = theirs, ours, state
        self._known: dict[tuple[int, ...], Any] = {}

    def expected(self, tokens: Sequence[int]) -> Any:
        """transformers' logits of a sequence, seen whole."""
        if tuple(tokens) not in self._known:
            with torch.no_grad():
                self._known[tuple(tokens)] = self.theirs(input_ids=torch.tensor([list(tokens)])).logits[0]
        return self._known[tuple(tokens)]


def randomised(model: Any, seed: int = 0) -> Any:
    """Nothing left at a neutral value, and activations of the order of one, so that every part matters to the result."""
    torch.manual_seed(seed)
    for name, value in model.state_dict().items():
        if value.dim() > 1:
            scale = 1.0 if "embed" in name or "wte" in name or "wpe" in name else 1.3 * value.shape[-1] ** -0.5
            value.copy_(torch.randn_like(value) * scale)
        else:
            is_scale = name.endswith("weight")
            value.copy_((1.0 if is_scale else 0.0) + 0.3 * torch.randn_like(value))
    return model.eval()


def transformers_model(config: Mapping[str, Any]) -> Any:
    transformers = pytest.importorskip("transformers")
    values = dict(config)
    model_type = values.pop("model_type")
    # transformers adds ALiBi twice in falcon's plain attention: to the mask, and to the scores.
    plain = {"attn_implementation": "sdpa" if model_type == "falcon" else "eager", "experts_implementation": "eager"}
    made = transformers.CONFIG_MAPPING[model_type](**values)
    return randomised(transformers.AutoModelForCausalLM.from_config(made, **plain, dtype=torch.float32))


def as_glm(config: Mapping[str, Any]) -> Any:
    """chatglm's own code is not in transformers; its architecture is, under other names of everything."""
    return transformers_model(
        {
            "model_type": "glm",
            "vocab_size": config["padded_vocab_size"],
            "hidden_size": config["hidden_size"],
            "intermediate_size": config["ffn_hidden_size"],
            "num_hidden_layers": config["num_layers"],
            "num_attention_heads": config["num_attention_heads"],
            "num_key_value_heads": config["multi_query_group_num"],
            "head_dim": config["kv_channels"],
            "attention_bias": config["add_qkv_bias"],
            "rms_norm_eps": config["layernorm_epsilon"],
            "max_position_embeddings": config["seq_length"],
            "tie_word_embeddings": False,
            "pad_token_id": 0,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0 * config["rope_ratio"], "partial_rotary_factor": 0.5,
            },
        }
    )  # fmt: skip


def chatglm_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a transformers GLM under chatglm's names."""
    found: dict[str, Any] = {}
    renames = {
        "model.embed_tokens": "transformer.embedding.word_embeddings",
        "model.norm": "transformer.encoder.final_layernorm",
        "lm_head": "transformer.output_layer",
        "self_attn.o_proj": "self_attention.dense",
        "mlp.gate_up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
        "model.layers": "transformer.encoder.layers",
    }
    for name, value in state.items():
        for old, new in renames.items():
            name = name.replace(old, new)
        found[name] = value
    for name in [name for name in found if ".self_attn.q_proj." in name]:
        parts = [found.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        found[name.replace("self_attn.q_proj", "self_attention.query_key_value")] = torch.cat(parts)
    return found


@cache
def make_pair(name: str) -> Pair:
    from windlass.runtime.nn import Decoder
    from windlass.runtime.weights import DictWeights

    config = config_of(name)
    theirs = as_glm(config) if name == "chatglm" else transformers_model(config)
    state = chatglm_names(theirs.state_dict()) if name == "chatglm" else theirs.state_dict()
    # Described by the config that transformers writes: it has its defaults in it.
    spec = describe(config if name == "chatglm" else theirs.config.to_dict())
    # Sparse attention runs as far as it is exact when dense; planning does not count on it.
    spec = msgspec.structs.replace(spec, engines=("windlass",))
    return Pair(theirs, Decoder(spec, DictWeights(spec, rules(spec), state)), state)


class Tiny:
    """What tests of this folder are made of."""

    names = tuple(NAMES)

    def pair(self, name: str) -> Pair:
        return make_pair(name)

    def config(self, name: str) -> dict[str, Any]:
        return config_of(name)

    def transformers_model(self, config: Mapping[str, Any]) -> Any:
        return transformers_model(config)

    def step(self, chunks: Sequence[Chunk], logit_rows: Sequence[int] | None = None, padding: int = 0) -> Step:
        return make_step(chunks, logit_rows, padding)

    def chunk(self, tokens: Sequence[int], start: int, stop: int, blocks: Sequence[int] = ()) -> Chunk:
        return Chunk(tokens, start, stop, blocks or range(-(-stop // BLOCK_TOKENS)))


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Matrices this small are not worth sharing out, and on a busy machine threads wait for each other."""
    from windlass.runtime.kernels.program import program

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    if program.available():
        program.set_threads(1)
    yield
    torch.set_num_threads(before)
    if program.available():
        program.set_threads(program.num_threads())


@pytest.fixture(autouse=True, scope="module")
def no_disk_is_waited_for() -> Iterator[None]:
    """What was written is there without: only a power cut could tell. It is most of the time that small conversions take."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, lambda _: None)
        yield


@pytest.fixture(scope="session")
def tiny() -> Tiny:
    return Tiny()


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    """Of every tiny model."""
    return request.param


@pytest.fixture(scope="module")
def pair(name: str) -> Pair:
    return make_pair(name)


@dataclass(frozen=True)
class Chunk:
    """Tokens start..stop of a sequence, as one step takes them."""

    tokens: Sequence[int]
    start: int
    stop: int
    blocks: Sequence[int]


def make_step(chunks: Sequence[Chunk], logit_rows: Sequence[int] | None = None, padding: int = 0) -> Step:
    """Rows of all chunks, and the logits of all rows unless said otherwise; `padding`: so much rubbish after what counts."""

    def ints(values: Sequence[int], pad: int = padding) -> Any:
        return torch.tensor([*values, *[2**30] * pad], dtype=torch.int32)

    rows = [(chunk.tokens[at], at, chunk) for chunk in chunks for at in range(chunk.start, chunk.stop)]
    starts = accumulate((chunk.stop - chunk.start for chunk in chunks), initial=0)
    most = max(len(chunk.blocks) for chunk in chunks)
    wanted = range(len(rows)) if logit_rows is None else logit_rows
    return Step(
        tokens=ints([token for token, _, _ in rows]),
        positions=ints([at for _, at, _ in rows]),
        slots=ints([chunk.blocks[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS for _, at, chunk in rows]),
        starts=ints(list(starts)),
        lengths=ints([chunk.stop for chunk in chunks]),
        blocks=torch.stack([ints(chunk.blocks, most - len(chunk.blocks)) for chunk in chunks]),
        logit_rows=ints(wanted),
        counts=torch.tensor([len(rows), len(chunks), len(wanted)], dtype=torch.int32),
    )
