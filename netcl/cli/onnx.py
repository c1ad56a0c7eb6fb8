"""``netcl onnx``: inspects an ONNX file, compares its results with onnxruntime's, runs it, or times it."""

from __future__ import annotations

import argparse
import importlib.util
import math
import timeit
import zipfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from netcl.cli.command import DEVICE, CommandError, command, facts, number, option, pick_device, reported, say, table, whole
from netcl.core.errors import message


@command(
    "onnx",
    option("action", choices=("info", "check", "run", "bench"), help="check compares with onnxruntime, run writes outputs, bench measures"),
    option("file", help="an ONNX file"),
    option("--inputs", help="an .npz file with an array for each input; default: random numbers"),
    option("--seed", type=whole(0), default=0, help="seed of random inputs; default: 0"),
    option("--size", action="append", default=[], metavar="NAME=N", help="size of a symbolic dimension of random inputs; default: 1"),
    option("--out", default="outputs.npz", help="where run writes the outputs; default: outputs.npz"),
    option("--tolerance", type=number(0), default=1e-3, help="the largest relative difference that check accepts; default: 0.001"),
    option("--runs", type=whole(1), default=20, help="runs that bench takes the median of; default: 20"),
    DEVICE,
)
@reported()
def onnx(args: argparse.Namespace) -> int:
    """Inspect, check, run or time an ONNX file."""
    return {"info": _info, "check": _compare, "run": _run, "bench": _bench}[args.action](args)


def _info(args: argparse.Namespace) -> int:
    from netcl.io import FileError
    from netcl.io.onnx.bodies import op_kind
    from netcl.io.onnx.importer import parse_onnx, read_onnx
    from netcl.onnx.session import node_arg

    model, _ = parse_onnx(args.file)
    nodes, weights = list(_all_nodes(model.graph)), {entry.name: math.prod(entry.dims) for entry in model.graph.initializer}
    weights |= {node.output[0]: math.prod(entry.t.dims) for node in nodes if node.op_type == "Constant" for entry in node.attribute}
    known = {dim.dim_param for entry in model.graph.input for dim in entry.type.tensor_type.shape.dim if dim.dim_param}
    work, counts = _operator_work(model, _given_sizes(args, known)), Counter(map(op_kind, nodes))
    ends = [("input", x) for x in model.graph.input if x.name not in weights] + [("output", x) for x in model.graph.output]
    rows = {
        "opsets": ", ".join(f"{entry.domain or 'ai.onnx'} {entry.version}" for entry in model.opset_import),
        **{f"{side} {x.name}": " ".join(map(str, node_arg(x)[1:3])) for side, x in ends},
        "parameters": f"{sum(weights.values()):,}",
        "nodes": len(nodes),
    }
    say(facts(rows) + "\n")
    order = sorted(counts, key=lambda kind: (-(work.get(kind) or 0), -counts[kind]))
    shown = {kind: "?" if count is None else f"{count:,}" if count else "" for kind, count in work.items()}
    say(table(("operator", "nodes", "FLOPs"), [[kind, str(counts[kind]), shown.get(kind, "")] for kind in order]))
    total = sum(filter(None, work.values()))
    say(f"\n{total:,} FLOPs in a run with {', '.join(args.size) or 'symbolic sizes of 1'}; ?: some shapes depend on values")
    try:
        read_onnx(args.file)
    except FileError as fault:
        say(f"\nIt cannot be run: {fault}")
        return 1
    return 0


def _compare(args: argparse.Namespace) -> int:
    session, feed = _session(args)
    outputs = session.run(None, feed)
    say(f"{args.file}: a valid model; all operators are known, and it runs")
    if not importlib.util.find_spec("onnxruntime"):
        say("onnxruntime is not installed: outputs are not compared (pip install onnxruntime)")
        return 0
    found = [_difference(x, wanted) for x, wanted in zip(outputs, _onnxruntime(args.file).run(None, feed), strict=True)]
    for entry, difference in zip(session.get_outputs(), found, strict=True):
        say(f"output {entry.name}: relative difference from onnxruntime {difference:.2e}")
    equal = all(difference <= args.tolerance for difference in found)
    say("equal" if equal else f"different: the largest difference is above {args.tolerance:g}")
    return 0 if equal else 1


