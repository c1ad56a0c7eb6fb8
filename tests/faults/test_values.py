"""Arrays of every layout, arrays that change after the call, and sizes that do not fit anywhere."""

import numpy as np
import pytest

import netcl as nc
from netcl.core.errors import DtypeError, OutOfMemoryError, ShapeError

EIGHT = np.arange(2 * 3 * 1 * 2 * 1 * 2 * 3 * 2, dtype=np.float32).reshape(2, 3, 1, 2, 1, 2, 3, 2)
ORDER = (7, 0, 3, 1, 2, 6, 5, 4)


def _read_only(array):
    array.flags.writeable = False
    return array


LAYOUTS = {
    "8-d": EIGHT,
    "8-d transposed": EIGHT.transpose(ORDER),
    "big-endian float": np.arange(7).astype(">f4"),
    "big-endian int": np.arange(7).astype(">i8"),
    "big-endian half": np.arange(7).astype(">f2"),
    "read-only": _read_only(np.arange(7, dtype=np.float32)),
    "broadcast": np.broadcast_to(np.float32(3), (4, 5)),
    "negative strides": np.arange(60, dtype=np.float32).reshape(6, 10)[::-1, ::-3],
    "overlapping": np.lib.stride_tricks.sliding_window_view(np.arange(9, dtype=np.float32), 4),
    "unaligned": np.frombuffer(b"\0" + np.arange(5, dtype=np.float32).tobytes(), np.uint8)[1:].view(np.float32),
    "Fortran order": np.asfortranarray(np.arange(12, dtype=np.int32).reshape(3, 4)),
    "empty": np.zeros((3, 0, 2), np.float32),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.fault(
    "array with an unusual layout",
    "8-d, big-endian, read-only, negative strides, overlapping, unaligned, empty",
    "arrives as it is",
)
def test_arrays_of_every_layout_arrive_as_they_are(device, layout):
    array = LAYOUTS[layout]
    x = nc.Tensor.from_host(array)
    np.testing.assert_array_equal(x.numpy(), array)
    assert x.shape == array.shape and x.numpy().dtype == array.dtype.newbyteorder("=")
    x.from_host(array)
    np.testing.assert_array_equal((x + x).numpy(), array + array)


def test_eight_dimensions_are_computed_with(device):
    x = nc.tensor(EIGHT)
    np.testing.assert_array_equal((x * 2 + x).sum(3).numpy(), (EIGHT * 3).sum(3))
    np.testing.assert_array_equal(x.permute(*ORDER).numpy(), EIGHT.transpose(ORDER))


@pytest.mark.parametrize(
    "how", [{}, {"async_copy": True}, {"async_copy": True, "use_pinned": True}, {"async_copy": False, "use_pinned": True}]
)
@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.fault(
    "array changes after an asynchronous upload",
    "overwritten right after the call, pinned or not, cast or not",
    "the values at the call arrive",
)
def test_an_array_may_change_as_soon_as_it_was_sent(device, how, kind):
    array = np.ones(1 << 20, kind)
    sent = nc.Tensor.from_host(array, "float32", **how)
    written = nc.zeros((1 << 20,)).from_host(array, **how)
    array[:] = 7
    assert sent.numpy().max() == written.numpy().max() == 1


@pytest.mark.fault("memory that cannot be shared", "`share=True` with strided, read-only and cast arrays", "`ShapeError`")
def test_only_memory_that_can_be_shared_is(device):
    array = np.ones(1000, np.float32)
    shared = nc.Tensor.from_host(array, share=True)
    assert shared.numpy().sum() == 1000
    for unlike in (array[::2], _read_only(array.copy()), array.astype(np.float64), array.astype(">f4"), [1.0, 2.0]):
        with pytest.raises(
            ShapeError, match=r"^\[from_host\] share=True requires a contiguous, writable NumPy array of the tensor's dtype; .*copy"
        ):
            nc.Tensor.from_host(unlike, share=True)


@pytest.mark.fault("masked array", "`numpy.ma`", "`DtypeError`")
def test_masked_values_are_not_taken_for_values(device):
    with pytest.raises(DtypeError, match=r"a masked array cannot be converted to a tensor; .*filled"):
        nc.tensor(np.ma.masked_array([1.0, 2.0], [False, True]))


@pytest.mark.parametrize(
    "array", [np.zeros(2, complex), np.zeros(2, "M8[s]"), np.array(["a"]), np.array([None]), np.zeros(2, [("a", "f4")])]
)
def test_what_is_no_number_is_refused(device, array):
    with pytest.raises(DtypeError, match=r"^\[from_host\] arrays of dtype"):
        nc.tensor(array)


@pytest.mark.parametrize("shape", [(1 << 40, 1 << 40), (1 << 62, 4), (1 << 31, 1 << 31, 1 << 31), (1 << 64,), (10**30,)])
@pytest.mark.fault("sizes whose product overflows", "shapes of 2^64 to 10^30 elements", "`OutOfMemoryError` or `ShapeError`")
def test_sizes_whose_product_overflows_raise(device, shape):
    for make in (nc.zeros, nc.Tensor.empty, lambda s: nc.full(s, 1.0)):
        with pytest.raises(OutOfMemoryError, match=r"^\[allocate\] .*bytes=\d{19,}"):
            make(shape)
    with pytest.raises(MemoryError):
        (nc.zeros((1, 1)).expand(1 << 40, 1 << 30) + 1).numpy()
    with pytest.raises(ShapeError, match="must have the number of elements"):
        nc.zeros((4,)).reshape(shape)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0, 2)])
