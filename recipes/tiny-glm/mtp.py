"""Trains an MTP layer for the bundled model, whose other weights stay as they are, and writes a model that has both.

    python recipes/tiny-glm/build.py out/tiny-glm            # with the tokenizer of the bundled model in out/tiny-glm/tokenizer
    python recipes/tiny-glm/mtp.py out/tiny-glm out/tiny-glm-mtp --minutes 40
    python recipes/tiny-glm/mtp.py out/tiny-glm out/tiny-glm-mtp --write

The layer learns to predict what the model itself predicts (its whole distribution, not the text): that is what drafts are compared with.
Every third step also trains the second draft, made from the layer's own output, as drafting does. `--write` then makes the files that lie
beside the model, whose own file does not change.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "src"))

import msgspec  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from windlass.core.model import NextTokenLayer  # noqa: E402
from windlass.core.recipe.sections import DataSection, DataSource  # noqa: E402
from windlass.core.scheme import scheme  # noqa: E402
from windlass.model.bundled.models import find_bundled  # noqa: E402
from windlass.model.families import rules as rules_of  # noqa: E402
from windlass.model.formats.safetensors.shards import OutTensor, plan_shards  # noqa: E402
from windlass.model.formats.safetensors.store import SafetensorsStore  # noqa: E402
from windlass.model.formats.safetensors.writer import SafetensorsWriter  # noqa: E402
from windlass.runtime.nn import Decoder  # noqa: E402
from windlass.runtime.weights.load.checkpoint import CheckpointWeights  # noqa: E402
from windlass.runtime.weights.source import OpenedModel, open_model  # noqa: E402
from windlass.tasks.convert.convert import ConvertSettings, convert  # noqa: E402
from windlass.tasks.train.build import parameter_layouts  # noqa: E402
from windlass.tasks.train.data.batches import Batches, open_batches  # noqa: E402
from windlass.tasks.train.export.export import export_model  # noqa: E402
from windlass.tasks.train.model.init import LoadedWeights  # noqa: E402
from windlass.tasks.train.model.model import TrainingModel, build_model  # noqa: E402
from windlass.tasks.train.model.packing import IGNORED, packed_step  # noqa: E402

LENGTH, ROWS, WARMUP, RATE = 512, 4, 40, 2e-3
SOURCES = {"tasks": 0.80, "text": 0.14, "chats": 0.06}


def opened_with_layer(folder: Path) -> OpenedModel:
    opened = open_model(folder)
    spec = msgspec.structs.replace(opened.spec, next_token=NextTokenLayer(layer=opened.spec.layers[-1], own_embeddings=False))
    return msgspec.structs.replace(opened, spec=spec, rules=rules_of(spec))


def begun_like_the_last_layer(model: TrainingModel) -> None:
    """The layer begins as a copy of the model's last one that sees the hidden state alone."""
    assert model.mtp is not None
    mtp, width = model.mtp, model.decoder.spec.hidden_size
    with torch.no_grad():
        mtp.layer.load_state_dict(model.decoder.layers[-1].state_dict())
        mtp.norm.weight.copy_(model.decoder.norm.weight)
        mtp.project.weight[:, width:].copy_(torch.eye(width))


class Examples:
    """Batches with the model's own hidden states, which are computed once, by the kernels that serve it."""

    def __init__(self, opened: OpenedModel, batches: Batches, count: int) -> None:
        self._decoder = Decoder(opened.spec, CheckpointWeights(opened), LENGTH)
        self._batches, self._count = batches, count
        self._known: dict[int, tuple[Any, Tensor]] = {}

    def get(self, number: int) -> tuple[Any, Tensor]:
        number %= self._count
        if number not in self._known:
            batch = self._batches.batch(number * ROWS, ROWS)
            with torch.no_grad():
                hidden = self._decoder.norm(self._decoder.forward_hidden(packed_step(batch)))
            self._known[number] = batch, hidden.half()
        batch, hidden = self._known[number]
        return batch, hidden.float()


def shifted(numbers: Tensor, count: int) -> Tensor:
    """Of the row `count` later; the last rows wrap around and are masked by the caller."""
    return numbers.roll(-count, 0)


def losses(model: TrainingModel, batch: Any, hidden: Tensor, depth: int) -> tuple[list[Tensor], Tensor]:
    """Cross-entropy with the model's own predictions of `depth` drafts, each made from the one before, and how often the first is right."""
    assert model.mtp is not None
    step, tokens, targets = packed_step(batch), batch.tokens.flatten(), batch.targets.flatten()
    documents = (batch.documents + 10_000 * torch.arange(len(batch.tokens))[:, None]).flatten()
    head = model.decoder.head.float()
    state, found, agreement = hidden, list[Tensor](), torch.zeros(())
    for place in range(1, depth + 1):
        wanted = (shifted(documents, place) == documents) & (shifted(targets, place) != IGNORED)
        wanted[-place:] = False
        embedded = model.decoder.embedded(replace(step, tokens=shifted(tokens, place).to(step.tokens.dtype)))
        state = model.mtp(state, embedded, step, model.run)
        predicted, own = state[wanted] @ head.t(), shifted(hidden, place)[wanted] @ head.t()
        found.append(torch.nn.functional.cross_entropy(predicted, own.softmax(-1)))
        if place == 1:
            agreement = (predicted.argmax(-1) == own.argmax(-1)).float().mean()
    return found, agreement


