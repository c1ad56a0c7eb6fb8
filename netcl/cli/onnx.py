"""``netcl onnx``: what an ONNX file holds, whether it runs here as onnxruntime runs it, its outputs, its times."""

from __future__ import annotations

import argparse
import importlib.util
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from netcl.cli.command import DEVICE, CommandError, command, facts, number, option, pick_device, reported, say, table, whole
from netcl.core.errors import message


@command(
    "onnx",
    option("action", choices=("info", "check", "run", "bench"), help="check compares with onnxruntime, bench times"),
    option("file", help="an ONNX file"),
    option("--inputs", help="an .npz file with an array for each input; random numbers without one"),
    option("--seed", type=whole(0), default=0, help="of random inputs; default: 0"),
    option("--size", action="append", default=[], metavar="NAME=N", help="size of a symbolic dimension of random inputs; default: 1"),
    option("--out", default="outputs.npz", help="where run writes the outputs; default: outputs.npz"),
    option("--tolerance", type=number(0), default=1e-3, help="the largest relative difference that check accepts; default: 0.001"),
    option("--runs", type=whole(1), default=20, help="runs that bench takes the median of; default: 20"),
    DEVICE,
)
@reported()
def onnx(args: argparse.Namespace) -> int:
    """Inspect, check, run or time an ONNX file."""
    return _ACTIONS[args.action](args)


def _info(args: argparse.Namespace) -> int:
    from netcl.io import FileError
    from netcl.io.onnx.bodies import op_kind
    from netcl.io.onnx.importer import parse_onnx, read_onnx
    from netcl.onnx.session import node_arg

    model, _ = parse_onnx(args.file)
    nodes, held, (flops, assumed) = list(_all_nodes(model.graph)), model.graph.initializer, _flops(model)
    weights = {entry.name: math.prod(entry.dims) for entry in held}
    ends = [("input", entry) for entry in model.graph.input if entry.name not in weights] + [("output", x) for x in model.graph.output]
    rows = {
        "producer": f"{model.producer_name} {model.producer_version}".strip() or "unknown",
        "opsets": ", ".join(f"{entry.domain or 'ai.onnx'} {entry.version}" for entry in model.opset_import),
        **{f"{side} {x.name}": f"{node_arg(x).type} {_shape_text(node_arg(x).shape)}" for side, x in ends},
        "parameters": f"{sum(weights.values()):,}",
        "FLOPs": f"{flops:,} in products and convolutions{' (unknown sizes counted as 1)' if assumed else ''}",
        "nodes": len(nodes),
    }
    say(facts(rows) + "\n")
    say(table(("operator", "nodes"), [[kind, str(n)] for kind, n in Counter(map(op_kind, nodes)).most_common()]))
    try:
        read_onnx(args.file)
    except FileError as fault:
        say(f"\nIt cannot be run: {fault}")
        return 1
    return 0


def _check(args: argparse.Namespace) -> int:
    session, feed = _session(args)
    say(f"{args.file}: a valid model; {len(session.model.nodes)} nodes run here, all operators are known")
    if not importlib.util.find_spec("onnxruntime"):
        session.run(None, feed)
        say("it runs; onnxruntime is not installed, so its outputs are not compared (pip install onnxruntime)")
        return 0
    outputs, worst = _reference(args.file).run(None, feed), 0.0
    for entry, mine, wanted in zip(session.get_outputs(), session.run(None, feed), outputs, strict=True):
        pairs = zip(mine, wanted, strict=True) if isinstance(mine, list) else [(mine, wanted)]
        difference = max((_difference(np.asarray(a), np.asarray(b)) for a, b in pairs), default=0.0)
        say(f"output {entry.name}: relative difference from onnxruntime {difference:.2e}")
        worst = max(worst, difference)
    say("equal" if worst <= args.tolerance else f"different: the largest difference is above {args.tolerance:g}")
    return 0 if worst <= args.tolerance else 1


def _run(args: argparse.Namespace) -> int:
    session, feed = _session(args)
    made = {entry.name: x for entry, x in zip(session.get_outputs(), session.run(None, feed), strict=True)}
    np.savez(args.out, **{name: x for name, x in made.items() if isinstance(x, np.ndarray)})
    for name, x in made.items():
        say(f"{name}: {x.dtype} {_shape_text(x.shape)}" if isinstance(x, np.ndarray) else f"{name}: not an array, not written")
    say(f"written to {args.out}")
    return 0


