"""What is started and how: values only."""

from __future__ import annotations

import shlex

from windlass.core.model import Frozen

SECRET = "..."


class ServedModel(Frozen):
    """The files that a server is pointed at, as far as flags depend on them."""

    path: str
    name: str
    """What clients call it."""
    stored: str = "bf16"
    """How its matrices are stored: a scheme's name; `bf16` for any plain floats."""
    chat_template: str | None = None


class Options(Frozen):
    """What the plan does not decide: where to listen, and what this machine is like."""

    python: str = "python3"
    """The interpreter in which vLLM is installed."""
    host: str = "127.0.0.1"
    port: int = 8001
    api_key: str = ""
    """Handed over in the environment, since any user of the machine may list the words of a command."""
    master_address: str = ""
    """Of the first node, as the others reach it; only where there are several."""
    master_port: int = 29501
    device_bytes: int = 0
    """Memory of a device as its driver reports it, where it is known: more than the plan's where the plan was given a cap."""
    visible: tuple[str, ...] = ()
    """CUDA_VISIBLE_DEVICES as it is set here: the plan's devices are numbered among these."""
    cpus: tuple[int, ...] = ()
    """Logical CPUs that ranks may be bound to, where the device is a CPU."""
    extra: tuple[str, ...] = ()
    """Further words for vLLM, as they are."""


class Command(Frozen):
    argv: tuple[str, ...]
    env: dict[str, str]
    """Added to the environment that it is started in."""
    notes: tuple[str, ...] = ()
    """Where what will run differs from what was planned."""
    secrets: tuple[str, ...] = ()
    """Names in `env` whose values are not to be shown."""

    def shown(self) -> str:
        """As a line for a shell, without its secrets."""
        words = [f"{name}={SECRET if name in self.secrets else shlex.quote(value)}" for name, value in sorted(self.env.items())]
        return " ".join([*words, shlex.join(self.argv)])
