"""Products and convolutions of quantized values are exact, as integers and as floats, and agree with onnxruntime."""

from __future__ import annotations

import numpy as np
import pytest

import netcl
from netcl import amp, io
from netcl.core.device import CPUQueue
from netcl.core.kernel_selector import KernelConfig, KernelVariant, get_kernel_selector
from netcl.ops import integer

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

import netcl.onnx as nonnx  # noqa: E402

make = helper.make_node
CODES = {"int8": TensorProto.INT8, "uint8": TensorProto.UINT8, "float32": TensorProto.FLOAT, "int32": TensorProto.INT32}


def select(monkeypatch, op: str, kernel) -> None:
    selector = get_kernel_selector()
    monkeypatch.setitem(selector._registered, op, [(lambda shapes, profile: True, kernel)])
    selector.clear_cache()


@pytest.fixture(params=["float", "items", "tiles"])
def integers(request, monkeypatch, device):
    """Whether products run as integers; by the tiles of CPUs and of GPUs."""
    if isinstance(device.queue, CPUQueue) and request.param != "float":
        pytest.skip("NumPy has one form")
    select(monkeypatch, "integer_dot", "float" if request.param == "float" else "tiles")
    monkeypatch.setattr(integer, "SIDES", dict.fromkeys(("cpu", "gpu"), (1, 8) if request.param == "items" else (16, 64)))
    yield request.param != "float"
    monkeypatch.undo()
    get_kernel_selector().clear_cache()


def draw(rng, dtype, *shape) -> np.ndarray:
    limits = np.iinfo(dtype)
    return rng.integers(limits.min, limits.max + 1, shape, dtype)


def seven_bits(rng, dtype, *shape) -> np.ndarray:
    """Weights for onnxruntime, whose sums of uint8 times int8 saturate on x86 without VNNI."""
    return rng.integers(-64, 64, shape, dtype) if dtype == "int8" else draw(rng, dtype, *shape)


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
        "sa": np.float32(0.02), "za": np.uint8(121), "b": seven_bits(rng, "int8", 64, columns), "sb": scales,
        "zb": np.zeros(columns, np.int8), "sy": np.float32(0.05), "zy": np.uint8(130),
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


#: By kind: shapes of the input and of two weights, attributes of both nodes.
QUANTIZED = {
    "MatMul": ((9, 16), (16, 12), (12, 5), {}, {}),
    "Conv": ((2, 4, 8, 8), (6, 4, 3, 3), (5, 6, 1, 1), {"pads": [1, 1, 1, 1]}, {"strides": [2, 2]}),
}


@pytest.mark.parametrize("kind", QUANTIZED)
def test_a_model_that_onnxruntime_quantized_agrees_with_it(kind, tmp_path, device, integers):
    quantization = pytest.importorskip("onnxruntime.quantization")
    rng, (shape, *sides, one, two) = np.random.default_rng(5), QUANTIZED[kind]
    weights = {name: rng.standard_normal(side).astype(np.float32) for name, side in zip("bc", sides, strict=True)}
    bias = {"d": rng.standard_normal(sides[0][0]).astype(np.float32)} if kind == "Conv" else {}
    nodes = [make(kind, ["x", "b", *bias], ["h"], **one), make("Relu", ["h"], ["r"]), make(kind, ["r", "c"], ["y"], **two)]
    x = rng.standard_normal(shape).astype(np.float32)
    (tmp_path / "m.onnx").write_bytes(model(nodes, {"x": x}, "float32", weights | bias))

    class Reader(quantization.CalibrationDataReader):
        def __init__(self):
            self.left = [{"x": x}]

        def get_next(self):
            return self.left.pop() if self.left else None

    options = {"quant_format": quantization.QuantFormat.QDQ, "per_channel": True, "weight_type": quantization.QuantType.QInt8}
    quantization.quantize_static(tmp_path / "m.onnx", tmp_path / "q.onnx", Reader(), reduce_range=True, **options)
    (wanted,) = runtime.InferenceSession(tmp_path / "q.onnx", providers=["CPUExecutionProvider"]).run(None, {"x": x})
    session = nonnx.InferenceSession(tmp_path / "q.onnx", device=device)
    assert session.rewrites[f"QLinear{kind}"] == 2
    step = np.abs(wanted).max() / 127
    for _ in range(3):
        assert np.abs(session.run(None, {"x": x})[0] - wanted).max() <= 1.01 * step


