"""`windlass launch node`: what runs on each node of a job. Finds its number, the address and the fabric, starts the command, passes signals on.

Nodes meet over files of the run's folder, which all see; over ssh, where they may not, the port is given (`meeting`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

import msgspec

from windlass.core.model import Frozen
from windlass.errors import BadInput, Error
from windlass.runtime.machine.fabric.fabric import address_towards, read_fabric
from windlass.runtime.machine.fabric.variables import fitting, threads, wrong_variables
from windlass.runtime.machine.parent_death import kill_with_parent
from windlass.runtime.machine.system import this_system
from windlass.tasks.launch.job import PLACE, SECRETS, STOPPED, Job, Settings
from windlass.tasks.launch.ports import Claim, free_port, meeting_ports

WriteFile = Callable[[Path, bytes], None]
"""Atomic."""
SECONDS_TO_MEET = 900.0
SECONDS_BETWEEN_LOOKS = 0.5
FIRST_WORKER_PORT, FIRST_SERVER_PORT = 9998, 8000
NUM_PORTS = 200


class JobFailed(Error):
    exit_code = 4


class Description(Frozen):
    """job.json"""

    job: Job
    settings: Settings


class Meeting(Frozen):
    """Written by node 0."""

    address: str
    port: int


class Node(Frozen):
    """One node of a run."""

    job: Job
    settings: Settings
    number: int
    hosts: tuple[str, ...]
    run: str
    """Folder of this attempt; empty: there is none that all nodes see."""
    meeting: str = ""
    """HOST:PORT, where the nodes cannot meet over a folder."""
    index: int | None = None
    """Of an array's value."""

    @property
    def head(self) -> str:
        return self.meeting.rpartition(":")[0] if self.meeting else self.hosts[0]

    @property
    def own_address(self) -> str:
        """Where the others reach this node. The first asks for the way to the second."""
        other = self.hosts[1] if self.number == 0 and len(self.hosts) > 1 else self.head
        return address_towards(other)


def read_description(text: bytes) -> Description:
    try:
        return msgspec.json.decode(text, type=Description)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput(f"the job's description cannot be read: {error}; launch it again") from None


def run_node(node: Node, write: WriteFile) -> int:
    """Returns the exit code; 0 also for training that saved and stopped, which the file `stopped` says."""
    environment = _environment(node)
    runs = {"train": _train, "serve": _serve, "array": _array, "single": _single}
    try:
        code = runs[node.job.kind](node, environment, write)
    except Error as error:
        _note_failure(node, error.exit_code)
        raise
    if node.run:
        write(Path(node.run) / f"node-{node.number}.json", msgspec.json.encode({"host": _host(), "code": code}))
    if code == STOPPED and node.run:
        (Path(node.run) / "stopped").touch()
        return 0
    return code


def _note_failure(node: Node, code: int) -> None:
    """The file `failed`: how the first node failed. The others are ended because of it, and their codes say nothing."""
    if node.run:
        with suppress(FileExistsError), (Path(node.run) / "failed").open("x") as file:
            file.write(f"{code} {_host()}\n")


def _host() -> str:
    return os.uname().nodename


def _say(text: str) -> None:
    print(f"windlass: {text}", flush=True)


def _environment(node: Node) -> dict[str, str]:
    given = os.environ | dict(node.settings.env)
    for wrong in wrong_variables(given):
        _say(f"{_host()}: {wrong.name}={given[wrong.name]}: {wrong.why}")
    num_nodes = len(node.hosts)
    chosen = fitting(read_fabric(), node.own_address if num_nodes > 1 else "", num_nodes, node.job.gpus_per_node, given)
    chosen += threads(this_system().num_cores, node.job.ranks_per_node, given)
    for one in chosen:
        _say(f"{_host()}: {one.name}={one.value}  ({one.reason})")
    return given | {one.name: one.value for one in chosen}


def _windlass(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "windlass", *words]


# --- training


def _train(node: Node, environment: dict[str, str], write: WriteFile) -> int:
    again = () if {"--resume", "--continue"} & set(node.job.command) else ("--continue",)
    words = [*node.job.command, *again]
    if len(node.hosts) == 1 and node.settings.tasks == "node":
        return _child(node, _windlass(*words, *_several_ranks(node.job.ranks_per_node)), environment)
    meeting = _meet(node, write)
    if node.settings.tasks == "rank":
        return _child(node, _windlass(*words), environment | {"MASTER_ADDR": meeting.address, "MASTER_PORT": str(meeting.port)})
    nodes = f"{node.job.min_nodes}:{node.job.num_nodes}" if node.job.may_shrink else str(node.job.num_nodes)
    words += ["--nproc", str(node.job.ranks_per_node), "--nodes", nodes, "--rendezvous", f"{meeting.address}:{meeting.port}"]
    words += ["--node", str(node.number), "--address", node.own_address]
    return _child(node, _windlass(*words), environment)


