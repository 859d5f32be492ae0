"""The hub, played by a small server on this machine: what is found, and one clear line for everything that is not."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import hub_processes
import pytest

from windlass.errors import MissingExtra
from windlass.model.formats.hub.hub import WITHOUT_HUB, fetch_config, looks_like_hub_name

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[4]
CONFIG = json.dumps({"model_type": "llama"}).encode()
INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors"}}).encode()
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "/org/whole/resolve/main/config.json": CONFIG,
    "/org/whole/resolve/main/model.safetensors.index.json": INDEX,
    "/org/small/resolve/main/config.json": CONFIG,
}
# Repository -> status and error code, as the hub sends them.
REFUSALS = {
    "/org/gated/": (403, "GatedRepo"),
    "/org/absent/": (404, "RepoNotFound"),
    "/org/private/": (401, "RepoNotFound"),
    "/org/broken/": (418, ""),
}


class Hub(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        path = re.sub(f"/resolve/{COMMIT}/", "/resolve/main/", self.path)
        refusal = next((answer for start, answer in REFUSALS.items() if start in path), None)
        content = FILES.get(path, b"")
        status, code = refusal or ((200, "") if content else (404, "EntryNotFound"))
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hash(path):x}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


SCRIPT = """
import sys
from windlass.errors import Error
from windlass.model.formats.hub.hub import fetch_config
try:
    print(fetch_config(sys.argv[1]))
except Error as error:
    print(error)
    sys.exit(error.exit_code)
"""


def fetch(name: str, endpoint: str, home: Path, **more: str) -> tuple[int | None, str]:
    proxies = {"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"}
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_") and key.upper() not in proxies}
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    code, output, trouble = hub_processes.run(SCRIPT, name, environment=kept | settings | more)
    assert "Traceback" not in trouble, trouble
    return code, output.removesuffix("\n")


def test_config_and_index(endpoint: str, tmp_path: Path) -> None:
    code, found = fetch("org/whole", endpoint, tmp_path)
    assert code == 0
    folder = Path(found)
    assert folder.is_relative_to(tmp_path)
    assert (folder / "config.json").read_bytes() == CONFIG
    assert (folder / "model.safetensors.index.json").read_bytes() == INDEX


def test_a_small_model_has_no_index(endpoint: str, tmp_path: Path) -> None:
    code, found = fetch("org/small", endpoint, tmp_path)
    assert code == 0
    assert [file.name for file in Path(found).iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/gated", "org/gated is gated: request access on its hub page, then set HF_TOKEN or run `hf auth login`"),
        ("org/absent", "model org/absent not found on the hub (if it is private, set HF_TOKEN)"),
        ("org/private", "model org/private not found on the hub (if it is private, set HF_TOKEN)"),
        ("org/empty", "org/empty on the hub has no config.json"),
    ],
)
def test_refusals(endpoint: str, tmp_path: Path, name: str, message: str) -> None:
    assert fetch(name, endpoint, tmp_path) == (2, message)


@pytest.mark.parametrize("name", ["org/broken", "org/bad name", "org/" + "x" * 200])
def test_other_trouble_is_one_line(endpoint: str, tmp_path: Path, name: str) -> None:
    code, message = fetch(name, endpoint, tmp_path)
    assert code == 2
    assert name in message
    assert "\n" not in message


NOBODY = "http://127.0.0.1:9"


def test_a_hub_that_cannot_be_reached(tmp_path: Path) -> None:
    """Offline by wish, which is the quick way there: without it huggingface_hub tries for 23 seconds."""
    code, message = fetch("org/whole", NOBODY, tmp_path, HF_HUB_OFFLINE="1")
    assert code == 2
    assert message == f"org/whole is not on this disk, and the hub cannot be reached; {WITHOUT_HUB}"


def test_what_was_fetched_once_is_found_without_the_hub(endpoint: str, tmp_path: Path) -> None:
    fetched = fetch("org/whole", endpoint, tmp_path)
    assert fetched[0] == 0
    assert fetch("org/whole", NOBODY, tmp_path) == fetched


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra it names must be one that pyproject.toml has."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtra) as caught:
        fetch_config("org/whole")
    extra = re.search(r"windlass-llm\[(\w+)\]", str(caught.value))
    assert extra is not None
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any("huggingface_hub" in requirement for requirement in extras[extra[1]])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("zai-org/GLM-4.5", True),
        ("GLM-4.5", False),
        ("./model/x", False),
        ("/models/x", False),
        ("~/x", False),
        ("a/b/c", False),
        ("a/", False),
    ],
)
def test_names_that_look_like_the_hubs(name: str, expected: bool) -> None:
    assert looks_like_hub_name(name) == expected
