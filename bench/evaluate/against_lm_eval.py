"""Our numbers beside lm-evaluation-harness's, question by question, on one server.

WINDLASS_DATA=... python bench/evaluate/against_lm_eval.py MODEL --harness-python .venv-harness/bin/python --questions 1000 --out out/against

1. MMLU by log-probability: the same questions through both; every question whose choice differs is listed with both sides' numbers.
2. GSM8K's filters (--part filters): the harness's own regular expressions over the answers that ours graded; every difference is listed.
   --part references does the same with GSM8K's own solutions, ended in several ways, and needs no model.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "src"))

CHOICE = """
task: same_questions
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{file}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: ["A", "B", "C", "D"]
doc_to_target: "{{{{letter}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
# gsm8k_cot's filters in lm-evaluation-harness 0.4.13 (lm_eval/tasks/gsm8k/gsm8k-cot.yaml), read from the installed package at run time.
YAML = "tasks/gsm8k/gsm8k-cot.yaml"


def windlass(*words: str, **options: Any) -> list[str]:
    return [sys.executable, "-m", "windlass", *words]


class Server:
    """`windlass serve`, ended with the block."""

    def __init__(self, model: str, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            windlass("serve", model, "--port", str(port), "--quiet", "--no-page"),
            env=environment(),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Server:
        import httpx

        for _ in range(600):
            try:
                if httpx.get(f"{self.url}/ready", timeout=5).status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            if self._process.poll() is not None:
                raise SystemExit("the server ended")
            time.sleep(0.2)
        raise SystemExit("the server did not start")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(HERE.parents[1] / "src")}


def tokenizer(model: Path, folder: Path) -> Path:
    """As the harness reads it."""
    from windlass.open.resolve import model_files
    from windlass.runtime.weights.text.files import model_text

    folder.mkdir(parents=True, exist_ok=True)
    model_text(model_files(str(model), False)).tokenizer.backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def ours(url: str, task: str, count: int, out: Path, *words: str) -> list[dict[str, Any]]:
    command = windlass("eval", url, "--tasks", task, "--num-examples", str(count), "--results-dir", str(out), "--resume", *words)
    begin = time.monotonic()
    subprocess.run(command, env=environment(), check=True)
    print(f"ours: {time.monotonic() - begin:.0f} s")
    [journal] = out.glob("*/journal.jsonl")
    return [json.loads(line)["payload"] for line in journal.read_text().splitlines()[1:]]


def theirs(python: str, url: str, questions: Path, tokens: Path, out: Path) -> dict[str, Any]:
    import httpx

    (questions.parent / "same.yaml").write_text(CHOICE.format(file=questions))
    name = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    model = f"model={name},base_url={url}/v1/completions,tokenizer={tokens},num_concurrent=8,max_retries=2,max_length=2048"
    command = [
        python, "-m", "lm_eval", "run", "--include_path", str(questions.parent), "--tasks", "same_questions", "--model", "local-completions",
        "--model_args", model, "--output_path", str(out), "--log_samples",
    ]  # fmt: skip
    quiet = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(out / "hub"), "TOKENIZERS_PARALLELISM": "false"}
    begin = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | quiet, cwd=questions.parent)
    (out / "stderr.txt").write_text(done.stderr)
    if done.returncode:
        raise SystemExit(f"lm-evaluation-harness failed; see {out / 'stderr.txt'}")
    print(f"theirs: {time.monotonic() - begin:.0f} s")
    samples = max(out.rglob("samples_*.jsonl"), key=lambda path: path.stat().st_mtime)
    found = [json.loads(line) for line in samples.read_text().splitlines()]
    return {sample["doc"]["id"]: [float(response[0][0]) for response in sample["resps"]] for sample in found}


