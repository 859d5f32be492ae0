"""Real models, tiny: read from disk, run by the engine, compared with transformers' own generation."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_text import TEMPLATE, ids, model_text

from windlass.core.client import SyncClient
from windlass.core.launch import Launch, RandomInit
from windlass.core.request import GREEDY, Request, ScoreRequest
from windlass.errors import BadInput, DoesNotFit, Error, Impossible
from windlass.runtime.engine.client.client import open_client
from windlass.runtime.engine.engine import Engine
from windlass.runtime.engine.load import load_model, room_under
from windlass.runtime.engine.protocol import SequenceOutput, Submit

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore")]  # warnings are transformers'

TINY = Path(__file__).parents[2] / "model" / "families" / "tiny"
FAMILIES = ("llama", "glm4_moe_lite")
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
PROMPTS = ("Hello", "a much longer prompt that does not fit in one block of the cache", "x")


class Model:
    def __init__(self, folder: Path, theirs: Any) -> None:
        self.folder, self.theirs = folder, theirs
        self._known: dict[tuple[int, ...], list[int]] = {}

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        tokens = self._known.setdefault(tuple(prompt), list(prompt))
        with torch.no_grad():
            while len(tokens) < len(prompt) + count:
                tokens.append(int(self.theirs(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[len(prompt) : len(prompt) + count]

    def logprobs(self, tokens: list[int]) -> list[float]:
        with torch.no_grad():
            found = self.theirs(input_ids=torch.tensor([tokens])).logits[0].double().log_softmax(-1)
        return [float(found[place - 1, tokens[place]]) for place in range(1, len(tokens))]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(request.param, tmp_path_factory.mktemp(request.param))


def make_model(family: str, folder: Path) -> Model:
    """With logits far enough apart that rounding decides nothing."""
    transformers = pytest.importorskip("transformers")
    config = json.loads((TINY / f"{family}.json").read_text()) | {"vocab_size": 64, "eos_token_id": None, "bos_token_id": None}
    made = transformers.CONFIG_MAPPING[config.pop("model_type")](**config)
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(made, **EAGER, dtype=torch.float32).eval()
    for name, value in theirs.state_dict().items():
        if value.dim() > 1:
            value.copy_(torch.randn_like(value) * (1.0 if "embed" in name else 1.3 * value.shape[-1] ** -0.5))
    theirs.save_pretrained(folder)
    text = model_text()
    text.tokenizer.backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return Model(folder, theirs)


def launch_of(model: Model, **changes: Any) -> Launch:
    given = {"device": "cpu", "kv": "fp32", "exact": True, "context_tokens": 128, "max_sequences": 4}
    return Launch(model=str(model.folder), **(given | changes))


def run(engine: Engine, submits: list[Submit]) -> dict[int, list[SequenceOutput]]:
    for submit in submits:
        engine.submit(submit)
    found: dict[int, list[SequenceOutput]] = {submit.id: [] for submit in submits}
    while engine.has_work:
        for output in engine.step():
            found[output.id].append(output)
    return found


def tokens_of(outputs: list[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@pytest.mark.parametrize("step_tokens", [None, 6])
@pytest.mark.parametrize("num_blocks", [32, 8])
def test_greedy_tokens_are_transformers_own(model: Model, step_tokens: int | None, num_blocks: int) -> None:
    """All at once, in chunks, and with a cache so small that sequences are preempted; twice, so that prefixes are found."""
    engine, info = load_model(launch_of(model, max_step_tokens=step_tokens, kv_bytes=None))
    per_block = info.kv_bytes // engine.limits.num_blocks
    engine.close()
    engine, _ = load_model(launch_of(model, max_step_tokens=step_tokens, kv_bytes=num_blocks * per_block))
    assert engine.limits.num_blocks == num_blocks
    submits = [Submit(number, ids(prompt), GREEDY, max_tokens=50) for number, prompt in enumerate(PROMPTS)]
    for _ in range(2):
        found = run(engine, submits)
        for number, prompt in enumerate(PROMPTS):
            assert tokens_of(found[number]) == model.greedy(ids(prompt), 50)
    stats = engine.stats()
    assert stats.prefix_hit_tokens > 0
    assert (stats.preemptions > 0) == (num_blocks == 8)
    engine.close()


def test_replayed_and_called_decoders_agree(model: Model) -> None:
    engine, _ = load_model(launch_of(model))
    if engine.runner.program is None:
        pytest.skip(engine.runner.why_not_recorded)
    called = Engine(engine.runner.decoder, engine.runner._caches, engine.limits, engine.num_tokens, record=False)
    submits = [Submit(number, ids(prompt), GREEDY, 16, logprobs=3, prompt_logprobs=0) for number, prompt in enumerate(PROMPTS)]
    one, other = run(engine, submits), run(called, submits)
    for number in one:
        assert tokens_of(one[number]) == tokens_of(other[number])
        for mine, theirs in zip(one[number], other[number], strict=True):
            assert [entry.logprob for entry in mine.logprobs] == pytest.approx(
                [entry.logprob for entry in theirs.logprobs], abs=1e-4
            )


def test_the_whole_way_from_a_path_to_text(model: Model) -> None:
    progress: list[tuple[int, int]] = []
    with SyncClient(open_client(launch_of(model), lambda *told: progress.append(told))) as client:
        info = client.info()
        assert (info.context_tokens, info.device, info.kv, info.has_chat) == (128, "cpu", "fp32", True)
        assert info.weights_bytes == sum(value.numel() * 4 for value in model.theirs.state_dict().values())
        text = "".join(delta.content for delta in client.generate(Request(prompt="Hello", sampling=GREEDY, max_tokens=3)))
        assert len(text) == 3
        scores = client.score(ScoreRequest(prompt=PROMPTS[1]))
        found = [entry.logprob for entry in scores.logprobs if entry is not None]
        every = model.logprobs(ids(PROMPTS[1]))
        assert found == pytest.approx(every, abs=1e-3)
    assert progress[-1][0] == progress[-1][1] > 0


def test_in_fp8_sequences_are_the_same_however_they_are_cut(model: Model) -> None:
    """In chunks, preempted, and with prefixes that others have left: what is in the cache is the same."""
    engine, info = load_model(launch_of(model, kv="fp8"))
    per_block = info.kv_bytes // engine.limits.num_blocks
    submits = [Submit(number, ids(prompt), GREEDY, max_tokens=50) for number, prompt in enumerate(PROMPTS)]
    wanted = run(engine, submits)
    engine.close()
    engine, _ = load_model(launch_of(model, kv="fp8", max_step_tokens=6, kv_bytes=8 * per_block))
    for _ in range(2):
        found = run(engine, submits)
        assert {number: tokens_of(found[number]) for number in found} == {number: tokens_of(wanted[number]) for number in wanted}
    assert engine.stats().preemptions > 0 and engine.stats().prefix_hit_tokens > 0
    engine.close()


@pytest.mark.parametrize(("kv", "bound"), [("bf16", 0.3), ("fp8", 3.0)])
def test_packed_kv_is_close(model: Model, kv: str, bound: float) -> None:
    exact, rounded = (load_model(launch_of(model, kv=one))[0] for one in ("fp32", kv))
    submit = Submit(1, ids(PROMPTS[1]), GREEDY, max_tokens=0, prompt_logprobs=0)
    values = [
        [entry.logprob for entry in run(engine, [submit])[1][0].prompt_logprobs or [] if entry is not None]
        for engine in (exact, rounded)
    ]
    assert values[0] == pytest.approx(values[1], abs=bound)
    assert values[0] != values[1]


# --- what cannot be --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model("llama", tmp_path_factory.mktemp("small"))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"device": "tpu"}, BadInput, "unknown device 'tpu'"),
        ({"kv": "int3"}, BadInput, "unknown KV type 'int3'"),
        ({"kv_bytes": 10_000}, DoesNotFit, "the KV cache of 128 tokens needs .* short; lower --context"),
        ({"model": "/nowhere"}, BadInput, "does not exist"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(small: Model, changes: dict[str, Any], error: type[Error], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        load_model(Launch(**({"model": str(small.folder), "device": "cpu", "context_tokens": 128} | changes)))
    assert "\n" not in str(caught.value)


def test_absent_devices_are_named(small: Model) -> None:
    for device in ("cuda", "mps"):
        if not (torch.cuda.is_available() if device == "cuda" else torch.backends.mps.is_available()):
            with pytest.raises(Impossible, match="--device cpu"):
                load_model(Launch(model=str(small.folder), device=device))


def test_too_little_memory_is_said_with_numbers(small: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even with the disk: buffers and what every step reads have to be in memory."""
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path))
    with pytest.raises(DoesNotFit, match=r"the weights need .* are missing; raise --host-memory.*the process uses") as caught:
        load_model(Launch(model=str(small.folder), device="cpu", host_memory=256 * 2**20))
    assert caught.value.short_bytes > 0


