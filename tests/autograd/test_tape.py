"""The tape: accumulation, scopes, higher orders, hooks, anomalies, memory."""

import gc
import weakref
from contextlib import contextmanager

import numpy as np
import pytest

import netcl
import netcl.autograd as ag
from netcl import ops
from netcl.core import memory
from netcl.core.device import device as use_device
from netcl.core.errors import AutogradError, ShapeError
from netcl.core.tensor import Tensor
from netcl.engine.registry import op


@pytest.fixture
def leaf(device):
    def make(values, **options):
        return ag.tensor(np.asarray(values, np.float32), requires_grad=True, queue=device.queue, **options)

    return make


def test_backward_accumulates_in_leaves(leaf):
    x = leaf([1.0, 2.0, 3.0])
    (x * x).sum().backward()
    assert x.grad.tolist() == [2.0, 4.0, 6.0]
    (x * 2.0).sum().backward()
    assert x.grad.tolist() == [4.0, 6.0, 8.0]
    x.zero_grad()
    assert x.grad is None


def test_three_ways_are_one_walk(leaf):
    for way in range(3):
        x = leaf([2.0])
        with ag.Tape() as tape:
            loss = (x * x).sum()
        if way == 0:
            tape.backward(loss)
        elif way == 1:
            loss.backward()
        else:
            ag.backward(loss)
        assert x.grad.tolist() == [4.0]


def test_a_value_used_twice(leaf):
    x = leaf([3.0])
    y = x * x
    (y * y + y).sum().backward()
    assert x.grad.tolist() == [4 * 27.0 + 6.0]


def test_broadcast_gradients_are_summed(leaf):
    a, b, c = leaf(np.ones((4, 3))), leaf(np.ones((3,))), leaf(np.ones((4, 1)))
    (a * b + c).sum().backward()
    assert (a.grad.shape, b.grad.shape, c.grad.shape) == ((4, 3), (3,), (4, 1))
    assert b.grad.tolist() == [4.0] * 3
    assert c.grad.tolist() == [[3.0]] * 4


def test_two_leaves_never_share_a_gradient(leaf):
    a, b = leaf([1.0, 2.0]), leaf([3.0, 4.0])
    (a + b).sum().backward()
    a.grad.fill_(7)
    assert b.grad.tolist() == [1.0, 1.0]
    g = Tensor.ones((2,), queue=a.queue)
    x = leaf([1.0, 2.0])
    (x + 0.0).backward(g)
    x.grad.fill_(5)
    assert g.tolist() == [1.0, 1.0]


def test_no_grad_and_enable_grad(leaf):
    x = leaf([1.0])
    with ag.no_grad():
        assert not ag.is_grad_enabled()
        assert not (x * 2.0).requires_grad
        with ag.enable_grad():
            assert (x * 2.0).requires_grad
    assert ag.is_grad_enabled()

    @ag.no_grad()
    def quiet():
        return x * 2.0

    assert not quiet().requires_grad
    with ag.set_grad_enabled(False):
        assert not (x * 2.0).requires_grad


def test_ops_carry_no_history(leaf):
    x = leaf([1.0])
    assert ops.mul(x, x).grad_fn is None
    assert ag.mul(x, x).grad_fn is not None


def test_integers_and_comparisons_have_no_history(leaf):
    x = leaf([1.0, -1.0])
    assert not (x > 0.0).requires_grad


def test_higher_orders(leaf):
    x = leaf([2.0])
    y = (x * x * x * x).sum()
    for expected in (32.0, 48.0, 48.0, 24.0):
        (g,) = ag.grad(y, x, create_graph=True)
        assert g.tolist() == pytest.approx([expected])
        y = g.sum()


def test_grad_touches_no_leaf(leaf):
    x, z = leaf([2.0]), leaf([1.0])
    (g,) = ag.grad((x * x).sum(), x)
    assert g.tolist() == [4.0]
    assert x.grad is None
    assert [g.tolist() for g in ag.grad((x * x).sum(), [x, x])] == [[4.0], [4.0]]
    with pytest.raises(ValueError, match=r"\[grad\] input 1 must be used to compute the outputs; shape=\(1,\); pass allow_unused=True"):
        ag.grad((x * x).sum(), [x, z])
    assert ag.grad((x * x).sum(), [x, z], allow_unused=True)[1] is None


def test_grad_of_something_in_the_middle(leaf):
    x = leaf([2.0])
    y = x * 3.0
    (g,) = ag.grad((y * y).sum(), y)
    assert g.tolist() == [12.0]


