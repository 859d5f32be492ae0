"""The one place where a name becomes a model.

In this order: an existing path, a conversion in Windlass's own directory, the bundled model, the registry, OWNER/NAME on the hub.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import msgspec

from windlass.core.model import Frozen, ModelSpec
from windlass.core.rule import Rule
from windlass.errors import BadInput
from windlass.model.families import describe, hints_from, rules
from windlass.model.families.registry import KnownModel, find, published_config, refuse_beyond_reach, spec_of, unknown_model
from windlass.open.stored import StoredFiles, stored_files

if TYPE_CHECKING:
    from windlass.core.hardware.spec import Hardware
    from windlass.open.choose import ChosenFiles

FILE_URL = "file://"
"""As file managers copy a path."""
HUB_PAGE = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([^/?#]+/[^/?#]+)(?:[/?#].*)?", re.IGNORECASE)
DOWNLOADS = 8
"""Files fetched at once."""


class ModelLocation(Frozen):
    """Where a name points: files on this disk, or a model on the hub."""

    path: Path | None = None
    known: KnownModel | None = None
    """Its entry in the registry."""
    hub: str = ""


class ModelDescription(Frozen):
    spec: ModelSpec
    rules: tuple[Rule, ...]
    source: str
    digest: str = ""
    files: StoredFiles | None = None
    """What is on this disk; None: only the published config is known."""


def find_model(name: str) -> ModelLocation:
    """Downloads nothing."""
    here = _existing(name) or _local(name := _plain_name(name))
    if here is not None:
        return ModelLocation(path=here)
    known = find(name)
    if known is not None:
        return ModelLocation(known=known, hub=known.hub)
    refuse_beyond_reach(name)
    from windlass.model.formats.hub.hub import looks_like_hub_name

    if not looks_like_hub_name(name):
        raise unknown_model(name, also=_own_names())
    return ModelLocation(hub=name)


def model_files(name: str, shown: bool) -> Path:
    """The files to read; downloaded first if they are not here. `shown`: with a progress bar."""
    found = find_model(name)
    if found.path is None:
        return download(found.hub, DOWNLOADS, shown)
    from windlass.runtime.weights.files import model_file

    here = model_file(found.path)
    _check_directory(here)
    return here


def _check_directory(path: Path) -> None:
    """Says what a folder is that holds no model."""
    if not path.is_dir() or (path / "config.json").is_file():
        return
    if (path / "adapter_config.json").is_file():
        raise BadInput(
            f"{path} is a LoRA adapter, not a model; `windlass serve MODEL --lora NAME={path}` uses it with the model it was made for"
        )
    raise BadInput(f"{path} has no config.json, so it is no model directory; look for the folder or the .gguf file below it")


def files_for(name: str, hardware: Hardware | None = None) -> ChosenFiles | None:
    """Of a model of the registry, the published files that such a machine has room for (None: this machine), which `windlass run NAME` takes
    and `windlass plan NAME` plans. None: files that are here, or that the user named."""
    found = find_model(name)
    if found.path is not None or found.known is None or name.lower() == found.hub.lower():
        return None
    from windlass.open.choose import choose_files
    from windlass.open.hardware import resolve_hardware

    return choose_files(found.known, hardware or resolve_hardware(None))


def runnable_files(name: str, shown: bool) -> Path:
    """As `model_files`; of a model of the registry, the published files that this machine has room for, and a line that says which."""
    chosen = files_for(name)
    if chosen is None:
        return model_files(name, shown)
    if shown:
        print(chosen.why, file=sys.stderr, flush=True)
    return download_file(chosen.hub, chosen.file, shown) if chosen.file else download(chosen.hub, DOWNLOADS, shown)


def describe_model(name: str) -> ModelDescription:
    """What the model is; of one on the hub only the config is fetched."""
    found = find_model(name)
    if found.path is not None:
        return describe_path(found.path)
    if found.known is not None:
        spec = spec_of(found.known)
        return ModelDescription(spec=spec, rules=rules(spec), source=found.hub)
    from windlass.model.formats.hub.hub import fetch_config

    described = describe_path(fetch_config(found.hub), found.hub.split("/")[-1])
    return msgspec.structs.replace(described, source=found.hub)


def model_config(name: str) -> tuple[dict[str, Any], str]:
    """The config.json of a model and its name; no weights are needed."""
    from windlass.model.formats.config import read_config
    from windlass.model.formats.hub.hub import fetch_config

    found = find_model(name)
    if found.path is not None:
        return stored_files(found.path).config, _label(found.path)
    if found.known is not None:
        return published_config(found.known), found.known.name
    return read_config(fetch_config(found.hub)), found.hub.split("/")[-1]


def describe_path(path: Path, name: str = "") -> ModelDescription:
    """A directory with config.json, a .gguf or .m file, or a config. Tensor names, where there are any, decide what the config leaves open."""
    files = stored_files(path)
    where = str(path / "config.json" if path.is_dir() else path)
    label = name or _label(path)
    spec = describe(files.config, label, where=where)
    if files.names:
        spec = describe(files.config, label, hints=hints_from(files.names, spec.num_layers), where=where)
    return ModelDescription(spec=spec, rules=rules(spec), source=str(path), digest=files.digest, files=files)


def download(hub_name: str, max_workers: int, shown: bool) -> Path:
    from windlass.model.formats.hub.hub import pull
    from windlass.open.progress import ByteBar, byte_progress

    with byte_progress(f"downloading {hub_name}", shown) as started:
        return pull(hub_name, max_workers, ByteBar(started))


def download_file(hub_name: str, file: str, shown: bool) -> Path:
    from windlass.model.formats.hub.hub import pull_file
    from windlass.open.progress import ByteBar, byte_progress

    with byte_progress(f"downloading {file}", shown) as started:
        return pull_file(hub_name, file, ByteBar(started))


def _plain_name(name: str) -> str:
    """Without what was typed or copied around it: spaces, the slash with which a shell completes a folder, the address of the hub's page."""
    found = HUB_PAGE.fullmatch(name.strip())
    return found[1] if found else name.strip().rstrip("/") or name


def _existing(name: str) -> Path | None:
    is_url = name.lower().startswith(FILE_URL)
    try:
        path = Path(unquote(name[len(FILE_URL) :]) if is_url else name).expanduser()
        if path.exists():
            return path
    except (OSError, RuntimeError):  # too long for a file name; the home of an unknown user
        return None
    if is_url or name.startswith((".", "~", os.sep)) or name.endswith((".gguf", ".m")):
        raise BadInput(f"{name} does not exist; give a model directory, a .gguf or .m file, or a name from `windlass models`")
    return None


def _local(name: str) -> Path | None:
    """A conversion of ours, or the bundled model."""
    from windlass.model.bundled.models import find_bundled
    from windlass.model.formats.hub.local import models_directory

    converted = models_directory() / name
    return converted if converted.is_dir() else find_bundled(name)


def _own_names() -> list[str]:
    """Names that `_local` finds."""
    from windlass.model.bundled.models import bundled_names
    from windlass.model.formats.hub.local import models_directory

    folder = models_directory()
    return [*bundled_names(), *(sorted(one.name for one in folder.iterdir() if one.is_dir()) if folder.is_dir() else ())]


def _label(path: Path) -> str:
    return path.resolve().name if path.is_dir() else path.stem
