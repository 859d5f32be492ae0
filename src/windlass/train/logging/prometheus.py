"""Serves metrics to Prometheus on its own port."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from windlass.errors import BadInput, MissingExtra
from windlass.train.logging.fan_out import StepMetrics

GAUGES = (
    ("training_loss", "Loss of the last step.", "loss"),
    ("training_learning_rate", "Learning rate of the last step.", "learning_rate"),
    ("training_tokens_per_second", "Tokens a second in the last step, over all ranks.", "tokens_per_second"),
    ("training_gradient_norm", "Norm of the gradient before clipping.", "grad_norm"),
    ("training_validation_loss", "The last loss on held-out data.", "validation_loss"),
    ("training_mfu", "Model FLOPs utilisation, 0 to 1.", "mfu"),
    ("expert_balance_cv", "Standard deviation over mean of the tokens an expert gets; 0 is even.", "expert_balance_cv"),
)
COUNTED = ("rollback", "checkpoint", "checkpoint_failed")


class Prometheus:
    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        """`port` 0: any free port; `self.port` is the actual one."""
        try:
            import prometheus_client as client
        except ImportError:
            raise MissingExtra("prometheus-client", "train", "serving numbers to Prometheus") from None
        registry = client.CollectorRegistry()
        self._gauges = {field: client.Gauge(name, text, registry=registry) for name, text, field in GAUGES}
        self._steps = client.Counter("training_steps", "Steps done by this process.", registry=registry)
        self._tokens = client.Gauge("training_tokens", "Tokens since the run began.", registry=registry)
        self._events = client.Counter("training_events", "Rollbacks and checkpoints.", ["kind"], registry=registry)
        try:
            self._server, self._thread = client.start_http_server(port, addr=host, registry=registry)
        except (OSError, OverflowError) as error:
            raise BadInput(f"--prometheus {port}: cannot open the port: {error}") from None
        self.port: int = self._server.server_port

    def sample(self, sample: StepMetrics) -> None:
        for field, gauge in self._gauges.items():
            value = getattr(sample, field)
            if value is not None:
                gauge.set(value)
        self._steps.inc()
        self._tokens.set(sample.tokens)

    def event(self, kind: str, values: Mapping[str, Any]) -> None:
        if kind == "validation":
            self._gauges["validation_loss"].set(values["loss"])
        elif kind in COUNTED:
            self._events.labels(kind=kind).inc()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