def test_backward_of_several_tensors_and_for_some_inputs(leaf):
    w, v = leaf([1.0, 2.0]), leaf([3.0, 4.0])
    ag.backward([(w * v).sum(), w * w], [None, w.detach()])
    assert (w.grad.tolist(), v.grad.tolist()) == ([5.0, 12.0], [1.0, 2.0])
    y = (w * v).sum()
    y.backward(None, True)
    y.backward(inputs=v)
    assert (w.grad.tolist(), v.grad.tolist()) == ([8.0, 16.0], [3.0, 6.0])
    with pytest.raises(ShapeError, match=r"\[backward\] grad_tensors must have one entry per tensor; tensors=1, grad_tensors=2"):
        ag.backward([y], [None, None])


def test_backward_adds_the_gradient_of_an_input_once(leaf):
    w = leaf([1.0, 2.0])
    kept, y = ag.tensor([1.0, 1.0]), w * 3.0
    w.grad = kept
    y.retain_grad()
    (y * 2.0).sum().backward(retain_graph=True, inputs=[w, y, w])
    assert (y.grad.tolist(), w.grad.tolist()) == ([2.0, 2.0], [7.0, 7.0])
    assert w.grad is kept  # added in place, as without inputs
    (w + y.detach().requires_grad_()).backward(w.grad, inputs=[w])
    v = leaf([0.0, 0.0])
    (w + v).backward(w.grad, inputs=[w, v])
    assert (w.grad.tolist(), v.grad.tolist()) == ([28.0, 28.0], [14.0, 14.0])


def test_grad_leaves_what_lies_below_its_inputs(leaf):
    """The function of an input is not run: neither are hooks below it called, nor is its memory released."""
    x, called = leaf([1.0, 2.0]), []
    below = x * 2.0
    below.register_hook(called.append)
    y = below * below
    (g,) = ag.grad((y * y).sum(), y)
    assert g.tolist() == [8.0, 32.0] and not called
    y.backward(g)
    assert x.grad.tolist() == [64.0, 512.0] and len(called) == 1
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        y.backward(g, inputs=[x])


def test_grad_through_a_checkpoint_changes_no_gradient_of_other_leaves(leaf):
    x, w, v = leaf([1.0, 2.0]), leaf([3.0, 4.0]), leaf([5.0, 6.0])
    v.register_hook(lambda g: g + 1.0)
    y = ag.checkpoint(lambda x: ag.checkpoint(lambda x: x * w * v, x), x) * v
    of_v, of_x, again = ag.grad(y.sum(), [v, x, v])
    assert of_x.tolist() == [75.0, 144.0] and of_v.tolist() == again.tolist() == [31.0, 97.0]
    assert w.grad is None and v.grad is None and x.grad is None


def test_grad_with_torchs_order_of_arguments_and_zeros_for_unused_inputs(leaf):
    w, v = leaf([1.0, 2.0]), leaf([3.0, 4.0])
    (first,) = ag.grad((w * w * w).sum(), w, None, True, True, True, False)
    assert ag.grad(first.sum(), w)[0].tolist() == [6.0, 12.0]
    assert [g.tolist() for g in ag.grad(w.sum(), [w, v], materialize_grads=True)] == [[1.0, 1.0], [0.0, 0.0]]


def test_errors(leaf, device):
    x = leaf([1.0, 2.0])
    with pytest.raises(ShapeError, match=r"\[backward\] gradient must be given unless the tensor has exactly one element; shape=\(2,\)"):
        (x * 2.0).backward()
    with pytest.raises(ValueError, match=r"\[backward\] the tensor must require grad"):
        Tensor.ones((1,), queue=device.queue).backward()
    with pytest.raises(ShapeError, match=r"\[backward\] gradient must have the shape of the tensor; gradient=\(3,\), tensor=\(2,\)"):
        (x * 2.0).backward(Tensor.ones((3,), queue=device.queue))
    with pytest.raises(TypeError, match=r"\[backward\] gradient must be a tensor; gradient=ndarray, tensor=\(2,\); pass ag.tensor"):
        (x * 2.0).backward(np.ones(2, np.float32))
    for call, text in (
        (lambda: ag.backward(None), r"\[backward\] the outputs must be tensors; given=NoneType"),
        (lambda: ag.grad(x.sum(), 3.0), r"\[grad\] inputs must be a tensor or a list of tensors; given=float"),
        (lambda: ag.grad(x * 2.0, x, np.ones(2)), r"\[grad\] grad_outputs must be a tensor or a list of tensors; given=float64"),
        (lambda: x.register_hook(3), r"\[register_hook\] hook must be callable; given=int"),
    ):
        with pytest.raises(TypeError, match=text):
            call()
    with pytest.raises(ShapeError, match=r"\[grad\] grad_outputs must have one entry per output; outputs=2, grad_outputs=1"):
        ag.grad([x * 2.0, x], x, [x.detach()])
    remove = x.register_hook(lambda g: g.sum())
    with pytest.raises(ShapeError, match=r"\[backward\] a hook must return a gradient of the same shape and dtype; gradient=\(2,\)"):
        (x * 2.0).sum().backward()
    remove()
    y = (x * x).sum()
    y.backward()
    with pytest.raises(RuntimeError, match=r"backward has already released the memory of this graph; op=sum; pass retain_graph=True"):
        y.backward()


