"""Compares gradients with finite differences along random directions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from netcl.autograd import ops as ag_ops
from netcl.autograd.backward_pass import grad
from netcl.autograd.tape import enable_grad, no_grad
from netcl.core.errors import message
from netcl.core.tensor import Tensor


class GradientError(AssertionError):
    """Raised when a gradient differs from finite differences."""


def gradcheck(
    function: Callable[..., Any], inputs: Tensor | Sequence[Any], *, eps: float | None = None, rtol: float | None = None,
    atol: float | None = None, directions: int = 3, seed: int = 0, raise_exception: bool = True,
) -> bool:  # fmt: skip
    """Return true if the gradients of ``function`` (of its first result) agree with central differences; raises or returns false otherwise.

    For ``directions`` random pairs ``v`` and ``w`` and the Jacobian ``J``, compares ``<w, J v>`` by differences of step ``eps`` with
    ``<J' w, v>`` by the tape. Inputs that require grad are checked one at a time, so that the error names the wrong one. Pass float64
    tensors where the device has them: the default step and tolerances depend on the dtype.
    """
    rng, inputs = np.random.default_rng(seed), [inputs] if isinstance(inputs, Tensor) else list(inputs)
    if not any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
        raise ValueError(message("gradcheck", "at least one input must be a tensor that requires grad", "set requires_grad=True"))
    for index, x in enumerate(inputs):
        if not isinstance(x, Tensor) or not x.requires_grad:
            continue
        double = x.dtype == "float64"
        step, relative, absolute = eps or (1e-6 if double else 1e-2), rtol or (1e-5 if double else 2e-2), atol or (1e-7 if double else 2e-3)
        for _ in range(directions):
            wanted, got = _both_ways(function, inputs, index, step, rng)
            if not np.isclose(got, wanted, rtol=relative, atol=absolute):
                if not raise_exception:
                    return False
                what = f"the gradient of input {index} must agree with finite differences"
                raise GradientError(message("gradcheck", what, by_differences=wanted, by_tape=got, shape=x.shape, dtype=x.dtype))
    return True


def _both_ways(function: Callable[..., Any], inputs: list[Any], index: int, eps: float, rng: np.random.Generator) -> tuple[float, float]:
    x = inputs[index]
    v = rng.standard_normal(x.shape)
    with enable_grad():
        out = _first(function(*inputs))
    w = rng.standard_normal(out.shape)
    (g,) = grad(out, x, Tensor.from_host(out.queue, w, out.dtype), allow_unused=True)
    got = 0.0 if g is None else float((g.to_host().astype(np.float64) * v).sum())
    ends = []
    base = x.to_host().astype(np.float64)
    for sign in (1, -1):
        moved = Tensor.from_host(x.queue, base + sign * eps * v, x.dtype)
        with no_grad():
            ends.append(_first(function(*inputs[:index], moved, *inputs[index + 1 :])).to_host().astype(np.float64))
    return float((w * (ends[0] - ends[1])).sum() / (2 * eps)), got


def _first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


def gradgradcheck(function: Callable[..., Any], inputs: Tensor | Sequence[Any], **options: Any) -> bool:
    """Return true if second derivatives agree with finite differences: :func:`gradcheck` of the squared norm of a gradient."""
    inputs = [inputs] if isinstance(inputs, Tensor) else inputs
    with enable_grad():
        sample = _first(function(*inputs))
    weights = Tensor.from_host(sample.queue, np.random.default_rng(1).standard_normal(sample.shape), sample.dtype)
    differentiable = [i for i, x in enumerate(inputs) if isinstance(x, Tensor) and x.requires_grad]

    def first_derivative(*given: Any) -> Any:
        leaves = [
            x if not isinstance(x, Tensor) or x.requires_grad else x.detach().requires_grad_(i in differentiable)
            for i, x in enumerate(given)
        ]
        with enable_grad():
            out = _first(function(*leaves))
            grads = grad(out, [leaves[i] for i in differentiable], weights, create_graph=True, allow_unused=True)
            total: Any = None
            for g in (g for g in grads if g is not None):
                part = ag_ops.twin("sum")(ag_ops.twin("square")(g))
                total = part if total is None else ag_ops.twin("add")(total, part)
        if total is None:
            raise GradientError(message("gradgradcheck", "the result of function must depend on an input that requires grad"))
        return total

    return gradcheck(first_derivative, inputs, **options)
