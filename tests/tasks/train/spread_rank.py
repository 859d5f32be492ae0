"""One process of a run that is split, as a test starts it: trains, and compares what it holds with the run of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

STEPS = 3
"""Of a run, and of what goes on in another layout a third each: more only repeat what the first ones do with weights and moments."""
LIMIT = 1e-9
CHANGES = {"n_routed_experts": 6, "moe_intermediate_size": 8, "intermediate_size": 14, "num_hidden_layers": 3, "vocab_size": 64}
BATCH = {"global_batch": 4, "micro_batch": 1}
LOSS = {"balance": 1e-2, "router_z": 1e-3, "z": 1e-4, "bias_rate": 1e-2}


def run_rank(rank: int, world: int, folder: str, layouts: dict[str, dict[str, int]], name: str, changes: dict[str, Any]) -> None:
    """Leaves FOLDER/RANK.json: for each layout its losses, how far they and its weights are from the expected, and local shapes."""
    import json

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    expected = torch.load(Path(folder) / "expected.pt", weights_only=True)
    found = {label: one_layout(parallel, expected, name, changes) for label, parallel in layouts.items()}
    if world == 2:
        idle_experts(name, changes)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def one_layout(parallel: dict[str, int], expected: dict[str, Any], name: str, changes: dict[str, Any]) -> dict[str, Any]:
    trainer = trained(parallel, name, changes)
    reports = [trainer.step() for _ in range(STEPS)]
    losses = [report.loss for report in reports]
    state = trainer.state()
    return {
        "losses": losses,
        "loss_error": max(abs(one - other) for one, other in zip(losses, expected["losses"], strict=True)),
        "norm_error": max(abs(report.grad_norm - other) for report, other in zip(reports, expected["norms"], strict=True)),
        "weight_error": farthest(state["model"], expected["model"]),
        "moment_error": farthest(state["optimizer"]["exp_avg_sq"], expected["exp_avg_sq"]),
        "loads": reports[-1].expert_load == expected["loads"],
        "parts": {key: abs(value - expected["parts"][key]) for key, value in reports[-1].parts.items()},
        "held": {
            key: list(value.tensor.shape if hasattr(value, "tensor") else value.shape) for key, value in state["model"].items()
        },
        "local": {key: list(_local(parameter).shape) for key, parameter in trainer.masters.of.items()},
        "waited": dict(trainer.ranks.clock.waited),
        "validation_error": abs(trainer.validate() - expected["validation"]),
        "after": abs(trainer.step().loss - expected["after"]),
    }


def idle_experts(name: str, changes: dict[str, Any]) -> None:
    """No token goes to the second rank's experts: it takes part all the same, and nobody waits for it."""
    trainer = trained({"ep": 2, "fsdp": 2}, name, changes)
    for watch in trainer.balancers:
        watch.moe.correction[:3] += 100.0
    reports = [trainer.step() for _ in range(2)]
    assert all(load[3:] == [0, 0, 0] for report in reports for load in report.expert_load)
    assert reports[1].loss < reports[0].loss + 0.1


def trained(parallel: dict[str, int], name: str, changes: dict[str, Any]) -> Any:
    import torch
    from made import Asked, recipe, tiny

    from windlass.tasks.train.build import build_trainer

    spec, rules = tiny(name, **changes)
    data = Asked(spec.vocab_size)
    made = recipe(
        parallel=parallel,
        batch=BATCH,
        loss=LOSS,
        optimizer={"lr": 6e-3, "weight_decay": 0.1, "clip": 0.5},
        schedule={"steps": 30},
    )
    return build_trainer(made, spec, rules, data, held_out=data, dtype=torch.float64)


def _local(parameter: Any) -> Any:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def farthest(found: dict[str, Any], whole: dict[str, Any]) -> float:
    """The largest difference between what is held here and the same place of the whole."""
    worst = 0.0
    for name, value in found.items():
        expected = whole[name]
        if hasattr(value, "part"):
            expected = expected[tuple(slice(*interval) for interval in value.part.held)]
            value = value.tensor
        assert value.shape == expected.shape, (name, value.shape, expected.shape)
        worst = max(worst, float((value - expected).abs().max()))
    return worst


def resume_rank(
    rank: int, world: int, folder: str, layouts: dict[str, dict[str, int]], name: str, changes: dict[str, Any]
) -> None:
    """Goes on from what one process saved, in each layout, one step; then saves, for one process to go on from."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    expected = torch.load(Path(folder) / "losses.pt", weights_only=True)
    for label, parallel in layouts.items():
        trainer = trained(parallel, name, changes)
        go_on(trainer, Path(folder) / "alone")
        losses = [trainer.step().loss for _ in range(STEPS // 3)]
        assert max(abs(one - other) for one, other in zip(losses, expected[STEPS // 3 : 2 * STEPS // 3], strict=True)) < LIMIT, (
            label,
            losses,
        )
        save(trainer, Path(folder) / label)
    dist.barrier()
    dist.destroy_process_group()


def save(trainer: Any, folder: Path) -> None:
    checkpoints = _checkpoints(folder)
    checkpoints.save(trainer.progress.step, trainer.state(), wait=True)
    checkpoints.close()


def go_on(trainer: Any, folder: Path) -> None:
    checkpoints = _checkpoints(folder)
    state = trainer.state()
    checkpoints.load(state)
    trainer.load(state)
    checkpoints.close()


def _checkpoints(folder: Path) -> Any:
    from windlass.tasks.train.checkpoint import CheckpointIdentity, Checkpoints

    return Checkpoints(folder, CheckpointIdentity(model="tiny", spec="1"))
