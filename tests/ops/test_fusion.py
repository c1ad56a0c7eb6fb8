"""Deferred values: notes of who waits for which memory are neither lost nor kept for ever, and views keep their shape."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import netcl.autograd as ag
from netcl import ops
from netcl.core.hooks import hooks
from netcl.core.tensor import Tensor
from netcl.engine import lazy_graph, schedule
from netcl.profiling.profiler import profile
from tests.conftest import eager_fusion


def test_weights_that_never_change_do_not_gather_notes(device):
    x, w = (Tensor.ones((3,), queue=device.queue) for _ in range(2))
    function = ag.jit_compile(lambda x: x * w)
    for _ in range(200):
        function(x)
    assert len(hooks.readers[id(lazy_graph._shared_values(w))]) < 100


class Interrupted(lazy_graph.NodeReaders):
    """Before the first entry goes, another thread has its turn, for as long as it is not kept waiting."""

    def __init__(self, entries: dict, turn: threading.Thread):
        super().__init__(entries)
        self.turn = turn

    def let_in(self) -> None:
        if self.turn.ident is None:
            self.turn.start()
            self.turn.join(0.2)

    def pop(self, *given):
        self.let_in()
        return super().pop(*given)

    def __delitem__(self, key) -> None:
        self.let_in()
        super().__delitem__(key)


def test_a_thread_that_tidies_up_loses_no_note_of_another(device, monkeypatch):
    x, left = Tensor.ones((3,), queue=device.queue), []

    def leave() -> None:
        with lazy_graph.fusing():
            left.append(x * 2.0)

    turn = threading.Thread(target=leave)
    monkeypatch.setattr(hooks, "readers", Interrupted({id(lazy_graph._shared_values(x)): []}, turn))
    lazy_graph._shrink()
    turn.join()
    x.fill_(5.0)
    assert left[0].tolist() == [2.0, 2.0, 2.0]


def test_an_op_that_was_computed_in_part_is_computed_from_what_it_read(device, monkeypatch):
    monkeypatch.setattr(lazy_graph, "MOST_WAITING", 2)

    @ag.jit_compile
    def function(x):
        y = ag.std(x, axis=-1)
        x.fill_(7.0)
        return y

    x = ag.tensor([[1.0, 3.0], [2.0, 8.0]], queue=device.queue)
    want = ag.std(x, axis=-1).tolist()
    assert function(x).tolist() == want


VIEWS = {
    "conv1d": (((4, 6, 5), (6, 6, 1)), lambda x, k: ops.conv1d(x, k), (4, 6, 5)),
    "conv2d": (((2, 3, 4, 4), (5, 3, 3, 3)), lambda x, k: ops.conv2d(x, k, padding=1).flatten(2), (2, 5, 16)),
    "matmul": (((8, 4), (4, 6)), lambda x, w: (x @ w).reshape((2, 4, 6)), (2, 4, 6)),
    "linear": (((8, 4), (6, 4)), lambda x, w: ops.linear(x, w).reshape((6, 8)), (6, 8)),
    "scaled": (((8, 4), (4, 6)), lambda x, w: (x @ w).reshape((6, 8)) * 0.5, (6, 8)),
    "relu": (((2, 3, 4, 4), (5, 3, 1, 1)), lambda x, k: ops.relu(ops.conv2d(x, k).flatten(1)), (2, 80)),
    "batch_norm": (((2, 3, 4, 4), (3,)), lambda x, w: ops.batch_norm(x, None, None, w, None, training=True).flatten(2), (2, 3, 16)),
    "layer_norm": (((6, 8), (8,)), lambda x, w: ops.layer_norm(x, (8,), w).reshape((3, 16)), (3, 16)),
    "softmax": (((6, 8), (8,)), lambda x, w: ops.softmax(x + w).reshape((3, 16)), (3, 16)),
    "pool": (((2, 3, 4, 4), ()), lambda x, s: (ops.avg_pool2d(x, 2) * s).flatten(1), (2, 12)),
    "formula": (((6, 8), (8,)), lambda x, w: (x * w).reshape((3, 16)), (3, 16)),
}
FOLLOWERS = {
    "residual": lambda s, r: r + s,
    "residual on the right": lambda s, r: s + r,
    "bias along the view's last axis": lambda s, r: s + r.reshape((-1, r.shape[-1]))[0],
    "scale, then bias": lambda s, r: s * 2.0 + r.reshape((-1, r.shape[-1]))[0],
    "relu": lambda s, r: ops.relu(s),
    "view of a view": lambda s, r: (s * 2.0).reshape((-1,)) + r.reshape((-1,)),
    "row by row": lambda s, r: ops.softmax(s) + r,
}


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("mode", ["eager", "jit_compile"])
@pytest.mark.parametrize("what", VIEWS)
def test_a_view_of_a_pending_value_keeps_its_shape(device, rng, what, mode, held):
    shapes, view, shape = VIEWS[what]
    inputs = [ag.tensor(rng.standard_normal(s).astype("f4"), queue=device.queue) for s in (*shapes, shape)]

    def run(follow):
        def function(a, b, r):
            seen = view(a, b)
            return (follow(seen, r), seen) if held else (follow(seen, r),)

        return [t.to_host() for t in (ag.jit_compile(function) if mode == "jit_compile" else function)(*inputs)]

    for name, follow in FOLLOWERS.items():
        with eager_fusion(0):
            want = [t.to_host() for t in (follow(view(*inputs[:2]), inputs[2]), view(*inputs[:2]))]
        with eager_fusion(1):
            got = run(follow)
        for g, w in zip(got, want, strict=False):
            np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5, err_msg=name)


def test_a_view_keeps_its_shape_from_the_default_threshold_on(device, rng):
    x, k = (ag.tensor(rng.standard_normal(s).astype("f4"), queue=device.queue) for s in ((64, 64, 32), (64, 64, 1)))
    s = ops.conv1d(x, k)
    np.testing.assert_array_equal((x + s).to_host(), x.to_host() + s.to_host())


def test_an_op_joins_a_chain_whose_middle_was_computed(device, rng):
    x, w, b = (ag.tensor(rng.standard_normal(s).astype("f4"), queue=device.queue) for s in ((8, 4), (4, 6), (6,)))

    def function(x, w, b):
        middle = (x @ w) * 2.0
        last = middle + b
        middle.to_host()
        return last + b * 3.0

    np.testing.assert_allclose(ag.jit_compile(function)(x, w, b).to_host(), function(x, w, b).to_host(), rtol=1e-5, atol=1e-5)


def test_making_room_computes_every_value_once(device, rng, monkeypatch):
    """Held products are computed before what follows them, which leaves formulas: those count as waiting, too."""
    monkeypatch.setattr(lazy_graph, "MOST_WAITING", 3)
    x, w = (ag.tensor(rng.standard_normal(s).astype("f4"), queue=device.queue) for s in ((8, 4), (4, 6)))
    with eager_fusion(1):
        held, relus = [], []
        for _ in range(4):
            held.append(x @ w)
            relus.append(ops.relu(held[-1]))
        views = [y.reshape((48,)) for y in relus]
        for y in relus:
            y.fill_(2.0)
    for y, seen in zip(held, views, strict=True):
        np.testing.assert_allclose(y.to_host(), x.to_host() @ w.to_host(), rtol=1e-5, atol=1e-5)
        assert set(seen.tolist()) == {2.0}


def test_two_views_of_one_memory_are_read_apart(device):
    x = ag.tensor([1.0, 2.0, 3.0, 4.0], queue=device.queue)
    column, row = x.reshape((4, 1)), x.reshape((1, 4))
    got = ag.jit_compile(lambda a, b: a * 2.0 + b)(column, row)
    np.testing.assert_array_equal(got.to_host(), 2 * column.to_host() + row.to_host())


def test_a_value_computed_meanwhile_is_read_as_it_was(device):
    x, wide = ag.tensor([1.0, 2.0], queue=device.queue), Tensor.ones((3, 2), queue=device.queue)
    with lazy_graph.fusing():
        y = x * 2.0
        z = y + wide  # of another shape: not computed with y
        y.to_host()
        y.fill_(0.0)
        assert z.tolist() == [[3.0, 5.0]] * 3


def test_a_fold_computed_meanwhile_is_read_along_its_rows(device, monkeypatch):
    x = ag.tensor([[1.0, 2.0, 4.0], [3.0, 5.0, 6.0], [0.0, 1.0, 1.0]], queue=device.queue)
    with lazy_graph.fusing():
        total = ag.sum(x, axis=-1)
        later = total * 2.0 + ag.max(x, axis=-1)
        monkeypatch.setattr(schedule, "MOST_NODES", 1)  # so that the sum is computed by itself
        assert total.tolist() == [7.0, 14.0, 2.0]
        monkeypatch.undo()
        assert later.tolist() == [18.0, 34.0, 5.0]


@pytest.mark.parametrize("other", [lambda w: w.clone() * 5.0, lambda w: w.to("cpu"), lambda w: w.half()], ids=["values", "device", "dtype"])
def test_values_that_wait_read_the_data_from_before_other_data_is_assigned(device, other):
    w = Tensor.full((3,), 2.0, queue=device.queue)
    with lazy_graph.fusing():
        y = w * 3.0
        w.data = other(w)
    assert y.tolist() == [6.0] * 3


def test_steps_after_a_product_are_applied_in_order(device, rng):
    x, w, b, r = (ag.tensor(rng.standard_normal(s).astype("f4"), queue=device.queue) for s in ((8, 4), (6, 4), (6,), (2, 8, 6)))
    plain = x.to_host() @ w.to_host().T + b.to_host()
    cases = {
        "scale after bias": (lambda y: y * 2.0, 2 * plain),
        "residual that enlarges": (lambda y: y + r, plain + r.to_host()),
        "two activations": (lambda y: ops.tanh(ops.relu(y)), np.tanh(np.maximum(plain, 0))),
        "residual after activation": (lambda y: ops.relu(y) + r[0], np.maximum(plain, 0) + r.to_host()[0]),
    }
    with eager_fusion(1):
        for name, (follow, want) in cases.items():
            np.testing.assert_allclose(follow(ops.linear(x, w, b)).to_host(), want, rtol=1e-5, atol=1e-5, err_msg=name)


def test_pending_values_are_computed_in_the_order_of_their_ops(cl_device):
    """A recording must not depend on where Python puts an object: a pending op that is given up leaves no place to the next one."""
    x, y, z = (Tensor.ones((size,), queue=cl_device.queue) for size in (5, 6, 7))
    with profile(cl_device, roofline=False) as seen, lazy_graph.fusing():
        given_up, first = [ops.exp(x) for _ in range(50)], ops.sin(y)
        del given_up
        second = ops.cos(z)
        lazy_graph.flush()
    assert [event.name for event in seen.events] == ["op_sin", "op_cos"]
    np.testing.assert_allclose([first.to_host()[0], second.to_host()[0]], [np.sin(1), np.cos(1)], rtol=1e-6)
