"""Moving elements beyond the rows' samples: every dtype, planning of copies, sharing of memory, unused parts."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import netcl.autograd as ag
from netcl import ops
from netcl.core.dtype import DTYPES
from netcl.core.errors import DeviceError, ShapeError
from netcl.core.kernels import program
from netcl.core.tensor import Tensor
from netcl.engine.strided import Copy, CopyAxis, alignment, copy_block, dense, merge, widen


def same_memory(a: Tensor, b: Tensor) -> bool:
    return a.buffer is b.buffer if a.array is None else np.shares_memory(a.array, b.array)


# ---- planning


def test_merge_joins_what_both_sides_walk_alike():
    assert merge([CopyAxis(2, 12, 12), CopyAxis(1, 7, 9), CopyAxis(3, 4, 4), CopyAxis(4, 1, 1)]) == (CopyAxis(24, 1, 1),)
    assert merge([CopyAxis(3, 1, 4), CopyAxis(4, 3, 1)]) == (CopyAxis(3, 1, 4), CopyAxis(4, 3, 1))
    assert merge([CopyAxis(1, 5, 5)]) == ()


@pytest.mark.parametrize(
    ("itemsize", "axes", "start", "most", "wide"),
    [
        (1, (CopyAxis(3, 32, 16), CopyAxis(16, 1, 1)), 0, 16, 16),
        (1, (CopyAxis(3, 32, 18), CopyAxis(16, 1, 1)), 0, 16, 2),
        (4, (CopyAxis(3, 8, 8), CopyAxis(6, 1, 1)), 0, 16, 8),
        (4, (CopyAxis(8, 1, 1),), 2, 16, 8),
        (4, (CopyAxis(8, 1, 1),), 0, 4, 4),
        (4, (CopyAxis(8, 2, 1),), 0, 16, 4),
        (2, (CopyAxis(4, 0, 8), CopyAxis(8, 1, 1)), 0, 16, 16),
    ],
)
def test_widen_takes_the_largest_element_that_fits(itemsize, axes, start, most, wide):
    copy = widen(Copy(itemsize, start, 0, axes), most)
    assert copy.itemsize == wide
    assert copy.source * wide == start * itemsize


def test_memory_of_the_caller_is_not_taken_for_aligned(device):
    whole = np.arange(65, dtype=np.uint8)
    shared = Tensor.from_host(device.queue, whole[1:], share=True)
    np.testing.assert_array_equal(ops.flip(ops.flip(shared, 0), 0).to_host(), whole[1:])
    assert alignment(Tensor.zeros((4,), queue=device.queue)) >= 16 or device.backend == "cpu"


def test_a_copy_of_a_known_shape_is_planned_once(cl_device):
    x = Tensor.zeros((5, 7), queue=cl_device.queue)
    ops.permute(x, 1, 0)
    known, before = len(program.state(cl_device.queue)), program.build_count()
    for _ in range(3):
        ops.permute(x, 1, 0)
    assert (len(program.state(cl_device.queue)), program.build_count()) == (known, before)


def test_a_new_size_does_not_recompile(cl_device):
    ops.permute(Tensor.zeros((20, 30, 40), queue=cl_device.queue), 2, 0, 1)
    before = program.build_count()
    for shape in ((21, 31, 41), (50, 8, 64), (9, 90, 19)):
        ops.permute(Tensor.zeros(shape, queue=cl_device.queue), 2, 0, 1)
    assert program.build_count() == before


# ---- values


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_moves(device, dtype, rng):
    if dtype == "float64" and not device.profile.has_fp64:
        pytest.skip("the device has no float64")
    values = rng.integers(0, 2 if dtype == "bool" else 100, (3, 33, 40)).astype(DTYPES[dtype].host)
    x = Tensor.from_host(device.queue, values, dtype)
    moves = {
        "permute": (ops.permute(x, 2, 0, 1), values.transpose(2, 0, 1)),
        "flip": (ops.flip(x, 1), values[:, ::-1]),
        "narrow": (ops.narrow(x, 2, 1, 37), values[:, :, 1:38]),
        "cat": (ops.cat([x, x], 1), np.concatenate([values, values], 1)),
        "roll": (ops.roll(x, 5, 2), np.roll(values, 5, 2)),
        "tril": (ops.tril(x), np.tril(values)),
        "pad": (ops.pad(x, (1, 2), value=1), np.pad(values, [(0, 0), (0, 0), (1, 2)], constant_values=1)),
    }
    for name, (got, wanted) in moves.items():
        assert got.dtype == dtype
        np.testing.assert_array_equal(got.to_host(), wanted, err_msg=name)


@pytest.mark.parametrize("shape", [(1, 1), (3, 255), (255, 3), (257, 33), (8, 7), (64, 64)])
def test_transpositions_of_odd_sizes(device, shape, rng):
    values = rng.standard_normal(shape).astype(np.float32)
    np.testing.assert_array_equal(ops.transpose(Tensor.from_host(device.queue, values)).to_host(), values.T)


def test_more_axes_than_a_kernel_has(device, rng):
    values = rng.standard_normal((2, 3, 2, 2, 3, 2, 2, 3, 2, 2)).astype(np.float32)
    order = (9, 7, 5, 3, 1, 0, 2, 4, 6, 8)
    np.testing.assert_array_equal(ops.permute(Tensor.from_host(device.queue, values), order).to_host(), values.transpose(order))


def test_a_block_is_written_in_place(device):
    x, y = Tensor.zeros((4, 6), queue=device.queue), Tensor.from_host(device.queue, np.arange(4.0))
    copy_block((2, 2), y, 3, (-2, -1), x, 8, (6, 2))
    wanted = np.zeros((4, 6))
    wanted[1, 2::2], wanted[2, 2::2] = [3, 2], [1, 0]
    np.testing.assert_array_equal(x.to_host(), wanted)
    assert dense((4, 6)) == (6, 1)


# ---- memory


def test_reshaping_shares_memory_and_moving_does_not(device):
    x = Tensor.zeros((2, 3, 1), queue=device.queue)
    for view in (ops.reshape(x, 3, 2), ops.flatten(x), ops.squeeze(x), ops.unsqueeze(x, 0)):
        assert same_memory(x, view)
    for copy in (
        ops.clone(x),
        ops.permute(x, (0, 1, 2)),
        ops.expand(x, (2, 3, 1)),
        ops.narrow(x, 0, 0, 2),
        ops.flip(x, 2),
        ops.pad(x, (0, 0)),
    ):
        assert not same_memory(x, copy)


def test_arrays_and_lists_are_taken(device):
    x = Tensor.ones((1, 2), queue=device.queue)
    assert ops.cat([x, np.zeros((1, 2), np.float32)]).tolist() == [[1, 1], [0, 0]]
    assert ops.flip([1.0, 2.0], 0).tolist() == [2, 1]


def test_different_dtypes_are_promoted(device):
    whole, real = Tensor.from_host(device.queue, [1, 2]), Tensor.from_host(device.queue, [0.5, 1.5], requires_grad=True)
    for joined in (ag.cat([whole, real]), ag.stack([whole, real])):
        assert joined.dtype == "float32" and joined.to_host().ravel().tolist() == [1, 2, 0.5, 1.5]
    half = Tensor.from_host(device.queue, [2.0, 3.0], "float16", requires_grad=True)
    joined = ag.cat([half, real])
    ag.sum(joined * joined).backward()
    assert half.grad.dtype == "float16" and half.grad.tolist() == [4, 6] and real.grad.tolist() == [1, 3]


def test_different_devices_are_not_joined(cl_device):
    with pytest.raises(DeviceError, match=r"\[cat\] all inputs must be on the same device; .*; move one with tensor\.to\(device\)"):
        ops.cat([Tensor.zeros((2,), queue=cl_device.queue), Tensor.zeros((2,), device="cpu")])


# ---- gradients


def test_parts_nobody_used_get_zeros(device):
    x = Tensor.from_host(device.queue, np.arange(7.0), requires_grad=True)
    _, middle, _ = ag.split(x, 3)
    (g,) = ag.grad(middle, x, Tensor.ones((3,), queue=device.queue))
    assert g.tolist() == [0, 0, 0, 1, 1, 1, 0]


def test_joining_keeps_no_input_alive(device):
    parts = [Tensor.ones((2,), queue=device.queue, requires_grad=True) * 2.0 for _ in range(2)]
    out = ag.cat(parts)
    assert not any(isinstance(x, Tensor) for x in out.grad_fn.saved[1][0])


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_second_derivatives_of_padding(mode):
    x = Tensor.from_host(Tensor.zeros((), device="cpu").queue, np.arange(12.0).reshape(3, 4), "float64", requires_grad=True)
    assert ag.gradgradcheck(lambda t: ag.square(ag.pad(t, (2, 1, 1, 2), mode=mode)), [x])


def test_copies_as_a_gpu_spreads_them(cl_device, unoptimized, monkeypatch, rng):
    """In three dimensions, a few elements per work-item: on whatever device there is."""
    monkeypatch.setattr(sys.modules["netcl.engine.launch"], "on_cpu_device", lambda queue: False)
    x = rng.standard_normal((3, 11, 2, 5, 6)).astype(np.float32)
    t = Tensor.from_host(cl_device.queue, x)
    for found, wanted in zip(ops.unbind(t, axis=2, order=(0, 2, 1, 3)), np.moveaxis(x, 2, 0), strict=True):
        np.testing.assert_array_equal(found.to_host(), wanted.transpose(0, 2, 1, 3))
    np.testing.assert_array_equal(ops.flip(t, 1).to_host(), x[:, ::-1])
    np.testing.assert_array_equal(ops.cat([t, t], 1).to_host(), np.concatenate([x, x], 1))
    np.testing.assert_array_equal(ops.split(t, 1, axis=0)[1].to_host(), x[1:2])
    np.testing.assert_array_equal(ops.permute(t, 2, 4, 0, 3, 1).to_host(), x.transpose(2, 4, 0, 3, 1))


def test_pairs_of_padding_name_the_flat_form(device):
    x = Tensor.ones((2, 3), queue=device.queue)
    with pytest.raises(ShapeError, match=r"\[pad\] padding must be integers, two per axis.* written flat: padding=\(0, 0, 1, 2\)"):
        ops.pad(x, ((1, 2), (0, 0)))
    with pytest.raises(ShapeError, match=r"\[pad\] padding must be integers, two per axis, the last axis first; padding=\(1\.5, 0\)$"):
        ops.pad(x, (1.5, 0))


def test_quantiles_of_infinite_values(device):
    """An infinite value beside the quantile does not reach it, and is a quantile itself."""
    x = Tensor.from_host(device.queue, np.array([3, -np.inf, 1, 2, np.inf], np.float32))
    wanted = {"lower": [-np.inf, 2, 3, np.inf], "higher": [-np.inf, 2, np.inf, np.inf], "nearest": [-np.inf, 2, np.inf, np.inf]}
    for interpolation, values in wanted.items():
        assert x.quantile([0.0, 0.5, 0.9, 1.0], interpolation=interpolation).tolist() == values, interpolation
    assert x.quantile([0.0, 0.5, 1.0]).tolist() == [-np.inf, 2, np.inf]
    assert Tensor.full((), 3.0, queue=device.queue).quantile([0.1, 0.5], 0, keepdim=True).tolist() == [3, 3]


def test_chunks_and_windows_of_least_size(device):
    empty = Tensor.empty((2, 0), queue=device.queue)
    assert [part.shape for part in ops.chunk(empty, 3, 1)] == [(2, 0)] * 3
    assert [ops.unfold(Tensor.full((), 3, queue=device.queue), 0, size, 1).tolist() for size in (0, 1)] == [[], [3.0]]
