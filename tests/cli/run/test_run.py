"""`windlass run` with a client that is not a model: what is asked, shown, piped, interrupted, saved and refused."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import pty
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from windlass.cli import execute as cli
from windlass.cli.run.chat import Chat
from windlass.cli.run.options import ChatSettings, RunOptions, settings_from
from windlass.cli.run.screen import Screen
from windlass.cli.run.session import launch_for, start
from windlass.core.client import SyncClient
from windlass.core.launch import Launch, check_launch
from windlass.core.layout import Layout
from windlass.core.plan import load_plan
from windlass.core.request import Delta, Info, Sampling
from windlass.errors import BadInput, DoesNotFit, Error, Impossible, UnknownName
from windlass.open.generation import from_config
from windlass.open.scheme import stored_scheme

pytestmark = pytest.mark.pure


def _load_fake() -> ModuleType:
    """InlineFleet this file; tests are no package."""
    spec = importlib.util.spec_from_file_location("fake_client", Path(__file__).with_name("fake_client.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fake = _load_fake()
FakeClient, opener_of, HUNG_SECONDS = fake.FakeClient, fake.opener_of, fake.HUNG_SECONDS

BASE = Info(model="base", context_tokens=64, has_chat=False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def ask(model: Path, client: Any, **words: Any) -> int:
    return start(str(model), RunOptions(**{"prompt": "Hi", **words}), opener_of(client))


# --- one answer


def test_an_answer_alone_goes_to_standard_output(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient([Delta(reasoning="Hm.", token_ids=(9,)), *FakeClient().deltas])
    assert ask(model, client, system="Be brief.", temperature=0.5, top_k=3, seed=1, max_tokens=9) == 0
    printed = capsys.readouterr()
    assert printed.out == "Hello you\n"
    assert "4 tokens" in printed.err and "30 tokens/s" in printed.err and "first after" in printed.err
    assert "prompt of 7, 2 of them cached" in printed.err
    (request,) = client.requests
    assert request.messages == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"})
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.seed, request.max_tokens) == (0.5, 3, 1, 9)
    assert client.closed


def test_json_has_everything(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient([Delta(reasoning="Hm.", token_ids=(9,)), *FakeClient().deltas])
    assert ask(model, client, as_json=True) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert printed.err == ""
    assert (found["content"], found["reasoning"], found["finish_reason"]) == ("Hello you", "Hm.", "stop")
    assert found["usage"]["prompt_tokens"] == 7 and found["tokens_per_second"] == pytest.approx(30)
    assert found["time_to_first_token_seconds"] > 0
    assert found["token_ids"] == [token for delta in client.deltas for token in delta.token_ids] and found["token_ids"][0] == 9


def looping() -> list[Delta]:
    return [Delta(content=f"w{step % 3} ", token_ids=(500 + step % 3,)) for step in range(400)]


def test_an_answer_that_only_repeats_itself_is_stopped_and_said(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient(looping())
    assert ask(model, client) == 0
    printed = capsys.readouterr()
    assert client.cancelled and printed.out.count("w0") < 60
    assert "it only repeated itself (--allow-loops lets it" in printed.err
    again = FakeClient(looping())
    assert ask(model, again, allow_loops=True) == 0
    assert not again.cancelled and "repeated itself" not in capsys.readouterr().err


def test_a_stopped_loop_is_named_in_json(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(model, FakeClient(looping()), as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["finish_reason"] == "loop"


def test_the_sampling_is_shown_as_numbers_and_is_the_servers(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from windlass.cli.serve.openers import sampling_of
    from windlass.open.generation import DEFAULTS

    (model / "generation_config.json").write_text('{"top_k": 20, "temperature": 0.6}')
    client = FakeClient()
    assert ask(model, client) == 0
    assert "temperature 0.6, top_p 0.95, top_k 20" in capsys.readouterr().err
    assert client.requests[0].sampling == sampling_of(model)
    (model / "generation_config.json").unlink()
    assert ask(model, client) == 0
    assert client.requests[1].sampling == sampling_of(model) == Sampling(**DEFAULTS)


@pytest.mark.parametrize("prompt", [None, "-"])
def test_the_prompt_may_be_piped(model: Path, monkeypatch: pytest.MonkeyPatch, prompt: str | None) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    client = FakeClient()
    assert ask(model, client, prompt=prompt) == 0
    assert client.requests[0].messages[0]["content"] == "two\nlines"


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_prompt_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    with pytest.raises(BadInput, match="prompt is empty"):
        ask(model, FakeClient(), prompt=None)


def test_a_base_model_is_given_the_text_as_it_is(model: Path) -> None:
    client = FakeClient(info=BASE)
    assert ask(model, client) == 0
    assert client.requests[0].prompt == "Hi" and client.requests[0].messages is None
    with pytest.raises(BadInput, match="no chat template"):
        ask(model, client, system="x")


def test_without_a_tokenizer_nothing_is_asked(model: Path) -> None:
    with pytest.raises(BadInput, match="no tokenizer"):
        ask(model, FakeClient(info=Info(model="dumb", context_tokens=8, has_text=False)))


def test_ctrl_c_cancels_the_request(model: Path) -> None:
    client = FakeClient(interrupt_after=1)
    with pytest.raises(KeyboardInterrupt):
        ask(model, client)
    assert client.cancelled and client.closed


# --- settings


def test_sampling_comes_from_the_user_the_model_and_the_defaults(model: Path) -> None:
    (model / "generation_config.json").write_text('{"temperature": 0.2, "top_p": 0.9, "top_k": 50, "eos_token_id": 2}')
    client = FakeClient()
    ask(model, client, temperature=0.0)
    sampling = client.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 0.9, 50)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        ({"do_sample": False, "temperature": 0.9}, {"temperature": 0.0}),
        ({"temperature": 1, "top_k": 0, "top_p": True}, {"temperature": 1}),
        ({"temperature": "hot", "top_p": None, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"temperature": -3.0}, {}),
    ],
)
def test_what_of_a_generation_config_is_used(config: dict[str, Any], expected: dict[str, Any]) -> None:
    assert from_config(config) == expected


def test_settings_change_one_by_one() -> None:
    settings = settings_from(RunOptions(seed=3), {})
    for name, text in (("temperature", "0.5"), ("top-k", "7"), ("seed", "off"), ("max_tokens", "9"), ("thinking", "off")):
        settings.change(name, text)
    assert (
        settings.sampling_params().temperature == 0.5
        and settings.sampling_params().top_k == 7
        and settings.sampling_params().seed is None
    )
    assert settings.max_tokens == 9 and settings.thinking is False
    for name, text, error in (
        ("temperature", "-1", BadInput),
        ("temperature", "warm", BadInput),
        ("max_tokens", "0", BadInput),
        ("thinking", "perhaps", BadInput),
        ("temprature", "1", UnknownName),
    ):
        with pytest.raises(error):
            settings.change(name, text)
    assert settings.sampling_params().temperature == 0.5


@pytest.mark.parametrize("words", [{"temperature": -1.0}, {"top_p": 0.0}, {"max_tokens": 0}])
def test_bad_words_are_refused(model: Path, words: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        ask(model, FakeClient(), **words)


@pytest.mark.parametrize("changes", [{"device": "tpu"}, {"kv": "int3"}, {"context_tokens": 1}])
def test_bad_launch_options_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        check_launch(Launch(**changes))


# --- a chat


class Recorder(io.StringIO):
    pass


def chat_of(client: Any, lines: list[str | type[BaseException]], system: str | None = None) -> tuple[Chat, str, str]:
    out, remarks = Recorder(), Recorder()
    script: Iterator[str | type[BaseException]] = iter([*lines, EOFError])

    def read(prompt: str) -> str:
        line = next(script)
        if isinstance(line, str):
            return line
        raise line

    with SyncClient(client) as sync:
        chat = Chat(sync, client.details, ChatSettings(), Screen(out, remarks), system)
        chat.loop(read)
    assert list(script) == [], "the chat ended before its lines did"
    return chat, out.getvalue(), remarks.getvalue()


def test_a_chat_remembers(tmp_path: Path) -> None:
    client = FakeClient([Delta(reasoning="Hm.", token_ids=(1,)), Delta(content="Yes", token_ids=(2,))])
    chat_of(client, ["One", "/system Be brief.", "Two"])
    assert client.requests[0].messages == ({"role": "user", "content": "One"},)
    assert client.requests[1].messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Yes", "reasoning_content": "Hm."},
        {"role": "user", "content": "Two"},
    )


def test_clear_forgets() -> None:
    client = FakeClient()
    _, _, remarks = chat_of(client, ["One", "/tokens", "/clear", "/tokens", "Two"])
    assert client.requests[1].messages == ({"role": "user", "content": "Two"},)
    assert "10 of 4,096 tokens used" in remarks and "\n0 of 4,096" in remarks


def test_several_lines_at_once() -> None:
    client = FakeClient()
    chat_of(client, ['"""one', "two", 'three"""', '"""four"""'])
    assert [request.messages[-1]["content"] for request in client.requests] == ["one\ntwo\nthree", "four"]


def test_commands_say_what_is_wrong_and_the_chat_goes_on() -> None:
    client = FakeClient()
    lines = [
        "/hlep",
        "/set",
        "/set temperature",
        "/set temperature hot",
        "/set temperature 0.3",
        "/save",
        "/load /no/such/file",
        "/save /no/such/dir/x",
        "",
        "Hi",
    ]
    _, out, remarks = chat_of(client, lines)
    for words in (
        "did you mean /help",
        "temperature -",
        "needs a value",
        "should be a number",
        "temperature: 0.3",
        "needs one file",
        "cannot be read",
        "cannot be written",
    ):
        assert words in remarks
    assert client.requests[0].sampling.temperature == 0.3 and len(client.requests) == 1 and out == "Hello you\n"


def test_a_chat_is_saved_and_loaded(tmp_path: Path) -> None:
    file = tmp_path / "a chat.json"
    chat_of(FakeClient(), ["One", f"/save '{file}'"], system="Be brief.")
    client = FakeClient()
    _, _, remarks = chat_of(client, [f"/load '{file}'", "Two"])
    assert "2 messages of a chat with fake" in remarks
    assert [message["content"] for message in client.requests[0].messages] == ["Be brief.", "One", "Hello you", "Two"]
    file.write_text('{"messages": 3}')
    assert "not a saved chat" in chat_of(FakeClient(), [f"/load '{file}'"])[2]


def test_ctrl_c_stops_the_answer_and_not_the_chat() -> None:
    client = FakeClient(interrupt_after=1)
    _, out, remarks = chat_of(client, ["One", "Two"])
    assert client.cancelled and out == "Hello\nHello you\n" and "stopped" in remarks
    assert [message["content"] for message in client.requests[1].messages] == ["One", "Hello", "Two"]


def test_stopped_before_a_word_counts_as_not_asked() -> None:
    client = FakeClient(interrupt_after=0)
    chat_of(client, ["One", "Two"])
    assert client.requests[1].messages == ({"role": "user", "content": "Two"},)


def test_ctrl_c_twice_leaves() -> None:
    client = FakeClient()
    with pytest.raises(AssertionError, match="before its lines did"):
        chat_of(client, [KeyboardInterrupt, KeyboardInterrupt, "never asked"])
    assert client.requests == []
    _, _, remarks = chat_of(client, [KeyboardInterrupt, "One", KeyboardInterrupt, "Two"])
    assert len(client.requests) == 2 and remarks.count("Ctrl-C again") == 2


def test_a_full_context_is_said_and_the_question_taken_back() -> None:
    client = FakeClient(refuse_from=1)
    _, _, remarks = chat_of(client, ["One", "Two", "/clear"])
    assert "does not fit in 4,096 (/clear starts a new chat)" in remarks


def test_a_base_model_continues_each_text_on_its_own() -> None:
    client = FakeClient(info=BASE)
    _, _, remarks = chat_of(client, ["One", "/system x", "Two"])
    assert [request.prompt for request in client.requests] == ["One", "Two"] and "no chat template" in remarks


# --- a terminal

PTY_PROGRAM = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("fake_client", sys.argv[1])
fake = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fake)
from windlass.cli.run.options import RunOptions
from windlass.cli.run.session import start
from windlass.core.request import Delta
deltas = [Delta(reasoning="Hm.", token_ids=(1,)), Delta(content="Hi\\x1b]0;evil\\x07", token_ids=(2,)), Delta(content=" there", token_ids=(3,))]
sys.exit(start(sys.argv[2], RunOptions(), fake.opener_of(fake.FakeClient(deltas, interrupt_after=2))))
"""


