"""The model hub: the only file that downloads. Needs huggingface_hub (extra `run`); respects HF_HOME, HF_ENDPOINT and the user's token."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from windlass.errors import BadInput, MissingExtra


def looks_like_hub_name(name: str) -> bool:
    owner, slash, repository = name.partition("/")
    return bool(slash and owner and repository and "/" not in repository and not name.startswith((".", "/", "~")))


def fetch_config(name: str) -> Path:
    """Downloads config.json and, where there is one, the index; returns the directory that holds them."""
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import (
            EntryNotFoundError,
            GatedRepoError,
            HfHubHTTPError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )
    except ImportError:
        raise MissingExtra("huggingface_hub", "run", f"looking up {name} on the hub") from None
    try:
        config = Path(hf_hub_download(name, "config.json"))
    except GatedRepoError:
        raise BadInput(
            f"{name} is gated: ask for access on its page of the hub, then set HF_TOKEN or run `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise BadInput(f"the hub has no model {name} (or it is private: set HF_TOKEN)") from None
    except LocalEntryNotFoundError:
        raise BadInput(f"{name} is not in the registry, and the hub cannot be reached to look it up") from None
    except EntryNotFoundError:
        raise BadInput(f"{name} on the hub has no config.json") from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise BadInput(f"{name} could not be looked up on the hub: {str(error).splitlines()[0]}") from None
    with suppress(HfHubHTTPError, OSError, ValueError):  # small models have one file and no index; the config then decides
        hf_hub_download(name, "model.safetensors.index.json")
    return config.parent