def _several_ranks(number: int) -> tuple[str, ...]:
    return ("--nproc", str(number)) if number > 1 else ()


def _meet(node: Node, write: WriteFile) -> Meeting:
    if node.meeting:
        address, _, port = node.meeting.rpartition(":")
        return Meeting(address=address, port=int(port))
    file = Path(node.run) / "meeting.json"
    if node.number == 0 and os.environ.get("RANK", "0") == "0":
        write(file, msgspec.json.encode(Meeting(address=node.hosts[0], port=free_port(meeting_ports(node.run)))))
    return msgspec.json.decode(_awaited(file, f"{node.hosts[0]} (the first node)"), type=Meeting)


def _awaited(file: Path, whose: str) -> bytes:
    """What another node writes. File servers cache folders, so the folder is listed, which asks again (NFS)."""
    end = time.monotonic() + SECONDS_TO_MEET
    while time.monotonic() < end:
        os.listdir(file.parent)  # noqa: PTH208 - only to ask again
        if file.exists():
            return file.read_bytes()
        time.sleep(SECONDS_BETWEEN_LOOKS)
    raise JobFailed(
        f"{_host()}: {whose} wrote no {file.name} within {SECONDS_TO_MEET:.0f} s; check that {file.parent} is on storage that all nodes share"
    )


# --- serving


def _serve(node: Node, environment: dict[str, str], write: WriteFile) -> int:
    if len(node.hosts) > 1 and _option(node.job.command, "--engine") == "vllm":
        return _vllm(node, environment, write)
    return _root(node, environment, write) if node.number == 0 else _worker(node, environment, write)


def _vllm(node: Node, environment: dict[str, str], write: WriteFile) -> int:
    """vLLM's own launch over several nodes: the first serves, the others run without an API. When one ends, all do."""
    meeting = _meet(node, write)
    environment = environment | {"WINDLASS_VLLM_MASTER": f"{meeting.address}:{meeting.port}"}
    if node.number:
        words = ["launch", "vllm-node", *vllm_words(node.job.command), "--node", str(node.number)]
        return _child(node, _windlass(*words), environment, until=Path(node.run) / "root-ended")
    return _listening(node, list(node.job.command), node.own_address, environment, write)


def vllm_words(command: Sequence[str]) -> list[str]:
    """What the other nodes must know of `serve MODEL --engine vllm --plan FILE`."""
    plan = _option(command, "--plan")
    if plan is None:
        raise BadInput(
            "vLLM over several nodes needs a plan for them: `windlass plan MODEL --engine vllm --on ... --save plan.json`"
        )
    return [command[1], "--plan", plan]


def _worker(node: Node, environment: dict[str, str], write: WriteFile) -> int:
    address = node.own_address
    claim = Claim(range(FIRST_WORKER_PORT, FIRST_WORKER_PORT + NUM_PORTS), address)
    at = f"{address}:{claim.port}"
    words = ["worker", "--listen", at, "--secret-file", f"{node.settings.folder}/secret"]
    if node.job.gpus_per_node:
        words += ["--device", "cuda"]
    write(Path(node.run) / f"worker-{node.number}", at.encode())
    code = _child(node, _windlass(*words), environment, until=Path(node.run) / "root-ended")
    claim.close()
    return 0 if (Path(node.run) / "root-ended").exists() else code


def _root(node: Node, environment: dict[str, str], write: WriteFile) -> int:
    workers = [_awaited(Path(node.run) / f"worker-{number}", host).decode() for number, host in enumerate(node.hosts) if number]
    reached = node.own_address if workers else _host()
    words = list(node.job.command)
    if workers:
        words += ["--workers", ",".join(workers), "--secret-file", f"{node.settings.folder}/secret"]
    return _listening(node, words, reached, environment, write)


def _listening(node: Node, words: list[str], reached: str, environment: dict[str, str], write: WriteFile) -> int:
    server = _Server(words, Path(node.settings.folder), reached)
    try:
        return _child(node, _windlass(*server.words), environment, look=lambda: server.look(write))
    finally:
        (Path(node.run) / "root-ended").touch()
        server.ended()


def run_server(
    command: tuple[str, ...], settings: Settings, run: Path, write: WriteFile, argv: Callable[[tuple[str, ...]], list[str]]
) -> int:
    """A server whose root runs on this machine; `argv`: the command line for the words of `serve`."""
    server = _Server(list(command), Path(settings.folder), _host())
    job = Job(name="", command=tuple(server.words), kind="serve")
    node = Node(job=job, settings=settings, number=0, hosts=(_host(),), run=str(run))
    try:
        return _child(node, argv(tuple(server.words)), dict(os.environ), look=lambda: server.look(write))
    finally:
        server.ended()


