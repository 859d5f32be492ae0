"""The tasks there are: built in, one TOML each, and files of one's own."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from windlass.errors import BadInput, UnknownName
from windlass.tasks.evaluate.tasks.task import CATEGORIES, Task, parse_task, read_task

FOLDER = Path(__file__).with_name("builtin")


@cache
def builtin() -> dict[str, Task]:
    """By name, in the order of files."""
    found = [parse_task(path.read_bytes(), path.name) for path in sorted(FOLDER.glob("*.toml"))]
    return {task.name: task for task in found}


def choose_tasks(names: str | None, categories: str | None) -> list[Task]:
    """`humaneval,gsm8k,mine.toml`; without names, the built-in tasks of the categories (all of them by default)."""
    wanted = _categories(categories)
    if names is None:
        return [task for task in builtin().values() if task.category in wanted]
    found = [_named(name.strip()) for name in names.split(",") if name.strip()]
    if not found:
        raise BadInput("--tasks names no task; `windlass eval tasks` lists them")
    twice = next((task.name for task in found if [other.name for other in found].count(task.name) > 1), None)
    if twice is not None:
        raise BadInput(f"task {twice} is named twice")
    left = [task for task in found if task.category in wanted]
    if not left:
        raise BadInput(f"none of the tasks is in category {categories}")
    return left


def _named(name: str) -> Task:
    if name.endswith(".toml") or "/" in name:
        return read_task(Path(name).expanduser())
    if name not in builtin():
        raise UnknownName("task", name, builtin())
    return builtin()[name]


def _categories(text: str | None) -> tuple[str, ...]:
    if text is None:
        return CATEGORIES
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    for name in found:
        if name not in CATEGORIES:
            raise UnknownName("category", name, CATEGORIES)
    return found or CATEGORIES
