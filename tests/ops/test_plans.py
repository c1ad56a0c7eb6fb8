"""A call is planned once per kind and run from its plan, the first time as the hundredth: over other memory, with the same results."""

import sys

import numpy as np
import pytest

import netcl.autograd as ag
from netcl import ops
from netcl.core import env
from netcl.core.device import CPUQueue
from netcl.core.errors import ShapeError
from netcl.core.hooks import hooks
from netcl.core.kernel_selector import clear_cache, reload_environment, set_matmul_precision
from netcl.core.kernels import program
from netcl.core.memory import is_integrated_gpu
from netcl.core.tensor import Tensor
from netcl.engine import plan
from netcl.ops.conv import plans
from netcl.ops.matmul import gemm
from netcl.runtime.capture import compile as compiled
from tests.conftest import eager_fusion

RNG = np.random.default_rng(5)


@pytest.fixture
def made(cl_device, monkeypatch):
    """The names of plans that were made; what other tests left is forgotten."""
    program.forget("plans")
    seen, make = [], plan.make_plan
    monkeypatch.setattr(plan, "make_plan", lambda name, *rest: seen.append(name) or make(name, *rest))
    return seen


def values(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def given(device, *shape):
    return Tensor.from_host(device.queue, values(*shape))


def test_calls_of_one_kind_share_a_plan_and_compute_anew(cl_device, made):
    for _ in range(5):
        a, b = values(6, 5), values(5, 7)
        x, y = (Tensor.from_host(cl_device.queue, v) for v in (a, b))
        np.testing.assert_allclose(ops.matmul(x, y).to_host(), a @ b, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(ops.sum(x, axis=1).to_host(), a.sum(1), rtol=1e-5, atol=1e-5)
    assert made == ["matmul", "fold"]


def test_every_call_takes_the_same_path(cl_device, made):
    x, w = given(cl_device, 6, 5), given(cl_device, 5, 7)

    def functions():
        names = []
        sys.setprofile(lambda frame, event, _: names.append((frame.f_code.co_filename, frame.f_code.co_name)) if event == "call" else None)
        try:
            ops.softmax(ops.matmul(x, w))
        finally:
            sys.setprofile(None)
        return names

    functions()  # makes the plans
    first, second, third = functions(), functions(), functions()
    assert first == second == third and made == ["matmul", "softmax"]


def test_what_a_call_is_told_makes_its_kind(cl_device, made):
    x = given(cl_device, 4, 6)
    host = x.to_host()
    for _ in range(3):
        for axis in (0, 1, None, (0, 1)):
            np.testing.assert_allclose(ops.sum(x, axis=axis).to_host(), host.sum(axis), rtol=1e-5)
        np.testing.assert_allclose(ops.sum(x, axis=1, keepdims=True).to_host(), host.sum(1, keepdims=True), rtol=1e-5)
    assert made == ["fold"] * 5


def test_a_switch_reaches_calls_that_were_planned_or_replayed(cl_device, made, monkeypatch):
    x, w, planned, choose = given(cl_device, 1, 2, 5, 5), given(cl_device, 3, 2, 3, 3), [], plans.convolution_algorithm
    monkeypatch.setattr(plans, "convolution_algorithm", lambda queue, conv, *rest: planned.append(conv.kind) or choose(queue, conv, *rest))
    step = compiled(lambda x: ops.conv2d(x, w))
    for turn, switch in enumerate("0101", 1):
        monkeypatch.setenv("NETCL_CONV_WINOGRAD", switch)
        reload_environment()
        for _ in range(4):
            ops.conv2d(x, w)
        assert len(planned) == turn
    for turn, switch in enumerate("01", 5):
        monkeypatch.setenv("NETCL_CONV_WINOGRAD", switch)
        reload_environment()
        for _ in range(5):
            step(x)
        assert len(planned) == turn and len(step.graphs) == turn - 4


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("NETCL_AMX", ("0", "1", "off", "on")),
        ("NETCL_MATRIX_UNITS", ("0", "1", "off", "on")),
        ("NETCL_KERNEL_STRATEGY", ("auto", "portable", "optimized", "AUTO")),
    ],
)
def test_a_switch_reaches_products_that_were_planned_or_replayed(cl_device, made, monkeypatch, name, values):
    x, w, planned, choose = given(cl_device, 3, 5), given(cl_device, 5, 4), [], gemm.chosen
    monkeypatch.setattr(gemm, "chosen", lambda *args: planned.append(1) or choose(*args))
    step = compiled(lambda x: ops.matmul(x, w))
    for turn, value in enumerate(values, 1):
        monkeypatch.setenv(name, value)
        reload_environment()
        for _ in range(5):
            ops.matmul(x, w) if turn < 3 else step(x)
        assert len(planned) == turn
    assert len(step.graphs) == 2