def _run(args: argparse.Namespace) -> int:
    from netcl.io.archive import replacing

    session, feed = _session(args)
    made = {entry.name: x for entry, x in zip(session.get_outputs(), session.run(None, feed), strict=True)}
    if lists := [name for name, x in made.items() if not isinstance(x, np.ndarray)]:
        raise CommandError(message("onnx", "outputs must be tensors to be written to a file", outputs=lists))
    made = {name: x.astype(np.float32) if x.dtype.kind == "V" else x for name, x in made.items()}  # NumPy's files have no bfloat16
    with replacing(args.out) as file, zipfile.ZipFile(file, "w") as archive:  # not np.savez, which takes no output called "file"
        for name, x in made.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, x, allow_pickle=False)
    say("\n".join(f"{name}: {x.dtype} {list(x.shape)}" for name, x in made.items()))
    say(f"written to {args.out}")
    return 0


def _bench(args: argparse.Namespace) -> int:
    session, feed = _session(args)
    rivals = {"netcl": session} | ({"onnxruntime": _onnxruntime(args.file)} if importlib.util.find_spec("onnxruntime") else {})
    times = {name: timeit.repeat(partial(one.run, None, feed), number=1, repeat=args.runs + 3) for name, one in rivals.items()}
    say(table(("", "ms per run"), [[name, f"{np.median(each[3:]) * 1e3:.3f}"] for name, each in times.items()]))
    say(f"netcl's runs: {', '.join(session.plans.values()) or 'eager'}\n\nNodes of an eager run, each alone, the slowest first:")
    nodes = sorted(session.node_times(feed), key=lambda entry: -entry[1])
    say(table(("node", "operator", "ms"), [[node.outputs[0], node.kind, f"{seconds * 1e3:.3f}"] for node, seconds in nodes]))
    return 0


