"""Tensor: factories, dtypes, transfers, errors; on every device and on NumPy."""

import copy
import dataclasses
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import netcl
from netcl.core.device import device as use
from netcl.core.dtype import DTYPES, decode, encode
from netcl.core.errors import DeviceError, DtypeError, OutOfMemoryError, ShapeError
from netcl.core.hooks import Hooks, hooks
from netcl.core.tensor import Tensor, duplicate

SHAPES = [(), (0,), (1,), (3,), (255,), (257,), (2, 3), (4, 0, 2), (2, 3, 5)]


def test_the_fields_are_the_pages():
    assert [f.name for f in dataclasses.fields(Tensor)] == [
        "buffer", "shape", "dtype", "context", "queue", "pool_handle", "persistent", "requires_grad", "grad", "grad_fn", "host_ref",
        "array", "pending_event", "pending_release",
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_round_trip(device, dtype, shape):
    values = (np.arange(int(np.prod(shape))).reshape(shape) % 2).astype(np.float32)
    t = Tensor.from_host(device.queue, values, dtype)
    assert (t.shape, t.dtype, t.size, t.ndim, t.nbytes) == (shape, dtype, values.size, len(shape), values.size * DTYPES[dtype].itemsize)
    assert t.backend == device.backend
    np.testing.assert_array_equal(t.to_host(), values)
    assert t.to_host().dtype == DTYPES[dtype].host
    array, _event = pending = t.to_host_async()
    np.testing.assert_array_equal(pending.wait(), values)
    assert pending.array is array


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_fills(device, dtype):
    for n in (0, 1, 3, 255, 257):
        assert Tensor.zeros((n,), dtype, queue=device.queue).tolist() == [0] * n
        assert Tensor.ones((n,), dtype, queue=device.queue).tolist() == [1] * n
        assert Tensor.from_shape(device.queue, (n,), dtype=dtype, fill=1).tolist() == [1] * n
    assert Tensor.full((), 1, dtype, queue=device.queue).item() == 1


def test_the_sign_of_zero_survives(device):
    assert [np.signbit(Tensor.full((5,), v, queue=device.queue).to_host()).all() for v in (0.0, -0.0, 0.0)] == [False, True, False]


@pytest.mark.parametrize(
    ("given", "becomes"),
    [("float64", "float32"), ("float32", "float32"), ("float16", "float16"), ("int64", "int64"), ("int32", "int32"), ("uint8", "uint8"),
     ("bool", "bool")],
)  # fmt: skip
def test_dtype_of_arrays(device, given, becomes):
    assert Tensor.from_host(device.queue, np.zeros(3, given)).dtype == becomes


def test_python_values(device):
    with use(device):
        assert Tensor.from_host([1.5, 2.5]).dtype == "float32"
        assert Tensor.from_host([1, 2]).dtype == "int64"
        assert Tensor.from_host(True).dtype == "bool"
        assert Tensor.from_host(3.0).shape == ()
        assert Tensor.arange(3).tolist() == [0, 1, 2]
        assert Tensor.arange(1, 2, 0.5).tolist() == [1.0, 1.5]
        assert Tensor.arange(0, 5, 1.5, "int32").tolist() == [0, 1, 2, 3]  # as in torch
        assert Tensor.arange(0, 5, 1.5, "int64").tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ["complex64", "complex128", "<U3", "datetime64[s]", "object"])
def test_other_dtypes_are_refused_by_name(device, name):
    with pytest.raises(DtypeError, match=r"\[from_host\] arrays of dtype .* cannot be converted to tensors; shape=\(2,\); convert it"):
        Tensor.from_host(device.queue, np.zeros(2, name))


def test_unknown_dtype(device):
    with pytest.raises(DtypeError, match=r"\[zeros?|\[empty\] unknown dtype; dtype='float8'; known: "):
        Tensor.zeros((2,), "float8", queue=device.queue)


def test_aliases_are_canonical(device):
    for alias, name in (("float", "float32"), ("half", "float16"), ("double", "float64"), ("int", "int32")):
        assert Tensor.zeros((2,), alias, queue=device.queue).dtype == name


