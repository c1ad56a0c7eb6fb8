"""A backward pass that comes again runs a plan: the gradients are those of the walk, and whatever a plan cannot do is walked."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import netcl as nc
import netcl.autograd as ag
from netcl import nn
from netcl.autograd import backward_pass
from netcl.core import memory, platforms
from netcl.core.errors import AutogradError
from netcl.core.kernels import program
from netcl.core.tensor import Tensor
from netcl.engine.registry import op, unregister
from netcl.nn import functional as F
from tests.conftest import eager_fusion


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)), nc.randn(5, 6)


def cnn():
    layers = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 3 * 3, 4)
    return nn.Sequential(*layers), nc.randn(5, 2, 6, 6)


def attention():
    return nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), nn.LayerNorm(8), nn.Linear(8, 4)), nc.randn(
        2, 5, 8
    )


def dropout():
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 4)), nc.randn(5, 6)


def recurrent():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.out = nn.GRU(6, 8, batch_first=True), nn.Linear(8, 4)

        def forward(self, x):
            return self.out(self.cell(x)[0][:, -1])

    return Last(), nc.randn(5, 3, 6)


def words():
    return nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 4)), nc.tensor(np.arange(10).reshape(5, 2) % 9)


MODELS = [mlp, cnn, attention, dropout, recurrent, words]


def gradients(model, x, loss=lambda y: (y * y).mean() + y.sigmoid().sum(), seed=3):
    """The gradients of one training step."""
    nc.manual_seed(seed)
    model.zero_grad()
    loss(model(x)).backward()
    return [None if p.grad is None else p.grad.to_host() for p in model.parameters()]


def equal(a, b) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("make", MODELS)
def test_every_pass_gives_the_gradients_of_the_first(make, device):
    nc.manual_seed(0)
    model, x = make()
    first, *others = [gradients(model, x) for _ in range(4)]
    assert all(np.isfinite(g).all() and np.abs(g).sum() > 0 for g in first)
    assert all(equal(first, other) for other in others)


def test_a_plan_uses_the_values_of_its_own_pass(device, rng):
    """Inputs, weights and the labels change between passes; only shapes and dtypes are part of a plan."""
    nc.manual_seed(0)
    model, _ = mlp()
    for _ in range(5):
        x, y = nc.tensor(rng.standard_normal((5, 6), np.float32)), nc.tensor(rng.integers(0, 4, 5))
        made = gradients(model, x, lambda out, y=y: F.cross_entropy(out, y))
        w, b = (p.to_host().astype(float) for p in model[2].parameters())
        hidden = np.maximum(x.to_host() @ model[0].weight.to_host().T + model[0].bias.to_host(), 0)
        p = np.exp(hidden @ w.T + b)
        slope = (p / p.sum(1, keepdims=True) - np.eye(4)[y.to_host()]) / 5
        np.testing.assert_allclose(made[2], slope.T @ hidden, rtol=1e-4, atol=1e-6)
        with nc.no_grad():
            for q, g in zip(model.parameters(), made, strict=True):
                q.sub_(nc.tensor(g) * 0.5)


def test_numbers_that_change_are_those_of_the_pass(device):
    x = nc.tensor([1.0, 2.0, -3.0], requires_grad=True)
    for number in (2.0, 2.0, 2.0, 3.0, 0.0, -0.0, 3.0, 3.0, 0.5, 2.0, 1.0, True, 1):
        x.grad = None
        F.leaky_relu(x * float(number), 0.25).sum().backward()
        slope = np.array([1.0, 1.0, 0.25]) if number > 0 else np.full(3, 0.25)
        assert x.grad.tolist() == (slope * float(number)).tolist()


def test_leaves_that_share_a_gradient_have_memory_of_their_own(device):
    for _ in range(4):
        a, b = (nc.tensor([1.0, 2.0], requires_grad=True) for _ in range(2))
        given = nc.tensor([5.0, 7.0])
        (a + b).backward(given)
        a.grad.zero_()
        assert b.grad.tolist() == [5.0, 7.0] and given.tolist() == [5.0, 7.0]
        b.grad.mul_(2.0)
        assert a.grad.tolist() == [0.0, 0.0] and given.tolist() == [5.0, 7.0]


def test_the_gradient_of_a_sum_is_not_changed_by_a_write_to_grad(device):
    for _ in range(4):
        x = nc.tensor(3.0, requires_grad=True)
        (x + 0.0).backward()
        assert x.grad.item() == 1.0
        x.grad.mul_(7.0)


def test_gradients_accumulate(device):
    x = nc.tensor([1.0, 2.0], requires_grad=True)
    for n in range(1, 6):
        (x * x).sum().backward()
        assert x.grad.tolist() == [2.0 * n, 4.0 * n]


def test_a_graph_is_released_unless_it_is_retained(device):
    x = nc.tensor([1.0, 2.0], requires_grad=True)
    for _ in range(4):
        x.grad = None
        loss = (x * x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        assert x.grad.tolist() == [4.0, 8.0]
        with pytest.raises(RuntimeError, match="retain_graph=True"):
            loss.backward()


def test_a_part_without_a_gradient_stays_differentiable(device):
    """The walk does not visit a node whose gradient nobody needs, so its memory must not be released."""
    x = nc.tensor([1.0, 2.0], requires_grad=True)
    for _ in range(4):
        x.grad = None
        inner = x * 3.0
        rounded = inner.round()
        (x * 2.0 + rounded.detach()).sum().backward()
        inner.sum().backward()
        assert x.grad.tolist() == [5.0, 5.0]


def test_hooks_are_called_in_every_pass(device):
    for _ in range(4):
        x, seen = nc.tensor([1.0, 2.0], requires_grad=True), []
        y = x * 3.0
        y.register_hook(lambda g, seen=seen: seen.append("y") or g * 2.0)
        x.register_hook(lambda g, seen=seen: seen.append("x"))
        y.sum().backward()
        assert seen == ["y", "x"] and x.grad.tolist() == [6.0, 6.0]


def test_a_tensor_that_was_changed_in_place_raises_in_every_pass(device):
    for change in (False, False, False, True, True, False):
        x, w = nc.tensor([1.0, 2.0]), nc.tensor([3.0, 4.0], requires_grad=True)
        loss = (x * w).sum()
        if change:
            x.fill_(9.0)
            with pytest.raises(AutogradError, match="changed in place"):
                loss.backward()
                w.grad.to_host()
        else:
            loss.backward()
            assert w.grad.tolist() == [1.0, 2.0]


def test_frozen_parameters_get_no_gradient(device):
    model, x = mlp()
    for frozen in (0, 0, 0, 2, 2, 2, 0):
        for p in model.parameters():
            p.requires_grad = True
        model[frozen].requires_grad_(False)
        found = gradients(model, x)
        assert [g is None for g in found] == [frozen == 0, frozen == 0, frozen == 2, frozen == 2]


def test_anomalies_are_found_in_every_pass(device):
    x = nc.tensor([0.0, 1.0], requires_grad=True)
    for anomaly in (False, False, False, True):
        x.grad = None
        with ag.set_detect_anomaly(anomaly):
            loss = nc.sqrt(x).sum()
            if anomaly:
                with pytest.raises(FloatingPointError, match="sqrt"):
                    loss.backward()
            else:
                loss.backward()
                assert np.isinf(x.grad.to_host()[0])


def test_a_profile_lists_the_kernels_of_a_planned_pass(cl_device):
    from netcl.profiling import profile

    model, x = mlp()
    for _ in range(3):
        gradients(model, x)
    with profile() as seen:
        gradients(model, x)
    names = " ".join(str(row) for row in seen.table().splitlines())
    assert "relu_vjp" in names and "gemm" in names


def test_half_precision_gradients_are_cast_for_their_leaves(device):
    model, x = mlp()
    made = []
    for _ in range(4):
        nc.manual_seed(3)
        model.zero_grad()
        with nc.autocast("float16"):
            out = model(x)
        (out.float() ** 2).mean().backward()
        made.append([p.grad for p in model.parameters()])
    assert all(g.dtype == "float32" for g in made[0])
    assert all(equal([g.to_host() for g in made[0]], [g.to_host() for g in other]) for other in made[1:])


def test_graphs_of_any_size_give_the_same_gradients(cl_device):
    """From a number of elements on, values are deferred and backward is walked: here from 1, from 20, and never."""
    model, x = mlp()
    found = []
    for least in (0, 1, 20):
        with eager_fusion(least):
            found += [gradients(model, x) for _ in range(3)]
    assert all(np.allclose(a, b, rtol=1e-5, atol=1e-6) for other in found[1:] for a, b in zip(found[0], other, strict=True))


# ---- memory of gradients


def test_a_leaf_that_is_used_twice_changes_no_gradient_of_another_node(device):
    """The gradient of the sum goes to x and to w * 3, whose node reads it after x has got its second gradient."""
    for _ in range(4):
        x, w = nc.tensor([1.0, 2.0], requires_grad=True), nc.tensor([[1.0], [1.0]], requires_grad=True)
        later, again = w * 3.0, x * 5.0
        ((x.reshape(2, 1) + later).sum() + again.sum()).backward()
        assert x.grad.tolist() == [6.0, 6.0] and w.grad.tolist() == [[3.0], [3.0]]


def _of_an_output(x, kept):
    y = x + 0.0
    y.register_hook(kept.append)
    return (y * 3.0).sum()


def _of_a_retained_output(x, kept):
    y = x + 0.0
    y.retain_grad()
    kept.append(y)
    return (y * 3.0).sum()


def _of_a_leaf(x, kept):
    x.register_hook(kept.append)
    return (x * 3.0).sum()


def _answered(x, kept):
    kept.append(nc.tensor([3.0, 3.0]))
    x.register_hook(lambda g: kept[0])
    return x.sum()


def _of_a_function(x, kept):
    class Same(ag.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1.0

        @staticmethod
        def backward(ctx, g):
            kept.append(g * 3.0)
            return kept[0]

    return Same.apply(x).sum()


def _read_by_a_function(x, kept):
    class Reads(ag.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 0.0

        @staticmethod
        def backward(ctx, g):
            kept.append(g)
            return g * 0.0

    return ((x + Reads.apply(x.detach().requires_grad_())) * 3.0).sum()


def _of_an_op(x, kept):
    kept.append(nc.tensor([3.0, 3.0]))

    @op(name="passes", vjp=lambda F, g: kept[0], ref=None)
    def passes(x: Tensor):
        return nc.ops.mul(x, 1.0)

    try:
        return ag.passes(x).sum()
    finally:
        unregister("passes")


def _given(x, kept):
    kept.append(nc.tensor([3.0, 3.0]))
    return x * 1.0


HOLDERS = [_of_an_output, _of_a_retained_output, _of_a_leaf, _answered, _of_a_function, _read_by_a_function, _of_an_op, _given]


@pytest.mark.parametrize("holder", HOLDERS, ids=lambda holder: holder.__name__.strip("_"))
def test_a_leaf_shares_its_gradient_with_nobody(device, holder):
    """Optimizers, clipping and later passes change ``.grad`` in place."""
    for _ in range(3):
        x, kept = nc.tensor([1.0, 2.0], requires_grad=True), []
        out = holder(x, kept)
        out.backward(*(kept if holder is _given else ()))
        (x * 5.0).sum().backward()
        x.grad.mul_(2.0)
        held = kept[0] if kept[0].grad is None else kept[0].grad
        assert held.tolist() == [3.0, 3.0]


def test_grad_calls_the_hooks_of_what_it_is_asked_for(device):
    """As backward does: a gradient is what the hooks of its tensor make of it."""
    x = nc.tensor([1.0, 2.0], requires_grad=True)
    y = x * 3.0
    x.register_hook(lambda g: g + 1.0)
    y.register_hook(lambda g: g * 10.0)
    of_x, of_y = ag.grad((y * 2.0 + x).sum(), [x, y])
    assert of_y.tolist() == [20.0, 20.0] and of_x.tolist() == [62.0, 62.0] and x.grad is None


# ---- what plans hold


def test_an_op_of_the_same_name_replaces_one_that_plans_have_launched(device):
    @op(name="outer_op", vjp=lambda F, g: F.inner_op(g), ref=None)
    def outer_op(x: Tensor):
        return nc.ops.inner_op(x)

    try:
        for factor in (2.0, 3.0):

            @op(name="inner_op", vjp=None, ref=None)
            def inner_op(x: Tensor, factor=factor):
                return nc.ops.mul(x, factor)

            for _ in range(3):
                x = nc.tensor([1.0, 2.0], requires_grad=True)
                y = ag.outer_op(x)
                y.sum().backward()
                assert y.tolist() == [factor, 2 * factor] and x.grad.tolist() == [factor, factor]
            unregister("inner_op")
    finally:
        unregister("outer_op")


def test_a_plan_that_finds_no_memory_leaves_the_pass_to_the_walk(cl_device, monkeypatch):
    """The walk releases what forward has saved before it allocates the gradients of earlier layers."""
    weights, x = [nc.randn(100, 100, requires_grad=True) for _ in range(12)], nc.randn(100, 100)
    pool, made = memory.get_persistent_pool(cl_device.queue), []
    for short in (False, False, True):
        loss = x
        for w in weights:
            w.grad = None
            loss = (loss * w).tanh()
        loss = loss.sum()
        memory.empty_cache()
        create, room = pool._create, pool.stats.bytes_allocated + (300_000 if short else 10**12)

        def limited(context, flags, nbytes, create=create, room=room):
            if pool.stats.bytes_allocated + nbytes > room:
                raise platforms.opencl().MemoryError("no memory left")
            return create(context, flags, nbytes)

        with monkeypatch.context() as patched:
            patched.setattr(pool, "_create", limited)
            loss.backward()
        made.append([w.grad.to_host() for w in weights])
    assert equal(made[0], made[1]) and equal(made[0], made[2])


def test_graphs_of_many_lengths_do_not_fill_the_memory(cl_device, monkeypatch):
    """Plans of a few graphs are kept, so a program whose sequences have any length does not grow."""

    def step(length):
        w, x = nc.tensor([[0.5]], requires_grad=True), nc.tensor([[1.0]])
        for _ in range(length):
            x = x @ w
        x.backward()
        return w.grad.item()

    def launches():
        gc.collect()
        return sum(type(found) is program.Sized for found in gc.get_objects())

    monkeypatch.setattr(backward_pass, "_MOST_KEYS", 4096)
    before = launches()
    for length in (*range(2, 50), *range(2, 50), 3, 3, 3):
        assert step(length) == pytest.approx(length * 0.5 ** (length - 1))
    assert launches() < before + 1000


def test_hooks_run_after_a_gradient_was_accumulated(device):
    """Once per backward pass, with the sum of all gradients; they may update the tensor and drop the gradient."""
    with nc.device(device):
        w, seen = nc.tensor([1.0, 2.0], requires_grad=True), []
        handle = w.register_post_accumulate_grad_hook(lambda leaf: seen.append((leaf is w, leaf.grad.tolist())))
        w.register_hook(lambda g: g * 10.0)
        for _ in range(2):
            ((w * 2.0).sum() + (w * w).sum()).backward()
        assert seen == [(True, [40.0, 60.0]), (True, [80.0, 120.0])]
        assert ag.grad((w * 2.0).sum(), [w])[0].tolist() == [20.0, 20.0] and len(seen) == 2
        handle.remove()
        w.sum().backward()
        assert len(seen) == 2

        def update(leaf):
            with nc.no_grad():
                leaf -= 0.1 * leaf.grad
            leaf.grad = None

        w = nc.tensor([1.0], requires_grad=True)
        w.register_post_accumulate_grad_hook(update)
        (w * 3.0).sum().backward()
        np.testing.assert_allclose(w.tolist(), [0.7], rtol=1e-6)
        assert w.grad is None
        with pytest.raises(AutogradError, match="only a leaf tensor that requires a gradient accumulates one"):
            (w * 2.0).register_post_accumulate_grad_hook(update)
