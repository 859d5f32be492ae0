"""Environment variables for collectives: those that fit a fabric, each with its reason, and names that do not exist. Pure.

Few are set: NCCL and PyTorch choose well, and NVIDIA asks that tuning variables not be kept in scripts. What a user sets is never changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from windlass.core.model import Frozen
from windlass.runtime.machine.fabric.fabric import Fabric

# Names of NCCL 2.32.3 as they stand in the library (strings of libnccl.so.2), one a line.
_NAMES = Path(__file__).with_name("nccl_names.txt")

# Names that are passed around and read by nothing, and what is meant. Sources: NCCL's env.rst, PyTorch's and transformers' sources.
MEANT = {
    "NCCL_TREE_THRESHOLD": "nothing: it was removed in NCCL 2.5, and NCCL chooses trees by itself",
    "NCCL_LL_THRESHOLD": "nothing: it was removed in NCCL 2.5",
    "NCCL_SINGLE_RING_THRESHOLD": "nothing: it was removed in NCCL 2.3",
    "NCCL_TIMEOUT": "the timeout of init_process_group (in a recipe's run it is 10 minutes); NCCL_IB_TIMEOUT is something else",
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING (3, its default)",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_IB_CUDA_SUPPORT": "NCCL_NET_GDR_LEVEL",
    "NCCL_NET_GDR": "NCCL_NET_GDR_LEVEL",
    "NCCL_IB_GDR_LEVEL": "NCCL_NET_GDR_LEVEL",
    "NCCL_IFNAME": "NCCL_SOCKET_IFNAME",
    "NCCL_IB_IFNAME": "NCCL_SOCKET_IFNAME, or NCCL_IB_HCA for InfiniBand devices",
    "NCCL_IB_ENABLE": "NCCL_IB_DISABLE=0, which is the default",
    "NCCL_P2P_ENABLE": "NCCL_P2P_DISABLE=0, which is the default",
    "SLURM_LOCAL_ID": "SLURM_LOCALID",
    "TRANSFORMERS_CACHE": "HF_HOME",
    "CUDNN_BENCHMARK": "torch.backends.cudnn.benchmark",
    "DEEPSPEED_NVME_PATH": "offload nvme_path in DeepSpeed's config",
    "CUDA_VISIBLE_DEVICE": "CUDA_VISIBLE_DEVICES",
    "GLOO_IFNAME": "GLOO_SOCKET_IFNAME",
}

OF_IMAGES = ("NCCL_VERSION",)
"""Set by NVIDIA's container images for people to read."""

# Exist, but harm when they are copied from somebody else's cluster.
DOUBTFUL = {
    "NCCL_IB_GID_INDEX": "since NCCL 2.21 the index is chosen; a fixed one breaks when addresses change",
    "NCCL_ALGO": "a debugging variable; since 2.24 a wrong value fails instead of falling back",
    "NCCL_PROTO": "a debugging variable; LL128 where it is unsupported can corrupt data",
    "NCCL_P2P_LEVEL": "NVL forbids peers over PCIe",
    "NCCL_IB_DISABLE": "1 sends everything over TCP",
    "NCCL_P2P_DISABLE": "1 sends everything through host memory",
    "NCCL_SHM_DISABLE": "1 sends traffic inside a machine over the network",
    "NCCL_CHECK_POINTERS": "slows every call",
}


class Variable(Frozen):
    name: str
    value: str
    reason: str


class Wrong(Frozen):
    """A variable of the user's that does nothing, or that may do harm."""

    name: str
    why: str
    is_unknown: bool
    """It is read by nothing."""


@cache
def nccl_names() -> frozenset[str]:
    return frozenset(_NAMES.read_text(encoding="ascii").split())