class _Server:
    """The options of `serve` that were left open, and the address, written into the job's folder once the server answers."""

    def __init__(self, words: list[str], folder: Path, reached: str) -> None:
        self.words, self._folder, self._is_up = words, folder, False
        port, self._claim = _option(words, "--port"), None
        if port is None:
            self._claim = Claim(range(FIRST_SERVER_PORT, FIRST_SERVER_PORT + NUM_PORTS))
            port = str(self._claim.port)
            words += ["--port", port]
        host = _option(words, "--host")
        if host is None:
            words += ["--host", "0.0.0.0"]
            words += [word for name in dict.fromkeys([_host(), reached]) for word in ("--allow-host", name)]
        self._key = _option(words, "--api-key")
        if self._key is None:
            self._key = str(folder / "api-key")
            words += ["--api-key", self._key]
        self._asked_at = ("127.0.0.1" if host in (None, "0.0.0.0", "::") else host, int(port))
        reached = reached if self._asked_at[0] == "127.0.0.1" else self._asked_at[0]
        self._url = f"{'https' if _option(words, '--tls-cert') else 'http'}://{reached}:{port}"

    def look(self, write: WriteFile) -> None:
        if self._is_up or not _answers(self._asked_at, self._url):
            return
        self._is_up = True
        key = str(Path(self._key).absolute()) if self._key and Path(self._key).exists() else ""  # else it is the key itself
        write(self._folder / "address.json", msgspec.json.encode({"url": self._url, "api_key_file": key}))
        _say(f"serving at {self._url}{f'; the key is in {key}' if key else ''}")

    def ended(self) -> None:
        if self._claim is not None:
            self._claim.close()
        for name in ("address.json", *SECRETS):
            (self._folder / name).unlink(missing_ok=True)


def _option(words: Sequence[str], name: str) -> str | None:
    for place, word in enumerate(words):
        if word == name and place + 1 < len(words):
            return words[place + 1]
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None


def _answers(at: tuple[str, int], url: str) -> bool:
    """`url`: as clients write it; a server refuses names that are not its own. Its certificate is theirs to check."""
    import http.client
    import ssl

    scheme, _, name = url.partition("://")
    if scheme == "https":
        unverified = ssl.create_default_context()
        unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
        asked = http.client.HTTPSConnection(*at, timeout=2, context=unverified)
    else:
        asked = http.client.HTTPConnection(*at, timeout=2)
    try:
        asked.request("GET", "/health", headers={"Host": name})
        return asked.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        asked.close()


# --- one process


def _single(node: Node, environment: dict[str, str], write: WriteFile) -> int:
    return _child(node, _windlass(*node.job.command), environment)


def _array(node: Node, environment: dict[str, str], write: WriteFile) -> int:
    """One value, or without a scheduler all of them in turn; the worst code."""
    chosen = node.job.values if node.index is None else (node.job.values[node.index],)
    codes: list[int] = []
    for value in chosen:
        words = filled(node.job.command, value)
        _say(f"windlass {' '.join(words)}")
        codes.append(_child(node, _windlass(*words), environment))
    return max(codes)


def filled(command: Sequence[str], value: str) -> list[str]:
    return [word.replace(PLACE, value) for word in command]


# --- the process


def _child(
    node: Node, argv: list[str], environment: dict[str, str], until: Path | None = None, look: Callable[[], None] = lambda: None
) -> int:
    """Runs it, passes signals on, and tells it to save when the file `warned` appears. `until`: a file that ends it."""
    process = subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL, preexec_fn=_end_with_us)
    warning = signal.SIGUSR1 if node.job.kind == "train" else signal.SIGTERM
    telling = _Telling(process)
    try:
        while True:
            with suppress(subprocess.TimeoutExpired):
                code = _code(process.wait(SECONDS_BETWEEN_LOOKS))
                if code not in (0, STOPPED) and not telling.has_told:
                    _note_failure(node, code)
                return code
            look()
            if node.run and (Path(node.run) / "warned").exists():
                telling.tell(warning)
            if until is not None and until.exists():
                telling.tell(signal.SIGTERM)
    finally:
        telling.close()
        if process.poll() is None:
            process.terminate()
            process.wait()


def _end_with_us() -> None:
    """If this process is killed, what it started is told to end."""
    kill_with_parent(signal.SIGTERM)


class _Telling:
    """Passes signals on to a process, each kind once: a warning that comes as a signal and as a file would end a rank that is just leaving."""

    SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process, self._told = process, set[int]()
        self._before = {number: signal.signal(number, self._handle) for number in self.SIGNALS}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._told.discard(number)  # a second Ctrl-C ends at once
        self.tell(number)

    @property
    def has_told(self) -> bool:
        return bool(self._told)

    def tell(self, number: int) -> None:
        if number not in self._told and self._process.poll() is None:
            self._told.add(number)
            self._process.send_signal(number)

    def close(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _code(code: int) -> int:
    return code if code >= 0 else 128 - code
