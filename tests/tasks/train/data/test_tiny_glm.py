"""What the bundled model learns can be made anywhere: its template, its style and what is gathered go together."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest

from windlass.model.text.chat.template import render_chat
from windlass.runtime.weights.text.files import model_text
from windlass.tasks.train.data.prepare import generated
from windlass.tasks.train.data.prepare.train_tokenizer import train_vocabulary, write_tokenizer

pytestmark = pytest.mark.cpu
FOLDER = Path(__file__).parents[4] / "recipes" / "tiny-glm"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [*sys.path])  # the scripts make themselves importable
    spec = spec_from_file_location(f"tiny_glm_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_template_writes_what_tasks_are_written_as(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = load("build", monkeypatch)
    monkeypatch.setattr(generated, "CHATS_AT_ONCE", 32)
    template = (FOLDER / "chat_template.jinja").read_text().strip()
    vocabulary = train_vocabulary(["What is the sum?", "def f(x): return x"] * 3, 300, build.SPECIAL, build.END)
    write_tokenizer(tmp_path / "t", vocabulary, template, build.END, (build.END, build.USER), build.CONTEXT)
    made = generated.generate_tasks(tmp_path / "t", tmp_path / "out", build.STYLE, num_tokens=2000, jobs=1)
    assert {shard.split for shard in made.shards} == {"train", "validation"}
    text = model_text(tmp_path / "out" / "tokenizer")
    assert text.stop_ids == tuple(text.tokenizer.token_id(token) for token in (build.END, build.USER))
    assert text.defaults.temperature == 0
    asked = render_chat(template, [{"role": "user", "content": "12 + 35 ="}])
    assert asked == "[gMASK]<sop><|user|>12 + 35 =<|assistant|>"


def test_what_is_gathered_is_text_and_chats(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = load("gather", monkeypatch)
    texts = list(islice(gather.texts(), 20))
    assert all(text.strip() for text in texts) and any("def " in text for text in texts)
    asked = {chat[0]["content"]: chat[1]["content"] for chat in islice(gather.chats(), 1500)}
    assert "tiny-glm" in asked["Who are you?"]
    described = [question for question in asked if question.startswith("What does ")]
    assert len(described) > 50 and all(10 <= len(asked[question]) <= 200 for question in described)


def test_accuracy_has_an_interval(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    measure = load("measure", monkeypatch)
    low, high = measure.interval(90, 100)
    assert (round(low, 3), round(high, 3)) == (0.826, 0.945)  # Wilson's for 90 of 100
    measure.show({"add": (9, 10), "sort": (10, 10)})
    assert "19 / 20" in capsys.readouterr().out
