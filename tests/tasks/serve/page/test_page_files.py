"""The page's files as they are served: types, caching, what the browser is told to forbid, and what they may not hold."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import posixpath
import re
import shutil

import pytest

from windlass.tasks.serve.page.assets import STATIC, read_assets

httpx = pytest.importorskip("httpx")
starlette_app = pytest.importorskip("starlette.applications")
pytestmark = pytest.mark.pure

MAX_BYTES, MAX_ZIPPED_BYTES = 145_000, 54_000
MAX_VENDORED_BYTES = 900_000
ASSETS = read_assets()
NAMES = sorted(ASSETS.files)
VENDOR = "vendor/"
"""Other people's released files."""
OURS = [name for name in NAMES if not name.startswith(VENDOR)]


def get(path: str, **headers: str):
    from windlass.tasks.serve.page.routes import page_routes

    app = starlette_app.Starlette(routes=page_routes())

    async def ask():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            names = {name.replace("_", "-"): value for name, value in headers.items()}
            return await client.get(path, headers={"accept-encoding": "identity", **names})

    return asyncio.run(ask())


def address(name: str) -> str:
    return f"/page/{ASSETS.folder}/{name}"


def test_the_page_is_asked_for_again_and_its_files_are_kept_for_ever() -> None:
    assert get("/").headers["cache-control"] == "no-cache"
    for name in ("app.js", "vendor/katex/katex.min.css", "vendor/katex/fonts/KaTeX_Main-Regular.woff2"):
        assert get(address(name)).headers["cache-control"] == "public, max-age=31536000, immutable"


@pytest.mark.parametrize("path", ["/", address("app.js")])
def test_what_a_browser_has_is_not_sent_again(path: str) -> None:
    first = get(path)
    again = get(path, if_none_match=first.headers["etag"])
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["cache-control"] == first.headers["cache-control"]
    assert get(path, if_none_match='"other", W/' + first.headers["etag"]).status_code == 304
    assert get(path, if_none_match='"other"').status_code == 200


@pytest.mark.parametrize(
    ("name", "media_type"),
    [
        ("app.js", "text/javascript; charset=utf-8"),
        ("page.css", "text/css; charset=utf-8"),
        ("icon.svg", "image/svg+xml"),
        ("vendor/markdown-it/markdown-it.esm.min.mjs", "text/javascript; charset=utf-8"),
        ("vendor/katex/fonts/KaTeX_Main-Regular.woff2", "font/woff2"),
        ("vendor/katex/LICENSE", "text/plain; charset=utf-8"),
    ],
)
def test_media_types(name: str, media_type: str) -> None:
    answer = get(address(name))
    assert (answer.status_code, answer.headers["content-type"]) == (200, media_type)
    assert answer.content == (STATIC / name).read_bytes()


@pytest.mark.parametrize("path", ["/", address("app.js"), address("nothing.js")])
def test_the_browser_is_told_what_to_forbid(path: str) -> None:
    headers = get(path).headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["object-src"] == "'none'"
    assert (policy["require-trusted-types-for"], policy["trusted-types"]) == ("'script'", "dompurify")
    assert policy.keys() <= {
        "default-src",
        "base-uri",
        "form-action",
        "frame-ancestors",
        "object-src",
        "require-trusted-types-for",
        "trusted-types",
    }
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(
    "path",
    [
        "/page/0000000000000000/app.js",
        address("index.html"),
        address("chat"),
        address("chat/../app.py"),
        address("vendor/VERSIONS"),
        address("vendor/katex/%2e%2e/katex/LICENSE"),
        address("vendor//katex/LICENSE"),
        address("..%2fassets.py"),
        f"/page/{ASSETS.folder}/../../assets.py",
        "/page/" + ASSETS.folder,
        "/page/",
    ],
)
def test_nothing_else_is_served(path: str) -> None:
    assert get(path).status_code == 404


