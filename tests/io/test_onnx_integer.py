"""Products of quantized values are exact, as products of integers and as floats, and agree with onnxruntime."""

from __future__ import annotations

import numpy as np
import pytest

from netcl.core.kernel_selector import get_kernel_selector

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

import netcl.onnx as nonnx  # noqa: E402

make = helper.make_node
CODES = {"int8": TensorProto.INT8, "uint8": TensorProto.UINT8, "float32": TensorProto.FLOAT, "int32": TensorProto.INT32}


@pytest.fixture(params=["float", "integer"])
def integers(request, monkeypatch) -> bool:
    """Whether products run as integers."""
    if request.param == "integer":
        monkeypatch.setitem(get_kernel_selector()._registered, "integer_dot", [(lambda shapes, profile: True, "dot")])
    return request.param == "integer"


def draw(rng, dtype, *shape) -> np.ndarray:
    limits = np.iinfo(dtype)
    return rng.integers(limits.min, limits.max + 1, shape, dtype)


def model(nodes, feed, output, weights) -> bytes:
    rank = next(iter(feed.values())).ndim
    infos = [helper.make_tensor_value_info(name, CODES[x.dtype.name], [None] * x.ndim) for name, x in feed.items()]
    held = [numpy_helper.from_array(np.asarray(x), name) for name, x in weights.items()]
    graph = helper.make_graph(nodes, "test", infos, [helper.make_tensor_value_info("y", CODES[output], [None] * rank)], held)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(made)
    return made.SerializeToString()


def runs(data, feed, device, integers) -> list[np.ndarray]:
    """The results of an eager, a recorded and a replayed run."""
    session = nonnx.InferenceSession(data, device=device)
    made = [session.run(None, feed)[0] for _ in range(3)]
    for graph in session._plans.values():
        assert ("integer_dot" in {node.op for node in graph.nodes}) == integers
    return made


@pytest.mark.parametrize("zeros", ["none", "numbers", "vectors"])
@pytest.mark.parametrize(("kinds", "lead"), [(("uint8", "int8"), (2,)), (("int8", "uint8"), ())])
def test_matmul_integer_is_exact(kinds, lead, zeros, device, integers, rng):
    a, b = draw(rng, kinds[0], *lead, 5, 603), draw(rng, kinds[1], 603, 6)
    sides = {"none": None, "numbers": ((), ()), "vectors": ((5,), (6,))}[zeros]
    points = {} if sides is None else {name: draw(rng, kind, *side) for name, kind, side in zip("pq", kinds, sides, strict=True)}
    data = model([make("MatMulInteger", ["a", "b", *points], ["y"])], {"a": a}, "int32", {"b": b, **points})
    p, q = (points.get(name, np.zeros((), np.int64)).astype(np.int64) for name in "pq")
    wanted = (a.astype(np.int64) - (p[:, None] if p.ndim else p)) @ (b.astype(np.int64) - q)
    for y in runs(data, {"a": a}, device, integers):
        assert y.dtype == np.int32 and np.array_equal(y, wanted)


def q_weights(rng, columns: int) -> dict[str, np.ndarray]:
    scales = rng.uniform(0.002, 0.004, columns).astype(np.float32)
    return {
        "sa": np.float32(0.02), "za": np.uint8(121), "b": draw(rng, "int8", 64, columns), "sb": scales, "zb": np.zeros(columns, np.int8),
        "sy": np.float32(0.05), "zy": np.uint8(130),
    }  # fmt: skip


def test_q_linear_matmul_is_the_same_either_way(device, integers, rng):
    a, weights = draw(rng, "uint8", 7, 64), q_weights(rng, 10)
    data = model([make("QLinearMatMul", ["a", *weights], ["y"])], {"a": a}, "uint8", weights)
    product = (a.astype(np.int64) - 121) @ weights["b"].astype(np.int64)
    scale = (weights["sa"] * weights["sb"]) / weights["sy"]
    wanted = np.clip(np.rint(product.astype(np.float32) * scale) + 130, 0, 255).astype(np.uint8)
    for y in runs(data, {"a": a}, device, integers):
        assert np.array_equal(y, wanted)


@pytest.mark.parametrize("shared", [False, True])
def test_dequantized_products_agree_with_onnxruntime(shared, device, integers, rng):
    a, weights = draw(rng, "uint8", 2, 5, 64), q_weights(rng, 10)
    nodes = [
        make("DequantizeLinear", ["a", "sa", "za"], ["x"]), make("DequantizeLinear", ["b", "sb", "zb"], ["w"], axis=1),
        make("MatMul", ["x", "w"], ["h"]), make("QuantizeLinear", ["h", "sy", "zy"], ["y"]),
    ]  # fmt: skip
    data = model(nodes, {"a": a}, "uint8", weights)
    if shared:  # the product itself is read elsewhere: nothing is rewritten
        changed = onnx.load_from_string(data)
        changed.graph.output.append(helper.make_tensor_value_info("h", TensorProto.FLOAT, [None] * 3))
        data = changed.SerializeToString()
    session = nonnx.InferenceSession(data, device=device)
    assert session.rewrites == ({} if shared else {"QLinearMatMul": 1})
    wanted = runtime.InferenceSession(data, providers=["CPUExecutionProvider"]).run(None, {"a": a})[0].astype(int)
    for y in runs(data, {"a": a}, device, integers and not shared):
        assert np.abs(y.astype(int) - wanted).max() <= 1 and np.mean(y == wanted) > 0.9


def test_a_model_that_onnxruntime_quantized_agrees_with_it(tmp_path, device, integers, rng):
    quantization = pytest.importorskip("onnxruntime.quantization")
    weights = {"b": rng.standard_normal((16, 12)).astype(np.float32), "c": rng.standard_normal((12, 5)).astype(np.float32)}
    nodes = [make("MatMul", ["x", "b"], ["h"]), make("Relu", ["h"], ["r"]), make("MatMul", ["r", "c"], ["y"])]
    x = rng.standard_normal((9, 16)).astype(np.float32)
    (tmp_path / "m.onnx").write_bytes(model(nodes, {"x": x}, "float32", weights))

    class Reader(quantization.CalibrationDataReader):
        def __init__(self):
            self.left = [{"x": x}]

        def get_next(self):
            return self.left.pop() if self.left else None

    options = {"quant_format": quantization.QuantFormat.QDQ, "per_channel": True, "weight_type": quantization.QuantType.QInt8}
    quantization.quantize_static(tmp_path / "m.onnx", tmp_path / "q.onnx", Reader(), **options)
    (wanted,) = runtime.InferenceSession(tmp_path / "q.onnx", providers=["CPUExecutionProvider"]).run(None, {"x": x})
    session = nonnx.InferenceSession(tmp_path / "q.onnx", device=device)
    assert session.rewrites["QLinearMatMul"] == 2
    step = np.abs(wanted).max() / 127
    for _ in range(3):
        assert np.abs(session.run(None, {"x": x})[0] - wanted).max() <= 1.01 * step
