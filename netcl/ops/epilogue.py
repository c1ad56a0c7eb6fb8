"""The epilogue of product and convolution kernels: the ops applied to a sum before it is stored.

The result is ``activation(scale * sum + bias + residual)`` in the requested dtype, rounded as by separate ops. In a backward pass, the
last op may be the gradient of an activation, ``<name>_vjp``: it takes the tensor that this gradient reads as its residual. Activations use
the same formulas as the separate ops. If a driver's scalar and vector ``exp`` differ (PoCL), the last bit may differ from that of separate
ops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from netcl.core.dtype import DTYPES, HALVES, promote
from netcl.core.tensor import Tensor
from netcl.engine.expression import compose
from netcl.engine.opencl_text import SEPARATE, Layout, forward_body, helper_functions, rounded, statements, value_functions, vjp_body
from netcl.engine.pointwise import run_vjp
from netcl.engine.registry import REGISTRY, Pointwise

_VJP = "_vjp"  # ends the name of an activation's gradient


class Epilogue(NamedTuple):
    """The epilogue of a product of ``dtype``: dtypes of residual and result, and the activation. An empty string means there is none."""

    dtype: str
    residual: str = ""
    activation: str = ""
    result: str = ""

    @property
    def total(self) -> str:
        """The dtype of the sum of product and residual."""
        return promote(DTYPES[self.dtype], DTYPES[self.residual]).name if self.residual else self.dtype

    @property
    def stored(self) -> str:
        return self.result or (self.total if self.residual else self.dtype)

    @property
    def plain(self) -> bool:
        """Whether nothing follows the product and its bias."""
        return not (self.residual or self.activation) and self.stored == self.dtype

    def source(self, real: str, lanes: int = 1, scaled: bool = True) -> str:
        """Return ``epilogue(sum, scale, has_bias, bias, residual)`` in OpenCL C, for ``lanes`` values of a compute type at once.

        Without ``scaled`` the factor is ignored, which saves time in products of few terms.
        """
        row = activation_row(self.activation.removesuffix(_VJP)) if self.activation else None
        gradient = row is not None and self.activation.endswith(_VJP)
        lines, held = ["x *= scale;"] * scaled + ["if (has_bias) x += bias;"], self.dtype
        rounds: list[str] = []

        def hold() -> None:
            if held in HALVES:
                lines.append(f"x = {rounded(held, 'x')};")
                rounds.append(held)

        if self.residual:
            hold()
            lines += [] if gradient else ["x += residual;"]
            held = self.total
        if row is not None and gradient:
            lines += [f"const real g = x, {read_by_vjp(row)} = residual;", *statements(vjp_body(row, (True,)), real), "x = d0;"]
        elif row is not None:
            hold()
            lines += ["const real v0 = x;", *statements(forward_body(row), real), "x = out;"]
        if self.result and self.result != held:
            hold()
        values = value_functions([], [], real, Layout(width=lanes, half_bits=True), rounds)
        body = "\n  ".join(lines)
        return f"""{values}
{helper_functions(body)}
static inline real epilogue(real x, const element scale, const int has_bias, const real bias, const real residual) {{
{SEPARATE}
  {body}
  return x;
}}
"""


def read_by_vjp(row: Pointwise) -> str:
    """Return the one tensor that an activation's gradient reads besides ``g``: ``out`` or ``v0``."""
    (name,) = [name for name in vjp_body(row, (True,)).inputs if name != "g"]
    return name


def activation_vjp_of(name: str, g: Tensor, read: Tensor) -> Tensor:
    """Return the gradient ``name`` of an activation, which reads ``g`` and the tensor ``read``."""
    (gradient,) = run_vjp(activation_row(name.removesuffix(_VJP)), g, read, [read], {}, [True])
    assert gradient is not None
    return gradient


def activation_row(name: str) -> Pointwise:
    """Return the row of an activation."""
    row = REGISTRY[name]
    assert isinstance(row, Pointwise)
    return row


def activation_vjp(F: Any, activation: str, g: Tensor, out: Tensor, recorded: bool, before: Callable[[], Any] = lambda: None) -> Any:
    """Return the gradient with respect to an activation's input; ``before()`` gives that input, if the formula reads it.

    The kernel of the op's gradient computes it or, if it is ``recorded``, ops that have a gradient.
    """
    row = activation_row(activation)
    assert row.vjp[0]
    x = before() if "v0" in row.saved() else out
    if not recorded:
        return run_vjp(row, g, out, [x], {}, [True])[0]
    return compose(row.vjp[0], {"g": g, "out": out, "v0": x}, F, row.let)
