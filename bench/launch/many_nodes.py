"""1,024 simulated nodes: how long rendering, parsing a hostfile, judging and the report take, and how many lines a person reads.

python bench/launch/many_nodes.py [--nodes 1024]
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "tasks" / "check"))

import healthy
import msgspec
from rich.console import Console

from windlass.cli.check.table import table
from windlass.tasks.check.machine.facts import judge_machine
from windlass.tasks.check.machine.host import judge_alike
from windlass.tasks.check.needs import Needs
from windlass.tasks.check.network.judge import Measured, Reached, judge_bandwidth, judge_fabric, judge_reach, judge_work
from windlass.tasks.check.report import Report
from windlass.tasks.launch.hostfile import parse_hostfile
from windlass.tasks.launch.job import Job, Settings
from windlass.tasks.launch.render.choose import render_job


def timed(name: str, call: Callable[[], Any]) -> Any:
    began, used = time.perf_counter(), time.process_time()
    found = call()
    print(f"{name:<28} {time.perf_counter() - began:.3f} s, {time.process_time() - used:.3f} s of CPU")
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=1024)
    number = parser.parse_args().nodes
    names = [f"node{place:04}" for place in range(number)]
    lines = tuple(f"{name} slots=8" for name in names)
    timed("parse the hostfile", lambda: parse_hostfile("\n".join(lines)))
    places = {"folder": "/shared/job", "workdir": "/shared", "python": "/opt/python"}
    job = Job(
        name="big",
        command=("train", "run", "r.toml"),
        kind="train",
        num_nodes=number,
        min_nodes=number,
        gpus_per_node=8,
        ranks_per_node=8,
    )
    timed("render slurm", lambda: render_job(job, Settings(scheduler="slurm", **places)))
    timed("render ssh", lambda: render_job(job, Settings(scheduler="ssh", hosts=lines, **places)))
    report = timed("judge all machines", lambda: judged(names))
    shown = io.StringIO()
    timed("the report as a table", lambda: Console(file=shown, width=160).print(table(report)))
    timed("the report as JSON", lambda: msgspec.json.encode(report.as_json()))
    print(f"in all {time.process_time():.2f} s of CPU, imports included")
    print(f"{len(report.checks):,} checks, {shown.getvalue().count(chr(10))} lines to read")


def judged(names: list[str]) -> Report:
    """Five faults in all."""
    needs = Needs(num_gpus=8, gpu_bytes=70 * 2**30, num_machines=len(names))
    facts = {name: healthy.machine(host=name) for name in names}
    facts[names[7]] = msgspec.structs.replace(facts[names[7]], gpus=healthy.gpus(uncorrected_errors=1))
    facts[names[9]] = msgspec.structs.replace(facts[names[9]], gpus=healthy.gpus(throttle_bits=0x8))
    rows = [row for name, one in facts.items() for row in judge_machine(one, needs, name)]
    rows += judge_alike([one.host for one in facts.values()], dict.fromkeys(names, 0.001) | {names[3]: 2.0})
    rows += judge_fabric({name: one.fabric for name, one in facts.items()})
    ring = list(zip(names, [*names[1:], names[0]], strict=True))
    rows += judge_reach(
        [Reached(source=one, target=other, port=9998, seconds=None if other == names[20] else 1e-4) for one, other in ring]
    )
    rows += judge_bandwidth([Measured(source=one, target=other, bytes_per_second=4e10) for one, other in ring])
    work = {name: {"matmul_tflops": 700.0, "copy_gbytes": 3000.0} for name in names}
    rows += judge_work(work | {names[11]: {"matmul_tflops": 400.0, "copy_gbytes": 3000.0}})
    return Report(checks=tuple(rows))


if __name__ == "__main__":
    main()