def test_zipped_for_those_who_take_it() -> None:
    answer = get(address("app.js"), accept_encoding="gzip, br")
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.content == (STATIC / "app.js").read_bytes()
    assert "content-encoding" not in get(address("app.js")).headers
    font = "vendor/katex/fonts/KaTeX_Main-Regular.woff2"  # is compressed as it is
    assert "content-encoding" not in get(address(font), accept_encoding="gzip").headers


def test_every_file_the_page_names_is_there() -> None:
    named = re.findall(r'(?:src|href)="/page/([^/]+)/([^"]+)"', ASSETS.index.body.decode())
    assert {folder for folder, _ in named} == {ASSETS.folder}
    assert {name for _, name in named} <= set(NAMES)
    for name in (name for name in OURS if name.endswith(".js")):
        imported = re.findall(r'(?:from |import |import\()"(\.[^"]+)"', ASSETS.files[name].body.decode())
        assert {posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) for path in imported} <= set(NAMES), name


def test_the_folder_is_named_for_the_contents(tmp_path) -> None:
    shutil.copytree(STATIC, tmp_path, dirs_exist_ok=True)
    assert read_assets(tmp_path).folder == ASSETS.folder
    (tmp_path / "app.js").write_text("// another release")
    assert read_assets(tmp_path).folder != ASSETS.folder


def test_it_is_small() -> None:
    ours = [ASSETS.index, *(ASSETS.files[name] for name in OURS)]
    assert sum(len(asset.body) for asset in ours) < MAX_BYTES
    assert sum(len(asset.gzipped) for asset in ours) < MAX_ZIPPED_BYTES
    assert all(gzip.decompress(asset.gzipped) == asset.body for asset in ours)
    assert sum(len(ASSETS.files[name].body) for name in set(NAMES) - set(OURS)) < MAX_VENDORED_BYTES


@pytest.mark.parametrize("name", OURS)
def test_no_file_makes_markup_of_text_or_names_another_host(name: str) -> None:
    source = ASSETS.files[name].body.decode()
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|\.srcdoc"
    assert re.findall(forbidden, source) == []
    assert name == "markdown/clean.js" or "DOMPurify." not in source, "HTML is parsed in one place"
    hosts = set(re.findall(r"(?<![\w/])(?:https?:)?//([\w.-]+\.\w+)", source))
    assert hosts <= {"www.w3.org"}, "only the name of SVG's vocabulary, which nobody loads"


# --- other people's files --------------------------------------------------------------------------------------------


def vendored() -> dict[str, dict[str, str]]:
    """By folder the sums of its files, as vendor/VERSIONS states them beside name, version, licence and origin."""
    found: dict[str, dict[str, str]] = {}
    for part in (STATIC / "vendor" / "VERSIONS").read_text().split("\n[")[1:]:
        folder, *lines = part.strip().splitlines()
        stated = dict(line.split(": ", 1) for line in lines if not line.startswith("sha256: "))
        assert stated.keys() == {"name", "version", "licence", "from"} and all(stated.values())
        sums = [line.removeprefix("sha256: ").split() for line in lines if line.startswith("sha256: ")]
        found[folder.rstrip("]")] = {file: digest for digest, file in sums}
    return found


def test_other_peoples_files_are_as_they_were_released() -> None:
    folders = {folder.name: folder for folder in (STATIC / "vendor").iterdir() if folder.is_dir()}
    assert folders.keys() == vendored().keys()
    for name, stated in vendored().items():
        files = [file for file in folders[name].rglob("*") if file.is_file()]
        sums = {file.relative_to(folders[name]).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
        assert sums == stated
        assert "LICENSE" in sums and f"{VENDOR}{name}/LICENSE" in NAMES


def test_the_fonts_that_styles_name_are_there() -> None:
    styles = ASSETS.files["vendor/katex/katex.min.css"].body.decode()
    named = set(re.findall(r"url\((fonts/[^)]+\.woff2)\)", styles))
    assert named and named == {name.removeprefix("vendor/katex/") for name in NAMES if name.endswith(".woff2")}
    assert re.findall(r"url\((?!fonts/)", styles) == []


def test_the_page_has_no_script_or_style_of_its_own() -> None:
    page = ASSETS.index.body.decode()
    assert re.findall(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", page) == []
