"""Writing in place, as torch does it: operators, methods, items and views, with their gradients. The numbers are torch's."""

import gc
import weakref

import numpy as np
import pytest

import netcl.autograd as ag
from netcl import nn, ops, optim
from netcl.core.errors import AutogradError, DtypeError, ShapeError
from netcl.core.tensor import Tensor
from netcl.ops.views import restrided
from netcl.runtime.capture import compile as compiled
from tests.conftest import eager_fusion

CHANGED = "a tensor that backward reads must not be changed in place"


@pytest.fixture
def given(device):
    return lambda values, **options: ag.tensor(np.array(values, np.float32), queue=device.queue, **options)


# ---- operators and methods


def test_a_step_by_hand(given):
    p = given([1.0, 2.0], requires_grad=True)
    (p * p).sum().backward()
    same = p
    with ag.no_grad():
        p -= 0.5 * p.grad
    assert p is same and p.requires_grad and p.grad_fn is None
    assert p.tolist() == [0.0, 0.0]
    p.data += 1.0
    p.data.add_(p.grad, alpha=-2.0)
    assert p is same and p.tolist() == [-3.0, -7.0]
    p.grad.zero_()
    assert p.grad.tolist() == [0.0, 0.0]
    with ag.no_grad():
        p.copy_(given([8.0, 9.0]))
        p[...] = p * 2.0
    assert p.tolist() == [16.0, 18.0]
    p.data = given([1.0, 2.0, 3.0])
    assert p is same and p.tolist() == [1.0, 2.0, 3.0] and p.requires_grad


OPERATORS = {
    "+=": (lambda x: x.__iadd__(2.0), [5.0, -3.0]),
    "-=": (lambda x: x.__isub__(2.0), [1.0, -7.0]),
    "*=": (lambda x: x.__imul__(2.0), [6.0, -10.0]),
    "/=": (lambda x: x.__itruediv__(2.0), [1.5, -2.5]),
    "//=": (lambda x: x.__ifloordiv__(2.0), [1.0, -3.0]),
    "%=": (lambda x: x.__imod__(2.0), [1.0, 1.0]),
    "**=": (lambda x: x.__ipow__(2.0), [9.0, 25.0]),
    "add": (lambda x: x.add_(x.clone(), alpha=2), [9.0, -15.0]),
    "sub": (lambda x: x.sub_(1.0, alpha=3), [0.0, -8.0]),
    "abs": (lambda x: x.abs_(), [3.0, 5.0]),
    "relu": (lambda x: x.relu_(), [3.0, 0.0]),
    "clamp": (lambda x: x.clamp_(min=-1.0), [3.0, -1.0]),
    "clamp both": (lambda x: x.clamp_(-1, 1), [1.0, -1.0]),
    "neg": (lambda x: x.neg_(), [-3.0, 5.0]),
    "zero": (lambda x: x.zero_(), [0.0, 0.0]),
    "fill": (lambda x: x.fill_(x[1]), [-5.0, -5.0]),
    "copy": (lambda x: x.copy_(7), [7.0, 7.0]),
    "lerp": (lambda x: x.lerp_(x * 3.0, 0.5), [6.0, -10.0]),
    "addcmul": (lambda x: x.addcmul_(x.clone(), x.clone(), value=2), [21.0, 45.0]),
    "addcdiv": (lambda x: x.addcdiv_(x.clone(), x.clone(), value=2), [5.0, -3.0]),
    "masked_fill": (lambda x: x.masked_fill_(x > 0, 9.0), [9.0, -5.0]),
    "itself": (lambda x: x.mul_(x), [9.0, 25.0]),
    "gt": (lambda x: x.gt_(0.0), [1.0, 0.0]),
    "broadcast": (lambda x: x.add_(Tensor.ones((1,), queue=x.queue)), [4.0, -4.0]),
    "array": (lambda x: x.add_(np.array([1.0, 2.0])), [4.0, -3.0]),
}


@pytest.mark.parametrize("case", OPERATORS)
def test_what_is_written(given, case):
    function, wanted = OPERATORS[case]
    x = given([3.0, -5.0])
    shared, version = x.detach(), x._version
    assert function(x) is x
    assert x.tolist() == shared.tolist() == pytest.approx(wanted, rel=1e-6)  # powers are rounded otherwise on some devices
    assert x._version > version