def test_retain_graph(leaf):
    x = leaf([3.0])
    y = (x * x).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert x.grad.tolist() == [12.0]


def test_hooks(leaf):
    x = leaf([1.0, 2.0])
    seen = []
    y = x * 2.0
    y.register_hook(lambda g: seen.append(g.tolist()))
    handle = x.register_hook(lambda g: g * 10.0)
    y.sum().backward()
    assert seen == [[1.0, 1.0]]
    assert x.grad.tolist() == [20.0, 20.0]
    handle.remove()
    x.zero_grad()
    (x * 1.0).sum().backward()
    assert x.grad.tolist() == [1.0, 1.0]


def test_a_hook_sees_the_whole_gradient_once(leaf):
    x, w = leaf([1.0]), leaf([1.0])
    seen = []
    x.register_hook(lambda g: seen.append(("x", g.tolist())))
    w.register_hook(lambda g: seen.append(("w", g.tolist())))
    y = x * 2.0 + x * 3.0
    (y * w + w).sum().backward()
    assert seen == [("w", [6.0]), ("x", [5.0])]  # each as soon as nothing can be added to it
    x.backward()
    assert seen[2:] == [("x", [1.0])] and x.grad.tolist() == [6.0]


def test_retain_grad(leaf):
    x = leaf([2.0])
    y = x * x
    ag.retain_grad(y)
    (y * 3.0).sum().backward()
    assert y.grad.tolist() == [3.0]


def test_a_program_may_live_in_a_folder_called_netcl(leaf):
    program = compile("ag.log(x)", "/projects/netcl/train.py", "exec")
    with ag.detect_anomaly(), pytest.raises(FloatingPointError, match=r"called at /projects/netcl/train.py:1 in <module>"):
        exec(program, {"ag": ag, "x": leaf(np.array([-1.0], np.float32))})


def test_anomaly_names_op_site_and_index(leaf):
    x = leaf([[1.0, 2.0], [0.0, 3.0]])
    with ag.detect_anomaly(), pytest.raises(FloatingPointError) as caught:
        ag.log(x)
    text = str(caught.value)
    assert text.startswith("[log] every value must be finite, but the op returned one that is not; index=(1, 0), value=-inf")
    assert "test_tape.py" in text
    assert "ag.log(x)" in text
    with (
        ag.detect_anomaly(),
        pytest.raises(FloatingPointError, match=r"\[sqrt\] every value must be finite, but the op has a gradient with one"),
    ):
        ag.sqrt(x).sum().backward()
    loss = ag.sqrt(x).sum()
    with ag.detect_anomaly(), pytest.raises(FloatingPointError, match=r"\[sqrt\] .*; run the forward pass inside"):
        loss.backward()


def test_debug_tape(leaf):
    x = leaf(np.ones((2, 3)))
    with ag.Tape() as tape:
        (x * x).sum()
    assert ag.get_current_tape() is None
    assert len(tape) == 2
    lines = ag.debug_tape(tape).splitlines()
    assert lines[0].split() == ["0", "mul", "(2,", "3),", "(2,", "3)", "->", "(2,", "3)"]
    tape.reset()
    assert len(tape) == 0


def test_functions_of_ones_own(leaf):
    class Clip(ag.Function):
        @staticmethod
        def forward(ctx, x, low):
            ctx.save_for_backward(x)
            ctx.low = low
            return ops.maximum(x, low)

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * ag.cast(x > ctx.low, "float32"), None

    x = leaf([-1.0, 2.0])
    Clip.apply(x, 0.5).sum().backward()
    assert x.grad.tolist() == [0.0, 1.0]

    class Wrong(Clip):
        @staticmethod
        def backward(ctx, g):
            return g

    with pytest.raises(ValueError, match=r"\[Wrong\] backward must return 2 gradients, got 1"):
        Wrong.apply(leaf([1.0]), 0.5).sum().backward()