def compare_choices(arguments: argparse.Namespace) -> None:
    out: Path = arguments.out
    from windlass.tasks.evaluate.run.items import prepare
    from windlass.tasks.evaluate.run.settings import Wanted
    from windlass.tasks.evaluate.tasks.catalog import builtin

    prepared = prepare(builtin()["mmlu_logprob"], Wanted(num_examples=arguments.questions), True)
    lines = [{"id": one.id, "prompt": one.prompt, "letter": one.answer.strip()} for one in prepared.questions]
    tokens = tokenizer(arguments.model, out / "tokenizer")
    with Server(str(arguments.model), arguments.port) as server:
        mine = {line["id"]: line for line in ours(server.url, "mmlu_logprob", arguments.questions, out / "ours")}
        for begin in range(0, len(lines), arguments.chunk):
            part = out / f"theirs-{begin}"
            if (part / "found.json").exists():
                continue
            part.mkdir(parents=True, exist_ok=True)
            (part / "questions.jsonl").write_text("\n".join(map(json.dumps, lines[begin : begin + arguments.chunk])))
            found = theirs(arguments.harness_python, server.url, part / "questions.jsonl", tokens, part)
            (part / "found.json").write_text(json.dumps(found))
            if arguments.one_chunk:
                break
    other = {
        id: values
        for part in out.glob("theirs-*")
        if (part / "found.json").exists()
        for id, values in json.loads((part / "found.json").read_text()).items()
    }
    show_choices(mine, other, {line["id"]: line["letter"] for line in lines})


def show_choices(mine: dict[str, Any], other: dict[str, list[float]], letters: dict[str, str]) -> None:
    shared = [id for id in letters if id in mine and id in other]
    differing, spread, right = [], [], [0, 0]
    for id in shared:
        a = [mine[id]["choices"][f" {letter}"] for letter in "ABCD"]
        b = other[id]
        chosen = ["ABCD"[values.index(max(values))] for values in (a, b)]
        right = [right[place] + (chosen[place] == letters[id]) for place in (0, 1)]
        spread.append(max(abs(x - y) for x, y in zip(a, b, strict=True)))
        if chosen[0] != chosen[1]:
            differing.append((id, chosen, letters[id], sorted(a)[-1] - sorted(a)[-2], sorted(b)[-1] - sorted(b)[-2]))
    print(f"{len(shared)} questions: ours {right[0]} right, lm-evaluation-harness {right[1]}")
    print(f"largest difference of a log-probability {max(spread):.4f}, mean {sum(spread) / len(spread):.5f}")
    print(f"{len(differing)} questions with another choice")
    for id, chosen, letter, gap, other_gap in differing:
        print(f"  {id}: ours {chosen[0]}, theirs {chosen[1]}, right {letter}; best over second: {gap:.4f} and {other_gap:.4f}")


def filters(python: str) -> dict[str, Any]:
    """The harness's own filter list, from the installed package."""
    code = f"import lm_eval, pathlib, yaml, json; print(json.dumps(yaml.safe_load((pathlib.Path(lm_eval.__file__).parent / {YAML!r}).read_text())))"
    return json.loads(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout)


ENDINGS = (
    "The answer is {}.",
    "The answer is {}",
    "So she has {} in all.",
    "#### {}",
    "The answer is ${}.",
    "{} is the result, not 7.",
)


def references(count: int) -> list[dict[str, Any]]:
    """GSM8K's own solutions, ended in the ways in which models end theirs; no model is needed."""
    import gzip

    from windlass.tasks.evaluate.tasks.catalog import builtin
    from windlass.tasks.evaluate.tasks.extract import extract

    task = builtin()["gsm8k"]
    packed = (Path(os.environ["WINDLASS_DATA"]) / "gsm8k" / "test.jsonl.gz").read_bytes()
    rows = gzip.decompress(packed).decode().splitlines()[:count]
    lines: list[dict[str, Any]] = []
    for number, row in enumerate(rows):
        solution, _, result = json.loads(row)["answer"].rpartition("####")
        text = re.sub(r"<<.*?>>", "", solution) + ENDINGS[number % len(ENDINGS)].format(result.strip())
        found = extract(task, text, "chat")
        lines.append({"id": str(number), "answer": text, "strict": found.strict, "flexible": found.flexible})
    return lines


