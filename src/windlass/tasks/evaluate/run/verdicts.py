"""An answer to a record with its verdict. Programs are run in the sandbox, everything else is graded at once."""

from __future__ import annotations

import msgspec

from windlass.tasks.evaluate.run.ask import Reply
from windlass.tasks.evaluate.run.items import Item
from windlass.tasks.evaluate.run.records import Record
from windlass.tasks.evaluate.sandbox.sandbox import Outcome, Program, Sandbox
from windlass.tasks.evaluate.tasks.extract import extract
from windlass.tasks.evaluate.tasks.grade import Verdict, grade, grade_choice, program
from windlass.tasks.evaluate.tasks.questions import Question
from windlass.tasks.evaluate.tasks.task import Task

NOT_RUN = "not run"


def answered(task: Task, item: Item, reply: Reply, attempts: int) -> Record:
    """With its verdict, unless a program has to run for it."""
    question = item.question
    record = Record(
        task=task.name,
        id=question.id,
        sample=item.sample,
        subject=question.subject,
        prompt=question.digest,
        answer=reply.answer,
        reasoning=reply.reasoning,
        finish=reply.finish,
        choices=reply.choices,
        confidence=reply.confidence,
        tokens=reply.tokens,
        seconds=reply.seconds,
        attempts=attempts,
        why=NOT_RUN if task.grader == "python" else "",
    )
    if task.grader == "choice":
        return _with_choice(record, question)
    style = "chat" if question.messages is not None else "completion"
    found = extract(task, reply.answer, style)
    record = msgspec.structs.replace(record, strict=found.strict, flexible=found.flexible)
    if task.grader == "python":
        return record
    return decided(task, record, grade(task, question, found.strict, True), grade(task, question, found.flexible, False))


def _with_choice(record: Record, question: Question) -> Record:
    verdict = grade_choice(record.choices, question.answer)
    best = max(record.choices, key=lambda choice: record.choices[choice])
    return msgspec.structs.replace(
        record,
        strict=best,
        flexible=best,
        strict_passed=verdict.passed,
        flexible_passed=verdict.passed,
        verdict="correct" if verdict.passed else "wrong",
        why=verdict.why,
    )


def decided(task: Task, record: Record, strict: Verdict | Outcome, flexible: Verdict | Outcome) -> Record:
    chosen = strict if task.extract.scored == "strict" else flexible
    return msgspec.structs.replace(
        record,
        strict_passed=strict.passed,
        flexible_passed=flexible.passed,
        verdict="correct" if chosen.passed else "wrong",
        why=chosen.why,
    )


async def executed(task: Task, question: Question, record: Record, sandbox: Sandbox) -> Record:
    """Runs what was found strictly and, where it differs, what was found flexibly."""
    strict = await _run(question, record.strict, sandbox)
    flexible = strict if record.flexible == record.strict else await _run(question, record.flexible, sandbox)
    return decided(task, record, strict, flexible)


async def _run(question: Question, extracted: str | None, sandbox: Sandbox) -> Outcome:
    if extracted is None or not extracted.strip():
        return Outcome(passed=False, why="no code found")
    return await sandbox.run(
        Program(
            source=program(question, extracted),
            tests=question.tests,
            context=question.context,
            entry_point=question.entry_point,
        )
    )


def failed(task: Task, item: Item, why: str, attempts: int) -> Record:
    question = item.question
    return Record(
        task=task.name,
        id=question.id,
        sample=item.sample,
        subject=question.subject,
        prompt=question.digest,
        verdict="failed",
        why=why[:500],
        attempts=attempts,
    )
