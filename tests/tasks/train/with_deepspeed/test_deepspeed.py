"""DeepSpeed's ZeRO: what it is told, what is refused, and that it learns what PyTorch's own engine learns."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import deepspeed_rank
import tiny_run

from windlass.core.recipe.recipe import Recipe, recipe_from
from windlass.errors import BadInput, Impossible
from windlass.tasks.train.deepspeed.config import check_deepspeed_recipe, deepspeed_config

pytestmark = pytest.mark.cpu


def recipe(**sections: dict[str, Any]) -> Recipe:
    return recipe_from({"model": {"name": "GLM-4.5-Air"}, **sections})


def config(made: Recipe, base: Path = Path()) -> dict[str, Any]:
    return deepspeed_config(made, base, global_batch=16, micro_batch=2, dp_size=4)


# --- what it is told --------------------------------------------------------------------------------------------------


def test_a_recipe_becomes_deepspeeds_own_words() -> None:
    made = config(recipe(parallel={"zero": 3}, memory={"offload": "cpu"}, precision={"compute": "bf16"}))
    assert made["gradient_accumulation_steps"] == 2 and made["train_batch_size"] == 16
    assert made["zero_optimization"]["stage"] == 3 and made["bf16"] == {"enabled": True}
    assert (
        made["zero_optimization"]["offload_param"]["device"] == made["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    )
    assert "offload_param" not in config(recipe(parallel={"zero": 2}, memory={"offload": "cpu"}))["zero_optimization"]


def test_a_users_json_counts(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"reduce_bucket_size": 5}, "train_batch_size": "auto"}))
    made = config(recipe(run={"engine": "deepspeed", "deepspeed": "ds.json"}), tmp_path)
    assert made["zero_optimization"]["reduce_bucket_size"] == 5 and made["zero_optimization"]["stage"] == 3
    assert made["train_batch_size"] == 16


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"optimizer": {"type": "Adam"}}', r'"optimizer" is set by the recipe, in \[optimizer\]'),
        ('{"train_batch_size": 4}', "is set by the recipe, in batch.global_batch"),
        ('{"moe": {"enabled": true}}', "the experts of a layer are one tensor"),
        ('{"zero_optimization": {"offload_param": {"device": "nvme"}}}', "is not supported"),
        ("[1]", "is not a JSON object"),
        ("{", "is not a JSON object"),
    ],
)
def test_json_that_contradicts(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(BadInput, match=message):
        config(recipe(run={"engine": "deepspeed", "deepspeed": "ds.json"}), tmp_path)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"parallel": {"ep": 2}}, "parallel.ep = 2 needs run.engine"),
        ({"parallel": {"tp": 2}}, "only data parallelism is supported"),
        ({"optimizer": {"name": "muon"}}, "use adamw"),
        ({"precision": {"compute": "fp16"}}, "use bf16 or fp32"),
        ({"memory": {"offload": "nvme"}}, "can be planned but not trained"),
        ({"parallel": {"zero": 0}}, "use 1, 2 or 3"),
        ({"lora": {"rank": 4}}, "lora needs run.engine"),
        ({"run": {"engine": "deepspeed", "compile": True}}, "run.compile needs run.engine"),
    ],
)
def test_what_it_cannot_do_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(Impossible, match=message):
        check_deepspeed_recipe(recipe(**sections))


def test_losses_beside_the_objective_are_multiplied_with_it() -> None:
    """DeepSpeed takes a mean over ranks, which the objective is multiplied up for; the balance of experts hangs on layers, not on it."""
    import torch
    from made import Counting, tiny
    from made import recipe as small

    from windlass.tasks.train.build import build_trainer
    from windlass.tasks.train.deepspeed.trainer import DeepspeedModule
    from windlass.tasks.train.step import prepare, to_device

    spec, rules = tiny("glm4_moe")
    made = build_trainer(small(loss={"balance": 1.0}), spec, rules, Counting(spec.vocab_size), dtype=torch.float64)
    told = DeepspeedModule(made.model)
    told.balance = made.balance
    (router,) = [one for name, one in made.masters.of.items() if name.endswith("1.feed_forward.router.weight")]
    found = []
    for scale in (1.0, 3.0):
        made._start_step()
        (micro,) = to_device(prepare(made.batches, 0, 2, 2, False), made.ranks, made.device)
        (told(micro)[0] * scale).backward()
        found.append(router.grad.clone())
        made.optimizer.zero_grad()
    torch.testing.assert_close(found[1], 3 * found[0])


# --- what it learns ---------------------------------------------------------------------------------------------------

SETTINGS = ["batch.global_batch=4", "batch.micro_batch=2", "schedule.steps=12", "schedule.warmup_steps=2", "optimizer.lr=2e-4"]


def ran(path: Path, out: Path, count: int, steps: int, *settings: str) -> list[float]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    words = [str(Path(__file__).parents[1] / "deepspeed_rank.py"), str(path), str(out), str(steps), *SETTINGS, *settings]
    done = subprocess.run([*command, *words], env=tiny_run.ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("losses ")]
    return json.loads(line.removeprefix("losses "))


@pytest.mark.multi
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.parametrize("zero", [3, 1])
def test_the_same_losses_and_the_same_checkpoints(tmp_path: Path, zero: int) -> None:
    """Two ranks against one of ours in fp32 (1e-4); then one of DeepSpeed's and one of ours go on from what the two saved."""
    import torch

    from windlass.tasks.train.build import build_trainer
    from windlass.tasks.train.checkpoint import CheckpointIdentity, Checkpoints

    torch.set_num_threads(1)
    path = tiny_run.make(tmp_path)
    alone = build_trainer(*deepspeed_rank.opened(path, SETTINGS))
    expected = [alone.step().loss for _ in range(9)]
    found = ran(path, tmp_path / "run", 2, 6, f"parallel.zero={zero}")
    assert max(abs(one - other) for one, other in zip(found, expected[:6], strict=True)) < 1e-4
    ours = build_trainer(*deepspeed_rank.opened(path, SETTINGS))
    checkpoints = Checkpoints(tmp_path / "run", CheckpointIdentity(model="tiny", spec="1"))
    state = ours.state()
    assert checkpoints.load(state) == 6
    checkpoints.close()
    ours.load(state)
    again = [ours.step().loss for _ in range(3)]
    assert max(abs(one - other) for one, other in zip(again, expected[6:], strict=True)) < 2e-4
    theirs = ran(path, tmp_path / "run", 1, 3, f"parallel.zero={zero}")
    assert max(abs(one - other) for one, other in zip(theirs, again, strict=True)) < 1e-4
