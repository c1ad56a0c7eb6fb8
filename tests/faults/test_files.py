"""Files that are damaged, hostile, foreign, too new or of another model are refused with the reason, before anything is changed."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import pickle
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from netcl import nn, optim
from netcl.core.device import device
from netcl.io import (
    FileError,
    archive,
    load,
    load_checkpoint,
    load_model,
    load_params,
    load_safetensors,
    load_torch,
    opcodes,
    save,
    save_checkpoint,
    save_model,
    save_params,
    save_safetensors,
    save_torch,
)
from netcl.ops import random

GOLDEN = Path(__file__).parents[1] / "golden" / "torch_files"


@pytest.fixture(autouse=True)
def on_numpy():
    with device("cpu"):
        yield


def net(*widths: int) -> nn.Module:
    sizes = widths or (4, 8, 2)
    return nn.Sequential(*[nn.Linear(a, b) for a, b in itertools.pairwise(sizes)])


def trained(*widths: int) -> tuple[nn.Module, optim.Optimizer]:
    model = net(*widths)
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    (model(np.ones((3, model[0].in_features), np.float32)) * 2.0).sum().backward()
    optimizer.step()
    return model, optimizer


def written(folder: Path, kind: str) -> Path:
    """One small file of each kind."""
    path = folder / f"file.{kind}"
    values = {"a.weight": np.arange(12, dtype=np.float32).reshape(3, 4), "a.bias": np.ones(3, np.int64)}
    if kind == "netcl":
        save_model(net(), path)
    elif kind == "checkpoint.netcl":
        model, optimizer = trained()
        save_checkpoint(path, model=model, optimizer=optimizer, rng=np.random.default_rng(0), step=3)
    elif kind == "stream.pt":
        path.write_bytes((GOLDEN / "stream.pt").read_bytes())
    else:
        {"npz": save_params, "safetensors": save_safetensors, "pt": save_torch}[kind](values, path)
    return path


def opened(kind: str, path: Path):
    """What a file holds, in a form that can be compared."""
    if kind == "netcl":
        return opened("npz", path), {name: t.tolist() for name, t in load_model(path).state_dict().items()}
    if kind == "checkpoint.netcl":
        model, optimizer = trained()
        rng = np.random.default_rng(5)
        done = load_checkpoint(path, model=model, optimizer=optimizer, rng=rng)
        weights = {name: t.tolist() for name, t in model.state_dict().items()}
        return done.step, done.extra, weights, repr(optimizer.state_dict()), rng.bit_generator.state
    reader = {"npz": load_params, "safetensors": load_safetensors}.get(kind, load_torch)
    return repr(reader(path))


KINDS = ["netcl", "checkpoint.netcl", "npz", "pt", "safetensors", "stream.pt"]


# ---- damage


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.fault("file is cut", "every format, at many lengths", "`FileError`")
def test_a_cut_file_is_refused(tmp_path, kind, tried):
    path = written(tmp_path, kind)
    data = path.read_bytes()
    lengths = sorted({0, 1, 2, 4, 10, len(data) // 4, len(data) // 2, len(data) - 30, len(data) - 1})
    tried(len(lengths))
    for length in lengths:
        path.write_bytes(data[:length])
        with pytest.raises(FileError, match=rf"\[load_\w+\] .*file={path}"):
            opened(kind, path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.fault(
    "bit of a file flips",
    "every format, seeded places",
    "`FileError`, or equal values; a bare pickle stream has no checksum",
)
def test_a_flipped_bit_is_refused_or_harmless(tmp_path, kind, rng, tried):
    path = written(tmp_path, kind)
    data, before = path.read_bytes(), opened(kind, path)
    refused = 0
    tried(150)
    for position in rng.integers(0, len(data), 150):
        damaged = bytearray(data)
        damaged[position] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        try:
            after = opened(kind, path)
        except FileError:
            refused += 1
        else:
            assert kind == "stream.pt" or after == before, f"the flip at {position} of {len(data)} was not seen"
    assert refused > 50 or kind == "stream.pt"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.fault("file of another format", "text, random bytes and the heads of others", "`FileError`")
def test_a_file_of_another_format_is_refused(tmp_path, kind):
    path = tmp_path / "file"
    for data in (b"", b"hello world, this is text", os.urandom(500), b"\x89HDF\r\n\x1a\n" + bytes(200), b"PK\x03\x04" + bytes(100)):
        path.write_bytes(data)
        with pytest.raises(FileError, match=rf"\[load_\w+\] .*file={path}"):
            opened(kind, path)
        with pytest.raises(FileError):
            load(path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_file_is_said_to_be_missing(tmp_path, kind):
    with pytest.raises(FileNotFoundError):
        opened(kind, tmp_path / "nothing")
    with pytest.raises(IsADirectoryError if kind != "checkpoint.netcl" else FileNotFoundError):  # a folder without checkpoints
        opened(kind, tmp_path)


def test_files_of_one_kind_name_what_opens_them(tmp_path):
    model, checkpoint = written(tmp_path, "netcl"), written(tmp_path, "checkpoint.netcl")
    with pytest.raises(FileError, match=r"\[load_model\] the file must hold a model, got a checkpoint; file=.*; load_checkpoint opens it"):
        load_model(checkpoint)
    with pytest.raises(FileError, match=r"\[load_checkpoint\] the file must hold a checkpoint, got a model; file=.*; load_model opens it"):
        load_checkpoint(model)
    with pytest.raises(FileError, match=r"\[load_model\] the file must have a text entry __netcl_meta__"):
        load_model(written(tmp_path, "npz"))
    with pytest.raises(
        FileError, match=r"\[load_torch\] the zip archive must have been written by torch.save; file=.*; load_model opens .netcl files"
    ):
        load_torch(model)


# ---- the content


def rewritten(path: Path, change: Callable[[dict, dict], None]) -> None:
    """Change meta and arrays of a .netcl file and make its checksums right again."""
    arrays = archive.read_arrays(path, "test")
    meta = json.loads(str(arrays.pop(archive.META)))
    change(meta, arrays)
    archive.write(path, {key: value for key, value in meta.items() if key != "sha256"}, arrays, "test")


MODEL_FAULTS: dict[str, tuple[Callable[[dict, dict], object], str]] = {
    "newer": (lambda m, a: m.update(version=99), r"the file requires a newer netcl; version=99, known=1, file=.*; update netcl"),
    "odd version": (lambda m, a: m.update(version="1"), "__netcl_meta__ must have a version of at least 1 and a kind; version='1'"),
    "missing weight": (lambda m, a: a.pop("0.bias"), r"the weights must have the expected names; missing=0\.bias"),
    "extra weight": (lambda m, a: a.update(extra=np.ones(3)), r"the weights must have the expected names; unexpected=extra"),
    "missing both": (
        lambda m, a: (a.pop("0.bias"), m["dtypes"].pop("0.bias")),
        r"weights of the file \(3\) must have the expected names; missing=0\.bias",
    ),
    "shape": (
        lambda m, a: a.update({"0.bias": np.ones(9, np.float32)}),
        r"must have the shapes of the model; shapes=\[0\.bias is \(9,\), the model has \(8,\)\]",
    ),
    "dtype": (
        lambda m, a: a.update({"0.bias": np.ones(8)}),
        r"a weight must have the declared dtype; name=0\.bias, array=float64, declared=float32",
    ),
    "no dtypes": (lambda m, a: m.pop("dtypes"), "__netcl_meta__ must have an object dtypes and a list frozen"),
    "unknown layer": (
        lambda m, a: m["config"].update(type="os.system"),
        r"cannot be built; reason=UnknownLayerError: \[factory\] the type must be a registered layer",
    ),
    "wrong arguments": (lambda m, a: m["config"]["args"][0].update(args={"in_features": "x"}), "cannot be built"),
    "config is a list": (lambda m, a: m.update(config=[1, 2]), "cannot be built"),
    "no config": (lambda m, a: m.pop("config"), "cannot be built"),
    "tag in the config": (lambda m, a: m.update(config={"$array": "no such"}), "the state of the file must have the form netcl writes"),
    "huge": (
        lambda m, a: m["config"]["args"][0]["args"].update(in_features=10**9),
        r"OutOfMemoryError: \[parameter\] the model must not be larger than",
    ),
    "endless": (lambda m, a: m.update(config={"type": "LSTM", "args": [4, 4, 10**9]}), "the model must not be larger than max_bytes"),
    "endless, of nothing": (
        lambda m, a: m.update(config={"type": "GPT", "args": {"vocab_size": 0, "n_layer": 10**9, "n_head": 1, "n_embd": 0}}),
        "the model must not be larger than max_bytes",
    ),
    "tied to nothing": (lambda m, a: m.update(tied={"0.bias": "no such"}), "tied in __netcl_meta__ must map names"),
    "tied to another shape": (lambda m, a: m.update(tied={"0.bias": "0.weight"}), "tied in __netcl_meta__ must map names"),
    "negative size": (lambda m, a: m["config"]["args"][0]["args"].update(in_features=-4), "cannot be built"),
}


@pytest.mark.parametrize("fault", MODEL_FAULTS)
@pytest.mark.fault("model file with wrong content", "contents that do not fit each other", "`FileError`")
def test_a_model_file_with_wrong_content_is_refused(tmp_path, fault):
    path = written(tmp_path, "netcl")
    change, reason = MODEL_FAULTS[fault]
    rewritten(path, change)
    with pytest.raises(FileError, match=rf"\[load_model\] .*{reason}"):
        load_model(path)


@pytest.mark.fault("array in a file is changed", "bytes replaced, archive intact", "`FileError`")
def test_a_changed_array_does_not_match_its_checksum(tmp_path):
    path = written(tmp_path, "netcl")
    arrays = archive.read_arrays(path, "test")
    arrays["0.bias"][0] += 1
    archive.write_arrays(path, arrays, "test")
    with pytest.raises(FileError, match=r"\[load_model\] every entry must match its checksum; name='0.bias'"):
        load_model(path)


def state_of(model, optimizer, rng) -> str:
    weights = {name: t.tolist() for name, t in model.state_dict().items()}
    return repr((weights, optimizer.state_dict(), rng.bit_generator.state, random.get_state().as_dict()))


class Stubborn:
    """Takes a state only once it has been changed."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict:
        return {"value": self.value}

    def load_state_dict(self, state: dict) -> None:
        if state["value"] != self.value:
            raise ValueError("never")


