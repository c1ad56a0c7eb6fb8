"""Imported operators beyond the node cases: what onnxruntime computes, gradients, functions, control flow, storage types."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import netcl.autograd as ag
from netcl import nn
from netcl.core.device import device as activate
from netcl.core.errors import ShapeError
from netcl.core.tensor import Tensor
from netcl.io import FileError
from netcl.ops import random

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from netcl.io.onnx import import_onnx  # noqa: E402

make = helper.make_node


@pytest.fixture(autouse=True)
def on_numpy():
    with activate("cpu"):
        random.manual_seed(1)
        yield


def info(name: str, kind, shape=None):
    return helper.make_tensor_value_info(name, kind if isinstance(kind, int) else helper.np_dtype_to_tensor_dtype(np.dtype(kind)), shape)


def model(nodes, inputs, outputs, weights=None, opset=18, functions=(), domains=()) -> bytes:
    """A model of arrays by name; ``outputs`` maps names to element types, or to element types and shapes."""
    graph = helper.make_graph(
        nodes,
        "test",
        [info(name, x.dtype, x.shape) for name, x in inputs.items()],
        [info(name, *(kind if isinstance(kind, tuple) else (kind,))) for name, kind in outputs.items()],
        [numpy_helper.from_array(x, name) if isinstance(x, np.ndarray) else x for name, x in (weights or {}).items()],
    )
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(name, 1) for name in domains)]
    made = helper.make_model(graph, opset_imports=imports, functions=list(functions))
    made.ir_version = 10
    known = any(isinstance(kind, tuple) for kind in outputs.values())
    return (made if known else onnx.shape_inference.infer_shapes(made)).SerializeToString()


def ran(data: bytes, inputs) -> list[np.ndarray]:
    return runtime.InferenceSession(data, providers=["CPUExecutionProvider"]).run(None, dict(inputs))


def compare(data: bytes, inputs, tolerance: float = 1e-4) -> None:
    """What netcl computes is what onnxruntime computes."""
    made = import_onnx(data)(*inputs.values())
    for mine, other in zip(made if isinstance(made, tuple) else (made,), ran(data, inputs), strict=True):
        assert mine.dtype == other.dtype
        np.testing.assert_allclose(mine.to_host(), other, rtol=tolerance, atol=tolerance / 10)


# ---- recurrent layers

STEPS, ROWS, WIDTH, H = 5, 3, 4, 2
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def recurrent(kind, rng, directions=1, given=("B",), **options) -> tuple[bytes, dict]:
    gates = GATES[kind]
    shapes = {"W": (directions, gates * H, WIDTH), "R": (directions, gates * H, H), "B": (directions, 2 * gates * H), "lengths": (ROWS,),
              "h0": (directions, ROWS, H), "c0": (directions, ROWS, H), "P": (directions, 3 * H)}  # fmt: skip
    arrays = {name: rng.uniform(-1, 1, shape).astype(np.float32) for name, shape in shapes.items()}
    arrays["lengths"] = np.array([5, 2, 4], np.int32)
    names = [name if name in ("W", "R", *given) else "" for name in shapes][: 8 if kind == "LSTM" else 6]
    inputs = {"x": rng.standard_normal((STEPS, ROWS, WIDTH)).astype(np.float32)}
    outputs = ["y", "h", "c"] if kind == "LSTM" else ["y", "h"]
    while not names[-1]:
        names.pop()
    node = make(kind, ["x", *names], outputs, hidden_size=H, **options)
    used = {name: arrays[name] for name in names if name}
    return model([node], inputs, dict.fromkeys(outputs, TensorProto.FLOAT), used, opset=14), inputs


@pytest.mark.parametrize(
    "kind, directions, given, options",
    [
        ("RNN", 2, ("B", "lengths", "h0"), {"direction": "bidirectional", "activations": ["Relu", "Tanh"]}),
        ("RNN", 1, (), {"direction": "reverse", "activations": ["Affine"], "activation_alpha": [0.5], "activation_beta": [0.1]}),
        ("GRU", 1, ("B", "h0"), {"linear_before_reset": 1}),
        ("GRU", 2, ("B", "lengths"), {"direction": "bidirectional"}),
        ("GRU", 1, ("B",), {"clip": 0.3, "activations": ["HardSigmoid", "Softsign"]}),
        ("LSTM", 2, ("B", "lengths", "h0", "c0"), {"direction": "bidirectional"}),
        ("LSTM", 1, ("h0",), {"direction": "reverse"}),
        ("LSTM", 1, ("B", "h0", "c0", "P"), {"clip": 0.5}),
        ("LSTM", 1, ("B", "lengths", "P"), {"activations": ["Sigmoid", "LeakyRelu", "ScaledTanh"], "activation_alpha": [0.2, 1.5]}),
        ("LSTM", 1, ("B",), {"input_forget": 1}),
    ],
)
def test_recurrent_layers(rng, kind, directions, given, options):
    data, inputs = recurrent(kind, rng, directions, given, **options)
    if "activation_alpha" in options and kind == "LSTM":  # onnxruntime wants a number per activation
        made, _ = import_onnx(data)(*inputs.values())[:2]
        assert made.shape == (STEPS, 1, ROWS, H) and np.isfinite(made.to_host()).all()
    else:
        compare(data, inputs)


def test_an_unknown_activation_is_refused(rng):
    data, inputs = recurrent("RNN", rng, activations=["Cosine"])
    with pytest.raises(ValueError, match=r"\[RNN\] an activation must be one of .*; activation=Cosine, node=y"):
        import_onnx(data)(*inputs.values())


def test_a_recurrent_layer_learns(rng):
    """Gradients are those of ``nn.LSTM``, whose gates have another order."""
    data, inputs = recurrent("LSTM", rng)
    imported, own = import_onnx(data), nn.LSTM(WIDTH, H)
    weights = {name: parameter for name, parameter in imported.named_parameters()}
    order = np.r_[0:H, 2 * H : 4 * H, H : 2 * H]

    def turned(name: str) -> np.ndarray:
        return weights[name].to_host()[0]

    bias = turned("B").reshape(2, -1)[:, order]
    state = {"weight_ih_l0": turned("W")[order], "weight_hh_l0": turned("R")[order], "bias_ih_l0": bias[0], "bias_hh_l0": bias[1]}
    own.load_state_dict(state)
    x = Tensor.from_host(inputs["x"])
    imported(x)[0].square().sum().backward()
    own(x)[0].square().sum().backward()
    np.testing.assert_allclose(weights["R"].grad.to_host()[0][order], own.weight_hh_l0.grad.to_host(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(weights["W"].grad.to_host()[0][order], own.weight_ih_l0.grad.to_host(), rtol=1e-4, atol=1e-5)


# ---- quantized


def test_quantized_weights_run_as_floats(rng):
    x, w = rng.standard_normal((2, 3, 8, 8)).astype(np.float32), rng.integers(-127, 128, (4, 3, 3, 3)).astype(np.int8)
    weights = {"w": w, "ws": rng.uniform(0.01, 0.02, 4).astype(np.float32), "wz": np.zeros(4, np.int8), "s": np.array(0.05, np.float32),
               "z": np.array(128, np.uint8)}  # fmt: skip
    nodes = [make("QuantizeLinear", ["x", "s", "z"], ["q"]), make("DequantizeLinear", ["q", "s", "z"], ["d"]),
             make("DequantizeLinear", ["w", "ws", "wz"], ["v"], axis=0), make("Conv", ["d", "v"], ["y"], pads=[1, 1, 1, 1])]  # fmt: skip
    compare(model(nodes, {"x": x}, {"y": TensorProto.FLOAT}, weights), {"x": x})


@pytest.mark.parametrize("channels, group", [(3, 1), (70, 1), (6, 3)])
def test_integer_convolutions_are_exact(rng, channels, group):
    """70 channels of 9 taps have sums beyond what one float32 holds."""
    x = rng.integers(250, 256, (1, channels, 5, 5)).astype(np.uint8)
    w = rng.integers(120, 128, (6, channels // group, 3, 3)).astype(np.uint8)
    nodes = [make("ConvInteger", ["x", "w", "z"], ["y"], group=group)]
    data = model(nodes, {"x": x}, {"y": TensorProto.INT32}, {"w": w, "z": np.array(3, np.uint8)})
    expected = ran(data, {"x": x})[0]
    assert expected.max() > 2**24 or channels < 70
    np.testing.assert_array_equal(import_onnx(data)(x).to_host(), expected)


def test_integer_products_are_exact(rng):
    a, b = rng.integers(0, 256, (3, 4, 1000)).astype(np.uint8), rng.integers(-128, 128, (3, 1000, 5)).astype(np.int8)
    inputs = {"a": a, "b": b, "az": np.array(0, np.uint8), "bz": np.array(-128, np.int8)}
    data = model([make("MatMulInteger", ["a", "b", "az", "bz"], ["y"])], inputs, {"y": TensorProto.INT32})
    made = import_onnx(data)(*inputs.values())
    np.testing.assert_array_equal(made.to_host(), a.astype(np.int32) @ (b.astype(np.int32) + 128))


def test_dynamic_quantization(rng):
    inputs = {"x": rng.standard_normal((4, 6)).astype(np.float32)}
    data = model([make("DynamicQuantizeLinear", ["x"], ["q", "s", "z"])], inputs, {"q": TensorProto.UINT8, "s": TensorProto.FLOAT, "z": 2})
    compare(data, inputs)


# ---- element types


@pytest.mark.parametrize("dtype", ["int8", "int16", "uint16", "uint32", "uint64", "float64", "float16"])
def test_element_types_are_kept(dtype):
    inputs = {"x": np.array([1, 2, 3], dtype)}
    data = model(
        [make("Add", ["x", "w"], ["y"])], inputs, {"y": helper.np_dtype_to_tensor_dtype(np.dtype(dtype))}, {"w": np.array([5], dtype)}
    )
    compare(data, inputs)


@pytest.mark.parametrize("kind, held", [(TensorProto.FLOAT8E4M3FN, "float32"), (TensorProto.INT4, "int8"), (TensorProto.UINT4, "uint8")])
def test_narrow_types_are_storage(kind, held):
    """Weights of 8 and 4 bits are decoded when a model is read."""
    weight = helper.make_tensor("w", kind, [3], [1, 2, 3])
    x = np.array([2.0, 3.0, 4.0], np.float32)
    nodes = [make("Cast", ["w"], ["v"], to=TensorProto.FLOAT), make("Mul", ["x", "v"], ["y"]), make("Identity", ["w"], ["u"])]
    y, u = import_onnx(model(nodes, {"x": x}, {"y": TensorProto.FLOAT, "u": kind}, {"w": weight}, opset=21))(x)
    assert y.tolist() == [2, 6, 12] and u.dtype == held and u.tolist() == [1, 2, 3]


# ---- functions and control flow


def test_functions_of_a_model():
    """A function with an attribute that calls another; the default of the attribute holds where a call gives none."""
    inner = helper.make_function("own", "twice", ["a"], ["b"], [make("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 18)])
    leaky = make("LeakyRelu", ["t"], ["b"])
    leaky.attribute.add(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    outer = helper.make_function("own", "leaky_twice", ["a"], ["b"], [make("twice", ["a"], ["t"], domain="own"), leaky], opsets,
                                 attribute_protos=[helper.make_attribute("slope", 0.5)])  # fmt: skip
    nodes = [make("leaky_twice", ["x"], ["y"], domain="own"), make("leaky_twice", ["x"], ["z"], domain="own", slope=0.25)]
    inputs = {"x": np.array([-4.0, 3.0], np.float32)}
    data = model(nodes, inputs, {"y": 1, "z": 1}, functions=[inner, outer], domains=["own"])
    y, z = import_onnx(data)(inputs["x"])
    assert y.tolist() == [-4, 6] and z.tolist() == [-2, 6]
    compare(data, inputs)


def test_names_in_functions_are_their_own():
    """A value of the graph that has the name of a function's input does not lend it its element type."""
    opsets = [helper.make_opsetid("", 21)]
    like = helper.make_function("own", "like", ["a", "x"], ["b"], [make("CastLike", ["a", "x"], ["b"])], opsets)
    weights = {"x": helper.make_tensor("x", TensorProto.INT4, [2], [1, 2]), "i": np.zeros(2, np.int32)}
    nodes = [make("like", ["y", "i"], ["z"], domain="own"), make("like", ["y", "x"], ["u"], domain="own")]
    outputs, y = {"z": (TensorProto.INT32, [2]), "u": (TensorProto.INT4, [2])}, np.array([100.0, 7.0], np.float32)
    z, u = import_onnx(model(nodes, {"y": y}, outputs, weights, 21, [like], ["own"]))(y)
    assert z.dtype == "int32" and z.tolist() == [100, 7] and u.dtype == "int8" and u.tolist() == [4, 7]


