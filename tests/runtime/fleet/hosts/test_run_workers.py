"""`windlass run` over workers of this machine, as a user types it: a model says the same as alone.

With fp32 sums (`--exact`), so that "the same" is not a matter of luck: sums over ranks have another order, and the packed kernels round
activations to 8 bits. Nine heads and three kv heads: no number of ranks but three divides them. SmolLM2 has them, and so has a smaller
model of random weights, which four ranks take instead.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from followed import Followed

from subprocesses import children
from waiting import HUNG_SECONDS, until
from windlass.core.request import Request, Sampling

pytestmark = pytest.mark.multi
pytest.importorskip("torch")

PROMPT = "Why is the sky blue? Answer in two sentences."
WORDS = [
    "--prompt",
    PROMPT,
    "--temperature",
    "0",
    "--max-tokens",
    "48",
    "--device",
    "cpu",
    "--exact",
    "--kv",
    "fp32",
    "--context",
    "256",
]
ENVIRONMENT = {"WINDLASS_THREADS": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.touch(0o600)
    file.write_text("sixteen bytes and some more")
    return file


@contextmanager
def worker(secret: Path, cache: Path) -> Generator[tuple[str, int]]:
    """Its address and its number; it ends as on Ctrl-C."""
    process = subprocess.Popen(
        [sys.executable, "-m", "windlass", "worker", "--listen", "127.0.0.1:0", "--secret-file", secret, "--cache", cache],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **ENVIRONMENT},
        process_group=0,
    )
    followed = Followed(process, str(cache.name))
    try:
        yield followed.until("listens at").text.partition("listens at ")[2].split(";")[0], process.pid
        process.send_signal(signal.SIGINT)
        assert followed.ended() == 0, followed.said
    finally:
        process.kill()
        followed.ended()


def answer_of_one(model: Path, has_template: bool) -> str:
    """By an engine in this process."""
    from one_engine import answers

    how: dict[str, Any] = {"sampling": Sampling(temperature=0.0), "max_tokens": 48}
    asked = Request(messages=({"role": "user", "content": PROMPT},), **how) if has_template else Request(prompt=PROMPT, **how)
    (answer,) = answers(model, [asked], context_tokens=256)
    return answer.text


def ran(model: Path, words: Sequence[str | Path]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "windlass", "run", model, *WORDS, "--json", *words],
        capture_output=True,
        text=True,
        timeout=HUNG_SECONDS,
        env={**os.environ, **ENVIRONMENT},
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def nine_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from made_models import NINE_HEADS, make

    return make(tmp_path_factory.mktemp("nine") / "model", NINE_HEADS)


@pytest.mark.parametrize(("model", "num_workers"), [pytest.param("smollm2", 2, marks=pytest.mark.long), ("nine_heads", 3)])
def test_the_same_text_as_alone(
    request: pytest.FixtureRequest, model: str, secret: Path, tmp_path: Path, num_workers: int
) -> None:
    path: Path = request.getfixturevalue(model)
    alone = answer_of_one(path, has_template=model == "smollm2")
    assert len(alone) > 40
    with ExitStack() as stack:
        caches = [tmp_path / f"cache{number}" for number in range(num_workers)]
        workers = [stack.enter_context(worker(secret, cache)) for cache in caches]
        found = ran(path, ["--workers", ",".join(address for address, _ in workers), "--secret-file", secret])
        assert found["content"] == alone
        until(lambda: not any(children(pid) for _, pid in workers))  # no rank outlives its root
        assert not any(file.is_file() for cache in caches for file in cache.rglob("*.part")), (
            "the file is here: nothing need be sent"
        )
