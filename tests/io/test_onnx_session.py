"""Sessions give onnxruntime's outputs, eager and replayed, with and without rewrites; mistakes are named."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import netcl
from netcl import cli
from netcl.core.device import CPUQueue, manager
from netcl.core.errors import DtypeError, ShapeError
from netcl.core.tensor import Tensor

onnx = pytest.importorskip("onnx")
runtime = pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

import netcl.onnx as nonnx  # noqa: E402
from netcl.onnx.session import MOST_SHAPES  # noqa: E402
from netcl.replay.graph import Graph  # noqa: E402

GOLDEN = Path(__file__).parent.parent / "golden/torch_onnx"
make = helper.make_node


def rand(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def model(nodes, inputs, outputs, weights=None, opset=17) -> bytes:
    """A model; inputs and outputs map names to shapes, or to element types and shapes."""

    def infos(named):
        forms = {name: form if isinstance(form, tuple) else (TensorProto.FLOAT, form) for name, form in named.items()}
        return [helper.make_tensor_value_info(name, *form) for name, form in forms.items()]

    held = [numpy_helper.from_array(np.asarray(x), name) for name, x in (weights or {}).items()]
    graph = helper.make_graph(nodes, "test", infos(inputs), infos(outputs), held)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    onnx.checker.check_model(made)
    return made.SerializeToString()


def reference(data, feed) -> list[np.ndarray]:
    alone = runtime.SessionOptions()
    alone.intra_op_num_threads = 1  # its threads wait by spinning
    return runtime.InferenceSession(data, alone, providers=["CPUExecutionProvider"]).run(None, feed)


def mlp() -> bytes:
    nodes = [make("MatMul", ["x", "w"], ["h"]), make("Add", ["h", "b"], ["a"]), make("Relu", ["a"], ["y"]), make("Sigmoid", ["a"], ["z"])]
    return model(nodes, {"x": ["batch", 3]}, {"y": ["batch", 4], "z": ["batch", 4]}, {"w": rand(3, 4), "b": rand(4)})


# ---- running


@pytest.mark.parametrize("name", ["cnn", "encoder"])
def test_files_of_torch_give_its_outputs(name, device):
    held = np.load(GOLDEN / f"{name}.npz")
    session = nonnx.InferenceSession(GOLDEN / f"{name}.onnx", device=device)
    for _ in range(3):  # eager, recorded, replayed
        (y,) = session.run(None, {"x": held["x"]})
        np.testing.assert_allclose(y, held["y"], rtol=1e-4, atol=1e-5)
    other = held["x"][::-1].copy()
    (wanted,) = reference(str(GOLDEN / f"{name}.onnx"), {"x": other})
    np.testing.assert_allclose(session.run(None, {"x": other})[0], wanted, rtol=1e-4, atol=1e-5)
    assert set(session.plans.values()) == (set() if isinstance(device.queue, CPUQueue) else {"replay"})


def test_inputs_and_outputs_are_described_as_onnxruntime_does():
    nodes = [make("Identity", ["x"], ["y"]), make("Cast", ["m"], ["z"], to=TensorProto.DOUBLE), make("Shape", ["h"], ["s"])]
    inputs = {"x": ["n", None, 3], "m": (TensorProto.BOOL, []), "h": (TensorProto.FLOAT16, ["p", 5])}
    data = model(nodes, inputs, {"y": ["n", None, 3], "z": (TensorProto.DOUBLE, []), "s": (TensorProto.INT64, [2])})
    mine, other = nonnx.InferenceSession(data, device="cpu"), runtime.InferenceSession(data)
    for a, b in zip([*mine.get_inputs(), *mine.get_outputs()], [*other.get_inputs(), *other.get_outputs()], strict=True):
        assert (a.name, a.type, a.shape) == (b.name, b.type, b.shape)
    feed = {"x": rand(2, 1, 3), "m": True, "h": np.ones((2, 5), np.float16)}
    for a, b in zip(mine.run(None, feed), other.run(None, feed | {"m": np.array(True)}), strict=True):
        assert a.dtype == b.dtype and np.array_equal(a, b)


def test_optional_inputs_are_arrays_or_none():
    tensor = helper.make_tensor_type_proto(TensorProto.FLOAT, [3])
    x = helper.make_value_info("x", helper.make_optional_type_proto(tensor))
    given = [make("OptionalGetElement", ["x"], ["v"]), make("Constant", [], ["v"], value_floats=[1.0, 1.0, 1.0])]
    then, other = (helper.make_graph([node], "branch", [], [helper.make_tensor_value_info("v", 1, [3])]) for node in given)
    nodes = [make("OptionalHasElement", ["x"], ["has"]), make("If", ["has"], ["y"], then_branch=then, else_branch=other)]
    graph = helper.make_graph(nodes, "test", [x], [helper.make_tensor_value_info("y", 1, [3])])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    session = nonnx.InferenceSession(made.SerializeToString(), device="cpu")
    assert session.get_inputs()[0].type == "optional(tensor(float))"
    assert [session.run(None, {"x": x})[0].tolist() for x in (rand(3), None)] == [rand(3).tolist(), [1, 1, 1]]


def test_an_output_may_be_listed_twice():
    data = model([make("Neg", ["x"], ["y"])], {"x": [2]}, {"y": [2]})
    made = onnx.load_from_string(data)
    made.graph.output.append(made.graph.output[0])
    assert len(nonnx.InferenceSession(made.SerializeToString(), device="cpu").run(None, {"x": rand(2)})) == 2


def test_outputs_are_chosen_by_name():
    session, x = nonnx.InferenceSession(mlp(), device="cpu"), rand(2, 3)
    y, z = session.run(None, {"x": x})
    assert [np.array_equal(a, b) for a, b in zip(session.run(["z", "y"], {"x": x.tolist()}), (z, y), strict=True)] == [True, True]
    assert session.get_providers() == ["CPUExecutionProvider"]


@pytest.mark.parametrize(
    ("names", "feed", "kind", "text"),
    [
        (None, {}, ValueError, "all inputs must be given; missing=['x']; it takes: x"),
        (None, {"x": rand(2, 3), "k": 1}, ValueError, "the model has no such input; input='k'; it takes: x"),
        (["q"], {"x": rand(2, 3)}, ValueError, "the model has no such output; output='q'; there are: y, z"),
        (None, {"x": np.ones((2, 3))}, DtypeError, "input 'x' must have dtype float32 (tensor(float)), got float64"),
        (None, {"x": rand(2, 4)}, ShapeError, "input 'x' must have shape (batch, 3), got (2, 4)"),
    ],
)
def test_mistakes_are_named(names, feed, kind, text):
    with pytest.raises(kind) as fault:
        nonnx.InferenceSession(mlp(), device="cpu").run(names, feed)
    assert text in str(fault.value)


def test_a_plan_per_shape_up_to_a_bound(cl_device):
    session = nonnx.InferenceSession(mlp(), device=cl_device)
    for n in range(1, MOST_SHAPES + 3):
        session.run(None, {"x": rand(n, 3)})
    assert [shapes[0][0] for shapes in session.plans] == list(range(3, MOST_SHAPES + 3))
    for n in (5, 7, 5, 7, 5):
        x = rand(n, 3, seed=n)
        for a, b in zip(session.run(None, {"x": x}), reference(mlp(), {"x": x}), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert [session.plans[((n, 3),)] for n in (4, 5, 7)] == ["record", "replay", "replay"]
    with pytest.raises(ShapeError):
        session.run(None, {"x": rand(5, 4)})
    assert session.run(["y"], {"x": np.zeros((0, 3), np.float32)})[0].shape == (0, 4)


def test_control_flow_stays_eager(device):
    branches = [helper.make_graph([make(op, ["x"], ["r"])], op, [], [helper.make_tensor_value_info("r", 1, [2])]) for op in ("Neg", "Exp")]
    nodes = [
        make("ReduceSum", ["x"], ["s"], keepdims=0),
        make("Greater", ["s", "zero"], ["c"]),
        make("If", ["c"], ["y"], then_branch=branches[0], else_branch=branches[1]),
    ]
    session = nonnx.InferenceSession(model(nodes, {"x": [2]}, {"y": [2]}, {"zero": np.float32(0)}), device=device)
    for x in np.array([[1, 2], [-1, -2], [3, 4], [-3, 1]], np.float32):
        np.testing.assert_allclose(session.run(None, {"x": x})[0], -x if x.sum() > 0 else np.exp(x), rtol=1e-5)
    assert isinstance(device.queue, CPUQueue) or "reads values on the host" in session.plans[((2,),)]


def test_random_nodes_draw_anew(device):
    session = nonnx.InferenceSession(model([make("RandomNormalLike", ["x"], ["y"])], {"x": [64]}, {"y": [64]}), device=device)
    draws = [session.run(None, {"x": rand(64)})[0] for _ in range(4)]
    assert len({draw.tobytes() for draw in draws}) == 4


def test_threads_share_a_session(device):
    session, failures = nonnx.InferenceSession(mlp(), device=device), []
    inputs = [rand(1 + i % 3, 3, seed=i) for i in range(4)]
    wanted = [reference(mlp(), {"x": x}) for x in inputs]

    def work(i):
        for _ in range(8):
            for a, b in zip(session.run(None, {"x": inputs[i]}), wanted[i], strict=True):
                if not np.allclose(a, b, rtol=1e-5, atol=1e-6):
                    failures.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# ---- binding, options, providers


def test_bound_tensors_stay_on_the_device(device):
    session = nonnx.InferenceSession(mlp(), device=device)
    binding, target = session.io_binding(), Tensor.from_host(session.model.queue, np.zeros((2, 4), np.float32))
    binding.bind_output("z")
    binding.bind_output("y", target)
    for i in range(4):
        x = rand(2, 3, seed=i)
        if i % 2:
            binding.bind_input("x", Tensor.from_host(session.model.queue, x))
        else:
            binding.bind_cpu_input("x", x)
        session.run_with_iobinding(binding)
        y, z = reference(mlp(), {"x": x})
        assert binding.get_outputs()[1] is target
        for a, b in zip(binding.copy_outputs_to_cpu(), (z, y), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_wrong_bindings_are_refused():
    session = nonnx.InferenceSession(mlp(), device="cpu")
    binding = session.io_binding()
    with pytest.raises(ValueError, match="no such input"):
        binding.bind_cpu_input("q", rand(2, 3))
    with pytest.raises(ValueError, match="no such output"):
        binding.bind_output("q")
    with pytest.raises(DtypeError, match="must have dtype float32"):
        binding.bind_input("x", np.ones((2, 3)))
    binding.bind_cpu_input("x", rand(2, 3))
    binding.bind_output("y", Tensor.from_host(session.model.queue, rand(2, 3)))
    with pytest.raises(ValueError, match=r"must have shape \(2, 4\)"):
        session.run_with_iobinding(binding)


def test_options_with_a_meaning_are_taken_and_others_refused():
    options = nonnx.SessionOptions()
    options.intra_op_num_threads = 0
    options.execution_mode = runtime.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_mem_pattern = False
    options.add_free_dimension_override_by_name("batch", 2)
    with pytest.raises(ValueError, match="OpenCL runtime owns the threads"):
        options.intra_op_num_threads = 4
    with pytest.raises(AttributeError, match="unknown option"):
        options.threads = 4
    session = nonnx.InferenceSession(mlp(), options)
    assert session.get_inputs()[0].shape == [2, 3] and not session.rewrites
    for _ in range(3):
        session.run(None, {"x": rand(2, 3)})
    assert session.plans == {}
    with pytest.raises(ShapeError, match=r"must have shape \(2, 3\)"):
        session.run(None, {"x": rand(3, 3)})
    options.add_free_dimension_override_by_name("width", 2)
    with pytest.raises(ValueError, match="an overridden dimension must be a symbolic dimension of the inputs; dimensions="):
        nonnx.InferenceSession(mlp(), options)
    with pytest.raises(TypeError, match="sess_options must be"):
        nonnx.InferenceSession(mlp(), runtime.SessionOptions())
    with pytest.raises(ValueError, match="run_options must be None"):
        session.run(None, {"x": rand(2, 3)}, runtime.RunOptions())


def test_providers_select_the_backend():
    numpy_only = isinstance(manager.default("auto").queue, CPUQueue)
    assert nonnx.get_available_providers() == ["OpenCLExecutionProvider", "CPUExecutionProvider"][numpy_only:]
    for providers in (nonnx.get_available_providers(), ["CPUExecutionProvider"]):
        assert nonnx.InferenceSession(mlp(), providers=providers).get_providers() == providers[:1]
    with pytest.raises(ValueError, match="providers must be OpenCLExecutionProvider or CPUExecutionProvider"):
        nonnx.InferenceSession(mlp(), providers=["CUDAExecutionProvider"])


# ---- rewrites

GELU_WEIGHTS = {"root": np.float32(2**0.5), "one": np.float32(1), "half": np.float32(0.5)}
GATE = [make("Div", ["x", "root"], ["d"]), make("Erf", ["d"], ["e"]), make("Add", ["one", "e"], ["a"])]
TANH_WEIGHTS = {
    "c": np.float32(0.044715), "s": np.float32((2 / np.pi) ** 0.5), "three": np.float32(3), "one": np.float32(1), "half": np.float32(0.5),
}  # fmt: skip
NORM_WEIGHTS = {"eps": np.float32(1e-5), "two": np.float32(2), "w": rand(8, seed=1), "b": rand(8, seed=2)}


def mean(x: str, out: str, axes=(-1,)):
    return make("ReduceMean", [x], [out], axes=list(axes), keepdims=1)


def layer_norm(axes=(-1,)) -> list:
    return [
        mean("x", "m", axes), make("Sub", ["x", "m"], ["d"]), make("Pow", ["d", "two"], ["p"]), mean("p", "v", axes),
        make("Add", ["v", "eps"], ["q"]), make("Sqrt", ["q"], ["r"]), make("Div", ["d", "r"], ["n"]), make("Mul", ["n", "w"], ["k"]),
        make("Add", ["k", "b"], ["y"]),
    ]  # fmt: skip


CHAINS = {
    "gelu": ([*GATE, make("Mul", ["x", "a"], ["m"]), make("Mul", ["m", "half"], ["y"])], GELU_WEIGHTS, ["Gelu"]),
    "gelu-half-first": ([*GATE, make("Mul", ["x", "half"], ["h"]), make("Mul", ["a", "h"], ["y"])], GELU_WEIGHTS, ["Gelu"]),
    "gelu-tanh": (
        [
            make("Pow", ["x", "three"], ["p"]), make("Mul", ["p", "c"], ["k"]), make("Add", ["x", "k"], ["i"]),
            make("Mul", ["i", "s"], ["j"]),
            make("Tanh", ["j"], ["t"]), make("Add", ["t", "one"], ["g"]), make("Mul", ["half", "x"], ["h"]), make("Mul", ["h", "g"], ["y"]),
        ],
        TANH_WEIGHTS,
        ["Gelu"],
    ),
    "silu": ([make("Sigmoid", ["x"], ["s"]), make("Mul", ["s", "x"], ["y"])], {}, ["Swish"]),
    "layer-norm": (layer_norm(), NORM_WEIGHTS, ["LayerNormalization"]),
    "layer-norm-of-channels": (layer_norm([1]), NORM_WEIGHTS | {"w": rand(6, 1, seed=1)}, ["LayerNormalization"]),
    "rms-norm": (
        [
            make("Mul", ["x", "x"], ["p"]), mean("p", "v"), make("Add", ["v", "eps"], ["q"]), make("Sqrt", ["q"], ["r"]),
            make("Reciprocal", ["r"], ["i"]), make("Mul", ["x", "i"], ["n"]), make("Mul", ["w", "n"], ["y"]),
        ],
        NORM_WEIGHTS,
        ["RMSNormalization"],
    ),
    # not what the op computes
    "hard-swish-of-integers": (
        [make("Cast", ["x"], ["i"], to=TensorProto.INT64), make("Add", ["i", "c"], ["s"]), make("Clip", ["s", "zero", "six"], ["t"]),
         make("Div", ["t", "six"], ["d"]), make("Mul", ["i", "d"], ["p"]), make("Cast", ["p"], ["y"], to=TensorProto.FLOAT)],
        {"c": np.int64(3), "zero": np.int64(0), "six": np.int64(6)}, None,
    ),
    "gelu-of-another-root": (CHAIN := [*GATE, make("Mul", ["x", "a"], ["m"]), make("Mul", ["m", "half"], ["y"])],
                             GELU_WEIGHTS | {"root": np.float32(1.5)}, None),
    "norm-over-two-sets-of-axes": ([mean("x", "m", [1]), *layer_norm()[1:]], NORM_WEIGHTS,
                                   ["ReduceMean", "Sub", "RMSNormalization", "Add"]),
    "gate-of-another-value": ([make("Sigmoid", ["x"], ["s"]), make("Tanh", ["x"], ["t"]), make("Mul", ["s", "t"], ["y"])], {}, None),
}  # fmt: skip


@pytest.mark.parametrize("case", CHAINS)
def test_a_chain_becomes_one_node_with_equal_results(case):
    nodes, weights, wanted = CHAINS[case]
    x, data = rand(2, 6, 8), model(nodes, {"x": [2, 6, 8]}, {"y": [2, 6, 8]}, weights)
    session = nonnx.InferenceSession(data, device="cpu")
    np.testing.assert_allclose(session.run(None, {"x": x})[0], reference(data, {"x": x})[0], rtol=1e-4, atol=1e-5)
    kinds = [node.kind.removeprefix("netcl::") for node in session.model.nodes]
    assert kinds == (wanted or [node.op_type for node in nodes]) and sum(session.rewrites.values()) == bool(wanted)


def test_a_chain_with_a_value_that_is_read_elsewhere_is_left():
    nodes = [make("Sigmoid", ["x"], ["s"]), make("Mul", ["s", "x"], ["y"])]
    session = nonnx.InferenceSession(model(nodes, {"x": [3]}, {"y": [3], "s": [3]}), device="cpu")
    assert session.rewrites == {} and len(session.model.nodes) == 2


@pytest.mark.parametrize("bias", [True, False])
def test_batch_norms_fold_into_convolutions(bias, device):
    weights = {
        "w": rand(4, 2, 3, 3),
        "c": rand(4),
        "s": rand(4, seed=1),
        "b": rand(4, seed=2),
        "m": rand(4, seed=3),
        "v": rand(4, seed=4) ** 2,
    }
    weights = {name: x for name, x in weights.items() if bias or name != "c"}
    nodes = [
        make("Conv", ["x", "w", "c"] if bias else ["x", "w"], ["h"], group=2, strides=[2, 2]),
        make("BatchNormalization", ["h", "s", "b", "m", "v"], ["n"], epsilon=1e-3),
        make("Relu", ["n"], ["y"]),
    ]
    data, x = model(nodes, {"x": [2, 4, 7, 7]}, {"y": ["n", 4, "h", "w"]}, weights), rand(2, 4, 7, 7)
    session = nonnx.InferenceSession(data, device=device)
    assert [node.kind for node in session.model.nodes] == ["Conv", "Relu"] and len(list(session.model.parameters())) == 2
    for _ in range(3):
        np.testing.assert_allclose(session.run(None, {"x": x})[0], reference(data, {"x": x})[0], rtol=1e-4, atol=1e-5)


def test_constants_are_folded_and_random_nodes_are_not():
    nodes = [
        make("Transpose", ["w"], ["t"]), make("Neg", ["t"], ["n"]), make("MatMul", ["x", "n"], ["y"]),
        make("RandomNormalLike", ["w"], ["r"]), make("Identity", ["t"], ["u"]),
    ]  # fmt: skip
    outputs = {"y": [2, 4], "r": [4, 3], "u": [3, 4]}
    session = nonnx.InferenceSession(model(nodes, {"x": [2, 3]}, outputs, {"w": rand(4, 3)}), device="cpu")
    assert Counter(node.kind for node in session.model.nodes) == {"MatMul": 1, "RandomNormalLike": 1}
    y, first, u = session.run(None, {"x": rand(2, 3)})
    np.testing.assert_allclose(y, rand(2, 3) @ -rand(4, 3).T, rtol=1e-5, atol=1e-6)
    assert np.array_equal(u, rand(4, 3).T) and not np.array_equal(first, session.run(["r"], {"x": rand(2, 3)})[0])


def huge(kind, values):
    """A model with a constant of at least 2^28 elements."""
    names = [f"c{i}" for i in range(len(values))]
    weights = dict(zip(names, map(np.asarray, values), strict=True))
    nodes = [make(kind, names, ["big"]), make("Mul", ["x", "big"], ["y"])]
    return model(nodes, {"x": [1]}, {"y": ["n"] if kind == "Range" else ["n", "m"]}, weights)


@pytest.mark.fault(
    "constants of any size in a small ONNX file", "shapes, repeats, ranges and products of terabytes", "not computed when it is loaded"
)
@pytest.mark.parametrize(
    "kind, values",
    [
        ("ConstantOfShape", [[1 << 20, 1 << 20]]),
        ("Expand", [np.float32([[1]]), [1 << 20, 1 << 20]]),
        ("Tile", [np.float32([[1]]), [1 << 20, 1 << 20]]),
        ("Pad", [np.float32([[1]]), [1 << 20, 1 << 20, 0, 0]]),
        ("Range", [np.float32(0), np.float32(1 << 20), np.float32(2**-20)]),
        ("OneHot", [np.zeros(1 << 14, np.int64), 1 << 26, np.float32([0, 1])]),
        ("Add", [np.zeros((1 << 14, 1), np.float32), np.zeros((1, 1 << 14), np.float32)]),
        ("MatMul", [np.zeros((1 << 14, 1), np.float32), np.zeros((1, 1 << 14), np.float32)]),
    ],
)
def test_a_small_file_names_no_huge_constants(kind, values, monkeypatch):
    sizes = []
    keep = Tensor.__init__
    monkeypatch.setattr(Tensor, "__init__", lambda self, *a, **b: (keep(self, *a, **b), sizes.append(self.size))[0])
    session = nonnx.InferenceSession(huge(kind, values), device="cpu")
    assert session.rewrites["constants"] == 0 and [node.kind for node in session.model.nodes] == [kind, "Mul"]
    assert max(sizes) <= 1 << 14


def test_a_node_that_cannot_be_computed_is_named():
    for sizes, reason in (([1 << 31, 1 << 31], "array is too big|Unable to allocate|Maximum"), ([-1, 2], "negative dimensions")):
        with pytest.raises(ValueError, match=rf"\[ConstantOfShape\] the node cannot be computed: .*({reason}).*node=big"):
            nonnx.InferenceSession(huge("ConstantOfShape", [sizes]), device="cpu").run(None, {"x": rand(1)})


# ---- attention


def attention(before=(), then=(), shares=(), shape=(2, 3, 5, 8), mask=None, axis=-1, perm=(0, 1, 3, 2)):
    """Nodes from q, k, v and perhaps a mask to y, with others before the first product, behind it and behind the softmax; inputs."""
    side = [(*shape[:2], shape[3], 7)[perm.index(i)] for i in range(4)]  # of k, before it is transposed to (batch, heads, D, M)
    feed = {
        "q": rand(*shape),
        "k": rand(*side, seed=1),
        "v": rand(*shape[:2], 7, shape[3], seed=2),
        **({} if mask is None else {"m": mask}),
    }
    queries, keys = (before[0].output[0] if before else "q"), before[1].output[0] if before[1:] else "kt"
    nodes = [make("Transpose", ["k"], ["kt"], perm=list(perm)), *before, make("MatMul", [queries, keys], ["s"]), *then]
    nodes += [make("Softmax", [nodes[-1].output[0]], ["p"], axis=axis), *shares]
    weights = {"c": np.float32(0.5), "d": np.float32([3]), "zero": np.float32(0)}
    return [*nodes, make("MatMul", [nodes[-1].output[0], "v"], ["y"])], {name: [None] * x.ndim for name, x in feed.items()}, weights, feed


SCALED, ADDED = [make("Mul", ["c", "q"], ["qs"]), make("Mul", ["kt", "c"], ["ks"])], make("Add", ["m", "s"], ["t"])
PADDED = np.where(rand(2, 1, 1, 7, seed=4) > 0, 0, -1e9).astype(np.float32)
CAUSAL = np.where(np.arange(5)[:, None] > np.arange(7), 0, -np.inf).astype(np.float32)  # the first row has no key
ATTENTIONS = {
    "BERT": attention(then=[make("Div", ["s", "d"], ["t"]), make("Add", ["t", "m"], ["u"])], mask=PADDED, perm=(0, 2, 3, 1)),
    "torch": attention(SCALED, [ADDED], mask=rand(5, 7)),
    "torch, a row without keys": attention(
        SCALED, [ADDED], [make("IsNaN", ["p"], ["nan"]), make("Where", ["nan", "zero", "p"], ["share"])], mask=CAUSAL
    ),
    "a row without keys": attention(SCALED, [ADDED], mask=CAUSAL),
    "ViT": attention(then=[make("Mul", ["s", "c"], ["t"])]),
    "queries over a number": attention([make("Div", ["q", "d"], ["qs"])]),
    "large heads": attention(shape=(1, 1, 2, 300)),
    "softmax over queries": attention(axis=2),
    "mask with a batch": attention(then=[ADDED], shape=(1, 3, 5, 8), mask=rand(2, 1, 5, 7)),
}


@pytest.mark.parametrize("case", ATTENTIONS)
def test_attention_of_exporters_becomes_one_node(case, device):
    nodes, inputs, weights, feed = ATTENTIONS[case]
    data = model(nodes, inputs, {"y": [None] * 4}, weights)
    session = nonnx.InferenceSession(data, device=device)
    assert session.rewrites["Attention"] == 1
    assert [node.kind for node in session.model.nodes if node.inputs != ["m"]] == ["netcl::Attention"]  # another may change the mask
    for _ in range(3):
        np.testing.assert_allclose(session.run(None, feed)[0], reference(data, feed)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["s", "p"])
def test_attention_whose_scores_are_read_elsewhere_is_left(name):
    nodes, inputs, weights, feed = ATTENTIONS["queries over a number"]
    data = model([*nodes, make("Exp", [name], ["e"])], inputs, {"y": [None] * 4, "e": [None] * 4}, weights)
    session = nonnx.InferenceSession(data, device="cpu")
    assert "Attention" not in session.rewrites
    for a, b in zip(session.run(None, feed), reference(data, feed), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


# ---- the command


def command(capsys, *words) -> tuple[int, str, str]:
    status = cli.main(["onnx", *map(str, words)])
    return status, *capsys.readouterr()


def test_info_lists_what_a_file_holds(capsys, tmp_path):
    (tmp_path / "m.onnx").write_bytes(mlp())
    status, text, _ = command(capsys, "info", tmp_path / "m.onnx")
    assert status == 0
    for words in ("input x tensor(float) ['batch', 3]", "output z tensor(float) ['batch', 4]", "opsets ai.onnx 17", "parameters 16",
                  "MatMul 1", "nodes 4"):  # fmt: skip
        assert words in " ".join(text.split())


def test_info_counts_operations(capsys, tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(conv_chain([], [make("Relu", ["b"], ["y"])]))
    code, out, _ = command(capsys, "info", str(path))
    assert code == 0 and [line.split() for line in out.splitlines() if line.startswith(("Conv ", "Relu "))] == [
        ["Conv", "1", f"{2 * 2 * 4 * 6 * 6 * 27:,}"], ["Relu", "1", "288"]
    ]  # fmt: skip
    assert f"{2 * 2 * 4 * 6 * 6 * 27 + 288:,} FLOPs" in out
    path.write_bytes(mlp())
    code, out, _ = command(capsys, "info", str(path), "--size", "batch=5")
    assert "MatMul" in out and f"{2 * 5 * 4 * 3}" in out


def test_outputs_are_written_to_the_given_path_under_any_name(capsys, tmp_path):
    outputs = [helper.make_tensor_value_info("file", 1, [2]), helper.make_tensor_value_info("/b", 16, [2])]
    nodes = [make("Relu", ["x"], ["file"]), make("Cast", ["x"], ["/b"], to=16)]  # to bfloat16, which NumPy's files lack
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", 1, [2])], outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    np.savez(tmp_path / "x.npz", x=np.float32([1.5, -2.0]))
    words = ["run", tmp_path / "m.onnx", "--inputs", tmp_path / "x.npz", "--out", tmp_path / "results", "--device", "cpu"]
    assert command(capsys, *words)[0] == 0
    with np.load(tmp_path / "results") as held:
        assert {name: held[name].tolist() for name in held} == {"file": [1.5, 0.0], "/b": [1.5, -2.0]}
    status, _, told = command(capsys, *words, "--size", "batch=2")
    assert status == 1 and "--size must not be given with --inputs" in told


@pytest.mark.parametrize("action", ["info", "bench"])
def test_a_size_of_no_dimension_is_refused(capsys, tmp_path, action):
    (tmp_path / "m.onnx").write_bytes(mlp())
    status, _, told = command(capsys, action, tmp_path / "m.onnx", "--size", "bath=5", "--device", "cpu")
    assert status == 1 and "--size must name a symbolic dimension of an input; names=['bath'], known=['batch']" in told


def test_info_names_operators_that_are_not_supported(capsys, tmp_path):
    node = make("Strange", ["x"], ["y"], domain="somewhere")
    graph = helper.make_graph([node], "g", [helper.make_tensor_value_info("x", 1, [2])], [helper.make_tensor_value_info("y", 1, [2])])
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("somewhere", 1)]
    (tmp_path / "m.onnx").write_bytes(helper.make_model(graph, opset_imports=imports, ir_version=9).SerializeToString())
    status, text, _ = command(capsys, "info", tmp_path / "m.onnx")
    assert status == 1 and "somewhere::Strange (1)" in text


def test_check_compares_with_onnxruntime(capsys):
    status, text, _ = command(capsys, "check", GOLDEN / "encoder.onnx", "--device", "cpu", "--size", "batch=3")
    assert status == 0 and "relative difference from onnxruntime" in text and text.endswith("equal\n")
    assert command(capsys, "check", GOLDEN / "encoder.onnx", "--device", "cpu", "--tolerance", "0")[0] == 1


def test_run_reads_and_writes_arrays(capsys, tmp_path):
    held = np.load(GOLDEN / "cnn.npz")
    np.savez(tmp_path / "in.npz", x=held["x"])
    words = ("run", GOLDEN / "cnn.onnx", "--device", "cpu", "--inputs", tmp_path / "in.npz", "--out", tmp_path / "out.npz")
    assert command(capsys, *words)[0] == 0
    ((_, y),) = np.load(tmp_path / "out.npz").items()
    np.testing.assert_allclose(y, held["y"], rtol=1e-4, atol=1e-5)


def test_bench_shows_every_node(capsys, tmp_path):
    (tmp_path / "m.onnx").write_bytes(mlp())
    status, text, _ = command(capsys, "bench", tmp_path / "m.onnx", "--device", "cpu", "--runs", "1")
    assert status == 0 and all(word in text for word in ("netcl", "onnxruntime", "MatMul", "Relu", "Sigmoid"))


def test_mistakes_on_the_command_line_are_told_in_a_line(capsys, tmp_path):
    (tmp_path / "m.onnx").write_bytes(b"no model")
    for words in (["info", tmp_path / "m.onnx"], ["run", GOLDEN / "cnn.onnx", "--size", "batch"], ["check", tmp_path / "none.onnx"]):
        status, out, told = command(capsys, *words, "--device", "cpu")
        assert status == 1 and out == "" and told.startswith("[") and told.count("\n") == 1


# ---- neighbors of convolutions, constant commands, weights that change


def conv_chain(before: list, after: list, pads=(0, 0, 0, 0), weights=None, kind="Conv", opset=17) -> bytes:
    """A convolution between chains from ``x`` to ``a`` and from ``b`` to ``y``."""
    held = {"w": rand(4, 3, 3, 3) if kind == "Conv" else rand(3, 4, 3, 3), "u": rand(4, seed=1), **(weights or {})}
    nodes = [*before, make(kind, ["a" if before else "x", "w", "u"], ["b"], pads=list(pads)), *after]
    return model(nodes, {"x": [2, 3, 8, 8]}, {"y": [None] * 4}, held, opset)


ONE, CHANNELS = np.float32([1.5]), rand(1, 4, 1, 1, seed=2)
NEIGHBORS = {
    "factor": (conv_chain([], [make("Mul", ["c", "b"], ["y"])], weights={"c": CHANNELS}), {"Conv + affine": 1}),
    "factor and sum": (
        conv_chain([], [make("Mul", ["b", "c"], ["s"]), make("Add", ["d", "s"], ["y"])], weights={"c": CHANNELS, "d": ONE}),
        {"Conv + affine": 2},
    ),
    "sum after a transposed one": (
        conv_chain([], [make("Add", ["b", "c"], ["y"])], weights={"c": CHANNELS}, kind="ConvTranspose"),
        {"Conv + affine": 1},
    ),
    "by width": (conv_chain([], [make("Mul", ["b", "c"], ["y"])], weights={"c": rand(6, seed=3)}), {}),
    "before": (
        conv_chain(
            [make("Mul", ["c", "x"], ["s"]), make("Add", ["s", "d"], ["a"])], [make("Relu", ["b"], ["y"])], weights={"c": ONE, "d": ONE}
        ),
        {"affine + Conv": 2},
    ),
    "sum before padding": (
        conv_chain([make("Add", ["x", "c"], ["a"])], [make("Relu", ["b"], ["y"])], pads=(1, 1, 1, 1), weights={"c": ONE}),
        {},
    ),
    "hard swish": (
        conv_chain(
            [],
            [make("Add", ["b", "three"], ["s"]), make("Clip", ["s", "zero", "six"], ["t"]), make("Mul", ["b", "t"], ["m"]),
             make("Div", ["m", "last"], ["y"])],
            weights={"three": np.float32(3), "zero": np.float32(0), "six": np.float32(6), "last": np.float32([6])},
        ),
        {"HardSwish": 1},
    ),
    "relu6": (conv_chain([], [make("Clip", ["b", "zero", "six"], ["y"])], weights={"zero": np.float32(0), "six": np.float32(6)}), {}),
    "relu6 of a maximum": (
        conv_chain(
            [],
            [make("Max", ["zero", "b"], ["m"]), make("Min", ["m", "six"], ["y"])],
            weights={"zero": np.float32(0), "six": np.float32(6)},
        ),
        {"Relu6": 1},
    ),
    "weights named as those of the result, and used again": (
        conv_chain([make("Mul", ["x", "c"], ["a"])], [make("Conv", ["x", "w", "b.bias"], ["d"]), make("Add", ["b", "d"], ["y"])],
                   weights={"c": ONE, "b.bias": rand(4, seed=6)}),
        {"affine + Conv": 1},
    ),
    "hard sigmoid": (conv_chain([], [make("HardSigmoid", ["b"], ["y"], alpha=1 / 6)]), {}),
}  # fmt: skip


@pytest.mark.parametrize("case", NEIGHBORS)
def test_convolutions_take_their_neighbors(case, device):
    data, wanted = NEIGHBORS[case]
    session = nonnx.InferenceSession(data, device=device)
    assert session.rewrites == wanted
    x = rand(2, 3, 8, 8, seed=5)
    for _ in range(3):
        np.testing.assert_allclose(session.run(None, {"x": x})[0], reference(data, {"x": x})[0], rtol=1e-4, atol=1e-4)
    if not isinstance(device.queue, CPUQueue) and case in ("hard swish", "relu6", "relu6 of a maximum", "hard sigmoid"):
        (graph,) = session._plans.values()
        assert sum(node.kind == "launch" for node in graph.nodes) == 1


def test_a_number_with_an_axis_adds_it_to_the_result():
    nodes = [make("Add", ["x", "c"], ["s"]), make("Clip", ["s", "zero", "six"], ["t"]), make("Mul", ["x", "t"], ["m"]),
             make("Div", ["m", "six"], ["y"])]  # fmt: skip
    weights = {"c": np.float32([3]), "zero": np.float32(0), "six": np.float32(6)}
    data = model(nodes, {"x": []}, {"y": [1]}, weights)
    session = nonnx.InferenceSession(data, device="cpu")
    (y,) = session.run(None, {"x": np.float32(1)})
    assert session.rewrites == {"HardSwish": 1} and y.shape == (1,) and np.allclose(y, 4 / 6)


def lstm() -> bytes:
    nodes = [make("LSTM", ["x", "w", "r", "b"], ["y"], hidden_size=4)]
    weights = {"w": rand(1, 16, 3, seed=1), "r": rand(1, 16, 4, seed=2), "b": rand(1, 32, seed=3)}
    return model(nodes, {"x": [5, "n", 3]}, {"y": [5, 1, "n", 4]}, weights)


def test_commands_over_weights_run_once_and_are_shared(cl_device):
    session = nonnx.InferenceSession(lstm(), device=cl_device)
    for batch in (2, 3):
        for seed in range(3):
            x = rand(5, batch, 3, seed=seed)
            np.testing.assert_allclose(session.run(None, {"x": x})[0], reference(lstm(), {"x": x})[0], rtol=1e-4, atol=1e-5)
    graphs = list(session._plans.values())
    assert [len(graph._folded.nodes) > 0 for graph in graphs] == [True, True]
    assert {*graphs[0]._folded.results.values()} & {*graphs[1]._folded.results.values()}
    assert all(node.op not in ("split", "joined") or {*node.reads} & {*graph.inputs} or node.reads[0].kind == "made"
               for graph in graphs for node in graph.nodes)  # fmt: skip


def during_the_next_run(monkeypatch, function) -> None:
    """Call ``function`` in another thread, at the end of the next replay."""
    run, calls = Graph.run, [function]

    def replayed(self, inputs):
        made = run(self, inputs)
        while calls:
            thread = threading.Thread(target=calls.pop())
            thread.start()
            thread.join()
        return made

    monkeypatch.setattr(Graph, "run", replayed)


@pytest.mark.parametrize("how", ["written", "written by a thread during a run", "assigned", "replaced"])
def test_a_changed_weight_is_recorded_again(how, device, monkeypatch):
    if isinstance(device.queue, CPUQueue) and "run" in how:
        pytest.skip("nothing is replayed on NumPy")
    data = lstm()
    session, x = nonnx.InferenceSession(data, device=device), rand(5, 2, 3)
    before = [session.run(None, {"x": x})[0] for _ in range(3)][-1]
    new = rand(1, 16, 3, seed=9)
    if how == "written":
        session.model.w.write(new)
    elif how == "written by a thread during a run":
        during_the_next_run(monkeypatch, lambda: session.model.w.write(new))
        assert np.array_equal(session.run(None, {"x": x})[0], before)
    elif how == "assigned":
        session.model.load_state_dict({"w": Tensor.from_host(session.model.queue, new)}, strict=False, assign=True)
    else:
        session.model.w = netcl.nn.Parameter(Tensor.from_host(session.model.queue, new))
    changed = onnx.load_from_string(data)
    changed.graph.initializer[0].CopyFrom(numpy_helper.from_array(new, "w"))
    (wanted,) = reference(changed.SerializeToString(), {"x": x})
    assert np.abs(wanted - before).max() > 1e-2
    for _ in range(3):
        np.testing.assert_allclose(session.run(None, {"x": x})[0], wanted, rtol=1e-4, atol=1e-5)


def test_a_removed_weight_is_named():
    session = nonnx.InferenceSession(lstm(), device="cpu")
    session.model.w = None
    with pytest.raises(ValueError, match="weights of the graph must not be removed"):
        session.run(None, {"x": rand(5, 2, 3)})


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_number_that_chooses_a_branch_is_part_of_the_key(device, shape):
    def branch(factor):
        nodes = [make("Mul", ["x", "f"], ["out"])]
        out = helper.make_tensor_value_info("out", TensorProto.FLOAT, [3])
        return helper.make_graph(nodes, "branch", [], [out], [numpy_helper.from_array(np.float32(factor), "f")])

    nodes = [make("Equal", ["n", "two"], ["is"]), make("If", ["is"], ["y"], then_branch=branch(2), else_branch=branch(5))]
    data = model(nodes, {"x": [3], "n": (TensorProto.INT64, [*shape])}, {"y": [3]}, {"two": np.int64(2)})
    session, x = nonnx.InferenceSession(data, device=device), rand(3)
    for n in (2, 2, 2, 2, 7, 7, 7, 2, 7):
        assert np.allclose(session.run(None, {"x": x, "n": np.full(shape, n)})[0], x * (2 if n == 2 else 5))
    assert [*session.plans.values()] == ([] if isinstance(device.queue, CPUQueue) else ["replay"])
    assert isinstance(device.queue, CPUQueue) or [*map(type, session._plans.values())] == [Graph] * 2


# ---- large models

SLICED = """
import re, sys
from pathlib import Path
import numpy as np
import netcl.onnx

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024

