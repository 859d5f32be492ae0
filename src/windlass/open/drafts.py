"""The model that drafts for another (`--speculate MODEL`): found by its name, and refused if its tokens are others."""

from __future__ import annotations

from pathlib import Path

import msgspec

from windlass.core.launch import SPECULATE, Launch
from windlass.errors import BadInput, Error


def with_draft_model(launch: Launch, shown: bool = False) -> Launch:
    """The Launch with the path of that model, if there is one. `shown`: with a progress bar where it is downloaded."""
    if not launch.draft_model:
        return launch
    from windlass.open.resolve import model_files

    try:
        path = model_files(launch.draft_model, shown)
    except Error as error:
        raise BadInput(f"--speculate is {', '.join(SPECULATE)} or a model: {error}") from None
    if launch.random_weights is None:
        _check_tokens(launch.model, path)
    return msgspec.structs.replace(launch, speculate=str(path))


def _check_tokens(model: str, draft: Path) -> None:
    from windlass.runtime.weights.text.files import model_text

    main, other = (model_text(Path(path)).tokenizer.backend.get_vocab() for path in (model, draft))
    different = sum(1 for token, number in other.items() if main.get(token) != number)
    if different:
        raise BadInput(
            f"--speculate {draft}: {different:,} of its {len(other):,} tokens are not those of {Path(model).name}; "
            "a model that drafts needs the same tokenizer"
        )