def fitting(fabric: Fabric, own_address: str, num_nodes: int, num_gpus: int, given: Mapping[str, str]) -> tuple[Variable, ...]:
    """What to set on one node, `own_address` being where the other nodes reach it. Names that `given` has are left out."""
    wanted = [*_interface(fabric, own_address, num_nodes, num_gpus), *_adapters(fabric, num_nodes, num_gpus)]
    if num_gpus and num_nodes > 1:
        wanted.append(
            Variable(
                name="TORCH_NCCL_TRACE_BUFFER_SIZE",
                value="2000",
                reason="PyTorch's flight recorder: after a timeout it says which rank was behind, in which collective",
            )
        )
    if num_nodes > 1:
        wanted.append(
            Variable(
                name="TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
                value="1",
                reason="restarted ranks would find addresses of dead ones in a shared store, and wait (torch 2.13)",
            )
        )
    return tuple(one for one in wanted if one.name not in given)


def threads(num_cores: int, num_ranks: int, given: Mapping[str, str]) -> tuple[Variable, ...]:
    """For several processes of one node: each would start a thread a core, and they would wait for each other's."""
    if num_ranks < 2 or "OMP_NUM_THREADS" in given:
        return ()
    each = max(num_cores // num_ranks, 1)
    return (Variable(name="OMP_NUM_THREADS", value=str(each), reason=f"{num_ranks} processes share {num_cores} cores"),)


def _interface(fabric: Fabric, own_address: str, num_nodes: int, num_gpus: int) -> list[Variable]:
    """gloo takes the address of the host's own name, which is often 127.0.1.1; NCCL takes the first interface, which may be a bridge."""
    found = fabric.interface_of(own_address)
    if found is None or num_nodes < 2:
        return []
    why = f"{own_address} on {found.name} is where the other nodes reach this one"
    both = [Variable(name="GLOO_SOCKET_IFNAME", value=found.name, reason=why)]
    if num_gpus:
        both.append(Variable(name="NCCL_SOCKET_IFNAME", value=f"={found.name}", reason=f"{why}; `=` is an exact match"))
    return both


def _adapters(fabric: Fabric, num_nodes: int, num_gpus: int) -> list[Variable]:
    """Only where some active ports are slower than others (storage, management): all that are equal is NCCL's own choice."""
    active = fabric.active_ports
    fastest = max((port.gigabits for port in active), default=0.0)
    chosen = [port for port in active if port.gigabits == fastest]
    if not num_gpus or num_nodes < 2 or not chosen or len(chosen) == len(active):
        return []
    slower = ", ".join(f"{port.device} {port.gigabits:g}" for port in active if port.gigabits < fastest)
    value = "=" + ",".join(f"{port.device}:{port.port}" for port in chosen)
    return [Variable(name="NCCL_IB_HCA", value=value, reason=f"ports of {fastest:g} Gb/s; left out as slower: {slower} Gb/s")]


def wrong_variables(given: Mapping[str, str]) -> tuple[Wrong, ...]:
    """Of an environment: names that nothing reads, then names that are better unset."""
    unknown = [Wrong(name=name, why=why, is_unknown=True) for name in sorted(given) if (why := _unknown(name))]
    doubtful = [
        Wrong(name=name, why=DOUBTFUL[name], is_unknown=False) for name in sorted(given) if _is_doubtful(name, given[name])
    ]
    return (*unknown, *doubtful)


def _unknown(name: str) -> str:
    """Why it does nothing; empty if it exists, or if it is nobody's we know."""
    if name in MEANT:
        meant = MEANT[name]
        return (
            f"nothing reads it{meant.removeprefix('nothing')}"
            if meant.startswith("nothing")
            else f"nothing reads it; meant is {meant}"
        )
    if not name.startswith("NCCL_") or name in nccl_names() or name in OF_IMAGES:
        return ""
    import difflib

    near = difflib.get_close_matches(name, nccl_names(), n=1, cutoff=0.75)
    return f"NCCL 2.32 has no such variable{f'; meant is perhaps {near[0]}' if near else ''}"


def _is_doubtful(name: str, value: str) -> bool:
    return name in DOUBTFUL and (not name.endswith("_DISABLE") or value.strip() not in ("", "0"))
