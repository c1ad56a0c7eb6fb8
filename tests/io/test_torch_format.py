"""State dicts of PyTorch, read and written without it. The files in tests/golden/torch_files were written by PyTorch."""

from __future__ import annotations

import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from netcl.core.device import device
from netcl.core.errors import DtypeError
from netcl.core.tensor import Tensor
from netcl.io import FileError, load, load_torch, save_torch

FILES = Path(__file__).parents[1] / "golden" / "torch_files"
GRID = np.arange(24, dtype=np.float32).reshape(4, 6)
EXPECTED = {
    "transposed": GRID.T, "strided": GRID[1:3, ::2], "expanded": np.ones((3, 4), np.float32), "tail": np.arange(7, 10),
    "bfloat16": np.array([1.0, -2.5, 3e38], ml_dtypes.bfloat16), "float16": np.array([1.0, -2.5], np.float16),
    "float64": np.array([0.1, 0.2]), "int64": np.array([-1, 2**40]), "int32": np.array([-5], np.int32), "int16": np.array([-5], np.int16),
    "int8": np.array([-5], np.int8), "uint8": np.array([250], np.uint8), "bool": np.array([True, False]),
    "complex64": np.array([1 + 2j], np.complex64), "uint16": np.array([65535], np.uint16), "scalar": np.array(3.5, np.float32),
    "empty": np.zeros((0, 3), np.float32), "parameter": np.ones(2, np.float32), "nested": [1, (2, 3.5), {"deep": [None, True, "text ä"]}],
    "ordered": {"a": 1, "b": 2}, "big": 12345678901234567890, "negative": -70000, "small": 300, "size": (2, 3), "device": "cpu",
    "dtype": "float16",
}  # fmt: skip


@pytest.fixture(autouse=True)
def on_numpy():
    with device("cpu"):
        yield


@pytest.mark.parametrize("name", ["zip", "zip_protocol4", "stream"])
def test_files_of_torch(name):
    found = load_torch(FILES / f"{name}.pt")
    assert list(found["model"]) == ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"]
    state = found["optimizer"]["state"]
    assert sorted(state) == [0, 1, 2, 3] and sorted(state[0]) == ["exp_avg", "exp_avg_sq", "step"] and float(state[0]["step"]) == 1
    assert found["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.999) and found["optimizer"]["param_groups"][0]["params"] == [
        0,
        1,
        2,
        3,
    ]
    for key, expected in EXPECTED.items():
        if isinstance(expected, np.ndarray):
            assert found[key].dtype == expected.dtype and np.array_equal(found[key], expected), key
        else:
            assert found[key] == expected, key


def test_the_containers_hold_the_same():
    files = [load_torch(FILES / f"{name}.pt")["model"] for name in ("zip", "zip_protocol4", "stream")]
    for name, value in files[0].items():
        assert all(np.array_equal(value, other[name]) for other in files[1:]), name


def test_netcl_load_gives_tensors(tmp_path):
    save_torch({"layers": [{"w": GRID, "n": 3}], "wide": np.ones(2)}, tmp_path / "a.bin")
    found = load(tmp_path / "a.bin")
    assert isinstance(found["layers"][0]["w"], Tensor) and found["layers"][0]["w"].tolist() == GRID.tolist()
    assert (found["layers"][0]["n"], found["wide"].dtype) == (3, "float64")
    with pytest.raises(DtypeError, match=r"\[from_host\] arrays of dtype complex64 cannot be converted"):
        load(FILES / "zip.pt")


def test_what_is_written_is_read_again(tmp_path):
    value = {key: item for key, item in EXPECTED.items() if key != "uint16"}
    value |= {"tensor": Tensor.from_host(GRID, "bfloat16"), -3: [1e-300, float("inf"), -(2**70)], "long": "x" * 300}
    save_torch(value, tmp_path / "a.pt")
    found = load_torch(tmp_path / "a.pt")
    assert list(found) == list(value)
    assert found["tensor"].dtype == ml_dtypes.bfloat16 and np.array_equal(found["tensor"].astype(np.float32), GRID)
    assert found[-3] == value[-3] and found["nested"] == value["nested"] and found["long"] == value["long"]
    assert all(
        np.array_equal(found[key], item) and found[key].dtype == item.dtype for key, item in value.items() if isinstance(item, np.ndarray)
    )


def test_written_storages_are_aligned_as_torch_maps_them(tmp_path):
    save_torch({"a": np.ones(3), "b": np.ones(5, np.int8), "c": GRID}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as file, open(tmp_path / "a.pt", "rb") as raw:
        for info in file.infolist():
            raw.seek(info.header_offset + 26)
            name, extra = (int.from_bytes(raw.read(2), "little") for _ in range(2))
            assert (info.header_offset + 30 + name + extra) % 64 == 0, info.filename


def test_what_torch_cannot_hold_is_refused(tmp_path):
    for value, reason in [
        ({"a": np.ones(1, np.uint32)}, r"the dtype must exist in torch, got uint32; at=/a; known: float32"),
        ({"a": {"b": object()}}, r"a builtins.object cannot be saved; at=/a/b"),
        ({"a": [2**2039]}, r"an integer must have at most 255 bytes, got 256"),
        ({(1, 2): 3}, r"a key must be a string, a number or None; key=\(1, 2\), at=/"),
    ]:
        with pytest.raises(FileError, match=reason):
            save_torch(value, tmp_path / "a.pt")
    assert list(tmp_path.iterdir()) == []
