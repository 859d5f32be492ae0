"""A program in vLLM's place: waited for, heard, ended with all its children, whatever happens to us."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import waiting
from free_ports import free_port
from subprocesses import is_running, started, until_gone
from waiting import HUNG_SECONDS, until
from windlass.core.client import Unavailable
from windlass.tasks.launch.command import Command
from windlass.tasks.launch.vllm.process import VllmServer, cause, last_line, progress, start

pytestmark = pytest.mark.pure

# Like vLLM: says what it does, starts a process of its own, answers /health after a while: with WAITS when it is told to, by a file.
# argv: file for process numbers, port.
SERVER = r"""
import http.server, os, subprocess, sys, time
port, pids = int(sys.argv[sys.argv.index("--port") + 1]), sys.argv[1]
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(pids + ".partial", "w").write(f"{os.getpid()} {child.pid}")
os.rename(pids + ".partial", pids)
print("(APIServer pid=1) INFO 11-15 09:10:17 [utils.py:12] Loading weights", flush=True)
print("(APIServer pid=1) WARNING 11-15 09:10:17 [utils.py:13] something odd", flush=True)
while os.environ.get("WAITS") and not os.path.exists(pids + ".go"):
    time.sleep(0.01)
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", port), Answer).serve_forever()
"""
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + SERVER


def command(program: str, folder: Path, **env: str) -> Command:
    words = (sys.executable, "-c", program, str(folder / "pids"), "--host", "127.0.0.1", "--port", str(free_port()))
    return Command(argv=words, env=env)


def pids_of(folder: Path) -> list[int]:
    until((folder / "pids").exists, "it does not begin")
    return [int(word) for word in (folder / "pids").read_text().split()]


def test_it_is_waited_for_and_ends_with_its_children(tmp_path: Path) -> None:
    told: list[str] = []

    def tell(words: str) -> None:
        told.append(words)
        if "Loading weights" in words:
            (tmp_path / "pids.go").touch()

    server = start(command(SERVER, tmp_path, WAITS="1"), logs=tmp_path)
    asyncio.run(server.wait_healthy(tell))
    pids = pids_of(tmp_path)
    assert server.is_alive and all(map(is_running, pids)) and "Loading weights" in told
    assert server.log.stat().st_mode & 0o777 == 0o600
    server.close()
    server.close()
    assert not server.is_alive and not any(map(is_running, pids)), "closed means gone"


def test_who_does_not_want_to_end_is_made_to(tmp_path: Path) -> None:
    patched = "import windlass.tasks.launch.guard as g, sys; g.SECONDS_TO_END = 0.3; sys.exit(g.main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", patched, *command(STUBBORN, tmp_path).argv], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    pids = pids_of(tmp_path)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(HUNG_SECONDS) == 0 or process.returncode == 128 + signal.SIGKILL
    until_gone(*pids)


def test_a_crash_is_told_with_its_last_words(tmp_path: Path) -> None:
    program = "import sys; print('INFO 11-15 09:10:17 [a.py:1] Loading'); raise ValueError('no room for 3 blocks')"
    server = start(command(program, tmp_path), logs=tmp_path)
    with pytest.raises(Unavailable, match=r"vLLM exited with status 1: ValueError: no room for 3 blocks; .*\.log") as told:
        asyncio.run(server.wait_healthy())
    assert "\n" not in str(told.value)


def test_what_a_crash_leaves_is_ended(tmp_path: Path) -> None:
    """The program dies and its child does not."""
    program = SERVER.replace("class Answer", "os._exit(3)\nclass Answer")
    server = start(command(program, tmp_path), logs=tmp_path)
    with pytest.raises(Unavailable, match="status 3"):
        asyncio.run(server.wait_healthy())
    until_gone(*pids_of(tmp_path))


def test_only_the_last_logs_are_kept(tmp_path: Path) -> None:
    for number in range(15):
        (tmp_path / f"vllm-20260101-0000{number:02}-x.log").touch()
    with start(command("", tmp_path), logs=tmp_path) as server:
        kept = sorted(file.name for file in tmp_path.glob("vllm-*.log"))
    assert len(kept) == 10 and server.log.name in kept and "vllm-20260101-000014-x.log" in kept


def test_a_killed_program_is_named(tmp_path: Path) -> None:
    server = start(command(SERVER, tmp_path), logs=tmp_path)
    asyncio.run(server.wait_healthy())
    os.kill(pids_of(tmp_path)[0], signal.SIGKILL)
    server.process.wait(HUNG_SECONDS)
    assert "killed by SIGKILL" in str(server.why_ended())
    server.close()


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    words = ("/nowhere/python", "--host", "127.0.0.1", "--port", str(free_port()))
    server = start(Command(argv=words, env={}), logs=tmp_path)
    with pytest.raises(Unavailable, match="cannot start /nowhere/python: No such file"):
        asyncio.run(server.wait_healthy())


def test_waiting_has_an_end(tmp_path: Path) -> None:
    server = start(command(SERVER, tmp_path, WAITS="1"), logs=tmp_path)
    pids = pids_of(tmp_path)
    with pytest.raises(Unavailable, match="did not become healthy within"):
        asyncio.run(server.wait_healthy(seconds=0.2))
    until_gone(*pids)


def test_a_wait_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    async def interrupted(server: VllmServer) -> None:
        """As soon as it has said what it does."""
        task = asyncio.create_task(server.wait_healthy(lambda _: task.cancel()))
        await task

    server = start(command(SERVER, tmp_path, WAITS="1"), logs=tmp_path)
    pids = pids_of(tmp_path)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(interrupted(server))
    until_gone(*pids)


OURS = """
import asyncio, sys
sys.path[:0] = {here!r}
from pathlib import Path
from test_process import SERVER, command, start
folder = Path({folder!r})
server = start(command(SERVER, folder, WAITS={waits!r}), logs=folder)
asyncio.run(server.wait_healthy())
print("ready", flush=True)
import time; time.sleep(600)
"""


@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT", "SIGTERM"])
@pytest.mark.parametrize("waits", ["", "1"])
def test_it_ends_with_us(tmp_path: Path, name: str, waits: str) -> None:
    """Killed outright, or interrupted as by Ctrl-C (the whole group); while it loads, and when it serves."""
    program = OURS.format(
        here=[str(Path(__file__).parent), str(Path(waiting.__file__).parent)], folder=str(tmp_path), waits=waits
    )
    command = [sys.executable, "-c", program]
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True) as ours:
        assert ours.stdout is not None
        assert waits or ours.stdout.readline() == b"ready\n"
        pids = pids_of(tmp_path)
        os.killpg(ours.pid, signal.Signals[name])
        ours.wait(HUNG_SECONDS)
        until_gone(*pids)


# --- words -----------------------------------------------------------------------------------------------------------

LOG = """\
(EngineCore pid=12) INFO 11-15 09:10:17 [core.py:100] Initializing a V1 LLM engine
(EngineCore pid=12) ERROR 11-15 09:10:18 [core.py:1499] Traceback (most recent call last):
(EngineCore pid=12) ERROR 11-15 09:10:18 [core.py:1499]   File "x.py", line 3, in f
(EngineCore pid=12) ERROR 11-15 09:10:18 [core.py:1499] ValueError: Free memory on device is less than desired
(APIServer pid=10) Traceback (most recent call last):
(APIServer pid=10) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def test_the_cause_is_not_the_echo() -> None:
    assert cause(LOG) == "ValueError: Free memory on device is less than desired"
    assert cause("Killed\n") == "Killed" and cause("") == ""


def test_progress_is_what_it_is_busy_with() -> None:
    assert progress(LOG) == "Initializing a V1 LLM engine"
    bar = "Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:01<00:01]\r"
    assert progress(LOG + bar).startswith("Loading safetensors checkpoint shards:  50%")
    assert progress("WARNING 11-15 09:10:17 [a.py:1] odd\n") == ""
    assert last_line("a\nb\r\n\n") == "b" and last_line("") == ""
