"""lm-evaluation-harness over HTTP, as its users run it: `local-completions` scores choices, `local-chat-completions` writes answers.

`make harness` installs it beside, in .venv-harness; WINDLASS_LM_EVAL names another interpreter that has it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from serving import Running, post

pytestmark = [pytest.mark.cpu, pytest.mark.multi]

QUESTIONS = (
    {"question": "The capital of France is", "choices": ["Paris", "banana"], "answer": 0},
    {"question": "Two plus two is", "choices": ["purple", "four"], "answer": 1},
    {"question": "The opposite of hot is", "choices": ["cold", "a stone"], "answer": 0},
    {"question": "Water is made of hydrogen and", "choices": ["of of of", "oxygen"], "answer": 1},
)
CHOICE = """
task: windlass_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{file}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
WRITTEN = """
task: windlass_written
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{file}"}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 12, temperature: 0.0}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture(scope="module")
def python() -> str:
    beside = Path(__file__).parents[4] / ".venv-harness" / "bin" / "python"
    named = os.environ.get("WINDLASS_LM_EVAL") or (str(beside) if beside.is_file() else "")
    if not named and importlib.util.find_spec("lm_eval") is not None:
        named = sys.executable
    if not named:
        pytest.skip("lm-evaluation-harness is not installed: make harness")
    return named


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    """Two tasks over a few questions, and the model's tokenizer as the harness reads it."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "questions.jsonl").write_text("\n".join(json.dumps(question) for question in QUESTIONS))
    (folder / "choice.yaml").write_text(CHOICE.format(file=folder / "questions.jsonl"))
    (folder / "written.yaml").write_text(WRITTEN.format(file=folder / "questions.jsonl"))
    from windlass.runtime.weights.text.files import model_text

    (folder / "tokenizer").mkdir()
    model_text(smollm2).tokenizer.backend.save(str(folder / "tokenizer" / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def evaluated(python: str, tasks: Path, out: Path, *words: str) -> tuple[dict[str, Any], list[Any]]:
    """Results and samples of the one task."""
    command = [python, "-m", "lm_eval", "run", "--include_path", str(tasks), "--output_path", str(out), "--log_samples", *words]
    quiet = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(out / "hub"), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | quiet, cwd=tasks)
    assert done.returncode == 0, done.stderr[-3000:]
    [results] = out.rglob("results_*.json")
    [samples] = out.rglob("samples_*.jsonl")
    return json.loads(results.read_text())["results"], [json.loads(line) for line in samples.read_text().splitlines()]


def test_choices_are_scored(python: str, tasks: Path, tmp_path: Path, smollm2_server: Running) -> None:
    url = f"{smollm2_server.url}/v1/completions"
    model = f"model=smollm2,base_url={url},tokenizer={tasks / 'tokenizer'},num_concurrent=4,max_retries=1,max_length=512"
    results, samples = evaluated(
        python, tasks, tmp_path, "--model", "local-completions", "--model_args", model, "--tasks", "windlass_choice"
    )
    assert results["windlass_choice"]["acc,none"] >= 0.75
    for sample in samples:
        doc = sample["doc"]
        for choice, (found,) in zip(doc["choices"], sample["resps"], strict=True):
            assert float(found[0]) == pytest.approx(scored(url, doc["question"], f" {choice}"), abs=0.3)


def scored(url: str, context: str, continuation: str) -> float:
    """The same by hand: the log-probability of what follows."""
    body = {"model": "smollm2", "prompt": context + continuation, "max_tokens": 0, "echo": True, "logprobs": 1}
    found = post(url, json=body).json()["choices"][0]["logprobs"]
    pairs = zip(found["text_offset"], found["token_logprobs"], strict=True)
    return sum(value for offset, value in pairs if offset >= len(context))


def test_answers_are_written(python: str, tasks: Path, tmp_path: Path, smollm2_server: Running) -> None:
    model = f"model=smollm2,base_url={smollm2_server.url}/v1/chat/completions,num_concurrent=4,max_retries=1"
    words = ["--model", "local-chat-completions", "--model_args", model, "--apply_chat_template", "--tasks", "windlass_written"]
    _, samples = evaluated(python, tasks, tmp_path, *words)
    assert len(samples) == len(QUESTIONS) and all(sample["resps"][0][0].strip() for sample in samples)
