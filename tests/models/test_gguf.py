"""GGUF files: read and written as the ``gguf`` package does it, and refused when they are damaged."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from netcl.io import FileError
from netcl.models.gguf import GGUFFile, NewTensor, write_gguf
from netcl.ops.quantized.formats import BLOCK_TYPES, dequantize, kind_of, quantize

METADATA = {
    "general.architecture": "llama",
    "a.uint8": np.uint8(200), "a.int8": np.int8(-3), "a.uint16": np.uint16(60000), "a.int16": np.int16(-300), "a.uint32": 7,
    "a.int32": -5, "a.float32": 0.5, "a.bool": True, "a.string": "äöü \N{SNOWMAN}", "a.uint64": 2**63 + 1, "a.int64": -(2**40),
    "a.float64": np.float64(0.1), "a.strings": ["x", "", "yz"], "a.numbers": np.arange(5, dtype=np.int32),
    "a.floats": np.array([0.5, -1.5], np.float32), "a.bools": np.array([True, False]), "a.nested": [[1, 2], [3]],
}  # fmt: skip


def tensors(rng: np.random.Generator) -> dict[str, NewTensor]:
    arrays = {
        f"t.{kind.name}": (kind, rng.standard_normal((3, 256) if kind.block > 1 else (2, 3, 5)).astype(np.float32))
        for kind in BLOCK_TYPES.values()
    }
    arrays["t.vector"] = (kind_of("F32"), np.arange(7, dtype=np.float32))
    return {name: NewTensor(array.shape, kind, lambda array=array: array) for name, (kind, array) in arrays.items()}


def plain(value):
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else [plain(x) for x in value] if isinstance(value, list) else value


@pytest.mark.parametrize("version", [2, 3])
def test_what_was_written_is_read(version, rng, tmp_path):
    given = tensors(rng)
    write_gguf(tmp_path / "a.gguf", METADATA, given, version)
    file = GGUFFile(tmp_path / "a.gguf")
    assert file.version == version
    assert {key: plain(value) for key, value in file.metadata.items()} == {key: plain(value) for key, value in METADATA.items()}
    assert file.shapes == {name: tensor.shape for name, tensor in given.items()}
    for name, tensor in given.items():
        expected = dequantize(quantize(tensor.make(), tensor.kind), tensor.kind, tensor.shape)
        np.testing.assert_array_equal(np.asarray(file.read(name), np.float32), expected)
        assert not file.packed(name).flags.writeable


def test_the_gguf_package_reads_what_was_written(rng, tmp_path):
    gguf = pytest.importorskip("gguf")
    given = tensors(rng)
    write_gguf(tmp_path / "a.gguf", METADATA, given)
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    for key, value in METADATA.items():
        if key != "a.nested":
            assert plain(reader.fields[key].contents()) == pytest.approx(plain(value)), key
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(given[tensor.name].shape)
        np.testing.assert_array_equal(values, GGUFFile(tmp_path / "a.gguf").read(tensor.name).astype(np.float32))


def test_what_the_gguf_package_writes_is_read(rng, tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_string("a.text", "\N{SNOWMAN}")
    writer.add_array("a.list", ["a", "b"])
    writer.add_array("a.floats", [1.0, 2.5])
    writer.add_float64("a.double", 0.1)
    writer.add_int8("a.small", -3)
    writer.add_custom_alignment(64)
    array = rng.standard_normal((4, 64)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("one", array)
    writer.add_tensor("half", array.astype(np.float16))
    writer.add_tensor("packed", gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.add_tensor("whole", np.arange(6, dtype=np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "a.gguf")
    assert file.alignment == 64 and plain(file.metadata["a.floats"]) == [1.0, 2.5] and file.metadata["a.double"] == 0.1
    assert (file.metadata["a.text"], file.metadata["a.list"], file.metadata["a.small"]) == ("\N{SNOWMAN}", ["a", "b"], -3)
    np.testing.assert_array_equal(file.read("one"), array)
    np.testing.assert_array_equal(file.read("half"), array.astype(np.float16))
    np.testing.assert_array_equal(file.read("packed"), gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind))
    assert file.read("whole").tolist() == list(range(6))


def header(pairs: bytes = b"", infos: bytes = b"", counts: tuple[int, int] = (0, 0), version: int = 3, data: bytes = b"") -> bytes:
    start = b"GGUF" + struct.pack("<IQQ", version, *counts) + pairs + infos
    return start + b"\0" * (-len(start) % 32) + data


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def info(name: str = "t", sizes: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


DAMAGED = {
    "not-gguf": (b"GGML" + b"\0" * 40, "must begin with GGUF"),
    "empty": (b"", "the file must not be truncated"),
    "version": (header(version=1), "must have version 2 or 3"),
    "big-endian": (header(version=0x03000000), "must have version 2 or 3"),
    "tensor-count": (header(counts=(2**60, 0)), "long enough for its number of tensors"),
    "pair-count": (header(counts=(0, 2**60)), "long enough for its number of metadata pairs"),
    "string-length": (header(struct.pack("<Q", 2**62) + b"\0" * 16, counts=(0, 1)), "long enough for its number of bytes in a string"),
    "bad-utf8": (header(struct.pack("<Q", 1) + b"\xff" + struct.pack("<IB", 7, 1) + b"\0" * 8, counts=(0, 1)), "valid UTF-8"),
    "array-length": (header(text("k") + struct.pack("<IIQ", 9, 12, 2**61), counts=(0, 1)), "long enough for its number of array elements"),
    "nested": (header(text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 6 + b"\0" * 64, counts=(0, 1)), "nested at most 4"),
    "unknown-type": (header(text("k") + struct.pack("<II", 77, 0), counts=(0, 1)), "unknown type of metadata"),
    "bool": (header(text("k") + struct.pack("<IB", 7, 2) + b"\0" * 8, counts=(0, 1)), "a bool must be 0 or 1"),
    "key-twice": (header((text("k") + struct.pack("<II", 4, 0)) * 2, counts=(0, 2)), "must be unique"),
    "alignment": (header(text("general.alignment") + struct.pack("<II", 4, 48), counts=(0, 1)), "must be a power of two"),
    "axes": (header(infos=info(sizes=(1,) * 5), counts=(1, 0)), "at most 4 axes"),
    "negative": (header(infos=info(sizes=(2**63,)), counts=(1, 0)), "must be from 1 to 2"),
    "outside": (header(infos=info(sizes=(64,)), counts=(1, 0), data=b"\0" * 64), "inside the file, with an offset divisible by"),
    "far-outside": (header(infos=info(offset=2**63), counts=(1, 0), data=b"\0" * 64), "inside the file, with an offset divisible by"),
    "unaligned": (header(infos=info(offset=4), counts=(1, 0), data=b"\0" * 64), "inside the file, with an offset divisible by"),
    "overlap": (header(infos=info("a", (16,)) + info("b", (16,), offset=32), counts=(2, 0), data=b"\0" * 128), "must not overlap"),
    "twice": (header(infos=info("a") + info("a", offset=32), counts=(2, 0), data=b"\0" * 128), "names of tensors must be unique"),
    "part-of-a-block": (header(infos=info(sizes=(33,), kind=8), counts=(1, 0), data=b"\0" * 128), "must hold whole blocks of 32"),
    "shifted": (header(infos=info(), counts=(1, 0))[:-1] + b"\1" + b"\0" * 64, "the padding before the tensors must be zeros"),
    "tensor-type": (header(infos=info(kind=99), counts=(1, 0), data=b"\0" * 64), "unknown type of a tensor"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
@pytest.mark.fault("damaged GGUF file", "sizes, types, offsets and texts that do not fit", "`FileError`")
def test_damaged_files_are_refused(case, tmp_path):
    content, expected = DAMAGED[case]
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(FileError, match=rf"\[gguf\] .*{expected}"):
        GGUFFile(tmp_path / "a.gguf")


@pytest.mark.fault("mutated GGUF files", "seeded mutations", "`FileError` or read; never a crash")
def test_mutated_files_are_read_or_refused(rng, tmp_path, tried):
    """Bytes changed at random: a file opens and all its tensors are read, or it is refused; nothing else happens."""
    write_gguf(tmp_path / "a.gguf", METADATA, dict(list(tensors(rng).items())[:4]))
    whole, path = (tmp_path / "a.gguf").read_bytes(), tmp_path / "b.gguf"
    refused = 0
    tried(200)
    for _ in range(200):
        content = bytearray(whole)
        for at in rng.integers(0, min(len(content), 1400), rng.integers(1, 6)):
            content[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, content[at] ^ (1 << int(rng.integers(0, 8)))])
        path.write_bytes(content[: len(content) if rng.random() < 0.8 else int(rng.integers(0, len(content)))])
        try:
            file = GGUFFile(path)
        except FileError as error:
            assert str(error).startswith("[gguf]")
            refused += 1
            continue
        with np.errstate(all="ignore"):
            for name, shape in file.shapes.items():
                assert file.read(name).shape == shape
    assert 50 < refused < 200