def test_products_of_small_floats_are_refused():
    """Their sums were cut to integers."""
    shapes = {"a": [1, 2], "za": [], "b": [2, 1], "zb": []}
    held = [helper.make_tensor(name, TensorProto.FLOAT8E4M3FN, dims, [0.5] * int(np.prod(dims))) for name, dims in shapes.items()]
    held += [helper.make_tensor(name, TensorProto.FLOAT, [], [1.0]) for name in ("sa", "sb", "sy")]
    held.append(helper.make_tensor("zy", TensorProto.INT8, [], [0]))
    node = make("QLinearMatMul", ["a", "sa", "za", "b", "sb", "zb", "sy", "zy"], ["y"])
    graph = helper.make_graph([node], "test", [], [helper.make_tensor_value_info("y", TensorProto.INT8, [1, 1])], held)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    with pytest.raises(ValueError, match=r"\[QLinearMatMul\] .*operands must be integers"), netcl.device("cpu"):
        io.import_onnx(made.SerializeToString())()


# ---- convolutions

#: Dtypes, shapes of images and filters, attributes.
CONVS = {
    "padded": ("uint8", "int8", (2, 5, 7, 8), (6, 5, 3, 3), {"pads": [1, 1, 1, 1]}),
    "ends that differ, strides": ("int8", "int8", (1, 3, 9, 8), (4, 3, 3, 2), {"pads": [0, 1, 2, 3], "strides": [2, 3]}),
    "dilated groups": ("uint8", "uint8", (2, 6, 9, 9), (4, 3, 3, 3), {"group": 2, "dilations": [2, 1], "pads": [2, 0, 1, 1]}),
    "depthwise": ("uint8", "int8", (1, 7, 6, 6), (7, 1, 3, 3), {"group": 7, "pads": [1, 1, 1, 1], "strides": [2, 2]}),
    "pointwise, a long sum": ("uint8", "int8", (2, 700, 3, 3), (5, 700, 1, 1), {}),
    "long sums of groups": ("int8", "uint8", (1, 70, 5, 5), (4, 35, 3, 3), {"group": 2}),
    "signals": ("uint8", "int8", (2, 3, 330), (4, 3, 301), {"pads": [7, 2]}),
    "same": ("uint8", "int8", (1, 4, 6, 7), (3, 4, 3, 3), {"auto_pad": "SAME_LOWER"}),
}


def points(rng, kinds, filters: int, zeros: str) -> dict[str, np.ndarray]:
    sides = {"none": None, "numbers": ((), ()), "per filter": ((), (filters,))}[zeros]
    return {} if sides is None else {name: draw(rng, kind, *side) for name, kind, side in zip("pq", kinds, sides, strict=True)}


def exact_conv(x, w, p=0, q=0, group=1, pads=None, strides=None, dilations=None, auto_pad="") -> np.ndarray:
    """A convolution in int64, tap by tap."""
    axes = x.ndim - 2
    strides, dilations = strides or [1] * axes, dilations or [1] * axes
    pads = [(k - 1 + 1) // 2 for k in w.shape[2:]] + [(k - 1) // 2 for k in w.shape[2:]] if auto_pad else pads or [0] * 2 * axes
    x = np.pad(x.astype(np.int64) - p, ((0, 0), (0, 0), *zip(pads[:axes], pads[axes:], strict=True)))
    w = w.astype(np.int64) - (np.reshape(q, (-1, *[1] * (axes + 1))) if np.ndim(q) else q)
    outs = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(x.shape[2:], w.shape[2:], strides, dilations, strict=True)]
    x, w = (v.reshape(*head, -1, *v.shape[2 - cut :]) for v, head, cut in ((x, (x.shape[0], group), 0), (w, (group,), 1)))
    w = w.reshape(group, -1, *w.shape[2:])
    made = 0
    for at in np.ndindex(*w.shape[3:]):
        seen = [slice(i * d, i * d + (o - 1) * s + 1, s) for i, d, o, s in zip(at, dilations, outs, strides, strict=True)]
        made = made + np.einsum("ngc...,gfc->ngf...", x[(..., *seen)], w[(..., *at)])
    return made.reshape(x.shape[0], -1, *outs)


