"""`--harness lm-eval TASKS`: the real lm-evaluation-harness against the same server, its numbers beside ours."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

from windlass.errors import BadInput, Error

BESIDE = Path(".venv-harness/bin/python")
"""Where `make harness` installs it."""


class HarnessFailed(Error):
    exit_code = 4


def harness_python() -> str:
    """An interpreter that has lm_eval: $WINDLASS_LM_EVAL, `make harness`'s, or this one."""
    named = os.environ.get("WINDLASS_LM_EVAL") or (str(BESIDE.absolute()) if BESIDE.is_file() else "")
    if not named and importlib.util.find_spec("lm_eval") is not None:
        named = sys.executable
    if not named:
        raise BadInput(
            "--harness lm-eval needs lm-evaluation-harness: `make harness`, or set WINDLASS_LM_EVAL to a python that has lm-eval[api]"
        )
    return named


def harness_command(
    python: str, url: str, model: str, tasks: str, out: Path, style: str, concurrency: int, limit: int | None
) -> list[str]:
    """Chats by default; with completions no tokenizer is needed either, as prompts travel as text."""
    root = url.rstrip("/").removesuffix("/v1")
    common = f"model={model},num_concurrent={concurrency},max_retries=3,tokenized_requests=False"
    if style == "completion":
        kind, arguments, more = "local-completions", f"base_url={root}/v1/completions,tokenizer_backend=None,{common}", []
    else:
        kind, arguments, more = (
            "local-chat-completions",
            f"base_url={root}/v1/chat/completions,{common}",
            ["--apply_chat_template"],
        )
    words = [python, "-m", "lm_eval", "run", "--model", kind, "--model_args", arguments, "--tasks", *tasks.split(","), *more]
    return [*words, *(["--limit", str(limit)] if limit else []), "--output_path", str(out), "--log_samples"]


async def run_harness(
    url: str, model: str, tasks: str, folder: Path, style: str, concurrency: int, limit: int | None, key: str | None
) -> dict[str, Any]:
    """task -> its metrics, as the harness reports them."""
    out = (folder / "lm-eval").absolute()
    command = harness_command(harness_python(), url, model, tasks, out, style, concurrency, limit)
    environment = {**os.environ, "OPENAI_API_KEY": key or "unused", "TOKENIZERS_PARALLELISM": "false"}
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE, env=environment, start_new_session=True
    )
    try:
        _, said = await process.communicate()
    except BaseException:
        if process.returncode is None:
            process.kill()
        raise
    if process.returncode:
        lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
        raise HarnessFailed(
            f"lm-evaluation-harness ended with status {process.returncode}: {(lines or ['it said nothing'])[-1][:300]}"
        )
    return read_results(out)


def read_results(out: Path) -> dict[str, Any]:
    found = sorted(out.rglob("results_*.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise HarnessFailed(f"lm-evaluation-harness left no results in {out}")
    results: dict[str, dict[str, Any]] = json.loads(found[-1].read_text())["results"]
    return {
        task: {name: value for name, value in metrics.items() if isinstance(value, float | int) and "," in name}
        for task, metrics in results.items()
    }


def harness_rows(found: dict[str, Any]) -> list[list[str]]:
    """task, metric, value, its standard error."""
    rows: list[list[str]] = []
    for task, metrics in found.items():
        for name, value in metrics.items():
            if "_stderr" not in name:
                metric, _, filtered = name.partition(",")
                error = metrics.get(f"{metric}_stderr,{filtered}")
                rows.append([task, metric, filtered, f"{value:.4g}", "" if error is None else f"{error:.2g}"])
    return rows
