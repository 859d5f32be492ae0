"""For every alert, series on which it fires and series on which it does not, in promtool's notation, a sample a minute.

promtool judges them (tests/tasks/observe/rules/test_promtool.py), and so does our own evaluation (tests/tasks/observe/alerts/test_own_rules.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

NAN = float("nan")


@dataclass(frozen=True)
class Case:
    alert: str
    series: dict[str, str]
    minutes: int
    """When to look."""
    fires: bool

    def __str__(self) -> str:
        return f"{self.alert}-{'fires' if self.fires else 'quiet'}"


def _pair(alert: str, minutes: int, fires: dict[str, str], quiet: dict[str, str]) -> list[Case]:
    return [Case(alert, fires, minutes, True), Case(alert, quiet, minutes, False)]


S = '{job="windlass-serve", instance="a:8000"}'
T = '{job="windlass-train", instance="t:9100"}'
N = '{job="windlass-node", instance="n:9400"}'
G = '{job="windlass-node", instance="n:9400", gpu="0", UUID="GPU-1", modelName="H200"}'


def _with(labels: str, more: str) -> str:
    return f"{labels[:-1]}, {more}}}"


def _name(metric: str, labels: str, more: str) -> str:
    return f"{metric}{_with(labels, more)}"


def _slow(name: str, bound: str, good: str, total: str) -> dict[str, str]:
    return {
        _name(f"windlass_{name}_seconds_bucket", S, f'le="{bound}"'): good,
        f"windlass_{name}_seconds_count{S}": total,
        f"windlass_time_to_first_token_seconds_count{S}": "0+60x100" if name != "time_to_first_token" else total,
    }


def _burn(alert: str, name: str, bound: str, minutes: int, good: str) -> list[Case]:
    total = f"0+60x{minutes + 10}"
    return _pair(alert, minutes, _slow(name, bound, good, total), _slow(name, bound, f"0+59.9x{minutes + 10}", total))


DISK = _with(N, 'device="/dev/sda", fstype="ext4", mountpoint="/"')


def _disk(avail: str) -> dict[str, str]:
    return {f"node_filesystem_avail_bytes{DISK}": avail, f"node_filesystem_size_bytes{DISK}": "1000x300"}


def _in_memory(place: str, avail: str) -> dict[str, str]:
    labels = _with(N, f'device="tmpfs", fstype="tmpfs", mountpoint="{place}"')
    return {f"node_filesystem_avail_bytes{labels}": avail, f"node_filesystem_size_bytes{labels}": "1000x300"}


def _outcomes(stop: str, other: str, kind: str) -> dict[str, str]:
    return {
        _name("windlass_requests_total", S, 'outcome="stop"'): stop,
        _name("windlass_requests_total", S, f'outcome="{kind}"'): other,
    }


def _rank(rank: int, spent: str) -> dict[str, str]:
    return {
        _name(
            "windlass_rank_collective_seconds_total", S, f'rank="{rank}", worker="w{rank}", collective="tp all_reduce", group="0"'
        ): spent
    }


def _route(small: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for model, decisions in (("small", small), ("large", "0+10x120")):
        found[_name("windlass_route_decisions_total", S, f'model="{model}"')] = decisions
        found[_name("windlass_route_expected_share_ratio", S, f'model="{model}"')] = "0.5x120"
    return found


CASES: list[Case] = [
    *_burn("WindlassFirstTokenBurnFast", "time_to_first_token", "2.5", 20, "0+40x30"),
    *_burn("WindlassFirstTokenBurnSlow", "time_to_first_token", "2.5", 40, "0+55x50"),
    *_burn("WindlassFirstTokenBurnSteady", "time_to_first_token", "2.5", 80, "0+58x90"),
    *_burn("WindlassBetweenTokensBurnFast", "inter_token_latency", "0.2", 20, "0+40x30"),
    *_burn("WindlassBetweenTokensBurnSlow", "inter_token_latency", "0.2", 40, "0+55x50"),
    *_burn("WindlassBetweenTokensBurnSteady", "inter_token_latency", "0.2", 80, "0+58x90"),
    *_pair("WindlassServerDown", 5, {f"up{S}": "1 1 0x5"}, {f"up{S}": "1 0 1x5"}),
    *_pair(
        "WindlassEngineDown",
        10,
        {f"windlass_engine_up{S}": "1 1 0x10", f"windlass_engine_restarts_total{S}": "0 0 1x10"},
        {f"windlass_engine_up{S}": "0x20", f"windlass_engine_restarts_total{S}": "0x20"},  # loading, for the first time
    ),
    *_pair(
        "WindlassEngineRestarted",
        6,
        {f"windlass_engine_restarts_total{S}": "0 0 0 1x20"},
        {f"windlass_engine_restarts_total{S}": "3x20"},
    ),
    *_pair(
        "WindlassEngineCrashLoop",
        12,
        {f"windlass_engine_restarts_total{S}": "0 0 0+1x20"},
        {f"windlass_engine_restarts_total{S}": "0 0 0 1x20"},
    ),
    *_pair("WindlassErrorRate", 12, _outcomes("0+50x20", "0+10x20", "error"), _outcomes("0+50x20", "0+1x20", "error")),
    *_pair(
        "WindlassErrorRate",
        6,
        _outcomes("0+50x20", "0 0 0+100x15", "error"),  # an outage that goes on
        _outcomes("0+50x20", "0 0 0 100x15", "error"),  # one of seconds
    ),
    *_pair("WindlassQueueFull", 10, _outcomes("0+50x20", "0+20x20", "full"), _outcomes("0+50x20", "0+1x20", "full")),
    *_pair(
        "WindlassQueueGrowing",
        14,
        {f"windlass_num_requests_waiting{S}": "0 0 0+3x20"},
        {f"windlass_num_requests_waiting{S}": "9 7 5 3 1 0 0 4 6 0 0 2 3 0 0 5 6"},
    ),
    *_pair(
        "WindlassKvCacheFull",
        12,
        {f"windlass_kv_cache_usage_ratio{S}": "0.99x20", f"windlass_num_preemptions_total{S}": "0+2x20"},
        {f"windlass_kv_cache_usage_ratio{S}": "0.99x20", f"windlass_num_preemptions_total{S}": "7x20"},
    ),
    *_pair(
        "WindlassPreemptions",
        20,
        {f"windlass_num_preemptions_total{S}": "0+5x30"},
        {f"windlass_num_preemptions_total{S}": "0+1x30"},
    ),
    *_pair(
        "WindlassOffloadLinkSaturated",
        35,
        {f"windlass_offload_read_seconds_total{S}": "0+58x40", f"windlass_engine_steps_total{S}": "0+9x40"},
        {f"windlass_offload_read_seconds_total{S}": "0+30x40", f"windlass_engine_steps_total{S}": "0+9x40"},
    ),
    *_pair(
        "WindlassLogLost", 5, {f"windlass_log_lines_lost_total{S}": "0 0 1 4x9"}, {f"windlass_log_lines_lost_total{S}": "4x9"}
    ),
    *_pair(
        "WindlassWorkerLost",
        5,
        {_name("windlass_fleet_worker_up", S, 'worker="b:9998"'): "1 1 0x9"},
        {_name("windlass_fleet_worker_up", S, 'worker="b:9998"'): "1x9"},
    ),
    *_pair(
        "WindlassStraggler",
        25,
        _rank(0, "0+30x30") | _rank(1, "0+2x30") | _rank(2, "0+31x30"),
        _rank(0, "0+6x30") | _rank(1, "0+2x30") | _rank(2, "0+7x30"),
    ),
    # --- training
    *_pair("WindlassTrainingDown", 5, {f"up{T}": "1 0x9"}, {f"up{T}": "1x9"}),
    *_pair(
        "WindlassTrainingStalled",
        30,
        {f"windlass_training_steps_total{T}": "0+6x10 60x30", f"windlass_training_step_seconds{T}": "10x40"},
        {f"windlass_training_steps_total{T}": "0+1x5 6x7 7x7 8x7 9x7", f"windlass_training_step_seconds{T}": "420x40"},
    ),
    *_pair("WindlassLossNaN", 3, {f"windlass_training_loss{T}": "2 2 NaN NaN"}, {f"windlass_training_loss{T}": "2 2 2 2"}),
    *_pair(
        "WindlassLossNaN",
        5,
        {_name("windlass_training_events_total", T, 'kind="not_finite"'): "0 0 0 1 1 1", f"windlass_training_loss{T}": "2x6"},
        {_name("windlass_training_events_total", T, 'kind="rollback"'): "0 0 0 1 1 1", f"windlass_training_loss{T}": "2x6"},
    ),
    *_pair(
        "WindlassRollbacks",
        20,
        {_name("windlass_training_events_total", T, 'kind="rollback"'): "0x5 0+1x20"},
        {_name("windlass_training_events_total", T, 'kind="rollback"'): "0x10 1x20"},
    ),
    *_pair(
        "WindlassLossSpike",
        80,
        {f"windlass_training_loss{T}": "2x70 5x20", f"windlass_training_step{T}": "500+1x90"},
        {f"windlass_training_loss{T}": "9-0.07x90", f"windlass_training_step{T}": "500+1x90"},
    ),
    *_pair(
        "WindlassThroughputDropped",
        110,
        {f"windlass_training_tokens_per_second{T}": "1000x80 500x40"},
        {f"windlass_training_tokens_per_second{T}": "1000x80 900x40"},
    ),
    *_pair(
        "WindlassExpertsUneven",
        70,
        {f"windlass_training_expert_balance_cv{T}": "1.6x90", f"windlass_training_step{T}": "500+1x90"},
        {f"windlass_training_expert_balance_cv{T}": "0.4x90", f"windlass_training_step{T}": "500+1x90"},
    ),
    *_pair(
        "WindlassCheckpointOverdue",
        130,
        {
            f"windlass_training_last_checkpoint_timestamp_seconds{T}": "60x150",
            f"windlass_training_checkpoint_interval_seconds{T}": "600x150",
        },
        {
            f"windlass_training_last_checkpoint_timestamp_seconds{T}": "60x100 6000x50",
            f"windlass_training_checkpoint_interval_seconds{T}": "600x150",
        },
    ),
    *_pair(
        "WindlassCheckpointFailed",
        9,
        {_name("windlass_training_events_total", T, 'kind="checkpoint_failed"'): "0 0 0 1x9"},
        {_name("windlass_training_events_total", T, 'kind="checkpoint"'): "0 0 0 1x9"},
    ),
    *_pair("WindlassRouterDrift", 110, _route("0+40x120"), _route("0+11x120")),
    # --- machines
    *_pair("WindlassGpuHot", 10, {f"DCGM_FI_DEV_GPU_TEMP{G}": "70 91x12"}, {f"DCGM_FI_DEV_GPU_TEMP{G}": "70x5 91 70x5"}),
    *_pair(  # the names from DCGM 4.6 on; a sensor without a reading
        "WindlassGpuHot",
        10,
        {f"DCGM_FI_DEV_GPU_TEMP_CELSIUS{G}": "70 91x12"},
        {f"DCGM_FI_DEV_GPU_TEMP_CELSIUS{G}": "2147483647x12"},
    ),
    *_pair(
        "WindlassGpuThrottled",
        12,
        {_name("windlass_gpu_throttled_seconds_total", N, 'gpu="0", reason="hw_thermal"'): "0+20x20"},
        {_name("windlass_gpu_throttled_seconds_total", N, 'gpu="0", reason="sw_power_cap"'): "0+60x20"},
    ),
    *_pair(
        "WindlassGpuXid",
        12,
        {_name("windlass_gpu_xid_errors_total", N, 'gpu="0", xid="79"'): "_x10 1x9"},
        {_name("windlass_gpu_xid_errors_total", N, 'gpu="0", xid="31"'): "_x10 1x9"},
    ),
    *_pair(
        "WindlassGpuXidOfProgram",
        25,
        {_name("windlass_gpu_xid_errors_total", N, 'gpu="0", xid="31"'): "1x20 2x9"},
        {_name("windlass_gpu_xid_errors_total", N, 'gpu="0", xid="31"'): "1x30"},
    ),
    *_pair("WindlassGpuXidSeen", 9, {f"DCGM_FI_DEV_XID_ERRORS{G}": "0x5 48x9"}, {f"DCGM_FI_DEV_XID_ERRORS{G}": "48x15"}),
    *_pair(
        "WindlassGpuMemoryErrors",
        9,
        {f"DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{G}": "0x5 1x9"},
        {f"DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{G}": "3x15"},
    ),
    *_pair(
        "WindlassGpuMemoryErrors",
        9,
        {f"DCGM_FI_DEV_ROW_REMAP_FAILURE{G}": "0 1x9"},
        {f"DCGM_FI_DEV_ROW_REMAP_FAILURE{G}": "0x15"},
    ),
    *_pair(
        "WindlassGpuMemoryFull",
        20,
        {f"DCGM_FI_DEV_FB_USED{G}": "143000x30", f"DCGM_FI_DEV_FB_FREE{G}": "700x30"},
        {f"DCGM_FI_DEV_FB_USED{G}": "130000x30", f"DCGM_FI_DEV_FB_FREE{G}": "13700x30"},
    ),
    *_pair("WindlassNodeDown", 5, {f"up{N}": "1 0x9"}, {f"up{N}": "1 0 1x9"}),
    *_pair("WindlassDiskFull", 9, _disk("500 20x20"), _disk("500x20")),
    *_pair("WindlassDiskFull", 9, _in_memory("/dev/shm", "20x20"), _in_memory("/run/lock", "20x20")),
    *_pair("WindlassDiskFilling", 80, _disk("190-1x120"), _disk("190x120")),
    # A burst of half an hour, then nothing: the line over six hours still falls, the last half hour's does not.
    Case("WindlassDiskFilling", _disk("190-3x20 130x120"), 100, fires=False),
    *_pair(
        "WindlassMemoryFull",
        9,
        {f"node_memory_MemAvailable_bytes{N}": "3x20", f"node_memory_MemTotal_bytes{N}": "100x20"},
        {f"node_memory_MemAvailable_bytes{N}": "30x20", f"node_memory_MemTotal_bytes{N}": "100x20"},
    ),
    *_pair(
        "WindlassEnergyBudget",
        25,
        {
            _name("windlass_node_energy_joules_total", N, 'source="nvml"'): "0+42000x30",
            f"windlass_energy_budget_watts{N}": "500x30",
        },
        {
            _name("windlass_node_energy_joules_total", N, 'source="nvml"'): "0+42000x30",
            f"windlass_energy_budget_watts{N}": "0x30",
        },
    ),
    *_pair(
        "WindlassExporterFailing",
        12,
        {_name("windlass_exporter_errors_total", N, 'source="nvml"'): "0+1x20"},
        {_name("windlass_exporter_errors_total", N, 'source="nvml"'): "3x20"},
    ),
]


# --- promtool's notation -----------------------------------------------------------------------------------------------

_ITEM = re.compile(r"^(?P<start>-?[\d.]+|NaN|_)(?:(?P<sign>[+-])(?P<step>[\d.]+))?(?:x(?P<count>\d+))?$")


def expanded(notation: str) -> list[float | None]:
    """`0+10x3` -> 0, 10, 20, 30; `2x3` -> four twos; `_x3` -> three gaps."""
    found: list[float | None] = []
    for item in notation.split():
        match = _ITEM.match(item)
        assert match is not None, item
        times = int(match["count"] or 0)
        if match["start"] == "_":
            found += [None] * max(times, 1)
            continue
        start = float(match["start"])
        slope = float(match["step"] or 0) * (-1 if match["sign"] == "-" else 1)
        found += [start + slope * number for number in range(times + 1)]
    return found


def named(series: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    name, _, inside = series.partition("{")
    return name, tuple(sorted(re.findall(r'(\w+)="([^"]*)"', inside)))
