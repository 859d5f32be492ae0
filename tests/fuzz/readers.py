"""Every reader of foreign input, by name. Of what only processes of one server say to each other (an engine, its ranks) none is here."""

from __future__ import annotations

from fuzz import look_readers, table_readers, text_readers, weight_readers, wire_readers
from fuzz.reader import Reader

READERS: dict[str, Reader] = {
    **weight_readers.READERS,
    **text_readers.READERS,
    **look_readers.READERS,
    **wire_readers.READERS,
    **table_readers.READERS,
}
