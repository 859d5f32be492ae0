"""Every rule."""

from __future__ import annotations

from windlass.tasks.observe.rules.node import node_groups
from windlass.tasks.observe.rules.rule import Group, Objectives
from windlass.tasks.observe.rules.serving import serving_groups
from windlass.tasks.observe.rules.training import training_groups


def all_groups(objectives: Objectives | None = None) -> tuple[Group, ...]:
    chosen = objectives or Objectives()
    return (*serving_groups(chosen), *training_groups(), *node_groups(chosen))