def train(model: TrainingModel, examples: Examples, minutes: float, most: int) -> int:
    assert model.mtp is not None
    for parameter in model.decoder.parameters():
        parameter.requires_grad_(False)
    matrices = [p for p in model.mtp.parameters() if p.dim() > 1]
    vectors = [p for p in model.mtp.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    begun, number, means = perf_counter(), 0, torch.zeros(2)
    while number < most and perf_counter() - begun < minutes * 60:
        done = max((perf_counter() - begun) / (minutes * 60), number / most)
        for group in optimizer.param_groups:
            group["lr"] = RATE * min((number + 1) / WARMUP, 1) * min(1.0, max(0.02, (1 - done) / 0.5))
        found, agreement = losses(model, *examples.get(number), depth=2 if number % 3 == 2 else 1)
        sum(found[1:], found[0]).backward()
        torch.nn.utils.clip_grad_norm_([*matrices, *vectors], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        means += torch.stack((found[0].detach(), agreement))
        number += 1
        if number % 25 == 0:
            loss, agreed = (means / 25).tolist()
            print(f"{number}: loss {loss:.4f}, agreement {agreed:.4f}; {perf_counter() - begun:.0f} s", flush=True)
            means.zero_()
        if number % 200 == 0:
            save(model, Path(sys.argv[2]), number)
    return number


def save(model: TrainingModel, out: Path, steps: int) -> None:
    assert model.mtp is not None
    out.mkdir(parents=True, exist_ok=True)
    torch.save(model.mtp.state_dict(), out / "mtp.pt")
    (out / "training.json").write_text(json.dumps({"steps": steps, "tokens": steps * ROWS * LENGTH}) + "\n")


class Trained:
    """Our tensors in the parameters of the model (train.export.TrainedTensors)."""

    def __init__(self, model: TrainingModel, weights: LoadedWeights) -> None:
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self._found = {
            part.name: tensor.detach()
            for name, layout in parameter_layouts(model, weights).items()
            for part, tensor in layout.split(tensors[name])
        }

    def has(self, name: str) -> bool:
        return self._stacked(name)[0] in self._found

    def tensor(self, name: str) -> Tensor:
        held, expert = self._stacked(name)
        return self._found[held] if expert is None else self._found[held][expert]

    def _stacked(self, name: str) -> tuple[str, int | None]:
        """The experts of a layer are one tensor here."""
        before, is_expert, after = name.partition(".experts.")
        number, _, part = after.partition(".")
        return (f"{before}.experts.{part}", int(number)) if is_expert and number.isdigit() else (name, None)


def write_layer(model: TrainingModel, weights: LoadedWeights, folder: Path, out: Path) -> None:
    """`mtp.safetensors`, quantized like the rest of the model, which keeps its own file."""
    layer = f"model.layers.{model.decoder.spec.num_layers}."
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    export_model(Trained(model, weights), rules_of(model.decoder.spec), plain, out / "bf16")
    convert(out / "bf16", out / "int8", ConvertSettings(scheme=scheme("int8", 128), jobs=1))
    store = SafetensorsStore(out / "int8")
    names = sorted(name for name in store.names() if name.startswith(layer))
    tensors = [OutTensor(name=name, dtype=store.dtype(name), shape=store.shape(name)) for name in names]
    writer = SafetensorsWriter(out / "mtp.safetensors", plan_shards(tensors)[0].tensors)
    for tensor in tensors:
        data = bytearray(tensor.num_bytes)
        store.read_into(tensor.name, 0, memoryview(data))
        writer.write(tensor.name, 0, data)
    writer.finish()
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Trains an MTP layer for tiny-glm.")
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--batches", type=int, default=400, help="distinct ones; half a megabyte a thousand tokens")
    parser.add_argument("--write", action="store_true", help="write mtp.safetensors and config.json from what was trained")
    given = parser.parse_args()
    folder = find_bundled("tiny-glm")
    assert folder is not None
    opened = opened_with_layer(folder)
    weights = LoadedWeights(opened, seed=1)
    model = build_model(opened.spec, weights, LENGTH, mtp=True)
    sources = tuple(DataSource(path=str(given.data.resolve() / name), weight=weight) for name, weight in SOURCES.items())
    batches = open_batches(DataSection(sequence_length=LENGTH, sources=sources, packing="whole", seed=5), Path("/"))
    if given.write:
        assert model.mtp is not None
        model.mtp.load_state_dict(torch.load(given.out / "mtp.pt", weights_only=True))
        write_layer(model, weights, folder, given.out)
        return 0
    begun_like_the_last_layer(model)
    save(model, given.out, train(model, Examples(opened, batches, given.batches), given.minutes, given.steps))
    return 0


if __name__ == "__main__":
    sys.exit(main())
