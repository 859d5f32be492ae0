"""Exit codes of a training run that schedulers, `windlass launch` and people act on. Names and numbers after sysexits.h."""

from __future__ import annotations

NOT_SAVED = 74
"""Steps are lost: the last checkpoint could not be written (EX_IOERR). The same job would fail again, so it must not be requeued."""
STOPPED = 75
"""Stopped, saved, and to be continued with --resume (EX_TEMPFAIL)."""
