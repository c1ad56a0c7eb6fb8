"""How the kernels of products and convolutions end: what becomes of a sum before it is stored.

``activation(scale * sum + bias + residual)``, in the dtype that is asked for, is what separate ops would give, bit for bit: every step
is rounded by itself, halves between the steps too, and activations are computed by the formulas of their rows.
"""

from __future__ import annotations

from typing import NamedTuple

from netcl.core.dtype import DTYPES, promote
from netcl.core.dtype import HALVES as HALVES
from netcl.ops.codegen import SEPARATE, Layout, forward_body, helper_functions, rounded, statements, value_functions
from netcl.ops.registry import REGISTRY, Pointwise


class Finish(NamedTuple):
    """The steps after a product of a dtype, its own bias included: what is added, the row of an activation, the dtype of the result."""

    dtype: str
    residual: str = ""
    activation: str = ""
    result: str = ""

    @property
    def total(self) -> str:
        """The dtype once the residual is added."""
        return promote(DTYPES[self.dtype], DTYPES[self.residual]).name if self.residual else self.dtype

    @property
    def stored(self) -> str:
        return self.result or self.total

    @property
    def plain(self) -> bool:
        """Whether nothing follows the product and its bias."""
        return not (self.residual or self.activation) and self.stored == self.dtype

    def source(self, real: str, lanes: int = 1, scaled: bool = True) -> str:
        """``finish(sum, scale, has_bias, bias, residual)`` in OpenCL C, for ``lanes`` values of a compute type at once.

        Without ``scaled`` the factor is not looked at: a product of few terms would feel it.
        """
        row = REGISTRY[self.activation] if self.activation else None
        lines, held = ["x *= scale;"] * scaled + ["if (has_bias) x += bias;"], self.dtype
        rounds: list[str] = []

        def hold() -> None:
            if held in HALVES:
                lines.append(f"x = {rounded(held, 'x')};")
                rounds.append(held)

        if self.residual:
            hold()
            lines.append("x += residual;")
            held = self.total
        if row is not None:
            assert isinstance(row, Pointwise)
            hold()
            lines += ["const real v0 = x;", *statements(forward_body(row), real), "x = out;"]
        if self.stored != held:
            hold()
        values = value_functions([], [], real, Layout(width=lanes, half_bits=True), rounds)
        body = "\n  ".join(lines)
        return f"""{values}
{helper_functions(body)}
static inline real finish(real x, const element scale, const int has_bias, const real bias, const real residual) {{
{SEPARATE}
  {body}
  return x;
}}
"""