def test_functions_with_other_results_and_left_out_arguments(leaf):
    class Several(ag.Function):
        @staticmethod
        def forward(ctx, x, scale=2.0):
            ctx.mark_non_differentiable(largest := x.max(0)[1])
            return largest, 7, x * scale, None

        @staticmethod
        @ag.once_differentiable
        def backward(ctx, first, second, g, last):
            assert second is last is None
            return g * 2.0, None  # the scale that apply() was called without

    x = leaf([1.0, 3.0])
    largest, seven, out, none = Several.apply(x)
    assert (largest.item(), largest.requires_grad, seven, none) == (1, False, 7, None)
    (g,) = ag.grad(out.sum(), x, create_graph=True)
    assert g.tolist() == [2.0, 2.0]
    with pytest.raises(RuntimeError, match=r"\[once_differentiable\] a backward with this decorator cannot be differentiated"):
        g.sum().backward()


def test_modes_are_statements_and_decorators(leaf):
    x = leaf([1.0])
    try:
        ag.set_grad_enabled(False)
        assert not (x * 2).requires_grad
        with ag.set_grad_enabled(True):
            assert (x * 2).requires_grad
        assert not ag.is_grad_enabled()
    finally:
        ag.set_grad_enabled(True)

    @ag.set_grad_enabled(False)
    def plain():
        return ag.is_grad_enabled()

    @ag.no_grad
    def steps():
        yield ag.is_grad_enabled()
        yield ag.is_grad_enabled()

    found = steps()
    seen = [ag.is_grad_enabled(), plain(), next(found), ag.is_grad_enabled(), next(found), ag.is_grad_enabled()]
    assert seen == [True, False, False, True, False, True]
    assert not netcl.inference_mode(lambda: ag.is_grad_enabled())()


def test_gradcheck_finds_a_wrong_gradient(device):
    class Wrong(ag.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0]

    x = ag.tensor(np.array([0.5, 1.5]), requires_grad=True, queue=device.queue)
    assert ag.gradcheck(lambda v: v * v, [x])
    assert ag.gradgradcheck(lambda v: v * v * v, [x])
    with pytest.raises(
        ag.GradientError, match=r"\[gradcheck\] the gradient of input 0 must agree with finite differences; by_differences="
    ):
        ag.gradcheck(Wrong.apply, [x])
    assert not ag.gradcheck(Wrong.apply, x, raise_exception=False)
    with pytest.raises(ValueError, match=r"\[gradcheck\] at least one input must be a tensor that requires grad"):
        ag.gradcheck(Wrong.apply, [x.detach()])


def test_memory_is_released_as_the_walk_passes(leaf, device):
    x = leaf(np.ones((1000,)))
    y = x * x
    kept = weakref.ref(y)
    z = (y * y).sum()
    del y
    assert kept() is not None
    z.backward()
    assert kept() is None


def test_a_step_leaves_nothing_behind(cl_device):
    queue = cl_device.queue
    pool = memory.get_persistent_pool(queue)
    w = ag.tensor(np.ones((32, 32), np.float32), requires_grad=True, queue=queue)

    def step():
        ag.relu(w * 2.0 + 1.0).sum().backward()
        w.zero_grad()

    for _ in range(3):  # which make the plans
        step()
    gc.collect()
    gc.disable()
    try:
        in_use = []
        for _ in range(5):
            step()
            in_use.append(pool.stats.bytes_allocated - pool.stats.bytes_cached)
    finally:
        gc.enable()
    assert len(set(in_use)) == 1
    assert gc.collect() == 0


def test_checkpoint(leaf):
    x, w = leaf([1.0, 2.0]), leaf([3.0, 4.0])

    def block(v):
        return ag.tanh(v * w)

    block(x).sum().backward()
    expected = x.grad.tolist(), w.grad.tolist()
    x.zero_grad()
    w.zero_grad()
    ag.checkpoint(block, x).sum().backward()
    assert (x.grad.tolist(), w.grad.tolist()) == expected


