"""PyTorch files: read like torch reads them, and never run."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from windlass.errors import BadCheckpoint
from windlass.model.formats import torch_bin
from windlass.model.formats.checkpoint import open_store
from windlass.model.formats.disk.tensor_info import TensorInfo
from windlass.model.formats.torch_bin import TorchStore

pytestmark = pytest.mark.cpu

WEIGHT = torch.arange(64.0).reshape(16, 4)
TENSORS = {
    "bf16": WEIGHT.bfloat16(),
    "f32": WEIGHT,
    "tied": WEIGHT,
    "rows": WEIGHT[3:9],
    "transposed": WEIGHT.t(),
    "parameter": torch.nn.Parameter(WEIGHT),
    "cube": torch.arange(24).reshape(2, 3, 4),
    "vector": torch.arange(5, dtype=torch.int8),
    "scalar": torch.tensor(1.5),
    "none": torch.empty(0, 4),
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def check(store: TorchStore) -> None:
    assert set(store.names()) == TENSORS.keys()
    for name, expected in TENSORS.items():
        shape = tuple(expected.shape)
        assert store.shape(name) == shape
        num_rows = torch.Size(shape[:-1]).numel() if len(shape) > 1 else (shape or (1,))[0]
        found = store.read(name, 0, num_rows)
        assert found.dtype == expected.dtype and torch.equal(found.reshape(shape), expected) and not found.requires_grad, name
        middle = store.read(name, num_rows // 2, num_rows)
        assert torch.equal(middle, found[num_rows // 2 :])


def test_every_tensor(directory: Path) -> None:
    torch.save(TENSORS, directory / "pytorch_model.bin")
    store = open_store(directory)
    assert isinstance(store, TorchStore)
    assert store.dtype("bf16") == "BF16" and store.dtype("transposed") == "F32"
    check(store)
    store.close()


def test_weights_are_read_from_the_file_and_not_kept_mapped(directory: Path) -> None:
    torch.save(TENSORS, directory / "pytorch_model.bin")
    store = TorchStore(directory)
    kept = {name for name, tensor in store._tensors.items() if not isinstance(tensor, TensorInfo)}
    assert kept == {"transposed", "none"}
    with pytest.raises(IndexError, match="which has 16"):
        store.read("f32", 0, 17)
    with pytest.raises(IndexError, match="which has 4"):
        store.read("transposed", 0, 5)


def test_without_proc_tensors_stay_mapped(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(TENSORS, directory / "pytorch_model.bin")
    monkeypatch.setattr(torch_bin, "mappings_of", lambda file: [])
    check(TorchStore(directory))


def test_a_file_name_with_blanks(directory: Path) -> None:
    torch.save({"a": WEIGHT}, directory / "pytorch_model  of two.bin")
    store = TorchStore(directory)
    assert isinstance(store._tensors["a"], TensorInfo) and torch.equal(store.read("a", 0, 16), WEIGHT)


def test_an_index(directory: Path, make_index: Callable[..., Path]) -> None:
    torch.save({"a": WEIGHT}, directory / "pytorch_model-1.bin")
    torch.save({"b": WEIGHT, "c": WEIGHT}, directory / "pytorch_model-2.bin")
    make_index("pytorch_model.bin.index.json", a="pytorch_model-1.bin", b="pytorch_model-2.bin")
    store = TorchStore(directory)
    assert set(store.names()) == {"a", "b", "c"}
    make_index("pytorch_model.bin.index.json", a="pytorch_model-1.bin", d="pytorch_model-2.bin")
    with pytest.raises(BadCheckpoint, match="tensor d: the index says"):
        TorchStore(directory)
    make_index("pytorch_model.bin.index.json", a="pytorch_model-3.bin")
    with pytest.raises(BadCheckpoint, match=r"names pytorch_model-3\.bin, which is missing"):
        TorchStore(directory)


def test_the_same_tensor_in_two_files(directory: Path) -> None:
    torch.save({"a": WEIGHT}, directory / "pytorch_model-1.bin")
    torch.save({"a": WEIGHT}, directory / "pytorch_model-2.bin")
    with pytest.raises(BadCheckpoint, match="in another file"):
        TorchStore(directory)


def test_safetensors_come_first(directory: Path, make_file: Callable[..., Path]) -> None:
    torch.save({"a": WEIGHT}, directory / "pytorch_model.bin")
    make_file("model.safetensors", b=("U8", [1], b"x"))
    assert set(open_store(directory).names()) == {"b"}


# --- what must not be loaded -----------------------------------------------------------------------------------------


class Payload:
    """Makes a directory when it is unpickled: the proof that nothing was run is that it is not there."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.witness),)


def test_the_payload_works(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Payload(tmp_path / "witness")))
    assert (tmp_path / "witness").exists()


@pytest.mark.parametrize("how", ["torch.save", "legacy torch.save", "pickle", "inside the archive"])
def test_code_in_a_pickle_is_not_run(directory: Path, how: str) -> None:
    witness, file = directory / "witness", directory / "pytorch_model.bin"
    values = {"a": WEIGHT, "b": Payload(witness)}
    match how:
        case "pickle":
            file.write_bytes(pickle.dumps({"b": Payload(witness)}))
        case "inside the archive":
            with zipfile.ZipFile(file, "w") as archive:
                archive.writestr("x/data.pkl", pickle.dumps(Payload(witness)))
                archive.writestr("x/version", "3\n")
        case _:
            torch.save(values, file, _use_new_zipfile_serialization=how == "torch.save")
    with pytest.raises(BadCheckpoint) as caught:
        open_store(directory)
    assert not witness.exists()
    assert "\n" not in str(caught.value) and str(file) in str(caught.value)
    assert "weights_only" not in str(caught.value)  # torch's own advice is to load it unsafely


def test_the_refusal_says_what_would_have_run(directory: Path) -> None:
    torch.save({"b": Payload(directory / "witness")}, directory / "pytorch_model.bin")
    with pytest.raises(BadCheckpoint, match=r"would execute code \(posix\.mkdir\)"):
        open_store(directory)


@pytest.mark.parametrize("values", [[WEIGHT], {1: WEIGHT}, {"a": 3}, {"a": {"b": WEIGHT}}, WEIGHT, {"a": WEIGHT.to_sparse()}])
def test_what_is_no_dictionary_of_tensors(directory: Path, values: object) -> None:
    torch.save(values, directory / "pytorch_model.bin")
    with pytest.raises(BadCheckpoint, match=r"pytorch_model\.bin"):
        open_store(directory)


def test_truncated_and_changed_files(directory: Path) -> None:
    file = directory / "pytorch_model.bin"
    torch.save({"a": WEIGHT, "b": torch.arange(7)}, file)
    whole = file.read_bytes()
    for length in range(0, len(whole) - 1, 61):
        file.write_bytes(whole[:length])
        with pytest.raises(BadCheckpoint, match=r"pytorch_model\.bin"):
            open_store(directory)
    for spot in range(0, len(whole), 13):
        file.write_bytes(whole[:spot] + bytes([whole[spot] ^ 0x55]) + whole[spot + 1 :])
        try:
            store = open_store(directory)
            for name in store.names():
                store.read(name, 0, store.shape(name)[0])
        except (BadCheckpoint, IndexError) as error:
            assert "\n" not in str(error)