@pytest.mark.fault("ONNX functions that call themselves, or double 40 times", "a model that has them", "`FileError`; read at once")
def test_functions_that_grow_are_bounded():
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    loop = helper.make_function("own", "again", ["a"], ["b"], [make("again", ["a"], ["b"], domain="own")], opsets)
    inputs = {"x": np.zeros(2, np.float32)}
    with pytest.raises(FileError, match=r"\[import_onnx\] "):
        import_onnx(model([make("again", ["x"], ["y"], domain="own")], inputs, {"y": (1, [2])}, functions=[loop], domains=["own"]))
    last = helper.make_function("own", "f40", ["a"], ["b"], [make("Relu", ["a"], ["b"])], opsets)
    chain = [
        helper.make_function(
            "own", f"f{i}", ["a"], ["b"], [make(f"f{i + 1}", [x], [y], domain="own") for x, y in (("a", "t"), ("t", "b"))], opsets
        )
        for i in range(40)
    ]
    data = model([make("f0", ["x"], ["y"], domain="own")], inputs, {"y": (1, [2])}, functions=[*chain, last], domains=["own"])
    assert len(import_onnx(data).nodes) == 1


def branches() -> bytes:
    """``y = x @ w`` if the sum of x is positive, else ``x * v``, with both weights in the graph around and in a branch."""
    then = helper.make_graph([make("MatMul", ["x", "w"], ["t"])], "then", [], [info("t", 1, [1, 2])])
    weight = numpy_helper.from_array(np.array([2.0, 3.0], np.float32), "v")
    other = helper.make_graph([make("Mul", ["x", "v"], ["e"])], "else", [], [info("e", 1, [1, 2])], [weight])
    nodes = [make("ReduceSum", ["x"], ["s"], keepdims=0), make("Greater", ["s", "zero"], ["c"]),
             make("If", ["c"], ["y"], then_branch=then, else_branch=other)]  # fmt: skip
    weights = {"w": np.array([[1.0, 2.0], [3.0, 4.0]], np.float32), "zero": np.array(0, np.float32)}
    return model(nodes, {"x": np.zeros((1, 2), np.float32)}, {"y": 1}, weights)


