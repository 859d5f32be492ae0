"""Directories of safetensors files: read like the safetensors package reads them, and refused where index and files disagree."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from windlass.core.ports import TensorStore
from windlass.errors import BadCheckpoint, BadInput
from windlass.model.formats.checkpoint import open_store
from windlass.model.formats.disk import reader as reader_module
from windlass.model.formats.disk.open_files import OpenFiles
from windlass.model.formats.safetensors.store import SafetensorsStore

pytestmark = pytest.mark.cpu

Make = Callable[..., Path]
U8 = ("U8", [3], b"abc")

TYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64]
TYPES += [torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.uint16, torch.uint32, torch.complex64]


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 2, (6, 4), generator=generator)
    return {str(dtype): raw.to(dtype) for dtype in TYPES} | {
        "cube": torch.randn(3, 5, 7, generator=generator),
        "scalar": torch.tensor(2.5),
        "vector": torch.arange(11),
        "none": torch.empty(0, 3),
    }


def whole(store: TensorStore, name: str) -> torch.Tensor:
    shape = store.shape(name)
    num_rows = torch.Size(shape[:-1]).numel() if len(shape) > 1 else (shape or (1,))[0]
    return store.read(name, 0, num_rows).reshape(shape)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))


def test_every_type_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    save_file(tensors(), tmp_path / "model.safetensors")
    store: TensorStore = open_store(tmp_path)
    assert store.config == {"model_type": "x"}
    assert set(store.names()) == tensors().keys()
    for name, expected in tensors().items():
        assert same(whole(store, name), expected), name
    store.close()


def test_rows(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file(tensors(), tmp_path / "model.safetensors")
    store, expected = open_store(tmp_path), tensors()
    assert store.shape("cube") == (3, 5, 7) and store.dtype("cube") == "F32"
    assert torch.equal(store.read("cube", 4, 11), expected["cube"].reshape(15, 7)[4:11])
    assert torch.equal(store.read("vector", 3, 9), expected["vector"][3:9])
    assert store.read("cube", 2, 2).shape == (0, 7)
    for start, stop in ((-1, 2), (3, 2), (0, 16)):
        with pytest.raises(IndexError, match="which has 15"):
            store.read("cube", start, stop)
    with pytest.raises(BadCheckpoint, match="no such tensor"):
        store.read("absent", 0, 1)


def test_bytes_into_a_buffer(make_file: Make, tmp_path: Path) -> None:
    make_file("model.safetensors", a=("U8", [6], b"abcdef"))
    store = SafetensorsStore(tmp_path)
    buffer = bytearray(3)
    store.read_into("a", 2, memoryview(buffer))
    assert buffer == b"cde"
    with pytest.raises(IndexError):
        store.read_into("a", 4, memoryview(buffer))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    wanted=st.lists(
        st.tuples(st.sampled_from("abcd"), st.integers(0, 9), st.integers(0, 9)).filter(lambda one: one[1] <= one[2])
    ),
    most=st.integers(1, 12),
    buffers_at_once=st.integers(1, 4),
    gap=st.integers(0, 5),
)
def test_any_pieces(
    make_file: Make, tmp_path: Path, wanted: list[tuple[str, int, int]], most: int, buffers_at_once: int, gap: int
) -> None:
    """Of two files, in any order, overlapping too, with reads that return less than was asked for."""
    stored = {name: bytes(range(10 * number, 10 * number + 9)) for number, name in enumerate("abcd")}
    make_file("model-1.safetensors", a=("U8", [9], stored["a"]), b=("U8", [9], stored["b"]))
    make_file("model-2.safetensors", c=("U8", [9], stored["c"]), d=("U8", [9], stored["d"]))
    buffers, real = [bytearray(stop - start) for _, start, stop in wanted], os.preadv

    def short(file: int, into: list[memoryview], at: int) -> int:
        assert len(into) <= buffers_at_once and all(len(one) for one in into)
        room, some = most, list[memoryview]()
        for one in into:
            some.append(one[:room])
            room -= len(some[-1])
        return real(file, [one for one in some if len(one)], at)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader_module.os, "preadv", short)
        patch.setattr(reader_module, "MAX_BUFFERS", buffers_at_once)
        patch.setattr(reader_module, "MAX_GAP_BYTES", gap)
        pieces = zip(wanted, buffers, strict=True)
        SafetensorsStore(tmp_path).read_pieces([(name, start, memoryview(into)) for (name, start, _), into in pieces])
    assert buffers == [stored[name][start:stop] for name, start, stop in wanted]


@pytest.mark.parametrize(("gap", "expected"), [(2, [2, 2]), (3, [5])])  # c lies between
def test_pieces_one_after_another_are_one_read(
    make_file: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gap: int, expected: list[int]
) -> None:
    monkeypatch.setattr(reader_module, "MAX_GAP_BYTES", gap)
    make_file("model.safetensors", **{name: ("U8", [3], name.encode() * 3) for name in "abcde"})
    store, reads, real = SafetensorsStore(tmp_path), list[int](), os.preadv
    monkeypatch.setattr(reader_module.os, "preadv", lambda file, into, at: reads.append(len(into)) or real(file, into, at))
    found = {name: bytearray(3) for name in "ebad"}
    store.read_pieces([(name, 0, memoryview(into)) for name, into in found.items()])
    assert found == {name: name.encode() * 3 for name in "ebad"}
    assert reads == expected
    with pytest.raises(IndexError, match=r"bytes 1\.\.4 of b, which has 3"):
        store.read_pieces([("a", 0, memoryview(bytearray(3))), ("b", 1, memoryview(bytearray(3)))])


def test_pieces_of_a_file_cut_short(make_file: Make, tmp_path: Path) -> None:
    file = make_file("model.safetensors", a=U8, b=U8, c=U8)
    store = SafetensorsStore(tmp_path)
    os.truncate(file, file.stat().st_size - 4)
    with pytest.raises(BadCheckpoint, match="truncated") as caught:
        store.read_pieces([(name, 0, memoryview(bytearray(3))) for name in "abc"])
    assert caught.value.tensor == "b"  # the first that is not all there


def test_what_is_read_is_ones_own(make_file: Make, tmp_path: Path) -> None:
    file = make_file("model.safetensors", a=U8)
    before = file.read_bytes()
    store = open_store(tmp_path)
    store.read("a", 0, 3).fill_(0)
    assert bytes(store.read("a", 0, 3)) == b"abc" and file.read_bytes() == before


def test_short_reads_are_gone_on_with(make_file: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_file("model.safetensors", a=("U8", [26], bytes(range(97, 123))))
    real = os.preadv
    monkeypatch.setattr(reader_module.os, "preadv", lambda file, buffers, at: real(file, [buffers[0][:5]], at))
    assert bytes(open_store(tmp_path).read("a", 1, 26)) == bytes(range(98, 123))


def test_a_file_cut_short_after_it_was_opened(make_file: Make, tmp_path: Path) -> None:
    file = make_file("model.safetensors", a=U8, b=("F32", [2], bytes(8)))
    store = SafetensorsStore(tmp_path)
    os.truncate(file, file.stat().st_size - 3)
    with pytest.raises(BadCheckpoint, match="ends within the tensor") as caught:
        store.read("b", 0, 2)
    assert (caught.value.file, caught.value.tensor, caught.value.offset) == (str(file), "b", file.stat().st_size)


def test_types_torch_has_not(make_file: Make, tmp_path: Path) -> None:
    make_file("model.safetensors", a=("F4", [4], b"ab"))
    with pytest.raises(BadInput, match="dtype F4 is not supported"):
        open_store(tmp_path).read("a", 0, 4)


def test_threads_and_few_handles(make_file: Make, tmp_path: Path) -> None:
    for number in range(12):
        make_file(f"model-{number:02}.safetensors", **{f"t{number}": ("U8", [64], bytes([number]) * 64)})
    store = SafetensorsStore(tmp_path)
    store._reader._open_files = OpenFiles(limit=3)

    def check(number: int) -> bool:
        return bytes(store.read(f"t{number % 12}", 0, 64)) == bytes([number % 12]) * 64

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(check, range(2_000)))
    assert len(store._reader._open_files._files) <= 3
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    store.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors - 3


# --- index and files -------------------------------------------------------------------------------------------------


def test_shards_and_an_index(make_file: Make, make_index: Make, tmp_path: Path) -> None:
    make_file("model-1.safetensors", a=U8)
    make_file("more/model-2.safetensors", b=U8)
    make_index(a="model-1.safetensors", b="more/model-2.safetensors")
    store = SafetensorsStore(tmp_path)
    assert set(store.names()) == {"a", "b"}
    assert bytes(store.read("b", 0, 3)) == b"abc"


def test_files_the_index_does_not_name(make_file: Make, make_index: Make, tmp_path: Path) -> None:
    """GLM-4.6 shipped its MTP layer in mtp.safetensors."""
    make_file("model-1.safetensors", a=U8, b=U8)
    make_file("mtp.safetensors", c=U8)
    make_index(a="model-1.safetensors")
    store = SafetensorsStore(tmp_path)
    assert set(store.names()) == {"a", "b", "c"}


def test_second_copies_and_hidden_files_are_left_out(make_file: Make, tmp_path: Path) -> None:
    make_file("model-1.safetensors", a=U8)
    make_file("consolidated.safetensors", a=U8)
    make_file("consolidated-00001-of-00002.safetensors", a=U8)
    (tmp_path / "._model-1.safetensors").write_bytes(b"finder")
    assert set(open_store(tmp_path).names()) == {"a"}


def test_one_file_of_a_directory(make_file: Make, make_index: Make, tmp_path: Path) -> None:
    make_file("model-1.safetensors", a=U8)
    make_file("model-2.safetensors", b=U8)
    make_index(a="model-1.safetensors", b="model-2.safetensors", c="model-3.safetensors")
    assert set(open_store(tmp_path / "model-2.safetensors").names()) == {"b"}
    assert set(SafetensorsStore(tmp_path, ["model-1.safetensors"]).names()) == {"a"}


def test_the_same_tensor_in_two_files(make_file: Make, tmp_path: Path) -> None:
    make_file("model-1.safetensors", a=U8)
    second = make_file("model-2.safetensors", b=U8, a=U8)
    with pytest.raises(BadCheckpoint, match=r"is in .*model-1\.safetensors as well") as caught:
        open_store(tmp_path)
    assert (caught.value.file, caught.value.tensor) == (str(second), "a") and caught.value.offset


def test_an_index_that_names_a_missing_file(make_file: Make, make_index: Make, tmp_path: Path) -> None:
    make_file("model-1.safetensors", a=U8)
    make_index(a="model-1.safetensors", b="model-2.safetensors")
    with pytest.raises(BadCheckpoint, match=r"tensor b: the index lists model-2\.safetensors, which is missing \(1 of 2"):
        open_store(tmp_path)


def test_an_index_entry_without_a_tensor(make_file: Make, make_index: Make, tmp_path: Path) -> None:
    make_file("model-1.safetensors", a=U8)
    make_index(a="model-1.safetensors", b="model-1.safetensors")
    with pytest.raises(BadCheckpoint, match=r"tensor b: the index says it is in model-1\.safetensors, which does not"):
        open_store(tmp_path)


def test_an_index_that_names_the_wrong_file(make_file: Make, make_index: Make, tmp_path: Path) -> None:
    make_file("model-1.safetensors", a=U8)
    make_file("model-2.safetensors", b=U8)
    make_index(a="model-2.safetensors", b="model-2.safetensors")
    with pytest.raises(BadCheckpoint, match=r"says it is in model-2\.safetensors; it is in model-1\.safetensors"):
        open_store(tmp_path)


def test_an_index_with_a_name_twice(make_file: Make, tmp_path: Path) -> None:
    make_file("model-1.safetensors", a=U8)
    text = '{"weight_map": {"a": "model-1.safetensors", "a": "model-2.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(BadCheckpoint, match="tensor a, byte 16: is listed twice in the index"):
        open_store(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        '{"weight_map": {"a:b": "m.safetensors", "a:b": "m.safetensors"}}',
        '{"weight_map": {"a:b": "m.safetensors", "\\u0061:b": "m.safetensors"}}',
        '{"weight_map": {"a": "x.safetensors"}, "weight_map": {"a": "m.safetensors"}}',
        '{"metadata": {"x": 1, "x": 2}, "weight_map": {"a": "m.safetensors"}}',
        '{"metadata": {"x": {"weight_map": {}, "weight_map": {}}}, "weight_map": {"a": "m.safetensors"}}',
    ],
)
def test_an_index_with_any_key_twice(make_file: Make, tmp_path: Path, text: str) -> None:
    make_file("m.safetensors", **{"a:b": U8, "a": U8})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(BadCheckpoint, match="is listed twice in the index"):
        open_store(tmp_path)


def test_an_index_of_names_with_colons(make_file: Make, make_index: Make, tmp_path: Path) -> None:
    make_file("m.safetensors", **{"a:b": U8, "c": U8})
    make_index(**{"a:b": "m.safetensors", "c": "m.safetensors"})
    assert set(open_store(tmp_path).names()) == {"a:b", "c"}


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[" * 100_000, b'{"weight_map": {"a": 1}}', b"\xff", b'{"weight_map": {"a": "x"']
)
def test_a_damaged_index(make_file: Make, tmp_path: Path, content: bytes) -> None:
    make_file("model-1.safetensors", a=U8)
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(BadCheckpoint, match="is not a safetensors index"):
        open_store(tmp_path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=st.dictionaries(st.sampled_from("abcd"), st.text(max_size=6) | st.sampled_from(["m.safetensors", "config.json"])))
def test_any_index(make_file: Make, make_index: Make, tmp_path: Path, names: dict[str, str]) -> None:
    make_file("m.safetensors", a=U8, b=U8)
    make_index(**names)
    try:
        store = open_store(tmp_path)
    except BadCheckpoint as error:
        assert "\n" not in str(error)
    else:
        assert names.keys() <= set(store.names()) == {"a", "b"}


# --- nothing there, and nothing outside ------------------------------------------------------------------------------


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is not a checkpoint directory"):
        open_store(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadInput, match=r"looked for model\.safetensors\.index\.json, \*\.safetensors, pytorch_model"):
        open_store(tmp_path)
    (tmp_path / "consolidated.00.safetensors").touch()
    with pytest.raises(BadInput, match="not the Hugging Face layout"):
        open_store(tmp_path)


def test_no_config(make_file: Make, tmp_path: Path) -> None:
    make_file("model.safetensors", a=U8)
    (tmp_path / "config.json").unlink()
    with pytest.raises(BadInput, match=r"has no config\.json"):
        open_store(tmp_path)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/../../secret.safetensors", "", "a\0b"])
def test_an_index_that_leaves_the_directory(make_file: Make, make_index: Make, tmp_path: Path, name: str) -> None:
    make_file("model-1.safetensors", a=U8)
    (tmp_path.parent / "secret.safetensors").write_bytes(b"secret")
    make_index(b=name)
    with pytest.raises(BadCheckpoint, match=r"outside the directory|missing"):
        open_store(tmp_path)


def test_a_link_out_of_the_directory(make_file: Make, tmp_path: Path) -> None:
    outside = make_file("../outside.safetensors", a=U8)
    (tmp_path / "model.safetensors").symlink_to(outside)
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors: symlink out of the model directory"):
        open_store(tmp_path)


def test_a_folder_that_is_a_link_out(make_file: Make, make_index: Make, tmp_path: Path) -> None:
    make_file("../elsewhere/model-1.safetensors", a=U8)
    make_file("model-0.safetensors", b=U8)
    (tmp_path / "more").symlink_to(tmp_path.parent / "elsewhere")
    make_index(a="more/model-1.safetensors")
    with pytest.raises(BadCheckpoint, match="symlink out of the model directory"):
        open_store(tmp_path)


def test_links_within_to_nothing_and_in_a_circle(make_file: Make, tmp_path: Path) -> None:
    real = make_file("weights/real", a=U8)
    link = tmp_path / "model.safetensors"
    link.symlink_to(real)
    assert set(open_store(tmp_path).names()) == {"a"}
    for target in ("nothing", "model.safetensors"):
        link.unlink()
        link.symlink_to(target)
        with pytest.raises(BadCheckpoint, match=r"model\.safetensors"):
            open_store(tmp_path)


def test_a_directory_reached_through_a_link(make_file: Make, tmp_path: Path) -> None:
    make_file("model.safetensors", a=U8)
    (tmp_path.parent / "link").symlink_to(tmp_path)
    assert set(open_store(tmp_path.parent / "link").names()) == {"a"}
    (tmp_path.parent / "link").unlink()


def test_a_pipe_is_not_waited_for(make_file: Make, tmp_path: Path) -> None:
    make_file("model-1.safetensors", a=U8)
    os.mkfifo(tmp_path / "model-2.safetensors")
    with pytest.raises(BadCheckpoint, match="not a regular file"):
        open_store(tmp_path)


def hub_cache(make_file: Make, tmp_path: Path) -> Path:
    """models--org--name/snapshots/REVISION/FILE -> ../../blobs/HASH, as huggingface_hub lays it out."""
    make_file("models--org--name/blobs/1234", a=U8)
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").symlink_to("../../blobs/1234")
    return snapshot


def test_the_hub_cache_is_all_links(make_file: Make, tmp_path: Path) -> None:
    snapshot = hub_cache(make_file, tmp_path)
    store = SafetensorsStore(snapshot)
    assert bytes(store.read("a", 0, 3)) == b"abc"
    assert store.info("a").file == snapshot / "model.safetensors"  # messages name the file, not the blob


def test_the_hub_cache_may_share_blobs_between_models(make_file: Make, tmp_path: Path) -> None:
    snapshot = hub_cache(make_file, tmp_path)
    make_file("blobs/56/5678", b=U8)
    (tmp_path / "models--org--name" / "blobs" / "5678").symlink_to("../../blobs/56/5678")
    (snapshot / "more.safetensors").symlink_to("../../blobs/5678")
    assert set(open_store(snapshot).names()) == {"a", "b"}


def test_the_hub_cache_does_not_link_to_other_models(make_file: Make, tmp_path: Path) -> None:
    snapshot = hub_cache(make_file, tmp_path)
    make_file("models--org--other/blobs/1", b=U8)
    (snapshot / "more.safetensors").symlink_to("../../../models--org--other/blobs/1")
    with pytest.raises(BadCheckpoint, match="symlink out of the model directory"):
        open_store(snapshot)
