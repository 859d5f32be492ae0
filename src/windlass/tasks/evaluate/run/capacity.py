"""How many requests a client answers at once, and how many alternatives it returns at a position."""

from __future__ import annotations

import re

import msgspec

from windlass.core.constants import DECODE_ERRORS
from windlass.core.request import Info
from windlass.errors import Error
from windlass.tasks.evaluate.run.ask import ENGINE_TOP, OTHER_TOP, SERVER_TOP
from windlass.wire.client.connection import HttpConnection, ServerAddress
from windlass.wire.schema.models import OWNER

UNKNOWN_CONCURRENCY = 8
"""Of a server that does not say."""
STATUS_SECONDS = 10.0


class _Row(msgspec.Struct):
    what: str
    value: str


class _Plan(msgspec.Struct):
    rows: tuple[_Row, ...] = ()


class _Status(msgspec.Struct):
    plan: _Plan | None = None


def top_logprobs(info: Info) -> int:
    owner = info.details.get("owner")
    if owner is None:  # an engine of this machine, not a server
        return ENGINE_TOP
    return SERVER_TOP if owner in (OWNER, "vllm") else OTHER_TOP


async def server_concurrency(url: str, api_key: str | None) -> int:
    """Our server's status says how many sequences it runs at once; others do not say."""
    address = ServerAddress(url)
    connection = HttpConnection(address, api_key, STATUS_SECONDS)
    try:
        status = msgspec.json.decode(await connection.get(f"{address.root}/windlass/status"), type=_Status)
    except (Error, *DECODE_ERRORS):
        return UNKNOWN_CONCURRENCY
    finally:
        await connection.close()
    rows = status.plan.rows if status.plan else ()
    said = next((row.value for row in rows if row.what in ("sequences", "concurrency")), "")
    found = re.search(r"[\d,]+", said)
    return max(int(found[0].replace(",", "")), 1) if found else UNKNOWN_CONCURRENCY