def test_branches_and_their_weights():
    data = branches()
    for x in (np.array([[1.0, 2.0]], np.float32), np.array([[-1.0, -2.0]], np.float32)):
        compare(data, {"x": x})
    graph = import_onnx(data)
    assert {name for name, _ in graph.named_parameters()} == {"w", "v"}
    graph(np.array([[-1.0, -2.0]], np.float32)).sum().backward()
    assert graph.v.grad.to_host().tolist() == [-1, -2] and graph.w.grad is None


@pytest.mark.fault("damaged ONNX control flow", "bits flipped in branches, types and names", "`FileError`, or read; never another error")
def test_damaged_branches_are_refused(rng):
    data, read = branches(), 0
    for place in rng.integers(0, len(data), 150):
        changed = bytearray(data)
        changed[place] ^= 1 << int(rng.integers(8))
        with contextlib.suppress(FileError):
            read += bool(import_onnx(bytes(changed)).nodes)
    assert 0 < read < 150


def test_a_loop_over_a_body():
    """Powers of a matrix while their sum is small; each step is kept."""
    nodes = [make("MatMul", ["m", "w"], ["n"]), make("ReduceSum", ["n"], ["s"], keepdims=0), make("Less", ["s", "limit"], ["go"]),
             make("Identity", ["n"], ["kept"]), make("Neg", ["n"], ["other"])]  # fmt: skip
    body = helper.make_graph(
        nodes, "body", [info("i", TensorProto.INT64, []), info("g", TensorProto.BOOL, []), info("m", 1, [2, 2])],
        [info("go", TensorProto.BOOL, []), info("n", 1, [2, 2]), info("kept", 1, [2, 2]), info("other", 1, [2, 2])],
    )  # fmt: skip
    inputs = {"x": np.array([[1.0, 0.5], [0.25, 1.0]], np.float32)}
    weights = {"w": np.array([[1.0, 0.5], [0.0, 1.0]], np.float32), "limit": np.array(6, np.float32), "most": np.array(20, np.int64)}
    shapes = {"y": (1, [2, 2]), "steps": (1, ["n", 2, 2]), "others": (1, ["n", 2, 2])}
    data = model([make("Loop", ["most", "", "x"], [*shapes], body=body)], inputs, shapes, weights)
    compare(data, inputs)
    compare(model([make("Loop", ["most", "", "x"], [*shapes], body=body)], inputs, shapes, {**weights, "most": np.array(1)}), inputs)
    graph = import_onnx(data)
    graph(inputs["x"])[0].sum().backward()
    assert np.abs(graph.w.grad.to_host()).max() > 0
    none = model([make("Loop", ["none", "", "x"], [*shapes], body=body)], inputs, shapes, {**weights, "none": np.array(0)})
    y, steps, _ = import_onnx(none)(inputs["x"])
    assert y.tolist() == inputs["x"].tolist() and steps.shape[0] == 0


