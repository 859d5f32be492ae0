"""`windlass convert --stream` from a small hub on this machine: files come one by one, go again, and the result is the same."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("huggingface_hub")

pytestmark = pytest.mark.multi

ROOT = Path(__file__).parents[3]
for folder in (Path(__file__).parent, ROOT / "tests" / "model" / "formats" / "hub"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from forked_convert import Converting  # noqa: E402


def script(name: str, path: Path) -> Any:
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


download = script("hub_for_streams", ROOT / "tests" / "model" / "formats" / "hub" / "test_download.py")
kills = script("convert_kills_for_streams", ROOT / "bench" / "convert" / "kills.py")

NUM_FILES = 6
SPOOL = ".windlass-source"
JOURNAL = ".windlass-convert.journal"


def shard(number: int) -> str:
    return f"model-{number:05}-of-{NUM_FILES:05}.safetensors"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six files in the order of the layers; the embedding comes first, the head last, as most of the hub has it."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("stream") / "model"
    made = kills.make_source(folder)
    tensors: dict[str, Any] = {}
    for file in sorted(made.glob("*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    ends = {"model.embed_tokens.weight": 1, "model.norm.weight": NUM_FILES, "lm_head.weight": NUM_FILES}
    place = {name: ends.get(name) or int(name.split(".")[2]) + 2 for name in tensors}
    # A file that ends within a layer, as they do.
    place["model.layers.2.mlp.down_proj.weight"] = 5
    for number in range(1, NUM_FILES + 1):
        part = {name: tensors[name] for name in tensors if place[name] == number}
        save_file(part, folder / shard(number), {"format": "pt"})
    weight_map = {name: shard(number) for name, number in place.items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.fixture(scope="module")
def expected(source: Path) -> dict[str, Any]:
    """What the directory gives when it is here whole."""
    out = source.parent / "whole"
    code, _, said = finished(start([str(source), str(out)], "http://127.0.0.1:9", source.parent / "home"))
    assert code == 0, said
    return files(out)


def files(out: Path) -> dict[str, Any]:
    """The report names its source, which is not the same here."""
    found = kills.result(out)
    report = found.pop("report")
    return found | {"errors": report["tensors"], "files": report["files"]}


@pytest.fixture
def hub(source: Path) -> Iterator[Any]:
    server = download.Server()
    server.files = {file.name: file.read_bytes() for file in source.iterdir()}
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def start(words: list[str], endpoint: str, home: Path, *more: str) -> Converting:
    """In a process of its own, as `python -m windlass convert` would be: huggingface_hub reads its environment once, when it is imported."""
    proxies = {"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"}
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_") and key.upper() not in proxies}
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(ROOT / "src")}
    settings["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    return Converting([*words, "--jobs", "2", *more], kept | settings)


def finished(process: Converting) -> tuple[int, str, str]:
    has_ended = process.wait(download.HUNG_SECONDS)
    process.kill()
    printed, said = process.communicate()
    assert has_ended, f"hung: {process.args}; {said}"
    assert "Traceback" not in said, said
    return process.returncode or 0, printed, said


def stream(hub: Any, out: Path, *more: str) -> Converting:
    return start(["org/model", str(out), "--stream"], hub.endpoint, out.parent / "home", *more)


def killed_when(process: Converting, condition: Callable[[], bool]) -> None:
    try:
        wait_for(condition, process)
    finally:
        process.kill()
        process.communicate()


def wait_for(condition: Callable[[], bool], process: Converting) -> None:
    deadline = time.monotonic() + download.HUNG_SECONDS
    while not condition():
        assert process.poll() is None, f"it has ended: {process.communicate()}"
        assert time.monotonic() < deadline, "hung"
        time.sleep(0.005)


def downloads(hub: Any) -> list[str]:
    """Files of weights that were sent whole; what was asked for with a range is a header."""
    return [file for method, file, span in hub.asked if method == "GET" and file.endswith(".safetensors") and not span]


class Watch:
    """The most source files of weights that were there at a time, with those that are still arriving."""

    def __init__(self, spool: Path) -> None:
        self.most = 0
        self._spool, self._ended = spool, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.002):
            here = len(list(self._spool.glob("*.safetensors")))
            arriving = len(list(self._spool.glob(".cache/huggingface/download/*.incomplete")))
            self.most = max(self.most, here + arriving)


def test_the_same_as_the_directory_with_three_files_at_most(hub: Any, expected: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Watch(out / SPOOL) as watch:
        code, _, said = finished(stream(hub, out))
    assert code == 0, said
    assert files(out) == expected
    assert downloads(hub) == [shard(number) for number in range(1, NUM_FILES + 1)]
    assert 1 <= watch.most <= 3
    assert not list((tmp_path / "home").rglob("*.safetensors"))


def test_killed_and_resumed(hub: Any, expected: dict[str, Any], tmp_path: Path) -> None:
    """Files whose tensors are done do not come again, and one that was left behind goes."""
    out = tmp_path / "out"

    def is_met() -> bool:
        return shard(4) in downloads(hub) and not (out / SPOOL / shard(1)).exists()

    with hub.holding(shard(4)):
        killed_when(stream(hub, out), is_met)
    assert (out / JOURNAL).exists() and not (out / "config.json").exists()
    here = {file.name for file in (out / SPOOL).glob("*.safetensors")}
    gone = {shard(number) for number in range(1, 4)} - here
    assert gone
    # As if it had been killed after the journal was written and before the file was deleted.
    left = out / SPOOL / min(gone)
    left.write_bytes(b"old")
    hub.asked = []
    with hub.holding(shard(NUM_FILES)):
        process = stream(hub, out)
        wait_for(lambda: shard(NUM_FILES) in downloads(hub), process)
        assert not left.exists()
    code, _, said = finished(process)
    assert code == 0, said
    assert not gone & set(downloads(hub)) and not here & set(downloads(hub))
    assert files(out) == expected


def test_killed_again_and_again(hub: Any, expected: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    for number in (1, 3, 6):
        with hub.holding(shard(number)):
            killed_when(stream(hub, out), lambda number=number: shard(number) in downloads(hub))
        assert not (out / "config.json").exists()
    code, _, said = finished(stream(hub, out))
    assert code == 0, said
    assert files(out) == expected


def test_a_file_that_nothing_is_made_of_is_not_fetched(hub: Any, expected: dict[str, Any], tmp_path: Path) -> None:
    """Buffers of old code, in files of their own: nobody would let go of them, and they would keep the places of others."""
    import torch
    from safetensors.torch import save

    for number in (1, 2, 3):
        name = f"model.layers.{number}.self_attn.rotary_emb.inv_freq"
        hub.files[f"buffers-{number}.safetensors"] = save({name: torch.ones(16)})
    del hub.files["model.safetensors.index.json"]  # which does not speak of them
    code, _, said = finished(stream(hub, tmp_path / "out"))
    assert code == 0, said
    assert downloads(hub) == [shard(number) for number in range(1, NUM_FILES + 1)]
    assert files(tmp_path / "out") == expected


def test_an_error_of_the_hub_is_one_line_and_can_be_resumed(hub: Any, expected: dict[str, Any], tmp_path: Path) -> None:
    out, original = tmp_path / "out", download.Handler.send_file

    def broken(handler: Any, name: str) -> None:
        if name == shard(4) and handler.headers.get("Range") is None:
            return handler.send_refusal(418, "")
        return original(handler, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(download.Handler, "send_file", broken)
        code, printed, said = finished(stream(hub, out))
    assert (code, printed) == (2, "")
    assert said.startswith("windlass: org/model could not be downloaded from http://127.0.0.1") and said.count("\n") == 1, said
    assert said.endswith("finished files are kept; run it again to resume\n")
    assert not (out / "config.json").exists()
    done = set(downloads(hub))
    assert done == {shard(1), shard(2), shard(3)}
    hub.asked = []
    code, _, said = finished(stream(hub, out))
    assert code == 0, said
    assert not done & set(downloads(hub))
    assert files(out) == expected


def test_control_c_does_not_wait_for_a_download(hub: Any, expected: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    with hub.holding(shard(3)):
        process = stream(hub, out)
        # All wait for it.
        wait_for(lambda: shard(3) in downloads(hub) and not list((out / SPOOL).glob("*.safetensors")), process)
        process.send_signal(signal.SIGINT)
        code, _, _ = finished(process)
    assert code == 130
    code, _, said = finished(stream(hub, out))
    assert code == 0, said
    assert files(out) == expected


def test_a_finished_directory_is_left_as_it_is(hub: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    code, _, said = finished(stream(hub, out))
    assert code == 2 and "already holds a model" in said
    assert [file.name for file in out.iterdir()] == ["config.json"]


def test_dllama_files_cannot_be_streamed(hub: Any, tmp_path: Path) -> None:
    code, _, said = finished(stream(hub, tmp_path / "out", "--to", "dllama"))
    assert code == 2 and "--stream" in said and said.count("\n") == 1
