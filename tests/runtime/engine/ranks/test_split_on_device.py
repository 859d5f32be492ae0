"""A model over two ranks on GPUs is the model on one: log-probabilities within what bf16 allows. On one card the ranks share it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.multi]

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from safetensors.torch import save_file  # noqa: E402

from windlass.cli.bench.ranks import InlineRanks  # noqa: E402
from windlass.core.launch import Launch  # noqa: E402
from windlass.core.layout import Layout  # noqa: E402
from windlass.core.request import GREEDY  # noqa: E402
from windlass.core.rule import stored_tensors  # noqa: E402
from windlass.model.families import describe, rules  # noqa: E402
from windlass.runtime.engine.load import load_model  # noqa: E402
from windlass.runtime.engine.protocol import Submit  # noqa: E402

CONFIG = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "num_hidden_layers": 2, "intermediate_size": 512, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
}  # fmt: skip
BOUND = 0.1
"""bf16 has 8 bits; four sums of halves are rounded once more than the whole."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, chance = tmp_path_factory.mktemp("model"), torch.Generator().manual_seed(0)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tensors = {
        tensor.name: torch.randn(tensor.shape, generator=chance).mul_(tensor.shape[-1] ** -0.5).to(torch.bfloat16)
        for tensor in stored_tensors(rules(describe(CONFIG)))
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def scored(model: Path, layout: Layout) -> list[float]:
    launch = Launch(model=str(model), device="cuda", context_tokens=128, max_sequences=2, kv_bytes=2**24, layout=layout)
    with InlineRanks(lambda _: None, lambda _: None) as ranks:
        engine, _ = load_model(launch) if launch.is_single else ranks.load(launch, lambda _done, _total: None)
        engine.submit(Submit(1, [place * 37 % 512 for place in range(60)], GREEDY, 8, logprobs=0, prompt_logprobs=0))
        found: list[float] = []
        while engine.has_work:
            for output in engine.step():
                found += [entry.logprob for entry in output.prompt_logprobs or () if entry is not None]
        engine.close()
        return found


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2)], ids=str)
def test_split_is_whole(model: Path, layout: Layout) -> None:
    alone, split = scored(model, Layout()), scored(model, layout)
    assert len(alone) == 59
    assert max(abs(a - b) for a, b in zip(alone, split, strict=True)) < BOUND