# ---- shapes


def test_the_names_of_dimensions_are_checked():
    graph = helper.make_graph(
        [make("Add", ["a", "b"], ["y"])], "test", [info("a", 1, ["batch", 3]), info("b", 1, ["batch", 3])], [info("y", 1, ["batch", 3])]
    )
    add = import_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9).SerializeToString())
    ones = [np.ones((n, 3), np.float32) for n in (1, 2)]
    assert add(ones[1], ones[1]).shape == (2, 3) and add([[1.0, 2.0, 3.0]], ones[0]).tolist() == [[2, 3, 4]]
    with pytest.raises(ShapeError, match=r"\[import_onnx\] input 'b' must have shape \(batch, 3\), got \(1, 3\); dimensions=\{'batch'"):
        add(ones[1], ones[0])
    with pytest.raises(ShapeError, match=r"\[import_onnx\] input 'a' must have shape \(batch, 3\), got \(3, 2\)"):
        add(ones[1].T, ones[1])


# ---- earlier opsets


@pytest.mark.parametrize(
    "opset, node, weights",
    [
        (10, make("Resize", ["x", "s"], ["y"], mode="linear"), {"s": np.array([1, 1, 1.5, 2], np.float32)}),
        (9, make("Upsample", ["x", "s"], ["y"], mode="nearest"), {"s": np.array([1, 1, 2, 2], np.float32)}),
        (8, make("Upsample", ["x"], ["y"], mode="linear", scales=[1.0, 1.0, 2.0, 2.0]), {}),
        (7, make("Dropout", ["x"], ["y"], ratio=0.3), {}),
        (10, make("Scatter", ["x", "i", "u"], ["y"], axis=3), {"i": np.zeros((1, 2, 4, 1), int), "u": np.ones((1, 2, 4, 1), np.float32)}),
        (9, make("BatchNormalization", ["x", "a", "b", "b", "a"], ["y"]), {"a": np.ones(2, np.float32), "b": np.zeros(2, np.float32)}),
        (11, make("Hardmax", ["x"], ["y"], axis=2), {}),
        (11, make("LpNormalization", ["x"], ["y"], axis=1, p=1), {}),
        (11, make("ReduceMax", ["x"], ["y"], axes=[1, 2]), {}),
        (10, make("TopK", ["x", "k"], ["y", "z"], axis=2), {"k": np.array([2])}),
        (9, make("TopK", ["x"], ["y", "z"], axis=2, k=2), {}),
        (10, make("Resize", ["x", "s"], ["y"], mode="nearest"), {"s": np.array([1, 1, 0.75, 0.6], np.float32)}),
        (13, make("SpaceToDepth", ["x"], ["y"], blocksize=1), {}),
        (8, make("MaxPool", ["x"], ["y", "z"], kernel_shape=[2, 2]), {}),
        (11, make("ScatterElements", ["x", "i", "u"], ["y"], axis=3), {"i": np.array([[[[1]]]]), "u": np.ones((1, 1, 1, 1), np.float32)}),
    ],
    ids=lambda value: value.op_type if isinstance(value, onnx.NodeProto) else "",
)  # fmt: skip
def test_operators_of_earlier_opsets(rng, opset, node, weights):
    inputs = {"x": rng.standard_normal((1, 2, 4, 5)).astype(np.float32)}
    kinds = {"y": TensorProto.FLOAT, "z": TensorProto.INT64}
    compare(model([node], inputs, {name: kinds[name] for name in node.output}, weights, opset), inputs)