def test_on_a_terminal(model: Path, tmp_path: Path) -> None:
    """Reasoning is dim, a model cannot steer the terminal, Ctrl-C and Ctrl-D do what they should, and history is kept."""
    parent, child = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "XDG_STATE_HOME": str(tmp_path), "TERM": "xterm"}
    environment.pop("NO_COLOR", None)
    arguments = [sys.executable, "-c", PTY_PROGRAM, str(Path(__file__).with_name("fake_client.py")), str(model)]
    program = subprocess.Popen(arguments, stdin=child, stdout=child, stderr=child, env=environment, start_new_session=True)
    os.close(child)
    try:
        terminal = Reader(parent)
        terminal.until(">>> ")
        os.write(parent, b"One\n")
        terminal.until("stopped")  # the fake presses Ctrl-C in the middle of its answer
        terminal.until(">>> ")
        os.write(parent, b"Two\n")
        terminal.until("there")
        terminal.until(">>> ")
        os.write(parent, b"\x04")
        assert program.wait(timeout=HUNG_SECONDS) == 0
    finally:
        program.kill()
        program.wait()
        os.close(parent)
    shown = terminal.shown.decode()
    assert "\x1b[2mHm.\x1b[0m" in shown and "\x1b]0" not in shown and "Hi\N{REPLACEMENT CHARACTER}]0;evil" in shown
    history = tmp_path / "windlass" / "history"
    assert "One" in history.read_text() and history.stat().st_mode & 0o077 == 0