def test_a_home_that_cannot_be_written_to_is_said(small: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path / "file"))
    with pytest.raises(BadInput, match=r"cannot be created .*--disk-folder"):
        load_model(Launch(model=str(small.folder), device="cpu", host_memory=256 * 2**20))


def test_a_model_without_a_tokenizer_takes_tokens(small: Model, tmp_path: Path) -> None:
    for file in small.folder.iterdir():
        if not file.name.startswith("tokenizer"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    launch = Launch(model=str(tmp_path), device="cpu", context_tokens=64)
    with pytest.raises(BadInput, match=r"no tokenizer\.json"):
        open_client(launch)
    with SyncClient(open_client(launch, needs_text=False)) as client:
        deltas = list(client.generate(Request(token_ids=(1, 2, 3), sampling=GREEDY, max_tokens=4)))
        assert sum(len(delta.token_ids) for delta in deltas) == 4
        assert not client.info().has_text


# --- memory ----------------------------------------------------------------------------------------------------------

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "intermediate_size": 2048,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 32000,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu",
}  # fmt: skip
NUM_PARAMETERS = 2 * 32000 * 512 + 8 * (4 * 512 * 512 + 3 * 512 * 2048)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_closing_gives_the_memory_back() -> None:
    random = RandomInit(config=CONFIG, scheme="bf16")
    held: list[int] = []
    left: list[int] = []
    for _ in range(3):
        engine, info = load_model(Launch(model="random", device="cpu", random_weights=random, max_sequences=2))
        assert info.weights_bytes == pytest.approx(NUM_PARAMETERS * 2, rel=0.01)
        run(engine, [Submit(1, list(range(40)), GREEDY, max_tokens=4)])
        held.append(resident_bytes())
        engine.close()
        del engine
        gc.collect()
        left.append(resident_bytes())
    assert held[1] - left[1] > NUM_PARAMETERS * 2 * 0.9
    assert held[2] - held[1] < 8 * 2**20
    assert left[2] - left[1] < 8 * 2**20


@pytest.mark.parametrize(
    ("free", "held", "ranks", "cap", "expected"),
    [
        (100, 20, 1, None, 100),
        (100, 20, 1, 50, 30),
        (100, 20, 1, 10, 0),
        (119, 20, 2, None, 49),  # the other rank has loaded nothing yet
        (99, 20, 2, None, 39),
        (10, 80, 2, None, 0),
        (119, 20, 2, 40, 20),
    ],
)
def test_ranks_that_share_a_gpu_leave_each_other_room(free: int, held: int, ranks: int, cap: int | None, expected: int) -> None:
    assert room_under(free, held, ranks, cap) == expected
