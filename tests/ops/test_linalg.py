"""Special functions, scans, scatters, resampling, linear algebra and Fourier transforms: values and gradients as PyTorch has them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import netcl
import netcl.autograd as ag
from netcl.core.errors import AutogradError, DtypeError, ShapeError

FOLDER = Path(__file__).parent.parent / "golden"
GOLDEN = np.load(FOLDER / "linalg.npz")
_SPEC = importlib.util.spec_from_file_location("linalg_cases", FOLDER / "linalg_cases.py")
golden = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(golden)
#: On OpenCL devices the cases of each kind that launch most; the others are made of the same rows.
ON_CL = {"erfinv", "digamma", "cummax", "scatter_amax_True", "scatter_mean_False", "index_put", "bicubic", "reflection",
        "conv2d_single", "qr_wide",
         "svd", "solve", "stft", "istft"}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.matrix] * (name not in ON_CL)) for name in golden.CASES])
def test_values_and_gradients_are_torchs(name, device):
    call, *given = golden.CASES[name]
    with netcl.device(device):
        leaves = [netcl.tensor(x, requires_grad=x.dtype.kind == "f") for x in golden.inputs_of(name, given)]
        out = call(netcl, *leaves)
        outs = [out] if isinstance(out, netcl.Tensor) else list(out)
        for i, x in enumerate(outs):
            np.testing.assert_allclose(x.to_host(), GOLDEN[f"{name}/out/{i}"], rtol=2e-4, atol=2e-5, err_msg=f"result {i}")
        floats = [x for x in outs if x.requires_grad]
        rng = np.random.default_rng(7)
        fed = [netcl.tensor(rng.uniform(-1, 1, x.shape).astype(np.float32)) for x in floats]
        learning = [x for x in leaves if x.requires_grad]
        wanted = [GOLDEN.get(f"{name}/grad/{i}") for i in range(len(learning))]
        if not floats:
            assert not any(x is not None for x in wanted)
            return
        total = sum(((x * g).sum() for x, g in zip(floats, fed, strict=True)), netcl.tensor(0.0))
        for i, (got, want) in enumerate(zip(ag.grad(total, learning, allow_unused=True), wanted, strict=True)):
            if want is not None:
                np.testing.assert_allclose(got.to_host(), want, rtol=2e-3, atol=2e-4, err_msg=f"gradient {i}")


# ---- what torch has no word for


def test_complex_results_are_refused():
    with pytest.raises(DtypeError, match=r"\[linalg.eig\] complex eigenvalues are not supported: .*; use linalg.eigh"):
        netcl.linalg.eig(netcl.ones(2, 2))


def test_second_derivatives_of_decompositions():
    with netcl.device("cpu"):
        a = netcl.tensor(golden.SYMMETRIC, dtype="float64", requires_grad=True)
        for call in (ag.linalg_inv, ag.linalg_det, lambda x: ag.linalg_solve(x, x * x), lambda x: ag.linalg_cholesky((x + x.mT) / 2),
                     lambda x: ag.linalg_eigh((x + x.mT) / 2).eigenvalues, ag.linalg_svdvals):  # fmt: skip
            assert ag.gradgradcheck(lambda x, call=call: ag.square(call(x)), [a], rtol=1e-4, atol=1e-6)


def test_a_gradient_that_does_not_exist_raises():
    with netcl.device("cpu"):
        x = netcl.ones(4, 2, requires_grad=True)
        with pytest.raises(AutogradError, match=r"\[linalg_qr\] the gradient requires reduced mode"):
            netcl.linalg.qr(x, mode="complete").Q.sum().backward()
        with pytest.raises(AutogradError, match=r"\[linalg_svd\] the gradient of U and Vh requires reduced matrices"):
            netcl.linalg.svd(x).U.sum().backward()


def test_singular_matrices_raise_and_names_resolve():
    with netcl.device("cpu"), pytest.raises(netcl.linalg.LinAlgError, match=r"\[linalg_solve\] Singular matrix; A.shape=\(2, 2\)"):
        netcl.linalg.solve(netcl.ones(2, 2), netcl.ones(2))
    assert [name for name in dir(netcl.linalg) if not hasattr(netcl.linalg, name)] == []
    with pytest.raises(AttributeError, match="has no attribute 'eigs'"):
        netcl.linalg.eigs  # noqa: B018


def test_lstsq_gives_rank_and_residuals():
    with netcl.device("cpu"):
        a, b = netcl.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]]), netcl.tensor([[1.0], [2.0], [3.0]])
        found = netcl.linalg.lstsq(a, b)
        assert (found.solution.tolist(), found.residuals.tolist(), found.rank.item()) == ([[1.0], [1.0]], [9.0], 2)


def test_complex_numbers_are_pairs_of_tensors(device):
    with netcl.device(device):
        z = netcl.fft.fft(netcl.tensor([1.0, 2.0, 4.0]))
        assert np.allclose(z.numpy(), np.fft.fft([1.0, 2.0, 4.0])) and z.shape == (3,) and netcl.is_complex(z)
        assert np.allclose((2 - z * 1j).numpy(), 2 - 1j * z.numpy()) and np.allclose((z / z.conj()).numpy(), z.numpy() / z.numpy().conj())
        assert np.allclose(netcl.angle(z).to_host(), np.angle(z.numpy()), atol=1e-6) and not netcl.is_complex(z.real)
        assert np.allclose(netcl.view_as_complex(netcl.view_as_real(z)).numpy(), z.numpy())
        with pytest.raises(DtypeError, match=r"\[complex\] ops require real tensors; use z.abs\(\), z.real"):
            netcl.abs(z)
        with pytest.raises(DtypeError, match=r"\[rfft\] the argument must be a real tensor; use fft"):
            netcl.fft.rfft(z)
        with pytest.raises(ShapeError, match=r"\[complex\] real and imag must have the same shape and dtype"):
            netcl.complex(netcl.ones(2), netcl.ones(3))
        with pytest.raises(ValueError, match=r'\[fft\] norm must be "backward", "ortho" or "forward"'):
            netcl.fft.fft(z, norm="none")
        with pytest.raises(ShapeError, match=r"\[fft\] n must be one size of at least 1; n=\(0,\), dim=-1, shape=\(3,\)$"):
            netcl.fft.fft(z, n=0)
        with pytest.raises(ShapeError, match=r"\[irfft\] n must be one size.*n=\(0,\).*by default, n follows the shape of the input"):
            netcl.fft.irfft(netcl.ones(1))
        with pytest.raises(ShapeError, match=r"\[fft2\] s must have one size of at least 1 per axis; s=\(2,\)"):
            netcl.fft.fft2(netcl.ones((3, 4)), s=(2,))


def test_istft_refuses_gaps():
    with netcl.device("cpu"), pytest.raises(ShapeError, match=r"\[istft\] the windows must cover the signal, but leave gaps"):
        netcl.istft(netcl.stft(netcl.ones(40), 8, 8, window=netcl.hann_window(8)), 8, 8, window=netcl.hann_window(8))


# ---- integers of every size

INTEGERS = ("int8", "int16", "uint16", "uint32", "uint64")


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_of_every_size(dtype, device):
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    a = np.array([[low, high, 3], [1, 0, high - 1]], dtype)
    with netcl.device(device):
        x = netcl.tensor(a)
        assert (x.dtype, x.to_host().dtype, x.element_size()) == (dtype, np.dtype(dtype), a.itemsize)
        assert np.array_equal((x + 1).to_host(), a + a.dtype.type(1)) and (x + 1).dtype == dtype  # wraps
        assert x.amax().item() == high and x.amin(1).tolist() == a.min(1).tolist() and x.sum().item() == int(a.astype(np.int64).sum())
        assert x.sort(1).values.tolist() == np.sort(a, 1).tolist() and x.argmax(1).tolist() == a.argmax(1).tolist()
        assert x.t().tolist() == a.T.tolist() and netcl.cat([x, x])[1::2].tolist() == [[*map(int, a[1])]] * 2
        assert x.gather(1, netcl.tensor([[2], [0]], dtype=dtype)).tolist() == [[3], [1]]
        assert netcl.tensor([1.5, 100.0]).to(dtype).tolist() == [1, 100] and (x > 2).tolist() == (a > 2).tolist()
        assert (x / 1).dtype == "float32" and (x * 1.0).dtype == "float32"


def test_promotion_of_integers():
    def common(a, b):
        return netcl.promote_types(a, b)

    assert (common("int8", "uint8"), common("int16", "uint8"), common("int8", "int32"), common("bool", "int8")) == (
        "int16", "int16", "int32", "int8")  # fmt: skip
    assert (common("uint16", "int16"), common("uint32", "int8"), common("uint8", "uint16")) == ("int32", "int64", "uint16")
    assert (common("uint64", "int64"), common("uint64", "float16"), common("uint64", "uint32")) == ("float64", "float16", "uint64")
    assert all(common(a, b) == common(b, a) for a in INTEGERS for b in (*INTEGERS, "int64", "float32", "bool"))


def test_numbers_that_uint64_cannot_hold_raise(device):
    with netcl.device(device), pytest.raises(DtypeError, match=r"\[add\] a number must not be negative, got -1"):
        netcl.ones(2, dtype="uint64") + -1
