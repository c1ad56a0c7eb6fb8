"""Mutates files, recipes and expressions and gives them to everything that reads such: ``make fuzz``.

    python tools/fuzz.py [--seconds 60] [--seed 0] [targets ...]

Each must be read or refused with one of netcl's own errors, in bounded time and memory. Anything else is a finding: its input is kept in
``build/fuzz`` and the status is 1. A seed repeats a run.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import random
import resource
import shutil
import struct
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from netcl import io as files  # noqa: E402
from netcl import nn, optim  # noqa: E402
from netcl.core.device import device  # noqa: E402
from netcl.core.errors import KernelBuildError  # noqa: E402
from netcl.core.kernels.primitives import PrimitiveBuilder  # noqa: E402
from netcl.data import tables  # noqa: E402
from netcl.data.formats import FormatError, read_idx  # noqa: E402
from netcl.onnx import InferenceSession  # noqa: E402
from netcl.trainer.recipe import Recipe, RecipeError, read_recipe  # noqa: E402

OWN = (files.FileError, FormatError, RecipeError, KernelBuildError, ValueError, TypeError, MemoryError)
MOST_SECONDS, MOST_BYTES = 20.0, 4 << 30
TOKENS = [b"\x00", b"\xff" * 8, b"(", b"[" * 500, b"{", b'"', b"'", b"../", b"-1", b"1e999", b"NaN", b"9" * 99, b"\n", b"\\", b"#", b"null",
          b"os.system", b"v0", b"*/", b"//", b"??/", b";", b"}", b"__kernel", b"\xe2\x80\xa8", b"%s", b"c__builtin__\neval\n"]  # fmt: skip


def mutated(data: bytes, chance: random.Random) -> bytes:
    """One to six changes: bits, cuts, repeats, moves, tokens."""
    out = bytearray(data)
    for _ in range(chance.randint(1, 6)):
        at, end = sorted(chance.randrange(len(out) + 1) for _ in range(2))
        kind = chance.randrange(6)
        if kind == 0 and out:
            out[chance.randrange(len(out))] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del out[at : min(end, at + 64)]
        elif kind == 2:
            out[at:at] = out[at : min(end, at + 64)] * chance.randint(1, 4)
        elif kind == 3:
            out[at:at] = chance.choice(TOKENS)
        elif kind == 4 and len(out) >= 8:
            place = chance.randrange(len(out) - 7)
            out[place : place + 8] = struct.pack("<q", chance.choice((-1, 0, 1 << 31, 1 << 40, (1 << 63) - 1)))
        elif chance.random() < 0.2:
            del out[at:]
    return bytes(out)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def seeds(folder: Path) -> dict[str, tuple[bytes, str, Callable[[Path], Any]]]:
    """By target: a sound input, the suffix of its file, and what reads it."""
    values = {"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.ones(3, np.int64)}
    model = net()
    optimizer = optim.Adam(model.parameters())
    made: dict[str, tuple[Callable[[Path], Any], str, Callable[[Path], Any]]] = {
        "model": (lambda p: files.save_model(model, p), ".netcl", files.load_model),
        "checkpoint": (
            lambda p: files.save_checkpoint(p, model=model, optimizer=optimizer, step=3), ".netcl",
            lambda p: files.load_checkpoint(p, model=net(), optimizer=optim.Adam(net().parameters())),
        ),
        "npz": (lambda p: files.save_params(values, p), ".npz", files.load_params),
        "torch": (lambda p: files.save_torch(values, p), ".pt", files.load_torch),
        "numpy": (lambda p: np.savez(p, **values), ".npz", lambda p: tables.read_numpy_arrays(p, "fuzz")),
        "csv": (lambda p: p.write_text("x,y,label\n1,2,a\n3,4,b\n5,6,a\n"), ".csv", lambda p: tables.from_csv(p, target="label")),
        "idx": (lambda p: p.write_bytes(struct.pack(">4B2I", 0, 0, 8, 2, 3, 4) + bytes(12)), "-idx2-ubyte", read_idx),
        "gzip": (lambda p: p.write_bytes(gzip.compress(struct.pack(">4BI", 0, 0, 8, 1, 6) + bytes(6))), ".gz", read_idx),
        "toml": (lambda p: p.write_text('epochs = 3\nlr = 0.1\n[data]\nname = "digits"\n[model]\nname = "mlp"\n'), ".toml", recipe),
        "json": (lambda p: p.write_text('{"epochs": 3, "data": {"name": "digits"}, "model_options": {"hidden": [8]}}'), ".json", recipe),
        "expression": (lambda p: p.write_text("fmax(v0, 0.5f * v1) + exp(-v0) * (v1 > 1.0f ? v0 : -v1)"), ".txt", expression),
        "kernels": (lambda p: p.write_text("__kernel void k(__global float* x, int n) { if (n) x[0] = 1; }"), ".cl", kernel_file),
        "onnx": (lambda p: files.export_onnx(model, p, np.ones((2, 4), np.float32)), ".onnx", onnx_file),
        "onnx graph": (lambda p: p.write_bytes(onnx_graph()), ".onnx", onnx_file),
    }  # fmt: skip
    found = {}
    for name, (write, suffix, read) in made.items():
        path = folder / f"sound{suffix}"
        write(path)
        found[name] = path.read_bytes(), suffix, read
        read(path)
        path.unlink()
    return found


def recipe(path: Path) -> None:
    settings = read_recipe(path)
    Recipe().changed(settings)


def expression(path: Path) -> None:
    """What is accepted is one expression: no statement, comment, string or directive."""
    text = path.read_text(encoding="utf-8")
    source = PrimitiveBuilder().elementwise_spec("mine", 2, text).to_source()
    assert not set(text) & set(";{}\"'#\\@`$"), source


def kernel_file(path: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        from netcl.cli.check import _made_up

        text = path.read_text(encoding="utf-8")
        _made_up(text, "k", 4)


def onnx_graph() -> bytes:
    """A model with weights of three kinds, shapes that nodes compute, a branch, a loop, a quantized weight and a function."""
    f32, i64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
    node, value, array = onnx.helper.make_node, onnx.helper.make_tensor_value_info, onnx.numpy_helper.from_array
    body = onnx.helper.make_graph(
        [node("Add", ["state", "state"], ["next"]), node("Identity", ["going"], ["more"])], "body",
        [value("step", i64, []), value("going", onnx.TensorProto.BOOL, []), value("state", f32, None)],
        [value("more", onnx.TensorProto.BOOL, []), value("next", f32, None)],
    )  # fmt: skip
    branches = [onnx.helper.make_graph([node(kind, ["normal"], ["out"])], kind, [], [value("out", f32, None)]) for kind in ("Relu", "Tanh")]
    nodes = [
        node("Conv", ["x", "w"], ["conv"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        node("BatchNormalization", ["conv", "one", "one", "one", "one"], ["normal"]),
        node("Constant", [], ["yes"], value=array(np.array(True))),
        node("If", ["yes"], ["branch"], then_branch=branches[0], else_branch=branches[1]),
        node("MaxPool", ["branch"], ["pool"], kernel_shape=[2, 2], strides=[2, 2]),
        node("Loop", ["count", "yes", "pool"], ["looped"], body=body),
        node("ConstantOfShape", ["sizes"], ["zeros"], value=array(np.zeros(1, np.float32))),
        node("Range", ["zero", "count", "count"], ["range"]),
        node("Expand", ["zeros", "sizes"], ["wide"]),
        node("Tile", ["wide", "sizes"], ["tiled"]),
        node("Pad", ["tiled", "pads"], ["padded"]),
        node("Twice", ["looped"], ["twice"], domain="mine"),
        node("Reshape", ["twice", "flat"], ["rows"]),
        node("DequantizeLinear", ["codes", "scale"], ["weight"]),
        node("Gemm", ["rows", "weight", "bias"], ["y"], transB=1),
    ]
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.standard_normal((2, 1, 3, 3)).astype("f4"), "one": np.ones(2, "f4"), "bias": np.zeros(3, "f4"),
        "scale": np.array(0.1, "f4"), "codes": rng.integers(-9, 9, (3, 8)).astype("i1"), "sizes": np.array([2, 3]),
        "pads": np.array([1, 0, 0, 1]), "zero": np.array(0), "count": np.array(2), "flat": np.array([0, -1]),
    }  # fmt: skip
    opsets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("mine", 1)]
    twice = onnx.helper.make_function("mine", "Twice", ["a"], ["b"], [node("Add", ["a", "a"], ["b"])], opsets[:1])
    tensors = [array(x, name) for name, x in weights.items()]
    outputs = [value("y", f32, ["n", 3]), value("padded", f32, ["a", "b"]), value("range", i64, ["c"])]
    graph = onnx.helper.make_graph(nodes, "all", [value("x", f32, [1, 1, 4, 4])], outputs, tensors)
    return onnx.helper.make_model(graph, opset_imports=opsets, functions=[twice], ir_version=9).SerializeToString()


def mutated_graph(data: bytes, chance: random.Random) -> bytes:
    """One to four changes of fields that leave a file that can be parsed: numbers, names, nodes, bodies in bodies."""
    model = onnx.ModelProto.FromString(data)
    graph = model.graph
    names = [name for node in graph.node for name in node.output]
    for _ in range(chance.randint(1, 4)):
        node, tensor, kind = chance.choice(graph.node), chance.choice(graph.initializer), chance.randrange(9)
        number = chance.choice((-1, 0, 1, 7, 1 << 20, 1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63)))
        numbers = [entry for entry in node.attribute if entry.ints or entry.type == entry.INT]
        if kind == 0 and numbers:
            entry = chance.choice(numbers)
            entry.i, entry.ints[:] = number, [number for _ in entry.ints]
        elif kind == 1 and tensor.dims:
            tensor.dims[chance.randrange(len(tensor.dims))] = number
        elif kind == 2 and tensor.data_type == onnx.TensorProto.INT64:
            tensor.raw_data = struct.pack("<q", number) * (len(tensor.raw_data) // 8)
        elif kind == 3 and node.input:
            node.input[chance.randrange(len(node.input))] = chance.choice([*names, "", "x", "nothing"])
        elif kind == 4:
            node.op_type = chance.choice([*(n.op_type for n in graph.node), "Attention", "Scan", "LSTM", "Resize", "Split", "Einsum"])
        elif kind == 5:
            tensor.data_type = chance.randrange(24)
        elif kind == 6:
            del graph.node[chance.randrange(len(graph.node))]
            graph.node.append(node)
        elif kind == 7:
            del node.attribute[:]
        elif held := [entry for entry in node.attribute if entry.type == entry.GRAPH]:
            for _ in range(chance.choice((1, 50))):  # bodies inside each other
                inner = chance.choice(held).g
                outer = onnx.NodeProto.FromString(node.SerializeToString())
                if outer.ByteSize() > 1 << 16:
                    break
                inner.node.append(outer)
        if not graph.node:
            break
    return model.SerializeToString()


#: Other ways to change an input than bytes.
MUTATIONS = {"onnx graph": mutated_graph}


def onnx_file(path: Path) -> None:
    """A module and a session, which computes constants; errors are netcl's own."""
    try:
        files.import_onnx(path)
        InferenceSession(path, device="cpu")
    except OWN as error:
        assert str(error).startswith("["), f"{type(error).__name__}: {error}"
        raise


