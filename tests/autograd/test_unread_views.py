"""Views whose values nobody has read: they are copied when the values are needed, and must behave as if they were memory of their base."""

import gc
import threading
import weakref

import numpy as np
import pytest

import netcl.autograd as ag
from netcl import nn, ops
from netcl.core import memory
from netcl.core.device import synchronize
from netcl.core.errors import AutogradError
from netcl.nn import functional as F
from netcl.runtime.capture import compile as compiled

VALUES = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


@pytest.fixture
def given(device):
    return lambda values, **options: ag.tensor(np.array(values, np.float32), queue=device.queue, **options)


#: Chains of views, and whether a write to the base shows in the result: a view, as in torch, or a copy.
CHAINS = {
    "slice of transposition": (lambda x: x.transpose(0, 2)[1:, :2], lambda x: np.swapaxes(x, 0, 2)[1:, :2], True),
    "reshape of part": (lambda x: x.split(2, 2)[1].reshape(2, 3, 2, 1), lambda x: x[:, :, 2:].reshape(2, 3, 2, 1), True),
    "transposed part": (lambda x: x.split([1, 3], 2)[1].transpose(0, 1), lambda x: np.swapaxes(x[:, :, 1:], 0, 1), True),
    "part of transposition": (lambda x: x.permute(2, 0, 1).unbind(1)[1], lambda x: np.transpose(x, (2, 0, 1))[:, 1], True),
    "steps": (lambda x: x[:, ::2].transpose(1, 2)[:, 1::2, 1], lambda x: np.swapaxes(x[:, ::2], 1, 2)[:, 1::2, 1], True),
    "reshape that copies": (lambda x: x.transpose(1, 2).reshape(2, 12), lambda x: np.swapaxes(x, 1, 2).reshape(2, 12), False),
    "view of a copy": (lambda x: x.transpose(1, 2).reshape(2, 12)[:, 3:], lambda x: np.swapaxes(x, 1, 2).reshape(2, 12)[:, 3:], False),
    "flip": (lambda x: x.transpose(0, 1).flip(0)[1], lambda x: np.swapaxes(x, 0, 1)[::-1][1], False),
    "contiguous": (lambda x: x.T.contiguous(), lambda x: x.T, False),
}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("read_first", [False, True])
def test_a_write_to_the_base_shows_in_views_and_not_in_copies(given, name, read_first):
    make, expected, shows = CHAINS[name]
    x = given(VALUES)
    view = make(x)
    if read_first:
        np.testing.assert_array_equal(view.to_host(), expected(VALUES))
    x *= 10.0
    x[0, 1] = -1.0
    np.testing.assert_array_equal(view.to_host(), expected(x.to_host() if shows else VALUES))


@pytest.mark.parametrize("name", [name for name, (_, _, shows) in CHAINS.items() if shows])
def test_a_write_to_an_unread_view_shows_in_its_base_and_in_other_views(given, name):
    make, expected, _ = CHAINS[name]
    x, whole = given(VALUES), VALUES.copy()
    other, view = x.transpose(1, 2), make(x)
    view += 100.0
    expected(whole)[...] += 100.0
    np.testing.assert_array_equal(x.to_host(), whole)
    np.testing.assert_array_equal(other.to_host(), np.swapaxes(whole, 1, 2))
    np.testing.assert_array_equal(view.to_host(), expected(whole))


def test_a_copy_of_a_view_whose_base_was_written_stays(given):
    x = given(VALUES)
    view = x.transpose(1, 2)
    assert view[0, 1, 0].item() == 1.0
    x *= 2.0
    copies = view.reshape(2, 12), view.contiguous(), view.flip(0)
    x *= 0.0
    for copy, now in zip(copies, (lambda a: a.reshape(2, 12), lambda a: a, lambda a: a[::-1]), strict=True):
        np.testing.assert_array_equal(copy.to_host(), now(np.swapaxes(2.0 * VALUES, 1, 2)))
    assert not view.to_host().any()


def test_functions_that_record_nothing_give_copies(given):
    x = given(VALUES)
    copies = [ops.reorder(x, (2, 0, 1)), ops.split(x, 2, 2)[1], ops.unbind(x, 1)[2], ops.strided_slice(x, (0, 1, 0), (2, 1, 2), (1, 1, 2))]
    x *= 0.0
    expected = [VALUES.transpose(2, 0, 1), VALUES[:, :, 2:], VALUES[:, 2], VALUES[:, 1:2, ::2]]
    for copy, values in zip(copies, expected, strict=True):
        np.testing.assert_array_equal(copy.to_host(), values)


