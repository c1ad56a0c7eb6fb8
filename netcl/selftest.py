"""Checks of every row of the op table on a device, for ``netcl selftest`` and the tests.

A reference is NumPy's function, or the op itself on the NumPy backend in float64; rows without a reference are checked for errors only. No
check refers to an op by name. Forward values are compared with the reference. Gradients are compared by inner products:
``<J' w, v>`` of the tape on the device with ``<w, J v>`` from finite differences of the *reference*.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl import ops
from netcl.core import dtype as dtypes
from netcl.core import platforms
from netcl.core.device import DeviceHandle
from netcl.core.errors import DtypeError
from netcl.core.kernels.probe import CompilerAbort
from netcl.core.nested import tensors_in
from netcl.core.tensor import Tensor
from netcl.engine.registry import REGISTRY, Choice, Pointwise, Reduction, Row
from netcl.profiling.quarantine import check_variants
from netcl.runtime import tuning

#: Relative and absolute tolerance per dtype, times the row's own factor ``tol``.
TOLERANCE = {"float64": (1e-10, 1e-11), "float32": (1e-5, 2e-6), "float16": (2e-3, 1e-3), "bfloat16": (1.6e-2, 8e-3)}
TESTED_FLOATS = tuple(TOLERANCE)
TESTED_SIZES = (0, 1, 3, 255, 257, 1029)  # the last is odd and above the width at which vector loads begin
SPECIAL = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 3.0e38, -1e-45)
_AXES = ((0,), (1,), (2,), (0, 2), (0, 1, 2))


class Mismatch(AssertionError):
    """Raised for a row that fails a check on a device."""


@dataclass(frozen=True)
class OpCall:
    """One call of an op: host arrays (or ``None``, numbers, lists of arrays) and keyword arguments."""

    label: str
    inputs: tuple[Any, ...]
    kwargs: dict[str, Any]


# ---- cases


def cases(row: Row, dtype: str = "float32", sizes: Sequence[int] = TESTED_SIZES) -> Iterator[OpCall]:
    """Yield the calls that a row is checked with, in one float dtype; fewer calls if there is a single size."""
    if isinstance(row, Choice):
        for part in row.rows:
            yield from cases(part, dtype, sizes)
    elif isinstance(row, Pointwise):
        shapes: list[list[tuple[int, ...]]] = [[(n,)] * row.arity for n in sizes]
        if row.arity > 1 and len(sizes) > 1:
            shapes.append([(5, 1, 3), (7, 1), (5, 7, 3)][: row.arity])
            shapes.append([(4, 6), (), (6,)][: row.arity])
        for k, group in enumerate(shapes):
            yield OpCall(str(group), tuple(_drawn_values(row, i, shape, dtype, seed=k) for i, shape in enumerate(group)), dict(row.params))
        if row.params and len(sizes) > 1:  # other values than the defaults, which may be ones and zeros
            other = {name: value + 1 if isinstance(value, int) else value * 0.05 + 1 for name, value in row.params.items()}
            yield OpCall(f"(257,) {other}", tuple(_drawn_values(row, i, (257,), dtype, seed=99) for i in range(row.arity)), other)
    elif isinstance(row, Reduction):
        yield from _folds(row, dtype, sizes)
    else:
        for k, sample in enumerate(row.samples):
            arrays = tuple(_rounded(array, dtype) for array in sample.arrays(k, dtype))
            yield OpCall(f"{sample.shapes} {dict(sample.kwargs)}", arrays, dict(sample.kwargs))


def _drawn_values(row: Pointwise, i: int, shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Return random values from the row's domain, moved away from kinks; conditions and comparisons also get zeros."""
    domain = row.domain[i] if isinstance(row.domain[0], tuple) else row.domain
    values = np.random.default_rng([seed, i]).uniform(domain[0], domain[1], shape)
    for kink in row.kinks:
        values = np.where(np.abs(values - kink) < 0.05, kink + 0.1, values)
    if i not in row.promoting:  # a condition: both answers must occur
        values = np.where(values > np.mean(domain), values, 0)
    elif not row.differentiable:  # comparisons and logic: equal values and zeros must occur
        values = np.round(values)
    return _rounded(values, dtype)


