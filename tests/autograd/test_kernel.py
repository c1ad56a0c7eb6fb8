"""``@netcl.kernel``: a kernel with a gradient in ten lines."""

import numpy as np
import pytest

import netcl
import netcl.autograd as ag
from netcl.autograd import sanitizer
from netcl.core.errors import DeviceError, DtypeError, KernelBuildError, ShapeError


@netcl.kernel(vjp="dx[i] = g[i] * factor * (1.0f + x[i]);")
def bent(x: "float32", factor: float) -> "float32":  # noqa: F821
    """out[i] = factor * (x[i] + 0.5f * MUL(x[i], x[i]));"""


DX = """
int r = i / x_dim1, k = i % x_dim1;
float s = 0;
for (int c = 0; c < w_dim1; ++c) s += g[r * w_dim1 + c] * w[k * w_dim1 + c];
dx[i] = s;
"""
DW = """
int k = i / w_dim1, c = i % w_dim1;
float s = 0;
for (int r = 0; r < x_dim0; ++r) s += g[r * w_dim1 + c] * x[r * x_dim1 + k];
dw[i] = s;
"""


@netcl.kernel(shape=lambda x, w: (x.shape[0], w.shape[1]), vjp={"x": DX, "w": DW})
def product(x: "float32", w: "float32"):  # noqa: F821
    """
    int r = i / w_dim1, c = i % w_dim1;
    float s = 0;
    for (int k = 0; k < x_dim1; ++k) s += x[r * x_dim1 + k] * w[k * w_dim1 + c];
    out[i] = s;
    """


def test_forward_and_gradient(cl_device, rng):
    values = rng.normal(size=257).astype(np.float32)
    x = ag.tensor(values, requires_grad=True, queue=cl_device.queue)
    y = bent(x, 3.0)
    np.testing.assert_allclose(y.to_host(), 3 * (values + 0.5 * values**2), rtol=1e-6)
    y.sum().backward()
    np.testing.assert_allclose(x.grad.to_host(), 3 * (1 + values), rtol=1e-6)
    assert ag.gradcheck(lambda v: bent(v, factor=2.0), [x])


def test_shapes_and_one_body_per_input(cl_device, rng):
    a, b = (ag.tensor(rng.normal(size=s), requires_grad=True, queue=cl_device.queue) for s in ((5, 7), (7, 3)))
    np.testing.assert_allclose(product(a, b).to_host(), a.to_host() @ b.to_host(), rtol=1e-5, atol=1e-6)
    assert ag.gradcheck(product, [a, b])


def test_a_number_is_read_when_the_kernel_is_called(cl_device):
    x, factor = (ag.tensor(v, queue=cl_device.queue) for v in ([1.0, 2.0], 2.0))
    x.requires_grad = True
    y = bent(x, factor)
    factor.fill_(100.0)
    y.sum().backward()
    assert x.grad.tolist() == [4.0, 6.0]


def test_half_inputs_are_cast(cl_device):
    x = netcl.Tensor.from_host(cl_device.queue, np.array([1.0, 2.0]), "float16", requires_grad=True)
    y = bent(x, 1.0)
    assert y.dtype == "float32"
    y.sum().backward()
    assert x.grad.dtype == "float16"


def test_the_source_is_readable():
    text = bent.source()
    assert "__kernel void bent(__global const float* x, __global float* out, const float factor, const int n)" in text
    assert "__kernel void bent_vjp_x(" in text
    assert "#define" not in text


def test_numpy_needs_a_twin():
    x = ag.tensor([1.0], device="cpu")
    with pytest.raises(DeviceError, match=r"\[bent\] a kernel in OpenCL C requires an OpenCL device.*pass cpu="):
        bent(x, 1.0)


def test_a_function_as_gradient_can_be_differentiated_again(device):
    @netcl.kernel(vjp=lambda g, x: g * 3.0 * x * x, cpu=lambda x: x**3)
    def cube(x: "float32") -> "float32":  # noqa: F821
        "out[i] = x[i] * x[i] * x[i];"

    x = ag.tensor([2.0], requires_grad=True, queue=device.queue)
    (g,) = ag.grad(cube(x), x, create_graph=True)
    (h,) = ag.grad(g, x)
    assert (g.tolist(), h.tolist()) == ([12.0], [12.0])


def test_errors(cl_device):
    x, y = (ag.tensor(np.ones(n), queue=cl_device.queue) for n in (2, 3))

    @netcl.kernel
    def both(a: "float32", b: "float32"):  # noqa: F821
        "out[i] = a[i] + b[i];"

    with pytest.raises(ShapeError, match=r"\[both\] all tensors must have the same shape; a=\(2,\), b=\(3,\); pass shape="):
        both(x, y)
    with pytest.raises(TypeError, match=r"\[both\] the arguments must be a, b, each given once; missing=\['b'\], unexpected=\[\]"):
        both(x)
    with pytest.raises(TypeError, match=r"\[both\] the arguments must be a, b, each given once; missing=\[\], unexpected=\['c'\]"):
        both(x, x, c=x)
    for call in (lambda: both(x, x, x), lambda: both(x, x, b=x)):
        with pytest.raises(TypeError, match=r"\[both\] the arguments must be a, b, each given once; .*given=3"):
            call()
    x.requires_grad = True
    with pytest.raises(DtypeError, match=r"\[both\] this kernel has no gradient; pass vjp="):
        both(x, x).sum().backward()

    @netcl.kernel(vjp={"a": "da[i] = g[i];"})
    def partly(a, b):
        "out[i] = a[i] + b[i];"

    with pytest.raises(DtypeError, match=r"\[partly\] vjp must write the gradient of every input that requires one; missing=\['b'\]"):
        partly(x, x).sum().backward()
    with pytest.raises(DtypeError, match=r"\[bent\] a number has no gradient, so it must not be a tensor that requires one"):
        bent(y, ag.tensor(2.0, requires_grad=True))
    for value in ("2", None, ag.tensor([1.0, 2.0])):
        with pytest.raises(TypeError, match=r"\[bent\] factor must be a number; given="):
            bent(y, value)
    with pytest.raises(KernelBuildError, match=r"\[none\] a kernel needs a body"):

        @netcl.kernel
        def none(x: "float32"):  # noqa: F821
            pass

    with pytest.raises(KernelBuildError, match=r"\[odd\] vjp must write d<input>\[i\] of an input"):

        @netcl.kernel(vjp="gx[i] = 1;")
        def odd(x: "float32"):  # noqa: F821
            "out[i] = x[i];"

    with pytest.raises(DtypeError, match=r"\[small\] x cannot be float16 in a kernel"):

        @netcl.kernel
        def small(x: "float16"):  # noqa: F821
            "out[i] = x[i];"


def test_the_sanitizer_reports_a_read_past_the_end(cl_device):
    if not sanitizer.oclgrind_available():
        pytest.skip("Oclgrind is not installed")

    @netcl.kernel(check=True)
    def shifted(x: "float32"):  # noqa: F821
        "out[i] = x[i + 1000000];"

    with pytest.raises(
        KernelBuildError, match=r"(?s)\[shifted\] the kernel must run without faults, but the sanitizer found some.*Invalid read of size 4"
    ):
        shifted(ag.tensor(np.ones(8), queue=cl_device.queue))

    @netcl.kernel(check=True)
    def clean(x: "float32"):  # noqa: F821
        "out[i] = x[i] + 1.0f;"

    assert clean(ag.tensor(np.ones(8), queue=cl_device.queue)).tolist() == [2.0] * 8