@pytest.mark.parametrize(("case", "zeros"), [*zip(CONVS, ["none", "numbers", "per filter"] * 3, strict=False), ("padded", "per filter")])
def test_conv_integer_is_exact(case, zeros, device, integers, rng):
    *kinds, shape, filters, given = CONVS[case]
    x, w = draw(rng, kinds[0], *shape), draw(rng, kinds[1], *filters)
    zero = points(rng, kinds, filters[0], zeros)
    data = model([make("ConvInteger", ["x", "w", *zero], ["y"], **given)], {"x": x}, "int32", {"w": w, **zero})
    wanted = exact_conv(x, w, **{name: value.astype(np.int64) for name, value in zero.items()}, **given)
    for y in runs(data, {"x": x}, device, integers):
        assert y.dtype == np.int32 and np.array_equal(y, wanted)


def test_volumes_are_exact(device, rng):
    x, w = draw(rng, "uint8", 1, 4, 4, 5, 5), draw(rng, "int8", 3, 4, 3, 3, 3)
    data = model([make("ConvInteger", ["x", "w"], ["y"])], {"x": x}, "int32", {"w": w})
    assert np.array_equal(nonnx.InferenceSession(data, device=device).run(None, {"x": x})[0], exact_conv(x, w))


def q_conv(rng, kinds, filters, per_filter: bool, given) -> tuple[list, dict[str, np.ndarray]]:
    scales, middle = rng.uniform(0.001, 0.003, filters[0]).astype(np.float32), 128 if kinds[1] == "uint8" else 0
    scales, zero = (scales, np.full(filters[0], middle, kinds[1])) if per_filter else (scales[0], np.array(middle + 3, kinds[1]))
    weights = {
        "sx": np.float32(0.02), "zx": np.array(120, kinds[0]), "w": seven_bits(rng, kinds[1], *filters), "sw": scales, "zw": zero,
        "sy": np.float32(0.006 * np.sqrt(np.prod(filters[1:]))), "zy": np.array(100, kinds[0]),
        "c": rng.integers(-5000, 5000, filters[0], np.int32),
    }  # fmt: skip
    return [make("QLinearConv", ["x", *weights], ["y"], **given)], weights


@pytest.mark.parametrize(
    ("case", "per_filter"), [("padded", True), ("dilated groups", False), ("depthwise", True), ("pointwise, a long sum", False)]
)
def test_q_linear_conv_is_the_same_either_way_and_onnxruntimes(case, per_filter, device, integers):
    rng = np.random.default_rng(5)  # onnxruntime may round halves otherwise: the same values everywhere
    *kinds, shape, filters, given = CONVS[case]
    x, (nodes, weights) = draw(rng, kinds[0], *shape), q_conv(rng, kinds, filters, per_filter, given)
    data = model(nodes, {"x": x}, kinds[0], weights)
    sums = exact_conv(x, weights["w"], 120, weights["zw"].astype(np.int64), **given) + weights["c"].reshape(1, -1, 1, 1)
    scale = (weights["sx"] * weights["sw"]) / weights["sy"]
    scaled = np.rint(sums.astype(np.float32) * (scale.reshape(-1, 1, 1) if per_filter else scale)) + 100
    wanted = np.clip(scaled, np.iinfo(kinds[0]).min, np.iinfo(kinds[0]).max).astype(kinds[0])
    assert len(np.unique(wanted)) > 20
    theirs = runtime.InferenceSession(data, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0].astype(int)
    for y in runs(data, {"x": x}, device, integers):
        assert np.array_equal(y, wanted)
        assert np.abs(y.astype(int) - theirs).max() <= 1 and np.mean(y == theirs) > 0.99