def compare_filters(arguments: argparse.Namespace) -> None:
    out: Path = arguments.out
    if arguments.part == "references":
        mine = references(arguments.answers)
    else:
        with Server(str(arguments.model), arguments.port) as server:
            mine = ours(server.url, "gsm8k", arguments.answers, out / "gsm8k", "--max-tokens", "256")
    known = {entry["name"]: entry["filter"] for entry in filters(arguments.harness_python)["filter_list"]}
    for name, ours_key in (("strict-match", "strict"), ("flexible-extract", "flexible")):
        step = next(part for part in known[name] if part["function"] == "regex")
        pattern, select = step["regex_pattern"], step.get("group_select", 0)
        differing = [line for line in mine if not same(filtered(pattern, select, line["answer"]), line[ours_key])]
        print(f"{name}: {pattern!r}: {len(mine) - len(differing)} of {len(mine)} agree")
        causes = {line["id"]: cause(pattern, select, line["answer"], line[ours_key]) for line in differing}
        for why, count in Counter(causes.values()).most_common():
            print(f"  {count}: {why}")
        for line in differing:
            found = filtered(pattern, select, line["answer"])
            print(
                f"    {line['id']}: theirs {found!r}, ours {line[ours_key]!r}: {causes[line['id']]}; ... {line['answer'][-60:]!r}"
            )


def filtered(pattern: str, select: int, answer: str, flags: int = 0) -> str:
    """As the harness's regex filter does (lm_eval/filters/extraction.py)."""
    groups = [next((g for g in (m if isinstance(m, tuple) else (m,)) if g), "") for m in re.findall(pattern, answer, flags)]
    return groups[select].strip() if groups else "[invalid]"


def same(theirs: str, ours: str | None) -> bool:
    return normal(theirs) == normal(ours or "[invalid]")


def cause(pattern: str, select: int, answer: str, ours: str | None) -> str:
    """The fewest changes to their pattern with which it finds what ours found."""
    number = r"(\-?\$?[0-9][0-9,]*(?:\.[0-9]+)?)"
    changes = {
        "a small t (`So, the answer is 13.`)": lambda p, s, f: (p, s, f | re.IGNORECASE),
        "several answers: theirs is the first, ours the last": lambda p, s, f: (p, -1, f),
        "the dot behind their group takes the last digit or nothing": lambda p, s, f: (p.removesuffix("."), s, f),
        "a sign or a line between `is` and the number": lambda p, s, f: (p.replace("is (", r"is:?\s*\$?\**(", 1), s, f),
        "GSM8K's own form (`#### 5`)": lambda p, s, f: (p.replace("The answer is ", "(?:The answer is |#### )"), s, f),
        "a number with a stop behind it": lambda p, s, f: (p[: p.index("(")] + number, s, f),
    }
    for size in range(1, len(changes) + 1):
        for chosen in combinations(changes, size):
            made = (pattern, select, 0)
            for name in chosen:
                made = changes[name](*made)
            if same(filtered(made[0], made[1], answer, made[2]), ours):
                return "; ".join(chosen)
    return "not explained"


def normal(text: str) -> str:
    """As gsm8k's exact_match ignores: commas, dollars, a last full stop."""
    return re.sub(r"[,$]", "", text).rstrip(".")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--harness-python", required=True)
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--answers", type=int, default=200)
    parser.add_argument("--chunk", type=int, default=250)
    parser.add_argument(
        "--one-chunk", action="store_true", help="run one chunk of the harness's part and stop; run again for the next"
    )
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--out", type=Path, default=Path("out/against"))
    parser.add_argument("--part", choices=["choices", "filters", "references"], default="choices")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    (compare_choices if arguments.part == "choices" else compare_filters)(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
