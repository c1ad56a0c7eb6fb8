"""Containers and nested state: exactly what was put in comes out, under exactly the given name, whole or not at all."""

from __future__ import annotations

import json
import os
import stat
import time
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given as examples
from hypothesis import settings
from hypothesis import strategies as st

from netcl.core.device import device
from netcl.core.tensor import Tensor
from netcl.io import FileError, archive, load, load_params, load_safetensors, save, save_params, save_safetensors, tree

DTYPES = ["float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8", "uint16", "bool", "complex64"]


@pytest.fixture(autouse=True)
def on_numpy():
    with device("cpu"):
        yield


def arrays(rng) -> dict[str, np.ndarray]:
    found = {f"layer.{i}.{name}": (rng.random((3, 5)) * 100).astype(name) for i, name in enumerate(DTYPES)}
    strided = np.asfortranarray(rng.standard_normal((4, 3)))[::2]
    return found | {"empty": np.zeros((0, 3)), "scalar": np.array(2.5), "strided": strided, "swapped": np.arange(3, dtype=">f4")}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return list(a) == list(b) and all((a[n].shape, a[n].dtype, a[n].tobytes()) == (b[n].shape, b[n].dtype, b[n].tobytes()) for n in a)


@pytest.mark.parametrize("name", ["params.npz", "params", "params.weights", "ünïcode name.npz"])
def test_params_keep_their_name_and_values(tmp_path, rng, name):
    path, given = tmp_path / name, arrays(rng)
    save_params(given, path)
    assert os.listdir(tmp_path) == [name]
    assert same(load_params(path), given)


