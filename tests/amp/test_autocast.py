"""autocast: what is computed in half, what is not, and what stays float32."""

from __future__ import annotations

import gc
import sys
import threading
import warnings

import numpy as np
import pytest

import netcl
import netcl.autograd as ag
from netcl import amp, nn, optim
from netcl.amp import autocast
from netcl.amp.autocast import autocast_block
from netcl.core import memory
from netcl.core.device import manager
from netcl.core.errors import DtypeError
from netcl.core.tensor import Tensor
from netcl.engine.registry import REGISTRY
from netcl.profiling import profile

HALVES = ("float16", "bfloat16")


def in_halves(cases, left_out):
    """Every case in both dtypes. Those of ``left_out`` compile, on OpenCL devices, kernels that another case holds in that dtype."""
    return [
        pytest.param(case, dtype, id=f"{case}-{dtype}", marks=[pytest.mark.matrix] * ((case, dtype) in left_out))
        for case in cases
        for dtype in HALVES
    ]


@pytest.fixture
def numpy_device():
    from netcl.core.device import device

    with device("cpu") as handle:
        yield handle


def values(*shape: int, grad: bool = False) -> Tensor:
    return Tensor.from_host(np.random.default_rng(0).normal(size=shape).astype(np.float32), requires_grad=grad)


@pytest.mark.parametrize("dtype", HALVES)
def test_rows_get_what_they_ask_for(numpy_device, dtype):
    """A ``half`` row works in the block's dtype, a ``float`` row in float32, a ``keep`` row in what it is given."""
    x, half = values(4, 4), values(4, 4).to(dtype)
    assert [REGISTRY[name].amp for name in ("matmul", "exp", "softmax", "relu")] == ["half", "float", "wide", "keep"]
    with autocast(dtype=dtype):
        assert (x @ x).dtype == ag.linear(half, x).dtype == dtype
        assert ag.softmax(half).dtype == ag.sum(half).dtype == ag.exp(half).dtype == "float32"
        assert (ag.relu(x).dtype, ag.relu(half).dtype) == ("float32", dtype)
        assert (x.to("float64") @ x.to("float64")).dtype == "float64"
        assert ag.matmul(x.to("int32"), x.to("int32")).dtype == "int32"
    assert (x @ x).dtype == "float32"


def test_a_loss_made_of_other_ops_does_not_overflow_in_its_parts(numpy_device):
    x = Tensor.full((4, 4), 300.0, dtype="float16")  # its square is more than float16 holds
    with autocast():
        assert ag.mse_loss(x, Tensor.zeros((4, 4), dtype="float16")).item() == 90000.0
        assert amp.is_autocast_enabled()


def test_blocks_nest_and_belong_to_their_thread(numpy_device):
    seen = []
    with autocast():
        with autocast(dtype="bfloat16"):
            assert amp.get_autocast_dtype() == "bfloat16"
            with autocast(enabled=False):
                assert not amp.is_autocast_enabled() and (values(2, 2) @ values(2, 2)).dtype == "float32"
            thread = threading.Thread(target=lambda: seen.append(amp.is_autocast_enabled()))
            thread.start()
            thread.join()
        assert amp.get_autocast_dtype() == "float16"
    assert seen == [False] and not amp.is_autocast_enabled()
    with pytest.raises(RuntimeError, match="stop"), autocast():
        raise RuntimeError("stop")
    assert not amp.is_autocast_enabled()
    with pytest.raises(DtypeError, match=r"\[autocast\] dtype must be float16 or bfloat16; dtype=float32"):
        autocast(dtype="float32")


def test_it_is_a_decorator(numpy_device):
    @autocast(dtype="bfloat16")
    def product(a):
        return a @ a

    assert product(values(2, 2)).dtype == "bfloat16" and product.__name__ == "product"


@pytest.mark.parametrize("dtype", HALVES)
def test_weights_and_their_gradients_stay_float32(device, dtype):
    w, x = values(3, 5, grad=True), values(4, 5)
    with autocast(dtype=dtype):
        out = ag.linear(x, w)
        assert (out.dtype, out.nbytes) == (dtype, 2 * 12)
    ag.mse_loss(out, np.zeros((4, 3), np.float32)).backward()
    exact = 2 / 12 * (x.to_host() @ w.to_host().T).T @ x.to_host()
    assert (w.dtype, w.grad.dtype) == ("float32", "float32")
    np.testing.assert_allclose(w.grad.to_host(), exact, atol=6e-2 if dtype == "bfloat16" else 8e-3)


