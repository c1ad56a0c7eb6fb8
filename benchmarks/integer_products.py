"""Quantized products and convolutions as floats and as integers, in warm ONNX sessions.

    python benchmarks/integer_products.py [--device auto] [--threads 2] [--repeats 7] [--only TEXT] [--commit ID]
    [--quick] [--out FILE]

The float form and the algorithm of the family ``integer`` take turns, and the best of the repeats counts. There are two forms:
``exact`` (``MatMulInteger``, ``ConvInteger``), where floats add up exact parts, and ``qdq``, one float product between DequantizeLinear and
QuantizeLinear. Every result is checked before it is timed: equal to the exact sums, or within one step of them. A wrong one ends the run.
``LEAST_PRODUCTS`` of netcl/ops/integer takes, per form, the multiply-adds from which integers win.
Writes ``results/integer_products_<device>.json`` after every row.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]
from quantized import seconds  # noqa: E402
from run import facts, hold_to, kind_of  # noqa: E402

#: Rows, terms and columns: layers of BERT-base for 1, 128 and 512 tokens, and a large square.
PRODUCTS = [(m, k, n) for m in (1, 128, 512) for k, n in ((768, 768), (768, 3072), (3072, 768))] + [(2048, 2048, 2048)]
#: Channels, side of the image, filters, side of the kernel, stride, groups: layers of ResNet-50 and MobileNetV2.
CONVS = [
    (3, 224, 64, 7, 2, 1), (64, 56, 64, 1, 1, 1), (64, 56, 64, 3, 1, 1), (64, 56, 256, 1, 1, 1), (256, 56, 128, 1, 1, 1),
    (128, 56, 128, 3, 2, 1), (128, 28, 128, 3, 1, 1), (512, 28, 256, 1, 1, 1), (256, 14, 256, 3, 1, 1), (256, 14, 1024, 1, 1, 1),
    (512, 7, 512, 3, 1, 1), (512, 7, 2048, 1, 1, 1), (96, 56, 96, 3, 1, 96),
]  # fmt: skip
FORMS, ZERO = ("exact", "qdq"), 121
QUICK = [(3, 40, 5)], [(4, 6, 5, 3, 1, 1)]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", default="", help="a part of a case")
    parser.add_argument("--commit", default="", help="of a copy without a repository")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to see that it runs")
    parser.add_argument("--out", default="")
    parser.set_defaults(cases="", sweep=False)  # which facts() reads
    return parser.parse_args()


def model(kind: str, x: np.ndarray, w: np.ndarray, form: str, **attributes: Any) -> bytes:
    """A graph of one product of a uint8 input and int8 weights; the form ``qdq`` has a product of floats between Q/DQ nodes."""
    from onnx import TensorProto, helper, numpy_helper

    weights, result = {"w": w, "zero": np.uint8(ZERO)}, TensorProto.INT32
    nodes = [helper.make_node(f"{kind}Integer", ["x", "w", "zero"], ["y"], **attributes)]
    if form == "qdq":
        weights |= {"sx": np.float32(0.02), "sw": np.float32(0.01), "zw": np.int8(0), "sy": np.float32(step(w)), "zy": np.uint8(ZERO)}
        result = TensorProto.UINT8
        nodes = [
            helper.make_node("DequantizeLinear", names, [made]) for names, made in ((["x", "sx", "zero"], "a"), (["w", "sw", "zw"], "b"))
        ]
        nodes.append(helper.make_node(kind, ["a", "b"], ["h"], **attributes))
        nodes.append(helper.make_node("QuantizeLinear", ["h", "sy", "zy"], ["y"]))
    source = helper.make_tensor_value_info("x", TensorProto.UINT8, x.shape)
    made = helper.make_tensor_value_info("y", result, [None] * x.ndim)
    graph = helper.make_graph(nodes, "case", [source], [made], [numpy_helper.from_array(np.asarray(v), n) for n, v in weights.items()])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10).SerializeToString()


def step(w: np.ndarray) -> float:
    """The scale of the quantized result, near a thirtieth of its deviation."""
    return 0.02 * 0.01 * 74 * 74 * float(np.sqrt(w[0].size if w.ndim == 4 else w.shape[0])) / 30


class Case(NamedTuple):
    """A product to measure, with its exact sums in float64, which holds them."""

    label: str
    form: str
    work: int
    x: np.ndarray
    data: bytes
    sums: np.ndarray
    step: float

    def check(self, made: np.ndarray, way: str) -> None:
        """Raise if a result is wrong."""
        wanted = np.clip(np.rint(self.sums * (0.02 * 0.01 / self.step)) + ZERO, 0, 255) if self.form == "qdq" else self.sums
        error = float(np.abs(made - wanted).max(initial=0))
        if error > (self.form == "qdq"):
            raise SystemExit(f"wrong result: {self.label}, {self.form} by {way}: largest difference {error}")


def cases(quick: bool) -> Iterator[Case]:
    from netcl.ops.conv import arrays
    from netcl.ops.conv.geometry import geometry

    rng = np.random.default_rng(0)
    products, convs = QUICK if quick else (PRODUCTS, CONVS)
    for m, k, n in products:
        x, w = rng.integers(0, 256, (m, k), np.uint8), rng.integers(-128, 128, (k, n), np.int8)
        sums = (x.astype(np.float64) - ZERO) @ w.astype(np.float64)
        for form in FORMS:
            yield Case(f"matmul {m}x{k} to {n}", form, m * k * n, x, model("MatMul", x, w, form), sums, step(w))
    for batch in (1,) if quick else (1, 8):
        for c, side, f, kernel, stride, groups in convs:
            x = rng.integers(0, 256, (batch, c, side, side), np.uint8)
            w = rng.integers(-128, 128, (f, c // groups, kernel, kernel), np.int8)
            g = geometry("conv2d", x.shape, w.shape, stride, kernel // 2, 1, groups)
            sums = arrays.conv_forward(x.astype(np.float64) - ZERO, w.astype(np.float64), None, g=g)
            window: dict[str, Any] = {"pads": [kernel // 2] * 4, "strides": [stride] * 2, "group": groups}
            label = f"conv {kernel}x{kernel}{f'/{stride}' * (stride > 1)}{', depthwise' * (groups > 1)} {batch}x{c}x{side}x{side} to {f}"
            for form in FORMS:
                yield Case(label, form, w.size * batch * g.oh * g.ow, x, model("Conv", x, w, form, **window), sums, step(w))


class Ways:
    """Sessions with the ways to compute a product. Each is recorded while its name is selected, and keeps its launches."""

    def __init__(self, names: list[str]):
        from netcl.core.kernel_selector import get_kernel_selector

        self.selector, self.current = get_kernel_selector(), ""
        for name in names:
            self.selector.register("integer_dot", partial(self._is_current, name), name)

    def _is_current(self, name: str, shapes: Any, profile: Any) -> bool:
        return self.current == name

    def ready(self, case: Case, where: Any, name: str) -> Callable[[], None]:
        """Return a function that runs a session by the way ``name``; its result was right eagerly, recorded and replayed."""
        import netcl.onnx

        self.current = name
        self.selector.clear_cache()
        session = netcl.onnx.InferenceSession(case.data, device=where.handle)
        for _ in range(3):
            case.check(session.run(None, {"x": case.x})[0], name)
        graph: Any = next(iter(session._plans.values()))
        if ("integer_dot" in {node.op for node in graph.nodes}) != (name != "float"):
            raise SystemExit(f"{case.label}, {case.form}: the session does not compute by {name}")
        binding = session.io_binding()
        binding.bind_input("x", netcl.tensor(case.x, device=where.handle))
        binding.bind_output("y")
        return lambda: session.run_with_iobinding(binding)


def main() -> None:
    chosen = options()
    if chosen.threads and kind_of(chosen.device) == "cpu":
        hold_to(chosen.threads)
    from netcl.bench import setting

    where = setting(chosen.device, repeats=chosen.repeats, quick=chosen.quick, with_torch=False)
    wait, names = where.handle.queue.finish, ["float", "tiles"]
    name = re.sub(r"\W+", "_", f"{where.handle.platform_name} {where.handle.device_name}".lower()).strip("_")
    path = Path(chosen.out or Path(__file__).parent / "results" / f"integer_products_{name}.json")
    words = {"device": chosen.device, "threads": chosen.threads, "repeats": chosen.repeats}
    made_by = " ".join(f"--{key} {shlex.quote(str(value))}" for key, value in words.items() if value != "")
    known = {**facts(where, chosen), "made by": f"python benchmarks/integer_products.py {made_by}", "brand": where.handle.profile.brand}
    rows, ways = list[dict[str, Any]](), Ways(names)
    for case in cases(chosen.quick):
        if chosen.only not in f"{case.label}, {case.form}":
            continue
        best, runs = dict.fromkeys(names, float("inf")), {each: ways.ready(case, where, each) for each in names}
        for _ in range(chosen.repeats):
            for each in names:
                best[each] = min(best[each], seconds(runs[each], wait, 0.001 if chosen.quick else 0.05))
        times = {f"{each}_us": round(taken * 1e6, 1) for each, taken in best.items()}
        gains = {f"{each}_speedup": round(best["float"] / best[each], 3) for each in names[1:]}
        rows.append({"case": case.label, "form": case.form, "multiply_adds": case.work, **times, **gains})
        print(json.dumps(rows[-1]), flush=True)
        path.write_text(json.dumps({"facts": known, "products": rows}, indent=1) + "\n", encoding="utf-8")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