def test_bfloat16_rounds_to_nearest_even_and_keeps_nan():
    row = DTYPES["bfloat16"]
    bits = np.array([0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x7F800000, 0xFF800000, 0x7F800001, 0x00000001], np.uint32)
    stored = encode(bits.view(np.float32), row)
    assert stored.tolist()[:6] == [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0x7F80, 0xFF80]
    assert np.isnan(decode(stored, row)[6])
    assert stored[7] == 0


def test_bfloat16_arrays_of_ml_dtypes(device):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.array([1.5, -2.0, 3.25], ml_dtypes.bfloat16)
    t = Tensor.from_host(device.queue, values)
    assert t.dtype == "bfloat16"
    assert t.tolist() == [1.5, -2.0, 3.25]


def test_the_users_array_is_never_aliased(device):
    values = np.arange(1000, dtype=np.float32)
    t = Tensor.from_host(device.queue, values)
    values[:] = -1
    np.testing.assert_array_equal(t.to_host(), np.arange(1000))
    host = t.to_host()
    host[:] = -2
    np.testing.assert_array_equal(t.to_host(), np.arange(1000))


def test_share_aliases_on_purpose(device):
    values = np.zeros(1024, np.float32)
    t = Tensor.from_host(device.queue, values, share=True)
    assert t.tolist() == values.tolist()
    if t.backend == "cpu":
        values[0] = 5
        assert t.to_host()[0] == 5


@pytest.mark.parametrize("async_copy", [True, False])
@pytest.mark.parametrize("use_pinned", [True, False])
def test_every_way_of_copying(cl_device, async_copy, use_pinned, monkeypatch):
    from netcl.core.backend.opencl import backend_of

    for integrated in (True, False):
        monkeypatch.setattr(backend_of(cl_device.queue), "integrated", integrated)
        for n in (0, 1, 1000, 100_003):
            values = np.arange(n, dtype=np.float64)
            t = Tensor.from_host(cl_device.queue, values, async_copy=async_copy, use_pinned=use_pinned)
            values[:] = -1
            np.testing.assert_array_equal(t.wait().to_host(), np.arange(n, dtype=np.float32))
            assert t.pending_event is None


