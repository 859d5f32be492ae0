"""Faults injected end to end: how long until Prometheus fires and until Alertmanager's webhook arrives, with the rules as they are shipped.

`.venv/bin/python bench/observe/faults.py [--only NAME,...]` (about 25 minutes; half of it is the stall, whose window is ten minutes).
Needs Prometheus and Alertmanager. Scrapes every 5 s and evaluates every 15 s, as `windlass observe render` writes it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "tasks" / "observe"))

from rig import MISSING, Rig, has_stack, rig

from windlass.tasks.observe.rules.all_rules import all_groups

MOST_SECONDS = 1500.0


def _crash(made: Rig) -> None:
    made.server.call(made.client.crash)


def _worker(made: Rig) -> None:
    made.server.call(lambda: made.client.lost.add("b:9998"))


def _xid(made: Rig) -> None:
    made.nvml.fail(3, 79)


def _heat(made: Rig) -> None:
    made.nvml.heat[2] = 60.0


def _throttle(made: Rig) -> None:
    made.nvml.reasons[5] = 0x40


def _disk(made: Rig) -> None:
    made.disk_full = True


def _nan(made: Rig) -> None:
    made.run.bad_loss()


def _stall(made: Rig) -> None:
    made.run.is_stalled = True


def _flood(made: Rig) -> None:
    """Answers take seconds, and twenty clients come back at once."""
    made.server.call(lambda: setattr(made.client, "seconds", 0.5))
    made.load.add(20, pause=0.5)


FAULTS: dict[str, tuple[Callable[[Rig], None], str]] = {
    "engine killed": (_crash, "WindlassEngineRestarted"),
    "worker cut": (_worker, "WindlassWorkerLost"),
    "loss NaN": (_nan, "WindlassLossNaN"),
    "step stalled": (_stall, "WindlassTrainingStalled"),
    "disk filled": (_disk, "WindlassDiskFull"),
    "XID 79": (_xid, "WindlassGpuXid"),
    "GPU hot": (_heat, "WindlassGpuHot"),
    "GPU throttled": (_throttle, "WindlassGpuThrottled"),
    "queue flooded": (_flood, "WindlassQueueFull"),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default=",".join(FAULTS))
    parser.add_argument(
        "--healthy-minutes", type=float, default=11.0, help="before the first fault: the stall rule wants ten minutes of past"
    )
    options = parser.parse_args()
    if not has_stack():
        sys.exit(MISSING)
    chosen = options.only.split(",")
    with tempfile.TemporaryDirectory() as folder, rig(Path(folder), all_groups(), scrape_seconds=5.0, quick=False) as made:
        _soak(made, options.healthy_minutes)
        _inject(made, chosen)


def _soak(made: Rig, minutes: float) -> None:
    """Nothing may fire but the energy budget, which the rig sets to 1 W."""
    series: list[float] = []
    until = time.monotonic() + 60 * minutes
    false: set[str] = set()
    while time.monotonic() < until:
        time.sleep(15)
        false |= made.firing() - {"WindlassEnergyBudget"}
        counted = made.query("sum(scrape_samples_scraped)")
        series.append(float(counted[0]["value"][1]) if counted else 0.0)
    print(
        f"healthy for {minutes:g} min: false alarms {sorted(false) or 'none'}; samples a scrape {series[1:2]} -> {series[-1:]}",
        flush=True,
    )


def _inject(made: Rig, chosen: list[str]) -> None:
    began = {name: (FAULTS[name][0](made), time.monotonic())[1] for name in chosen}
    fired: dict[str, float] = {}
    arrived: dict[str, float] = {}
    while len(arrived) < len(chosen) and time.monotonic() - min(began.values()) < MOST_SECONDS:
        time.sleep(1)
        firing, hooked = made.firing(), {name: at for name, status, at in reversed(made.hook.seen) if status == "firing"}
        for name in chosen:
            alert = FAULTS[name][1]
            if alert in firing:
                fired.setdefault(name, time.monotonic() - began[name])
            if alert in hooked:
                arrived.setdefault(name, hooked[alert] - began[name])
    for name in chosen:
        shown = [f"{found[name]:6.1f} s" if name in found else "   never" for found in (fired, arrived)]
        print(f"{name:<14} {FAULTS[name][1]:<26} fires after {shown[0]}, webhook after {shown[1]}", flush=True)


if __name__ == "__main__":
    main()
