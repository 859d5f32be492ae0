"""How one process of a training run ends: what the scheduler, torchrun's agent and the user are told."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from windlass.errors import STOPPED, BadInput

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def _torch(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr("windlass.tasks.train.loop.elastic.stop_when_agent_dies", lambda: None)


def ends(folder: Path, monkeypatch: pytest.MonkeyPatch, runs: Callable[..., Any]) -> int:
    """Exit code of a process whose run is `runs`."""
    from windlass.cli.train import worker

    monkeypatch.setattr(worker, "_run", runs)
    given: Any = SimpleNamespace(folder=folder, options=SimpleNamespace(as_json=True))
    return worker.train(given)


def raising(error: BaseException) -> Callable[..., Any]:
    def run(*_: Any, **__: Any) -> Any:
        raise error

    return run


@pytest.mark.parametrize(
    ("number", "code", "says"),
    [
        (signal.SIGUSR1, 4, "the warning (SIGUSR1) came before the first step; ask for more --time"),
        (signal.SIGTERM, STOPPED, "stopped before the first step (SIGTERM); nothing is lost"),
        (signal.SIGHUP, STOPPED, "stopped before the first step (SIGHUP); nothing is lost"),
    ],
)
def test_a_warning_before_the_first_step_is_no_reason_to_try_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    code: int,
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The next attempt would be warned as early: it would be queued again and again."""
    assert ends(tmp_path, monkeypatch, lambda *_: os.kill(os.getpid(), number)) == code
    assert says in capsys.readouterr().err


# --- under torchrun's agent, which starts again what fails


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError(13, "Permission denied", "/data/x"), "Permission denied: /data/x"),
        (FileNotFoundError(2, "No such file or directory", "/data/x"), "No such file or directory: /data/x"),
        (BadInput("a bad recipe"), "a bad recipe"),
    ],
)
def test_what_a_restart_does_not_mend_is_not_restarted(
    agent: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    from windlass.tasks.train.loop.elastic import RunOutcome, read_outcome

    assert ends(tmp_path, monkeypatch, raising(error)) == 2
    assert read_outcome(tmp_path) == RunOutcome("failed", message=message, exit_code=2)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert ends(tmp_path, monkeypatch, raising(AssertionError("it was tried again"))) == 2


@pytest.mark.parametrize(
    "error", [ConnectionResetError(104, "Connection reset by peer"), TimeoutError(110, "Connection timed out")]
)
def test_a_connection_may_be_there_again(agent: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    from windlass.tasks.train.loop.elastic import read_outcome

    with pytest.raises(OSError):
        ends(tmp_path, monkeypatch, raising(error))
    assert read_outcome(tmp_path) is None


@pytest.mark.parametrize("is_leaving", [False, True])
def test_ranks_that_do_not_meet_are_one_line(
    agent: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_leaving: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch.distributed as dist

    from windlass.cli.train import worker
    from windlass.tasks.train.loop.lost import RankLost

    @contextmanager
    def group() -> Generator[int]:
        if is_leaving:
            yield 1
        raise dist.DistNetworkError("The client socket has timed out after 600000ms while trying to connect to (n1, 29400).")

    monkeypatch.setattr(worker, "_process_group", group)
    monkeypatch.setenv("RANK", "1")
    assert ends(tmp_path, monkeypatch, lambda *_: SimpleNamespace(kind="done", step=3)) == RankLost.exit_code
    said = capsys.readouterr().err
    assert (
        said.startswith("windlass: rank 1: the connection to another rank broke (The client socket has timed out")
        and said.count("\n") == 1
    )


def test_ranks_without_an_agent_that_do_not_meet_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that srun has started."""
    import torch.distributed as dist

    from windlass.tasks.train.loop.lost import RankLost

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(dist, "init_process_group", raising(dist.DistNetworkError("failed to connect")))
    with pytest.raises(RankLost):
        ends(tmp_path, monkeypatch, raising(AssertionError("it has begun")))
