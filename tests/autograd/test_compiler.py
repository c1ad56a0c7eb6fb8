"""jit_compile and the fusion of plain eager code: the numbers of the plain function, in few kernels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import netcl.autograd as ag
from netcl import ops, selftest
from netcl.core.device import manager
from netcl.core.errors import OutOfMemoryError
from netcl.core.hooks import hooks
from netcl.core.kernels import program
from netcl.core.tensor import Tensor
from netcl.engine import lazy_graph, rows, schedule
from netcl.engine.registry import REGISTRY, Choice, Pointwise
from netcl.ops import pending_products
from tests.conftest import eager_fusion

ROWS = sorted(name for name, row in REGISTRY.items() if not isinstance(row, Choice) and row.ref is not None)
POINTWISE = [name for name in ROWS if isinstance(REGISTRY[name], Pointwise)]


def flat(value):
    return [t for part in value for t in flat(part)] if isinstance(value, (tuple, list)) else [value]


def is_float(t) -> bool:
    return isinstance(t, Tensor) and "float" in t.dtype


def both_ways(function, inputs):
    """Values and gradients of a function of tensors (or lists of them), as arrays."""
    outputs = flat(function(*inputs))
    leaves = [t for t in flat(list(inputs)) if isinstance(t, Tensor) and t.requires_grad]
    roots = [t for t in outputs if t.requires_grad]
    values = [t.to_host() for t in outputs]
    if roots:
        rng = np.random.default_rng(5)
        given = [Tensor.from_host(t.queue, rng.uniform(0.5, 1.5, t.shape).astype(np.float32), t.dtype) for t in roots]
        values += [None if g is None else g.to_host() for g in ag.grad(roots, leaves, given, allow_unused=True)]
    return values


def compare(plain, fused, exact, note=""):
    assert len(plain) == len(fused)
    for want, got in zip(plain, fused, strict=True):
        assert (want is None) == (got is None), note
        if want is None:
            continue
        assert want.shape == got.shape and want.dtype == got.dtype, note
        if exact:
            np.testing.assert_array_equal(got, want, err_msg=note)
        else:
            scale = max(1.0, float(np.max(np.abs(want[np.isfinite(want)]), initial=0.0))) if want.dtype.kind == "f" else 1.0
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * scale, err_msg=note)


# ---- the op table


def in_a_chain(name, kwargs):
    """The op between formulas: its float inputs are results, its float results are read on."""

    def function(*inputs):
        before = [[x * 1.0 if is_float(x) else x for x in flat(part)] if isinstance(part, list) else part for part in inputs]
        before = [x * 1.0 if is_float(x) else x for x in before]
        return [ag.tanh(out) * 0.5 + 1.0 if is_float(out) else out for out in flat(getattr(ag, name)(*before, **kwargs))]

    return function


def sent(value, handle):
    if isinstance(value, list):
        return [sent(part, handle) for part in value]
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.kind != "f":
        return Tensor.from_host(handle.queue, value)
    return Tensor.from_host(handle.queue, value, "float32", requires_grad=True)


@pytest.mark.parametrize("name", ROWS)
def test_every_row_inside_a_chain(name):
    """On NumPy, where nothing is compiled: forward and backward, bit for bit where no fold changes its order."""
    handle = manager.default("cpu")
    sizes = (33, 257) if isinstance(REGISTRY[name], Pointwise) else selftest.TESTED_SIZES
    for case in selftest.cases(REGISTRY[name], "float32", sizes):
        function = in_a_chain(name, case.kwargs)
        plain, fused = (both_ways(f, [sent(x, handle) for x in case.inputs]) for f in (function, ag.jit_compile(function)))
        compare(plain, fused, name in POINTWISE and case.inputs[0].ndim == 1, f"{name} {case.label}")


def _groups():
    chosen = [name for name in POINTWISE if REGISTRY[name].arity == 1]
    for k in range(0, len(chosen), 6):
        yield pytest.param(chosen[k : k + 6], id=f"{chosen[k]}..", marks=() if k == 12 else pytest.mark.matrix)


@pytest.mark.parametrize("names", list(_groups()))
def test_many_rows_in_one_kernel(names, cl_device):
    """On a device: six rows side by side in one kernel, forward and backward, bit for bit what their own kernels give."""
    cases = [next(iter(selftest.cases(REGISTRY[name], "float32", (257,)))) for name in names]

    def function(*inputs):
        return [getattr(ag, name)(x * 1.0, **case.kwargs) for name, case, x in zip(names, cases, inputs, strict=True)]

    inputs = [[Tensor.from_host(cl_device.queue, case.inputs[0], requires_grad=True) for case in cases] for _ in range(2)]
    compare(both_ways(function, inputs[0]), both_ways(ag.jit_compile(function), inputs[1]), True)


# ---- random graphs

UNARY = {
    "tanh": ag.tanh, "sigmoid": ag.sigmoid, "sin": ag.sin, "halved": lambda x: x * 0.5, "from two": lambda x: 2.0 - x, "relu": ag.relu,
    "half and back": lambda x: x.to("float16").to("float32"), "sign": lambda x: ag.where(x > 0.1, x, -x), "abs": ag.abs,
    "turned": lambda x: ag.permute(ag.permute(x, (1, 0)) * 2.0, (1, 0)) * 0.5,
}  # fmt: skip
BINARY = {
    "add": lambda a, b: (a + b) * 0.5, "sub": lambda a, b: a - b * 0.25, "mul": lambda a, b: ag.tanh(a) * b, "max": ag.maximum,
    "div": lambda a, b: a / (b * b + 1.0), "where": lambda a, b: ag.where(ag.logical_and(a > 0.1, b < 0.5), a, b),
    "lerp": lambda a, b: ag.lerp(a, b, 0.3),
}  # fmt: skip
step = st.tuples(st.sampled_from([*UNARY, *BINARY]), st.integers(0, 1000), st.integers(0, 1000))
graphs = given(steps=st.lists(step, min_size=10, max_size=40), seed=st.integers(0, 2**16))
quiet = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True, "database": None}


def graph_of(steps):
    def function(*leaves):
        values = list(leaves)
        for name, i, j in steps:
            a, b = values[i % len(values)], values[j % len(values)]
            values.append(UNARY[name](a) if name in UNARY else BINARY[name](a, b))
        return values[-1], values[len(values) // 2]

    return function


def check_graph(queue, steps, seed, fuse):
    rng = np.random.default_rng(seed)
    arrays = [rng.uniform(-1, 1, shape).astype(np.float32) for shape in ((5, 33), (1, 33), (5, 1))]

    def leaves():
        return [ag.tensor(a, requires_grad=True, queue=queue) for a in arrays]

    function = graph_of(steps)
    with eager_fusion(0):
        plain = both_ways(function, leaves())
    fused = fuse(function, leaves())
    compare(plain[:2], fused[:2], True)
    compare(plain, fused, False)  # gradients of broadcast leaves are sums, in an order of their own


@settings(max_examples=40, **quiet)
@graphs
def test_random_graphs_on_numpy(steps, seed):
    check_graph(manager.default("cpu").queue, steps, seed, lambda function, leaves: both_ways(ag.jit_compile(function), leaves))


CHANGES = {
    "set": lambda a: a.__setitem__(0, 0.25),
    "added to": lambda a: ops.add(a, 0.5, out=a),
    "through a view": lambda a: a.reshape(-1).fill_(0.75),
}  # fmt: skip
FOLDS = {"from the largest": lambda x: ag.amax(x, axis=1, keepdims=True) - x}  # in whatever order, bit for bit the same


def changing_graph_of(steps):
    """Of values without gradients: some are changed in place while others still wait for them, some are dropped."""

    def function(*leaves):
        values = list(leaves)
        for name, i, j in steps:
            a, b = values[i % len(values)], values[j % len(values)]
            if name == "dropped":
                values = values if a is values[0] else [x for x in values if x is not a]
            elif name in CHANGES:
                CHANGES[name](a)
            else:
                made = {**UNARY, **FOLDS}.get(name)
                values.append(made(a) if made else BINARY[name](a, b))
        return values

    return function


@settings(max_examples=60, **quiet)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from([*UNARY, *BINARY, *3 * [*CHANGES, *FOLDS, "dropped"]]),
            st.integers(0, 1000), st.integers(0, 1000)),
        min_size=10, max_size=40,
    ),
    seed=st.integers(0, 2**16),
)  # fmt: skip
def test_random_graphs_over_values_that_change(steps, seed):
    rng = np.random.default_rng(seed)
    arrays = [rng.uniform(-1, 1, shape).astype(np.float32) for shape in ((5, 33), (1, 33), (5, 1))]
    function, queue = changing_graph_of(steps), manager.default("cpu").queue
    plain, fused = (both_ways(f, [ag.tensor(a, queue=queue) for a in arrays]) for f in (function, ag.jit_compile(function)))
    compare(plain, fused, True)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["compiled", "eager"])
def test_random_graphs_on_a_device(how, cl_device, full):
    def fuse(function, leaves):
        if how == "compiled":
            return both_ways(ag.jit_compile(function), leaves)
        with eager_fusion(1):
            return both_ways(function, leaves)

    settings(max_examples=30 if full else 2, **quiet)(graphs(lambda steps, seed: check_graph(cl_device.queue, steps, seed, fuse)))()


# ---- how many kernels


class Launches:
    """Counts the kernels that are launched while it listens."""

    def __enter__(self):
        self.names = []
        hooks.launch_observers.append(self)
        return self

    def __call__(self, kernel, *rest):
        self.names.append(kernel.name)

    def __exit__(self, *exc):
        hooks.launch_observers.remove(self)


def chain(a, b, c):
    return ag.relu(a * b + c) * 0.5 + a


@pytest.mark.parametrize("how", ["compiled", "eager"])
def test_the_chain_is_one_kernel(how, cl_device):
    queue = cl_device.queue
    a, b, c = (Tensor.rand(1 << 16, queue=queue) for _ in range(3))
    with eager_fusion(0):
        plain = chain(a, b, c).to_host()
    function = ag.jit_compile(chain) if how == "compiled" else chain
    with eager_fusion(1 << 12), Launches() as seen:  # on GPUs from 16 times as many elements on
        fused = function(a, b, c).to_host()
        assert seen.names == ["op_mul_add_relu_mul_add"]
    np.testing.assert_array_equal(fused, plain)


def _ways(loss, *tensors):
    with Launches() as forward:
        out = loss(*tensors)
    with Launches() as backward:
        ag.backward(out, Tensor.ones(out.shape, queue=out.queue))
    return len(forward.names), len(backward.names)


@pytest.mark.parametrize("what", ["layer_norm", "softmax", "cross_entropy"])
def test_rows_take_two_kernels_each_way(what, cl_device, rng):
    queue = cl_device.queue
    x, w, b = (ag.tensor(rng.normal(size=s).astype(np.float32), requires_grad=True, queue=queue) for s in ((65, 40), (40,), (40,)))
    labels = Tensor.from_host(queue, rng.integers(0, 40, 65))
    forms = {
        "layer_norm": lambda x: ag.layer_norm(x, 40, w, b),
        "softmax": lambda x: ag.softmax(x * 2.0 + 1.0),
        "cross_entropy": lambda x: ag.cross_entropy(x, labels),
    }
    forward, backward = _ways(ag.jit_compile(forms[what]), x)
    assert forward <= 2 and backward <= 2


@pytest.mark.parametrize("spread", [rows.Spread(64, 64, 1, 1), rows.Spread(64, 1, 1, 1)], ids=["a group per row", "an item per row"])
def test_rows_as_gpus_share_them(spread, cl_device, unoptimized, rng, monkeypatch):
    """Kernels for GPUs, run on whatever device there is."""
    queue = cl_device.queue
    x, w, b = (ag.tensor(rng.normal(size=s).astype(np.float32), requires_grad=True, queue=queue) for s in ((37, 70), (70,), (70,)))

    def function(x, w, b):
        return ag.softmax(ag.layer_norm(x, 70, w, b))

    plain = both_ways(function, (x, w, b))
    monkeypatch.setattr(rows, "row_spread", lambda *rest: spread)
    program.forget("row plans")
    try:
        compare(plain, both_ways(ag.jit_compile(function), (x, w, b)), False)
    finally:
        program.forget("row plans")


def test_a_new_shape_and_a_new_number_use_the_kernel_there_is(cl_device):
    @ag.jit_compile
    def function(x, scale):
        return ag.softmax(x * scale)

    function(Tensor.rand(7, 48, queue=cl_device.queue), 2.0).to_host()  # waits for a program that another process builds
    before = program.build_count()
    for shape, scale in (((31, 48), 2.0), ((5, 96), 3.0)):
        x = Tensor.rand(*shape, queue=cl_device.queue)
        e = np.exp(x.to_host() * scale)
        np.testing.assert_allclose(function(x, scale).to_host(), e / e.sum(-1, keepdims=True), rtol=1e-5, atol=1e-6)
    assert program.build_count() == before


# ---- what a function may do


def test_python_may_look_at_values_and_call_any_op(device, rng):
    @ag.jit_compile
    def function(x, *, sign=1.0):
        y = ag.tanh(x) * sign
        if float(ag.sum(y)) > 0:
            return {"a": ag.matmul(y, ag.transpose(y)) + 1.0, "b": [y, None]}
        return {"a": y, "b": []}

    x = ag.tensor(np.abs(rng.normal(size=(4, 6))).astype(np.float32), queue=device.queue)
    y = np.tanh(x.to_host())
    got = function(x)
    np.testing.assert_allclose(got["a"].to_host(), y @ y.T + 1, rtol=1e-5)
    np.testing.assert_allclose(got["b"][0].to_host(), y, rtol=1e-6)
    np.testing.assert_allclose(function(x, sign=-1.0)["a"].to_host(), -y, rtol=1e-6)


def test_methods_and_nested_functions_compile(device):
    class Layer:
        scale = 3.0

        @ag.jit_compile
        def forward(self, x):
            return inner(x) * self.scale

    @ag.jit_compile
    def inner(x):
        return x + 1.0

    x = ag.tensor([1.0, 2.0], queue=device.queue)
    layer = Layer()
    assert layer.forward(x).tolist() == [6.0, 9.0]
    layer.scale = 2.0  # nothing of a call is remembered but its kernels
    assert layer.forward(x).tolist() == [4.0, 6.0]


def test_objects_compile_whatever_they_are_called(device):
    class Twice:
        def __init__(self):
            self.function = self.source = None  # names a compiled function has, too

        def __call__(self, x):
            return x * 2.0

    class Model:
        act = ag.jit_compile(Twice())  # an object, unlike a function, is no method of the class it lies in

    x = ag.tensor([1.0], queue=device.queue)
    assert Model().act(x).tolist() == Model.act(x).tolist() == [2.0] and Model.act.source(x)
    assert ag.jit_compile(ag.jit_compile(Twice()), fast_math=True).fast_math


def test_results_have_memory_of_their_own(device):
    @ag.jit_compile
    def function(x):
        y = x + 1
        return y, ag.floor(y)  # of integers the same

    y, same = function(ag.tensor(np.arange(3, dtype=np.int32), queue=device.queue))
    same.fill_(7)
    assert y.tolist() == [1, 2, 3]


def test_second_derivatives_go_through(device, rng):
    x = ag.tensor(rng.normal(size=(3, 4)).astype(np.float32), requires_grad=True, queue=device.queue)

    def twice(function):
        (first,) = ag.grad(function(x), x, create_graph=True)
        (second,) = ag.grad(ag.sum(first * first), x)
        return second.to_host()

    def function(x):
        return ag.sum(ag.tanh(x) * x)

    np.testing.assert_allclose(twice(ag.jit_compile(function)), twice(function), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("change", ["write", "fill", "setitem", "out", "update"])
def test_a_changed_input_does_not_change_what_was_asked_before(change, device, rng):
    """Deferred values see their inputs as they were when the op was called."""
    values = rng.normal(size=8).astype(np.float32)
    x = ag.tensor(values, queue=device.queue)

    def touch():
        if change == "write":
            x.write(np.zeros(8, np.float32))
        elif change == "fill":
            x.fill_(0.0)
        elif change == "setitem":
            x[2:5] = 7.0
        elif change == "out":
            ops.add(x, 1.0, out=x)
        else:
            ops.masked_fill(x, x > 0, 1.0)
            x[0] = -1.0

    with eager_fusion(1):
        later = x * 2.0 + 1.0
        touch()
        np.testing.assert_array_equal(later.to_host(), values * 2 + 1)

    x.write(values)

    @ag.jit_compile
    def function(x):
        later = x * 2.0 + 1.0
        touch()
        return later

    np.testing.assert_array_equal(function(x).to_host(), values * 2 + 1)


def test_a_value_meets_a_fold_of_itself_under_another_shape(device):
    """It cannot be joined there, and computing it must not ask for what waits for it."""

    def function(x):
        y = ag.tanh(x)
        return ag.sum(y * 2.0, axis=-1) + y.reshape(3)

    x = ag.tensor([[0.5], [1.0], [2.0]], queue=device.queue)
    np.testing.assert_allclose(ag.jit_compile(function)(x).to_host(), 3.0 * np.tanh([0.5, 1.0, 2.0]), rtol=1e-6)
    one = ag.tensor([[1.0]], queue=device.queue)  # of more axes than what is folded
    centred = ag.jit_compile(lambda x: (y := (x - one).reshape(3)) - ag.mean(y, axis=-1, keepdims=True))
    np.testing.assert_allclose(centred(x).to_host(), np.array([0.5, 1.0, 2.0]) - 3.5 / 3, rtol=1e-5)


def test_values_that_are_kept_are_right_however_they_are_asked_for(cl_device, rng):
    """Views, copies, repeated reads and values between are the same as without fusion."""
    x = ag.tensor(rng.normal(size=(6, 5)).astype(np.float32), requires_grad=True, queue=cl_device.queue)

    def results():
        h = x * 2.0
        y = ag.exp(h) + 1.0
        view, copy = y.reshape(30), y.clone()
        z = y * h
        first = [t.to_host() for t in (z, view, copy, h)]
        again = (h + y).to_host()
        y[0] = 0.0  # a view shares memory, a copy does not
        return [*first, again, view.to_host(), copy.to_host(), y.detach().to_host()]

    with ag.no_grad():
        with eager_fusion(0):
            plain = results()
        with eager_fusion(1):
            fused = results()
    compare(plain, fused, True)


def test_long_chains_are_cut(cl_device):
    x = Tensor.ones((4,), queue=cl_device.queue)
    with eager_fusion(1):
        y = x
        for _ in range(120):
            y = y + 1.0
        assert y.to_host().tolist() == [121.0] * 4
        assert y.source.weight <= schedule.MOST_NODES


@pytest.mark.parametrize("limit", ["MOST_WAITING", "MOST_HELD"])
def test_what_waits_is_bounded(limit, cl_device, monkeypatch):
    x = Tensor.ones((64,), queue=cl_device.queue)
    ops.add(x, 1.0).to_host()
    lazy_graph.flush()
    monkeypatch.setattr(lazy_graph, limit, 8 if limit == "MOST_WAITING" else 8 * x.nbytes)
    monkeypatch.setattr(lazy_graph, "most_held", lambda queue: lazy_graph.MOST_HELD)  # whatever the device could hold
    with eager_fusion(1):
        held = [x + float(k) for k in range(40)]
        assert sum(lazy_graph.waiting_node(t) is not None for t in held) <= 8
        assert [t.to_host()[0] for t in held] == [1.0 + k for k in range(40)]


def test_large_values_wait_as_long_as_the_device_can_hold_them(cl_device, monkeypatch):
    """Also under nodes that read no tensor themselves: a chain over gigabytes is still one kernel."""
    monkeypatch.setattr(lazy_graph, "MOST_HELD", 1)
    a, b, c = (Tensor.ones((64,), queue=cl_device.queue) for _ in range(3))
    assert len(ag.jit_compile(chain).graph(a, b, c).forward) == 1
    with eager_fusion(1):
        m = Tensor.ones((8, 8), queue=cl_device.queue)
        assert ag.relu(ag.matmul(m, m) + 1.0).to_host().tolist() == [[9.0] * 8] * 8


def test_backward_reads_or_computes_again_whatever_moves_fewer_bytes(cl_device, rng):
    """The relu would be computed from three tensors, so it is written (and read) once; the exponential from one, so it is not."""
    a, b, c = (ag.tensor(rng.normal(size=64).astype(np.float32), requires_grad=True, queue=cl_device.queue) for _ in range(3))
    written = ag.jit_compile(chain).graph(a, b, c)
    again = ag.jit_compile(lambda x: ag.exp(x * 0.5) * 3.0).graph(a)
    assert len(written.forward) == len(written.backward) == len(again.forward) == len(again.backward) == 1
    assert written.forward[0].count("__global float* q_") == 2 and "relu" not in written.backward[0].split("relu_vjp")[0]
    assert again.forward[0].count("__global float* q_") == 1 and "exp(" in again.backward[0]


def test_gradients_of_two_leaves_never_share_memory(device):
    a, b = (ag.tensor([1.0, 2.0], requires_grad=True, queue=device.queue) for _ in range(2))
    ag.jit_compile(lambda a, b: a + b)(a, b).backward(Tensor.ones((2,), queue=device.queue))
    a.grad.fill_(5.0)
    assert b.grad.tolist() == [1.0, 1.0]


# ---- NaN, Inf, and who made them


def test_nan_and_infinity_come_through(device):
    values = np.array([[np.nan, 1.0, 2.0], [np.inf, -np.inf, 0.0], [1.0, 2.0, 3.0]], np.float32)
    x = ag.tensor(values, requires_grad=True, queue=device.queue)

    def function(x):
        return ag.sum(ag.relu(x * 2.0) - 1.0, axis=-1), ag.maximum(x, 0.5) * 1.0

    plain, fused = both_ways(function, [x]), both_ways(ag.jit_compile(function), [x])
    compare(plain, fused, False)
    assert np.isnan(fused[0][0]) and np.isinf(fused[0][1])


def test_anomalies_name_the_op_inside_a_kernel(device):
    x = ag.tensor([1.0, 0.0], requires_grad=True, queue=device.queue)
    with ag.detect_anomaly(), pytest.raises(FloatingPointError, match=r"\[log\] .*index=\(1,\)"):
        ag.jit_compile(lambda x: ag.tanh(ag.log(x * 2.0)) + 1.0)(x)


# ---- what can be seen


def test_sources_are_one_screen(cl_device):
    x = ag.tensor(np.ones((4, 20), np.float32), requires_grad=True, queue=cl_device.queue)
    text = ag.jit_compile(lambda x: ag.layer_norm(x * 2.0, 20)).source(x)
    forward, backward = text.split("// backward")
    assert "// forward 1 of 1" in forward and "__kernel void rows_mul_mean" in forward
    assert forward.count("\n") <= 64 and backward.count("\n") <= 64


def test_fast_math_is_per_function(cl_device):
    x = Tensor.ones((5,), queue=cl_device.queue)
    options = []
    seen = lambda kernel, *rest: options.append(kernel.program.options)  # noqa: E731
    hooks.launch_observers.append(seen)
    try:
        ag.jit_compile(lambda x: ag.exp(x) / 3.0, fast_math=True)(x)
        ag.jit_compile(lambda x: ag.exp(x) / 3.0)(x)
    finally:
        hooks.launch_observers.remove(seen)
    assert options == [("-cl-fast-relaxed-math",), ()]


def test_a_training_graph_gives_loss_and_gradients(device, rng):
    w = ag.tensor(rng.normal(size=(5,)).astype(np.float32), requires_grad=True, queue=device.queue)
    x, y = (ag.tensor(rng.normal(size=(6, 5)).astype(np.float32), queue=device.queue) for _ in range(2))
    compiler = ag.TrainingGraphCompiler(lambda x, y: ag.mse(ag.tanh(x * w), y), [w])
    loss, (gradient,) = compiler(x, y)
    want = ag.mse(ag.tanh(x * w), y)
    want.backward()
    np.testing.assert_allclose(loss.item(), want.item(), rtol=1e-6)
    np.testing.assert_allclose(gradient.to_host(), w.grad.to_host(), rtol=1e-5, atol=1e-7)
    graph = compiler.compile(x, y)
    assert graph.forward and graph.backward and graph.kernels == len(graph.forward) + len(graph.backward)
    assert graph.ops[:2] == ["mul", "tanh"] and graph.ops == ag.jit_compile(compiler.function.function).graph(x, y).ops


def test_a_trace_tells_its_ops(device):
    x = ag.tensor([1.0, 2.0], queue=device.queue)
    with ag.TracingContext() as trace:
        y = ag.tanh(x * 2.0)
    assert [node.name for node in trace.nodes] == ["mul", "tanh"]
    assert y.source is trace.nodes[-1] and trace.nodes[-1].made is not None


@pytest.mark.parametrize("what", ["linear", "conv2d"])
def test_an_activation_joins_its_product(what, device, rng):
    def tensor(*shape):
        return ag.tensor(rng.normal(size=shape).astype(np.float32), requires_grad=True, queue=device.queue)

    x, w, b = (tensor(8, 12), tensor(5, 12), tensor(5)) if what == "linear" else (tensor(2, 3, 8, 8), tensor(4, 3, 3, 3), tensor(4))

    def joined(x, w, b):
        return ag.relu(getattr(ag, what)(x, w, b)) * 2.0

    def held(x, w, b):  # what the activation is applied to is used once more
        h = getattr(ag, what)(x, w, b)
        return ag.relu(h) + h

    for function in (joined, held):
        compare(both_ways(function, (x, w, b)), both_ways(ag.jit_compile(function), (x, w, b)), False)


ENDS = {
    "linear + bias + residual, gelu": lambda t: ag.gelu(ag.linear(t["x"], t["w"], t["b"]) + t["r"]),
    "scale, bias, residual, relu": lambda t: ag.relu(0.5 * ag.matmul(t["x"], t["w"], transpose_b=True) + t["b"] + t["r"]),
    "cast": lambda t: ag.matmul(t["x"], t["w"], transpose_b=True).to("float16"),
    "half, float residual": lambda t: t["r"] + ag.linear(t["x"].to("bfloat16"), t["w"].to("bfloat16")),
    "convolution, residual, relu": lambda t: ag.relu(t["cr"] + ag.conv2d(t["cx"], t["cw"], t["cb"], stride=2)),
    "convolution, silu, cast": lambda t: ag.silu(ag.conv2d(t["cx"], t["cw"], stride=2) * 0.3).to("bfloat16"),
}


def ends_operands(handle, rng, grad=False):
    """For a linear layer and a convolution, each with bias and residual."""
    shapes = {"x": (33, 40), "w": (70, 40), "b": (70,), "r": (33, 70), "cx": (2, 20, 9, 9), "cw": (33, 20, 3, 3), "cb": (33,),
              "cr": (2, 33, 4, 4)}  # fmt: skip
    return {name: ag.tensor(rng.normal(size=s).astype(np.float32), requires_grad=grad, queue=handle.queue) for name, s in shapes.items()}


@pytest.mark.parametrize("what", ENDS)
def test_a_product_ends_in_what_follows(what, device, rng):
    """One launch, in plain eager code and compiled, and bit for bit what separate ops give."""
    t = ends_operands(device, rng)
    with eager_fusion(0):
        want = ENDS[what](t).to_host()
    before = ("pack_", "op_cast") if "half" in what else "pack_"  # what is done to operands is not counted
    for call in (ENDS[what], ag.jit_compile(ENDS[what])):
        with eager_fusion(1), Launches() as seen:
            got = call(t).to_host()
        np.testing.assert_array_equal(got, want)
        assert device.backend == "cpu" or len([name for name in seen.names if not name.startswith(before)]) == 1, seen.names


def test_what_backward_or_the_program_holds_is_computed_by_itself(cl_device, rng):
    """A residual folds in training; what gelu is applied to is kept for backward, and a product that is used twice is stored."""
    t = ends_operands(cl_device, rng, grad=True)

    def residual(t):
        return ag.linear(t["x"], t["w"], t["b"]) + t["r"]

    def kept(t):
        return ag.gelu(ag.linear(t["x"], t["w"], t["b"]))

    def twice(t):
        y = ag.matmul(t["x"], t["w"], transpose_b=True)
        return ag.relu(y + t["r"]) + y

    for function, launches in ((residual, 1), (kept, 2), (twice, 2)):
        leaves = [x for name, x in t.items() if len(name) == 1]
        results = []
        for least in (0, 1):
            with eager_fusion(least), Launches() as seen:
                y = function(t)
                values = [y.to_host()]
            gradients = ag.grad([y], leaves, [Tensor.ones(y.shape, queue=y.queue)], allow_unused=True)
            results.append(values + [None if g is None else g.to_host() for g in gradients])
        assert len(seen.names) == launches, seen.names
        compare(*results, True)


def test_a_product_that_found_no_memory_may_be_asked_again(cl_device, monkeypatch, rng):
    def no_memory(*given):
        raise OutOfMemoryError("none left")

    t = ends_operands(cl_device, rng)
    with eager_fusion(1):
        y = ag.relu(ag.linear(t["x"], t["w"], t["b"]) + t["r"])
    with monkeypatch.context() as patched, pytest.raises(OutOfMemoryError):
        patched.setattr(pending_products.PendingProduct, "ending_in", no_memory)
        y.to_host()
    want = np.maximum(t["x"].to_host() @ t["w"].to_host().T + t["b"].to_host() + t["r"].to_host(), 0)
    np.testing.assert_allclose(y.to_host(), want, rtol=1e-4, atol=1e-4)


def test_a_product_that_waits_sees_its_weight_as_it_was(device):
    x, w = ag.tensor([[1.0, 2.0]], queue=device.queue), ag.tensor([[3.0, 4.0]], queue=device.queue)

    @ag.jit_compile
    def function(x):
        y = ag.relu(ag.linear(x, w))
        w.fill_(0.0)
        return y

    assert function(x).tolist() == [[11.0]]


def test_threads_do_not_mix_what_waits(cl_device):
    """Each thread computes its own, and a value left by one can be asked for by another."""
    from concurrent.futures import ThreadPoolExecutor

    x = Tensor.ones((64,), queue=cl_device.queue)
    with eager_fusion(1):
        left = (x + 1.0) * 3.0
        function = ag.jit_compile(lambda k: ag.sum((x * float(k) + 1.0) * 2.0))
        with ThreadPoolExecutor(4) as pool:
            totals = list(pool.map(lambda k: (function(k).item(), left.to_host()[0]), range(16)))
    assert totals == [(128.0 * (k + 1), 6.0) for k in range(16)]
