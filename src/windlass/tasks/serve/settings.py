"""Configuration of the server. Values only, checked when made."""

from __future__ import annotations

import math

from windlass.core.model import Frozen
from windlass.core.request import Sampling
from windlass.errors import BadInput
from windlass.tasks.serve.api_key import ApiKey, check_secret, named_keys
from windlass.units import MIB


class ServerSettings(Frozen):
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[ApiKey | str, ...] = ()
    """A plain key grants access to every route; empty: no key is needed."""
    tls_cert: str = ""
    tls_key: str = ""
    """PEM files; empty: no TLS."""
    model: str = ""
    """The model name clients use; empty: the engine's name for it."""
    adapters: tuple[tuple[str, str], ...] = ()
    """LoRA adapters of the model: names, and the folders that they are in."""
    lora_folder: str = ""
    """Where adapters may be loaded from at run time; empty: nowhere."""
    max_waiting: int = 64
    """Maximum queued sequences, beyond those that run; further requests get 429."""
    max_body_bytes: int = 8 * MIB
    max_bodies_bytes: int = 64 * MIB
    """Of all bodies being read at a time; one body of `max_body_bytes` is always accepted."""
    max_n: int = 16
    """Maximum `n` of a request."""
    max_batch: int = 64
    """Maximum sequences of one request: prompts times n."""
    deadline_seconds: float = 600.0
    """Default and maximum `timeout` of a request. OpenAI's clients wait as long."""
    head_seconds: float = 20.0
    """Time for a client to send the headers, and again for the body."""
    drain_seconds: float = 30.0
    """On shutdown, time for requests in flight to finish."""
    stuck_seconds: float = 120.0
    """An engine that does not respond for this long is restarted."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names accepted besides the server's own."""
    cors_origins: tuple[str, ...] = ()
    """Origins of other sites whose pages may call the API; none by default."""
    sampling: Sampling = Sampling()
    """Defaults for requests that leave sampling parameters out."""
    files_folder: str = ""
    """Where files and batches are kept; empty: there are none."""
    metric_aliases: bool = True
    """/metrics has vLLM's names too."""
    usage_energy: bool = False
    """Responses' usage says how many joules the request took, where there is a counter."""
    log_requests: bool = True
    log_prompts: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise BadInput(f"port is {self.port}; it should be between 0 (any free port) and 65535")
        for name in ("max_body_bytes", "max_bodies_bytes", "max_n", "max_batch"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} is {getattr(self, name)}; it should be at least 1")
        if self.max_waiting < 0:
            raise BadInput(f"max_waiting is {self.max_waiting}; it should be at least 0")
        for name in ("deadline_seconds", "head_seconds", "stuck_seconds"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise BadInput(f"{name} is {getattr(self, name):g}; it should be positive and finite")
        if not (math.isfinite(self.drain_seconds) and self.drain_seconds >= 0):
            raise BadInput(f"drain_seconds is {self.drain_seconds:g}; it should be at least 0 and finite")
        for key in self.api_keys:
            if isinstance(key, str):
                check_secret(key)
        names = [key.name for key in self.keys]
        for name in (name for name in names if names.count(name) > 1):
            raise BadInput(f"two API keys are named {name}; give each its own name")

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        return named_keys(self.api_keys)
