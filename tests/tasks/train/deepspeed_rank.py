"""One rank of a run on DeepSpeed, as a program: leaves its losses and, by itself, a checkpoint. Started by torchrun."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def opened(path: Path, settings: list[str]) -> tuple[Any, Any, Any, Any]:
    """Recipe, spec, rules and batches."""
    from windlass.core.recipe.recipe import load_recipe
    from windlass.model.families import describe, rules
    from windlass.tasks.train.data.batches import open_batches

    recipe = load_recipe(path, settings)
    spec = describe(recipe.model.config, "tiny")
    return recipe, spec, rules(spec), open_batches(recipe.data, path.parent)


def main() -> None:
    import torch
    import torch.distributed as dist

    from windlass.tasks.train.checkpoint import CheckpointIdentity, Checkpoints
    from windlass.tasks.train.deepspeed.trainer import build_deepspeed

    path, out, steps, *settings = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    recipe, spec, rules, batches = opened(Path(path), settings)
    trainer = build_deepspeed(recipe, spec, rules, batches, base=Path(path).parent)
    if recipe.parallel.zero == 3:  # in truth cut, and not held whole by all
        for parameter in trainer.parameters.values():
            assert parameter.ds_tensor.numel() == -(-parameter.ds_numel // dist.get_world_size())
    checkpoints = Checkpoints(Path(out), CheckpointIdentity(model="tiny", spec="1"))
    if checkpoints.latest() is not None:
        state = trainer.state()
        checkpoints.load(state)
        trainer.load(state)
    losses = [trainer.step().loss for _ in range(int(steps))]
    checkpoints.save(trainer.progress.step, trainer.state(), wait=True)
    checkpoints.close()
    if dist.get_rank() == 0:
        print("losses", json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
