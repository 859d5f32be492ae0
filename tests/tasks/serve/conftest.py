"""Fixtures; what they and the tests share is in serving.py and fake.py beside this."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path

import pytest

HERE, TESTS = Path(__file__).parent, next(folder for folder in Path(__file__).parents if folder.name == "tests")
for folder in (str(TESTS), str(HERE)):
    if folder not in sys.path:
        sys.path.insert(0, folder)


from serving import Running, post, running  # noqa: E402

from subprocesses import lasting  # noqa: E402
from waiting import hear_interrupts  # noqa: E402

hear_interrupts()


@pytest.fixture
def fake_server() -> Generator[Running]:
    with running() as server:
        yield server


@pytest.fixture(scope="session")
def smollm2_server(smollm2: Path) -> Generator[Running]:
    """A real model, its engine in a process of its own."""
    pytest.importorskip("torch")
    from windlass.core.launch import Launch
    from windlass.runtime.engine.client.client import open_client

    launch = Launch(model=str(smollm2), device="cpu", context_tokens=1024, max_sequences=8)
    with ExitStack() as stack:
        with lasting():
            server = stack.enter_context(running(lambda: open_client(launch), model="smollm2", stuck_seconds=60.0))
            # The processes for templates and grammars start with the first of each.
            asked = {"messages": [{"role": "user", "content": "Hi"}], "response_format": {"type": "json_object"}, "max_tokens": 1}
            assert post(f"{server.url}/v1/chat/completions", json=asked).status_code == 200
        yield server