def test_operators_can_be_trained(rng):
    """Gradients reach weights through operators that are composed or replaced by their definition."""
    x = rng.standard_normal((1, 2, 6, 6)).astype(np.float32)
    nodes = [
        make("Mul", ["x", "w"], ["a"]),
        make("Resize", ["a", "", "scales"], ["b"], mode="cubic"),
        make("GridSample", ["b", "grid"], ["c"], mode="cubic", padding_mode="reflection"),
        make("LpPool", ["c"], ["d"], kernel_shape=[2, 2], p=2),
        make("MeanVarianceNormalization", ["d"], ["e"]),
        make("ScatterND", ["e", "place", "v"], ["y"], reduction="mul"),
    ]
    grid = rng.uniform(-1.2, 1.2, (1, 4, 4, 2)).astype(np.float32)
    weights = {"w": np.ones(6, np.float32), "scales": np.array([1, 1, 1.5, 0.7], np.float32), "place": np.array([[0, 1, 0]]),
               "v": np.full((1, 3), 2, np.float32), "grid": grid}  # fmt: skip
    graph = import_onnx(model(nodes, {"x": x}, {"y": (1, [1, 2, 3, 3])}, weights, opset=20))
    share = Tensor.from_host(rng.standard_normal((1, 2, 3, 3)).astype(np.float32))

    def loss() -> Tensor:
        return ag.sum(ag.mul(graph(x), share))

    loss().backward()
    for name in ("w", "v", "grid"):
        parameter, sums = getattr(graph, name), []
        gradient, values = parameter.grad.to_host(), parameter.to_host().copy()
        at = np.unravel_index(np.abs(gradient).argmax(), gradient.shape)
        with ag.no_grad():
            for step in (-4e-3, 4e-3, 0):
                moved = values.copy()
                moved[at] += step
                parameter.copy_(Tensor.from_host(moved))
                sums.append(loss().item())
        assert abs(gradient[at]) > 0.1
        np.testing.assert_allclose((sums[1] - sums[0]) / 8e-3, gradient[at], rtol=0.05)


