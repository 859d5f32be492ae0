"""Commands to start: values only."""

from __future__ import annotations

import shlex

from windlass.core.model import Frozen

SECRET = "..."


class ServedModel(Frozen):
    """The model files that a server loads, as far as flags depend on them."""

    path: str
    name: str
    """Model name in the API."""
    stored: str = "bf16"
    """Scheme of its matrices; `bf16` for any plain floats."""
    chat_template: str | None = None


class VllmOptions(Frozen):
    """What the plan does not decide: where to listen, and this machine's properties."""

    python: str = "python3"
    """The interpreter of the environment that has vLLM."""
    host: str = "127.0.0.1"
    port: int = 8001
    api_key: str = ""
    """Passed in the environment, since any user of the machine can see command lines."""
    master_address: str = ""
    """Of the first node, as the others reach it; only with several nodes."""
    master_port: int = 29501
    device_bytes: int = 0
    """Memory of a device as its driver reports it; 0: unknown. More than the plan's if the plan has a cap."""
    visible: tuple[str, ...] = ()
    """CUDA_VISIBLE_DEVICES of this process: the plan's device numbers index it."""
    cpus: tuple[int, ...] = ()
    """Logical CPUs that ranks are bound to, on a CPU."""
    extra: tuple[str, ...] = ()
    """Further arguments for vLLM."""


class Command(Frozen):
    argv: tuple[str, ...]
    env: dict[str, str]
    """Added to the environment."""
    notes: tuple[str, ...] = ()
    """Where vLLM will differ from the plan."""
    secrets: tuple[str, ...] = ()
    """Names in `env` whose values are not shown."""

    def shown(self) -> str:
        """As a shell command line, without secrets."""
        variables = [
            f"{name}={SECRET if name in self.secrets else shlex.quote(value)}" for name, value in sorted(self.env.items())
        ]
        return " ".join([*variables, shlex.join(self.argv)])