def test_random_numbers(given):
    x = given(np.zeros((50, 4)))
    assert x.uniform_(2.0, 3.0) is x and 2.0 <= x.to_host().min() < x.to_host().max() < 3.0
    assert x.normal_(5.0, 0.01) is x and abs(x.to_host().mean() - 5.0) < 0.05


def test_truth_values_and_integers(device):
    flags = ag.tensor([True, False, True], queue=device.queue)
    shared = flags.detach()
    flags &= ag.tensor([True, True, False], queue=device.queue)
    assert shared.tolist() == [True, False, False]
    flags |= ag.tensor([False, True, False], queue=device.queue)
    flags ^= ag.tensor([True, False, False], queue=device.queue)
    assert shared.tolist() == [False, True, False]
    n = ag.tensor([7, -7], queue=device.queue)
    same = n
    n //= 2
    n *= 3
    assert n is same and n.tolist() == [9, -12] and n.dtype == "int64"
    assert n.copy_(ag.tensor([1.5, -2.5], queue=device.queue)).tolist() == [1, -2]


def test_what_does_not_fit(given, device):
    n = ag.tensor([1, 2], queue=device.queue)
    with pytest.raises(DtypeError, match=r"^\[add_\] a result of float32 cannot be written to a tensor of int64"):
        n += 1.5
    with pytest.raises(DtypeError, match=r"^\[div_\]"):
        n /= 2
    with pytest.raises(DtypeError, match=r"^\[add_\] a result of int64 cannot be written to a tensor of bool"):
        ag.tensor([True], queue=device.queue).add_(1)
    with pytest.raises(ShapeError, match=r"^\[add_\] the result must have the shape .*; tensor=\(3,\), result=\(2, 3\)"):
        given([1.0, 2.0, 3.0]).add_(given(np.ones((2, 3))))
    with pytest.raises(ShapeError, match="broadcast"):
        given([1.0, 2.0, 3.0]).add_(given([1.0, 2.0]))
    assert n.tolist() == [1, 2]
    half = given([1.0, 2.0]).to("float16")
    half += given([0.5, 0.5])
    assert half.dtype == "float16" and half.tolist() == [1.5, 2.5]


def test_leaves_that_require_grad(given):
    def item(p):
        p[0] = 1.0

    p = given([1.0, 2.0], requires_grad=True)
    for write in (lambda p: p.__iadd__(1.0), lambda p: p.zero_(), lambda p: p.copy_(1.0), item, lambda p: p.uniform_()):
        with pytest.raises(AutogradError, match=r"cannot write in place to a leaf that requires grad; shape=\(2,\); do it inside no_grad"):
            write(p)
    for view in (p.view(2, 1), p[1:]):
        with pytest.raises(AutogradError, match=r"^\[mul_\] cannot write in place to a view of a leaf that requires grad"):
            view.mul_(2.0)
    with ag.no_grad():
        p[1:].mul_(2.0)
        p.view(-1)[0] = 5.0
    assert p.tolist() == [5.0, 4.0]


# ---- gradients


def test_gradients_through_operators(given):
    x, z = given([1.0, 2.0], requires_grad=True), given([3.0, 4.0], requires_grad=True)
    y = x * 2.0
    y += z
    y *= z  # reads what y was
    y.sum().backward()
    assert (x.grad.tolist(), z.grad.tolist()) == ([6.0, 8.0], [2.0 + 3.0 + 3.0, 4.0 + 4.0 + 4.0])


def test_gradients_through_methods(given):
    x = given([0.5, -1.0, 2.0], requires_grad=True)
    plain = ag.relu(ag.tanh(ag.exp(x) * 2.0 - 1.5)) ** 2.0
    (wanted,) = ag.grad(plain.sum(), x)
    y = x.clone().exp_().mul_(2.0).sub_(1.5).tanh_().relu_().pow_(2.0)
    np.testing.assert_array_equal(y.to_host(), plain.to_host())
    y.sum().backward()
    np.testing.assert_allclose(x.grad.to_host(), wanted.to_host(), rtol=1e-6)


def test_a_constant_ends_the_gradient(given):
    x = given([1.0, 2.0], requires_grad=True)
    y = x * 3.0
    y.fill_(4.0)
    assert y.requires_grad
    (y * x).sum().backward()
    assert x.grad.tolist() == [4.0, 4.0]


