"""What decoders of JSON, msgpack and TOML raise for foreign bytes."""

from __future__ import annotations

from typing import Final

import msgspec

DECODE_ERRORS: Final = (msgspec.MsgspecError, ValueError, RecursionError)
"""ValueError: text that is not Unicode, TOML that is none. RecursionError: nested too deeply, which a few kilobytes can be."""
