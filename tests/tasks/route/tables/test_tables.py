from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from routing import answers

from windlass.errors import BadInput, UnknownName
from windlass.tasks.route.tables.answers import Answer, read_file, read_jsonl, read_paths, read_wide_csv
from windlass.tasks.route.tables.table import PRICED_BY_RANK, make_table

pytestmark = pytest.mark.pure


def test_lines_are_answers_and_further_keys_are_ignored() -> None:
    lines = [
        b'{"prompt": "a", "model": "m", "score": true, "id": 7, "mine": [1]}',
        b"",
        b'{"prompt": "b", "model": "m", "score": 0.5}',
    ]
    found = list(read_jsonl(lines, "x"))
    assert [(one.prompt, one.score, one.id) for one in found] == [("a", 1.0, "7"), ("b", 0.5, "")]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"prompt": "a", "model": "m"}', "missing required field `score`"),
        (b'{"model": "m", "score": 1}', "missing required field `prompt`"),
        (b'{"prompt": " ", "model": "m", "score": 1}', "needs a prompt"),
        (b'{"prompt": "a", "model": "m", "score": 2}', "between 0"),
        (b'{"prompt": "a", "model": "m", "score": 1, "cost": -1}', "cost is -1"),
        (b"not json", "line 1"),
    ],
)
def test_a_bad_line_is_named(line: bytes, says: str) -> None:
    with pytest.raises(BadInput, match=says) as found:
        list(read_jsonl([line], "answers.jsonl"))
    assert "answers.jsonl, line 1" in str(found.value) and "\n" not in str(found.value)


def test_wide_tables_have_a_column_for_each_model() -> None:
    lines = ["prompt,a,b", "one,True,False", "two,0.25,"]
    found = [(one.prompt, one.model, one.score, one.group) for one in read_wide_csv(lines, "x.csv", "x")]
    assert found == [("one", "a", 1.0, "x"), ("one", "b", 0.0, "x"), ("two", "a", 0.25, "x")]
    with pytest.raises(BadInput, match="2 columns, not the 3"):
        list(read_wide_csv(["prompt,a,b", "one,True"], "x.csv", "x"))
    with pytest.raises(BadInput, match="'maybe' is not a score"):
        list(read_wide_csv(["prompt,a,b", "one,maybe,1"], "x.csv", "x"))
    with pytest.raises(BadInput, match="column `prompt`"):
        list(read_wide_csv(["question,a,b"], "x.csv", "x"))


def test_folders_of_tables_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="neither a journal"):
        read_paths([tmp_path])
    (tmp_path / "one.csv").write_text("prompt,a,b\nx,1,0\n")
    assert {one.group for one in read_paths([tmp_path])} == {"one"}
    with pytest.raises(BadInput, match="cannot be read"):
        read_file(tmp_path / "none.jsonl")


def test_prompts_that_a_model_has_not_answered_are_dropped_and_counted() -> None:
    table = make_table([*answers(), Answer(prompt="lonely", model="small", score=1.0, cost=1.0)])
    assert table.num_dropped == 1 and "lonely" not in table.prompts
    assert table.models == ("small", "large") and table.models[table.best] == "large"


def test_samples_of_a_prompt_are_averaged() -> None:
    made = answers(80)
    twice = [*made, *[Answer(prompt=made[0].prompt, model="small", score=1 - made[0].score, group=made[0].group, cost=1.0)]]
    table = make_table(twice)
    assert table.scores[table.prompts.index(made[0].prompt), 0] == 0.5


@pytest.mark.parametrize(
    ("some", "models", "error", "says"),
    [
        ([], (), BadInput, "no answers"),
        ([one for one in answers() if one.model == "small"], (), BadInput, "only small has answers"),
        (answers(), ("small", "lagre"), UnknownName, "did you mean large"),
        (answers(10), (), BadInput, "at least 30 are needed"),
    ],
)
def test_tables_that_cannot_be_used_say_what_would_work(
    some: list[Answer], models: tuple[str, ...], error: type, says: str
) -> None:
    with pytest.raises(error, match=says):
        make_table(some, models)


def test_models_with_no_prompt_in_common_are_named_with_their_counts() -> None:
    apart = [Answer(prompt=f"{one.model} {one.prompt}", model=one.model, score=one.score) for one in answers()]
    with pytest.raises(BadInput, match=r"0 prompts have answers of all models.*large 2.., small 2") as found:
        make_table(apart)
    assert "evaluate" in str(found.value)


def test_without_costs_calls_are_counted() -> None:
    free = [Answer(prompt=one.prompt, model=one.model, score=one.score, group=one.group) for one in answers()]
    table = make_table(free)
    assert table.cost_unit == PRICED_BY_RANK and table.costs.mean(axis=0).tolist() == [0.0, 1.0]
    assert make_table(free, ("large", "small")).models == ("large", "small")


def test_prices_are_of_tokens() -> None:
    some = [
        Answer(prompt=one.prompt, model=one.model, score=one.score, group=one.group, prompt_tokens=1000, answer_tokens=500)
        for one in answers()
    ]
    table = make_table(some, (), {"small": (1.0, 2.0), "large": (10.0, 20.0)})
    assert np.allclose(table.costs.mean(axis=0), [0.002, 0.02]) and table.cost_unit == "dollars per answer"
