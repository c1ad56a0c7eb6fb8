"""Indexing beyond the rows' samples: torch's numbers, every form of x[...], sums that are the same every time, faults, sorting."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import netcl.autograd as ag
from netcl import ops
from netcl.core.errors import DtypeError, ShapeError
from netcl.core.tensor import Tensor
from netcl.ops.index import check_indices

GOLDEN = np.load(Path(__file__).parent.parent / "golden" / "index.npz")
s = slice

CALLS = {
    "gather": lambda x, index: [ag.gather(x, 1, index)],
    "scatter_add": lambda x, index, src: [ag.scatter_add(x, 0, index, src)],
    "index_select": lambda x, index: [ag.index_select(x, 1, index)],
    "index_add": lambda x, index, src: [ag.index_add(x, 1, index, src)],
    "embedding": lambda index, weight: [ag.embedding(index, weight, padding_idx=4)],
    "sort": lambda x: list(ag.sort(x, 1, descending=True)),
    "topk": lambda x: list(ag.topk(x, 5, 1)),
    "masked_fill": lambda x, mask: [ag.masked_fill(x, mask, -1.5)],
    "getitem": lambda x, rows, columns: [x[rows, :, columns], x[1:5:2, None, ..., ::2], x[:, -2]],
    "getitem_mask": lambda x, mask: [x[mask], x[mask[:, 0], 1:3]],
    "take": lambda x, index: [ag.take(x, index)],
    "nan": lambda x: [*ag.sort(x, 1), *ag.sort(x, 1, descending=True)],
}


def part(name: str, kind: str) -> dict[str, np.ndarray]:
    return {key.split("/")[2]: GOLDEN[key] for key in GOLDEN.files if key.startswith(f"{name}/{kind}/")}


@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_are_torchs(name, device):
    leaves = part(name, "grad")
    inputs = {key: Tensor.from_host(device.queue, x, requires_grad=key in leaves) for key, x in part(name, "in").items()}
    outs = CALLS[name](**inputs)
    for i, wanted in part(name, "out").items():
        np.testing.assert_allclose(outs[int(i)].to_host(), wanted, rtol=1e-6, atol=1e-6)
    fed = [Tensor.from_host(device.queue, g) for g in part(name, "fed").values()]
    floats = [out for out in outs if out.requires_grad]
    grads = ag.grad(floats, [inputs[key] for key in leaves], fed) if leaves else ()
    for g, wanted in zip(grads, leaves.values(), strict=True):
        np.testing.assert_allclose(g.to_host(), wanted, rtol=1e-5, atol=1e-6)


# ---- x[...]

A = np.random.default_rng(0).standard_normal((4, 5, 6)).astype(np.float32)
I1, I2 = np.array([0, 3, 1]), np.array([[1], [4]])
M1, M2, M3 = A[:, 0, 0] > 0, A[:, :, 0] > 0, A > 0.5
INDICES = [
    0, -1, (1, 2), (1, 2, 3), s(1, 3), s(None, None, -1), s(None, None, 2), (s(None), -2), (..., 0), (None, 1), (s(None), None, s(1, 4, 2)),
    ..., (), (..., None), s(4, 1), s(-100, 100), np.int64(2), (s(None, None, -2), s(None), s(None, None, -3)),
    I1, [0, 2], [], -I1, np.array(2), (s(None), I1), (I1, I1), (I1, s(None), I1), (s(None), I2, I1), (0, I1),
    (s(None), 0, I1), (I1, None, I1), (s(None, None, -2), I1, s(None, None, -1)), (I1, ..., np.array([0, 1, -6])),
    M1, M2, M3, (M2, 2), (s(None), np.array([True, False, True, True, False])), (M1, s(None), -1), (None, M2, None), np.zeros(4, bool),
]  # fmt: skip


def sent(index, queue, as_tensor: bool):
    if isinstance(index, tuple):
        return tuple(sent(item, queue, as_tensor) for item in index)
    return Tensor.from_host(queue, index) if as_tensor and isinstance(index, np.ndarray) else index


@pytest.mark.parametrize("as_tensor", [False, True], ids=["host", "tensor"])
def test_indexing_is_numpys(device, as_tensor, rng):
    for index in INDICES:
        given = sent(index, device.queue, as_tensor)
        x = Tensor.from_host(device.queue, A, requires_grad=True)
        out, wanted = x[given], A[index]
        assert out.shape == wanted.shape, index
        np.testing.assert_array_equal(out.to_host(), wanted, err_msg=str(index))
        fed = rng.standard_normal(wanted.shape).astype(np.float32)
        (g,) = ag.grad(out, x, Tensor.from_host(device.queue, fed))
        expected = np.zeros_like(A)
        np.add.at(expected, index, fed)
        np.testing.assert_allclose(g.to_host(), expected, rtol=1e-6, atol=1e-6, err_msg=str(index))


@pytest.mark.parametrize("as_tensor", [False, True], ids=["host", "tensor"])
def test_writing_is_numpys(device, as_tensor, rng):
    for index in INDICES:
        given = sent(index, device.queue, as_tensor)
        for value in (rng.standard_normal(A[index].shape).astype(np.float32), 7.0):
            x, wanted = Tensor.from_host(device.queue, A), A.copy()
            x[given] = value
            wanted[index] = value
            np.testing.assert_array_equal(x.to_host(), wanted, err_msg=str(index))


INTEGERS_FIRST = [
    ((0, s(None), I1), A[0][:, I1]), ((s(1, 3), 0, None, I1), A[1:3, 0][:, None, I1]), ((0, None, s(None), I1), A[0][None][..., I1]),
    ((s(1, 3), I1, 0), A[1:3, I1, 0]), ((0, s(None), I2), A[0][:, I2]), ((np.array(3), s(None), I1), A[3][:, I1]),
    ((-1, s(None, None, -2), I1), A[-1, ::-2][:, I1]), ((s(None), I1, -1), A[:, I1, -1]), ((0, s(None), np.array(2)), A[0, :, 2]),
]  # fmt: skip


@pytest.mark.parametrize("as_tensor", [False, True], ids=["host", "tensor"])
def test_integers_are_taken_before_arrays(device, as_tensor, rng):
    """As in torch; NumPy counts an integer beside an array as an array, and moves their axes to the front."""
    for index, wanted in INTEGERS_FIRST:
        given = sent(index, device.queue, as_tensor)
        x, changed = Tensor.from_host(device.queue, A, requires_grad=True), Tensor.zeros(A.shape, queue=device.queue)
        out, fed = x[given], rng.standard_normal(wanted.shape).astype(np.float32)
        assert out.shape == wanted.shape, index
        np.testing.assert_array_equal(out.to_host(), wanted, err_msg=str(index))
        (g,) = ag.grad(out, x, Tensor.from_host(device.queue, fed))
        changed[given] = fed  # no element is named twice, so this is the gradient
        np.testing.assert_array_equal(changed.to_host(), g.to_host(), err_msg=str(index))
        np.testing.assert_array_equal(changed[given].to_host(), fed, err_msg=str(index))


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "int64", "float16", "bfloat16"])
def test_every_dtype_is_indexed(device, dtype):
    values = np.arange(24).reshape(4, 6) % 2 if dtype == "bool" else np.arange(24).reshape(4, 6)
    x = Tensor.from_host(device.queue, values, dtype)
    np.testing.assert_array_equal(x[[3, 0], ::-2].to_host().astype(int), values[[3, 0], ::-2])
    x[1, [0, 5]] = 1
    np.testing.assert_array_equal(x[1].to_host()[[0, 5]].astype(int), 1)


def test_the_last_of_several_values_stays(device):
    x = Tensor.zeros((5,), queue=device.queue)
    x[Tensor.from_host(device.queue, np.array([1, 3, 1, 1]))] = Tensor.from_host(device.queue, np.array([1.0, 2.0, 3.0, 4.0]))
    assert x.tolist() == [0, 4, 0, 2, 0]


def test_a_tensor_can_be_written_into_itself(device):
    x = Tensor.from_host(device.queue, np.arange(5.0))
    x[1:] = x[:-1]
    x[::-1] = x
    assert x.tolist() == [3, 2, 1, 0, 0]


@pytest.mark.parametrize(
    ("index", "error", "text"),
    [
        (7, IndexError, r"\[getitem\] index 7 is out of range; size=4"),
        ((0, 0, 0, 0), IndexError, r"\[getitem\] the index must name at most 3 axes, got 4"),
        ((..., ...), IndexError, r"\[getitem\] the index must have at most one '\.\.\.'"),
        (np.array([9]), IndexError, r"\[getitem\] index 9 is out of range; size=4"),
        (np.array([1.5]), DtypeError, r"\[getitem\] an index must be integers"),
        ("a", DtypeError, r"\[getitem\] an index must be integers"),
        (np.array([True, False]), IndexError, r"\[getitem\] the mask must have the shape of the axes it covers; mask=\(2,\), axes=\(4,\)"),
        (s(None, None, 0), ShapeError, r"\[getitem\] the step of a slice cannot be 0"),
    ],
    ids=lambda value: "" if isinstance(value, type) else None,
)
def test_bad_indices_are_refused(device, index, error, text):
    with pytest.raises(error, match=text):
        Tensor.from_host(device.queue, A)[index]


def test_a_value_that_does_not_fit_is_refused(device):
    x = Tensor.zeros((3, 4), queue=device.queue)
    with pytest.raises(ShapeError, match=r"\[setitem\] the value must broadcast to the indexed elements; value=\(3,\), target=\(4,\)"):
        x[0] = [1.0, 2.0, 3.0]


# ---- faults


BAD = {
    "gather": lambda x, i: ops.gather(x, 0, i),
    "index_select": lambda x, i: ops.index_select(x, 0, i),
    "index_add": lambda x, i: ops.index_add(x, 0, i, x),
    "scatter_add": lambda x, i: ops.scatter_add(x, 0, i, x),
    "embedding": lambda x, i: ops.embedding(i, ops.reshape(x, (3, 1))),
    "take": ops.take,
    "one_hot": lambda x, i: ops.one_hot(i, 3),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("bad", [3, -4])
def test_indices_out_of_range_raise_and_are_never_followed(name, bad, device):
    x = Tensor.from_host(device.queue, np.ones(3))
    with pytest.raises(IndexError, match=rf"\[{name}\] .*out of range.*; size=3"):
        BAD[name](x, Tensor.from_host(device.queue, np.array([0, bad, 1])))
        check_indices(device.queue)
    check_indices(device.queue)  # told once


def test_indices_of_the_host_are_checked_at_once(device):
    x = Tensor.from_host(device.queue, np.ones(3))
    for call in (lambda: ops.index_select(x, 0, [0, 5]), lambda: ops.gather(x, 0, np.array([-1])), lambda: ops.take(x, [3])):
        with pytest.raises(IndexError, match="is out of range; size=3"):
            call()


def test_debugging_checks_every_op(device, monkeypatch):
    monkeypatch.setenv("NETCL_DEBUG", "1")
    x = Tensor.from_host(device.queue, np.ones(3))
    with pytest.raises(IndexError, match=r"\[index_select\]"):
        ops.index_select(x, 0, Tensor.from_host(device.queue, np.array([3])))


# ---- sums


@pytest.mark.parametrize("n", [1, 17, 3000])
def test_scattered_sums_are_the_same_every_time(device, n, rng):
    """Values of very different size: any other order of adding gives other bits."""
    values = (rng.standard_normal(n) * 10.0 ** rng.integers(-6, 6, n)).astype(np.float32)
    index = rng.integers(0, 3, n)
    wanted = np.zeros(3, np.float32)
    for i, v in zip(index, values, strict=True):
        wanted[i] += v
    for _ in range(2):
        out = ops.scatter_add(
            Tensor.zeros((3,), queue=device.queue), 0, Tensor.from_host(device.queue, index), Tensor.from_host(device.queue, values)
        )
        np.testing.assert_allclose(out.to_host(), wanted, rtol=1e-4)
    again = ops.index_add(
        Tensor.zeros((3,), queue=device.queue), 0, Tensor.from_host(device.queue, index), Tensor.from_host(device.queue, values)
    )
    assert again.to_host().tobytes() == out.to_host().tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_sums_are_kept_in_float32(device, dtype):
    """4096 ones: a sum kept in half stops at 2048, in bfloat16 at 256."""
    x = Tensor.zeros((2, 3), dtype, queue=device.queue)
    ones = Tensor.ones((4096, 3), dtype, queue=device.queue)
    index = Tensor.from_host(device.queue, np.ones(4096, np.int64))
    assert ops.index_add(x, 0, index, ones).tolist() == [[0] * 3, [4096] * 3]
    assert ops.scatter_add(x, 0, ops.expand(ops.reshape(index, (-1, 1)), (4096, 3)), ones).tolist() == [[0] * 3, [4096] * 3]


@pytest.mark.parametrize("columns", [1, 5, 5000])
def test_scatter_in_columns_and_by_sorting_agree(device, columns, rng):
    x = rng.standard_normal((7, columns)).astype(np.float32)
    index, src = rng.integers(0, 7, (9, columns)), rng.standard_normal((9, columns)).astype(np.float32)
    wanted = x.copy()
    np.add.at(wanted, (index, np.arange(columns)[None]), src)
    given = [Tensor.from_host(device.queue, a) for a in (x, index, src)]
    np.testing.assert_allclose(ops.scatter_add(given[0], 0, *given[1:]).to_host(), wanted, rtol=1e-5, atol=1e-5)


# ---- sorting


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 33, 255, 257, 5000])
@pytest.mark.parametrize("descending", [False, True])
def test_sorting_is_stable(device, n, descending, rng):
    x = rng.integers(-5, 5, (3, n)).astype(np.float32)
    values, order = ops.sort(Tensor.from_host(device.queue, x), 1, descending=descending)
    wanted = np.argsort(-x if descending else x, 1, kind="stable")
    np.testing.assert_array_equal(order.to_host(), wanted)
    np.testing.assert_array_equal(values.to_host(), np.take_along_axis(x, wanted, 1))


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64"])
def test_every_dtype_is_sorted(device, dtype, rng):
    if dtype == "float64" and not device.profile.has_fp64:
        pytest.skip("the device has no float64")
    extremes = [np.iinfo(dtype).min, np.iinfo(dtype).max] if dtype.startswith(("int", "uint")) else [0, 1]
    values = np.concatenate([rng.integers(0, 100, 60), np.array(extremes)]).astype("float32" if dtype == "bfloat16" else dtype)
    x = Tensor.from_host(device.queue, values, dtype)
    np.testing.assert_array_equal(ops.sort(x)[0].to_host(), np.sort(x.to_host()))


def test_isin_finds_no_nan(device):
    x = Tensor.from_host(device.queue, np.array([np.nan, 0.0, -0.0, 2.0, np.inf]))
    assert ops.isin(x, Tensor.from_host(device.queue, np.array([np.nan, 0.0, np.inf]))).tolist() == [False, True, True, False, True]


def test_an_empty_axis_has_nothing_to_index(device):
    x = Tensor.zeros((0, 3), queue=device.queue)
    with pytest.raises(IndexError, match=r"\[index_select\]"):
        ops.index_select(x, 0, Tensor.from_host(device.queue, np.array([0])))


@pytest.mark.parametrize(("n", "k"), [(1023, 3), (1024, 64), (5000, 1), (5000, 65), (70000, 40)])
def test_the_largest_are_found_with_ties_in_order(device, n, k, rng):
    x = rng.integers(-50, 50, (2, n)).astype(np.float32)
    values, order = ops.topk(Tensor.from_host(device.queue, x), k)
    wanted = np.argsort(-x, 1, kind="stable")[:, :k]
    np.testing.assert_array_equal(order.to_host(), wanted)
    np.testing.assert_array_equal(values.to_host(), np.take_along_axis(x, wanted, 1))


def test_an_index_on_the_device_is_told_when_a_value_is_read(cl_device):
    x = Tensor.from_host(cl_device.queue, np.arange(4, dtype=np.float32))
    picked = ops.index_select(x, 0, Tensor.from_host(cl_device.queue, np.array([1, 2])) + 5)
    with pytest.raises(IndexError, match=r"\[index_select\] an index in a tensor is out of range; size=4"):
        picked.to_host()
    assert ops.index_select(x, 0, Tensor.from_host(cl_device.queue, np.array([1, 2])) + 1).tolist() == [2.0, 3.0]


def test_an_empty_view_is_written(device):
    """It has no elements, so none of them are one element of its base."""
    x = Tensor.zeros((4, 3, 0), queue=device.queue)
    x.transpose(0, 1)[1:] = 2.0
    view = Tensor.ones((2, 3), queue=device.queue)[:, 3:]
    view += 1
    assert x.shape == (4, 3, 0) and view.shape == (2, 0)


def test_an_index_that_repeats_fills_once(device):
    """The gradient of the value counts each element that holds it once."""
    x, value = Tensor.from_host(device.queue, np.ones((2, 4), np.float32)), Tensor.full((), 3.0, queue=device.queue, requires_grad=True)
    filled = ag.index_fill(x, 1, Tensor.from_host(device.queue, np.array([2, -1, 2])), value)
    assert filled.tolist() == [[1, 1, 3, 3]] * 2
    filled.backward(Tensor.from_host(device.queue, np.arange(8, dtype=np.float32).reshape(2, 4)))
    assert value.grad.item() == 2 + 3 + 6 + 7


def test_take_along_no_dim_is_flat(device):
    x, index = np.arange(12, dtype=np.float32).reshape(3, 4), np.array([[11, 0], [5, 5]])
    taken = ag.take_along_dim(Tensor.from_host(device.queue, x), Tensor.from_host(device.queue, index))
    assert taken.tolist() == [11, 0, 5, 5]


def test_levels_of_quantile_carry_no_gradient(device):
    levels = Tensor.full((2,), 0.5, queue=device.queue, requires_grad=True)
    with pytest.raises(TypeError, match=r"\[quantile\] q must not require a gradient"):
        ag.quantile(Tensor.from_host(device.queue, np.ones(3, np.float32)), levels)