def test_one_part_is_read_before_a_write_and_another_after_it(given):
    x = given(VALUES)
    first, second, third = x.unbind(1)
    assert first.tolist() == VALUES[:, 0].tolist()
    x += 1.0
    third *= 0.0
    assert second.tolist() == (VALUES[:, 1] + 1.0).tolist() and first.tolist() == (VALUES[:, 0] + 1.0).tolist()
    assert not x[:, 2].to_host().any()


def test_a_write_to_a_copy_does_not_reach_an_unread_view(given):
    x = given(VALUES)
    view = x.transpose(1, 2)
    copy = view.reshape(2, 12)
    with pytest.raises(AutogradError, match="it still shares its memory with the view"):
        copy += 1.0
    part = view.reshape(2, 12)[0]
    with pytest.raises(AutogradError, match="it still shares its memory with the view"):
        part += 1.0
    clone = view.clone()
    clone += 1.0
    np.testing.assert_array_equal(view.to_host(), np.swapaxes(VALUES, 1, 2))
    del view, copy
    part += 1.0  # no other tensor has this memory now
    np.testing.assert_array_equal(part.to_host(), np.swapaxes(VALUES, 1, 2)[0].reshape(-1) + 1.0)


# ---- gradients

HEADS, SIZE, BATCH, LENGTH = 2, 3, 2, 4
WIDTH = HEADS * SIZE


def _heads(z):
    return z.reshape(BATCH, LENGTH, HEADS, SIZE).transpose(1, 2)


#: Spellings of the same q, k and v, all of shape (batch, heads, length, size).
SPELLINGS = {
    "split": lambda z: [_heads(part) for part in z.split(WIDTH, 2)],
    "chunk": lambda z: [part.reshape(BATCH, LENGTH, HEADS, SIZE).permute(0, 2, 1, 3) for part in z.chunk(3, -1)],
    "slices": lambda z: [_heads(z[..., i * WIDTH : (i + 1) * WIDTH]) for i in range(3)],
    "permute": lambda z: list(z.reshape(BATCH, LENGTH, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)),
    "unbind": lambda z: list(z.reshape(BATCH, LENGTH, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4).unbind(0)),
    "unbind with order": lambda z: list(ag.unbind(z.reshape(BATCH, LENGTH, 3, HEADS, SIZE), 2, order=(0, 2, 1, 3))),
    "copies": lambda z: [_heads(part.clone()).clone() for part in z.split(WIDTH, 2)],
}


def _attention(z, spelling):
    q, k, v = SPELLINGS[spelling](z)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(BATCH, LENGTH, WIDTH)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_of_attention_have_the_same_values_and_gradients(given, spelling):
    rng = np.random.default_rng(3)
    values, upstream = rng.normal(size=(BATCH, LENGTH, 3 * WIDTH)), given(rng.normal(size=(BATCH, LENGTH, WIDTH)))
    seen = []
    for name in (spelling, "copies"):
        z = given(values, requires_grad=True)
        out = _attention(z * 1.0, name)
        (first,) = ag.grad((out * upstream).sum(), z, create_graph=True)
        (first * first).sum().backward()
        seen.append((out.to_host(), first.to_host(), z.grad.to_host()))
    for mine, expected in zip(*seen, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=2e-4, atol=2e-5)


def test_gradients_of_views_that_are_used_several_times_or_not_at_all(given):
    x = given(VALUES, requires_grad=True)
    first, _, third = (x * 2.0).split(1, 1)
    turned = third.transpose(0, 2)
    ((turned * turned).sum() + (first.reshape(8) * 3.0).sum() + turned[1:, 0, 0].sum()).backward()
    expected = np.zeros_like(VALUES)
    expected[:, 0] = 6.0
    expected[:, 2] = 8.0 * VALUES[:, 2]
    expected[0, 2, 1:] += 2.0
    np.testing.assert_allclose(x.grad.to_host(), expected)


def test_accumulating_a_gradient_does_not_change_another_leaf(given):
    x, y = given(VALUES[0], requires_grad=True), given(VALUES[0].T, requires_grad=True)
    total = x.T + y
    for _ in range(2):
        (total * total).sum().backward(retain_graph=True)
    np.testing.assert_allclose(x.grad.to_host(), 8.0 * VALUES[0])
    np.testing.assert_allclose(y.grad.to_host(), 8.0 * VALUES[0].T)


