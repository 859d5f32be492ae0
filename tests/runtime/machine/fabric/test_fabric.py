"""Fabrics read from /sys, and the variables that fit them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.runtime.machine.fabric.fabric import Fabric, HcaPort, Interface, rate_gigabits, read_fabric
from windlass.runtime.machine.fabric.variables import DOUBTFUL, MEANT, fitting, nccl_names, threads, wrong_variables

pytestmark = pytest.mark.pure

SYS = {
    "/sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
    "/sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
    "/sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
    "/sys/class/infiniband/mlx5_1/ports/1/state": "4: ACTIVE\n",
    "/sys/class/infiniband/mlx5_1/ports/1/link_layer": "Ethernet\n",
    "/sys/class/infiniband/mlx5_1/ports/1/rate": "100 Gb/sec (4X EDR)\n",
    "/sys/class/infiniband/mlx5_2/ports/1/state": "1: DOWN\n",
    "/sys/class/infiniband/mlx5_2/ports/1/link_layer": "InfiniBand\n",
    "/sys/class/infiniband/mlx5_2/ports/1/rate": "10 Gb/sec (4X SDR)\n",
    "/sys/class/net/eth0/mtu": "1500\n",
    "/sys/class/net/eth0/speed": "25000\n",
    "/sys/class/net/eth0/operstate": "up\n",
    "/sys/class/net/lo/mtu": "65536\n",
    "/sys/class/net/docker0/mtu": "1500\n",
}


def names(folder: str) -> list[str]:
    return sorted({path[len(folder) + 1 :].split("/")[0] for path in SYS if path.startswith(folder + "/")})


def fabric() -> Fabric:
    addresses = {"eth0": "10.0.0.7", "lo": "127.0.0.1", "docker0": "172.17.0.1"}
    return read_fabric(lambda path: SYS.get(path, ""), names, lambda name: addresses.get(name, ""))


def test_ports_and_interfaces_are_read() -> None:
    found = fabric()
    assert [(port.device, port.state, port.gigabits) for port in found.ports] == [
        ("mlx5_0", "ACTIVE", 400.0), ("mlx5_1", "ACTIVE", 100.0), ("mlx5_2", "DOWN", 10.0),
    ]  # fmt: skip
    assert [(one.name, one.megabits) for one in found.interfaces] == [("docker0", 0), ("eth0", 25000)]
    assert rate_gigabits("unknown") == 0.0
    assert isinstance(read_fabric(), Fabric), "of this machine"


def test_variables_of_a_node_with_unlike_ports() -> None:
    found = {one.name: one for one in fitting(fabric(), "10.0.0.7", 4, 8, {})}
    assert found["NCCL_SOCKET_IFNAME"].value == "=eth0" and found["GLOO_SOCKET_IFNAME"].value == "eth0"
    assert found["NCCL_IB_HCA"].value == "=mlx5_0:1" and "mlx5_1 100" in found["NCCL_IB_HCA"].reason
    assert all(one.reason for one in found.values())


def test_what_nccl_chooses_itself_is_left_to_it() -> None:
    equal = tuple(HcaPort(device=f"mlx5_{n}", port=1, state="ACTIVE", link_layer="InfiniBand", gigabits=400.0) for n in range(8))
    found = fitting(Fabric(ports=equal, interfaces=(Interface(name="eth0", address="10.0.0.7"),)), "10.0.0.7", 2, 8, {})
    assert not {"NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_ALGO"} & {one.name for one in found}


def test_processes_of_one_node_share_its_cores() -> None:
    assert [(one.name, one.value) for one in threads(64, 8, {})] == [("OMP_NUM_THREADS", "8")]
    assert threads(64, 1, {}) == threads(64, 8, {"OMP_NUM_THREADS": "4"}) == ()
    assert threads(2, 8, {})[0].value == "1"


def test_one_node_needs_nothing() -> None:
    assert fitting(fabric(), "10.0.0.7", 1, 8, {}) == ()


@given(st.sets(st.sampled_from(["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "TORCH_NCCL_TRACE_BUFFER_SIZE"])))
def test_what_a_user_sets_is_kept(given_names: set[str]) -> None:
    assert not given_names & {one.name for one in fitting(fabric(), "10.0.0.7", 4, 8, dict.fromkeys(given_names, "x"))}


def test_only_names_that_exist_are_set() -> None:
    for one in fitting(fabric(), "10.0.0.7", 4, 8, {}):
        assert one.name in nccl_names() or one.name.startswith(("GLOO_", "TORCH_"))
    assert wrong_variables({one.name: one.value for one in fitting(fabric(), "10.0.0.7", 4, 8, {})}) == ()


@pytest.mark.parametrize("name", MEANT)
def test_names_that_nothing_reads(name: str) -> None:
    found = wrong_variables({name: "1", "HOME": "/root"})
    assert [(one.name, one.is_unknown) for one in found] == [(name, True)] and name not in nccl_names()


def test_a_misspelt_name_finds_its_neighbour() -> None:
    assert "NCCL_SOCKET_IFNAME" in wrong_variables({"NCCL_SOCKET_IFNAM": "eth0"})[0].why


@pytest.mark.parametrize("name", DOUBTFUL)
def test_names_that_harm_exist(name: str) -> None:
    assert name in nccl_names()
    assert not wrong_variables({name: "1"})[0].is_unknown


def test_a_switch_that_is_off_is_no_harm() -> None:
    assert wrong_variables({"NCCL_IB_DISABLE": "0"}) == ()


def test_what_container_images_set_is_no_mistake() -> None:
    assert wrong_variables({"NCCL_VERSION": "2.28.3-1"}) == ()
