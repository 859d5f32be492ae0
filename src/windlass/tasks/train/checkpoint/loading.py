"""Loads a checkpoint into a run's state, whatever the world size and layout of either (DCP reshards).

The random state of a rank that the saving run did not have is kept; anything else missing is refused.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException

from windlass.errors import BadCheckpoint, Error
from windlass.tasks.train.checkpoint.ranks import CheckpointGroup
from windlass.tasks.train.checkpoint.storage import SafePlanner, SafeReader, missing

OF_A_RANK = "rng"
"""The part of the state that is per rank."""


def load_into(state: dict[str, Any], folder: Path, ranks: CheckpointGroup) -> None:
    names = set(flatten_state_dict(state)[0])
    ranks.agree(lambda: _refuse_missing(names, folder))
    try:
        with warnings.catch_warnings():  # DCP warns about a single process without a group
            warnings.simplefilter("ignore")
            dcp.load(
                state,
                storage_reader=SafeReader(folder),
                planner=SafePlanner(allow_partial_load=True),
                process_group=ranks.group,
                no_dist=ranks.group is None,
            )
    except CheckpointException as error:
        raise _plain(error, folder) from None


def _refuse_missing(names: set[str], folder: Path) -> None:
    absent = sorted(name for name in missing(names, folder) if name.split(".")[0] != OF_A_RANK)
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise BadCheckpoint(f"the checkpoint has no {absent[0]}{more}; it was made with another recipe", folder)


def _plain(error: CheckpointException, folder: Path) -> Error:
    """The first of the errors that DCP collects from ranks, in one line."""
    first = next(iter(error.failures.values()))[0]
    if isinstance(first, Error):
        return first
    return BadCheckpoint(f"cannot be loaded: {(str(first).splitlines() or [type(first).__name__])[0]}", folder)