def test_a_warm_call_reads_no_variable(cl_device, made, monkeypatch):
    x, w, image, filters = given(cl_device, 3, 5), given(cl_device, 5, 4), given(cl_device, 1, 2, 5, 5), given(cl_device, 3, 2, 3, 3)
    ops.matmul(x, w), ops.conv2d(image, filters)
    names, read = [], env.value
    monkeypatch.setattr(env, "value", lambda name: names.append(name) or read(name))
    ops.matmul(x, w), ops.conv2d(image, filters)
    assert names == []


def test_results_of_several_kinds_of_memory_stay_apart(cl_device, made):
    x, w = given(cl_device, 5, 5), given(cl_device, 5, 5)
    kept = [(ops.matmul(x, w), x.to_host() @ w.to_host()) for _ in range(4)]
    kept += [(ops.matmul(w, w), w.to_host() @ w.to_host())]  # one memory for both, in a call of a kind with two
    assert len({id(result.buffer) for result, _ in kept}) == 5
    for result, want in kept:
        np.testing.assert_allclose(result.to_host(), want, rtol=1e-5, atol=1e-5)
    assert made == ["matmul"]


def test_one_memory_twice_is_two_operands(cl_device, made):
    x, w = given(cl_device, 5, 5), given(cl_device, 5, 5)
    for _ in range(3):
        ops.matmul(x, x)
    np.testing.assert_allclose(ops.matmul(x, w).to_host(), x.to_host() @ w.to_host(), rtol=1e-5, atol=1e-5)
    assert made == ["matmul"]


def test_random_numbers_are_drawn_anew(cl_device, made):
    half = Tensor.full((64,), 0.5, queue=cl_device.queue)
    drawn = {ops.bernoulli(half).to_host().tobytes() for _ in range(5)}
    assert len(drawn) == 5


def test_a_new_precision_is_a_new_kind(cl_device, made):
    x, w = given(cl_device, 5, 5), given(cl_device, 5, 5)
    for _ in range(3):
        ops.matmul(x, w)
    set_matmul_precision("high")
    try:
        ops.matmul(x, w)
    finally:
        set_matmul_precision("highest")
    assert made == ["matmul"] * 2


def test_a_cleared_selector_plans_anew(cl_device, made):
    x = given(cl_device, 4, 6)
    for _ in range(2):
        ops.sum(x, axis=1), ops.sum(x, axis=1)
        clear_cache()
    assert made == ["fold"] * 2


def test_who_watches_launches_sees_them(cl_device, made):
    x, names = given(cl_device, 4, 6), []
    for _ in range(3):
        ops.sum(x, axis=1)
    watch = lambda kernel, *rest: names.append(kernel.name)  # noqa: E731
    hooks.launch_observers.append(watch)
    try:
        ops.sum(x, axis=1)
    finally:
        hooks.launch_observers.remove(watch)
    assert names and made == ["fold"]


def test_planned_steps_can_be_recorded(cl_device, made):
    w = given(cl_device, 5, 5)
    step = compiled(lambda x: ag.matmul(ag.softmax(x), w))
    for _ in range(6):
        x = given(cl_device, 5, 5)
        e = np.exp(x.to_host())
        np.testing.assert_allclose(step(x).to_host(), e / e.sum(1, keepdims=True) @ w.to_host(), rtol=1e-4, atol=1e-5)
    assert step.graphs and not step.refused


def test_memory_of_the_caller_is_not_taken_for_the_pools(cl_device, made):
    room = np.zeros(65, np.float32)
    for _ in range(4):
        room[:] = values(65)
        x = Tensor.from_host(cl_device.queue, room[1:].reshape(8, 8), share=True)
        np.testing.assert_allclose(ops.sum(x, axis=1).to_host(), room[1:].reshape(8, 8).sum(1), rtol=1e-5, atol=1e-5)
    assert not made or not is_integrated_gpu(cl_device.queue)  # elsewhere it is a copy in memory of the pool


def test_inputs_that_wait_are_computed_where_the_op_does_so(cl_device, made):
    with eager_fusion(1):
        for _ in range(4):
            a, b = values(4, 6), values(4, 6)
            x, y = (Tensor.from_host(cl_device.queue, v) for v in (a, b))
            np.testing.assert_allclose(ops.sum(x + y, axis=1).to_host(), (a + b).sum(1), rtol=1e-4, atol=1e-5)
            left = ops.reshape(x * y, (24,))
            assert left.memory is None
            np.testing.assert_allclose(left.to_host(), (a * b).reshape(24), rtol=1e-5)
    assert made == ["fold"]


