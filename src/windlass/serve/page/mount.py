"""Serves the page's files. They hold no secret, so they are given without a key; all that the page then asks for needs it.

A key cannot come with the address a browser opens, so the page loads first and asks for the key when the API refuses.
"""

from __future__ import annotations

from typing import Final

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from windlass.serve.page.assets import Asset, Assets, read_assets

PREFIX: Final = "/page/"

# `self` only. Trusted types are for markup made from text: the page makes none, so the browser may refuse it outright.
CONTENT_SECURITY_POLICY: Final = "; ".join(
    (
        "default-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "object-src 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
SECURITY_HEADERS: Final = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
FOR_EVER: Final = "public, max-age=31536000, immutable"
ASK_AGAIN: Final = "no-cache"
"""Kept, but every use asks whether it is still the same (the ETag)."""


def is_page_path(path: str) -> bool:
    """Whether `path` is one of the page's own files, which need no key."""
    return path == "/" or path.startswith(PREFIX)


def mount(app: FastAPI) -> None:
    """Puts the page at `/` and its files under `/page/`."""
    assets = read_assets()

    async def index(request: Request) -> Response:
        return _answer(request, assets.index, ASK_AGAIN)

    async def file(request: Request) -> Response:
        found = _find(assets, request.path_params["folder"], request.path_params["name"])
        if found is None:
            return Response("No such file.\n", 404, SECURITY_HEADERS, "text/plain")
        return _answer(request, found, FOR_EVER)

    # Plain routes, not FastAPI's: the page is no part of the API that /openapi.json describes.
    app.router.routes.append(Route("/", index, methods=["GET"], include_in_schema=False))
    app.router.routes.append(Route(PREFIX + "{folder}/{name}", file, methods=["GET"], include_in_schema=False))


def _find(assets: Assets, folder: str, name: str) -> Asset | None:
    return assets.files.get(name) if folder == assets.folder else None


def _answer(request: Request, asset: Asset, caching: str) -> Response:
    headers = {**SECURITY_HEADERS, "Cache-Control": caching, "ETag": asset.etag, "Vary": "Accept-Encoding"}
    if asset.etag in _tags(request.headers.get("if-none-match", "")):
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["Content-Encoding"] = "gzip"
        return Response(asset.zipped, headers=headers, media_type=asset.media_type)
    return Response(asset.body, headers=headers, media_type=asset.media_type)


def _tags(header: str) -> list[str]:
    return [tag.strip().removeprefix("W/") for tag in header.split(",")]
