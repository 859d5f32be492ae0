"""`--deterministic`: tokens and their log-probabilities are the same bits alone and in a crowd, for every family, and it is refused where that is
not promised."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytestmark = pytest.mark.cpu

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from windlass.cli.bench.ranks import InlineRanks  # noqa: E402
from windlass.core.launch import Launch, RandomInit, check_launch  # noqa: E402
from windlass.core.layout import Layout  # noqa: E402
from windlass.core.request import GREEDY, Sampling  # noqa: E402
from windlass.errors import BadInput, Impossible  # noqa: E402
from windlass.model.bundled.models import find_bundled  # noqa: E402
from windlass.model.families import rules  # noqa: E402
from windlass.runtime.engine.engine import Engine  # noqa: E402
from windlass.runtime.engine.execute.deterministic import check_deterministic, check_order_is_fixed  # noqa: E402
from windlass.runtime.engine.load import load_model  # noqa: E402
from windlass.runtime.engine.protocol import Submit  # noqa: E402
from windlass.runtime.kernels.cpu import norm as native_norm  # noqa: E402
from windlass.runtime.kernels.program import program  # noqa: E402
from windlass.runtime.nn.parallel.shard import WHOLE  # noqa: E402
from windlass.runtime.offload.experts.experts import DiskExperts  # noqa: E402
from windlass.runtime.weights.adapters import published_matrices  # noqa: E402
from windlass.runtime.weights.source import open_model  # noqa: E402

TINY = Path(__file__).parents[2] / "model" / "families" / "tiny"
RUN = [name for name in sorted(path.stem for path in TINY.glob("*.json")) if name not in ("evo2", "glm_moe_dsa")]
"""Those two are planned, not run here."""
SCHEMES = ("bf16", "fp32", "fp8", "int8", "int4")
SAMPLINGS = (
    GREEDY,
    Sampling(temperature=0.9, seed=1),
    Sampling(temperature=0.7, top_k=9, min_p=0.01, seed=2),
    Sampling(temperature=0.8, top_p=0.9, presence_penalty=0.3, seed=3),
)
Found = dict[int, list[Any]]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Threads change no result (tests/runtime/kernels/cpu), and many small steps take long where they wait for one another on busy cores."""
    if program.available():
        program.set_threads(1)
    yield
    if program.available():
        program.set_threads(program.num_threads())


def requests(count: int, adapters: Sequence[str] = ("",)) -> list[Submit]:
    """Of 1 to 40 tokens, of which the first are the same."""
    lengths = [1 + 13 * number % 40 for number in range(count)]
    return [
        Submit(
            id=number,
            token_ids=[(5 + 3 * place + (place > 20) * number) % 50 for place in range(length)],
            sampling=SAMPLINGS[number % len(SAMPLINGS)],
            max_tokens=4 + number % 5,
            logprobs=2,
            priority=number % 3,
            adapter=adapters[number % len(adapters)],
        )
        for number, length in enumerate(lengths)
    ]


def answered(engine: Engine, submits: Sequence[Submit], at_once: int) -> Found:
    """Token ids and log-probabilities of each; so many run at once, and one comes when another ends."""
    found: Found = {one.id: [] for one in submits}
    left, running = list(reversed(submits)), 0
    while left or running:
        while left and running < at_once:
            engine.submit(left.pop())
            running += 1
        for output in engine.step():
            assert output.finish is None or not output.finish.error
            found[output.id] += [output.token_ids, output.logprobs]
            running -= output.finish is not None
    return {number: joined(parts) for number, parts in found.items()}


def joined(parts: list[Any]) -> list[Any]:
    return [list(chain.from_iterable(parts[kind::2])) for kind in (0, 1)]


def alone(launch: Launch, submits: Sequence[Submit]) -> Found:
    """One at a time, with nothing of the others in the cache."""
    engine, info = load_model(launch)
    assert "deterministic" in info.details
    try:
        return answered(engine, [msgspec.structs.replace(one, cache_salt=f"{one.id}") for one in submits], 1)
    finally:
        engine.close()


def in_a_crowd(launch: Launch, submits: Sequence[Submit], kv_bytes: int | None = None) -> Found:
    """In another order, with drafts, prompts cut into pieces of whatever is left of 16 rows, and prefixes shared."""
    crowd = msgspec.structs.replace(launch, max_sequences=9, max_step_tokens=19, speculate="ngram", kv_bytes=kv_bytes)
    engine, _ = load_model(crowd)
    try:
        order = [submits[(7 * place) % len(submits)] for place in range(len(submits))]
        found = answered(engine, order, 9)
        assert engine.scheduler.prefix_hit_tokens
        return found
    finally:
        engine.close()


def tiny(family: str, scheme: str, **how: Any) -> Launch:
    config = json.loads((TINY / f"{family}.json").read_text())
    weights = RandomInit(config=config, scheme=scheme, group=32 if scheme.startswith("int") else None)
    return Launch(model=family, device="cpu", deterministic=True, context_tokens=64, random_weights=weights, **how)


@pytest.mark.parametrize("family", RUN)
def test_every_family_answers_alike(family: str) -> None:
    launch, submits = tiny(family, "bf16"), requests(16)
    assert in_a_crowd(launch, submits) == alone(launch, submits)


@pytest.mark.parametrize(
    ("scheme", "kv"), [("bf16", "fp32"), ("bf16", "fp8"), ("fp32", "fp32"), ("fp8", "bf16"), ("int8", "bf16"), ("int4", "fp8")]
)
@pytest.mark.parametrize("family", ["llama", "glm4_moe"])
def test_every_storage_answers_alike(family: str, scheme: str, kv: str) -> None:
    launch, submits = tiny(family, scheme, kv=kv), requests(16)
    assert in_a_crowd(launch, submits) == alone(launch, submits)


