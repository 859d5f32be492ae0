"""What is watched, and whom alerts reach."""

from __future__ import annotations

from windlass.core.model import Frozen
from windlass.core.plan import Plan
from windlass.tasks.observe.rules.rule import Objectives

NODE_PORT = 9400
"""Of `windlass observe node`; dcgm-exporter's default."""


class Targets(Frozen):
    """Addresses as host:port. Jobs are named after what they are, and rules know them by it."""

    serve: tuple[str, ...] = ()
    train: tuple[str, ...] = ()
    node: tuple[str, ...] = ()
    evaluate: tuple[str, ...] = ()
    key_file: str = ""
    """A file with the key that servers and nodes ask for; empty: none."""

    @property
    def jobs(self) -> dict[str, tuple[str, ...]]:
        found = {
            "windlass-serve": self.serve,
            "windlass-train": self.train,
            "windlass-node": self.node,
            "windlass-eval": self.evaluate,
        }
        return {job: addresses for job, addresses in found.items() if addresses}


class Receivers(Frozen):
    webhook: str = ""
    mail_to: str = ""
    mail_from: str = ""
    smtp: str = ""
    """host:port of the mail server that Alertmanager uses."""


class Stack(Frozen):
    """Everything that `windlass observe render` writes."""

    targets: Targets
    receivers: Receivers = Receivers()
    objectives: Objectives = Objectives()
    plan: Plan | None = None
    """Its predictions are shown beside what is measured."""
    prometheus: str = "127.0.0.1:9090"
    alertmanager: str = "127.0.0.1:9093"
    grafana_port: int = 3000
    scrape_seconds: float = 5.0
    retention: str = "30d"