def test_what_is_kept_for_backward(given):
    x = given([1.0, 2.0], requires_grad=True)
    y = ag.exp(x)
    y += 1.0  # exp reads its result
    with pytest.raises(AutogradError, match=rf"\[exp\] {CHANGED}"):
        y.sum().backward()
    y = x * 2.0
    loss = (y * y).sum()
    y.zero_()
    with pytest.raises(AutogradError, match=rf"\[mul\] {CHANGED}"):
        loss.backward()
    y = x * 2.0
    part = y[:1]
    loss = (part * part).sum()
    y[1] = 5.0  # as in torch, a base and its views have one version
    with pytest.raises(AutogradError, match=rf"\[mul\] {CHANGED}"):
        loss.backward()


def test_items_and_their_gradients(given):
    x, v = given([1.0, 2.0, 3.0], requires_grad=True), given([4.0, 5.0], requires_grad=True)
    y = x * 2.0
    y[1:] = v * 3.0
    (y * y).sum().backward()
    assert y.tolist() == [2.0, 12.0, 15.0]
    assert (x.grad.tolist(), v.grad.tolist()) == ([8.0, 0.0, 0.0], [72.0, 90.0])
    x.grad = v.grad = None
    buffer = given(np.zeros((2, 3)))
    buffer[1] = x  # a tensor that did not require grad
    buffer[:, 0] = v[1]  # broadcast
    assert buffer.requires_grad and buffer.tolist() == [[5.0, 0.0, 0.0], [5.0, 2.0, 3.0]]
    (buffer * given([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])).sum().backward()
    assert (x.grad.tolist(), v.grad.tolist()) == ([0.0, 5.0, 6.0], [0.0, 5.0])


def test_items_by_arrays_and_masks(given):
    x, v = given([1.0, 2.0, 3.0], requires_grad=True), given([4.0, 5.0], requires_grad=True)
    y = x * 2.0
    index = np.array([2, 0])
    y[index] = v
    index[:] = 1
    y[y > 4.5] = v[0] * 10.0
    (y * given([1.0, 2.0, 3.0])).sum().backward()
    assert y.tolist() == [40.0, 4.0, 4.0]
    assert (x.grad.tolist(), v.grad.tolist()) == ([0.0, 4.0, 0.0], [13.0, 0.0])


def test_gradients_of_gradients(given):
    x = given([1.0, 2.0, 3.0], requires_grad=True)
    y = x * x
    y[0] = x[2] * x[2]
    y[1:] *= x[:2]
    (first,) = ag.grad(y.sum(), x, create_graph=True)
    assert first.tolist() == [4.0, 4.0 + 9.0, 6.0 + 12.0]
    (second,) = ag.grad(first.sum(), x)
    assert second.tolist() == [4.0, 2.0 + 4.0 + 6.0, 4.0 + 2.0 + 6.0]


# ---- views


def _base(given):
    return given([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])


def _item_of_row(x):
    x[0][1] = 9.0


def _item_of_transposed(x):
    x.T[0, 1] = 9.0


def _item_of_flat(x):
    x.view(-1)[3] = 9.0


def _row(x):
    x[0] += 1.0


def _mask_of_view(x):
    x.T[x.T > 4.5] = 0.0


def _loop(x):
    for row in x:
        row *= 2.0


