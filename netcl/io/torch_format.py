"""State dicts of PyTorch (``.pt``, ``.pth``, ``.bin``), read and written without PyTorch.

Two containers can be read: the zip archive of torch 1.6 and later, and the stream of older versions. Only the archive is written.
:mod:`netcl.io.opcodes` reads the pickles and calls nothing that is not listed here, so a hostile file can be opened safely.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from netcl.core.tensor import Tensor
from netcl.data.formats import limit_for
from netcl.io import archive, opcodes, tree
from netcl.io.archive import Entries, refusal, refusing
from netcl.io.opcodes import Allowed, Attributes, Refused, Writer

OP_LOAD, OP_SAVE = "load_torch", "save_torch"
#: torch's storage classes by dtype; unsigned types of more than 8 bits have none.
_STORAGE_OF = {
    "float32": "FloatStorage", "float64": "DoubleStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage", "int64": "LongStorage",
    "int32": "IntStorage", "int16": "ShortStorage", "int8": "CharStorage", "uint8": "ByteStorage", "bool": "BoolStorage",
    "complex64": "ComplexFloatStorage", "complex128": "ComplexDoubleStorage",
}  # fmt: skip
_TORCH_MAGIC = 0x1950A86A20F9469CFC6C
_PAIR_BYTES = 64  # what an item of a dictionary takes, about
_ALIGNMENT = 64  # torch maps storages into memory when they start at multiples of this
_DAMAGED_PICKLE = (ValueError, TypeError, KeyError, IndexError, OverflowError, UnicodeDecodeError, EOFError, RecursionError)


# ---- reading


def load_torch(path: str | os.PathLike[str], *, max_bytes: int | None = None, convert: Callable[[np.ndarray], Any] | None = None) -> Any:
    """Return the content of a file from ``torch.save``: a state dict, or any nesting of dictionaries, lists, numbers, strings and tensors.

    Tensors become NumPy arrays (bfloat16 needs ``ml_dtypes``), or the results of ``convert(array)``; a parameter becomes its value.
    Sizes become tuples, devices and dtypes strings. Any other class or function in the file raises an error with its name.
    """
    with open(archive.regular_file(path, OP_LOAD), "rb") as file:
        head = file.read(4)
    if head[:2] == b"PK":
        with Entries(path, OP_LOAD, max_bytes) as entries, refusing(OP_LOAD, path, _DAMAGED_PICKLE):
            return _Zip(entries, convert, max_bytes).value()
    if head[:2] != b"\x80\x02":
        raise refusal(OP_LOAD, "the file must have been written by torch.save", file=path)
    with refusing(OP_LOAD, path, _DAMAGED_PICKLE):
        data = Path(path).read_bytes()
        return _stream(data, limit_for(len(data), max_bytes), convert, _dense_steps(len(data) // 4096, max_bytes))


def _dense_steps(tensors: int, max_bytes: int | None) -> int:
    """Return the most opcodes that a pickle may have: by ``max_bytes`` if given, else by ``tensors``, its estimated number of tensors."""
    return opcodes.FREE_STEPS + (opcodes.TENSOR_STEPS * tensors if max_bytes is None else max_bytes // 64)


class _Storage:
    """The dtype and the bytes of a storage, which one or more tensors are views of."""

    def __init__(self, dtype: str, data: np.ndarray | None):
        self.dtype, self.data = dtype, data


class _Reader:
    """Builds the values that a pickle may contain: containers, and tensors over the storages of its file."""

    def __init__(self, limit: int, big_endian: bool = False, convert: Callable[[np.ndarray], Any] | None = None):
        self.limit, self.left, self.big_endian, self.convert = limit, limit, big_endian, convert or (lambda array: array)
        plain = {
            "collections.OrderedDict": Allowed("OrderedDict", self.ordered),
            "torch._utils._rebuild_tensor": Allowed("tensor", self.tensor),
            "torch._utils._rebuild_tensor_v2": Allowed("tensor", self.tensor),
            "torch._utils._rebuild_tensor_v3": Allowed("tensor", self.tensor_of),
            "torch._utils._rebuild_parameter": Allowed("parameter", lambda data, *rest: data),
            "torch._utils._rebuild_parameter_with_state": Allowed("parameter", lambda data, *rest: data),
            "torch.Size": Allowed("Size", lambda sizes=(): tuple(_integers(sizes))),
            "torch.device": Allowed("device", _device),
            "torch.storage.UntypedStorage": Allowed("UntypedStorage", value="uint8"),
        }
        kinds = {f"torch.{name}": Allowed(name, value=name) for name in (*_STORAGE_OF, "uint16", "uint32", "uint64")}
        storages = {f"torch.{storage}": Allowed(storage, value=name) for name, storage in _STORAGE_OF.items()}
        self.names: dict[str, Allowed] = {**plain, **kinds, **storages}

    def take(self, nbytes: int) -> None:
        """Count ``nbytes`` toward the memory limit; raises if it is exceeded, because a small file may describe large tensors."""
        self.left -= nbytes
        if self.left < 0:
            found = self.limit - self.left
            raise Refused(f"the content must be at most {self.limit} bytes, got {found}; if you trust the file, pass max_bytes=")

    def ordered(self, pairs: Any = ()) -> Attributes:
        self.take(_PAIR_BYTES * len(pairs))
        return Attributes(opcodes.checked_items(pairs))

    def tensor(self, storage: Any, offset: int, size: Any, stride: Any, grad: Any = None, hooks: Any = None, marks: Any = None) -> Any:
        if marks:  # that its values are to be conjugated, or negated, when they are read
            raise Refused("a tensor must not be a conjugate or negative view: save its resolve_conj().resolve_neg()")
        return self.window(storage, getattr(storage, "dtype", ""), offset, size, stride)

    def tensor_of(self, storage: Any, offset: int, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *rest: Any) -> Any:
        return self.window(storage, dtype.value if isinstance(dtype, Allowed) else "", offset, size, stride)

    def window(self, storage: Any, dtype: str, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> Any:
        if not isinstance(storage, _Storage) or not dtype:
            raise Refused("a tensor must be made of a storage, with a known dtype")
        if storage.data is None:
            return None
        size, stride = _integers(size), _integers(stride)
        _integers([offset])
        if len(size) != len(stride):
            raise Refused(f"a tensor must have as many sizes as strides, got {len(size)} and {len(stride)}")
        kind = tree.bfloat16() if dtype == "bfloat16" else np.dtype(dtype)
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if math.prod(size) else 0
        count = storage.data.size // kind.itemsize
        if (math.prod(size) and last >= count) or storage.data.size % kind.itemsize:
            raise Refused(f"a tensor of size {size}, stride {stride}, offset {offset} must lie in its storage of {count} elements, {dtype}")
        self.take(math.prod(size) * kind.itemsize)
        if not math.prod(size):
            return self.convert(np.empty(size, kind))
        steps = [step * kind.itemsize for step in stride]
        values = np.lib.stride_tricks.as_strided(storage.data.view(kind)[offset:], size, steps)
        values = np.ascontiguousarray(values).reshape(size)
        return self.convert(values.byteswap() if self.big_endian else values)


def _integers(values: Any) -> tuple[int, ...]:
    # What is wrong is not shown: a tuple of tuples that share their parts takes for ever to print.
    if not isinstance(values, list | tuple) or len(values) > 64 or not all(type(n) is int and n >= 0 for n in values):
        raise Refused("sizes, strides and offsets must be at most 64 non-negative integers")
    return tuple(values)


def _device(kind: Any, index: Any = None) -> str:
    if not isinstance(kind, str) or not (index is None or type(index) is int):
        raise Refused("a torch.device must have a string and an optional integer as arguments")
    return kind if index is None else f"{kind}:{index}"


class _Zip:
    """The archive of torch 1.6 and later: one folder with ``data.pkl`` and ``data/<key>`` per storage."""

    def __init__(self, entries: Entries, convert: Callable[[np.ndarray], Any] | None, max_bytes: int | None):
        self.entries, self.steps = entries, _dense_steps(len(entries.infos), max_bytes)
        found = [name for name in entries.infos if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(found) != 1:
            raise entries.refuse("the zip archive must have been written by torch.save", "load_model opens .netcl files")
        self.folder = found[0].removesuffix("data.pkl")
        order = f"{self.folder}byteorder"
        self.reader = _Reader(entries.limit, order in entries.infos and entries.read(order).tobytes() == b"big", convert)
        self.known: dict[str, _Storage] = {}

    def value(self) -> Any:
        program = self.entries.read(f"{self.folder}data.pkl").tobytes()
        return opcodes.run_program(program, self.reader.names, self.persistent, most=self.steps)[0]

    def persistent(self, reference: Any) -> _Storage:
        dtype, key, count = _reference(reference)
        name = f"{self.folder}data/{key}"
        if name not in self.entries.infos:
            raise Refused(f"storage {key!r} must be in the file")
        if key not in self.known:
            self.known[key] = _Storage(dtype, self.entries.read(name))
        storage = self.known[key]
        if storage.dtype != dtype or storage.data is None or storage.data.size != count * _item_size(dtype):
            raise Refused(f"storage {key!r} must have the size and dtype that the pickle declares: {count} elements of {dtype}")
        return storage


def _item_size(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def _reference(reference: Any) -> tuple[str, str, int]:
    """Return dtype, key and number of elements of a reference ``("storage", class, key, location, numel)``."""
    if not isinstance(reference, tuple) or len(reference) < 5 or reference[0] != "storage" or not isinstance(reference[1], Allowed):
        raise Refused('a persistent ID must be of the form ("storage", class, key, location, numel)')
    _, kind, key, _, count = reference[:5]
    if not isinstance(key, str) or not key.isascii() or not key.replace("_", "").isalnum() or not kind.value:
        raise Refused(f"a storage must have a known dtype and a key of ASCII letters, digits and underscores, got {kind} and {key!r:.80}")
    _integers([count])
    if len(reference) > 5 and reference[5] is not None:
        raise Refused("a storage must not be a view of another")
    return kind.value, key, count


def _stream(data: bytes, limit: int, convert: Callable[[np.ndarray], Any] | None, most: int) -> Any:
    """Return the content of a file written by torch before 1.6.

    The file holds a magic number, a version, the sizes of types, the pickle, the keys, and the storages one after the other.
    """
    nothing = _Reader(limit)
    at, head = 0, []
    for _ in range(3):
        value, at = opcodes.run_program(data, nothing.names, _no_storage, at, most)
        head.append(value)
    if head[:2] != [_TORCH_MAGIC, 1001] or not isinstance(head[2], dict):
        raise Refused("the file must have been written by torch.save")
    declared: dict[str, tuple[str, int]] = {}

    def declare(reference: Any) -> _Storage:
        dtype, key, count = _reference(reference)
        declared[key] = (dtype, count)
        return _Storage(dtype, None)

    _, end = opcodes.run_program(data, nothing.names, declare, at, most)  # the storages come after the program, so it is run twice
    keys, position = opcodes.run_program(data, nothing.names, _no_storage, end, most)
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or sorted(keys) != sorted(declared):
        raise Refused("the storages of the file must be exactly those that its pickle refers to")
    storages = {}
    for key in keys:
        dtype, count = declared[key]
        nbytes = count * _item_size(dtype)
        if position + 8 + nbytes > len(data):
            raise Refused(f"the file must not be truncated: storage {key!r} ends at byte {position + 8 + nbytes} of {len(data)}")
        if int.from_bytes(data[position : position + 8], "little") != count:
            raise Refused(f"storage {key!r} must have the size that the pickle declares: {count} elements")
        storages[key] = _Storage(dtype, np.frombuffer(data, np.uint8, nbytes, position + 8).copy())
        position += 8 + nbytes
    reader = _Reader(limit, head[2].get("little_endian") is False, convert)
    return opcodes.run_program(data, reader.names, lambda reference: storages[_reference(reference)[1]], at, most)[0]


def _no_storage(reference: Any) -> Any:
    raise Refused("the header and the list of keys must not refer to a storage")


# ---- writing


def save_torch(value: Any, path: str | os.PathLike[str]) -> None:
    """Write a module's state dict, or nested containers of numbers, strings, arrays and tensors, for ``torch.load(weights_only=True)``."""
    state = value.state_dict() if hasattr(value, "state_dict") else value
    writer = _TorchWriter()
    try:
        writer.value(state, "")
    except RecursionError:
        raise refusal(OP_SAVE, "the value must not be nested too deeply or contain itself") from None
    except Refused as fault:
        raise refusal(OP_SAVE, str(fault)) from None
    with archive.replacing(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as out:
        _zip_entry(out, file, "data.pkl", writer.writer.finish())
        _zip_entry(out, file, "byteorder", b"little")
        for key, data in enumerate(writer.storages):
            _zip_entry(out, file, f"data/{key}", data)
        _zip_entry(out, file, "version", b"3\n")


def _zip_entry(out: zipfile.ZipFile, file: Any, name: str, data: Any) -> None:
    """Write an entry whose bytes start at a multiple of 64, as torch does; the gap is an extra field that readers skip."""
    info = zipfile.ZipInfo(f"archive/{name}")
    gap = -(file.tell() + 30 + len(info.filename) + 4) % _ALIGNMENT
    info.extra = b"FB" + gap.to_bytes(2, "little") + b"Z" * gap
    out.writestr(info, data)


class _TorchWriter:
    def __init__(self) -> None:
        self.writer = Writer()
        self.storages: list[bytes] = []

    def value(self, value: Any, where: str) -> None:
        if isinstance(value, Tensor):
            self.tensor(tree.host_bits(value), value.dtype, where)
        elif isinstance(value, np.ndarray | np.generic):
            self.tensor(*tree.bits(np.asarray(value)), where)
        elif isinstance(value, Mapping):
            self.mapping(value, where)
        elif isinstance(value, list | tuple):
            self.writer.add(b"](" if isinstance(value, list) else b"(")
            for i, item in enumerate(value):
                self.value(item, f"{where}/{i}")
            self.writer.add(b"e" if isinstance(value, list) else b"t")
        elif not self.writer.plain(value):
            what = f"a {type(value).__module__}.{type(value).__qualname__} cannot be saved"
            raise refusal(OP_SAVE, what, "convert it to dictionaries, lists, tuples, numbers, strings, arrays or tensors", at=where or "/")

    def mapping(self, value: Mapping[Any, Any], where: str) -> None:
        self.writer.add(b"}(")
        for key, item in value.items():
            if not self.writer.plain(key):
                raise refusal(OP_SAVE, "a key must be a string, a number or None", key=repr(key), at=where or "/")
            self.value(item, f"{where}/{key}")
        self.writer.add(b"u")

    def tensor(self, stored: np.ndarray, dtype: str, where: str) -> None:
        if dtype not in _STORAGE_OF:
            raise refusal(OP_SAVE, f"the dtype must exist in torch, got {dtype}", f"known: {', '.join(_STORAGE_OF)}", at=where or "/")
        out, size = self.writer, stored.shape
        out.name("torch._utils", "_rebuild_tensor_v2")
        out.add(b"((")
        out.text("storage")
        out.name("torch", _STORAGE_OF[dtype])
        out.text(str(len(self.storages)))
        out.text("cpu")
        out.integer(stored.size)
        out.add(b"tQ")
        out.integer(0)
        out.integers(size)
        out.integers([math.prod(size[i + 1 :]) for i in range(len(size))])
        out.add(b"\x89")
        out.name("collections", "OrderedDict")
        out.add(b")RtR")
        self.storages.append(np.ascontiguousarray(stored, stored.dtype.newbyteorder("<")).tobytes())