@pytest.mark.parametrize("retain", [False, True])
def test_a_checkpoint_may_use_computed_tensors(leaf, retain):
    def gradients(call):
        x, w = leaf([1.0, 2.0]), leaf([0.3, 0.4])
        v = ag.tanh(w) * 3.0

        def inner(b):
            return call(lambda c, by: c * v * by, b, by=b)

        y = call(lambda a, extra: inner(ag.tanh(a * v) * extra["scale"][0]), x, extra={"scale": [v * 2.0]})
        loss = y.sum() + (v * v).sum()
        found = ag.grad(loss, [x, w, v], retain_graph=True)
        for _ in range(1 + retain):
            loss.backward(retain_graph=retain)
        return [g.tolist() for g in (*found, x.grad, w.grad)]

    expected = gradients(lambda function, *args, **options: function(*args, **options))
    np.testing.assert_allclose(gradients(ag.checkpoint), expected, rtol=1e-5)


def test_results_of_a_checkpoint(leaf):
    x, w, buffer = leaf([1.0, 2.0]), leaf([3.0, 4.0]), ag.tensor([5.0, 6.0])
    out = ag.checkpoint(lambda a: {"y": [a * w, None], "same": (w, buffer, a, 7)}, x)
    (w2, buffer2, x2, seven), (y, none) = out["same"], out["y"]
    assert (none, seven) == (None, 7) and w.grad_fn is x.grad_fn is None and not buffer.requires_grad and buffer2.tolist() == [5.0, 6.0]
    (y.sum() + (w2 * w2).sum() + (x2 * 3.0).sum()).backward()
    assert (x.grad.tolist(), w.grad.tolist()) == ([6.0, 7.0], [7.0, 10.0])
    with pytest.raises(TypeError, match=r"\[checkpoint\] function must return tensors, .*; given=object"):
        ag.checkpoint(lambda a: object(), x)


def test_a_checkpoint_repeats_random_numbers_of_other_devices(cl_device):
    x = ag.tensor(np.ones(1000), "float32", requires_grad=True, device="cpu")
    with use_device(cl_device):
        y = ag.checkpoint(lambda a: ag.dropout(a, 0.5), x)
        y.sum().backward()
    np.testing.assert_array_equal(x.grad.to_host(), y.to_host())


def test_a_deep_graph(leaf):
    x = leaf([1.0])
    y = x
    for _ in range(3000):
        y = y + 1.0
    y.sum().backward()
    assert x.grad.tolist() == [1.0]


def test_a_gradient_is_told_all_further_arguments(leaf):
    """``*rest`` of an op reaches its vjp whole, not as its first value."""

    @op(vjp=lambda F, g, weights: F.mul(g, float(sum(weights))), ref=None, inputs=("x",))
    def weighted(x, *weights):
        return ops.mul(x, float(sum(weights)))

    x = leaf([1.0])
    ag.weighted(x, 2.0, 3.0).backward()
    ops.unregister("weighted")
    assert x.grad.tolist() == [5.0]


def test_an_observer_is_told_of_ops_looked_up_before(leaf):
    seen, add = [], ag.add
    ag.tape.modes.observer = lambda row, function, *args: seen.append(row.name) or function(*args)
    try:
        add(leaf([1.0]), 1.0)
    finally:
        ag.tape.modes.observer = None
    assert seen == ["add"]


def test_kept_gradients_are_those_of_the_current_values(device):
    """As torch: after all writes in place, after all hooks, and once however often retain_grad() is called."""
    x = ag.tensor(np.float32([1, 2]), requires_grad=True, queue=device.queue)
    y, z = x * 2, (x * 2).reshape((1, 2))
    for t in (y, y, z):
        t.retain_grad()
    y.register_hook(lambda g: g * 5)
    y.mul_(3)
    z[:, 0] = 4.0
    (y * y).sum().backward()
    (z * z).sum().backward()
    assert y.grad.tolist() == [12.0, 24.0]
    assert z.grad.tolist() == [[8.0, 8.0]]
    assert x.grad.tolist() == [360.0, 720.0 + 16.0]


def test_a_tensor_that_does_not_require_grad_keeps_none():
    with pytest.raises(AutogradError, match=r"\[retain_grad\] the tensor must require grad"):
        ag.tensor([1.0]).retain_grad()


def test_errors_reach_a_generator_in_no_grad():
    seen = []

    @contextmanager
    @ag.no_grad()
    def block():
        try:
            yield ag.is_grad_enabled()
        except KeyError:
            seen.append(ag.is_grad_enabled())

    with block() as inside:
        assert (inside, ag.is_grad_enabled()) == (False, True)
        raise KeyError
    assert seen == [False] and ag.is_grad_enabled()