def _bench(args: argparse.Namespace) -> int:
    session, feed = _session(args)
    mine = _median_ms(lambda: session.run(None, feed), args.runs)
    rows = [["netcl", f"{mine:.3f}", ", ".join(session.plans.values()) or "eager"]]
    if importlib.util.find_spec("onnxruntime"):
        other = _reference(args.file)
        rows.append(["onnxruntime", f"{_median_ms(lambda: other.run(None, feed), args.runs):.3f}", "on the CPU"])
    say(table(("", "ms per run", ""), rows) + "\n")
    times = sorted(session.node_times(feed), key=lambda entry: -entry[1])
    rows = [[node.outputs[0], node.kind, f"{t * 1e3:.3f}"] for node, t in times[:20]]
    say("The slowest nodes of an eager run, each alone:")
    say(table(("node", "operator", "ms"), rows))
    return 0


_ACTIONS: Mapping[str, Callable[[argparse.Namespace], int]] = {"info": _info, "check": _check, "run": _run, "bench": _bench}


def _session(args: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """The session of a file, and inputs for it."""
    from netcl.onnx import InferenceSession

    session = InferenceSession(args.file, device=pick_device(args.device))
    if args.inputs:
        with np.load(args.inputs, allow_pickle=False) as held:
            return session, {name: held[name] for name in held.files}
    pairs = [text.partition("=") for text in args.size]
    if wrong := [name for name, _, size in pairs if not size.isdecimal()]:
        raise CommandError(message("onnx", "--size takes NAME=N", given=", ".join(wrong)))
    sizes, generator = {name: int(size) for name, _, size in pairs}, np.random.default_rng(args.seed)
    return session, {entry.name: _random_input(entry, sizes, generator) for entry in session.get_inputs()}


def _random_input(entry: Any, sizes: Mapping[str, int], generator: np.random.Generator) -> Any:
    if entry.dtype is None:
        raise CommandError(message("onnx", f"input {entry.name!r} is not a tensor", type=entry.type))
    shape = [size if isinstance(size, int) else sizes.get(size, 1) for size in entry.shape]
    if entry.dtype.kind in "biu":
        return generator.integers(0, 2, shape).astype(entry.dtype)  # valid as an index, a mask or a count
    return generator.standard_normal(shape).astype(entry.dtype)


def _reference(file: str) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def _difference(mine: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference, in units of the largest number; infinite if shapes, dtypes or the places of NaN and infinity differ."""
    if mine.shape != wanted.shape or mine.dtype != wanted.dtype:
        return math.inf
    a, b = (x.astype(np.float64) for x in (mine, wanted))
    finite = np.isfinite(b)
    same = np.array_equal(a[~finite], b[~finite], equal_nan=True) and np.isfinite(a[finite]).all()
    return float(np.abs(a - b)[finite].max(initial=0.0) / max(np.abs(b[finite]).max(initial=0.0), 1e-12)) if same else math.inf


def _median_ms(call: Callable[[], object], runs: int) -> float:
    times = []
    for _ in range(runs + 3):  # the first runs build and record
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return float(np.median(times[3:])) * 1e3


def _all_nodes(graph: Any) -> Iterator[Any]:
    for node in graph.node:
        yield node
        for entry in node.attribute:
            yield from _all_nodes(entry.g) if entry.HasField("g") else ()


def _shape_text(shape: Any) -> str:
    return f"({', '.join('?' if size is None else str(size) for size in shape)})"


def _flops(model: Any) -> tuple[int, bool]:
    """Multiplications and additions of products and convolutions, and whether sizes are missing."""
    import onnx

    inferred = onnx.shape_inference.infer_shapes(model).graph
    known = (*inferred.value_info, *inferred.input, *inferred.output)
    dims = {x.name: [dim.dim_value for dim in x.type.tensor_type.shape.dim] for x in known}
    dims |= {x.name: list(x.dims) for x in inferred.initializer}
    total, assumed = 0, False
    for node in inferred.node:
        if node.op_type in ("Conv", "MatMul", "Gemm"):
            out, left, weight = (dims.get(name, []) for name in (node.output[0], *node.input[:2]))
            turned = node.op_type == "Gemm" and any(entry.name == "transA" and entry.i for entry in node.attribute)
            inner = weight[1:] if node.op_type == "Conv" else left[:1] if turned else left[-1:]
            assumed |= not out or not inner or 0 in (*out, *inner)
            total += 2 * math.prod(max(size, 1) for size in (*out, *inner))
    return total, assumed
