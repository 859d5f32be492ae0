"""Tokenizers that would take a server with them."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers")

from windlass.errors import BadInput, MissingExtra
from windlass.runtime.weights.text import trial
from windlass.runtime.weights.text.trial import try_text

pytestmark = pytest.mark.pure

WORDS: dict[str, Any] = {"type": "WordLevel", "vocab": {"hello": 0, "<s>": 1}, "unk_token": "[UNK]"}


def model(folder: Path, **changes: Any) -> Path:
    values = {"version": "1.0", "added_tokens": [], "model": WORDS, "pre_tokenizer": {"type": "Whitespace"}} | changes
    (folder / "tokenizer.json").write_text(json.dumps(values))
    (folder / "config.json").write_text("{}")
    return folder


def test_one_that_can_be_built_passes_even_if_it_refuses_texts(tmp_path: Path) -> None:
    try_text(model(tmp_path))


def test_one_that_cannot_be_built_says_why(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"tokenizer\.json is not a tokenizer"):
        try_text(model(tmp_path, model={"type": "Nothing"}))


def test_one_that_takes_all_memory_ends_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rust ends a process that gets no memory."""
    monkeypatch.setattr(trial, "MEMORY_BYTES", 2**28)
    frame = [{"SpecialToken": {"id": "<s>", "type_id": 0}}] * 3 + [{"Sequence": {"id": "A", "type_id": 0}}]
    tokens = {"<s>": {"id": "<s>", "ids": [1] * 2000, "tokens": ["<s>" * 1000] * 2000}}
    processor = {"type": "TemplateProcessing", "single": frame * 300, "pair": frame, "special_tokens": tokens}
    with pytest.raises(BadInput, match=r"ends the process that builds it .*SIGABRT"):
        try_text(model(tmp_path, post_processor=processor, model=WORDS | {"unk_token": "hello"}))


@pytest.mark.parametrize(("code", "how"), [(-signal.SIGSEGV, "SIGSEGV"), (-signal.SIGPROF, "SIGPROF"), (1, "exit code 1")])
def test_how_it_ended_is_told(code: int, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], code, b"", b""))
    with pytest.raises(BadInput, match=how):
        try_text(tmp_path)


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), MissingExtra("tokenizers", "run", "text")])
def test_what_is_wrong_with_the_machine_is_said_too(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(_: Path) -> None:
        raise error

    monkeypatch.setattr(trial, "model_text", failing)
    monkeypatch.setattr(trial, "limit_memory", lambda _: None)
    for name in ("resource.setrlimit", "signal.setitimer"):
        monkeypatch.setattr(f"windlass.runtime.weights.text.trial.{name}", lambda *_: None)
    assert trial.main(tmp_path, 2**30) == trial.REFUSED
    assert capsys.readouterr().out == str(error)
