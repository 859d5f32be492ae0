"""One route of the API: what the router and /openapi.json need to know about it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp

from windlass.core.model import Frozen
from windlass.tasks.serve.service import Service
from windlass.wire.schema.errors import ApiError, ErrorBody


def openai_error(refusal: ApiError) -> bytes:
    return refusal.body


_CONVERTOR = re.compile(r":\w+}")


class ApiRoute(Frozen):
    path: str
    """As Starlette writes it: `/v1/models/{model:path}`."""
    method: str
    operation_id: str
    summary: str
    endpoint: Callable[[Service], ASGIApp]
    """Makes the ASGI application that answers it."""
    request: type | None = None
    response: type | None = None
    response_items: type | None = None
    """The response may also be a list of these."""
    events: tuple[type, ...] = ()
    """The JSON in its server-sent events."""
    streams: tuple[str, ...] = ()
    """Media types of streams without a fixed schema."""
    error: type = ErrorBody
    """The format of its errors."""
    error_body: Callable[[ApiError], bytes] = openai_error
    examples: dict[str, dict[str, Any]] = {}
    parameters: tuple[dict[str, Any], ...] = ()
    is_public: bool = False
    """Needs no API key."""
    is_admin: bool = False
    """Needs an API key with the role admin, if there are keys."""
    is_text: bool = False
    """The response is plain text."""
    is_any: bool = False
    """The response is a JSON object of no fixed schema."""
    is_form: bool = False
    """The request is multipart/form-data with a file and its purpose."""
    is_bytes: bool = False
    """The response is the content of a file."""
    is_health: bool = False
    """503 has the same body as 200."""

    @property
    def names_model(self) -> bool:
        """Whether its body may say which model answers."""
        return self.request is not None and "model" in getattr(self.request, "__struct_fields__", ())

    @property
    def openapi_path(self) -> str:
        """OpenAPI has no convertors: `/v1/models/{model}`."""
        return _CONVERTOR.sub("}", self.path)
