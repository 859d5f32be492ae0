"""Journals of `windlass eval` as answers. A journal has digests of its prompts; their texts come from the tasks, as they were asked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from windlass.cli.eval.compare import read_journal
from windlass.core.constants import DECODE_ERRORS
from windlass.errors import BadInput
from windlass.tasks.evaluate.run.items import prepare
from windlass.tasks.evaluate.run.records import Record
from windlass.tasks.evaluate.run.settings import SAVED, Wanted, resumed
from windlass.tasks.evaluate.tasks.catalog import choose_tasks
from windlass.tasks.evaluate.tasks.questions import Question
from windlass.tasks.route.features.text import messages_text
from windlass.tasks.route.tables.answers import Answer, read_paths

JOURNAL = "journal.jsonl"


def read_answers(paths: Sequence[Path]) -> list[Answer]:
    """Results folders of `windlass eval`, JSONL, CSV, or folders of those."""
    found: list[Answer] = []
    for path in paths:
        if not path.exists():
            raise BadInput(f"{path} does not exist; name a results folder of `windlass eval`, a .jsonl or a .csv file")
        found += read_results(path) if is_results(path) else read_paths([path])
    return found


def is_results(path: Path) -> bool:
    return path.is_dir() and (any(path.glob(f"*/{JOURNAL}")) or (path / JOURNAL).is_file())


def read_results(folder: Path) -> list[Answer]:
    """Of a results folder, or of one model's in it."""
    mine = [folder / JOURNAL] if (folder / JOURNAL).is_file() else sorted(folder.glob(f"*/{JOURNAL}"))
    root = folder.parent if (folder / JOURNAL).is_file() else folder
    if not (root / SAVED).is_file():
        raise BadInput(f"{root} has no {SAVED}, which says what was asked; run `windlass eval` again")
    wanted = resumed(root, Wanted())
    return [answer for file in mine for answer in _read_model(file, wanted)]


def _read_model(file: Path, wanted: Wanted) -> list[Answer]:
    records = [record for record in read_journal(file) if record.verdict in ("correct", "wrong")]
    asked = _questions(file, wanted)
    known = [(record, asked[record.prompt]) for record in records if record.prompt in asked]
    if records and len(known) < len(records) / 2:
        raise BadInput(
            f"{file}: {len(records) - len(known):,} of {len(records):,} answers are to other prompts than its tasks have now; evaluate again"
        )
    return [_answer(file.parent.name, record, question) for record, question in known]


def _questions(file: Path, wanted: Wanted) -> dict[str, Question]:
    """By digest. In which style the model was asked stands in the journal's first line."""
    styles = _styles(file)
    found: dict[str, Question] = {}
    for task in choose_tasks(wanted.tasks or ",".join(styles), wanted.category):
        if task.name in styles:
            prepared = prepare(task, wanted, has_chat=styles[task.name] == "chat")
            found |= {question.digest: question for question in prepared.questions}
    return found


def _styles(file: Path) -> dict[str, str]:
    with file.open("rb") as stream:
        head = stream.readline()
    try:
        fingerprint: dict[str, Any] = msgspec.json.decode(head)["fingerprint"]
    except (KeyError, TypeError, *DECODE_ERRORS):
        raise BadInput(f"{file} has no readable first line; it is not a journal of `windlass eval`") from None
    tasks = [value for key, value in fingerprint.items() if key.startswith("task ")]
    return {task["name"]: task["style"] for task in tasks}


def _answer(model: str, record: Record, question: Question) -> Answer:
    prompt = question.prompt if question.prompt is not None else messages_text(question.messages or ())
    return Answer(
        prompt=prompt,
        model=model,
        score=float(record.verdict == "correct"),
        id=f"{record.task}/{record.id}",
        group=f"{record.task}/{record.subject}" if record.subject else record.task,
        seconds=record.seconds,
        joules=record.joules,
        prompt_tokens=record.tokens.prompt,
        answer_tokens=record.tokens.answer,
        confidence=record.confidence,
    )
