"""Ops whose reference is their own NumPy form, against torch: calls of ``golden/oracle_cases.py``, results and gradients."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import netcl.autograd as ag
from netcl import selftest
from netcl.core.tensor import Tensor
from netcl.engine import launch
from netcl.engine.registry import REGISTRY
from netcl.ops.pool import Windows

FOLDER = Path(__file__).parent / "golden"


def _load(name: str):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


oracle, images = _load("oracle_cases"), _load("image_cases")
GOLDEN = np.load(FOLDER / "oracle.npz")
NUMPY_ROWS = {
    name for name, row in REGISTRY.items() if isinstance(ref := getattr(row, "ref", None), partial) and ref.func is launch.numpy_reference
}
#: Of the largest value; what float32 sums in another order differ by.
NEAR = {"float64": 1e-12, "float32": 2e-5}
#: On OpenCL devices the rows that no other golden case reaches, and ends of ranges; the op table compares all kernels with the NumPy form.
ON_CL = {"rope/interleaved", "rope/heads", "conv2d_relu", "contrastive/mean", "attention/grouped added", "attention/seen causal",
         "scaled_dot_product_attention/nothing seen", "row_norm_weight_grad/groups", "batch_norm/training relu", "cross_entropy_grad/none",
         "cross_entropy/all ignored", "softmax/infinite", "max/nan", "topk/nan", "index_put/mask"}  # fmt: skip


def _calls():
    for name in oracle.CASES:
        for dtype in NEAR:
            yield pytest.param(name, dtype, marks=() if name in ON_CL and dtype == "float32" else pytest.mark.matrix)


def _close(got: Tensor, want: np.ndarray, dtype: str, near: float, what: str) -> None:
    assert got.shape == want.shape and (want.dtype.kind != "f" or got.dtype == dtype), what
    finite = want[np.isfinite(want)]
    atol = near * np.abs(finite).max(initial=1e-30) if want.dtype.kind == "f" else 0
    np.testing.assert_allclose(got.to_host(), want, rtol=0, atol=atol, err_msg=what)


@pytest.mark.parametrize(("name", "dtype"), list(_calls()))
def test_results_and_gradients_are_torchs(name, dtype, device):
    if not selftest.supports(device, dtype):
        pytest.skip("the device has no float64")
    case, leaves, near = oracle.CASES[name], [], max(NEAR[dtype], oracle.ROUNDED.get(name, 0))

    def leaf(x):
        kind = dtype if x.dtype.kind == "f" else None
        leaves.append(Tensor.from_host(device.queue, x, kind, requires_grad=f"{name}/grad/{len(leaves)}" in GOLDEN))
        return leaves[-1]

    options = {key: Windows(*value) if key == "windows" else value for key, value in case.options.items()}
    outs = oracle.several(getattr(ag, case.op)(*oracle.tensors(case.inputs, leaf), **options))
    wanted = [GOLDEN[f"{name}/out/{i}"] for i in range(sum(key.startswith(f"{name}/out/") for key in GOLDEN))]
    assert len(outs) >= len(wanted)  # what only its gradient reads comes last
    for i, want in enumerate(wanted):
        _close(outs[i], want, dtype, near, f"result {i}")
    learning = {i: x for i, x in enumerate(leaves) if x.requires_grad}
    if learning:
        floats = {i: x for i, x in enumerate(outs[: len(wanted)]) if x.requires_grad and wanted[i].dtype.kind == "f"}
        fed = [Tensor.from_host(device.queue, oracle.values(f"{name} fed {i}", *x.shape), dtype) for i, x in floats.items()]
        found = ag.grad(list(floats.values()), list(learning.values()), fed)
        for i, got in zip(learning, found, strict=True):
            _close(got, GOLDEN[f"{name}/grad/{i}"], dtype, near, f"gradient {i}")


def test_every_row_with_the_numpy_form_as_its_reference_has_a_case():
    """Cases call rows by name: those of ``oracle_cases`` here, those of ``image_cases`` in the tests of convolutions, pools and images."""
    named = {case.op for case in oracle.CASES.values()} | {case.op for listed in images.FILES.values() for case in listed}
    assert len(NUMPY_ROWS) > 80
    assert sorted(NUMPY_ROWS - named) == []
    assert {name.rsplit("/", 2)[0] for name in GOLDEN} == set(oracle.CASES) >= ON_CL