def casts(tape) -> int:
    return sum(node.name == "cast" for node in tape.nodes)


def test_a_weight_is_cast_once_per_step_and_again_after_it_changed(numpy_device):
    w, x = values(4, 4, grad=True), values(2, 4).to("float16")
    with autocast():
        with ag.Tape() as tape:
            y = ag.linear(ag.linear(x, w), w)
        assert casts(tape) == 1  # used twice
        tape.backward(y.sum(), retain_graph=True)
        first = w.grad.to_host()
        with ag.Tape() as tape:
            ag.linear(x, w)
        assert casts(tape) == 0  # the graph is still there, and nobody wrote to w
        optim.SGD([w], lr=1.0).step()
        with ag.Tape() as tape:
            again = ag.linear(x, w)
        assert casts(tape) == 1
        np.testing.assert_allclose(again.to_host(), x.to_host() @ w.to_host().T, atol=2e-2)
        w.from_host(np.zeros((4, 4), np.float32))
        assert not ag.linear(x, w).to_host().any()
    with autocast(), ag.Tape() as tape:
        tape.backward(ag.linear(x, w).sum())
        tape.backward(ag.linear(x, w).sum())  # the graph of the first cast is gone
    assert first.shape == w.grad.shape


def test_two_losses_of_one_block_may_be_differentiated_in_turn(device):
    def gradients(backward):
        w = ag.tensor(np.array([[1.0, 2.0], [3.0, 4.0]], np.float32), requires_grad=True, queue=device.queue)
        x = Tensor.ones((1, 2), queue=device.queue)
        with autocast(dtype="bfloat16"):
            losses = (x @ w).sum(), ((x * 2) @ w).sum()
        backward(*losses)
        return w.grad.tolist()

    assert gradients(lambda one, other: (one.backward(), other.backward())) == gradients(lambda one, other: (one + other).backward())


def test_nan_and_inf_reach_the_loss(device):
    w, target = values(3, 3, grad=True), np.array([0, 1])
    for bad in (np.nan, np.inf, 1e30):  # the last one is finite in float32 only
        x = np.ones((2, 3), np.float32)
        x[1, 2] = bad
        with autocast():
            assert not np.isfinite(ag.cross_entropy(ag.linear(Tensor.from_host(x), w), target).item())


LOSSES = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none, smoothed": {"reduction": "none", "label_smoothing": 0.1},
    "weighted, smoothed": {"weight": True, "label_smoothing": 0.2},
    "soft": {"soft": True},
    "soft, weighted, sum": {"soft": True, "weight": True, "reduction": "sum"},
    "log probabilities, weighted": {"log_probs": True, "weight": True},
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    in_halves(LOSSES, {("none, smoothed", "bfloat16"), ("weighted, smoothed", "bfloat16"), ("soft", "bfloat16"), ("sum", "bfloat16")}),
)
def test_cross_entropy_reads_half_logits_as_if_they_were_cast(device, dtype, name):
    """The loss is float32, the gradient has the dtype of the logits, and both have the bits of a float32 copy of the logits."""
    options, rng = dict(LOSSES[name]), np.random.default_rng(1)
    loss_of = ag.nll if options.pop("log_probs", False) else ag.cross_entropy
    labels = np.where(rng.random(33) < 0.2, -100, rng.integers(0, 300, 33))
    target = rng.random((33, 300)).astype(np.float32) if options.pop("soft", False) else labels
    if options.get("weight"):
        options["weight"] = Tensor.from_host(rng.uniform(0.5, 2, 300).astype(np.float32))
    logits = Tensor.from_host((3 * rng.normal(size=(33, 300))).astype(np.float32)).to(dtype)
    here, there = logits.detach().requires_grad_(), logits.detach().requires_grad_()
    with autocast(dtype=dtype), ag.Tape() as tape:
        loss = loss_of(here, target, **options)
    assert casts(tape) == 0 and loss.dtype == "float32"
    exact = loss_of(there.to("float32"), target, **options)
    np.testing.assert_array_equal(loss.to_host(), exact.to_host())
    for each in (loss, exact):
        each.sum().backward()
    assert here.grad.dtype == dtype
    np.testing.assert_array_equal(here.grad.to_host(), there.grad.to_host())