before = peak()
session = netcl.onnx.InferenceSession(sys.argv[1], device="cpu")
print(session.run(None, {"x": np.ones((2, 1000), np.float32)})[0].tolist() == [[2.0] * 1000, [9.0] * 1000], peak() - before < 500)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of the process from /proc")
def test_weights_of_more_than_two_gigabytes_are_mapped(tmp_path):
    """A slice of a table and a weight behind it are read, and only these: 2.2 GB were copied here."""
    rows, row = 550_000, np.ones(1000, np.float32)
    with open(tmp_path / "w.bin", "wb") as file:  # sparse: holes take no room
        file.seek((rows - 1) * row.nbytes)
        file.write((7 * row).tobytes() + row.tobytes())
    if os.stat(tmp_path / "w.bin").st_blocks * 512 > 1 << 24:
        pytest.skip("the file system has no sparse files")
    numbers = {"start": [rows - 2], "end": [rows], "axis": [0]}
    nodes = [make("Slice", ["table", *numbers], ["rows"]), make("Add", ["x", "rows"], ["h"]), make("Add", ["h", "small"], ["y"])]
    made = onnx.load_from_string(model([make("Identity", ["x"], ["y"])], {"x": [2, 1000]}, {"y": [2, 1000]}, numbers))
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    for name, dims, place in (("table", [rows, 1000], 0), ("small", [1000], rows * row.nbytes)):
        weight = made.graph.initializer.add(name=name, dims=dims, data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
        for key, value in {"location": "w.bin", "offset": place}.items():
            weight.external_data.add(key=key, value=str(value))
    (tmp_path / "m.onnx").write_bytes(made.SerializeToString())
    done = subprocess.run([sys.executable, "-c", SLICED, str(tmp_path / "m.onnx")], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["True", "True"]), done.stderr[-2000:]