@pytest.mark.parametrize("bias", ["none", "int32", "another scale"])
def test_dequantized_convolutions_agree_with_onnxruntime(bias, device, integers):
    rng = np.random.default_rng(5)  # onnxruntime may round halves otherwise: the same values everywhere
    *kinds, shape, filters, given = CONVS["padded"]
    x, (_, weights) = draw(rng, kinds[0], *shape), q_conv(rng, kinds, filters, True, given)
    weights |= {"sc": weights["sx"] * weights["sw"] * np.float32(2 if bias == "another scale" else 1)}
    nodes = [
        make("DequantizeLinear", ["x", "sx", "zx"], ["a"]), make("DequantizeLinear", ["w", "sw", "zw"], ["b"], axis=0),
        make("DequantizeLinear", ["c", "sc"], ["d"], axis=0), make("Conv", ["a", "b", "d"][: 2 if bias == "none" else 3], ["h"], **given),
        make("QuantizeLinear", ["h", "sy", "zy"], ["y"]),
    ]  # fmt: skip
    data = model(nodes[:2] + nodes[2 + (bias == "none") :], {"x": x}, kinds[0], weights)
    session, fits = nonnx.InferenceSession(data, device=device), bias != "another scale"
    assert session.rewrites == ({"QLinearConv": 1} if fits else {})
    plain = runtime.SessionOptions()
    plain.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL  # 1.23 fuses a bias of another scale wrongly
    theirs = runtime.InferenceSession(data, plain, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0].astype(int)
    for y in runs(data, {"x": x}, device, integers and fits):
        assert np.abs(y.astype(int) - theirs).max() <= 1 and np.mean(y == theirs) > 0.99


def test_transforms_that_round_are_not_used(monkeypatch, device, rng):
    """A tuned or registered Winograd kernel gave sums that were off by one."""
    x, w = draw(rng, "uint8", 1, 24, 12, 12), draw(rng, "int8", 32, 24, 3, 3)
    data = model([make("ConvInteger", ["x", "w"], ["y"])], {"x": x}, "int32", {"w": w})
    select(monkeypatch, "conv2d", KernelConfig(KernelVariant.CONV2D_WINOGRAD, extra={"winograd_channels": 1}))
    try:
        assert np.array_equal(nonnx.InferenceSession(data, device=device).run(None, {"x": x})[0], exact_conv(x, w))
    finally:
        monkeypatch.undo()
        get_kernel_selector().clear_cache()


@pytest.mark.filterwarnings("ignore:.autocast. the device has no half arithmetic")
def test_autocast_does_not_round_sums(device, rng):
    x, w = draw(rng, "uint8", 2, 6, 5, 5), draw(rng, "int8", 4, 6, 3, 3)
    a, b = draw(rng, "uint8", 3, 40), draw(rng, "int8", 40, 4)
    conv = model([make("ConvInteger", ["x", "w"], ["y"])], {"x": x}, "int32", {"w": w})
    product = model([make("MatMulInteger", ["a", "b"], ["y"])], {"a": a}, "int32", {"b": b})
    with netcl.device(device), amp.autocast():
        assert np.array_equal(io.import_onnx(conv)(x).to_host(), exact_conv(x, w))
        assert np.array_equal(io.import_onnx(product)(a).to_host(), a.astype(int) @ b.astype(int))


def test_measured_gains_select_integers(monkeypatch, cl_device, rng):
    with netcl.device(cl_device):
        a, b = netcl.tensor(draw(rng, "uint8", 4, 8)), netcl.tensor(draw(rng, "int8", 8, 5))
        monkeypatch.setattr(integer, "LEAST_PRODUCTS", {})  # as on a device without an entry
        assert not integer.prefers_integers(a, b, 10**12)
        monkeypatch.setitem(integer.LEAST_PRODUCTS, (cl_device.profile.brand, "qdq"), 161)
        assert integer.prefers_integers(a, b, 161, "qdq") and not integer.prefers_integers(a, b, 160, "qdq")
        assert not integer.prefers_integers(a, b, 161)
        assert not integer.prefers_integers(netcl.cast(a, "int32"), b, 161, "qdq")