class Reader:
    """What a terminal shows, read up to the words that are waited for."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.shown, self._read = descriptor, b"", 0

    def until(self, words: str) -> None:
        while (found := self.shown.find(words.encode(), self._read)) < 0:
            ready, _, _ = select.select([self.descriptor], [], [], HUNG_SECONDS)
            assert ready, f"hung: waited for {words!r}, saw {self.shown!r}"
            self.shown += os.read(self.descriptor, 4096)
        self._read = found + len(words)


# --- models and plans


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["./no-such-model"], 2, "does not exist"),
        (["missing.gguf"], 2, "does not exist"),
        (["GLM-4.5-Bair"], 2, "GLM-4.5-Air"),
        (["GLM-4.5-Air", "--temperature", "warm"], 2, "--temperature"),
        (["GLM-4.5-Air", "--json"], 2, "--json prints one answer"),
        ([], 2, "MODEL"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], code: int, expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", terminal)
    assert cli(["run", *words]) == code
    printed = capsys.readouterr()
    assert printed.out == "" and expected in printed.err and printed.err.count("\n") == 1


def test_the_prompt_may_stand_behind_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """As other tools take it: `run MODEL why is the sky blue`."""
    asked: list[str | None] = []
    monkeypatch.setattr("windlass.cli.run.session.start", lambda model, options: asked.append(options.prompt) or 0)
    for words in (["Why blue?"], ["Why", "blue?"], ["--prompt", "Why blue?"], []):
        assert cli(["run", "tiny-glm", *words]) == 0
    assert asked == ["Why blue?", "Why blue?", "Why blue?", None]


CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}
PACKED = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
}


def write_config(model: Path, **changes: Any) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | changes))


def planned(model: Path, tmp_path: Path, *words: str) -> Path:
    file = tmp_path / "plan.json"
    words = ("--quant", "bf16", *words) if "--quant" not in words else words
    words = ("--on", "cpu:2,ram=8GB", *words) if "--on" not in words else words
    assert cli(["plan", str(model), "--context", "256", "--save", str(file), *words]) == 0
    return file


def test_a_plan_is_honoured(model: Path, tmp_path: Path) -> None:
    write_config(model)
    file = planned(model, tmp_path, "--kv", "fp32", "--concurrency", "3")
    seen: list[Launch] = []
    assert start(str(model), RunOptions(prompt="Hi", plan=file), opener_of(FakeClient(), seen)) == 0
    kv_bytes = load_plan(file.read_bytes()).memory.per_device[0].kv_bytes
    assert seen == [Launch(model=str(model), device="cpu", kv="fp32", context_tokens=256, max_sequences=3, kv_bytes=kv_bytes)]


def test_a_plan_of_several_processes_is_honoured(model: Path, tmp_path: Path) -> None:
    """Its layout, shares and stages are what is run; keys and values are counted once, however many ranks there are."""
    write_config(model)
    one = load_plan(planned(model, tmp_path, "--kv", "fp32").read_bytes())
    file = planned(model, tmp_path, "--kv", "fp32", "--pp", "2")
    found, plan = launch_for(model, RunOptions(plan=file)), load_plan(file.read_bytes())
    assert plan.placement is not None and len(plan.placement.stages) == 2
    assert found.layout == Layout(pp=2) and found.kv_bytes == one.memory.per_device[0].kv_bytes
    assert found.planned is not None
    assert (found.planned.nodes, found.planned.stages) == ((0, 0), plan.placement.stages)


UNLIKE = "1x(cpu:2,ram=8GB,bw=30GB)+1x(cpu:2,ram=8GB,bw=10GB)@1Gb"


def test_a_plan_of_several_machines_wants_as_many(model: Path, tmp_path: Path) -> None:
    write_config(model)
    file, secret = planned(model, tmp_path, "--on", UNLIKE, "--tp", "2"), str(tmp_path / "secret")
    found = launch_for(model, RunOptions(plan=file, launch=Launch(workers=("a:9998",), secret_file=secret))).planned
    assert found is not None and found.nodes == (0, 1) and found.shares[0] > found.shares[1]
    for launch, words in (
        (Launch(), "2 machines, this one and 1 worker, and none is named"),
        (Launch(workers=("a:9998", "b:9998"), secret_file=secret), "and 2 are named"),
    ):
        with pytest.raises(BadInput, match=words):
            launch_for(model, RunOptions(plan=file, launch=launch))
    alone = planned(model, tmp_path, "--pp", "2")
    with pytest.raises(BadInput, match="this machine alone"):
        launch_for(model, RunOptions(plan=alone, launch=Launch(workers=("a:9998",), secret_file=secret)))
    with pytest.raises(BadInput, match="leave --tp, --pp and --ep out"):
        launch_for(model, RunOptions(plan=alone, launch=Launch(layout=Layout(tp=2))))


@pytest.mark.parametrize(
    ("words", "expected"), [({"kv": "bf16"}, "contradicts the plan"), ({"context_tokens": 128}, "contradicts the plan")]
)
def test_words_against_the_plan_are_refused(model: Path, tmp_path: Path, words: dict[str, Any], expected: str) -> None:
    write_config(model)
    file = planned(model, tmp_path, "--kv", "fp32")
    with pytest.raises(BadInput, match=expected):
        launch_for(model, RunOptions(plan=file, launch=Launch(**words)))


def test_a_plan_for_other_files_is_refused(model: Path, tmp_path: Path) -> None:
    write_config(model)
    file = planned(model, tmp_path)
    write_config(model, hidden_size=32)
    with pytest.raises(BadInput, match="another model"):
        launch_for(model, RunOptions(plan=file))
    write_config(model, initializer_range=0.03)  # the same shape, other files
    with pytest.raises(BadInput, match="digest differs"):
        launch_for(model, RunOptions(plan=file))


def test_a_plan_for_fewer_bits_asks_for_conversion(model: Path, tmp_path: Path) -> None:
    write_config(model)
    file = planned(model, tmp_path, "--quant", "int4", "--group", "32")
    with pytest.raises(BadInput, match=r"convert .* --quant int4"):
        launch_for(model, RunOptions(plan=file))
    write_config(model, quantization_config=PACKED)  # what the conversion would have written
    assert launch_for(model, RunOptions(plan=file)).context_tokens == 256


def test_plans_that_cannot_be_run_here(model: Path, tmp_path: Path) -> None:
    write_config(model)
    file = planned(model, tmp_path)
    plan = json.loads(file.read_text())
    for changes, error, words in (
        ({"engine": "vllm"}, Impossible, "plan is for vllm"),
        ({"fits": False, "short_bytes": 10**9}, DoesNotFit, "short"),
        ({"layout": {**plan["layout"], "dp": 2}}, Impossible, "2 replicas"),
        ({"train": {}}, BadInput, "training"),
    ):
        file.write_text(json.dumps(plan | changes))
        with pytest.raises(error, match=words):
            launch_for(model, RunOptions(plan=file))
    file.write_text("{")
    with pytest.raises(Error, match="not a plan"):
        launch_for(model, RunOptions(plan=file))
    with pytest.raises(BadInput, match="cannot be read"):
        launch_for(model, RunOptions(plan=tmp_path / "none.json"))


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (None, ("bf16", None)),
        (PACKED, ("int4", 32)),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 8, "type": "float"}}}},
            ("fp8", None),
        ),
        ({"quant_method": "mxfp4"}, ("mxfp4", None)),
        ({"quant_method": "compressed-tensors", "config_groups": 3}, ("unknown", None)),
    ],
)
def test_how_files_are_stored(section: Any, expected: tuple[str, int | None]) -> None:
    assert stored_scheme({"quantization_config": section} if section else {}) == expected


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["run", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--temperature" in shown and "windlass run" in shown
