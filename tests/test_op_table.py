"""Every test here runs over the whole op table. Adding a row adds all of them.

The checks themselves are those of ``netcl selftest``: what a user can run on his own driver is what is tested.
"""

from __future__ import annotations

import numpy as np
import pytest

import netcl.autograd as ag
from netcl import ops, selftest
from netcl.core.kernels import program
from netcl.core.tensor import Tensor
from netcl.engine.registry import REGISTRY, Choice, Op, Pointwise, Reduction

ROWS = sorted(name for name, row in REGISTRY.items() if not isinstance(row, Choice) and row.ref is not None)
POINTWISE = [name for name in ROWS if isinstance(REGISTRY[name], Pointwise)]
DIFFERENTIABLE = [name for name in ROWS if REGISTRY[name].differentiable]
FLAT = {name for name in POINTWISE if not set(REGISTRY[name].vjp) - {None, "0"}}
#: Made of rows that are tested by themselves and with no kernel of their own: on OpenCL devices float32 values, the rest with --full.
COMPOSED = tuple(f"netcl.ops.{name}" for name in ("composed", "scatter", "linalg", "fft"))
MADE_OF_ROWS = {n for n in ROWS if getattr(REGISTRY[n], "call", len).__module__ in COMPOSED}
TWICE = [name for name in DIFFERENTIABLE if isinstance(REGISTRY[name], Pointwise | Reduction) and name not in FLAT]


def each(name: str, dtype: str, sizes=selftest.TESTED_SIZES):
    return selftest.cases(REGISTRY[name], dtype, sizes)


def _forward_cases():
    """Every op in every dtype. On OpenCL devices an op stands in one more dtype than float32, the next op in the next; of the pointwise
    ops, which share their loads and stores, a sixth. The others are left to --full."""
    others = [dtype for dtype in selftest.TESTED_FLOATS if dtype != "float32"]
    for i, name in enumerate(ROWS):
        for dtype in selftest.TESTED_FLOATS:
            if name in POINTWISE:
                its_turn = POINTWISE.index(name) % 6 == 0 and dtype == others[POINTWISE.index(name) // 6 % 3]
            else:
                its_turn = dtype == others[i % 3] and name not in MADE_OF_ROWS
            yield pytest.param(name, dtype, marks=() if its_turn or dtype == "float32" else pytest.mark.matrix)


@pytest.mark.parametrize(("name", "dtype"), list(_forward_cases()))
def test_forward_matches_the_reference(name, dtype, device, full):
    if not selftest.supports(device, dtype):
        pytest.skip("the device has no float64")
    cases = list(each(name, dtype, selftest.TESTED_SIZES if dtype == "float32" else (257,)))
    if name in POINTWISE and ROWS.index(name) % 3 and device.backend == "cl" and not full:  # they broadcast by the same code
        cases = [case for case in cases if len({x.shape for x in case.inputs}) == 1]
    if device.backend == "cl" and not full:
        if dtype != "float32":  # loads and stores differ, the kernels do not
            cases = _one_of_each(name, cases)
        elif len(cases) > 8 and isinstance(REGISTRY[name], Op):  # products, convolutions, attention: their own files run the others
            cases = cases[::2]
    for case in cases:
        selftest.check_forward(REGISTRY[name], case, device, dtype)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.matrix] * (n in MADE_OF_ROWS)) for n in DIFFERENTIABLE])
def test_gradient_matches_differences(name, device, full):
    """``<w, J v> == <J' w, v>``: on NumPy (and everywhere with --full) for all cases, in float64 too; else for one of each kind: the
    kernels of a gradient are rows of their own, held by the test above."""
    everything = full or device.backend == "cpu"
    for dtype in ("float64", "float32") if everything else ("float32",):
        if selftest.supports(device, dtype):
            sizes = ((257, 1029) if everything else (1029,)) if dtype == "float32" else (33,)
            cases = list(each(name, dtype, sizes))
            for case in cases if everything else _one_of_each(name, cases):
                selftest.check_gradient(REGISTRY[name], case, device, dtype)