def test_preemption_changes_nothing() -> None:
    launch, submits = tiny("llama", "bf16"), requests(24)
    blocks = 12  # a sequence has up to three
    engine, _ = load_model(launch)
    per_block = sum(part.nbytes // part.shape[0] for cache in engine.runner._caches for part in cache.parts)  # type: ignore[attr-defined]
    engine.close()
    engine, _ = load_model(msgspec.structs.replace(launch, max_sequences=9, kv_bytes=blocks * per_block))
    found = answered(engine, submits, 9)
    assert engine.scheduler.num_preemptions
    engine.close()
    assert found == alone(launch, submits)


def test_an_mtp_layer_that_drafts_changes_nothing() -> None:
    launch = Launch(model=str(find_bundled("tiny-glm")), device="cpu", deterministic=True, context_tokens=64)
    submits = requests(12)
    engine, _ = load_model(msgspec.structs.replace(launch, speculate="mtp", max_sequences=5))
    found = answered(engine, submits, 5)
    assert engine.stats().drafted
    engine.close()
    assert found == alone(launch, submits)


def adapter(folder: Path, model: Path, part: str, seed: int) -> tuple[str, str]:
    """As PEFT writes one; of every matrix of the attention, or of the experts."""
    opened = open_model(model)
    opened.store.close()
    made: dict[str, Any] = {}
    draw = torch.Generator().manual_seed(seed)
    for module, (ours, (out, into)) in published_matrices(rules(opened.spec)).items():
        if part in ours and "router" not in ours:
            made[f"base_model.model.{module}.lora_A.weight"] = torch.randn(4, into, generator=draw) / into**0.5
            made[f"base_model.model.{module}.lora_B.weight"] = torch.randn(out, 4, generator=draw) * 0.3
    assert made
    folder.mkdir()
    save_file(made, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    return folder.name, str(folder)


@pytest.mark.parametrize("part", [".mixer.", ".ffn."])
def test_adapters_answer_alike(part: str, tmp_path: Path) -> None:
    """Two adapters and the model itself, beside each other."""
    model = find_bundled("tiny-glm")
    assert model is not None
    adapters = tuple(adapter(tmp_path / name, model, part, seed) for seed, name in enumerate(("tone", "law")))
    launch = Launch(model=str(model), device="cpu", deterministic=True, context_tokens=64, adapters=adapters)
    submits = requests(12, ("tone", "", "law", "tone"))
    found = alone(launch, submits)
    engine, _ = load_model(msgspec.structs.replace(launch, max_sequences=8, max_step_tokens=70))
    try:
        assert answered(engine, submits[::-1], 8) == found
    finally:
        engine.close()
    plain = alone(msgspec.structs.replace(launch, adapters=()), [msgspec.structs.replace(submits[0], adapter="")])
    assert plain[0] != found[0], "the adapter does something"


@pytest.mark.multi
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=3), Layout(pp=2)], ids=str)
def test_ranks_answer_alike(layout: Layout) -> None:
    """Their parts are added in the order of ranks, however many rows there are."""
    launch, submits = tiny("llama", "bf16", layout=layout), requests(16)
    many = {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 96}
    config = launch.random_weights.config | many  # type: ignore[union-attr]
    launch = msgspec.structs.replace(launch, random_weights=RandomInit(config=config, scheme="bf16"))
    found: list[Found] = []
    for at_once, how in ((1, {}), (9, {"max_sequences": 9, "max_step_tokens": 19, "speculate": "ngram"})):
        with InlineRanks(lambda _: None, lambda _: None) as ranks:
            engine, _ = ranks.load(msgspec.structs.replace(launch, **how), lambda _done, _total: None)
            found.append(answered(engine, submits if at_once > 1 else submits[::-1], at_once))
            engine.close()
    assert found[0] == found[1]


# --- where it is not promised


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "mps"])
def test_other_devices_are_refused(device: str) -> None:
    with pytest.raises(Impossible, match=f"not on {device}.* add --device cpu"):
        check_launch(Launch(device=device, deterministic=True))
    with pytest.raises(Impossible, match="promised on CPUs alone"):
        check_deterministic(device)


def test_rounded_sums_are_refused() -> None:
    with pytest.raises(BadInput, match="--sync int8 rounds"):
        check_launch(Launch(device="cpu", deterministic=True, layout=Layout(tp=2), sync="int8"))


def test_without_compiled_kernels_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "available", lambda: False)
    with pytest.raises(Impossible, match="needs the compiled kernels"):
        load_model(tiny("llama", "bf16"))


def test_what_cannot_be_recorded_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation of PyTorch is among them."""
    monkeypatch.setattr(native_norm, "norm", lambda *_: None)
    with pytest.raises(Impossible, match="not computed by the compiled kernels alone"):
        load_model(tiny("llama", "bf16"))


def test_experts_on_disk_are_refused(tmp_path: Path) -> None:
    launch = tiny("glm4_moe", "int8")
    fake = SimpleNamespace(
        shard=WHOLE, modules=lambda: [SimpleNamespace(gate_up=None), SimpleNamespace(gate_up=DiskExperts.__new__(DiskExperts))]
    )
    with pytest.raises(Impossible, match="all experts in memory"):
        check_order_is_fixed(SimpleNamespace(program=object()), fake)  # type: ignore[arg-type]
    engine, _ = load_model(launch)
    check_order_is_fixed(engine.runner, engine.runner.decoder)
    engine.close()