def _session(args: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """Return the session of a file and its inputs, which are random unless ``--inputs`` names a file."""
    from netcl.onnx import InferenceSession

    session = InferenceSession(args.file, device=pick_device(args.device))
    if args.inputs:
        if args.size:
            raise CommandError(message("onnx", "--size must not be given with --inputs", size=args.size, inputs=args.inputs))
        with np.load(args.inputs, allow_pickle=False) as held:
            return session, {name: held[name] for name in held.files}
    known = {size for entry in session.get_inputs() for size in entry.shape if isinstance(size, str)}
    sizes, generator, feed = _given_sizes(args, known), np.random.default_rng(args.seed), {}
    for entry in session.get_inputs():
        if entry.dtype is None:
            raise CommandError(message("onnx", f"input {entry.name!r} must be a tensor, or be given by --inputs", type=entry.type))
        shape = [size if isinstance(size, int) else sizes.get(str(size), 1) for size in entry.shape]
        whole_numbers = entry.dtype.kind in "biu"  # 0 and 1 are valid as an index, a mask or a count
        feed[entry.name] = (generator.integers(0, 2, shape) if whole_numbers else generator.standard_normal(shape)).astype(entry.dtype)
    return session, feed


def _given_sizes(args: argparse.Namespace, known: set[str]) -> dict[str, int]:
    pairs = [text.partition("=") for text in args.size]
    if wrong := ["".join(pair) for pair in pairs if not pair[2].isdecimal()]:
        raise CommandError(message("onnx", "--size must be NAME=N with a whole number N", given=", ".join(wrong)))
    if unknown := [name for name, _, _ in pairs if name not in known]:
        raise CommandError(message("onnx", "--size must name a symbolic dimension of an input", names=unknown, known=sorted(known)))
    return {name: int(size) for name, _, size in pairs}


def _onnxruntime(file: str) -> Any:
    return importlib.import_module("onnxruntime").InferenceSession(file, providers=["CPUExecutionProvider"])


def _difference(mine: Any, wanted: Any) -> float:
    """Return the largest difference relative to the largest value; infinite if shapes, dtypes or positions of NaN and infinity differ."""
    if isinstance(mine, list):
        return max((_difference(*pair) for pair in zip(mine, wanted, strict=True)), default=0.0)
    a, b, finite = np.asarray(mine, np.float64), np.asarray(wanted, np.float64), np.isfinite(wanted)
    if mine.shape != wanted.shape or mine.dtype != wanted.dtype or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return math.inf
    return float(np.abs(a[finite] - b[finite]).max(initial=0.0) / max(np.abs(b[finite]).max(initial=0.0), 1e-12))


def _all_nodes(graph: Any) -> Iterator[Any]:
    for node in graph.node:
        yield node
        for entry in node.attribute:
            yield from _all_nodes(entry.g) if entry.HasField("g") else ()


#: Operators that move or describe values and compute none.
_NO_ARITHMETIC = set(
    "Cast Concat Constant ConstantOfShape DepthToSpace Expand Flatten Gather GatherElements GatherND Identity If Loop Pad Range Reshape"
    " Scan ScatterElements ScatterND Shape Slice SpaceToDepth Split Squeeze Tile Transpose Unsqueeze".split()
)


def _operator_work(model: Any, sizes: dict[str, int]) -> dict[str, int | None]:
    """Count operations per operator type, two per multiply-add; ``None`` for unknown shapes. Symbolic dimensions have ``sizes``, or 1."""
    from netcl.io.onnx.bodies import op_kind
    from netcl.io.onnx.library import library

    inference = library().shape_inference
    model = type(model).FromString(model.SerializeToString())
    for entry in model.graph.input:
        for dim in entry.type.tensor_type.shape.dim:
            dim.dim_value = dim.dim_value if dim.dim_value > 0 else sizes.get(dim.dim_param, 1)
    shapes: dict[str, list[int]] = {entry.name: list(entry.dims) for entry in model.graph.initializer}
    try:
        graph = inference.infer_shapes(model, data_prop=True).graph
    except inference.InferenceError:
        graph = model.graph
    for entry in (*graph.input, *graph.value_info, *graph.output):
        dims = entry.type.tensor_type.shape.dim
        if entry.type.tensor_type.HasField("shape") and all(dim.HasField("dim_value") for dim in dims):
            shapes.setdefault(entry.name, [dim.dim_value for dim in dims])
    found: dict[str, int | None] = {}
    for node in _all_nodes(graph):
        kind, each = op_kind(node), _node_work(node, shapes)
        found[kind] = None if each is None or found.get(kind, 0) is None else (found.get(kind) or 0) + each
    return found


def _node_work(node: Any, shapes: dict[str, list[int]]) -> int | None:
    if node.op_type in _NO_ARITHMETIC:
        return 0
    given, out = [shapes.get(name) for name in node.input if name], shapes.get(node.output[0])
    options = {entry.name: entry for entry in node.attribute}
    if out is None or not given or None in given[:2]:
        return None
    first, second, results = given[0] or [], (given[1:] or [[]])[0] or [], math.prod(out)
    if node.op_type in ("Conv", "ConvInteger"):
        return 2 * results * math.prod(second[1:])
    if node.op_type == "ConvTranspose":
        return 2 * math.prod(first) * math.prod(second[1:])
    if node.op_type in ("MatMul", "MatMulInteger", "Gemm"):
        return 2 * results * first[-2 if "transA" in options and options["transA"].i else -1]
    if node.op_type in ("RNN", "LSTM", "GRU"):  # steps, batch, all gates and directions
        return 2 * first[0] * first[1] * math.prod(second[:2]) * (first[2] + out[-1])
    if "kernel_shape" in options:
        return results * math.prod(options["kernel_shape"].ints)
    return max(results, math.prod(first))  # a reduction reads more than it writes
