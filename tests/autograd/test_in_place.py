"""Changes in place of what backward needs: all of them are noticed, whoever makes them, and only where the values are read."""

import numpy as np
import pytest

import netcl.autograd as ag
from netcl import nn, ops, optim
from netcl.core.errors import AutogradError
from netcl.core.tensor import Tensor, duplicate
from netcl.distributed.collectives import broadcast
from netcl.runtime.capture import compile as compiled
from netcl.runtime.scheduler import Stream
from tests.conftest import eager_fusion

CHANGED = "a tensor that backward reads must not be changed in place after the op saved it"


@pytest.fixture
def given(device):
    return lambda *values, **options: ag.tensor(np.array(values, np.float32), queue=device.queue, **options)


def _item(t):
    with ag.no_grad():
        t[0] = 7.0


def _fill(t):
    with ag.no_grad():
        t.fill_(3.0)


def _optimizer(t):
    t.grad = Tensor.ones(t.shape, queue=t.queue)
    optim.SGD([t], lr=0.1).step()


def _swapped(t):
    nn.parameter.stand_on(t, duplicate(t))


WRITERS = {
    "fill": _fill,
    "host": lambda t: t.from_host([5.0, 6.0]),
    "write": lambda t: t.write(t * 2.0),
    "item": _item,
    "out of a formula": lambda t: ops.mul(t, 2.0, out=t),
    "out of a fold": lambda t: ops.sum(Tensor.ones((2, 3), queue=t.queue), axis=1, out=t),
    "view": lambda t: t.reshape((2, 1)).detach().fill_(3.0),
    "optimizer": _optimizer,
    "collective": lambda t: broadcast([duplicate(t), t]),
    "other memory": _swapped,
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_change_raises_where_the_values_are_read(given, writer):
    for _ in range(3):  # calls that are repeated note it, too
        w, x = given(1.0, 2.0, requires_grad=True), given(3.0, 4.0)
        loss = (w * x).sum()
        WRITERS[writer](w)  # the gradient of w does not read w
        w.grad = None
        loss.backward()
        assert w.grad.tolist() == [3.0, 4.0]
        loss = (w * x).sum()
        WRITERS[writer](x)
        with pytest.raises(AutogradError, match=rf"^\[mul\] {CHANGED}; shape=\(2,\), dtype=float32, kept_at=\d+, version=\d+; .*clone"):
            loss.backward()


def test_results_are_kept_under_other_names(given):
    w = given(1.0, 2.0, requires_grad=True)
    y = ag.exp(w)
    y.detach().fill_(0.0)
    with pytest.raises(AutogradError, match=rf"\[exp\] {CHANGED}"):
        y.sum().backward()


def test_the_order_of_a_training_step_is_free_of_it(given):
    layer = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    layer.to(given(0.0).device)
    opt, x = optim.SGD(layer.parameters(), lr=0.1), given([1.0, 2.0])
    for _ in range(2):
        opt.zero_grad()
        loss = layer(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()  # gradients are added to in place
        opt.step()
    loss = layer(x).sum()
    loss.backward(retain_graph=True)
    opt.step()
    with pytest.raises(AutogradError, match=rf"\[affine\] {CHANGED}; shape=\(1, 3\)"):
        loss.backward()


def test_batch_norm_changes_statistics_that_only_evaluation_keeps(given):
    norm, x = nn.BatchNorm1d(2).to(given(0.0).device), given([1.0, 2.0], [3.0, 5.0], requires_grad=True)
    (norm(x) + norm(x * 2.0)).sum().backward()
    loss = norm.eval()(x).sum()
    norm.train()(x)
    with pytest.raises(AutogradError, match=rf"\[batch_norm_inference\] {CHANGED}; shape=\(2,\)"):
        loss.backward()


def test_functions_and_checkpoints(given):
    class Square(ag.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, g):
            return g * 2.0 * ctx.saved_tensors[0]

    for call in (Square.apply, lambda x: ag.checkpoint(lambda t: t * t, x)):
        w = given(1.0, 2.0, requires_grad=True)
        loss = call(w).sum()
        w.detach().fill_(3.0)
        with pytest.raises(AutogradError, match=CHANGED):
            loss.backward()


def test_values_that_wait_know_it(cl_device):
    a = ag.tensor(np.ones((4, 4), np.float32), requires_grad=True, queue=cl_device.queue)
    with eager_fusion(1):
        y = ag.exp(a * 2.0)
        loss = (y * y).sum()
        y.reshape((16,)).detach().fill_(2.0)
        with pytest.raises(AutogradError, match=rf"\[mul\] {CHANGED}"):
            loss.backward()
    for function in (ag.jit_compile(lambda t, s: ag.tanh(t * s) * s), lambda t, s: t @ s):
        s = ag.tensor(np.ones((4, 4), np.float32), queue=cl_device.queue)
        y = function(a, s)
        s.fill_(2.0)
        with pytest.raises(AutogradError, match=CHANGED):
            y.sum().backward()


def test_a_replay_changes_what_the_step_changed(cl_device):
    x = ag.tensor([1.0, 2.0], queue=cl_device.queue)
    w = ag.tensor([3.0, 4.0], requires_grad=True, queue=cl_device.queue)
    opt = optim.SGD([w], lr=0.1)

    def step(x):
        opt.zero_grad()
        (w * x).sum().backward()
        opt.step()

    step = compiled(step)
    for _ in range(5):
        step(x)
    assert step.graphs
    v = ag.tensor([1.0, 1.0], requires_grad=True, queue=cl_device.queue)
    for kept in (w.detach(), w.grad):
        loss = (v * kept).sum()
        step(x)
        with pytest.raises(AutogradError, match=rf"\[mul\] {CHANGED}"):
            loss.backward()
    loss = (v * w.detach()).sum()
    Stream(cl_device).use(w).detach().fill_(0.0)
    with pytest.raises(AutogradError, match=CHANGED):
        loss.backward()


def test_a_result_with_a_history_is_not_changed_unawares(given):
    w = given(1.0, 2.0, requires_grad=True)
    y = w * 2.0
    with pytest.raises(AutogradError, match=r"^\[mul\] cannot overwrite its result by from_host, .*; shape=\(2,\), dtype=float32; .*no_g"):
        y.from_host([5.0, 6.0])
    with pytest.raises(AutogradError, match=r"^\[add\] out= cannot be used with an input .*; out=\(2,\); drop out="):
        ag.add(w, 1.0, out=given(0.0, 0.0))
    with ag.no_grad():
        y[0] = 5.0
        ag.add(w, 1.0, out=w)
    y.sum().backward()
    y.from_host([5.0, 6.0])  # nothing is walked any more
    assert (y.tolist(), w.tolist(), w.grad.tolist()) == ([5.0, 6.0], [2.0, 3.0], [2.0, 2.0])


def test_a_copy_of_a_leaf_is_no_leaf(given):
    leaf, x = given(1.0, 2.0, requires_grad=True), given(0.0, 0.0)
    (x.copy_(leaf) * 3).sum().backward()
    assert x.grad is None and leaf.grad.tolist() == [3.0, 3.0]


def test_hooks_of_a_copy_see_its_gradient_alone(given):
    leaf, x = given(1.0, 2.0, requires_grad=True), given(0.0, 0.0)
    source = leaf * 2
    x.copy_(source)
    assert ag.grad((source * 3 + x).sum(), x, retain_graph=True)[0].tolist() == [1.0, 1.0]
    x.retain_grad()
    x.register_hook(lambda gradient: gradient * 10)
    (source * 3 + x).sum().backward()
    assert x.grad.tolist() == [10.0, 10.0] and leaf.grad.tolist() == [26.0, 26.0]


def test_tensors_without_elements_are_filled(device):
    weight = Tensor.zeros((4, 0), queue=device.queue).requires_grad_()
    (weight * 2).fill_(1.0).sum().backward()
    assert weight.grad is None or weight.grad.shape == (4, 0)
    assert (weight * 2).zero_().tolist() == [[]] * 4
