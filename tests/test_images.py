"""The files that images are built from, without building one: what they copy is there, and both are made alike."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[1]
FILES = {name: (ROOT / "deploy" / name).read_text() for name in ("Dockerfile", "Dockerfile.cuda")}


def lines(text: str, word: str) -> list[str]:
    joined = re.sub(r"\\\n\s*", "", text)
    return [line.removeprefix(f"{word} ") for line in joined.splitlines() if line.startswith(f"{word} ")]


def copied(text: str) -> set[str]:
    return {source for line in lines(text, "COPY") for source in shlex.split(line)[:-1]}


@pytest.mark.parametrize("name", FILES)
def test_everything_a_wheel_is_made_of_is_copied(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    hook = project["tool"]["hatch"]["build"]["targets"]["wheel"].get("hooks", {}).get("custom", {}).get("path", "hatch_build.py")
    needed = {"pyproject.toml", "src", hook, project["project"]["readme"], *project["project"]["license-files"]}
    needed -= {name for name in needed if name.startswith("src/")}
    assert needed <= copied(FILES[name])
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied(FILES[name]) <= kept and all((ROOT / source).exists() for source in copied(FILES[name]))


@pytest.mark.parametrize("name", FILES)
def test_extras_exist_and_a_wheel_without_kernels_is_refused(name: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (named,) = re.findall(r"\$\{wheel\}\[([\w,]+)\]", FILES[name])
    assert set(named.split(",")) <= set(extras)
    assert "-manylinux_" in next(line for line in lines(FILES[name], "RUN") if "pip wheel" in line)


def test_both_images_are_alike() -> None:
    cpu, cuda = FILES["Dockerfile"], FILES["Dockerfile.cuda"]
    assert cpu[cpu.index("FROM") : cpu.rindex("FROM")] == cuda[cuda.index("FROM") : cuda.rindex("FROM")]
    for word in ("USER", "WORKDIR", "VOLUME", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD", "ARG"):
        assert lines(cpu, word) == lines(cuda, word) != [], word
    assert set(lines(cpu, "ENV")[0].split()) <= set(lines(cuda, "ENV")[0].split())


def test_the_command_of_an_image_is_one_of_ours() -> None:
    from typer.main import get_command

    from windlass.cli.app import app

    serve = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    words = json.loads(lines(FILES["Dockerfile"], "CMD")[0])
    assert words[0] == "serve"
    known = {option for parameter in serve.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= known