def unrelated(meta: dict, arrays: dict) -> None:
    meta["state"]["random"] = [{"seed": -1, "counter": 0}]


@pytest.mark.fault("checkpoint does not fit", "other shapes, names, parts", "`ValueError`; nothing changes")
def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path):
    good_model, good_optimizer = trained()
    path = save_checkpoint(tmp_path / "a.netcl", model=good_model, optimizer=good_optimizer, rng=np.random.default_rng(0), step=3)
    rng = np.random.default_rng(1)

    def refuses(reason: str, model, optimizer, **parts) -> None:
        before = state_of(model, optimizer, rng)
        with pytest.raises(ValueError, match=reason):
            load_checkpoint(path, model=model, optimizer=optimizer, **{"rng": rng, **parts})
        assert state_of(model, optimizer, rng) == before

    refuses(
        r"\[load_checkpoint\] weights must have the shapes of the model; shapes=\[0\.weight is \(8, 4\), the model has \(9, 4\)",
        *trained(4, 9, 2),
    )
    refuses(
        r"\[load_checkpoint\] the weights of the file \(4\) must have the expected names; missing=2\.bias, 2\.weight", *trained(4, 8, 2, 2)
    )
    refuses(r"\[load_checkpoint\] the checkpoint must contain: scheduler; saved=\['model', 'optimizer'\]", *trained(), scheduler=Stubborn())
    refuses(
        r"the checkpoint must have a state of the same type for generator 'other'; own=PCG64, checkpoint=None",
        *trained(),
        rng={"other": rng},
    )
    refuses(r"generator 'rng'; own=Philox, checkpoint=PCG64", *trained(), rng=np.random.Generator(np.random.Philox(1)))
    half, optimizer = trained()
    refuses(r"weights must have the dtypes of the model; dtypes=\[0\.weight is float32, the model has float16", half.half(), optimizer)
    model, _ = trained()
    groups = [{"params": [p]} for p in model.parameters()]
    refuses(
        r"the optimizer of the checkpoint must have the same parameter groups; own=\[1, 1, 1, 1\], checkpoint=\[4\]",
        model,
        optim.Adam(groups),
    )
    refuses("unknown entry 'exp_avg'", model, optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    rewritten(path, unrelated)
    refuses(r"in the checkpoint, random must be a list of random stream states, and rng a dictionary", *trained())


@pytest.mark.fault("part of a checkpoint is refused", "the last part raises", "all parts as before")
def test_a_part_that_refuses_its_state_gives_the_others_theirs_back(tmp_path):
    model, optimizer = trained()
    stubborn = Stubborn()
    stubborn.value = 7
    path = save_checkpoint(tmp_path / "a.netcl", model=model, optimizer=optimizer, ema=stubborn, step=3)
    stubborn.value = 0
    model, optimizer = trained()
    rng = np.random.default_rng(1)
    before = state_of(model, optimizer, rng)
    with pytest.raises(ValueError, match="never"):
        load_checkpoint(path, model=model, optimizer=optimizer, ema=stubborn)
    assert state_of(model, optimizer, rng) == before and stubborn.value == 0


@pytest.mark.parametrize("fault", [
    lambda state: state["rng"]["rng"].pop("has_uint32"),
    lambda state: state["optimizer"].update(state=[1]),
    lambda state: state["optimizer"]["param_groups"][0].update(params=[{"a": 1}] * 4),
    lambda state: state["rng"]["rng"]["state"].update(state="x"),
])  # fmt: skip
def test_states_that_are_made_otherwise_are_refused_and_change_nothing(tmp_path, fault):
    path = written(tmp_path, "checkpoint.netcl")
    rewritten(path, lambda meta, arrays: fault(meta["state"]))
    model, optimizer = trained()
    optimizer.load_state_dict(optimizer.state_dict())  # which puts its keys in the order they have after a load
    rng = np.random.default_rng(1)
    before = state_of(model, optimizer, rng)
    with pytest.raises(FileError, match=r"\[load_checkpoint\] "):
        load_checkpoint(path, model=model, optimizer=optimizer, rng=rng)
    assert state_of(model, optimizer, rng) == before


# ---- hostile archives


def zipped(path: Path, entries: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, data in entries.items():
            file.writestr(zipfile.ZipInfo(name), data, compress_type=compression)
    return path


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array(out, array)
    return out.getvalue()


@pytest.mark.fault("zip bomb", "a small archive of 256 MB", "refused before it is unpacked")
def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path):
    bomb = zipped(tmp_path / "bomb.npz", {"x.npy": npy(np.zeros(1 << 25))}, zipfile.ZIP_DEFLATED)
    assert bomb.stat().st_size < 1 << 20
    for reader in (load_params, load_model, load_checkpoint, load_torch, load):
        with pytest.raises(
            FileError,
            match=r"must not unpack to more than the limit; unpacked=268435\d+, limit=\d+, file=.*; if you trust the file, pass max_bytes=",
        ):
            reader(bomb)
    assert load_params(bomb, max_bytes=1 << 30)["x"].shape == (1 << 25,)


@pytest.mark.fault("zip entries overlap", "several names for the same bytes", "`FileError`")
def test_entries_that_overlap_are_refused(tmp_path):
    """Many names for the same bytes: a bomb without compression."""
    path = zipped(tmp_path / "a.npz", {f"{i}.npy": npy(np.zeros(1000)) for i in range(4)})
    data = path.read_bytes()
    with zipfile.ZipFile(path) as file:
        offsets = [info.header_offset for info in file.infolist()]
    cut = data[: offsets[1]] + data[data.index(b"PK\x01\x02") :]
    moved = cut
    for offset in offsets[1:]:
        moved = moved.replace(struct.pack("<I", offset), struct.pack("<I", 0))
    end = moved.index(b"PK\x05\x06")
    moved = moved[: end + 16] + struct.pack("<I", offsets[1]) + moved[end + 20 :]
    path.write_bytes(moved)
    with pytest.raises(FileError, match=r"\[load_params\]"):
        load_params(path)


@pytest.mark.fault("zip entry declares too little", "a false size", "`FileError`")
def test_an_entry_that_declares_less_than_it_holds_is_refused(tmp_path):
    path = zipped(tmp_path / "a.npz", {"x.npy": npy(np.zeros(1000))}, zipfile.ZIP_DEFLATED)
    data = path.read_bytes()
    path.write_bytes(data.replace(struct.pack("<I", len(npy(np.zeros(1000)))), struct.pack("<I", 200)))
    with pytest.raises(FileError, match=r"\[load_params\] the file must be undamaged"):
        load_params(path)


@pytest.mark.parametrize(
    "name", ["../../etc/passwd.npy", "/etc/passwd.npy", "a/../../b.npy", "C:\\x.npy", "a\\..\\b.npy", "x\n.npy", "..npy/.."]
)
@pytest.mark.fault("names in an archive are paths", "`../` and absolute names", "`FileError`; nothing is written")
def test_names_that_are_paths_are_refused(tmp_path, name):
    path = zipped(tmp_path / "a.npz", {name: npy(np.zeros(3))})
    for reader in (load_params, load_model, load_torch):
        with pytest.raises(FileError, match="the name of an entry must be a plain relative path"):
            reader(path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.fault("two entries of one name", "an archive with both", "`FileError`")
def test_two_entries_of_one_name_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        for value in (1.0, 2.0):
            file.writestr("x.npy", npy(np.array([value])))
    with pytest.raises(FileError, match=r"entries must have different names; name='x\.npy'"):
        load_params(tmp_path / "a.npz")


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path):
        self.command = f"touch {marker}"

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.fault("pickle inside an npz file", "an object array", "refused; nothing runs")
def test_a_pickle_inside_an_npz_is_refused_unopened(tmp_path):
    marker = tmp_path / "marker"
    np.savez(tmp_path / "a.npz", x=np.array([Evil(marker)], dtype=object), allow_pickle=True)
    for reader in (load_params, load_model, load):
        with pytest.raises(
            FileError, match=r"an entry must hold numbers or strings, got dtype object; name='x.npy', .*pickles are never opened"
        ):
            reader(tmp_path / "a.npz")
    assert not marker.exists()


HEADERS = [
    "{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999,), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,), }", "{'descr': '<f4', 'fortran_order': 1, 'shape': (1,), }",
    "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,), }", "{'descr': 'no', 'fortran_order': False, 'shape': (1,), }",
    "__import__('os').system('true')", "{'descr': '<f4'}", "(" * 300, "", "{'descr': '<V4', 'fortran_order': False, 'shape': (1,), }",
    "{'descr': '<U0', 'fortran_order': False, 'shape': (9,), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (0, 99999999999999999999), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (True,), }", "{'descr': '<M8[s]', 'fortran_order': False, 'shape': (), }",
]  # fmt: skip


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.fault("odd headers of arrays", "headers that NumPy does not write", "`FileError`")
def test_odd_headers_of_arrays_are_refused(tmp_path, header):
    entry = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + bytes(4)
    with pytest.raises(FileError, match=r"\[load_params\]"):
        load_params(zipped(tmp_path / "a.npz", {"x.npy": entry}))


@pytest.mark.parametrize("number", [{"$number": 10**18, "dtype": "V"}, {"$number": 2**80, "dtype": "int64"}, {"$number": 1, "dtype": "O"}])
def test_a_number_that_is_none_is_refused(tmp_path, number):
    """A void of NumPy takes the memory its number says."""
    archive.write(tmp_path / "a.netcl", {"kind": "state", "state": [number]}, {}, "test")
    with pytest.raises(FileError, match="must have the form netcl writes"):
        load(tmp_path / "a.netcl")


# ---- hostile files of torch


def torch_file(path: Path, program: bytes, storages: dict[str, bytes] | None = None) -> Path:
    data = {f"archive/data/{key}": value for key, value in (storages or {}).items()}
    return zipped(path, {"archive/data.pkl": program, "archive/byteorder": b"little", **data, "archive/version": b"3\n"})


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("container", ["zip", "stream"])
@pytest.mark.fault(
    "torch file that calls something",
    "`__reduce__` of `os.system`, pickle protocols 0 to 5",
    "refused by name; nothing runs",
)
def test_a_file_that_calls_something_is_refused_and_calls_nothing(tmp_path, protocol, container):
    marker = tmp_path / "marker"
    program = pickle.dumps({"weight": Evil(marker)}, protocol=protocol)
    path = torch_file(tmp_path / "evil.pt", program)
    if container == "stream":
        head = b"".join(pickle.dumps(part, protocol=2) for part in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}))
        path.write_bytes(head + program)
    for reader in (load_torch, load):
        with pytest.raises(FileError) as caught:
            reader(path)
        assert "posix.system, which a state dict may not contain" in str(caught.value) or protocol < 2
    assert not marker.exists()