def _folds(row: Reduction, dtype: str, sizes: Sequence[int]) -> Iterator[OpCall]:
    for k, n in enumerate(sizes):
        if n or row.empty:
            yield OpCall(f"({n},)", (_uniform_values(row, (n,), dtype, k),), {"axis": None, "keepdims": False, **row.params})
    for axes in _AXES if len(sizes) > 1 else _AXES[1:2]:
        for keep in (False, True):
            keywords = {"axis": axes if len(axes) > 1 else axes[0], "keepdims": keep, **row.params}
            yield OpCall(f"(5, 7, 9) {keywords}", (_uniform_values(row, (5, 7, 9), dtype, 7),), keywords)


def _uniform_values(row: Reduction, shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).uniform(*row.domain, shape)
    return _rounded(values if row.differentiable else np.round(values), dtype)  # logic needs zeros


def _with_arrays(value: Any, floats: Callable[[np.ndarray], Any], others: Callable[[np.ndarray], Any] = lambda array: array) -> Any:
    """Apply ``floats`` to the floating-point arrays of an argument and ``others`` to its other arrays, also inside lists."""
    if isinstance(value, list):
        return [_with_arrays(part, floats, others) for part in value]
    if not isinstance(value, np.ndarray):
        return value
    return (floats if value.dtype.kind == "f" else others)(value)


def _rounded(values: Any, dtype: str) -> Any:
    """Return values rounded to ``dtype``, so that the reference gets the same inputs as the device."""
    row = dtypes.DTYPES[dtype]
    return _with_arrays(values, lambda array: dtypes.decode(dtypes.encode(array, row), row))


# ---- running


def _sent_to_device(value: Any, handle: DeviceHandle, dtype: str | None, requires_grad: bool = False) -> Any:
    """Return an argument with its arrays as tensors on a device; arrays of floats get the dtype ``dtype``."""
    place = partial(Tensor.from_host, handle.queue)
    return _with_arrays(value, lambda array: place(array, dtype, requires_grad=requires_grad), place)


