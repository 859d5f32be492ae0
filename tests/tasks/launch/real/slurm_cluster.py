"""A real Slurm on one machine: munged, slurmctld and one slurmd for each host of `hosts_on_one_box`. Needs root and slurm-wlm."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from hosts_on_one_box import Hosts, run
from hosts_on_one_box import missing as no_hosts

from waiting import HUNG_SECONDS

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol")

CONF = """
ClusterName=windlass
SlurmctldHost={control}({address})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
PropagateResourceLimits=NONE
MpiDefault=none
SwitchType=switch/none
JobRequeue=1
KillWait=30
MinJobAge=300
InactiveLimit=0
SlurmdTimeout=60
SchedulerParameters=batch_sched_delay=1,sched_interval=5,sched_min_interval=0
{nodes}
PartitionName=batch Nodes={names} Default=YES MaxTime=01:00:00 State=UP
PartitionName=short Nodes={names} MaxTime=00:05:00 State=UP
"""


def missing() -> str:
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"{', '.join(lacking)} not installed (apt-get install slurm-wlm munge)" if lacking else no_hosts()


class Slurm:
    def __init__(self, folder: Path, names: list[str], port: int = 16817) -> None:
        self.folder, self.hosts = folder, Hosts(folder, names)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.conf = folder / "slurm.conf"
        nodes = [
            f"NodeName={name} NodeHostname={name} NodeAddr={self.hosts.addresses[name]} Port=17001 CPUs=2 RealMemory=2000 State=UNKNOWN"
            for name in names
        ]
        text = CONF.format(
            control=os.uname().nodename,
            address=self.hosts.control,
            port=port,
            folder=folder,
            nodes="\n".join(nodes),
            names=",".join(names),
        )
        self.conf.write_text(text)
        (folder / "state").mkdir()
        for name in names:
            (folder / f"spool-{name}").mkdir()
        self._munge()
        self._start("slurmctld", ["slurmctld", "-D", "-c", "-f", str(self.conf)])
        for name in names:
            self.start_node(name)
        self.until(lambda: self.output("sinfo", "-h", "-o", "%t").split() in (["idle"], ["idle"] * 2), "nodes are idle")

    def _munge(self) -> None:
        """Of its own key and socket folder, unless one runs already."""
        if Path("/run/munge/munge.socket.2").exists() and run("munge", "-n", check=False).returncode == 0:
            return
        for place in ("/run/munge", "/var/log/munge", "/var/lib/munge", "/etc/munge"):
            Path(place).mkdir(exist_ok=True)
            shutil.chown(place, "munge", "munge")
        Path("/run/munge").chmod(0o755)
        self._start("munged", ["runuser", "-u", "munge", "--", "munged", "--foreground", "--force"])
        self.until(lambda: run("munge", "-n", check=False).returncode == 0, "munged answers")

    def _start(self, name: str, argv: list[str]) -> None:
        with (self.folder / f"{name}.out").open("wb") as out:
            self.processes[name] = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=os.environ | {"SLURM_CONF": str(self.conf)},
                process_group=0,
            )

    def start_node(self, name: str) -> None:
        self._start(name, self.hosts.inside(name, "slurmd", "-D", "-N", name, "-f", str(self.conf)))

    def kill_node(self, name: str) -> None:
        """The host is lost: its daemon, and every process in its network namespace."""
        for pid in run("ip", "netns", "pids", self.hosts.namespace(name), check=False).stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        self.processes.pop(name).wait()

    def output(self, *words: str) -> str:
        done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"SLURM_CONF": str(self.conf)}, check=False)
        return done.stdout

    def until(self, is_so: Callable[[], bool], what: str, seconds: float = HUNG_SECONDS) -> None:
        end = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < end, f"hung: {what}; {self.output('squeue')} {self.output('sinfo', '-R')}"
            time.sleep(0.2)

    def close(self) -> None:
        for name in [*self.hosts.names, "slurmctld", "munged"]:
            process = self.processes.pop(name, None)
            if process is None:
                continue
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for name in self.hosts.names:
            for pid in run("ip", "netns", "pids", self.hosts.namespace(name), check=False).stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        self.hosts.close()
