"""Verdicts on a model's files: complete, with the digests that were written beside them, a config and a tokenizer that are understood."""

from __future__ import annotations

from windlass.core.model import Frozen
from windlass.tasks.check.report import Check, failed, passed, warned
from windlass.units import format_bytes


class FileFacts(Frozen):
    path: str
    num_files: int = 0
    num_bytes: int = 0
    num_tensors: int = 0
    problems: tuple[str, ...] = ()
    """Missing, cut off or damaged."""
    num_digests: int | None = None
    """Files whose digest was known and computed; None: not asked."""
    config_problem: str = ""
    parameters: int = 0
    tokenizer_problem: str = ""
    has_chat_template: bool = False


def judge_files(facts: FileFacts) -> list[Check]:
    rows: list[Check] = []
    shown = f"{facts.num_files} files, {format_bytes(facts.num_bytes)}"
    if facts.problems:
        more = f"; and {len(facts.problems) - 3} more" if len(facts.problems) > 3 else ""
        rows.append(
            failed("model files", "; ".join(facts.problems[:3]) + more, "all complete", "download or convert these files again")
        )
    elif not facts.num_files:
        rows.append(failed("model files", f"no weights in {facts.path}", "safetensors, .gguf or .m files", "download the model"))
    else:
        digests = "" if facts.num_digests is None else f", {facts.num_digests} digests verified"
        rows.append(passed("model files", f"{shown}{digests}"))
    if facts.config_problem:
        rows.append(
            failed("model config", facts.config_problem, "a config that is understood", "see `windlass models` for what is")
        )
    else:
        rows.append(passed("model config", f"{facts.parameters / 1e9:.3g}B parameters"))
    if facts.tokenizer_problem:
        rows.append(failed("tokenizer", facts.tokenizer_problem, "a tokenizer", "copy tokenizer.json beside the weights"))
    elif not facts.has_chat_template:
        rows.append(
            warned(
                "tokenizer",
                "no chat template",
                "one, for chats",
                "a base model continues text; for chats copy chat_template.jinja",
            )
        )
    else:
        rows.append(passed("tokenizer", "with a chat template"))
    return rows