def run_case(row: Row, namespace: Any, inputs: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call the op of a row in ``namespace``, ``netcl.ops`` or ``netcl.autograd``, and return its result."""
    return getattr(namespace, row.name)(*inputs, **kwargs)


def reference(row: Row, case: OpCall) -> Any:
    """Return the result of the row's reference, with its arrays of floats in float64."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy warns about the mean of nothing, which has a value here
        inputs = [_with_arrays(x, lambda array: array.astype(np.float64)) for x in case.inputs]
        return row.ref(*inputs, **case.kwargs)  # type: ignore[misc, union-attr]


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


# ---- checks: each raises Mismatch


def check_forward(row: Row, case: OpCall, handle: DeviceHandle, dtype: str = "float32") -> None:
    """Compare the values of one call with the reference; raises :class:`Mismatch`, also if a result has a ``grad_fn``."""
    got = _as_tuple(run_case(row, ops, [_sent_to_device(x, handle, dtype) for x in case.inputs], case.kwargs))
    want = _as_tuple(reference(row, case))
    if len(got) < len(want):
        raise Mismatch(f"[{row.name}] {len(got)} results, the reference has {len(want)}; case={case.label}")
    for k, (result, expected) in enumerate(zip(got, want, strict=False)):
        if result.grad_fn is not None:
            raise Mismatch(f"[{row.name}] result {k} of a forward-only op has a grad_fn; case={case.label}")
        _compare_case(row, case, dtype, result.to_host(), np.asarray(expected), k)


def _compare_case(row: Row, case: OpCall, dtype: str, got: np.ndarray, want: np.ndarray, k: int) -> None:
    relative, absolute = TOLERANCE[dtype]
    factor = getattr(row, "tol", 1.0)
    if got.shape != want.shape:
        raise Mismatch(f"[{row.name}] result {k} has shape {got.shape}, the reference {want.shape}; case={case.label}, dtype={dtype}")
    scale = max(1.0, float(np.max(np.abs(want[np.isfinite(want)]), initial=0.0))) if want.dtype.kind == "f" else 1.0
    with np.errstate(all="ignore"):
        close = np.isclose(got.astype(np.float64), want.astype(np.float64), relative * factor, absolute * factor * scale, equal_nan=True)
    if not close.all():
        at = tuple(int(i) for i in np.argwhere(~close)[0])
        values = f"got {got[at]!r}, expected {want[at]!r}"
        raise Mismatch(f"[{row.name}] {values}; index={at}, wrong={int((~close).sum())} of {close.size}, case={case.label}, dtype={dtype}")


def check_special(row: Pointwise, handle: DeviceHandle) -> None:
    """Check that NaN, infinities, signed zeros and denormals as inputs give NaN, infinities and bools where NumPy's function does."""
    values = np.array(SPECIAL, np.float32)
    grids = np.meshgrid(*[values] * row.arity) if row.arity < 3 else [values] * row.arity
    case = OpCall("special values", tuple(g.ravel() for g in grids), dict(row.params))
    got = run_case(row, ops, [_sent_to_device(x, handle, "float32") for x in case.inputs], case.kwargs).to_host()
    with np.errstate(all="ignore"):
        want = np.asarray(row.ref(*case.inputs, **case.kwargs))
    for kind in (np.isnan, np.isposinf, np.isneginf):
        if want.dtype.kind == "f" and not np.array_equal(kind(got), kind(want)):
            at = int(np.argwhere(kind(got) != kind(want))[0][0])
            given = [float(x[at]) for x in case.inputs]
            raise Mismatch(f"[{row.name}] special values: got {got[at]}, expected {want[at]}; inputs={given}")
    if want.dtype.kind == "b" and not np.array_equal(got, want):
        raise Mismatch(f"[{row.name}] special values: the bool result differs from the reference")


def check_gradient(row: Row, case: OpCall, handle: DeviceHandle, dtype: str = "float32") -> None:
    """Compare the tape's gradient of the first result with finite differences of the reference, along random directions."""
    sent = [_sent_to_device(x, handle, dtype, requires_grad=True) for x in case.inputs]
    leaves = [t for t in tensors_in(sent) if t.requires_grad]
    out = _as_tuple(run_case(row, ag, sent, case.kwargs))[0]
    if not leaves or not out.requires_grad or not out.size:
        return
    rng = np.random.default_rng(11)
    w = rng.uniform(-1, 1, out.shape)
    grads = ag.grad(out, leaves, Tensor.from_host(handle.queue, w, dtype), allow_unused=True)
    for i, grad in enumerate(grads):
        if not leaves[i].size:
            continue
        v = rng.uniform(-1, 1, leaves[i].shape)
        plus, minus = (np.asarray(_as_tuple(reference(row, _moved_case(case, i, sign * 1e-6 * v)))[0], np.float64) for sign in (1, -1))
        with np.errstate(all="ignore"):
            want = float((w * (plus - minus)).sum() / 2e-6)
        got = 0.0 if grad is None else float((grad.to_host().astype(np.float64) * v).sum())
        size = 0.0 if grad is None else float(np.abs(grad.to_host() * v).sum())
        # The differences cancel 6 digits of float64; what the device loses follows its dtype and the number of terms.
        allowed = {"float64": 2e-6, "float32": 2e-4, "float16": 1e-2, "bfloat16": 5e-2}[dtype] * getattr(row, "tol", 1.0)
        if not (abs(got - want) <= allowed * max(size, abs(want), 0.1) or (np.isnan(got) and np.isnan(want))):
            raise Mismatch(f"[{row.name}] the gradient of input {i}: got {got:.6g}, expected {want:.6g}; case={case.label}, dtype={dtype}")


def _moved_case(case: OpCall, index: int, step: np.ndarray) -> OpCall:
    """Return the case with ``step`` added to its ``index``-th array of floats."""
    number = count()

    def move(array: np.ndarray) -> np.ndarray:
        return array.astype(np.float64) + step if next(number) == index else array

    return OpCall(case.label, tuple(_with_arrays(x, move) for x in case.inputs), case.kwargs)


def check_errors(row: Row, handle: DeviceHandle) -> None:
    """Check that every declared misuse raises an error with the declared text."""
    for sample, pattern in getattr(row, "errors", ()):
        inputs = [_sent_to_device(x, handle, None) for x in sample.arrays()]
        try:
            run_case(row, ops, inputs, dict(sample.kwargs))
        except (ValueError, TypeError, RuntimeError, IndexError) as error:
            if not re.search(pattern, str(error)):
                raise Mismatch(f"[{row.name}] the error says {str(error)!r}, not {pattern!r}") from None
        else:
            raise Mismatch(f"[{row.name}] no error for {sample.shapes} {dict(sample.kwargs)}; expected {pattern!r}")


# ---- the table


@dataclass(frozen=True)
class Result:
    """The outcome of one check of one op on a device."""

    op: str
    check: str
    state: str  # "ok", "refused" (the device or the op does not take the dtype, or the compiler aborts), "quarantined" or "FAILED"
    detail: str
    seconds: float


def supports(handle: DeviceHandle, dtype: str) -> bool:
    """Whether a device supports a dtype."""
    return dtype != "float64" or handle.backend == "cpu" or handle.profile.has_fp64


def results(handle: DeviceHandle, names: Sequence[str] = (), full: bool = False) -> Iterator[Result]:
    """Run the checks of the rows ``names``, by default all, on a device and yield their results; a failure does not end the run.

    ``full`` first checks every kernel algorithm that the device may choose. A wrong algorithm is quarantined: the rows do not use it.
    """
    for variant in check_variants(handle) if full and handle.backend == "cl" else ():
        banned = tuning.store.entries(handle.profile).get("quarantine", {})  # without a writable folder, it holds nothing
        state = "ok" if not variant.wrong else "quarantined" if variant.algorithm in banned else "FAILED"
        yield Result(variant.algorithm, "variant", state, f"{variant.problem}: {variant.wrong}" if variant.wrong else "", 0.0)
    for name in sorted(names or REGISTRY):
        for check, run in row_checks(REGISTRY[name], handle):
            yield timed_result(name, check, run)


def row_checks(row: Row, handle: DeviceHandle) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the name of every check of a row on a device, and a function that runs it."""
    for dtype in TESTED_FLOATS:
        if supports(handle, dtype):
            yield dtype, partial(_each, check_forward, row, handle, dtype)
    if isinstance(row, Pointwise):
        yield "special", partial(check_special, row, handle)
    if row.differentiable and getattr(row, "ref", True) is not None:
        yield "gradient", partial(_each, check_gradient, row, handle, "float32")
    yield "errors", partial(check_errors, row, handle)


def _each(check: Callable[..., None], row: Row, handle: DeviceHandle, dtype: str) -> None:
    sizes = TESTED_SIZES if dtype == "float32" else (257,)
    for part in row.rows if isinstance(row, Choice) else (row,):
        if part.ref is None:
            continue
        for case in cases(part, dtype, sizes):
            check(part, case, handle, dtype)


def _faults() -> tuple[type[Exception], ...]:
    """Return the exceptions that an op may raise, a driver's own included, but not ``KeyboardInterrupt``."""
    own = (ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError)
    return (*own, platforms.opencl().Error) if platforms.available() else own


def timed_result(op: str, check: str, run: Callable[[], None]) -> Result:
    start = time.perf_counter()
    state, detail = "ok", ""
    try:
        run()
    except (DtypeError, CompilerAbort) as error:
        state, detail = "refused", str(error)
    except _faults() as error:
        state, detail = "FAILED", f"{type(error).__name__}: {error}"
    return Result(op, check, state, detail, time.perf_counter() - start)