def test_gradients_of_class_weights_and_soft_targets_are_those_of_float32_logits(device):
    logits = values(6, 5).to("bfloat16")
    found = []
    for half in (True, False):
        weight, target = values(5).abs().requires_grad_(), values(6, 5).abs().requires_grad_()
        with autocast(half, "bfloat16"):
            loss = ag.cross_entropy(logits if half else logits.to("float32"), target, weight, label_smoothing=0.1)
        loss.backward()
        found.append((weight.grad.to_host(), target.grad.to_host()))
    for ours, exact in zip(*found, strict=True):
        np.testing.assert_allclose(ours, exact, rtol=1e-6, atol=1e-7)


def test_second_derivatives_of_cross_entropy_differ_by_the_rounding_of_their_parts(numpy_device):
    found = []
    for half in (True, False):
        logits = values(4, 5).to("bfloat16").detach().requires_grad_()
        with autocast(half, "bfloat16"):
            loss = ag.cross_entropy(logits if half else logits.to("float32"), np.array([0, 1, 2, 3]))
        (once,) = ag.grad(loss, logits, create_graph=True)
        assert once.dtype == "bfloat16"
        found.append(ag.grad(ag.sum(ag.square(once.to("float32"))), logits)[0].to_host())
    np.testing.assert_allclose(*found, rtol=2**-6, atol=2**-12)


BIASED = {
    "linear": (ag.linear, (4, 5), (3, 5), lambda x, w: x @ w.T),
    "activated": (lambda x, w, b: ag.linear(x, w, b, activation="relu"), (2, 4, 5), (3, 5), lambda x, w: x @ w.T),
    "by name": (lambda x, w, b: ag.affine(x, w, bias=b), (70, 64), (96, 64), lambda x, w: x @ w.T),
    "conv2d": (ag.conv2d, (2, 4, 6, 6), (3, 4, 1, 1), lambda x, w: np.einsum("nchw,fcij->nfhw", x, w)),
    "conv2d_relu": (ag.conv2d_relu, (2, 4, 6, 6), (3, 4, 1, 1), lambda x, w: np.einsum("nchw,fcij->nfhw", x, w)),
    "conv1d": (ag.conv1d, (2, 4, 6), (3, 4, 1), lambda x, w: np.einsum("nch,fci->nfh", x, w)),
    "conv_transpose2d": (ag.conv_transpose2d, (2, 4, 6, 6), (4, 3, 1, 1), lambda x, w: np.einsum("nchw,cfij->nfhw", x, w)),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    in_halves(
        BIASED,
        {
            ("by name", "bfloat16"),
            ("conv2d", "float16"),
            ("conv2d_relu", "bfloat16"),
            ("conv1d", "float16"),
            ("conv_transpose2d", "bfloat16"),
        },
    ),
)
def test_biases_are_added_in_float32_and_their_gradients_are_float32_sums(device, name, dtype):
    """1 / 3 is not a half number. The result has one rounding, and neither the bias nor its gradient has a launch of its own."""
    op, x_shape, w_shape, product = BIASED[name]
    x, w = (Tensor.from_host(np.random.default_rng(2).integers(-2, 3, shape).astype(np.float32)) for shape in (x_shape, w_shape))
    last = name not in ("conv2d", "conv2d_relu", "conv1d", "conv_transpose2d")
    outs = w_shape[1 if name == "conv_transpose2d" else 0]
    bias = Tensor.from_host(np.linspace(1 / 3, 7 / 3, outs, dtype=np.float32), requires_grad=True)
    with autocast(dtype=dtype), ag.Tape() as tape:
        y = op(x, w.requires_grad_(), bias)
    assert casts(tape) == 1 and y.dtype == dtype  # of the weight
    shape = (outs,) if last else (outs, *(1,) * (len(x_shape) - 2))
    exact = product(x.to_host(), w.to_host()) + bias.to_host().reshape(shape)
    exact = exact if name not in ("activated", "conv2d_relu") else np.maximum(exact, 0)
    np.testing.assert_array_equal(y.to_host(), Tensor.from_host(exact).to(dtype).to_host())
    g = Tensor.from_host(np.random.default_rng(3).normal(size=y.shape).astype(np.float32)).to(dtype)
    y.backward(g)
    mask = y.to_host() > 0 if name in ("activated", "conv2d_relu") else 1
    axes = tuple(i for i in range(y.ndim) if i != (y.ndim - 1 if last else 1))
    assert bias.grad.dtype == "float32"
    np.testing.assert_allclose(bias.grad.to_host(), (g.to_host() * mask).sum(axes, np.float64), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "dtype"), in_halves(["linear", "by name", "conv2d"], {("by name", "float16"), ("conv2d", "float16")}))