@pytest.mark.parametrize(
    "name",
    [
        "os system",
        "builtins eval",
        "builtins __import__",
        "torch load",
        "torch.hub load",
        "subprocess Popen",
        "collections Counter",
        "torch._utils __builtins__",
    ],
)
@pytest.mark.fault("torch file that names a function", "`os.system` and others", "refused by name; nothing is imported")
def test_names_that_are_not_on_the_list_are_refused_by_name(tmp_path, name):
    module, attribute = name.split()
    program = b"\x80\x02c" + f"{module}\n{attribute}\n".encode() + b"X\x04\x00\x00\x00true\x85R."
    with pytest.raises(FileError, match=rf"\[load_torch\] the file refers to {module}\.{attribute}, which a state dict may not contain"):
        load_torch(torch_file(tmp_path / "a.pt", program))


PROGRAMS = {
    "obj": b"\x80\x02(cos\nsystem\nX\x04\x00\x00\x00trueo.",
    "inst": b"\x80\x02(X\x04\x00\x00\x00trueios\nsystem\n.",
    "ext": b"\x80\x02\x82\x01.",
    "newobj": b"\x80\x02ccollections\nOrderedDict\n)\x81.",
    "call a dtype": b"\x80\x02ctorch\nfloat32\n)R.",
    "call a number": b"\x80\x02K\x01)R.",
    "arguments that are no tuple": b"\x80\x02ccollections\nOrderedDict\n]R.",
    "empty stack": b"\x80\x02R.",
    "nothing": b"\x80\x02.",
    "no stop": b"\x80\x02N",
    "empty": b"",
    "mark at the end": b"\x80\x02(.",
    "two values": b"\x80\x02NN.",
    "unknown memo": b"\x80\x02h\x05.",
    "odd items": b"\x80\x02}(K\x01u.",
    "set on a list": b"\x80\x02]K\x01K\x02s.",
    "append to a dict": b"\x80\x02}K\x01a.",
    "build on a list": b"\x80\x02]}b.",
    "list as key": b"\x80\x02}]K\x01s.",
    "storage that is a number": b"\x80\x02K\x01Q.",
    "storage that is not there": b"\x80\x02(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x007X\x03\x00\x00\x00cpuK\x01tQ.",
    "storage with a path": b"\x80\x02(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x0a\x00\x00\x00../../etc/X\x03\x00\x00\x00cpuK\x01tQ.",  # noqa: E501
    "tensor of nothing": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(NK\x00))\x89NtR.",
    "too few arguments": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.",
    "long text": b"\x80\x02X\xff\xff\xff\xff.",
    "bad text": b"\x80\x02X\x01\x00\x00\x00\xff.",
    "protocol 9": b"\x80\x09N.",
    "stack global of numbers": b"\x80\x04K\x01K\x02\x93.",
}


