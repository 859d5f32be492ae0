"""Every kernel that a model's steps launch compiles for Hopper, with the defines of published shapes; no GPU is needed for that."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

from kept import compiled, functions_of  # noqa: E402
from recorded import Recorder, Unit, full_size, offloaded, record, sliced  # noqa: E402

from windlass.core.fused import unsupported  # noqa: E402
from windlass.model.families.registry import known_models, spec_of  # noqa: E402
from windlass.runtime.kernels.cuda import driver  # noqa: E402

pytestmark = pytest.mark.cpu

TARGET = "sm_90a"
OTHER_TARGETS = ("sm_80", "sm_100a")
COMPILED = ("GLM-4.5-Air", "GLM-4.6", "Qwen3-30B-A3B", "Llama-3.1-70B")
SOURCES = sorted(file.name for file in driver.SOURCES.glob("*.cu"))


@cache
def recorded(name: str, group: int = 128) -> Recorder:
    with pytest.MonkeyPatch.context() as patch:
        return record(full_size(name, group), patch)


@cache
def recorded_fp8(name: str) -> Recorder:
    with pytest.MonkeyPatch.context() as patch:
        return record(full_size(name), patch, torch.float8_e4m3fn)


@cache
def recorded_offloaded() -> Recorder:
    with pytest.MonkeyPatch.context() as patch:
        return record(offloaded("GLM-4.6"), patch)


@cache
def recorded_sliced() -> Recorder:
    with pytest.MonkeyPatch.context() as patch:
        return record(sliced("Llama-3.1-405B"), patch)


def units() -> dict[Unit, set[str]]:
    found: dict[Unit, set[str]] = {}
    for one in (*map(recorded, COMPILED), recorded_fp8("GLM-4.5-Air"), recorded_offloaded(), recorded_sliced()):
        for (file, defines), functions in one.units.items():
            found.setdefault((file, defines), set()).update(functions)
    return found


def with_fewer(found: dict[Unit, set[str]]) -> dict[Unit, set[str]]:
    """small.cu has many functions and takes long: defines that do not contradict each other are tried together."""
    merged: list[tuple[dict[str, int], set[str]]] = []
    for (_, defines), functions in sorted(found.items(), key=lambda item: -len(item[0][1])):
        for known, names in merged:
            if all(known.get(key, value) == value for key, value in defines):
                known.update(defines)
                names |= functions
                break
        else:
            merged.append((dict(defines), set(functions)))
    return {("small.cu", tuple(sorted(defines.items()))): names for defines, names in merged}


@pytest.fixture(scope="module")
def nvrtc() -> None:
    try:
        driver._nvrtc()
    except driver.CudaFailed as error:
        pytest.skip(f"{error}: pip install --no-deps nvidia-cuda-nvrtc==13.0.88")


def units_of(file: str) -> dict[Unit, set[str]]:
    mine = {unit: names for unit, names in units().items() if unit[0] == file}
    return with_fewer(mine) if file == "small.cu" else mine


def all_units() -> Iterator[tuple[str, dict[str, int], str]]:
    """File, defines and target of all that is compiled here."""
    for file in SOURCES:
        yield from ((file, dict(defines), TARGET) for (_, defines) in units_of(file))
    yield "small.cu", {"GROUP": 64}, TARGET
    yield from (("small.cu", {}, target) for target in OTHER_TARGETS)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("file", SOURCES)
def test_compiles(file: str) -> None:
    mine = units_of(file)
    assert mine, f"no step launches anything of {file}"
    for (_, defines), wanted in mine.items():
        assert wanted <= functions_of(file, dict(defines), TARGET), file


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("file", [pytest.param(file, marks=() if file == "rotary.cu" else pytest.mark.long) for file in SOURCES])
def test_compiles_as_it_is_kept(file: str) -> None:
    for (_, defines), wanted in units_of(file).items():
        assert wanted <= compiled(file, dict(defines), TARGET) == functions_of(file, dict(defines), TARGET)


@pytest.mark.usefixtures("nvrtc")
def test_what_does_not_compile_says_why() -> None:
    with pytest.raises(driver.CudaFailed, match="no_such_thing"):
        driver.compile_cubin("__global__ void f() { no_such_thing(); }", {}, TARGET)


@pytest.mark.usefixtures("nvrtc")
def test_functions_that_no_step_launches_are_there() -> None:
    """What weights and graphs ask for."""
    assert {"repack", "greedy"} <= functions_of("small.cu", {"GROUP": 64}, TARGET)


@pytest.mark.parametrize("name", [known.name for known in known_models() if not unsupported(spec_of(known))])
def test_every_model_can_be_launched(name: str) -> None:
    """Grids, threads and shared memory within what the device has, for every way that a step can take."""
    found = recorded(name)
    assert found.num_launches > 50
    for file, defines in found.units:
        assert dict(defines).get("STAGES", 2) >= 2, f"{file} {defines}: nothing would be under way while something is used"


@pytest.mark.parametrize("group", [32, 64])
def test_other_groups_can_be_launched(group: int) -> None:
    assert any(dict(defines).get("GROUP") == group for (_, defines) in recorded("GLM-4.5-Air", group).units)


@pytest.mark.parametrize("target", OTHER_TARGETS)
def test_what_every_generation_needs_compiles_for_others(nvrtc: None, target: str) -> None:
    """Greedy tokens are found by small.cu wherever steps are graphs."""
    assert "greedy" in functions_of("small.cu", {}, target)


def test_a_cache_in_fp8_has_kernels_of_its_own() -> None:
    """Those that store and those that decode; all else is the same."""
    own = set(recorded_fp8("GLM-4.5-Air").units) - set(recorded("GLM-4.5-Air").units)
    assert {file for file, _ in own} == {"attention.cu", "rotary.cu"}
    assert all(dict(defines)["FP8"] == 1 for _, defines in own)


def test_a_guess_is_fetched_beside_other_kernels() -> None:
    """And only where a layer follows."""
    functions = {name for (file, _), names in recorded_offloaded().units.items() if file == "offload.cu" for name in names}
    assert functions == {"place", "fetch", "ahead", "collect", "remap"}


def test_layers_of_one_kind_are_noted_once() -> None:
    """Before they are compiled: three dense layers need what one needs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "is_collecting", lambda: True)
        noted = record(full_size("GLM-4.6"), patch)
    assert noted.units == recorded("GLM-4.6").units
    assert noted.num_launches < 0.7 * recorded("GLM-4.6").num_launches