def _one_of_each(name: str, cases: list[selftest.OpCall]) -> list[selftest.OpCall]:
    """Of a structured op, the sample with the most elements; of the others, no axis twice."""
    if isinstance(REGISTRY[name], Pointwise | Reduction):
        return [case for case in cases if not case.kwargs.get("keepdims")]
    return [max(cases, key=lambda case: sum(np.size(x) for x in case.inputs if isinstance(x, np.ndarray)))]


@pytest.mark.parametrize("name", POINTWISE)
def test_special_values_are_numpys(name, device):
    selftest.check_special(REGISTRY[name], device)


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_errors_are_worded_as_declared(name, device):
    selftest.check_errors(REGISTRY[name], device)


#: Rows that integers of every size keep their dtype in: numbers wrap as NumPy's do.
INTEGRAL = [n for n in POINTWISE if REGISTRY[n].result != "float" and REGISTRY[n].accepts != "float" and not REGISTRY[n].params]
INTEGERS = ("int8", "int16", "uint16", "uint32", "uint64")


@pytest.mark.parametrize("name", INTEGRAL)
def test_integers_are_numpys(name, device, full):
    """On OpenCL devices every fourth row in one dtype, the next one in the next: loads and stores are shared."""
    row, turn = REGISTRY[name], INTEGRAL.index(name)
    everything = full or device.backend == "cpu"
    for dtype in INTEGERS if everything else (INTEGERS[turn // 4 % 5],) if turn % 4 == 0 else ():
        limits, rng = np.iinfo(dtype), np.random.default_rng(turn)
        values = [rng.integers(limits.min, limits.max, 37, dtype, endpoint=True) for _ in range(row.arity)]
        values[0][:3] = limits.min, limits.max, 0
        if name == "pow":
            values[1] %= 5
        got = getattr(ops, name)(*(Tensor.from_host(device.queue, x) for x in values)).to_host()
        with np.errstate(all="ignore"):
            want = row.ref(*values)
        if want.dtype.kind == "f":  # of a reference that has no integers
            assert np.allclose(got.astype(float), want), dtype
        else:
            assert got.dtype == want.dtype and np.array_equal(got, want), dtype


@pytest.mark.parametrize("name", TWICE)
def test_second_derivatives(name):
    """On NumPy in float64: gradients of gradients are compositions of rows, which the tests above hold on every device."""
    from netcl.core.device import manager

    row, queue = REGISTRY[name], manager.default("cpu").queue
    for case in each(name, "float64", (9,)):
        if not all(x.size for x in case.inputs) or (isinstance(row, Reduction) and case.kwargs.get("keepdims")):
            continue
        vjps = row.vjp if isinstance(row, Pointwise) else (row.vjp,)
        inputs = [Tensor.from_host(queue, x, "float64", requires_grad=vjp is not None) for x, vjp in zip(case.inputs, vjps, strict=True)]
        # Squared, so that the gradient of a linear op depends on something as well.
        assert ag.gradgradcheck(lambda *xs, kwargs=case.kwargs: ag.square(getattr(ag, name)(*xs, **kwargs)), inputs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", [n for n in POINTWISE if REGISTRY[n].params])
def test_a_new_parameter_does_not_recompile(name, cl_device):
    row = REGISTRY[name]
    xs = [Tensor.from_host(cl_device.queue, np.ones(16, np.float32)) for _ in range(row.arity)]
    first = next(iter(row.params))
    kind = type(row.params[first])
    getattr(ops, name)(*xs, **{first: kind(1)})
    before = program.build_count()
    for value in (2, 3, 5):
        getattr(ops, name)(*xs, **{first: kind(value)})
    assert program.build_count() == before


def test_every_op_has_samples():
    for name, row in REGISTRY.items():
        if isinstance(row, Op) and row.ref is not None:
            assert row.samples, name
