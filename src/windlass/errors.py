"""Every error a user can see.

Error
├── BadInput        the input cannot be understood                                (exit code 2)
│   ├── BadConfig   a model's config.json: a key is missing, invalid or unknown
│   ├── BadCheckpoint a weight file is truncated, corrupt or inconsistent; names file, tensor and byte offset
│   ├── TooLong     the prompt, or prompt plus max_tokens, exceeds the context length
│   ├── UnknownName an unknown model, device, region or key; suggests the nearest
│   └── Impossible  valid, but not supported by any engine (tp that splits a head, ep that splits an expert)
├── DoesNotFit      not enough memory or disk; carries how many bytes are missing     (exit code 3)
└── MissingExtra    an optional dependency is not installed; says how to install it   (exit code 2)

A message says what is wrong, why, and what to do, in one line.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from windlass.foreign import shown

DISTRIBUTION = "windlass-llm"
"""What `pip install` is given. `windlass` on the package index is another project; the import and the command are `windlass`."""

NOT_SAVED = 74
"""Exit code of a training run whose last checkpoint could not be written: steps are lost (EX_IOERR of sysexits.h). The same job would fail
again, so that it must not be requeued."""
STOPPED = 75
"""Exit code of a training run that was stopped, has saved, and can continue with --resume (EX_TEMPFAIL)."""


class Error(Exception):
    """Anything the user can fix. Printed as one line, never as a traceback."""

    exit_code = 2


class BadInput(Error):
    def __init__(self, *args: object, field: str = "") -> None:
        """`field`: the invalid field of a request, by its name in core.request (`logit_bias`); empty: unknown, or not a request."""
        super().__init__(*args)
        self.field = field


class BadConfig(BadInput):
    pass


class BadCheckpoint(BadInput):
    def __init__(self, what: str, file: Path | str = "", tensor: str = "", offset: int | None = None) -> None:
        """Message: `model.safetensors, tensor a.weight, byte 4096: what`, with the parts that are known."""
        where = [str(file)] if file else []
        where += [f"tensor {shown(tensor)}"] if tensor else []
        where += [f"byte {offset}"] if offset is not None else []
        super().__init__(f"{', '.join(where)}: {what}" if where else what)
        self.file, self.tensor, self.offset = str(file), tensor, offset


class Impossible(BadInput):
    pass


class TooLong(BadInput):
    pass


class UnknownName(BadInput):
    def __init__(self, what: str, name: str, known: Iterable[str], hint: str = "") -> None:
        """`hint`: said instead of the nearest of `known`."""
        import difflib  # only needed for errors

        lowered = {candidate.lower(): candidate for candidate in known}
        near = [lowered[match] for match in difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.4)]
        super().__init__(f"unknown {what} {shown(name)!r}; {hint or _suggestion(near, sorted(lowered.values()), what)}")


def _suggestion(near: list[str], known: list[str], what: str) -> str:
    if near:
        return f"did you mean {', '.join(near)}?"
    return f"known: {', '.join(known[:12])}{', ...' if len(known) > 12 else ''}" if known else f"there is no {what} yet"


class DoesNotFit(Error):
    exit_code = 3

    def __init__(self, message: str, short_bytes: int) -> None:
        super().__init__(message)
        self.short_bytes = short_bytes


class MissingExtra(Error):
    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs {package}, which is not installed: pip install '{DISTRIBUTION}[{extra}]'")