def test_a_gradient_that_is_handed_in_may_be_changed_afterwards(given):
    x, upstream = given(VALUES[0], requires_grad=True), given(VALUES[0].T)
    turned = x.T
    (gradient,) = ag.grad(turned, x, upstream)
    upstream.zero_()
    np.testing.assert_array_equal(gradient.to_host(), VALUES[0])


def test_writes_between_a_view_and_backward(given):
    x = given(VALUES[0], requires_grad=True)
    base = x * 1.0
    turned, part = base.T, base.split(2, 1)[0]
    part *= 3.0
    (turned * turned).sum().backward()
    expected = 2.0 * VALUES[0]
    expected[:, :2] *= 9.0
    np.testing.assert_allclose(x.grad.to_host(), expected)
    base = x * 1.0
    product = (base.T * base.T).sum()
    base[0] = 0.0
    with pytest.raises(AutogradError, match="a tensor that backward reads must not be changed in place"):
        product.backward()


# ---- memory


def test_unread_views_are_released_with_their_base(cl_device):
    synchronize(cl_device)
    gc.collect()
    before = memory.memory_stats()["bytes_allocated"]
    for _ in range(3):
        x = ag.tensor(np.ones((256, 256), np.float32), queue=cl_device.queue)
        views = [x.T, x[1:], *x.split(64, 1), x.T[2:].reshape(-1)]
        there = weakref.ref(x)
        del x, views
        gc.collect()
        assert there() is None
    assert memory.memory_stats()["bytes_allocated"] <= before + 2 * 256 * 256 * 4


def test_synchronize_copies_unread_views(cl_device):
    x = ag.tensor(VALUES, queue=cl_device.queue)
    there, view = weakref.ref(x), x.T
    synchronize(cl_device)
    del x
    assert there() is None
    np.testing.assert_array_equal(view.to_host(), VALUES.T)


def test_threads_read_the_same_unread_view(cl_device):
    for _ in range(20):
        x = ag.tensor(VALUES, queue=cl_device.queue)
        view, parts = x.permute(2, 0, 1), x.unbind(2)
        seen: list[np.ndarray] = []
        threads = [threading.Thread(target=lambda t, to: to.append(t.to_host()), args=(t, seen)) for t in (view, view, *parts[:2])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(seen) == 4
        assert sum(np.array_equal(values, VALUES.transpose(2, 0, 1)) for values in seen) == 2


# ---- compiled functions


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_compiled_step_reads_the_views_of_its_own_arguments(cl_device, spelling):
    rng = np.random.default_rng(5)
    layer = nn.Linear(WIDTH, 3 * WIDTH, queue=cl_device.queue)

    def step(x):
        layer.zero_grad()
        loss = (_attention(layer(x), spelling) ** 2).sum()
        loss.backward()
        return loss.detach()

    replayed = compiled(step)
    for _ in range(5):
        x = ag.tensor(rng.normal(size=(BATCH, LENGTH, WIDTH)).astype(np.float32), queue=cl_device.queue)
        mine, gradient = replayed(x).item(), layer.weight.grad.to_host()
        assert mine == pytest.approx(step(x).item(), rel=1e-5)
        np.testing.assert_allclose(gradient, layer.weight.grad.to_host(), rtol=1e-4, atol=1e-5)
        with ag.no_grad():
            layer.weight *= 0.9


def test_a_compiled_step_returns_and_stores_views_that_it_did_not_read(cl_device):
    class Keeper(nn.Module):
        def forward(self, x):
            y = x * 2.0
            self.last = y.T[1:]
            return y.transpose(0, 1), y.split(2, 1)[1]

    keeper = Keeper()
    replayed = compiled(lambda x: keeper(x))
    for i in range(5):
        values = VALUES[0] + i
        turned, part = replayed(ag.tensor(values, queue=cl_device.queue))
        np.testing.assert_array_equal(turned.to_host(), 2.0 * values.T)
        np.testing.assert_array_equal(part.to_host(), 2.0 * values[:, 2:])
        np.testing.assert_array_equal(keeper.last.to_host(), 2.0 * values.T[1:])


def test_a_view_from_before_a_compiled_step_follows_its_base(cl_device):
    table = ag.tensor(VALUES[0], queue=cl_device.queue)
    turned = table.T

    def step(x):
        table.add_(x)
        return (table.T * turned).sum()

    replayed, whole = compiled(step), VALUES[0].copy()
    for i in range(5):
        given = np.full((3, 4), i + 1.0, np.float32)
        whole += given
        assert replayed(ag.tensor(given, queue=cl_device.queue)).item() == pytest.approx(float((whole * whole).sum()), rel=1e-5)
        np.testing.assert_array_equal(turned.to_host(), whole.T)