def test_a_fused_product_adds_a_float32_bias_before_what_follows(device, name, dtype):
    op, x_shape, w_shape, _ = BIASED[name]
    x, w, bias = values(*x_shape), values(*w_shape), values(w_shape[0])

    def block(x):
        with autocast(dtype=dtype):
            return ag.relu(op(x, w, bias)).to("float32")

    np.testing.assert_array_equal(ag.jit_compile(block)(x).to_host(), block(x).to_host())


def test_a_half_bias_of_another_dtype_is_cast(numpy_device):
    with autocast(dtype="bfloat16"):
        assert ag.linear(values(2, 3), values(4, 3), values(4).to("float16")).dtype == "bfloat16"


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("op", [ag.softmax, ag.log_softmax])
def test_softmax_reads_halves_as_if_they_were_cast(device, op, axis, compiled):
    x = (values(33, 70) * 4).to("bfloat16")
    here, there = x.detach().requires_grad_(), x.detach().requires_grad_()
    with autocast(dtype="bfloat16"), ag.Tape() as tape:
        found = (ag.jit_compile(op) if compiled else op)(here, axis)
    assert casts(tape) == 0 and found.dtype == "float32"
    exact = op(there.to("float32"), axis)
    np.testing.assert_allclose(found.to_host(), exact.to_host(), rtol=1e-6)
    for each in (found, exact):
        each.backward(values(33, 70))
    assert here.grad.dtype == "bfloat16"
    np.testing.assert_allclose(here.grad.to_host(), there.grad.to_host(), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("dtype", HALVES)
def test_sum_and_mean_read_halves_as_if_they_were_cast(device, dtype):
    x = values(33, 70).to(dtype).detach().requires_grad_()
    for op in (ag.sum, ag.mean):
        with autocast(dtype=dtype), ag.Tape() as tape:
            found = op(x, axis=0)
        assert casts(tape) == 0 and found.dtype == "float32"
        np.testing.assert_array_equal(found.to_host(), op(x.to("float32"), axis=0).to_host())
        (g,) = ag.grad(found, x, found.detach())
        assert g.dtype == dtype


def test_a_checkpoint_runs_again_as_it_ran_first(numpy_device):
    w, x = values(3, 3, grad=True), values(2, 3)
    seen = []

    def block(a):
        out = ag.linear(a, w)
        seen.append(out.dtype)
        return ag.relu(out)

    with autocast(dtype="bfloat16"):
        y = ag.checkpoint(block, x.requires_grad_())
    y.sum().backward()
    assert seen == ["bfloat16", "bfloat16"]


def test_small_functions(numpy_device):
    x = values(2, 2)
    assert amp.maybe_cast_tensor(x) is x and amp.maybe_cast_tensor(x, "bfloat16").dtype == "bfloat16"
    with autocast():
        assert amp.maybe_cast_tensor(x).dtype == "float16"
    low = nn.Linear(2, 2).half().weight
    assert (low.dtype, amp.master_param(low).dtype, amp.master_param(low).requires_grad) == ("float16", "float32", True)
    assert amp.supports_fp16("cpu") is manager.default("cpu").profile.half_arithmetic


def test_a_device_without_half_arithmetic_is_told_of_once(numpy_device, monkeypatch):
    monkeypatch.setattr(sys.modules["netcl.amp.autocast"], "_warned", False)
    x = values(2, 2)
    with autocast(dtype="bfloat16"), warnings.catch_warnings():
        warnings.simplefilter("error")
        _ = x @ x
    with autocast(), pytest.warns(RuntimeWarning, match=r"\[autocast\] the device has no half arithmetic.*device=NumPy") as told:
        _ = x @ x
    assert told[0].filename == __file__
    with autocast(), warnings.catch_warnings():
        warnings.simplefilter("error")
        _ = x @ x


def held(model: nn.Module, x: Tensor, half: bool) -> int:
    """Bytes that a forward pass leaves leased for backward, parameters' copies not counted."""
    gc.collect()
    with autocast(half):
        before = memory.memory_stats()["bytes_in_use"]
        out = model(x)
        copies = sum(memory.eighth_steps(kept.half.nbytes) for kept in autocast_block.get().casts.values())
        taken = memory.memory_stats()["bytes_in_use"] - before - copies
    del out
    return int(taken)


def test_activations_take_at_most_60_percent(cl_device):
    conv = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*conv, nn.Flatten(), nn.Linear(8 * 64, 10))
    x = values(32, 1, 8, 8)
    held(model, x, True)
    assert held(model, x, True) <= 0.6 * held(model, x, False)