def test_what_waits_for_memory_that_is_written_comes_first(cl_device, made):
    mean, var = (Tensor.full((3,), value, queue=cl_device.queue) for value in (0.0, 1.0))
    weight, bias = (Tensor.full((3,), value, queue=cl_device.queue) for value in (1.0, 0.0))
    seen, want, expected = [], [], np.zeros(3, np.float32)
    with eager_fusion(1):
        for _ in range(5):
            batch = values(8, 3, 2, 2)
            seen.append(mean * 2.0)  # waits while batch norm writes
            want.append(expected * 2)
            ops.batch_norm_train(Tensor.from_host(cl_device.queue, batch), weight, bias, mean, var, momentum=0.5)
            expected = 0.5 * expected + 0.5 * batch.mean((0, 2, 3))
        np.testing.assert_allclose(np.stack([t.to_host() for t in seen]), np.stack(want), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(mean.to_host(), expected, rtol=1e-4, atol=1e-5)
    assert made == ["batch_norm_statistics"]


def test_the_numpy_backend_is_left_alone():
    x = Tensor.from_host(CPUQueue(), values(3, 4))
    assert [ops.sum(x, axis=1).shape for _ in range(3)] == [(3,)] * 3


def test_products_that_nothing_follows_wait_no_more(cl_device, made):
    with eager_fusion(1):
        x, w, bias = given(cl_device, 9, 7), given(cl_device, 7, 5), given(cl_device, 5)
        expected = x.to_host() @ w.to_host()
        for _ in range(plan._UNFUSED_CALLS):
            alone = ops.matmul(x, w)
            assert alone.memory is None
            np.testing.assert_allclose(alone.to_host(), expected, rtol=1e-5, atol=1e-5)
        deferred = [ops.matmul(x, w).memory is None for _ in range(plan._AGAIN)]
        assert deferred.count(True) == 1  # asks again now and then
        np.testing.assert_allclose(ops.matmul(x, w).to_host(), expected, rtol=1e-5, atol=1e-5)
        for _ in range(plan._AGAIN):
            ended = ops.relu(ops.add(ops.matmul(x, w), bias))
            np.testing.assert_allclose(ended.to_host(), np.maximum(expected + bias.to_host(), 0), rtol=1e-5, atol=1e-5)
        assert all(ops.matmul(x, w).memory is None for _ in range(plan._AGAIN))  # something followed: it is waited for


def test_temporaries_that_an_op_has_dropped_share_memory(cl_device):
    shape, queue = (64, 64), cl_device.queue

    def twice(x):
        first = Tensor.empty(shape, queue=x.queue)
        ops.add(x, 1.0, out=first)
        second = ops.add(first, 1.0)
        return ops.add(second, 1.0)

    function = plan.planned("twice", twice)
    x = given(cl_device, *shape)
    np.testing.assert_allclose(function(x).to_host(), x.to_host() + 3, rtol=1e-6)
    (made,) = [made for key, made in plan.plan_cache(queue).items() if key[0] == "twice"]
    assert len(made.rooms) == 2


def test_an_op_that_reads_values_runs_at_once(cl_device, made):
    def peeks(x):
        return ops.add(x, float(x.to_host().max()))

    function, x = plan.planned("peeks", peeks), given(cl_device, 3, 4)
    for _ in range(2):
        x.from_host(values(3, 4))
        np.testing.assert_allclose(function(x).to_host(), x.to_host() + x.to_host().max(), rtol=1e-6)


def test_an_error_of_an_op_is_raised_before_anything_runs(cl_device, made):
    x = given(cl_device, 3, 4)
    for _ in range(2):
        with pytest.raises(ShapeError, match="axis must be in range for"):
            ops.softmax(x, axis=5)


def test_a_tensor_that_an_op_takes_from_outside_is_read_anew(cl_device, made):
    weight, x = given(cl_device, 3, 4), given(cl_device, 3, 4)
    function = plan.planned("outside", lambda x: ops.mul(x, weight))
    for _ in range(3):
        weight.data = given(cl_device, 3, 4)  # other memory
        np.testing.assert_allclose(function(x).to_host(), x.to_host() * weight.to_host(), rtol=1e-6)


def test_an_outside_tensor_first_is_no_operand(cl_device, made):
    weight, x = given(cl_device, 4, 3), given(cl_device, 3, 5)
    function = plan.planned("outside first", lambda x: ops.softmax(ops.matmul(weight, x)))
    for _ in range(3):
        weight.data = given(cl_device, 4, 3)
        e = np.exp(weight.to_host() @ x.to_host())
        np.testing.assert_allclose(function(x).to_host(), e / e.sum(-1, keepdims=True), rtol=1e-4)


def test_plans_of_0_and_1_are_two(cl_device):
    """Zeros of both signs have plans of their own, and none of them is that of 1 or -1."""
    x = values(4, 3)
    for momentum in (0.0, 1.0, 0.0, 1.0):
        mean, var = (Tensor.from_host(cl_device.queue, np.full(3, start, np.float32)) for start in (5.0, 7.0))
        ops.batch_norm(Tensor.from_host(cl_device.queue, x), mean, var, training=True, momentum=momentum)
        np.testing.assert_allclose(mean.to_host(), x.mean(0) if momentum else 5.0, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(var.to_host(), x.var(0, ddof=1) if momentum else 7.0, rtol=1e-5)
    keys = []
    for number in (0.0, -0.0, 1.0, -1.0, 0, 1, False, True):
        key: list = []
        plan.key_operands((number,), key)
        keys.append(tuple(key))
    assert len(set(keys)) == 8