def test_in_place(device):
    t = Tensor.zeros((2, 3), queue=device.queue)
    buffer, array = t.buffer, t.array
    assert t.from_host(np.arange(6).reshape(2, 3)) is t
    assert t.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert t.buffer is buffer
    assert t.array is array
    t.write(Tensor.ones((2, 3), queue=device.queue))
    assert t.tolist() == [[1, 1, 1], [1, 1, 1]]
    with pytest.raises(ShapeError, match=r"\[from_host\] the array must have the shape of the tensor; array=\(3, 2\), tensor=\(2, 3\)"):
        t.from_host(np.zeros((3, 2)))
    assert t.tolist() == [[1, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize("shape", [(-1,), (2, -3)])
def test_negative_sizes(device, shape):
    for make in (Tensor.zeros, Tensor.empty, Tensor.ones):
        with pytest.raises(ShapeError, match=r"sizes must not be negative; shape="):
            make(shape, queue=device.queue)


def test_shapes_are_integers(device):
    with pytest.raises(ShapeError, match=r"\[zeros\] every size of shape must be an integer; shape=\(2.5,\)"):
        Tensor.zeros((2.5,), queue=device.queue)


def test_item_and_friends(device):
    one = Tensor.from_host(device.queue, np.array([[7]]))
    assert (int(one), float(one), bool(one)) == (7, 7.0, True)
    assert one.item() == 7
    assert list(range(10))[one] == 7
    with pytest.raises(ShapeError, match=r"\[item\] the tensor must have exactly one element; shape=\(2,\)"):
        Tensor.zeros((2,), queue=device.queue).item()
    with pytest.raises(TypeError, match="0-d tensor has no length"):
        len(Tensor.zeros((), queue=device.queue))
    assert len(Tensor.zeros((5, 2), queue=device.queue)) == 5


def test_repr(device):
    text = repr(Tensor.from_host(device.queue, np.array([1.0, 2.5]), requires_grad=True))
    assert text.startswith("Tensor([1. , 2.5], shape=(2,), dtype=float32, device=")
    assert text.endswith(", requires_grad=True)")


def test_numpy_protocols(device):
    t = Tensor.from_host(device.queue, np.arange(4, dtype=np.float32))
    np.testing.assert_array_equal(np.asarray(t), np.arange(4))
    assert np.asarray(t, dtype=np.int32).dtype == np.int32
    if device.device_type == "cpu":
        np.testing.assert_array_equal(np.from_dlpack(t), np.arange(4))
    else:
        with pytest.raises(BufferError, match=r"\[dlpack\]"):
            t.__dlpack__()


def test_moving_between_devices(device):
    t = Tensor.from_host(device.queue, np.arange(3, dtype=np.float16), requires_grad=True)
    assert t.to(device) is t
    assert t.to(device.queue) is t
    there = t.to("cpu")
    assert there.backend == "cpu"
    assert there.dtype == "float16"
    assert there.requires_grad
    assert there.to(device).tolist() == [0, 1, 2]
    if there is not t:
        (there * there).sum().to(device).backward()
        assert t.grad.tolist() == [0.0, 2.0, 4.0] and t.grad.device is device and not there.is_leaf
    with netcl.no_grad():
        assert t.to("cpu") is t or not t.to("cpu").requires_grad
    with pytest.raises(DeviceError, match=r"\[device\] no such device; selector='no such thing'"):
        t.to("no such thing")


def test_detach_shares_and_forgets(device):
    t = Tensor.ones((2,), queue=device.queue, requires_grad=True)
    assert not t.detach().requires_grad
    t.detach().fill_(3)
    assert t.tolist() == [3, 3]
    other = duplicate(t)
    other.fill_(4)
    assert t.tolist() == [3, 3]


def test_a_queue_of_another_context(cl_device):
    cl = pytest.importorskip("pyopencl")
    other = cl.Context(cl_device.context.devices)
    with pytest.raises(DeviceError, match=r"\[tensor\] queue must belong to the given context"):
        Tensor.zeros((2,), context=other, queue=cl_device.queue)


def test_hooks_can_be_removed(device):
    t = Tensor.empty((1,), queue=device.queue, requires_grad=True)
    remove = t.register_hook(lambda g: g)
    assert len(t._hooks) == 1
    remove()
    assert t._hooks is None


def test_tensors_are_hashable_by_identity(device):
    a, b = (Tensor.zeros((1,), queue=device.queue) for _ in range(2))
    assert len({a, b, a}) == 2


def test_a_dropped_tensor_outlives_the_kernel_that_reads_it(cl_device):
    from netcl.core.kernels import program

    q, n = cl_device.queue, 1000
    source = "__kernel void copy(__global const float* x, __global float* y, int n) { int i = get_global_id(0); if (i < n) y[i] = x[i]; }"
    copy = program.get(q, source, "copy")
    for k in range(300):
        y = Tensor.empty((n,), queue=q)
        copy(q, n, 100, Tensor.from_host(q, np.full(n, k, np.float32)), y, n)
        for _ in range(3):
            np.zeros(n, np.float32)
        np.testing.assert_array_equal(y.to_host(), k)


def test_byte_order_is_converted(device):
    t = Tensor.from_host(device.queue, np.arange(3, dtype=">f4"))
    assert (t.dtype, t.tolist()) == ("float32", [0.0, 1.0, 2.0])


def test_bad_values_are_told_in_the_house_form(device):
    for bad, error, text in (
        (
            lambda: Tensor.from_host(device.queue, [[1.0], [1.0, 2.0]]),
            ShapeError,
            r"\[from_host\] the values must form a rectangular array",
        ),
        (
            lambda: Tensor.full((3,), 300, "uint8", queue=device.queue),
            DtypeError,
            r"\[fill\] value must be representable in uint8, got 300; shape=\(3,\)",
        ),
        (
            lambda: Tensor.zeros((2,), queue="gpu"),
            (DeviceError, ImportError),
            r"\[OpenCLBackend\] queue must be a command queue of an OpenCL device; queue=gpu|^pyopencl required",
        ),
        (lambda: Tensor.empty((1 << 50,), queue=device.queue), OutOfMemoryError, r"\[allocate\] .*bytes=4503599627370496"),
        (lambda: np.array(Tensor.ones((2,), queue=device.queue), copy=False), ValueError, r"\[array\] a tensor .* without a copy"),
    ):
        with pytest.raises(error, match=text):
            bad()


def test_copies_but_no_pickles(device):
    t = Tensor.ones((2,), queue=device.queue, requires_grad=True)
    twin = copy.deepcopy(t)
    twin.detach().fill_(5)
    assert t.tolist() == [1, 1] and twin.tolist() == [5, 5]
    assert twin.requires_grad
    with pytest.raises(TypeError, match=r"\[pickle\] a tensor cannot be pickled"):
        pickle.dumps(t)


def test_what_torch_users_write(device):
    x = Tensor.from_host(device.queue, np.arange(6, dtype=np.float32))
    assert x.view(2, -1).sum(dim=1, keepdim=True).tolist() == [[3.0], [12.0]]
    assert x.contiguous().view(3, 2).flip(dims=(0,)).amax(dim=1).tolist() == [5.0, 3.0, 1.0]
    assert (x // 2 + 7 // (x + 1)).long().tolist() == [7, 3, 3, 2, 3, 3]
    assert (x.dim(), x.half().dtype, x.cpu().backend, (x > 1).int().tolist()) == (1, "float16", "cpu", [0, 0, 1, 1, 1, 1])
    _, place = x.max(0)
    assert (place.item(), x.min(dim=0).values.item(), x.max(axis=0).item(), x.max(5 - x).tolist()) == (5, 0.0, 5.0, [5, 4, 3, 3, 4, 5])
    assert x.where(x > 3, -1.0).tolist() == [-1.0, -1.0, -1.0, -1.0, 4.0, 5.0]
    assert x.clip(1, 3).tolist() == x.clamp(1, 3).tolist() == [1, 1, 2, 3, 3, 3]
    assert ((x == None), (x != None)) == (False, True)  # noqa: E711, as torch has it


def test_dtypes_are_objects(device):
    x = Tensor.zeros((2,), queue=device.queue)
    assert x.dtype is netcl.float32 is netcl.float and x.half().dtype is netcl.float16 and isinstance(x.dtype, netcl.dtype)
    assert x.dtype == np.float32 == x.dtype == np.dtype("float32") == x.dtype == "float32"
    assert (x + 1).dtype == np.float32 and x.sum().dtype is netcl.float32 and (x > 0).dtype is netcl.bool
    assert x.dtype != np.float64 and x.dtype != netcl.float64 and x.dtype != None and x.dtype != float  # noqa: E711
    assert {netcl.long: 1}["int64"] == {"int64": 1}[netcl.long] == 1
    assert x.to(np.float16).dtype is x.to(np.dtype("float16")).dtype is x.to(netcl.half).dtype is netcl.float16
    assert np.zeros(2, x.dtype).dtype == x.dtype and f"{x.dtype} {x.dtype!r}" == "float32 'float32'"
    assert [Tensor.full((1,), v, queue=device.queue).dtype for v in (3, True, 2.5, np.int32(1))] == ["int64", "bool", "float32", "int64"]


def test_integers_do_not_require_gradients(device):
    expected = {"expected_exception": DtypeError, "match": r"\[requires_grad\] only tensors of a floating-point dtype .*dtype=int64"}
    x = Tensor.arange(3, queue=device.queue)
    with pytest.raises(**expected):
        x.requires_grad_()
    with pytest.raises(**expected):
        x.requires_grad = True
    with pytest.raises(**expected):
        Tensor.zeros((2,), "int64", queue=device.queue, requires_grad=True)
    with pytest.raises(**expected):
        Tensor.from_host(device.queue, [1, 2], requires_grad=True)
    with pytest.raises(**expected):
        netcl.tensor([1, 2], requires_grad=True, device=device)
    integers = Tensor.zeros((2,), "int64", queue=device.queue)
    for make in (netcl.zeros, netcl.ones, netcl.empty, netcl.eye, netcl.randperm):
        with pytest.raises(**expected):
            make(2, dtype="int64", requires_grad=True, device=device)
    for make in (netcl.zeros_like, netcl.ones_like, netcl.empty_like):
        with pytest.raises(**expected):
            make(integers, requires_grad=True)
    for make, args in ((netcl.randint, (3, (2,))), (netcl.full, ((2,), 3)), (netcl.arange, (3,)), (netcl.tril_indices, (2, 2))):
        with pytest.raises(**expected):
            make(*args, requires_grad=True, device=device)
    with pytest.raises(**expected):
        netcl.randint_like(integers, 3, requires_grad=True)
    x.requires_grad = False
    assert not x.requires_grad and not x.requires_grad_(False).requires_grad


def test_random_integers_of_a_float_dtype_require_gradients(device):
    options = {"requires_grad": True, "device": device}
    like = Tensor.zeros((2,), queue=device.queue)
    made = [netcl.randint(3, (2,), dtype="float32", **options), netcl.randperm(2, dtype="float32", **options)]
    for x in (*made, netcl.randint_like(like, 3, requires_grad=True)):
        assert x.requires_grad and x.is_leaf and x.dtype == "float32" and x.shape == (2,) and x.device == device


def test_operators_of_bits(device):
    a, b = (Tensor.from_host(device.queue, np.array(values)) for values in ([True, True, False], [True, False, False]))
    assert [(a & b).tolist(), (a | b).tolist(), (a ^ b).tolist(), (~a).tolist(), (a & True).tolist()] == [
        [True, False, False], [True, True, False], [False, True, False], [False, False, True], [True, True, False],
    ]  # fmt: skip
    assert (a & Tensor.from_host(device.queue, np.array([6, 3, 1]))).tolist() == [0, 1, 0]
    with pytest.raises(DtypeError, match=r"\[bitwise_not\] inputs must be integers or truth values; .*dtype=float32"):
        ~Tensor.from_host(device.queue, np.array([6.0]))


def test_threads_that_come_while_ops_are_loaded_wait_for_them(monkeypatch):
    loading, loaded = threading.Lock(), []  # as an import has one

    def load(name):
        with loading:
            if not loaded:
                time.sleep(0.1)
                loaded.append(name)
            return lambda: "there"

    monkeypatch.setattr(hooks, "op", load)
    monkeypatch.setattr(Hooks, "found", {})
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda _: hooks.call("late"), range(3))) == ["there"] * 3
    assert list(hooks.found) == loaded == ["late"]


def test_a_name_that_no_layer_has_is_an_error():
    with pytest.raises(NotImplementedError, match=r"^\[no_such_op\] unknown op: no layer of netcl has a function of this name"):
        hooks.call("no_such_op")


def test_normal_honors_its_options():
    made = netcl.normal(1.0, 2.0, (3,), requires_grad=True)
    assert made.requires_grad and made.is_leaf
    with pytest.raises(TypeError, match=r"\[normal\] options must not be given with tensors; given=device; move the result"):
        netcl.normal(netcl.zeros((3,)), 1.0, device="cpu")


def test_print_options():
    x = netcl.tensor([1 / 3, 2e8])
    try:
        netcl.set_printoptions(precision=2, sci_mode=False)
        assert repr(x).startswith("Tensor([0.33, 200000000.00], ")
        netcl.set_printoptions(sci_mode=True)
        assert repr(x).startswith("Tensor([3.33e-01, 2.00e+08], ")
        netcl.set_printoptions(profile="full")
        assert "..." not in repr(netcl.arange(2000))
    finally:
        netcl.set_printoptions(profile="default")
    assert repr(x).startswith("Tensor([3.3333e-01, 2.0000e+08], ") and "..." in repr(netcl.arange(2000))
    with pytest.raises(ValueError, match=r"\[set_printoptions\] profile must be"):
        netcl.set_printoptions(profile="long")


def test_copies_of_tensors(device):
    w = netcl.tensor([1.0, 2.0], requires_grad=True, device=device)
    (w * 3.0).sum().backward()
    deep, shallow = copy.deepcopy(w), copy.copy(w)
    assert deep.requires_grad and deep.grad.tolist() == [3.0, 3.0] and deep.grad is not w.grad
    assert shallow.requires_grad and shallow.grad is None
    shallow.detach().fill_(5.0)
    assert w.tolist() == [5.0, 5.0] and deep.tolist() == [1.0, 2.0]