# ---- casts of many parameters in one launch


def _weights(queue, count):
    rng = np.random.default_rng(0)
    return [Tensor.from_host(queue, rng.normal(size=(8, 8)).astype(np.float32), requires_grad=True) for _ in range(count)]


def _step(weights, x, after=lambda h: None):
    """Forward and backward; ``after`` is called between two products."""
    with autocast(dtype="bfloat16"):
        for w in weights:
            x = ag.matmul(x, w)
            after(w)
    x.sum().backward()
    return x


@pytest.mark.parametrize("accumulated", [False, True])
def test_casting_together_changes_no_value(device, accumulated):
    x, seen = Tensor.from_host(device.queue, np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)), []
    for _ in range(2):
        weights = _weights(device.queue, 5)
        for _ in range(2 if seen else 1):  # the second block of the second round casts ahead
            if not accumulated:
                for w in weights:
                    w.grad = None
            out = _step([*weights, weights[0]], x)
        if accumulated and not seen:
            out = _step([*weights, weights[0]], x + 0)
        seen.append([out.to_host(), *[w.grad.to_host() for w in weights]])
        assert all(w.grad.dtype == "float32" for w in weights)
    for first, second in zip(*seen, strict=True):
        np.testing.assert_array_equal(first, second)


def test_parameters_and_gradients_are_cast_in_few_launches(cl_device):
    weights, x = _weights(cl_device.queue, 6), Tensor.ones((4, 8), queue=cl_device.queue)
    counts = []
    for _ in range(2):
        for w in weights:
            w.grad = None
        with profile(cl_device, roofline=False) as p:
            _step(weights, x)
        counts.append([event.name for event in p.events].count("update"))
    assert counts == [1, 2]  # the gradients; from the second step on, also the parameters after the first one


def test_a_compiled_step_casts_together_and_is_replayed(cl_device):
    weights, x = _weights(cl_device.queue, 4), Tensor.ones((4, 8), queue=cl_device.queue)

    def step(x):
        for w in weights:
            w.grad = None
        return _step(weights, x)

    compiled, expected = netcl.compile(step), step(x).to_host()
    for _ in range(4):
        np.testing.assert_array_equal(compiled(x).to_host(), expected)
    assert len(compiled.graphs) == 1 and not compiled.refused


def test_a_parameter_written_inside_a_block_is_cast_again(device):
    x, expected = Tensor.ones((4, 8), queue=device.queue), []
    for write in (False, True, True):
        weights = _weights(device.queue, 3)
        if write:
            _step(weights, x)

        def change(w, last=weights[2], first=weights[0], now=write):
            if now and w is first:
                with ag.no_grad():
                    last.mul_(2.0)

        expected.append(_step(weights, x, change).to_host())
    np.testing.assert_allclose(expected[1], 2 * expected[0], rtol=1e-2)
    np.testing.assert_array_equal(expected[1], expected[2])


def test_only_parameters_that_ops_used_are_cast_ahead(device):
    weights, x = _weights(device.queue, 4), Tensor.ones((4, 8), queue=device.queue)
    _step(weights, x)
    ahead = []
    for used in (weights[:2], weights[:2]):
        with autocast(dtype="bfloat16"):
            h = ag.matmul(x, used[0])
            ahead.append(len(autocast_block.get().ahead))
            ag.matmul(h, used[1])
    assert ahead == [3, 1]
