"""Downloads from a small hub on this machine: whole models, interruptions, and one shard at a time."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import hub_processes
import pytest

from waiting import HUNG_SECONDS
from windlass.model.formats.hub.hub import WITHOUT_HUB, select_files
from windlass.model.formats.hub.progress import DownloadProgress, reporting

pytestmark = pytest.mark.pure

COMMIT = "0123456789abcdef0123456789abcdef01234567"
HEADER = json.dumps({"a": {"dtype": "U8", "shape": [300_000], "data_offsets": [0, 300_000]}}).encode()
SHARD = len(HEADER).to_bytes(8, "little") + HEADER + bytes(range(250)) * 1200


class Server(ThreadingHTTPServer):
    """A hub with one model, org/model, and a memory of what was asked of it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.asked: list[tuple[str, str, str]] = []
        """(method, file, Range) of every request for a file."""
        self.breaks: dict[str, int] = {}
        """File -> after how many bytes its first download breaks off."""
        self.gated = False
        self.held: dict[str, threading.Event] = {}
        """File -> what the second half of it waits for, where all of it was asked for."""
        self.gathered = 0
        """So many downloads wait for each other, half done."""
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def downloads(self) -> list[str]:
        return [file for method, file, _ in self.asked if method == "GET"]

    @contextmanager
    def holding(self, *files: str) -> Iterator[None]:
        """Their second halves are not sent until the block ends."""
        let = threading.Event()
        self.held = dict.fromkeys(files, let)
        try:
            yield
        finally:
            self.held = {}
            let.set()

    def until_asked(self, file: str) -> None:
        with self.changed:
            found = self.changed.wait_for(lambda: file in self.downloads(), HUNG_SECONDS)
        assert found, f"hung: nobody asked for {file}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that were killed are part of the tests."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = self.path.split("?")[0]
        if path.startswith("/api/models/org/model/tree"):
            self.send_json([self.described(name) for name in self.server.files])
        elif path.startswith("/api/models/org/model"):
            siblings = [self.described(name) | {"rfilename": name} for name in self.server.files]
            self.send_json({"id": "org/model", "modelId": "org/model", "sha": COMMIT, "siblings": siblings, "tags": []})
        elif found := re.fullmatch(r"/org/model/resolve/[^/]+/(.+)", path):
            self.send_file(found[1])
        else:
            self.send_refusal(404, "RepoNotFound")

    def described(self, name: str) -> dict[str, Any]:
        content = self.server.files[name]
        digest = hashlib.sha256(content).hexdigest()
        lfs = {"sha256": digest, "oid": digest, "size": len(content), "pointerSize": 1} if name.endswith(("s", "bin")) else None
        about: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": digest, "blobId": digest}
        return about | ({"lfs": lfs} if lfs else {})

    def send_json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_refusal(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send_file(self, name: str) -> None:
        content = self.server.files.get(name)
        with self.server.changed:
            self.server.asked.append((self.command, name, self.headers.get("Range", "")))
            self.server.changed.notify_all()
        if self.server.gated:
            return self.send_refusal(403, "GatedRepo")
        if content is None:
            return self.send_refusal(404, "EntryNotFound")
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start = int(span[1]) if span else 0
        stop = min(int(span[2]) + 1, len(content)) if span and span[2] else len(content)
        self.send_response(206 if span else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Content-Length", str(stop - start))
        if span:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
        self.end_headers()
        return self.send_body(name, content[start:stop]) if self.command == "GET" else None

    def send_body(self, name: str, body: bytes) -> None:
        server = self.server
        with server.changed:
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
            stop = server.breaks.pop(name, len(body))
            server.changed.notify_all()
        self.wfile.write(body[: stop // 2])
        self.wfile.flush()
        if name in server.held and len(body) == len(server.files[name]):  # a part of it may be its header
            assert server.held[name].wait(HUNG_SECONDS), "hung: nobody let it go on"
        with server.changed:
            assert server.changed.wait_for(lambda: server.most_at_once >= server.gathered, HUNG_SECONDS), "hung: alone"
            server.at_once -= 1  # before whoever reads it can be done, and ask for the next
        self.wfile.write(body[stop // 2 : stop])
        self.wfile.flush()
        if stop < len(body):
            self.close_connection = True
            self.connection.shutdown(2)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Server]:
    pytest.importorskip("huggingface_hub")
    server = Server()
    server.files = {
        "config.json": b"{}",
        "tokenizer.json": b'{"tokens": []}',
        "model-00001-of-00002.safetensors": SHARD,
        "model-00002-of-00002.safetensors": SHARD[:-1] + b"!",
        "pytorch_model.bin": b"never",
        "consolidated.safetensors": b"never",
        "original/params.json": b"never",
        "training_args.bin": b"never",
    }
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


BEGIN = """
import sys
from pathlib import Path
from windlass.errors import Error
from windlass.model.formats.hub.hub import *
try:
"""
END = """
except Error as error:
    print(error)
    sys.exit(error.exit_code)
"""
PULL = "    print(pull('org/model'))"


def python(code: str, endpoint: str, home: Path, **more: str) -> hub_processes.Process:
    proxies = {"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"}
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_") and key.upper() not in proxies}
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return hub_processes.start(BEGIN + code + END, environment=kept | settings | more)


def run(code: str, endpoint: str, home: Path, **more: str) -> tuple[int | None, str]:
    process = python(code, endpoint, home, **more)
    output, trouble = process.ended()
    assert "Traceback" not in trouble, trouble
    return process.returncode, output.removesuffix("\n")


# --- the whole model -------------------------------------------------------------------------------------------------


def test_pull(hub: Server, tmp_path: Path) -> None:
    code, found = run(PULL, hub.endpoint, tmp_path)
    assert code == 0
    names = {"config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    assert {file.name for file in Path(found).iterdir()} == names
    for name in names:
        assert (Path(found) / name).read_bytes() == hub.files[name]
    assert sorted(hub.downloads()) == sorted(names)


def test_pytorch_files_only_where_there_is_nothing_else(hub: Server, tmp_path: Path) -> None:
    hub.files = {name: content for name, content in hub.files.items() if not name.endswith(".safetensors")}
    code, found = run(PULL, hub.endpoint, tmp_path)
    assert code == 0 and {file.name for file in Path(found).iterdir()} == {"config.json", "tokenizer.json", "pytorch_model.bin"}


def test_a_model_without_weights(hub: Server, tmp_path: Path) -> None:
    hub.files = {"config.json": b"{}"}
    assert run(PULL, hub.endpoint, tmp_path) == (2, "org/model on the hub has neither safetensors nor PyTorch weights")


def test_a_broken_connection_is_taken_up_where_it_broke(hub: Server, tmp_path: Path) -> None:
    """To the last whole chunk, that is: huggingface_hub writes ten megabytes at a time."""
    shard = "model-00001-of-00002.safetensors"
    hub.files[shard] = random.Random(0).randbytes(25_000_000)
    hub.breaks = {shard: 15_000_000}
    code, found = run(PULL, hub.endpoint, tmp_path)
    assert code == 0 and (Path(found) / shard).read_bytes() == hub.files[shard]
    ranges = [span for method, file, span in hub.asked if method == "GET" and file == shard]
    assert ranges[0] == "" and re.fullmatch(r"bytes=\d+-", ranges[1]) and len(ranges) == 2
    assert 0 < int(ranges[1][6:-1]) <= 15_000_000


def test_a_killed_download_keeps_the_files_that_arrived(hub: Server, tmp_path: Path) -> None:
    slow = "model-00002-of-00002.safetensors"
    with hub.holding(slow):
        process = python("    print(pull('org/model', max_workers=1))", hub.endpoint, tmp_path)
        try:
            hub.until_asked(slow)
        finally:
            process.kill()
            process.ended()
    earlier = [file for file in hub.downloads() if file != slow]
    assert earlier
    hub.asked = []
    code, found = run(PULL, hub.endpoint, tmp_path)
    assert code == 0 and (Path(found) / slow).read_bytes() == hub.files[slow]
    assert not set(hub.downloads()) & set(earlier)
    assert not list(tmp_path.rglob("*.incomplete"))  # what the killed process left


def test_as_many_at_once_as_asked_for(hub: Server, tmp_path: Path) -> None:
    """Four, that is, as soon as two have met: some files are so small that they are gone before the others come."""
    run("    pull('org/model', max_workers=1)", hub.endpoint, tmp_path / "one")
    assert hub.most_at_once == 1
    hub.gathered = 2
    run("    pull('org/model', max_workers=4)", hub.endpoint, tmp_path / "four")
    assert 2 <= hub.most_at_once <= 4


def test_progress_is_told_in_bytes(hub: Server, tmp_path: Path) -> None:
    with hub.holding("model-00002-of-00002.safetensors"):
        code = "    pull('org/model', progress=lambda done, total: print(done, total, flush=True))"
        process = python(code, hub.endpoint, tmp_path)
        first = process.stdout.readline()  # while there is something to wait for
    told, trouble = process.ended()
    assert process.returncode == 0, trouble
    seen = [tuple(map(int, line.split())) for line in (first + told).splitlines()]
    total = 2 * len(SHARD) + len(b'{}{"tokens": []}')
    assert seen[-1] == (total, total) and len(seen) >= 2
    assert seen == sorted(seen) and {of for _, of in seen} == {total}


def test_a_gated_model_says_where_to_ask(hub: Server, tmp_path: Path) -> None:
    hub.gated = True
    code, message = run(PULL, hub.endpoint, tmp_path)
    page = f"{hub.endpoint}/org/model"
    assert code == 2
    assert message == f"org/model is gated: request access on its hub page, {page}, then set HF_TOKEN or run `hf auth login`"


def test_a_model_that_is_not_there(hub: Server, tmp_path: Path) -> None:
    code, message = run("    pull('org/absent')", hub.endpoint, tmp_path)
    assert (code, message) == (2, "model org/absent not found on the hub (if it is private, set HF_TOKEN)")


def test_what_is_here_is_enough_without_the_hub(hub: Server, tmp_path: Path) -> None:
    pulled = run(PULL, hub.endpoint, tmp_path)
    assert pulled[0] == 0
    assert run(PULL, hub.endpoint, tmp_path, HF_HUB_OFFLINE="1") == pulled
    code, message = run("    pull('org/other')", hub.endpoint, tmp_path, HF_HUB_OFFLINE="1")
    assert (code, message) == (2, f"org/other is not on this disk, and the hub cannot be reached; {WITHOUT_HUB}")


def test_half_of_a_model_is_not_enough(hub: Server, tmp_path: Path) -> None:
    pulled = run(PULL, hub.endpoint, tmp_path)
    (Path(pulled[1]) / "model-00002-of-00002.safetensors").unlink()
    assert run(PULL, hub.endpoint, tmp_path, HF_HUB_OFFLINE="1")[0] == 2


# --- one shard at a time ---------------------------------------------------------------------------------------------

STREAM = """
    import os, time
    from urllib import request
    model_url = os.environ['HF_ENDPOINT'] + '/org/model/resolve/main'
    folder = Path(sys.argv[0] + '{folder}')
    model = list_files('org/model')
    fetch_small_files(model, folder)
    print(sorted(file.name for file in folder.iterdir() if file.is_file()))
    for path, last in stream_shards(model, folder, skip={skip}):
        here = []
        while len(here) < (1 if last else 2):
            time.sleep(0.005)
            here = sorted(file.name[6:11] for file in folder.glob('*.safetensors'))
        print(path.name, path.stat().st_size, last, *here)
        request.urlopen(request.Request(model_url + f'/deleted/{{path.name}}', method='HEAD'))
        path.unlink()
"""


def stream(hub: Server, tmp_path: Path, skip: tuple[str, ...] = ()) -> list[str]:
    """The hub is told what is deleted, so that it knows what was asked for before that and what after."""
    hub.files |= {f"deleted/{name}": b"" for name in hub.files if name.endswith(".safetensors")}
    code = STREAM.replace("sys.argv[0] + '{folder}'", repr(str(tmp_path / "out"))).format(folder="", skip=skip)
    status, printed = run(code, hub.endpoint, tmp_path / "home")
    assert status == 0, printed
    return printed.splitlines()


def test_shards_come_one_by_one_and_can_be_deleted(hub: Server, tmp_path: Path) -> None:
    hub.files["model-00003-of-00003.safetensors"] = SHARD
    small, *shards = stream(hub, tmp_path)
    assert small == "['config.json', 'tokenizer.json']"
    size = len(SHARD)
    assert shards == [
        f"model-00001-of-00002.safetensors {size} False 00001 00002",  # the next has come meanwhile, the one after has not
        f"model-00002-of-00002.safetensors {size} False 00002 00003",
        f"model-00003-of-00003.safetensors {size} True 00003",
    ]
    deleted = hub.asked.index(("HEAD", "deleted/model-00001-of-00002.safetensors", ""))
    assert "model-00003-of-00003.safetensors" not in [file for _, file, _ in hub.asked[:deleted]]
    assert not list((tmp_path / "out").glob("*.safetensors"))
    blobs = [file for file in (tmp_path / "home").rglob("*") if file.is_file() and file.stat().st_size >= len(SHARD)]
    assert blobs == []  # nothing stays in the cache


def test_shards_that_were_done_are_not_fetched_again(hub: Server, tmp_path: Path) -> None:
    _, only = stream(hub, tmp_path, skip=("model-00001-of-00002.safetensors",))
    assert only.startswith("model-00002-of-00002.safetensors") and " True" in only
    assert "model-00001-of-00002.safetensors" not in hub.downloads()
    assert len(stream(hub, tmp_path, skip=tuple(hub.files))) == 1


def test_trouble_on_the_way_is_told_where_the_shard_is_asked_for(hub: Server, tmp_path: Path) -> None:
    code = f"""
    model = list_files('org/model')
    for path, last in stream_shards(model, Path({str(tmp_path / "out")!r})):
        print(path.name)
    """
    hub.files["model-00001-of-00002.safetensors"] = SHARD
    original = Handler.send_file

    def gone(handler: Handler, name: str) -> None:
        if name == "model-00002-of-00002.safetensors":
            return handler.send_refusal(404, "EntryNotFound")
        return original(handler, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Handler, "send_file", gone)
        status, printed = run(code, hub.endpoint, tmp_path / "home")
    first, message = printed.splitlines()
    assert status == 2 and first == "model-00001-of-00002.safetensors"
    assert message.startswith("org/model could not be downloaded from http://127.0.0.1")


def test_a_caller_that_gives_up_does_not_wait(hub: Server, tmp_path: Path) -> None:
    code = f"""
    model = list_files('org/model')
    for path, last in stream_shards(model, Path({str(tmp_path / "out")!r})):
        print(path.name)
        break
    """
    first, second = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    with hub.holding(second):
        assert run(code, hub.endpoint, tmp_path / "home") == (0, first)


def test_tensors_before_anything_is_downloaded(hub: Server, tmp_path: Path) -> None:
    code = (
        "    for tensor in remote_tensors(list_files('org/model')): print(tensor.name, tensor.dtype, tensor.shape, tensor.file)"
    )
    status, printed = run(code, hub.endpoint, tmp_path)
    assert status == 0
    assert printed.splitlines() == [f"a U8 (300000,) model-0000{number}-of-00002.safetensors" for number in (1, 2)]


# --- without a hub ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["a.safetensors", "pytorch_model.bin", "config.json"], ["a.safetensors", "config.json"]),
        (["pytorch_model-1.bin", "training_args.bin", "x.gguf"], ["pytorch_model-1.bin"]),
        (["original/consolidated.pth", "onnx/model.safetensors", "README.md"], ["README.md"]),
        (["mtp.safetensors", "model.safetensors", "consolidated.safetensors"], ["model.safetensors", "mtp.safetensors"]),
        (["tokenizer.model", "tokenizer_config.json", "chat_template.jinja", "merges.txt", "modeling_x.py"], None),
    ],
)
def test_files_a_model_is_made_of(files: list[str], expected: list[str] | None) -> None:
    assert select_files(files) == (
        expected if expected is not None else ["chat_template.jinja", "merges.txt", "tokenizer.model", "tokenizer_config.json"]
    )


def test_arrivals(tmp_path: Path) -> None:
    arrivals = DownloadProgress(tmp_path / "blobs", {"aa": 10, "bb": 20, "cc": 5})
    assert (arrivals.done_bytes(), arrivals.total_bytes) == (0, 35)
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "aa").write_bytes(bytes(10))
    (tmp_path / "blobs" / "aa.1f.incomplete").write_bytes(bytes(3))
    (tmp_path / "blobs" / "bb.2f.incomplete").write_bytes(bytes(7))
    (tmp_path / "blobs" / "other").write_bytes(bytes(50))
    assert arrivals.done_bytes() == 17
    arrivals.remove_leftovers()
    assert {file.name for file in (tmp_path / "blobs").iterdir()} == {"aa", "bb.2f.incomplete", "other"}


def test_trouble_ends_the_reports(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    with pytest.raises(KeyError), reporting(DownloadProgress(tmp_path, {"a": 1}), lambda done, total: told.append((done, total))):
        raise KeyError
    assert told == []