@pytest.mark.parametrize("which", PROGRAMS)
def test_programs_that_torch_does_not_write_are_refused(tmp_path, which):
    with pytest.raises(FileError, match=r"\[load_torch\]"):
        load_torch(torch_file(tmp_path / "a.pt", PROGRAMS[which]))


def tensor_program(numel: int, offset: int, size: tuple, stride: tuple) -> bytes:
    out = opcodes.Writer()
    out.name("torch._utils", "_rebuild_tensor_v2")
    out.add(b"((")
    out.text("storage")
    out.name("torch", "FloatStorage")
    out.text("0")
    out.text("cpu")
    out.integer(numel)
    out.add(b"tQ")
    out.integer(offset)
    out.integers(size)
    out.integers(stride)
    out.add(b"\x89NtR")
    return out.finish()


@pytest.mark.parametrize(
    "layout, reason",
    [
        ((4, 0, (5,), (1,)), "must lie in its storage of 4 elements"),
        ((4, 4, (1,), (1,)), "must lie in"),
        ((4, 0, (2, 2), (3, 1)), "must lie in"),
        ((4, -1, (2,), (1,)), "must be at most 64 non-negative integers"),
        ((4, 3, (2,), (-1,)), "must be at most 64 non-negative integers"),
        ((4, 0, (2, 2), (1,)), "as many sizes as strides, got 2 and 1"),
        ((4, 0, (10**12,), (0,)), r"must be at most \d+ bytes, got \d+; if you trust the file, pass max_bytes="),
        ((5, 0, (4,), (1,)), "storage '0' must have the size and dtype that the pickle declares"),
        ((2**60, 0, (4,), (1,)), "storage '0' must have the size"),
    ],
)
@pytest.mark.fault("tensor beyond its storage", "strides and offsets out of range", "`FileError`")
def test_tensors_beyond_their_storage_are_refused(tmp_path, layout, reason):
    path = torch_file(tmp_path / "a.pt", tensor_program(*layout), {"0": np.arange(4, dtype=np.float32).tobytes()})
    with pytest.raises(FileError, match=rf"\[load_torch\] .*{reason}"):
        load_torch(path)
    assert load_torch(torch_file(path, tensor_program(4, 1, (2,), (2,)), {"0": np.arange(4, dtype=np.float32).tobytes()})).tolist() == [
        1,
        3,
    ]