# ---- unusual attributes


def as_onnxruntime(node, x, weights=None, opset=18, kind=TensorProto.FLOAT) -> None:
    inputs = {"x": x}
    arrays = {name: np.asarray(value) for name, value in (weights or {}).items()}
    compare(model([node], inputs, dict.fromkeys(node.output, kind), arrays, opset), inputs)


@pytest.mark.parametrize("kind", ["Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSumExp"])
@pytest.mark.parametrize("noop", [0, 1])
def test_reductions_without_axes(rng, kind, noop):
    """Without axes a reduction is over all of them, or over none if ``noop_with_empty_axes`` is set."""
    x = rng.standard_normal((2, 3)).astype(np.float32)
    as_onnxruntime(make(f"Reduce{kind}", ["x"], ["y"], noop_with_empty_axes=noop), x)
    if kind in ("Max", "Min"):
        out = import_onnx(model([make(f"Reduce{kind}", ["x"], ["y"], noop_with_empty_axes=noop)], {"x": x[:0]}, {"y": 1}))(x[:0])
        assert out.shape == ((0, 3) if noop else (1, 1))


@pytest.mark.parametrize("kind", ["Mean", "L1", "L2"])
def test_integers_are_reduced_exactly(kind):
    x = np.array([[2**24 + 1, 2], [-(2**30) - 1, 4]])
    data = model([make(f"Reduce{kind}", ["x"], ["y"], axes=[1])], {"x": x}, {"y": TensorProto.INT64}, opset=13)
    assert import_onnx(data)(x).tolist() == ran(data, {"x": x})[0].tolist()


