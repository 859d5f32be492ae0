"""One process: every family learns, gradients are those of plain PyTorch, and what changes how is not to change what."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
for folder in (Path(__file__).parents[1], Path(__file__).parents[3] / "runtime" / "nn"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from made import FOLDER, NAMES, Counting, recipe, tiny  # noqa: E402
from split_files import converted  # noqa: E402

from windlass.core.scheme import scheme  # noqa: E402
from windlass.errors import BadInput, Impossible  # noqa: E402
from windlass.runtime.nn import Decoder  # noqa: E402
from windlass.runtime.weights import CheckpointWeights, open_model  # noqa: E402
from windlass.tasks.train.build import build_trainer  # noqa: E402
from windlass.tasks.train.model.packing import mtp_targets, packed_step  # noqa: E402
from windlass.tasks.train.step import prepare, to_device  # noqa: E402

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trainer(name: str = "glm4_moe", changes: dict[str, Any] | None = None, dtype: Any = None, **sections: Any) -> Any:
    spec, rules = tiny(name, **(changes or {}))
    data = Counting(spec.vocab_size)
    return build_trainer(recipe(**sections), spec, rules, data, held_out=data, dtype=dtype)


def losses(made: Any, count: int) -> list[float]:
    return [made.step().loss for _ in range(count)]


@pytest.mark.parametrize("name", NAMES)
def test_every_family_learns(name: str) -> None:
    made = trainer(name, optimizer={"lr": 2e-2}, schedule={"steps": 7, "warmup_steps": 1}, validation={"samples": 8})
    first = made.validate()
    assert losses(made, 7)[0] == pytest.approx(first, abs=0.2)
    assert made.validate() < 0.85 * first


def test_the_loss_is_what_plain_pytorch_says() -> None:
    """Each document by itself through the decoder, cross-entropy by torch: loss and every gradient."""
    made = trainer(
        dtype=torch.float64, loss={"balance": 0.0}, batch={"global_batch": 2, "micro_batch": 2}, optimizer={"clip": None}
    )
    decoder, batch = made.model.decoder, made.batches.batch(0, 2)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in range(2):
        for document in batch.documents[row].unique():
            some = batch.documents[row] == document
            alone = type(batch)(*(column[row][some][None] for column in batch))
            hidden = made.model.hidden(decoder.embedded(packed_step(alone)), packed_step(alone))
            total = total + torch.nn.functional.cross_entropy(
                decoder.logits(hidden), alone.targets[0], reduction="sum", ignore_index=-100
            )
            count += int((alone.targets != -100).sum())
    (total / count).backward()
    expected = {name: parameter.grad.clone() for name, parameter in made.model.named_parameters()}
    made.optimizer.zero_grad()
    sums = made.ranks.run(made.model, to_device(prepare(made.batches, 0, 2, 2, False), made.ranks, made.device))
    assert float(sums.entropy) == pytest.approx(float(total.detach() / count), abs=1e-12)
    for name, parameter in made.model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("micro", [1, 4])
def test_accumulation_changes_nothing(micro: int) -> None:
    expected = losses(trainer(dtype=torch.float64), 4)
    assert losses(trainer(dtype=torch.float64, batch={"micro_batch": micro}), 4) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("how", ["selective", "full"])
def test_recomputation_changes_nothing(how: str) -> None:
    """Nor are experts counted twice."""
    plain, again = trainer(dtype=torch.float64), trainer(dtype=torch.float64, memory={"recompute": how})
    for _ in range(3):
        one, other = plain.step(), again.step()
        assert other.loss == pytest.approx(one.loss, abs=1e-12)
        assert other.expert_load == one.expert_load
        assert other.parts == pytest.approx(one.parts, abs=1e-6)


def test_half_precision_learns_in_full() -> None:
    """Matrices compute in bf16; what the optimizer moves is fp32, and the two agree after every step."""
    exact, half = trainer(), trainer(precision={"compute": "bf16"})
    assert losses(half, 8) == pytest.approx(losses(exact, 8), abs=0.05)
    kinds = {name: parameter.dtype for name, parameter in half.model.named_parameters()}
    assert kinds["decoder.layers.1.mixer.qkv.weight"] == torch.bfloat16
    assert kinds["decoder.layers.1.feed_forward.router.weight"] == kinds["decoder.norm.weight"] == torch.float32
    for name, parameter in half.model.named_parameters():
        master = half.masters.of[name]
        assert master.dtype == torch.float32
        assert torch.equal(parameter, master.to(parameter.dtype))


def test_steps_too_small_for_half_precision_are_not_lost() -> None:
    made = trainer(precision={"compute": "bf16"}, optimizer={"lr": 1e-5, "weight_decay": 0.0}, schedule={"name": "constant"})
    name = "decoder.layers.0.mixer.qkv.weight"
    before = made.masters.of[name].detach().clone()
    losses(made, 3)
    moved = (made.masters.of[name].detach() - before).abs()
    assert 0 < float(moved.max()) < 1e-4
    assert float((moved > 0).float().mean()) > 0.5


def test_clipping() -> None:
    free, held = trainer(optimizer={"clip": None}), trainer(optimizer={"clip": 1e-3})
    assert free.step().grad_norm == pytest.approx(held.step().grad_norm)
    seen: list[float] = []
    held.optimizer.step = lambda lr: seen.append(_norm(held))
    report = held.step()
    assert report.grad_norm > 1e-2
    assert seen == [pytest.approx(1e-3, rel=1e-3)]


def _norm(made: Any) -> float:
    return float(
        sum(parameter.grad.square().sum() for parameter in made.masters.of.values() if parameter.grad is not None) ** 0.5
    )


def test_a_gradient_that_is_no_number_moves_nothing() -> None:
    made = trainer()
    before = {name: tensor.clone() for name, tensor in made.state()["model"].items()}
    made.model.head_loss = lambda hidden, head, targets, z: (
        (hidden.sum() + head.sum()) * float("nan"),
        torch.tensor(float("nan")),
    )
    report = made.step()
    assert not report.applied
    assert report.loss != report.loss
    for name, tensor in made.state()["model"].items():
        assert torch.equal(tensor, before[name]), name


def test_the_layer_that_guesses_ahead() -> None:
    changes = {"num_nextn_predict_layers": 1}
    made = trainer(changes=changes, model={"mtp": True})
    reports = [made.step() for _ in range(10)]
    assert reports[-1].parts["mtp"] < 0.9 * reports[0].parts["mtp"]
    assert len(reports[0].expert_load) == 3  # its own experts are balanced too
    names = made.state()["model"].keys()
    assert {"layers.3.next.project.weight", "layers.3.mixer.q.weight", "layers.3.next.hidden_norm.weight"} <= names
    assert trainer(changes=changes).model.mtp is None
    with pytest.raises(Impossible, match="no MTP layer"):
        trainer(model={"mtp": True})


def test_what_is_asked_ahead_stays_within_documents() -> None:
    batch = Counting(64).batch(0, 3)
    following, asked = mtp_targets(batch)
    for row in range(3):
        for at in range(16):
            if asked[row, at] != -100:
                assert batch.documents[row, at + 1] == batch.documents[row, at]
                assert asked[row, at] == batch.targets[row, at + 1]
                assert following[row, at] == batch.tokens[row, at + 1] == batch.targets[row, at]
    assert (asked != -100).sum() == (batch.targets != -100).sum() - 2 * 3  # one fewer in each document


def test_muon_learns() -> None:
    made = trainer(optimizer={"name": "muon", "lr": 2e-2})
    first = made.validate()
    losses(made, 8)
    assert made.validate() < 0.85 * first
    assert made.state()["optimizer"].keys() == {"momentum_buffer", "exp_avg", "exp_avg_sq"}
    assert "layers.1.ffn.experts.gate.weight" in made.state()["optimizer"]["momentum_buffer"]
    assert "embed.weight" in made.state()["optimizer"]["exp_avg"]


def test_stopping_and_going_on_is_bit_for_bit() -> None:
    whole, first = trainer(), trainer()
    expected = losses(whole, 8)
    losses(first, 3)
    saved = {"model": _copied(first.state()["model"]), "optimizer": _copied(first.state()["optimizer"])}
    rest = {key: value for key, value in first.state().items() if key not in saved}
    second = trainer(run={"seed": 9})
    state = second.state()
    _fill(state["model"], saved["model"])
    _fill(state["optimizer"], saved["optimizer"])
    second.load({**state, **rest})
    assert losses(second, 5) == expected[3:]
    assert second.progress.samples == whole.progress.samples
    for name, tensor in second.state()["model"].items():
        assert torch.equal(tensor, whole.state()["model"][name]), name


def _copied(tree: dict[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, dict) else value.clone() for key, value in tree.items()}


def _fill(into: dict[str, Any], source: dict[str, Any]) -> None:
    assert into.keys() == source.keys()
    for key, value in into.items():
        _fill(value, source[key]) if isinstance(value, dict) else value.copy_(source[key])


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"batch": {"global_batch": 3}}, "is not a multiple of 2"),
        ({"parallel": {"tp": 2}}, "sets tp 2, but there is only one process"),
        ({"precision": {"compute": "fp8"}}, "can be planned but not trained"),
        ({"memory": {"offload": "cpu"}}, "needs run.engine"),
        ({"schedule": {"steps": None}}, "how long to train"),
        ({"precision": {"compute": "fp16"}}, "fp16. can be planned but not trained"),
        ({"precision": {"gradients": "bf16"}}, "precision.gradients"),
        ({"parallel": {"sequence_parallel": True}}, "parallel.sequence_parallel"),
        ({"parallel": {"dispatch": "per_node"}}, "parallel.dispatch"),
        ({"model": {"config": {}, "dropout": True}}, "dropout can be planned"),
    ],
)
def test_what_cannot_be_trained_is_said(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        trainer(**sections)


def test_going_on_from_published_weights(tmp_path: Path) -> None:
    """The first loss is that of the checkpoint, and what learns is its numbers, stacked as the decoder has them."""
    config = json.loads((FOLDER / "glm4_moe.json").read_text())
    converted(config, tmp_path, scheme("int8", 32))
    opened = open_model(tmp_path / "source")
    data = Counting(opened.spec.vocab_size)
    made = build_trainer(recipe(), opened.spec, opened.rules, data, opened=opened)
    plain = Decoder(opened.spec, CheckpointWeights(opened, dtype=torch.float32, keep_quantized=False), 16)
    batch = data.batch(0, 4)
    with torch.no_grad():
        hidden = plain.forward_hidden(packed_step(batch))
        expected = torch.nn.functional.cross_entropy(plain.logits(hidden), batch.targets.flatten())
    assert made.step().loss == pytest.approx(float(expected), abs=1e-4)
    opened.store.close()


def test_skipped_samples_are_remembered() -> None:
    made = trainer()
    made.step()
    made.skip()
    assert (made.progress.samples, made.progress.skipped, made.progress.step) == (8, [(4, 8)], 1)
    assert made.step().first_sample == 8
