"""LoRA adapters per row: equal to merged weights, and rows without one keep their bits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import save_file  # noqa: E402

from windlass.core.model import Activation  # noqa: E402
from windlass.core.request import GREEDY  # noqa: E402
from windlass.core.rule import Rule  # noqa: E402
from windlass.errors import BadInput  # noqa: E402
from windlass.model.families import rules  # noqa: E402
from windlass.runtime.engine.engine import Engine  # noqa: E402
from windlass.runtime.engine.protocol import Submit  # noqa: E402
from windlass.runtime.engine.schedule.scheduler import SchedulerLimits  # noqa: E402
from windlass.runtime.kernels.packing.panels import Panels  # noqa: E402
from windlass.runtime.nn.adapters import AdaptedExperts, Adapters, row_ranges  # noqa: E402
from windlass.runtime.nn.decoder import Decoder  # noqa: E402
from windlass.runtime.weights import DictWeights  # noqa: E402
from windlass.runtime.weights.adapters import matrix_rows, published_matrices, read_adapter  # noqa: E402

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore")]  # warnings are transformers'

FAMILIES = ("llama", "qwen3", "glm4_moe")
RANK, ALPHA = 4, 8
TOKENS = [(7 * place + 3) % 50 for place in range(19)]
CONFIG = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA}


def make_adapter(
    folder: Path, table: tuple[Rule, ...], seed: int, config: Mapping[str, Any] = CONFIG, only: str = ""
) -> dict[str, Any]:
    """A random adapter of every matrix that has one, as PEFT writes it. Returns what it adds, by published name."""
    made, added = {}, {}
    source = torch.Generator().manual_seed(seed)
    for module, (ours, (out, into)) in published_matrices(table).items():
        if "router" in ours or "kv_b" in ours or not ours.startswith(only):
            continue
        a, b = torch.randn(RANK, into, generator=source) / into**0.5, torch.randn(out, RANK, generator=source) * 0.2
        made[f"base_model.model.{module}.lora_A.weight"] = a
        made[f"base_model.model.{module}.lora_B.weight"] = b
        added[f"{module}.weight"] = (b @ a) * ALPHA / RANK
    folder.mkdir()
    save_file(made, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return added


def engine_of(spec: Any, state: Mapping[str, Any], adapters: Mapping[str, Path] = {}) -> Engine:
    table = rules(spec)
    decoder = Decoder(spec, DictWeights(spec, table, state))
    limits = SchedulerLimits(num_blocks=32, context_tokens=128, max_sequences=8, max_step_tokens=64, max_step_logits=64)
    engine = Engine(decoder, decoder.make_caches(32, torch.float32), limits, spec.vocab_size)
    if adapters:
        found = Adapters(matrix_rows(table), "cpu")
        for name, folder in adapters.items():
            found.add(name, {key: (pair.a, pair.b) for key, pair in read_adapter(folder, table).items()}, decoder)
        engine.runner.set_adapters(found)
    return engine


def merged(state: Mapping[str, Any], added: Mapping[str, Any]) -> dict[str, Any]:
    """transformers keeps the experts of a layer in one tensor."""
    found = {name: tensor.clone() for name, tensor in state.items()}
    for name, delta in added.items():
        if name in found:
            found[name] += delta
            continue
        stem, _, rest = name.partition(".experts.")
        expert, part = rest.removesuffix(".weight").split(".")
        if part == "down_proj":
            found[f"{stem}.experts.down_proj"][int(expert)] += delta
        else:
            half = delta.shape[0]
            rows = slice(0, half) if part == "gate_proj" else slice(half, 2 * half)
            found[f"{stem}.experts.gate_up_proj"][int(expert), rows] += delta
    return found


def scores(engine: Engine, adapters: list[str]) -> list[list[float]]:
    """Log-probabilities of the prompt and of four tokens, one request for each adapter, all in the same batches."""
    found: dict[int, list[float]] = {number: [] for number in range(len(adapters))}
    for number, adapter in enumerate(adapters):
        engine.submit(
            Submit(
                id=number,
                token_ids=[number, *TOKENS],
                sampling=GREEDY,
                max_tokens=4,
                logprobs=0,
                prompt_logprobs=0,
                adapter=adapter,
            )
        )
    while engine.has_work:
        for output in engine.step():
            prompt = [entry.logprob for entry in output.prompt_logprobs or () if entry is not None]
            found[output.id] = prompt + found[output.id] + [entry.logprob for entry in output.logprobs]
    return list(found.values())


def difference(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def close(one: list[float], other: list[float]) -> bool:
    return len(one) == len(other) and difference(one, other) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_equal_merged_weights_and_the_base_keeps_its_bits(tiny: Any, family: str, tmp_path: Path) -> None:
    pair = tiny.pair(next(name for name in tiny.names if name.startswith(family)))
    spec, table = pair.ours.spec, rules(pair.ours.spec)
    folders = {name: tmp_path / name for name in ("one", "two")}
    added = {name: make_adapter(folder, table, seed) for seed, (name, folder) in enumerate(folders.items())}
    engine = engine_of(spec, pair.state, folders)
    assert engine.runner.program is not None, "recorded"
    mixed = ["", "one", "two", "", "one"]
    found = scores(engine, mixed)
    plain = scores(engine_of(spec, pair.state), [""] * 5)
    if family == "glm4_moe":  # rows of an expert are computed together, and the adapter sends its own to others
        assert all(difference(found[number], plain[number]) < 1e-5 for number in (0, 3))
    else:
        assert [found[0], found[3]] == [plain[0], plain[3]], "rows without an adapter keep their bits"
    for name in folders:
        expected = scores(engine_of(spec, merged(pair.state, added[name])), [""] * 5)
        assert all(close(found[number], expected[number]) for number, used in enumerate(mixed) if used == name)
    assert not close(found[1], plain[1]), "the adapter matters"
    assert scores(engine, [""] * 5) == plain, "and so does a batch without any"


def test_rows_beside_adapted_experts_keep_their_bits(tiny: Any, tmp_path: Path) -> None:
    """Where the adapter comes after the last routing."""
    pair = tiny.pair(next(name for name in tiny.names if name.startswith("glm4_moe")))
    spec = pair.ours.spec
    make_adapter(tmp_path / "one", rules(spec), 1, only=f"layers.{spec.num_layers - 1}.ffn.")
    found = scores(engine_of(spec, pair.state, {"one": tmp_path / "one"}), ["", "one", ""])
    plain = scores(engine_of(spec, pair.state), [""] * 3)
    assert [found[0][:19], found[2][:19]] == [plain[0][:19], plain[2][:19]] and not close(found[1], plain[1])


def test_prefixes_of_other_adapters_are_not_shared(tiny: Any, tmp_path: Path) -> None:
    pair = tiny.pair("llama")
    make_adapter(tmp_path / "one", rules(pair.ours.spec), 1)
    engine = engine_of(pair.ours.spec, pair.state, {"one": tmp_path / "one"})
    long = [(5 * place) % 50 for place in range(40)]
    cached = {}
    for number, adapter in enumerate(["", "", "one", "one"]):
        engine.submit(Submit(id=number, token_ids=long, max_tokens=1, adapter=adapter))
        while engine.has_work:
            for output in engine.step():
                if output.finish is not None:
                    cached[number] = output.finish.usage.cached_tokens
    assert cached[0] == cached[2] == 0 and cached[1] == cached[3] > 0


def test_an_adapter_that_is_not_there_is_refused(tiny: Any) -> None:
    pair = tiny.pair("llama")
    with pytest.raises(BadInput, match="not loaded"):
        engine_of(pair.ours.spec, pair.state).submit(Submit(id=1, token_ids=[1], adapter="none"))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"r": 8}, "this model needs"),
        ({"r": 0}, "rank 0"),
        ({"r": 10**9}, "rank"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
    ],
)
def test_what_is_not_plain_lora_is_refused(tiny: Any, tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    table = rules(tiny.pair("llama").ours.spec)
    make_adapter(tmp_path / "one", table, 1, {**CONFIG, **changes})
    with pytest.raises(BadInput, match=why):
        read_adapter(tmp_path / "one", table)


def test_files_of_strangers(tiny: Any, tmp_path: Path) -> None:
    table = rules(tiny.pair("llama").ours.spec)
    with pytest.raises(BadInput, match="cannot read adapter_config"):
        read_adapter(tmp_path / "none", table)
    made = tmp_path / "made"
    make_adapter(made, table, 1)
    tensors = made / "adapter_model.safetensors"
    tensors.write_bytes(b"\x80\x04not a tensor")
    with pytest.raises(BadInput, match="cannot read"):
        read_adapter(made, table)
    tensors.rename(made / "adapter_model.bin")
    with pytest.raises(BadInput, match="other formats"):
        read_adapter(made, table)
    save_file({"base_model.model.model.embed_tokens.lora_A.weight": torch.zeros(4, 4)}, tensors)
    with pytest.raises(BadInput, match="not a matrix of this model"):
        read_adapter(made, table)
    (made / "adapter_config.json").write_text("[" * 10_000)
    with pytest.raises(BadInput, match="not a LoRA"):
        read_adapter(made, table)


def test_sequences_with_the_same_adapter_are_computed_together() -> None:
    assert row_ranges([0, 1, 2, 5, 6, 7, 0, 0], ["a", "a", "", "b", "a"]) == [(0, 2, "a"), (5, 6, "b"), (6, 7, "a")]
    assert row_ranges([0, 3, 4], ["", ""]) == []


def adapted_experts(kind: str, hidden: int, width: int, count: int) -> tuple[AdaptedExperts, Adapters]:
    """Packed experts, and adapters `one` and `two` of two of them."""
    base, adapters = cast(Any, torch.nn.Module()), Adapters({}, "cpu")
    base.gate_up, base.down = (
        Panels.random(kind, 2 * width, hidden, 32, count),
        Panels.random(kind, hidden, width, 32, count, seed=1),
    )
    base.gate_up_bias = base.down_bias = None
    base.moe = SimpleNamespace(activation=Activation.SILU, clamp=None)
    module = AdaptedExperts(base, "layers.0.ffn.experts", adapters)
    decoder = cast(Any, torch.nn.Module())
    decoder.layers = [SimpleNamespace(feed_forward=SimpleNamespace(experts=module))]
    draw = torch.Generator().manual_seed(0)
    for name in ("one", "two"):
        made = {
            f"layers.0.ffn.experts.{expert}.{part}": (
                torch.randn(2, into, generator=draw),
                torch.randn(out, 2, generator=draw) / 50,
            )
            for expert in (0, 2)
            for part, out, into in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width))
        }
        adapters.add(name, made, decoder)
    return module, adapters


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_packed_experts_are_adapted_for_the_rows_of_an_adapter_alone(kind: str) -> None:
    """Against the sum over experts written out, with matrices that are dequantized."""
    module, adapters = adapted_experts(kind, hidden=64, width=32, count=4)
    adapters.rows = [(0, 2, "one"), (3, 5, "two"), (6, 7, "one")]
    owners = {row: name for first, last, name in adapters.rows for row in range(first, last)}
    draw = torch.Generator().manual_seed(1)
    x, add, weights = (torch.randn(8, size, generator=draw) for size in (64, 64, 2))
    ids = torch.stack([torch.randperm(4, generator=draw)[:2] for _ in range(8)]).int()
    add, y = add / 10, torch.full((8, 64), 7.0)
    module._replace(x, ids, weights, y, add)
    for row, name in owners.items():
        expected = add[row].clone()
        for expert, share in zip(ids[row].tolist(), weights[row].tolist(), strict=True):
            own = adapters.matrices[name]
            lora = {
                part: own[key][1] @ own[key][0] if (key := f"layers.0.ffn.experts.{expert}.{part}") in own else 0.0
                for part in ("gate", "up", "down")
            }
            gate, up = module.gate_up.dense(expert).chunk(2)
            inner = torch.nn.functional.silu((gate + lora["gate"]) @ x[row]) * ((up + lora["up"]) @ x[row])
            expected += share * ((module.down.dense(expert) + lora["down"]) @ inner)
        assert (y[row] - expected).norm() < 0.02 * expected.norm(), "kernels quantize activations to 8 bits"
    untouched = [row for row in range(8) if row not in owners]
    assert (y[untouched] == 7.0).all()