@pytest.mark.parametrize("start, end, step", [(-9, -(2**63), -1), (-4, 9, -2), (-(2**63), -(2**63), -3), (9, -9, -1), (-9, 9, 2)])
def test_slices_beyond_both_ends(rng, start, end, step):
    weights = {"starts": [start], "ends": [end], "axes": [-1], "steps": [step]}
    as_onnxruntime(make("Slice", ["x", *weights], ["y"]), rng.standard_normal((2, 3)).astype(np.float32), weights)


@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize("values", [[1, 1e8, 3, 4], [2, np.inf, 1, 5], [1, np.nan, 2, 3]])
def test_exclusive_sums_keep_small_elements(values, reverse):
    x = np.array([values], np.float32)
    node = make("CumSum", ["x", "axis"], ["y"], exclusive=1, reverse=reverse)
    as_onnxruntime(node, x, {"axis": np.int64(-1)}, 14)
    empty = model([node], {"x": x[:, :0]}, {"y": 1}, {"axis": np.array(1)}, 14)
    assert import_onnx(empty)(x[:, :0]).shape == (1, 0)


def test_thresholds_of_infinity():
    x = np.array([-np.inf, -1, 0.5, 2, np.inf, np.nan], np.float32)
    as_onnxruntime(make("ThresholdedRelu", ["x"], ["y"], alpha=0.5), x)
    as_onnxruntime(make("Shrink", ["x"], ["y"], lambd=0.7, bias=0.2), x)


@pytest.mark.parametrize("kind", ["Softmax", "LogSoftmax", "Hardmax"])
@pytest.mark.parametrize("opset", [11, 13])
def test_softmax_of_no_rows(kind, opset):
    as_onnxruntime(make(kind, ["x"], ["y"], axis=1), np.zeros((0, 3, 2), np.float32), opset=opset)


def test_gather_nd_of_one_element(rng):
    x = rng.standard_normal((3, 2)).astype(np.float32)
    as_onnxruntime(make("GatherND", ["x", "i"], ["y"]), x, {"i": [-1, 1]}, kind=(TensorProto.FLOAT, ()))
    as_onnxruntime(make("GatherND", ["x", "i"], ["y"]), x, {"i": [2]}, kind=(TensorProto.FLOAT, (2,)))


@pytest.mark.parametrize("axis, bias", [(-2, True), (1, False)])
def test_layer_norms_broadcast_their_weight(rng, axis, bias):
    x = rng.standard_normal((2, 3, 4, 5)).astype(np.float32)
    weights = {name: rng.standard_normal(5).astype(np.float32) for name in ("w", "b")[: 1 + bias]}
    as_onnxruntime(make("LayerNormalization", ["x", *weights], ["y"], axis=axis), x, weights)