def test_a_tensor_that_torch_would_conjugate_is_refused(tmp_path):
    """The storage holds the values before: they would come back with the wrong sign."""
    program = tensor_program(4, 0, (2,), (1,)).replace(b"\x89NtR", b"\x89N}X\x04\x00\x00\x00conj\x88stR")
    with pytest.raises(FileError, match="a conjugate or negative view: save its resolve_conj"):
        load_torch(torch_file(tmp_path / "a.pt", program, {"0": bytes(16)}))


@pytest.mark.parametrize("use", ["key", "size", "storage", "pairs", "device"])
@pytest.mark.fault("structure that takes for ever", "containers nested and shared", "refused within 5 s")
def test_structures_that_take_for_ever_to_look_at_are_refused_quickly(tmp_path, use):
    """A tuple of twice a tuple of twice a tuple ...: small in memory, endless to hash or print."""
    deep = b"\x80\x02)" + b"".join(b"q\x00h\x00\x86" for _ in range(200))
    program = {
        "key": b"\x80\x02}" + deep[2:] + b"K\x01s.",
        "size": b"\x80\x02ctorch\nSize\n" + deep[2:] + b"R.",
        "storage": deep + b"Q.",
        "pairs": b"\x80\x02ccollections\nOrderedDict\n](" + deep[2:] + b"K\x01\x86e\x85R.",
        "device": b"\x80\x02ctorch\ndevice\n" + deep[2:] + b"\x85R.",
    }[use]
    start = time.monotonic()
    with pytest.raises(FileError, match=r"\[load_torch\]"):
        load_torch(torch_file(tmp_path / "a.pt", program))
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("what", ["size", "pairs", "key"])
def test_a_program_that_says_something_large_many_times_is_refused_quickly(tmp_path, what):
    """A few bytes that recall a long list: copied, or looked at, each time, a small file takes all memory, or for ever."""
    numbers, many = b"(" + b"K\x01" * 50_000 + b"t", 20_000
    pairs = b"](" + b"".join(b"J" + struct.pack("<i", i) + b"N\x86" for i in range(20_000)) + b"e"
    program = {
        "size": b"ctorch\nSize\nq\x00" + numbers + b"\x85q\x01(" + b"h\x00h\x01R" * many + b"t\x87.",
        "pairs": b"ccollections\nOrderedDict\nq\x00" + pairs + b"\x85q\x01(" + b"h\x00h\x01R" * many + b"t\x87.",
        "key": numbers + b"q\x00}(" + b"h\x00N" * many + b"u\x86.",
    }[what]
    start = time.monotonic()
    with pytest.raises(FileError, match=r"\[load_torch\]"):
        load_torch(torch_file(tmp_path / "a.pt", b"\x80\x02" + program))
    assert time.monotonic() - start < 60