def fuzz(name: str, sound: bytes, suffix: str, read: Callable[[Path], Any], seconds: float, seed: int, counts: Counter[str]) -> list[str]:
    chance, faults, until = random.Random(f"{name} {seed}"), [], time.monotonic() + seconds
    folder = Path(tempfile.mkdtemp(prefix="netcl-fuzz-"))
    while time.monotonic() < until and len(faults) < 5:
        path = folder / f"input{suffix}"
        path.write_bytes(MUTATIONS.get(name, mutated)(sound, chance))
        began, outcome = time.monotonic(), "read"
        try:
            read(path)
        except OWN:
            outcome = "refused"
        except BaseException as error:  # whatever it is, it is a finding
            if isinstance(error, KeyboardInterrupt):
                raise
            faults.append(_kept(path, name, seed, len(faults), f"{type(error).__name__}: {error}"))
        if time.monotonic() - began > MOST_SECONDS:
            faults.append(_kept(path, name, seed, len(faults), f"took {time.monotonic() - began:.0f} s"))
        counts[f"{name} {outcome}"] += 1
    shutil.rmtree(folder)
    return faults


def _kept(path: Path, name: str, seed: int, number: int, what: str) -> str:
    kept = ROOT / "build" / "fuzz" / f"{name.replace(' ', '_')}-{seed}-{number}{path.suffix}"
    kept.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, kept)
    return f"{name}: {what[:300]}; input={kept.relative_to(ROOT)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("targets", nargs="*", help="all of them if none is given")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all targets together")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    faults = []
    with device("cpu"), tempfile.TemporaryDirectory() as folder:
        found = seeds(Path(folder))
        names = given.targets or list(found)
        for name in names:
            faults += fuzz(name, *found[name], given.seconds / len(names), given.seed, counts)
    for line in sorted(counts):
        sys.stdout.write(f"{line}: {counts[line]}\n")
    sys.stdout.write(
        "".join(f"{fault}\n" for fault in faults) + f"{sum(counts.values())} inputs, {len(faults)} findings; seed={given.seed}\n"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
