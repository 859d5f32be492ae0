"""Every error a user can meet.

Error
├── BadInput        what was asked for cannot be understood                       (exit code 2)
│   ├── BadConfig   a model's config.json: a key is missing, wrong or unknown
│   ├── BadCheckpoint a file of weights is truncated, corrupt or inconsistent; names file, tensor and byte offset
│   ├── TooLong     a prompt, or a prompt and its answer, that the context has no room for
│   ├── UnknownName a model, device, region or key that is not known; offers the nearest
│   └── Impossible  understood, but no engine can do it (TP that cuts a head, EP that cuts an expert)
├── DoesNotFit      it would work with more memory; carries how many bytes are short  (exit code 3)
└── MissingExtra    an optional dependency is not installed; says how to install it   (exit code 2)

A message says what is wrong, why, and what to do, in one line.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


class Error(Exception):
    """Anything that is the user's to mend. Printed as one line, never as a traceback."""

    exit_code = 2


class BadInput(Error):
    def __init__(self, *words: object, field: str = "") -> None:
        """`field`: what of a request is to blame, by its name in core.request (`logit_bias`); empty: not known, or no request at all."""
        super().__init__(*words)
        self.field = field


class BadConfig(BadInput):
    pass


class BadCheckpoint(BadInput):
    def __init__(self, what: str, file: Path | str = "", tensor: str = "", offset: int | None = None) -> None:
        """`model.safetensors, tensor a.weight, byte 4096: what`, as far as it is known where."""
        where = [str(file)] if file else []
        shown = tensor if tensor.isprintable() else ascii(tensor)  # a damaged name may hold anything, and the message is one line
        where += [f"tensor {shown[:200]}"] if tensor else []
        where += [f"byte {offset}"] if offset is not None else []
        super().__init__(f"{', '.join(where)}: {what}" if where else what)
        self.file, self.tensor, self.offset = str(file), tensor, offset


class Impossible(BadInput):
    pass


class TooLong(BadInput):
    pass


class UnknownName(BadInput):
    def __init__(self, what: str, name: str, known: Iterable[str]) -> None:
        import difflib  # only on the way out

        lowered = {candidate.lower(): candidate for candidate in known}
        near = [lowered[match] for match in difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.4)]
        hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(sorted(lowered.values())[:12])}"
        super().__init__(f"unknown {what} {name!r}; {hint}")


class DoesNotFit(Error):
    exit_code = 3

    def __init__(self, message: str, short_bytes: int) -> None:
        super().__init__(message)
        self.short_bytes = short_bytes


class MissingExtra(Error):
    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}, which is not installed: pip install 'windlass[{extra}]'")