WRITES = {
    "item of a row": (_item_of_row, [[1, 9, 3], [4, 5, 6]]),
    "item of the transposed": (_item_of_transposed, [[1, 2, 3], [9, 5, 6]]),
    "item of the flat": (_item_of_flat, [[1, 2, 3], [9, 5, 6]]),
    "row": (_row, [[2, 3, 4], [4, 5, 6]]),
    "mask of the transposed": (_mask_of_view, [[1, 2, 3], [4, 0, 0]]),
    "loop over rows": (_loop, [[2, 4, 6], [8, 10, 12]]),
    "fill of a slice": (lambda x: x[1:, ::2].fill_(7.0), [[1, 2, 3], [7, 5, 7]]),
    "backwards": (lambda x: x[::-1, 0].copy_(np.array([8.0, 9.0])), [[9, 2, 3], [8, 5, 6]]),
    "whole": (lambda x: x[...].add_(1.0), [[2, 3, 4], [5, 6, 7]]),
    "permuted slice": (lambda x: x[:, 1:].permute(1, 0)[0].mul_(10.0), [[1, 20, 3], [4, 50, 6]]),
    "squeezed": (lambda x: x[:1].unsqueeze(0).squeeze().zero_(), [[0, 0, 0], [4, 5, 6]]),
    "flattened slice": (lambda x: x[1].unsqueeze(0).flatten().zero_(), [[1, 2, 3], [0, 0, 0]]),
    "narrow": (lambda x: x.narrow(1, 1, 1).zero_(), [[1, 0, 3], [4, 0, 6]]),
    "split": (lambda x: x.split(2, 1)[1].zero_(), [[1, 2, 0], [4, 5, 0]]),
    "chunk": (lambda x: x.chunk(2)[0].zero_(), [[0, 0, 0], [4, 5, 6]]),
    "diagonal": (lambda x: x.diagonal(1).zero_(), [[1, 0, 3], [4, 5, 0]]),
    "diagonal of the transposed": (lambda x: x.T.diagonal(-1).add_(1.0), [[1, 3, 3], [4, 5, 7]]),
    "items of a diagonal": (lambda x: x.view(1, 2, 3).diagonal(0, 1, 2).__setitem__((0, 1), 0.0), [[1, 2, 3], [4, 0, 6]]),
    "trace of einsum": (lambda x: ag.einsum("ii->i", x[:, 1:]).fill_(9.0), [[1, 9, 3], [4, 5, 9]]),
    "windows": (lambda x: x.unfold(1, 1, 2)[:, 1].zero_(), [[1, 2, 0], [4, 5, 0]]),
    "strides": (lambda x: x.as_strided((2, 2), (2, 1), 1).mul_(0.0), [[1, 0, 0], [0, 0, 6]]),
    "strides in a slice": (lambda x: x[1].as_strided((2,), (2,)).zero_(), [[1, 2, 3], [0, 5, 0]]),
    "detached slice": (lambda x: x[0].detach().zero_(), [[0, 0, 0], [4, 5, 6]]),
    "data of a slice": (lambda x: x.T.data[1].zero_(), [[1, 0, 3], [4, 0, 6]]),
    "from the host": (lambda x: x[:, 1].from_host([8.0, 9.0]), [[1, 8, 3], [4, 9, 6]]),
    "overlap": (lambda x: x[:, 1:].copy_(x[:, :-1]), [[1, 1, 2], [4, 4, 5]]),
    "copies": (
        lambda x: [c.zero_() for c in (x.flip(0), x.diag(), x.T.contiguous(), x.T.reshape(-1), x[[0, 1]], x.clone())],
        [[1, 2, 3], [4, 5, 6]],
    ),
}


@pytest.mark.parametrize("case", WRITES)
def test_writes_reach_the_base(given, case):
    write, wanted = WRITES[case]
    x = _base(given)
    write(x)
    assert x.tolist() == wanted


def test_views_show_what_their_base_holds(given):
    x = _base(given)
    row, column, turned, wide = x[0], x[:, 1], x.T, x[:1].expand(2, 3)
    x += 1.0
    assert row.tolist() == [2.0, 3.0, 4.0] and turned.tolist() == [[2.0, 5.0], [3.0, 6.0], [4.0, 7.0]]
    column.fill_(0.0)
    assert row.tolist() == [2.0, 0.0, 4.0] and turned[1].tolist() == [0.0, 0.0]
    x.from_host(np.full((2, 3), 5.0))
    assert (row + column[0]).tolist() == [10.0] * 3 and wide.tolist() == [[5.0] * 3] * 2
    with pytest.raises(AutogradError, match=r"cannot write in place to an expanded or overlapping view.*; write to a clone"):
        wide += 1.0