def test_numpy_reads_params_and_the_other_way_round(tmp_path, rng):
    save_params(arrays(rng), tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz", allow_pickle=False) as file:
        assert same(dict(file), load_params(tmp_path / "a.npz"))
    np.savez_compressed(tmp_path / "b.npz", x=np.zeros((100, 100)), y=np.asfortranarray(np.arange(6).reshape(2, 3)))
    found = load_params(tmp_path / "b.npz")
    assert found["y"].tolist() == [[0, 1, 2], [3, 4, 5]] and found["x"].shape == (100, 100)


@pytest.mark.parametrize("suffix", ["npz", "safetensors", "pt"])
def test_bfloat16_survives(tmp_path, suffix):
    values = np.array([1.5, -2.0, 3e38, np.inf, np.nan], ml_dtypes.bfloat16)
    save({"w": Tensor.from_host(values), "v": values}, tmp_path / f"w.{suffix}")
    again = load(tmp_path / f"w.{suffix}")
    assert again["w"].dtype == again["v"].dtype == "bfloat16"
    assert np.array_equal(again["w"].to_host(), values.astype(np.float32), equal_nan=True)


def test_dtypes_that_safetensors_lack_are_refused(tmp_path):
    with pytest.raises(FileError, match=r"\[save_safetensors\] the dtype must exist in safetensors, got complex128; name='x'"):
        save_safetensors({"x": np.ones(2, complex)}, tmp_path / "a.safetensors")


def test_dtypes_that_numpy_lacks_are_refused(tmp_path):
    head = json.dumps({"a": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(4))
    with pytest.raises(FileError, match=r"\[load_safetensors\] .*file="):
        load_safetensors(tmp_path / "a.safetensors")


def test_safetensors_keep_values_of_strided_arrays(tmp_path, rng):
    given = {name: a for name, a in arrays(rng).items() if name != "swapped"}
    save_safetensors(given, tmp_path / "a.safetensors", {"who": "me"})
    found = load_safetensors(tmp_path / "a.safetensors")
    assert set(found) == set(given) and all(np.array_equal(found[name], given[name]) for name in given)


def test_the_same_content_gives_the_same_bytes(tmp_path, rng):
    values = arrays(rng)
    for name in ("a", "b"):
        save_params(values, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


# ---- writing


@pytest.mark.fault("write fails", "an error in the middle", "the old file is whole")
def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.npz"
    save_params({"x": np.ones(3)}, path)
    with pytest.raises(RuntimeError), archive.replacing(path) as file:
        file.write(b"half")
        raise RuntimeError
    assert os.listdir(tmp_path) == ["a.npz"] and load_params(path)["x"].tolist() == [1, 1, 1]


def test_files_have_the_permissions_of_any_new_file(tmp_path):
    (tmp_path / "plain").write_text("")
    save_params({"x": np.ones(3)}, tmp_path / "a.npz")
    assert stat.S_IMODE((tmp_path / "a.npz").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_an_older_file_keeps_its_mode_and_its_links(tmp_path, monkeypatch):
    file, link = tmp_path / "a.npz", tmp_path / "latest.npz"
    save_params({"x": np.ones(3)}, file)
    file.chmod(0o600)
    link.symlink_to(file)
    save_params({"x": np.zeros(3)}, link)
    assert link.is_symlink() and not load_params(file)["x"].any() and stat.S_IMODE(file.stat().st_mode) == 0o600
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # the mode of a file does not stop root
    with pytest.raises(PermissionError, match=r"\[save\] the file must be writable"):
        save_params({"x": np.ones(3)}, file)


def test_a_damaged_directory_is_refused(tmp_path):
    save_params({"x": np.ones(3), "y": np.ones(3)}, tmp_path / "a.npz")
    data = (tmp_path / "a.npz").read_bytes()
    first = data.index(b"PK\x01\x02")
    for at, new in ((first + 33, b"\x01"), (len(data) - 14, bytes(8))):
        (tmp_path / "b.npz").write_bytes(data[:at] + new + data[at + len(new) :])
        with pytest.raises(FileError, match=r"\[load_params\] "):
            load_params(tmp_path / "b.npz")


@pytest.mark.fault("killed processes left files", "temporary files of dead and living writers", "only the dead ones' are removed")
def test_what_killed_processes_left_is_swept_and_what_others_write_is_not(tmp_path):
    old = time.time() - 3600
    (tmp_path / ".writing-dead").write_bytes(b"x")
    (tmp_path / ".writing-young").write_bytes(b"x")
    os.utime(tmp_path / ".writing-dead", (old, old))
    with archive.replacing(tmp_path / "slow") as slow:
        slow.write(b"slowly")
        slow.flush()
        (mine,) = set(os.listdir(tmp_path)) - {".writing-dead", ".writing-young"}
        os.utime(tmp_path / mine, (old, old))
        save_params({"x": np.ones(3)}, tmp_path / "fast")
        assert sorted(os.listdir(tmp_path)) == sorted([mine, ".writing-young", "fast"])
    assert (tmp_path / "slow").read_bytes() == b"slowly"


def test_a_name_that_is_not_a_files_is_refused_before_anything_is_written(tmp_path):
    for path in (tmp_path, Path(os.devnull), ""):
        with pytest.raises(FileExistsError, match=r"\[save\] the path must not be a folder or a device"):
            save_params({"x": np.ones(2)}, path)
    assert not Path(os.devnull).is_file() and not list(tmp_path.iterdir())


@pytest.mark.fault("file replaced while it is read", "a rename during a read", "one whole version is read")
def test_a_file_is_read_whole_while_another_takes_its_name(tmp_path, monkeypatch):
    save_params({"x": np.ones(1000)}, tmp_path / "a.npz")
    opened = zipfile.ZipFile

    def slow(*args, **kwargs):
        found = opened(*args, **kwargs)
        monkeypatch.setattr(archive.zipfile, "ZipFile", opened)
        save_params({"x": np.ones(1)}, tmp_path / "a.npz")
        return found

    monkeypatch.setattr(archive.zipfile, "ZipFile", slow)
    assert load_params(tmp_path / "a.npz")["x"].size == 1000


@pytest.mark.parametrize("name", ["x" * 70_000, "\ud800"])
def test_names_that_archives_cannot_hold_are_kept_in_states(tmp_path, name):
    with pytest.raises(FileError, match="must be usable as a file entry"):
        save_params({name: np.ones(2)}, tmp_path / "a.npz")
    save({name: np.ones(2)}, tmp_path / "a.netcl")
    assert list(load(tmp_path / "a.netcl")) == [name]


def test_names_given_to_entries_are_not_taken_yet(tmp_path):
    save({"array": {"1": np.ones(2)}, "a//b": np.zeros(2)}, tmp_path / "a.netcl")
    again = load(tmp_path / "a.netcl")
    assert again["array"]["1"].tolist() == [1, 1] and again["a//b"].tolist() == [0, 0]


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"\[save\] the folder must exist; folder=.*nowhere; create it first"):
        save_params({"x": np.ones(3)}, tmp_path / "nowhere" / "a.npz")


@pytest.mark.parametrize("name", ["../x", "/x", "a/../b", "a\\b", "C:x", "", "a\x00b", "x/", "~x"])
def test_names_that_are_paths_are_not_written(tmp_path, name):
    with pytest.raises(FileError, match=r"\[save_params\] every name must be usable as a file entry"):
        save_params({name: np.ones(1)}, tmp_path / "a.npz")
    assert os.listdir(tmp_path) == []


@pytest.mark.fault("object that needs pickle", "saved", "`FileError`")
def test_objects_are_not_written(tmp_path):
    with pytest.raises(
        FileError, match=r"\[save_params\] an array must hold numbers or text, got dtype object; name=x; convert it to numbers"
    ):
        save_params({"x": np.array([{}])}, tmp_path / "a.npz")
    with pytest.raises(FileError, match=r"\[save\] a builtins.function cannot be saved; at=a.0; convert it to"):
        save({"a": [lambda: 0]}, tmp_path / "a.netcl")
    with pytest.raises(FileError, match=r"\[save\] the suffix must name a known format; file=.*; known: .netcl"):
        save({}, tmp_path / "a.zip")


# ---- nested state

plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
keys = st.text() | st.integers() | st.booleans() | st.tuples(st.integers(), st.text())
numbers = st.sampled_from([np.float32(0.1), np.int64(-3), np.bool_(True), np.zeros((2, 0), np.int8), np.array([1.5, np.nan])])
nested = st.recursive(
    plain | numbers, lambda inside: st.lists(inside) | st.tuples(inside, inside) | st.dictionaries(keys, inside), max_leaves=12
)


def alike(a, b) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return len(a) == len(b) and all(alike(x, y) for x, y in zip(a, b, strict=True)) and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    return repr(a) == repr(b)


@settings(deadline=None, max_examples=150)
@examples(nested)
def test_any_nested_state_comes_back_as_it_was(value):
    packed, found = tree.pack(value, "state")
    assert alike(tree.unpack(json.loads(json.dumps(packed, allow_nan=False)), found), value)


def test_states_of_generators_and_tensors_come_back(tmp_path):
    kinds = [np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64]
    value = {
        "rng": [kind(3).state for kind in kinds],
        7: Tensor.from_host(np.array([1, 2], np.int32)),
        "wide": Tensor.ones((2,), "float64"),
    }
    save(value, tmp_path / "state.netcl")
    again = load(tmp_path / "state.netcl")
    for kind, state in zip(kinds, again["rng"], strict=True):
        fresh = kind(0)
        fresh.state = state
        assert np.random.Generator(fresh).random(5).tolist() == np.random.Generator(kind(3)).random(5).tolist()
    assert (again[7].dtype, again[7].tolist(), again["wide"].dtype) == ("int32", [1, 2], "float64")


@pytest.mark.fault("state that contains itself", "a cycle", "refused")
def test_a_state_that_contains_itself_is_refused(tmp_path):
    value: list = []
    value.append(value)
    with pytest.raises(FileError, match="nested too deeply or contain itself"):
        save(value, tmp_path / "a.netcl")
    assert os.listdir(tmp_path) == []


def test_tensors_of_a_device_come_back(device, tmp_path, rng):
    values = rng.standard_normal((3, 7)).astype(np.float32)
    for dtype in ("float32", "float16", "bfloat16", "int64"):
        t = Tensor.from_host(device.queue, values * 10, dtype)
        save({"t": t}, tmp_path / "a.netcl")
        again = load(tmp_path / "a.netcl", device.queue)["t"]
        assert again.dtype == dtype and again.queue is device.queue and np.array_equal(again.to_host(), t.to_host())