def test_nothing_is_a_size_too(device, shape):
    x = nc.zeros(shape)
    assert (x + 1).exp().numpy().shape == shape
    assert x.sum().item() == 0 and x.reshape(-1).shape == (0,)


MANY = (1 << 31) + 5
LONG = {  # of a vector whose last values are 1 to 4
    "slice": (lambda y: y[MANY - 4 :].tolist(), [1, 2, 3, 4]),
    "item": (lambda y: y[1 << 31].item(), 1),
    "sum": (lambda y: y.sum().item(), MANY + 6),
    "max": (lambda y: y.max().item(), 4),
    "argmax": (lambda y: y.argmax().item(), MANY - 1),
    "flip": (lambda y: y.flip(0)[:4].tolist(), [4, 3, 2, 1]),
    "roll": (lambda y: y.roll(1)[:3].tolist(), [4, 1, 1]),
    "cat": (lambda y: nc.cat([y[:10], y[10:]])[MANY - 4 :].tolist(), [1, 2, 3, 4]),
    "equal": (lambda y: (y == 4).any().item(), True),
    "index": (lambda y: y[nc.tensor(np.array([0, MANY - 1]))].tolist(), [1, 4]),
    "step": (lambda y: y[1::3][-2:].tolist(), [1, 2]),
    "offset": (lambda y: (y[3:] + 1)[-4:].tolist(), [2, 3, 4, 5]),
    "set": (lambda y: (y[MANY - 10 : MANY - 5].fill_(6), y[MANY - 11 : MANY - 4].sum().item(), y[MANY - 10 : MANY - 5].fill_(1))[1], 32),
    "nonzero": (lambda y: nc.nonzero(y > 2).tolist(), [[MANY - 2], [MANY - 1]]),
    "mask": (lambda y: y[y > 1].tolist(), [2, 3, 4]),
    "masked_fill": (lambda y: y.masked_fill(y > 1, 9)[MANY - 4 :].tolist(), [1, 9, 9, 9]),
    "gather": (lambda y: nc.gather(y, 0, nc.tensor(np.array([0, MANY - 1]))).tolist(), [1, 4]),
    "pad": (lambda y: nc.nn.functional.pad(y, (2, 1), value=7)[MANY:].tolist(), [3, 4, 7]),
    "repeat": (lambda y: nc.tensor(np.array([1, 2, 3], np.uint8)).repeat(1 << 30)[-3:].tolist(), [1, 2, 3]),
    "transpose": (lambda y: y[5:].reshape(65536, 32768).t().contiguous()[-1, -2:].tolist(), [1, 4]),
    "argmax of columns": (lambda y: y[5:].reshape(65536, 32768).argmax(0)[-1].item(), 65535),
    "tril": (lambda y: nc.tril(y[5:].reshape(65536, 32768))[-1, -2:].tolist(), [3, 4]),
    "cumsum": (lambda y: y.to("int64").cumsum(0)[MANY - 2 :].tolist(), [MANY + 2, MANY + 6]),
}
WIDE = (65536, 32770)
MATRIX = {  # of a matrix of ones
    "rows": (lambda y: y.sum(1, dtype="float32")[-1].item(), WIDE[1]),
    "columns": (lambda y: y.sum(0, dtype="float32")[-1].item(), WIDE[0]),
    "transpose": (lambda y: y.t().contiguous()[-1, -2:].tolist(), [1, 1]),
    "product": (lambda y: (y @ nc.ones((WIDE[1], 1), dtype="float16").to(y.dtype))[-1].item(), float(np.float16(WIDE[1]))),
    "softmax": (lambda y: y.softmax(-1)[-1, -1].item() * WIDE[1], pytest.approx(1, rel=1e-2)),
    "broadcast": (lambda y: (y + nc.ones((WIDE[1],), dtype="float16"))[-1, -1].item(), 2),
}


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.fault(
    "more than 2^31 elements",
    "29 ops on vectors and matrices, with 16 GB of device memory or more",
    "the right values, `ShapeError` or `OutOfMemoryError`",
)
def test_more_elements_than_an_int_counts(cl_device):
    if cl_device.queue.device.global_mem_size < 16 << 30:
        pytest.skip("needs 16 GB of device memory")
    wrong = {}
    for values, dtype, cases in (((MANY,), "uint8", LONG), (WIDE, "float16", MATRIX)):
        y = nc.ones(values, dtype=dtype)
        if cases is LONG:
            y[MANY - 3 :] = nc.tensor(np.array([2, 3, 4], np.uint8))
        for name, (function, expected) in cases.items():
            try:
                got = function(y)
            except (ShapeError, OutOfMemoryError) as error:
                assert isinstance(error, OutOfMemoryError) or "fewer than 2^31 elements" in str(error), error
                continue
            if got != expected:
                wrong[name] = got, expected
        del y
    assert wrong == {}
