"""Routes of the web page. Its files contain no secrets and are served without an API key; its API calls need one.

A browser cannot send a key with the first request, so the page loads first and asks the user for the key when the API answers 401.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from windlass.tasks.serve.page.assets import Asset, Assets, read_assets

PREFIX: Final = "/page/"

# Same origin only. The page never builds markup from strings, so trusted types can be disallowed altogether.
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
IMMUTABLE: Final = "public, max-age=31536000, immutable"
REVALIDATE: Final = "no-cache"
"""Cached, but revalidated by ETag on every use."""


def is_page_path(path: str) -> bool:
    """Whether `path` belongs to the page; such requests need no key."""
    return path == "/" or path.startswith(PREFIX)


def page_routes() -> list[Route]:
    """The page at `/` and its files under `/page/`. Not part of the API that /openapi.json describes."""
    assets = read_assets()

    async def index(request: Request) -> Response:
        return _respond(request, assets.index, REVALIDATE)

    async def file(request: Request) -> Response:
        found = _find(assets, request.path_params)
        if found is None:
            return Response("Not found.\n", 404, SECURITY_HEADERS, "text/plain")
        return _respond(request, found, IMMUTABLE)

    return [
        Route("/", index, methods=["GET"], include_in_schema=False),
        Route(PREFIX + "{folder}/{name}", file, methods=["GET"], include_in_schema=False),
        Route(PREFIX + "{folder}/{room}/{name}", file, methods=["GET"], include_in_schema=False),
    ]


def _find(assets: Assets, params: Mapping[str, str]) -> Asset | None:
    path = f"{params['room']}/{params['name']}" if "room" in params else params["name"]
    return assets.files.get(path) if params["folder"] == assets.folder else None


def _respond(request: Request, asset: Asset, caching: str) -> Response:
    headers = {**SECURITY_HEADERS, "Cache-Control": caching, "ETag": asset.etag, "Vary": "Accept-Encoding"}
    if asset.etag in _tags(request.headers.get("if-none-match", "")):
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["Content-Encoding"] = "gzip"
        return Response(asset.gzipped, headers=headers, media_type=asset.media_type)
    return Response(asset.body, headers=headers, media_type=asset.media_type)


def _tags(header: str) -> list[str]:
    return [tag.strip().removeprefix("W/") for tag in header.split(",")]
