"""What servers say is shown as it stands; weights are known by their contents."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from windlass.cli.eval.models import weights_digest
from windlass.cli.eval.progress import Bar
from windlass.cli.eval.tables import show_report, table
from windlass.tasks.evaluate.report.report import ModelRun, build, measure
from windlass.tasks.evaluate.run.items import Prepared, prepare
from windlass.tasks.evaluate.run.records import Record
from windlass.tasks.evaluate.run.settings import Settings, Wanted
from windlass.tasks.evaluate.tasks.task import parse_task

pytestmark = pytest.mark.pure

SAID = "[/INST] expected, [bold] found [/x]"


class Bars:
    def __init__(self) -> None:
        self.console = Console(file=StringIO(), width=200)

    def add_task(self, *_: object, **__: object) -> int:
        return 0


def test_a_note_is_shown_as_it_stands() -> None:
    bars = Bars()
    Bar(bars).note(SAID)
    assert bars.console.file.getvalue().strip() == SAID  # type: ignore[attr-defined]


def test_cells_and_titles_are_shown_as_they_stand() -> None:
    shown = Console(file=StringIO(), width=200)
    shown.print(table(SAID, ("one", "#two"), [[SAID, "2"]]))
    assert shown.file.getvalue().count(SAID) == 2  # type: ignore[attr-defined]


def prepared_in(folder: Path) -> Prepared:
    (folder / "sums.jsonl").write_text('{"a": 1, "b": 2, "sum": 3}')
    toml = b'name = "sums"\ncategory = "math"\nsource.file = "sums.jsonl"\nprompt.chat = "{a} + {b} ="\nanswer = "{sum}"\ngrader = "number"'
    return prepare(parse_task(toml, "sums.toml", str(folder)), Wanted(), has_chat=True)


def test_a_failure_is_shown_as_the_server_said_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepared = prepared_in(tmp_path)
    record = Record(task="sums", id=prepared.questions[0].id, verdict="failed", why=SAID)
    settings = Settings(model="m", tasks=(prepared.settings,))
    run = ModelRun(settings=settings, prepared=(prepared,), records={record.key: record})
    show_report(build([run]), measure([run], "world"), [])
    assert SAID in capsys.readouterr().out


def test_other_weights_have_another_digest(tmp_path: Path) -> None:
    """With the same config and the same shapes."""
    header = msgspec.json.encode({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})
    found: list[str] = []
    for place, data in enumerate((b"12345678", b"12345679", b"12345678")):
        folder = tmp_path / str(place)
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
        found.append(weights_digest(folder))
    assert found[0] == found[2] != found[1]
