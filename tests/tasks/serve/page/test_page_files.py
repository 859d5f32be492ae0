"""The page's files as they are served: types, caching, what the browser is told to forbid, and what they may not hold."""

from __future__ import annotations

import asyncio
import gzip
import posixpath
import re
import shutil

import pytest

from windlass.tasks.serve.page.assets import STATIC, read_assets

httpx = pytest.importorskip("httpx")
starlette_app = pytest.importorskip("starlette.applications")
pytestmark = pytest.mark.pure

MAX_BYTES, MAX_ZIPPED_BYTES = 140_000, 50_000
ASSETS = read_assets()
NAMES = sorted(ASSETS.files)


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
    assert get(address("app.js")).headers["cache-control"] == "public, max-age=31536000, immutable"


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
    [("app.js", "text/javascript; charset=utf-8"), ("page.css", "text/css; charset=utf-8"), ("icon.svg", "image/svg+xml")],
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
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["object-src"] == policy["trusted-types"] == "'none'"
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


def test_every_file_the_page_names_is_there() -> None:
    named = re.findall(r'(?:src|href)="/page/([^/]+)/([^"]+)"', ASSETS.index.body.decode())
    assert {folder for folder, _ in named} == {ASSETS.folder}
    assert {name for _, name in named} <= set(NAMES)
    for name in (name for name in NAMES if name.endswith(".js")):
        imported = re.findall(r'from "(\.[^"]+)"', ASSETS.files[name].body.decode())
        assert {posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) for path in imported} <= set(NAMES), name


def test_the_folder_is_named_for_the_contents(tmp_path) -> None:
    shutil.copytree(STATIC, tmp_path, dirs_exist_ok=True)
    assert read_assets(tmp_path).folder == ASSETS.folder
    (tmp_path / "app.js").write_text("// another release")
    assert read_assets(tmp_path).folder != ASSETS.folder


def test_it_is_small() -> None:
    assets = [ASSETS.index, *ASSETS.files.values()]
    assert sum(len(asset.body) for asset in assets) < MAX_BYTES
    assert sum(len(asset.gzipped) for asset in assets) < MAX_ZIPPED_BYTES
    assert all(gzip.decompress(asset.gzipped) == asset.body for asset in assets)


@pytest.mark.parametrize("name", NAMES)
def test_no_file_makes_markup_of_text_or_names_another_host(name: str) -> None:
    source = ASSETS.files[name].body.decode()
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|\.srcdoc"
    assert re.findall(forbidden, source) == []
    hosts = set(re.findall(r"(?<![\w/])(?:https?:)?//([\w.-]+\.\w+)", source))
    assert hosts <= {"www.w3.org"}, "only the name of SVG's vocabulary, which nobody loads"


def test_the_page_has_no_script_or_style_of_its_own() -> None:
    page = ASSETS.index.body.decode()
    assert re.findall(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", page) == []