def test_blocks_that_name_an_element_twice(given):
    x = given([1.0, 2.0, 3.0, 4.0])
    windows, block = x.unfold(0, 3, 1), x.as_strided((2, 2), (1, 1), 2 - 1)
    x *= 2.0
    assert windows.tolist() == [[2.0, 4.0, 6.0], [4.0, 6.0, 8.0]] and block.tolist() == [[4.0, 6.0], [6.0, 8.0]]
    for view in (windows, block):
        with pytest.raises(AutogradError, match=r"cannot write in place to an expanded or overlapping view.*; write to a clone"):
            view.zero_()
    with pytest.raises(ShapeError, match=r"^\[as_strided\] x must be contiguous in its base; .*; use the base, or x.contiguous\(\)"):
        x.view(2, 2).T.as_strided((2,), (1,))
    assert x[1:].as_strided((2,), (1,), 2).tolist() == [6.0, 8.0]  # the offset counts from the base, as in torch


def test_gradients_of_blocks(given):
    x = given([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    y = x * 1.0
    windows, wide, diagonal = y.unfold(0, 3, 1), y.view(4, 1).expand(4, 3), y.view(2, 2).diagonal()
    y.mul_(2.0)  # the views are part of the new graph
    for view, wanted in ((windows, [2.0, 4.0, 4.0, 2.0]), (wide, [6.0] * 4), (diagonal, [2.0, 0.0, 0.0, 2.0])):
        assert ag.grad(view.sum(), x, retain_graph=True)[0].tolist() == wanted
    diagonal.mul_(x[:2])
    assert ag.grad((y * y).sum(), x)[0].tolist() == [16.0, 16.0 + 256.0, 24.0, 128.0]
    (first,) = ag.grad((x.as_strided((2, 3), (1, 1)) ** 3).sum(), x, create_graph=True)
    assert ag.grad(first.sum(), x)[0].tolist() == [6.0, 24.0, 36.0, 24.0]


def test_a_view_outlives_its_base(given):
    x = _base(given)
    left, right = x[:, :2], x[:, 1:]
    del x
    left *= 10.0
    assert right.tolist() == [[20.0, 3.0], [50.0, 6.0]]
    right[0, 0] = 0.0
    assert left.tolist() == [[10.0, 0.0], [40.0, 50.0]]
    alone = (left + 1.0)[0]
    alone.add_(1.0)
    assert alone.tolist() == [12.0, 2.0]


def test_views_that_were_read_do_not_keep_their_base(given):
    x = given(np.ones((8, 8)))
    there, view, unread = weakref.ref(x), x[0], x.T[1:]
    assert view.tolist() == [1.0] * 8
    del x, unread
    gc.collect()
    assert there() is None and view.tolist() == [1.0] * 8


def test_who_cannot_reach_a_base_is_told(given):
    x = _base(given)
    with pytest.raises(AutogradError, match=r"this operation cannot write to a view: .*; write to a clone\(\), or to the base"):
        ops.add(x[0], 1.0, out=x[1])
    turned = x.T
    flat = turned.reshape(-1)
    with pytest.raises(AutogradError, match=r"cannot write in place to this copy of a view: .*; write to a clone"):
        flat += 1.0
    assert turned.tolist() == [[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]
    del turned
    flat += 1.0  # nobody else has this memory now
    assert flat.tolist() == [2.0, 5.0, 3.0, 6.0, 4.0, 7.0] and x.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]


def test_repeated_elements_are_copies(given):
    x = given([[1.0, 2.0]])
    repeated = x.repeat_interleave(2, 0)
    repeated[0] += 5
    assert x.tolist() == [[1.0, 2.0]] and repeated.tolist() == [[6.0, 7.0], [1.0, 2.0]]
    assert x.repeat_interleave(0, 0).shape == (0, 2) and x.repeat_interleave(1, 1).add_(1).tolist() != x.tolist()


def test_copies_of_one_view_are_not_written_through_each_other(given):
    x = _base(given)
    turned = x.T
    flat, whole = turned.reshape(-1), turned.contiguous()
    x += 1.0  # from here on, the view has other memory
    same = flat.detach()
    for copy in (flat, whole, same):
        with pytest.raises(
            AutogradError, match=r"cannot write in place to this copy of a view: .* or with another copy; .*; write to a clone"
        ):
            copy.zero_()
    assert flat.tolist() == [1.0, 4.0, 2.0, 5.0, 3.0, 6.0] and turned.tolist() == [[2.0, 5.0], [3.0, 6.0], [4.0, 7.0]]
    del whole
    same.zero_()
    assert flat.tolist() == [0.0] * 6 and x.tolist() == [[2.0, 3.0, 4.0], [5.0, 6.0, 7.0]]


def test_optimizers_over_views(given):
    x = _base(given)
    row = x[0].requires_grad_()
    (row * row).sum().backward()
    optim.SGD([row], lr=0.5).step()
    assert x.tolist() == [[0.0, 0.0, 0.0], [4.0, 5.0, 6.0]] and row.tolist() == [0.0, 0.0, 0.0]
    parameter = nn.Parameter(x[1])
    parameter.data.zero_()
    assert x[1].tolist() == [4.0, 5.0, 6.0]


def test_gradients_through_views(given):
    x, z = given([1.0, 2.0, 3.0, 4.0], requires_grad=True), given([5.0, 6.0], requires_grad=True)
    y = x * 2.0
    square, tail, weights = y.view(2, 2), y[2:], given([1.0, 2.0, 3.0, 4.0])
    square[0] *= z
    tail += z[0]
    assert y.tolist() == [10.0, 24.0, 11.0, 13.0] and square.tolist() == [[10.0, 24.0], [11.0, 13.0]]
    (y * weights).sum().backward(retain_graph=True)
    assert (x.grad.tolist(), z.grad.tolist()) == ([10.0, 24.0, 6.0, 8.0], [2.0 + 7.0, 8.0])
    for other in (square.view(4), square.T.T.reshape(4), ag.cat([y[:2], tail])):  # whatever is read, the history is the same
        gx, gz = ag.grad((other * weights).sum(), (x, z), retain_graph=True)
        assert (gx.tolist(), gz.tolist()) == (x.grad.tolist(), z.grad.tolist())


def test_a_view_made_before_its_base_is_written(given):
    x = given([1.0, 2.0], requires_grad=True)
    y = x * 2.0
    column = y.view(2, 1)
    y += x
    (gradient,) = ag.grad(column.sum(), x)
    assert gradient.tolist() == [3.0, 3.0]
    buffer = given([0.0, 0.0, 0.0])
    flat = buffer.view(3)
    flat[1:] = x
    assert buffer.requires_grad
    (gradient,) = ag.grad((buffer * buffer).sum(), x)
    assert gradient.tolist() == [2.0, 4.0]


def test_detached_views_take_no_history(given):
    x, z = given([1.0, 2.0], requires_grad=True), given([3.0], requires_grad=True)
    y = x + 0.0
    y.detach()[:1].add_(z)
    assert y.tolist() == [4.0, 2.0]
    (gradient,) = ag.grad(y.sum(), x)
    assert gradient.tolist() == [1.0, 1.0]


def test_strides_under_another_shape():
    assert restrided((2, 3), (3, 1), (3, 2)) == (2, 1)
    assert restrided((3, 2), (1, 3), (6,)) is None
    assert restrided((4, 1, 6), (12, 5, 1), (2, 2, 6, 1)) == (24, 12, 1, 1)
    assert restrided((4, 3), (6, 2), (12,)) == (2,)
    assert restrided((1, 1), (7, 7), ()) == ()


# ---- values that wait, and steps that are replayed


def test_values_that_wait(cl_device):
    x = ag.tensor(np.arange(16, dtype=np.float32).reshape(4, 4), queue=cl_device.queue)
    with eager_fusion(1):
        y = x * 2.0
        top, doubled = y[:2], y * 2.0
        later = top + 1.0  # reads the view
        y += 1.0
        assert doubled.to_host()[0].tolist() == [0.0, 4.0, 8.0, 12.0]
        assert later.to_host()[1].tolist() == [9.0, 11.0, 13.0, 15.0]
        assert top.to_host()[1].tolist() == [9.0, 11.0, 13.0, 15.0]
        waiting = top * 3.0
        y[0] = -1.0
        assert waiting.to_host()[0].tolist() == [3.0, 9.0, 15.0, 21.0] and top.to_host()[0].tolist() == [-1.0] * 4
        z = x + 1.0
        z.mul_(2.0).view(-1)[0] = 7.0
        assert z.to_host()[0].tolist() == [7.0, 4.0, 6.0, 8.0]


def test_a_compiled_step_by_hand(cl_device):
    w = ag.tensor([1.0, 2.0], requires_grad=True, queue=cl_device.queue)
    state = ag.tensor(np.zeros((2, 2), np.float32), queue=cl_device.queue)
    corner = state[1, 1:]

    @compiled
    def step(x):
        w.grad = None
        (w * x).sum().backward()
        with ag.no_grad():
            w.sub_(w.grad * 0.5)
            state[1] += x
            state[0].copy_(w)
        x[0].add_(1.0)

    for i in range(5):
        x = ag.tensor([2.0, 4.0], queue=cl_device.queue)
        step(x)
        assert w.tolist() == [-float(i), -2.0 * i]
        assert state.tolist() == [[-float(i), -2.0 * i], [2.0 * (i + 1), 4.0 * (i + 1)]]
        assert x.tolist() == [3.0, 4.0] and corner.tolist() == [4.0 * (i + 1)]
    assert step.graphs


def test_a_compiled_step_writes_a_diagonal(cl_device):
    x = Tensor.zeros((3, 3), queue=cl_device.queue)

    @compiled
    def step(x):
        x.diagonal().add_(1.0)
        x.unfold(0, 1, 2)[:, 0].mul_(2.0)
        return x.unfold(1, 2, 1) * 1.0

    for _ in range(5):
        made = step(x)
    assert x.tolist() == [[62.0, 0.0, 0.0], [0.0, 5.0, 0.0], [0.0, 0.0, 5.0]]
    assert made.tolist() == np.lib.stride_tricks.sliding_window_view(x.to_host(), 2, 1).tolist()


def test_a_compiled_step_does_not_write_the_view_of_another_call(cl_device):
    @compiled
    def step(row):
        row.add_(1.0)

    x = ag.tensor(np.zeros((6, 2), np.float32), queue=cl_device.queue)
    for i in range(6):
        step(x[i])
    assert x.tolist() == [[1.0, 1.0]] * 6


# ---- random programs, compared with NumPy's views


def assert_random_program_matches_numpy(seed, make):
    rng = np.random.default_rng(seed)
    start = rng.integers(-3, 4, (3, 4, 2)).astype(np.float32)
    pairs = [(start, make(start))]  # arrays that are views of one another, and tensors that should be
    for _ in range(25):
        array, t = pairs[int(rng.integers(len(pairs)))]
        kind, at = int(rng.integers(9)), int(rng.integers(3))
        if kind == 0 and array.ndim > 1 and len(array):
            pairs.append((array[at % len(array)], t[at % len(array)]))
        elif kind == 1:
            pairs.append((array.T, t.T))
        elif kind == 2:
            pairs.append((array[at % 2 :: at + 1], t[at % 2 :: at + 1]))
        elif kind == 3 and array.flags.c_contiguous:
            pairs.append((array.reshape(-1), t.reshape(-1)))
        elif kind == 4:
            array += 1.0
            t += 1.0
        elif kind == 5:
            np.clip(-2.0 * array, -9.0, 9.0, out=array)
            t.mul_(-2.0).clamp_(-9.0, 9.0)
        elif kind == 6 and array.ndim > 1:
            diagonal = array.diagonal(at - 1)
            diagonal.flags.writeable = True
            pairs.append((diagonal, t.diagonal(at - 1)))
        elif kind == 7 and len(array) > 1:
            windows = np.lib.stride_tricks.sliding_window_view(array, 2, 0, writeable=True)
            pairs.append((windows[:: 2 + at], t.unfold(0, 2, 2 + at)))
        elif len(array):
            array[-1] = 7.0
            t[-1] = 7.0
        if len(pairs) > 1 and rng.random() < 0.2:
            del pairs[int(rng.integers(len(pairs)))]
        for expected, seen in pairs:
            if rng.random() < 0.4:
                np.testing.assert_array_equal(seen.to_host(), expected)
    for expected, seen in pairs:
        np.testing.assert_array_equal(seen.to_host(), expected)


@pytest.mark.parametrize("seed", range(8))
def test_random_programs(device, seed):
    assert_random_program_matches_numpy(seed, lambda values: ag.tensor(values, queue=device.queue))


def test_random_programs_of_values_that_wait(cl_device):
    with eager_fusion(1):
        for seed in range(8, 12):
            assert_random_program_matches_numpy(seed, lambda values: ag.tensor(values, queue=cl_device.queue) + 0.0)
