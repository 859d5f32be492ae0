"""Tasks as TOML: six lines are enough, and everything wrong is one line that says what."""

from __future__ import annotations

import pytest

from windlass.errors import BadInput, UnknownName
from windlass.tasks.evaluate.tasks.catalog import builtin, choose_tasks
from windlass.tasks.evaluate.tasks.task import CATEGORIES, parse_task

pytestmark = pytest.mark.pure

SIX = """
name = "capitals"
category = "knowledge"
source.file = "capitals.jsonl"
prompt.chat = "What is the capital of {country}?"
answer = "{capital}"
grader = "exact"
"""


def test_six_lines_are_a_task() -> None:
    task = parse_task(SIX.encode(), "capitals.toml")
    assert (task.name, task.prompt.chat, task.grader, task.shots) == ("capitals", "What is the capital of {country}?", "exact", 0)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("grader = ", "not valid TOML"),
        ('graders = "exact"', "did you mean grader"),
        ('category = "sports"', "category 'sports' is not one of"),
        ('grader = "guess"', "grader"),
        ('name = "a/b"', "name must be"),
        ('max_tokens = "many"', "max_tokens"),
        ("max_tokens = 0", "at least 1"),
        ('choices = ["A"]\ngrader = "letter"', "at least two"),
        ('grader = "python"', "tests is missing"),
        ('extract.strict.pattern = "("', "not a regular expression"),
        ('extract.strict.pattern = "no group"', "needs a group"),
        ('source.hub = "owner/set"', "path, revision and sha256"),
        ('prompt.chatt = "x"', "chatt"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(line: str, words: str) -> None:
    replaced = {each.partition(" =")[0] for each in line.splitlines()}
    kept = [each for each in SIX.splitlines() if each and each.partition(" =")[0] not in replaced]
    with pytest.raises(BadInput) as found:
        parse_task("\n".join([*kept, line]).encode(), "mine.toml")
    assert words in str(found.value) and "mine.toml" in str(found.value) and "\n" not in str(found.value)


def test_the_digest_is_of_the_text() -> None:
    assert parse_task(SIX.encode(), "a").digest != parse_task(SIX.replace("capital of", "name of").encode(), "a").digest


def test_built_in_tasks_have_a_category_a_licence_and_a_digest() -> None:
    assert {"humaneval", "mbpp", "mbpp_full", "gsm8k", "mmlu", "mmlu_logprob", "arithmetic", "lists", "functions"} <= set(
        builtin()
    )
    for task in builtin().values():
        assert task.category in CATEGORIES and task.source.licence and task.title
        assert task.source.generated or (len(task.source.sha256) == 64 and task.source.url)
    assert {task.category for task in builtin().values()} == set(CATEGORIES)


def test_tasks_are_chosen_by_name_and_category() -> None:
    assert [task.name for task in choose_tasks("gsm8k,humaneval", None)] == ["gsm8k", "humaneval"]
    assert {task.category for task in choose_tasks(None, "coding,math")} == {"coding", "math"}
    assert [task.name for task in choose_tasks("gsm8k,humaneval", "math")] == ["gsm8k"]


@pytest.mark.parametrize(
    ("names", "categories", "words"),
    [
        ("gsm9k", None, "did you mean gsm8k"),
        (" , ", None, "names no task"),
        ("gsm8k,gsm8k", None, "twice"),
        ("gsm8k", "coding", "none of the tasks"),
        ("no/such.toml", None, "cannot be read"),
        (None, "maths", "did you mean math"),
    ],
)
def test_a_choice_that_means_nothing_is_refused(names: str | None, categories: str | None, words: str) -> None:
    with pytest.raises((BadInput, UnknownName), match=words):
        choose_tasks(names, categories)
