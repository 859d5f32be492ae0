"""Everything that one model is asked, in order, and what of it a journal already has. Pure but for reading the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

import msgspec

from windlass.core.model import Frozen
from windlass.tasks.evaluate.run.records import Record, key_of
from windlass.tasks.evaluate.run.settings import TaskSettings, Wanted
from windlass.tasks.evaluate.tasks.questions import Asked, Question, Style, questions
from windlass.tasks.evaluate.tasks.sources import is_here, load
from windlass.tasks.evaluate.tasks.task import Source, Task


class Item(Frozen):
    """One request to make."""

    question: Question
    sample: int

    @property
    def key(self) -> str:
        return key_of(self.question.task, self.question.id, self.sample)


class Prepared(Frozen):
    """A task with its questions, as this model is asked them."""

    task: Task
    questions: tuple[Question, ...]
    settings: TaskSettings
    data: str
    """Where the rows were found."""
    is_pinned: bool


def prepare(task: Task, wanted: Wanted, has_chat: bool) -> Prepared:
    data = load(task)
    shots = task.shots if wanted.shots is None else wanted.shots
    style = style_of(task, wanted.style, has_chat)
    asked = Asked(num_examples=wanted.num_examples, shots=shots, seed=wanted.seed or 0)
    found = tuple(questions(task, data.rows, _examples(task, shots), style, asked))
    settings = TaskSettings(
        name=task.name,
        toml=task.digest,
        data=data.digest[:16],
        shots=shots,
        num_questions=len(found),
        style=style,
        max_tokens=wanted.max_tokens or task.max_tokens,
    )
    return Prepared(task=task, questions=found, settings=settings, data=data.found_at, is_pinned=data.is_pinned)


def style_of(task: Task, wanted: Style | None, has_chat: bool) -> Style:
    """Log-probabilities of choices are those of a text without a template."""
    if task.grader == "choice":
        return "completion"
    return wanted or ("chat" if has_chat else "completion")


def _examples(task: Task, shots: int) -> Sequence[dict[str, object]]:
    """The set's own worked examples, where they are on this machine."""
    if not shots or not task.shots_file:
        return ()
    part = "dev" if task.shots_file == task.source.file else "test"
    source = Source(file=task.shots_file, rows=task.source.rows)
    other = msgspec.structs.replace(task, source=source)
    return load(other, part).rows if is_here(other) else ()


def items(prepared: Sequence[Prepared], samples: int, is_interleaved: bool) -> list[Item]:
    """Task after task, so that shared prefixes stay cached; interleaved if a budget may end the run, so that all tasks have some."""
    each = [
        [Item(question=question, sample=sample) for question in one.questions for sample in range(samples)] for one in prepared
    ]
    if not is_interleaved:
        return [item for some in each for item in some]
    return [item for row in zip_longest(*each) for item in row if item is not None]


def current(all_items: Sequence[Item], have: Mapping[str, Record]) -> dict[str, Record]:
    """Without answers to other prompts than these: a template or a question has changed since."""
    asked = {item.key: item.question.digest for item in all_items}
    return {key: record for key, record in have.items() if asked.get(key) == record.prompt}


def missing(all_items: Sequence[Item], have: Mapping[str, Record]) -> list[Item]:
    """What is to be asked: never asked so, or failed."""
    kept = current(all_items, have)
    return [item for item in all_items if item.key not in kept or kept[item.key].verdict == "failed"]


def ungraded(all_items: Sequence[Item], have: Mapping[str, Record]) -> list[Item]:
    """Answers that came but have no verdict yet."""
    kept = current(all_items, have)
    return [item for item in all_items if item.key in kept and kept[item.key].verdict == "pending"]