@pytest.mark.fault("mutated pickle programs", "seeded mutations", "`FileError` or read; never a crash")
def test_mutated_programs_are_refused_or_read_but_never_crash(tmp_path, rng, tried):
    with zipfile.ZipFile(GOLDEN / "zip.pt") as file:
        entries = {name: file.read(name) for name in file.namelist()}
    (name,) = [name for name in entries if name.endswith("data.pkl")]
    program = entries[name]
    tried(400)
    for _ in range(400):
        mutated = bytearray(program)
        for position in rng.integers(0, len(program), int(rng.integers(1, 4))):
            mutated[position] = int(rng.integers(256))
        path = zipped(tmp_path / "a.pt", entries | {name: bytes(mutated)})
        with contextlib.suppress(FileError):
            load_torch(path)


@pytest.mark.fault("mutated metadata", "seeded mutations of JSON", "`FileError` or read; never a crash")
def test_mutated_meta_is_refused_or_read_but_never_crashes(tmp_path, rng, tried):
    path = written(tmp_path, "checkpoint.netcl")
    arrays = archive.read_arrays(path, "test")
    text = str(arrays[archive.META])
    tried(150)
    for _ in range(150):
        mutated = list(text)
        for position in rng.integers(0, len(text), int(rng.integers(1, 3))):
            mutated[position] = chr(int(rng.integers(32, 127)))
        archive.write_arrays(path, arrays | {archive.META: np.array("".join(mutated))}, "test")
        model, optimizer = trained()
        try:
            load_checkpoint(path, model=model, optimizer=optimizer, rng=np.random.default_rng(0))
        except ValueError as refused:
            assert str(refused).startswith("[")


