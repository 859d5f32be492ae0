"""Rows to questions: which are asked, worked examples before them, and the text for chat and completion models. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal

from windlass.core.model import Frozen
from windlass.errors import BadInput
from windlass.tasks.evaluate.tasks.rows import Row
from windlass.tasks.evaluate.tasks.task import Task

Style = Literal["chat", "completion"]
_FIELD = re.compile(r"\{\{|\}\}|\{(\w+)\}")


class Question(Frozen):
    task: str
    id: str
    messages: tuple[dict[str, Any], ...] | None
    prompt: str | None
    """Exactly one of the two."""
    answer: str = ""
    subject: str = ""
    tests: str = ""
    context: str = ""
    entry_point: str = ""
    body_of: str = ""
    digest: str = ""
    """Of what is asked."""

    @property
    def text(self) -> str:
        """What is asked, as one text."""
        if self.prompt is not None:
            return self.prompt
        return "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in self.messages or ())


def render(template: str, row: Mapping[str, Any], task: str) -> str:
    def field(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0][0]
        if match[1] not in row:
            raise BadInput(f"task {task}: its rows have no field {match[1]!r}; they have {', '.join(map(str, row))}")
        return str(row[match[1]])

    return _FIELD.sub(field, template)


def row_id(task: Task, row: Row, number: int) -> str:
    return render(task.id, row, task.name) if task.id else str(number)


def choose(task: Task, rows: Sequence[Row], count: int | None, seed: int) -> list[int]:
    """Numbers of the rows to ask, in their order. A hash of seed and id decides, so fewer are always among more."""
    if count is None or count >= len(rows):
        return list(range(len(rows)))
    ranked = sorted(range(len(rows)), key=lambda number: _rank(seed, task.name, row_id(task, rows[number], number)))
    return sorted(ranked[:count])


def _rank(seed: int, task: str, row: str) -> bytes:
    return blake2b(f"{seed}\0{task}\0{row}".encode(), digest_size=8).digest()


def split_shots(task: Task, rows: Sequence[Row], examples: Sequence[Row], count: int, seed: int) -> tuple[list[Row], set[int]]:
    """Worked examples, and the rows that are held out for them."""
    if examples or count == 0:
        return list(examples), set()
    held = choose(task, rows, count, seed + 1)
    if len(held) >= len(rows):
        raise BadInput(f"task {task.name} has {len(rows)} rows; {count} worked examples leave no question")
    return [rows[number] for number in held], set(held)


def questions(task: Task, rows: Sequence[Row], examples: Sequence[Row], style: Style, asked: Asked) -> list[Question]:
    """`examples`: rows of the set's own worked examples, if it has them."""
    shown, held = split_shots(task, rows, examples, asked.shots, asked.seed)
    left = [number for number in range(len(rows)) if number not in held]
    chosen = choose(task, [rows[number] for number in left], asked.num_examples, asked.seed)
    made = [question(task, rows[left[place]], left[place], shown, style, asked.shots) for place in chosen]
    _check_distinct(task, made)
    return made


class Asked(Frozen):
    num_examples: int | None = None
    shots: int = 0
    seed: int = 0


def question(task: Task, row: Row, number: int, examples: Sequence[Row], style: Style, shots: int) -> Question:
    subject = render(task.subject, row, task.name)
    shown = _of_subject(task, examples, subject)[:shots]
    if len(shown) < shots:
        raise BadInput(f"task {task.name} has {len(shown)} worked examples{f' of {subject}' if subject else ''}, not {shots}")
    messages = _chat(task, row, shown) if style == "chat" else None
    prompt = _completion(task, row, shown) if style == "completion" else None
    digest = blake2b(repr((messages, prompt)).encode(), digest_size=8).hexdigest()
    code = {name: render(getattr(task, name), row, task.name) for name in ("tests", "context", "entry_point", "body_of")}
    return Question(
        task=task.name,
        id=row_id(task, row, number),
        messages=messages,
        prompt=prompt,
        answer=render(task.answer, row, task.name),
        subject=subject,
        digest=digest,
        **code,
    )


def _of_subject(task: Task, examples: Sequence[Row], subject: str) -> list[Row]:
    """Those of the question's own subject, where examples have one."""
    return [row for row in examples if not task.subject or render(task.subject, row, task.name) == subject] or list(examples)


def _target(task: Task, row: Row) -> str:
    return render(task.prompt.target, row, task.name) if task.prompt.target else f" {render(task.answer, row, task.name)}"


def _chat(task: Task, row: Row, examples: Sequence[Row]) -> tuple[dict[str, Any], ...]:
    prompt, found = task.prompt, list[dict[str, Any]]()
    if prompt.system:
        found.append({"role": "system", "content": render(prompt.system, row, task.name)})
    for example in examples:
        found.append({"role": "user", "content": render(prompt.chat, example, task.name)})
        found.append({"role": "assistant", "content": _target(task, example).strip()})
    found.append({"role": "user", "content": render(prompt.chat, row, task.name)})
    first = next(message for message in found if message["role"] == "user")
    first["content"] = render(prompt.preamble, row, task.name) + first["content"]
    return tuple(found)


def _completion(task: Task, row: Row, examples: Sequence[Row]) -> str:
    template = task.prompt.completion or task.prompt.chat
    shown = [f"{render(template, example, task.name)}{_target(task, example)}\n\n" for example in examples]
    return f"{render(task.prompt.preamble, row, task.name)}{''.join(shown)}{render(template, row, task.name)}"


def _check_distinct(task: Task, made: Sequence[Question]) -> None:
    seen: set[str] = set()
    for each in made:
        if each.id in seen:
            raise BadInput(f"task {task.name} has two rows with the id {each.id!r}")
        seen.add(each.id)
