"""What a client saw of one request, and of one load. Times are seconds of one monotonic clock."""

from __future__ import annotations

from bisect import bisect_right

from windlass.core.model import Frozen
from windlass.tasks.bench.served.load import Load


class RequestRecord(Frozen):
    sent: float
    """When it was due: what a client or a busy machine delays counts as waiting."""
    ended: float
    times: tuple[float, ...] = ()
    """Of the events that brought tokens, in order; the client saw those of one read at the same time."""
    prompt_tokens: int = 0
    """As the server counts them; 0: it does not say."""
    completion_tokens: int = 0
    cached_tokens: int = 0
    status: int = 0
    """HTTP status; 0: there was no answer."""
    finish: str = ""
    error: str = ""
    """Empty: answered in full."""

    @property
    def is_answered(self) -> bool:
        return not self.error and bool(self.times)

    @property
    def num_tokens(self) -> int:
        """The server's own count, else one for each event."""
        return self.completion_tokens or len(self.times)

    @property
    def first_token_seconds(self) -> float:
        return self.times[0] - self.sent

    @property
    def end_to_end_seconds(self) -> float:
        return self.times[-1] - self.sent

    @property
    def mean_between_seconds(self) -> float:
        """0 where there is but one token."""
        return (self.times[-1] - self.times[0]) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0

    def tokens_in(self, after: float, until: float) -> float:
        """Tokens that arrived in (after, until]. Where the server counts other than its events, each event is worth as many."""
        events = bisect_right(self.times, until) - bisect_right(self.times, after)
        return events * self.num_tokens / len(self.times)


class EngineSteps(Frozen):
    """What the server's own counters say of a load."""

    steps: int
    output_tokens: int
    prompt_tokens: int = 0
    preemptions: int = 0

    @property
    def output_tokens_per_step(self) -> float:
        return self.output_tokens / self.steps if self.steps else 0.0

    @property
    def prompt_tokens_per_step(self) -> float:
        return self.prompt_tokens / self.steps if self.steps else 0.0


class LoadRun(Frozen):
    """One run of a load against one server."""

    load: Load
    began: float
    ended: float
    records: tuple[RequestRecord, ...]
    client_cpu_seconds: float = 0.0
    steps: EngineSteps | None = None
    """None: the server does not count them."""