@pytest.mark.parametrize("index", [[0, 4], [0, -4], [2, 0], [-3, 2]])
@pytest.mark.parametrize("kind", ["GatherND", "ScatterND"])
def test_multi_indices_are_checked_per_axis(device, kind, index):
    """A flat index alone would read, or overwrite, an element of another row."""
    x, weights = np.arange(6, dtype=np.float32).reshape(2, 3), {"i": np.array([index])}
    weights |= {"u": np.ones(1, np.float32)} if kind == "ScatterND" else {}
    shape = (1,) if kind == "GatherND" else (2, 3)
    node = make(kind, ["x", *weights], ["y"])
    with activate(device), pytest.raises(IndexError, match="out of range"):
        import_onnx(model([node], {"x": x}, {"y": (TensorProto.FLOAT, shape)}, weights))(x).to_host()
    with activate(device), pytest.raises(IndexError, match="out of range"):  # the row of another batch
        node = make("GatherND", ["x", "i"], ["y"], batch_dims=1)
        import_onnx(model([node], {"x": x}, {"y": (TensorProto.FLOAT, (2,))}, {"i": np.array([[3], [0]])}))(x).to_host()


@pytest.mark.parametrize("kind, place, bounds", [("SequenceAt", 2, "-2 to 1"), ("SequenceErase", 5, "-2 to 1"),
                                                 ("SequenceInsert", 3, "-2 to 2"), ("SequenceInsert", -3, "-2 to 2")])  # fmt: skip
def test_positions_in_sequences_are_checked(kind, place, bounds):
    x = np.ones(2, np.float32)
    inputs = ["q", "x", "i"] if kind == "SequenceInsert" else ["q", "i"]
    nodes = [make("SequenceConstruct", ["x", "x"], ["q"]), make(kind, inputs, ["r"])]
    nodes += [] if kind == "SequenceAt" else [make("ConcatFromSequence", ["r"], ["y"], axis=0)]
    made = model(nodes, {"x": x}, {"r" if kind == "SequenceAt" else "y": (TensorProto.FLOAT, (None,))}, {"i": np.array(place)})
    with pytest.raises(ValueError, match=rf"\[{kind}\] position must be from {bounds}; position={place}"):
        import_onnx(made)(x)


@pytest.mark.parametrize(
    "node, shape, weights",
    [
        (make("SpaceToDepth", ["x"], ["y"], blocksize=2), (2, 3, 4, 6), {}),
        # 6 by the float32 nearest to 5/3 is 10 in float32 and below 10 in float64
        (make("Resize", ["x", "", "s"], ["y"], mode="linear"), (1, 2, 6, 4), {"s": np.array([1, 1, 5 / 3, 1], np.float32)}),
        (make("Resize", ["x", "", "s"], ["y"], mode="nearest"), (1, 2, 6, 4), {"s": np.array([1, 1, 5 / 3, 1], np.float32)}),
        (make("Resize", ["x", "", "", "n"], ["y"], mode="cubic", coordinate_transformation_mode="pytorch_half_pixel"), (1, 1, 4, 3),
         {"n": [1, 1, 1, 5]}),
        (make("ConvTranspose", ["x", "w"], ["y"], output_shape=[6]), (1, 1, 5), {"w": np.array([[[1, 2, 4]]], np.float32)}),
        (make("Pad", ["x", "p", "", "a"], ["y"], mode="edge"), (2, 3), {"p": np.zeros(0, int), "a": np.zeros(0, int)}),
    ],
)  # fmt: skip
def test_sizes_and_padding(rng, node, shape, weights):
    as_onnxruntime(node, rng.standard_normal(shape).astype(np.float32), weights)


def test_dequantized_values_of_no_channels():
    node = make("DequantizeLinear", ["x", "s"], ["y"], axis=-1)
    as_onnxruntime(node, np.zeros((2, 0), np.int8), {"s": np.zeros(0, np.float32)})