@pytest.mark.fault("state that cannot be saved", "objects that have no stored form", "the old file is whole")
def test_saving_what_cannot_be_saved_leaves_the_old_file(tmp_path):
    path = written(tmp_path, "netcl")
    before = path.read_bytes()
    with pytest.raises(FileError):
        save({"x": object()}, path)

    class Unregistered(nn.Module):
        pass

    with pytest.raises(ValueError, match="Unregistered is not registered"):
        save_model(Unregistered(), path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == [path.name]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("read", [load_checkpoint, load_model, load_torch, load])
@pytest.mark.fault("pipe in place of a file", "a FIFO", "refused at once")
def test_a_pipe_is_refused_instead_of_waited_for(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileError, match=r"the file must not be a pipe or a device; file=.*; name a regular file"):
        read(tmp_path / "pipe")


FULL = """
import resource, sys
import numpy as np
from netcl import cli, io, nn
from netcl.core.device import device
sys.dont_write_bytecode = True  # it would be cut too, and fail in other tests
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000,) * 2)  # as a full disk does, it ends a write in the middle
if sys.argv[1] == "train":
    sys.exit(cli.main(["train", "--model", "mlp", "--epochs", "1", "--device", "cpu", "--run", sys.argv[2]]))
with device("cpu"):
    io.save_params({"w": np.zeros(100_000, np.float32)}, sys.argv[2] + "/w.npz")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
@pytest.mark.parametrize(("what", "name"), [("train", "checkpoints/"), ("save", "w.npz")])
@pytest.mark.fault("disk is full", "a limit that ends a write in the middle", "file and remedy are named; no half file is left")
def test_a_full_disk_names_the_file_and_the_remedy(tmp_path, what, name):
    done = subprocess.run([sys.executable, "-c", FULL, what, str(tmp_path)], capture_output=True, text=True)
    told = next(line for line in done.stderr.splitlines() if "[save]" in line)
    assert done.returncode == 1 and f"[save] there is no room for the file: File too large; file={tmp_path}/{name}" in told
    assert told.endswith("; free space, or write to another folder")
    assert [path for path in tmp_path.rglob("*") if path.name.startswith(".writing") or path.suffix == ".npz"] == []


@pytest.mark.fault("torch file of bare containers", "thousands of empty lists", "refused by a limit on steps")
def test_a_torch_file_of_bare_containers_is_refused_before_it_takes_minutes(tmp_path, monkeypatch):
    monkeypatch.setattr(opcodes, "FREE_STEPS", 1000)
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w") as out:
        out.writestr("a/data.pkl", b"\x80\x02](" + b"]" * 3000 + b"e.")
    with pytest.raises(FileError, match=r"the pickle must have at most 2000 opcodes.*pass max_bytes="):
        load_torch(path)
    assert len(load_torch(path, max_bytes=1 << 20)) == 3000
