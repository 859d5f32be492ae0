"""Dashboards against the types that Grafana publishes on npm (@grafana/schema), by the TypeScript compiler. Needs npm and a network."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from windlass.tasks.observe.dashboards.boards import BOARDS
from windlass.tasks.observe.dashboards.panel import board_json

pytestmark = [pytest.mark.pure, pytest.mark.long, pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")]
PACKAGES = ("@grafana/schema@13.2.3", "typescript@5.9.3")
OPTIONS = {"strict": True, "noEmit": True, "skipLibCheck": True, "module": "esnext", "moduleResolution": "bundler", "types": []}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("types")
    argv = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--legacy-peer-deps", *PACKAGES]
    done = subprocess.run(argv, cwd=made, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"npm cannot install {' '.join(PACKAGES)}: {done.stderr[-200:]}")
    (made / "tsconfig.json").write_text(json.dumps({"compilerOptions": OPTIONS, "include": ["*.ts"]}))
    return made


def compiled(folder: Path, boards: list[dict[str, object]]) -> str:
    for number, board in enumerate(boards):
        text = f"import type {{ Dashboard }} from '@grafana/schema';\nexport const board: Dashboard = {json.dumps(board)};\n"
        (folder / f"board{number}.ts").write_text(text)
    return subprocess.run(["npx", "tsc", "-p", "."], cwd=folder, capture_output=True, text=True, check=False).stdout


def test_every_dashboard_is_one_of_grafanas(folder: Path) -> None:
    boards = [board_json(board) for board in BOARDS]
    assert compiled(folder, boards) == ""
    assert "is not assignable" in compiled(folder, [{**boards[0], "schemaVersion": "new"}]), "the compiler looks"
