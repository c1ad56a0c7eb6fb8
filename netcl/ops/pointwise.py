"""Pointwise ops: rows with formulas, and ops built on such rows.

Eager and fused kernels, the NumPy backend and gradients are generated from the formulas of a row. Intermediate values should not
overflow for large arguments. Both branches of ``WHERE`` should be finite, because second derivatives evaluate both.
"""

from __future__ import annotations

import ast
import math
import re
import statistics
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core.dtype import DTYPES
from netcl.core.errors import DtypeError, ShapeError, message
from netcl.core.tensor import Tensor, with_shape
from netcl.engine.expression import differentiate
from netcl.engine.functions import erf, lgamma, shift_left, shift_right
from netcl.engine.operands import operand, tensors
from netcl.engine.pointwise import pointwise_function, run
from netcl.engine.registry import REGISTRY, Choice, Pointwise, Row, S, alias, op, register


def unary(name: str, fwd: str, vjp: str | None, ref: Callable[..., Any], **columns: Any) -> Pointwise:
    """Register an elementwise op with one input; returns its row."""
    row = Pointwise(name, fwd, (vjp,), ref, **columns)
    register(row)
    return row


_BAD_SHAPES = (S((3, 4), (5,)), r"\[{}\] shapes must broadcast together; a.shape=\(3, 4\), b.shape=\(5,\)")


def binary(name: str, fwd: str, vjp0: str | None, vjp1: str | None, ref: Callable[..., Any], **columns: Any) -> Pointwise:
    """Register an elementwise op with two inputs; returns its row."""
    errors = [(_BAD_SHAPES[0], _BAD_SHAPES[1].replace("{}", name))]
    row = Pointwise(name, fwd, (vjp0, vjp1), ref, errors=errors, **columns)
    register(row)
    return row


# ---- references that NumPy does not have


def _of_number(function: Callable[[float], float]) -> Callable[..., np.ndarray]:
    """Return the elementwise version of a function of one number; results have the dtype of the input."""
    return lambda x: np.vectorize(function, otypes=[float])(x).astype(np.asarray(x).dtype)


def _erfinv_ref(x: float) -> float:
    if not abs(x) < 1:
        return math.copysign(math.inf, x) if abs(x) == 1 else math.nan
    return statistics.NormalDist().inv_cdf((x + 1) / 2) / math.sqrt(2)


def _digamma_ref(x: float) -> float:
    if math.isinf(x) or (x <= 0 and x == math.floor(x)):
        return -math.copysign(math.inf, x) if x == 0 else math.inf if x > 0 else math.nan
    return _digamma_ref(x + 1) - 1 / x if x < 60 else math.log(x) - 0.5 / x - 1 / (12 * x * x) + 1 / (120 * x**4)


def _trigamma_ref(x: float) -> float:
    if math.isinf(x) or (x <= 0 and x == math.floor(x)):
        return math.nan if x == -math.inf else 0.0 if x > 0 else math.inf
    return _trigamma_ref(x + 1) + 1 / (x * x) if x < 60 else 1 / x + 0.5 / x**2 + 1 / (6 * x**3) - 1 / (30 * x**5)


# ---- arithmetic
_ADD = binary("add", "v0 + v1", "g", "g", np.add, onnx="Add", doc="Sum of two tensors.")
binary("sub", "v0 - v1", "g", "-g", np.subtract, accepts="number", onnx="Sub", doc="Difference of two tensors.")
binary("mul", "v0 * v1", "g * v1", "g * v0", np.multiply, onnx="Mul", doc="Product of two tensors.")
DIV = binary("div", "v0 / v1", "g / v1", "-g * out / v1", np.divide, domain=(0.5, 3.0),
             onnx="Div", doc="True quotient; integers give float32.")  # fmt: skip
binary("pow", "POW(v0, v1)", "g * WHERE(v1 == 0, 0, v1 * POW(v0, v1 - 1))",
       "g * WHERE(none, 0, out * LOG(WHERE(none, 1, v0)))", np.power, let={"none": "AND(v0 == 0, v1 >= 0)"},
       amp="float", domain=(0.3, 2.0), tol=4, onnx="Pow", doc="First to the power of the second.")  # fmt: skip
binary("maximum", "MAX(v0, v1)", "g * (1 - (v0 < v1) - 0.5 * (v0 == v1))", "g * (1 - (v0 > v1) - 0.5 * (v0 == v1))",
       np.maximum, onnx="Max", doc="The larger of two; NaN wins. The gradient of a tie is shared.")  # fmt: skip
binary("minimum", "MIN(v0, v1)", "g * (1 - (v0 > v1) - 0.5 * (v0 == v1))", "g * (1 - (v0 < v1) - 0.5 * (v0 == v1))",
       np.minimum, onnx="Min", doc="The smaller of two; NaN wins. The gradient of a tie is shared.")  # fmt: skip
binary("fmod", "FMOD(v0, v1)", "g", "-g * TRUNC(v0 / v1)", np.fmod, domain=((-3.0, 3.0), (0.7, 2.0)), kinks=(0.0,), accepts="number",
       onnx="Mod(fmod=1)", doc="Remainder with the sign of the dividend, as in C.")  # fmt: skip
binary("remainder", "REMAINDER(v0, v1)", "g", "-g * FLOORDIV(v0, v1)", np.remainder, domain=((-3.0, 3.0), (0.7, 2.0)), kinks=(0.0,),
       accepts="number", onnx="Mod(fmod=0)", doc="Remainder with the sign of the divisor, as in Python.")  # fmt: skip
binary("floor_divide", "FLOORDIV(v0, v1)", "0", "0", np.floor_divide, domain=((-3.0, 3.0), (0.7, 2.0)), accepts="number",
       doc="Quotient rounded down.")  # fmt: skip
binary("atan2", "ATAN2(v0, v1)", "g * v1 / d", "-g * v0 / d", np.arctan2, domain=(0.3, 3.0), amp="float",
       let={"r": "v0 * v0 + v1 * v1", "d": "WHERE(r == 0, 1, r)"}, doc="Angle of the point (b, a).")  # fmt: skip
unary("neg", "-v0", "-g", np.negative, accepts="number", onnx="Neg", doc="The negative.")
unary("abs", "ABS(v0)", "g * SIGN(v0)", np.abs, kinks=(0.0,), onnx="Abs", doc="The absolute value.")
unary("sign", "SIGN(v0)", "0", np.sign, kinks=(0.0,), onnx="Sign", doc="-1, 0 or 1; NaN stays NaN.")
unary("square", "v0 * v0", "2 * g * v0", np.square, result="number", doc="The square; of bool, int64.")
unary("reciprocal", "1 / v0", "-g * out * out", lambda x: 1 / x, domain=(0.3, 3.0), amp="float", onnx="Reciprocal", doc="One over x.")

# ---- roots, exponentials, trigonometry
unary("sqrt", "SQRT(v0)", "0.5 * g / out", np.sqrt, domain=(0.2, 4.0), onnx="Sqrt", doc="Square root.")
unary("rsqrt", "RSQRT(v0)", "-0.5 * g * out * out * out", lambda x: 1 / np.sqrt(x), amp="float", domain=(0.3, 4.0), tol=2,
      doc="One over the square root.")  # fmt: skip
unary("exp", "EXP(v0)", "g * out", np.exp, amp="float", tol=2, onnx="Exp", doc="e to the power of x.")
unary("expm1", "EXPM1(v0)", "g * (out + 1)", np.expm1, amp="float", tol=2, doc="exp(x) - 1, accurate near 0.")
unary("log", "LOG(v0)", "g / v0", np.log, amp="float", domain=(0.2, 4.0), onnx="Log", doc="Natural logarithm.")
unary("log1p", "LOG1P(v0)", "g / (1 + v0)", np.log1p, amp="float", domain=(-0.7, 3.0), doc="log(1 + x), accurate near 0.")
unary("log2", "LOG2(v0)", "g / (v0 * 0.6931471805599453)", np.log2, amp="float", domain=(0.2, 4.0), doc="Logarithm to base 2.")
unary("sin", "SIN(v0)", "g * COS(v0)", np.sin, onnx="Sin", doc="Sine.")
unary("cos", "COS(v0)", "-g * SIN(v0)", np.cos, onnx="Cos", doc="Cosine.")
unary("tan", "TAN(v0)", "g * (1 + out * out)", np.tan, domain=(-1.3, 1.3), amp="float", tol=4, onnx="Tan", doc="Tangent.")
unary("tanh", "TANH(v0)", "g * (1 - out * out)", np.tanh, onnx="Tanh", doc="Hyperbolic tangent.")
unary("sinh", "SINH(v0)", "g * COSH(v0)", np.sinh, amp="float", tol=2, onnx="Sinh", doc="Hyperbolic sine.")
unary("cosh", "COSH(v0)", "g * SINH(v0)", np.cosh, amp="float", tol=2, onnx="Cosh", doc="Hyperbolic cosine.")
unary("erf", "ERF(v0)", "g * 1.1283791670955126 * EXP(-v0 * v0)", np.vectorize(math.erf, otypes=[float]), amp="float",
      onnx="Erf", doc="The error function.")  # fmt: skip
unary("erfc", "ERFC(v0)", "-1.1283791670955126 * g * EXP(-v0 * v0)", np.vectorize(math.erfc, otypes=[float]), amp="float",
      doc="1 - erf(x), accurate where that difference is small.")  # fmt: skip
unary("erfinv", "ERFINV(v0)", "g * 0.8862269254527580 * EXP(out * out)", _of_number(_erfinv_ref), amp="float",
      domain=(-0.95, 0.95), tol=2, doc="The inverse of erf; infinite at -1 and 1.")  # fmt: skip
# Digamma and trigamma: the recurrence to an argument of at least 10.5, Stirling's series there, and reflection below 0.5.
_DIGAMMA_STEPS = [f"1 / (z + {i})" for i in range(10)]
_PSI = {"z": "WHERE(v0 < 0.5, 1 - v0, v0)", "w": "z + 10", "r": "1 / (w * w)", "h": " + ".join(_DIGAMMA_STEPS),
        "p": "LOG(w) - 0.5 / w - r * (1 / 12.0 - r * (1 / 120.0 - r * (1 / 252.0 - r * (1 / 240.0 - r * (1 / 132.0 - r * 0.0210927961)))))",
        "f": "3.141592653589793 * WHERE(v0 == 0, v0, v0 - ROUND(v0))", "t": "TAN(WHERE(v0 < 0.5, f, 1))",
        "k": "WHERE(AND(v0 < 0, v0 == FLOOR(v0)), 0, 1)",
        "psi": "(p - h - WHERE(v0 < 0.5, 3.141592653589793 / t, 0)) * (k / k)"}  # fmt: skip
_PSI1 = {"q": " + ".join(f"{step} / (z + {i})" for i, step in enumerate(_DIGAMMA_STEPS)), "c": "SIN(WHERE(v0 < 0.5, f, 1))",
         "u": "q + 1 / w + 0.5 * r + r / w * (1 / 6.0 - r * (1 / 30.0 - r * (1 / 42.0 - r * (1 / 30.0 - r * (5 / 66.0 - r * 0.253113)))))",
         "psi1": "WHERE(v0 < 0.5, 9.869604401089358 / (c * c) - u, u)"}  # fmt: skip
_GAMMA = {"amp": "float", "domain": (0.3, 4.0), "tol": 4}
unary("lgamma", "LGAMMA(v0)", "g * psi", lgamma, let=_PSI, **_GAMMA, doc="log(|gamma(x)|).")
unary("digamma", "psi", "g * psi1", _of_number(_digamma_ref), let=_PSI | _PSI1, **_GAMMA,
      doc="The derivative of lgamma; NaN at negative integers.")  # fmt: skip
_PSI2 = {"j": " + ".join(f"{step} / ((z + {i}) * (z + {i}))" for i, step in enumerate(_DIGAMMA_STEPS)),
         "d": "-2 * j - r - r / w - r * r * (0.5 - r * (1 / 6.0 - r * (1 / 6.0 - r * (0.3 - r * 5 / 6.0))))"}  # fmt: skip
unary("trigamma", "psi1", "g * (d - WHERE(v0 < 0.5, 62.01255336059963 * COS(f) / (c * c * c), 0))", _of_number(_trigamma_ref),
      let=_PSI | _PSI1 | _PSI2, **_GAMMA, doc="The derivative of digamma.")  # fmt: skip
unary("logit_values", "LOG(v0) - LOG1P(-v0)", "g / (v0 * (1 - v0)) * (k / k)", lambda x: np.log(x / (1 - x)), amp="float",
      domain=(0.1, 0.9), let={"k": "WHERE(AND(v0 >= 0, v0 <= 1), 1, 0)"},
      doc="log(x / (1 - x)); NaN outside of 0 to 1, as its gradient.")  # fmt: skip
unary("asin", "ASIN(v0)", "g / SQRT(1 - v0 * v0)", np.arcsin, amp="float", domain=(-0.9, 0.9), onnx="Asin", doc="Inverse sine.")
unary("acos", "ACOS(v0)", "-g / SQRT(1 - v0 * v0)", np.arccos, amp="float", domain=(-0.9, 0.9), onnx="Acos", doc="Inverse cosine.")
unary("atan", "ATAN(v0)", "g / (1 + v0 * v0)", np.arctan, amp="float", onnx="Atan", doc="Inverse tangent.")
unary("asinh", "ASINH(v0)", "g / SQRT(1 + v0 * v0)", np.arcsinh, amp="float", onnx="Asinh", doc="Inverse hyperbolic sine.")
unary("acosh", "ACOSH(v0)", "g / SQRT(v0 * v0 - 1)", np.arccosh, amp="float", domain=(1.3, 4.0), tol=2,
      onnx="Acosh", doc="Inverse hyperbolic cosine.")  # fmt: skip
unary("atanh", "ATANH(v0)", "g / (1 - v0 * v0)", np.arctanh, amp="float", domain=(-0.8, 0.8),
      onnx="Atanh", doc="Inverse hyperbolic tangent.")  # fmt: skip
unary("exp2", "EXP2(v0)", "g * out * 0.6931471805599453", np.exp2, amp="float", tol=2, doc="2 to the power of x.")
unary("log10", "LOG10(v0)", "g / (v0 * 2.302585092994046)", np.log10, amp="float", domain=(0.2, 4.0), doc="Logarithm to base 10.")
unary("sinc", "WHERE(v0 == 0, 1, SIN(t) / t)", "g * WHERE(v0 == 0, 0, (COS(t) - SIN(t) / t) / z)", np.sinc, amp="float", tol=4,
      let={"z": "WHERE(v0 == 0, 1, v0)", "t": "3.141592653589793 * z"}, kinks=(0.0,), doc="sin(pi x) / (pi x), 1 at 0.")  # fmt: skip
binary("hypot", "HYPOT(v0, v1)", "g * v0 / r", "g * v1 / r", np.hypot, amp="float", domain=(0.3, 3.0),
       let={"d": "HYPOT(v0, v1)", "r": "WHERE(d == 0, 1, d)"}, doc="Length of the vector (a, b).")  # fmt: skip
_DIFFERENCE = {"d": "WHERE(AND(v0 == v1, ABS(v0) > 3e38), 0, v0 - v1)"}  # of equal infinities 0
binary("logaddexp", "MAX(v0, v1) + LOG1P(e)", "g * WHERE(d >= 0, 1, e) / (1 + e)", "g * WHERE(d >= 0, e, 1) / (1 + e)", np.logaddexp,
       let={**_DIFFERENCE, "e": "EXP(WHERE(d >= 0, -d, d))"}, amp="float",
       doc="log(exp(a) + exp(b)) without overflow.")  # fmt: skip
binary("logaddexp2", "MAX(v0, v1) + LOG1P(e) * 1.4426950408889634", "g * WHERE(d >= 0, 1, e) / (1 + e)",
       "g * WHERE(d >= 0, e, 1) / (1 + e)", np.logaddexp2, let={**_DIFFERENCE, "e": "EXP2(WHERE(d >= 0, -d, d))"},
       amp="float", doc="log2(2**a + 2**b) without overflow.")  # fmt: skip
binary("xlogy", "WHERE(AND(v0 == 0, v1 == v1), 0, v0 * LOG(v1))", "g * WHERE(AND(v0 == 0, v1 <= 0), 0, LOG(v1))", "g * v0 / v1",
       lambda a, b: np.where((a == 0) & ~np.isnan(b), 0, a * np.log(b)), amp="float", domain=(0.3, 3.0),
       doc="a * log(b), 0 where a is 0 and b is not NaN.")  # fmt: skip

# ---- rounding: flat almost everywhere, so the gradient is 0
unary("floor", "FLOOR(v0)", "0", np.floor, onnx="Floor", doc="Largest integer not above x.")
unary("ceil", "CEIL(v0)", "0", np.ceil, onnx="Ceil", doc="Smallest integer not below x.")
unary("round", "ROUND(v0)", "0", np.round, onnx="Round", doc="Nearest integer; halves go to the even one.")
unary("trunc", "TRUNC(v0)", "0", np.trunc, doc="x without its fraction.")

# ---- comparisons and logic: bool results, no gradient
binary("eq", "v0 == v1", None, None, np.equal, onnx="Equal", doc="a == b.")
NE = binary("ne", "v0 != v1", None, None, np.not_equal, doc="a != b.")
binary("lt", "v0 < v1", None, None, np.less, onnx="Less", doc="a < b.")
binary("le", "v0 <= v1", None, None, np.less_equal, onnx="LessOrEqual", doc="a <= b.")
binary("gt", "v0 > v1", None, None, np.greater, onnx="Greater", doc="a > b.")
binary("ge", "v0 >= v1", None, None, np.greater_equal, onnx="GreaterOrEqual", doc="a >= b.")
_AND = binary("logical_and", "AND(v0, v1)", None, None, np.logical_and, onnx="And", doc="Whether both are nonzero.")
_OR = binary("logical_or", "OR(v0, v1)", None, None, np.logical_or, onnx="Or", doc="Whether at least one is nonzero.")
binary("logical_xor", "OR(AND(v0, NOT(v1)), AND(NOT(v0), v1))", None, None, np.logical_xor, onnx="Xor", doc="Whether only one is nonzero.")
_LOGICAL_NOT = unary("logical_not", "NOT(v0)", None, np.logical_not, onnx="Not", doc="Whether x is zero.")
unary("isnan", "ISNAN(v0)", None, np.isnan, onnx="IsNaN", doc="Whether x is NaN.")
unary("isinf", "ISINF(v0)", None, np.isinf, onnx="IsInf", doc="Whether x is infinite.")
unary("isfinite", "ISFINITE(v0)", None, np.isfinite, doc="Whether x is neither infinite nor NaN.")
unary("isposinf", "AND(ISINF(v0), v0 > 0)", None, np.isposinf, doc="Whether x is infinite and positive.")
unary("isneginf", "AND(ISINF(v0), v0 < 0)", None, np.isneginf, doc="Whether x is infinite and negative.")
unary("signbit", "OR(v0 < 0, AND(v0 == 0, 1 / v0 < 0))", None, np.signbit, doc="Whether x is negative, or -0.0.")

# ---- selection and mixtures
binary("fmax", "WHERE(f, v0, v1)", "WHERE(f, g, 0)", "WHERE(f, 0, g)", np.fmax, let={"f": "OR(v0 >= v1, ISNAN(v1))"},
       doc="The larger of two; a number wins over NaN.")  # fmt: skip
binary("fmin", "WHERE(f, v0, v1)", "WHERE(f, g, 0)", "WHERE(f, 0, g)", np.fmin, let={"f": "OR(v0 <= v1, ISNAN(v1))"},
       doc="The smaller of two; a number wins over NaN.")  # fmt: skip
binary("copysign", "COPYSIGN(v0, v1)", "g * SIGN(v0) * SIGN(out)", "0", np.copysign, kinks=(0.0,), doc="|a| with the sign of b.")
binary("heaviside", "WHERE(v0 == 0, v1, WHERE(v0 > 0, 1, 0))", None, None,
       lambda a, b: np.where(a == 0, b, np.where(a > 0, 1.0, 0.0)), doc="1 where a is positive, b where a is 0, else 0.")  # fmt: skip
unary("nan_to_num_values", "WHERE(ISNAN(v0), nan, WHERE(ISINF(v0), WHERE(v0 > 0, posinf, neginf), v0))",
      "WHERE(ISFINITE(v0), g, 0)", lambda x, nan, posinf, neginf: np.nan_to_num(x, nan=nan, posinf=posinf, neginf=neginf),
      params={"nan": 0.0, "posinf": 1e30, "neginf": -1e30}, doc="x with numbers in place of NaN and infinities.")  # fmt: skip
register(Pointwise("where", "WHERE(v0, v1, v2)", (None, "WHERE(v0, g, 0)", "WHERE(v0, 0, g)"), np.where, inputs=("condition", "a", "b"),
                   onnx="Where", doc="a where the condition holds, else b."))  # fmt: skip
_CLAMP_BOTH = unary("clamp_both", "MIN(MAX(v0, min), max)", "WHERE(AND(v0 >= min, v0 <= max), g, 0)",
                    lambda x, min, max: np.clip(x, min, max), params={"min": -1, "max": 1}, kinks=(-1.0, 1.0),
                    doc="x clamped between min and max.")  # fmt: skip
_CLAMP_MIN = unary("clamp_min_number", "MAX(v0, min)", "WHERE(v0 >= min, g, 0)", lambda x, min: np.maximum(x, min), params={"min": 0},
                   kinks=(0.0,), doc="x, but not below min.")  # fmt: skip
_CLAMP_MAX = unary("clamp_max_number", "MIN(v0, max)", "WHERE(v0 <= max, g, 0)", lambda x, max: np.minimum(x, max), params={"max": 0},
                   kinks=(0.0,), doc="x, but not above max.")  # fmt: skip
_BOUNDS = (
    Pointwise("clamp_tensors", "MIN(MAX(v0, v1), v2)", ("WHERE(AND(v0 >= v1, v0 <= v2), g, 0)", "WHERE(AND(v0 < v1, v1 < v2), g, 0)",
              "WHERE(OR(v0 > v2, v1 > v2), g, 0)"), lambda x, min, max: np.minimum(np.maximum(x, min), max), inputs=("x", "min", "max"),
              domain=((-3.0, 3.0), (-2.0, -0.5), (0.5, 2.0)), doc="x clamped between the elements of two tensors."),
    Pointwise("clamp_min_tensor", "MAX(v0, v1)", ("WHERE(v0 >= v1, g, 0)", "WHERE(v0 < v1, g, 0)"), np.maximum, inputs=("x", "min"),
              doc="x, but not below the elements of a tensor."),
    Pointwise("clamp_max_tensor", "MIN(v0, v1)", ("WHERE(v0 <= v1, g, 0)", "WHERE(v0 > v1, g, 0)"), np.minimum, inputs=("x", "max"),
              doc="x, but not above the elements of a tensor."),
)  # fmt: skip
for _bound in _BOUNDS:
    register(_bound)
register(Pointwise("lerp", "WHERE(ABS(v2) < 0.5, v0 + v2 * (v1 - v0), v1 - (v1 - v0) * (1 - v2))",
                   ("g * (1 - v2)", "g * v2", "g * (v1 - v0)"), lambda a, b, w: a + w * (b - a), inputs=("a", "b", "weight"),
                   doc="a + weight * (b - a), exact at both ends."))  # fmt: skip
register(Pointwise("addcmul", "v0 + value * v1 * v2", ("g", "g * value * v2", "g * value * v1"), lambda a, b, c, value: a + value * b * c,
                   params={"value": 1}, result="inputs", doc="a + value * b * c; of integers, value must be one."))  # fmt: skip
register(Pointwise("addcdiv", "v0 + value * v1 / v2", ("g", "g * value / v2", "-g * value * v1 / (v2 * v2)"),
                   lambda a, b, c, value: a + value * b / c, params={"value": 1}, domain=(0.5, 3.0), tol=2,
                   doc="a + value * b / c."))  # fmt: skip

# ---- activations
# exp(-|x|), smooth where e is used. Not by ABS: its derivative at 0 is 0, and second derivatives at 0 would be those of another function.
_E = {"e": "EXP(WHERE(v0 >= 0, -v0, v0))"}
_SIGMOID = {**_E, "s": "WHERE(v0 >= 0, 1, e) / (1 + e)"}
unary("relu", "MAX(v0, 0)", "WHERE(out <= 0, 0, g)", lambda x: np.maximum(x, 0), kinks=(0.0,), onnx="Relu",
      doc="The positive part: max(x, 0).")  # fmt: skip
unary("relu6", "MIN(MAX(v0, 0), 6)", "WHERE(OR(v0 <= 0, v0 >= 6), 0, g)", lambda x: np.clip(x, 0, 6), kinks=(0.0, 6.0), domain=(-2.0, 8.0),
      doc="The positive part, cut at 6: min(max(x, 0), 6).")  # fmt: skip
unary("leaky_relu", "WHERE(v0 > 0, v0, negative_slope * v0)", "WHERE(v0 > 0, g, negative_slope * g)",
      lambda x, negative_slope: np.where(x > 0, x, negative_slope * x), params={"negative_slope": 0.01}, kinks=(0.0,),
      onnx="LeakyRelu(alpha=negative_slope)", doc="A slope for each sign: x where positive, else negative_slope * x.")  # fmt: skip
unary("elu", "WHERE(v0 > 0, v0, alpha * EXPM1(MIN(v0, 0)))", "WHERE(v0 <= 0, g * alpha * EXP(MIN(v0, 0)), g)",
      lambda x, alpha: np.where(x > 0, x, alpha * (np.exp(np.minimum(x, 0)) - 1)), params={"alpha": 1.0}, kinks=(0.0,), amp="float",
      onnx="Elu(alpha=alpha)", doc="Exponential below zero: x where positive, else alpha * (exp(x) - 1).")  # fmt: skip
unary("selu", "1.0507009873554805 * WHERE(v0 > 0, v0, 1.6732632423543772 * EXPM1(MIN(v0, 0)))",
      "1.0507009873554805 * WHERE(v0 <= 0, g * 1.6732632423543772 * EXP(MIN(v0, 0)), g)",
      lambda x: 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * (np.exp(np.minimum(x, 0)) - 1)), kinks=(0.0,), amp="float",
      onnx="Selu", doc="ELU scaled so that activations keep mean 0 and variance 1 from layer to layer.")  # fmt: skip
unary("sigmoid", "s", "g * out * (1 - out)", lambda x: 0.5 * (1 + np.tanh(x / 2)), let=_SIGMOID, onnx="Sigmoid", doc="1 / (1 + exp(-x)).")
unary("log_sigmoid", "MIN(v0, 0) - LOG1P(e)", "g * WHERE(v0 >= 0, e, 1) / (1 + e)", lambda x: -np.logaddexp(0, -x), let=_E, amp="float",
      doc="log(sigmoid(x)) without overflow.")  # fmt: skip
unary("softplus", "WHERE(z > threshold, v0, (MAX(z, 0) + LOG1P(e)) / beta)", "g * WHERE(z > threshold, 1, WHERE(z >= 0, 1, e) / (1 + e))",
      lambda x, beta, threshold: np.where(beta * x > threshold, x, np.logaddexp(0, beta * x) / beta),
      let={"z": "beta * v0", "e": "EXP(WHERE(z >= 0, -z, z))"}, params={"beta": 1.0, "threshold": 20.0},
      amp="float", onnx="Softplus", doc="A smooth ReLU: log(1 + exp(beta x)) / beta; linear where beta x is above threshold.")  # fmt: skip
unary("softsign", "v0 / (1 + ABS(v0))", "g / ((1 + ABS(v0)) * (1 + ABS(v0)))", lambda x: x / (1 + np.abs(x)), onnx="Softsign",
      doc="x / (1 + |x|).")  # fmt: skip
unary("silu", "v0 * s", "g * s * (1 + v0 * (1 - s))", lambda x: x / (1 + np.exp(-x)), let=_SIGMOID, doc="x * sigmoid(x), or swish.")
# t = tanh(softplus(x)) = p / (p + q) in exp(-|x|): drivers' tanh may stop one ulp short of 1, and x * (1 - t * t) would show it.
unary("mish", "v0 * (p / (p + q))", "g * (p / (p + q) + v0 * s * (q * (2 * p + q) / ((p + q) * (p + q))))",
      lambda x: x * np.tanh(np.logaddexp(0, x)),
      let={**_SIGMOID, "p": "WHERE(v0 >= 0, 1 + 2 * e, e * (e + 2))", "q": "WHERE(v0 >= 0, 2 * e * e, 2)"},
      amp="float", tol=2, onnx="Mish", doc="x * tanh(softplus(x)).")  # fmt: skip
_GELU = unary("gelu_erf", "0.5 * v0 * (1 + ERF(v0 * 0.7071067811865476))",
              "g * (0.5 * (1 + ERF(v0 * 0.7071067811865476)) + v0 * 0.3989422804014327 * EXP_BELOW(-0.5 * v0 * v0))",
              lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2))), tol=2, doc="GELU by the error function.")  # fmt: skip
# By the sigmoid, 0.5 * (1 + tanh(u)) = sigmoid(2 u): drivers' tanh may stop one ulp short of 1, and infinities would show it.
_GELU_TANH = unary("gelu_tanh", "v0 * s", "g * (s + v0 * s * (1 - s) * 1.5957691216057308 * (1 + 0.134145 * v0 * v0))",
                   lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
                   let={"u": "1.5957691216057308 * (v0 + 0.044715 * v0 * v0 * v0)", "e": "EXP(WHERE(u >= 0, -u, u))",
                        "s": "WHERE(u >= 0, 1, e) / (1 + e)"}, tol=2, doc="GELU, tanh form.")  # fmt: skip
unary("hard_sigmoid", "MIN(MAX(v0 / 6 + 0.5, 0), 1)", "WHERE(AND(v0 > -3, v0 < 3), g / 6, 0)", lambda x: np.clip(x / 6 + 0.5, 0, 1),
      kinks=(-3.0, 3.0), domain=(-5.0, 5.0), doc="A sigmoid of three straight pieces: relu6(x + 3) / 6.")  # fmt: skip
unary("hard_swish", "v0 * MIN(MAX(v0 + 3, 0), 6) / 6", "g * WHERE(v0 <= -3, 0, WHERE(v0 < 3, (2 * v0 + 3) / 6, 1))",
      lambda x: x * np.clip(x + 3, 0, 6) / 6, domain=(-5.0, 5.0), kinks=(-3.0, 3.0),
      onnx="HardSwish", doc="x * hard_sigmoid(x).")  # fmt: skip
_HARD_TANH = unary(
    "hard_tanh_between", "MIN(MAX(v0, min_val), max_val)", "WHERE(OR(v0 <= min_val, v0 >= max_val), 0, g)",
    lambda x, min_val, max_val: np.clip(x, min_val, max_val), params={"min_val": -1.0, "max_val": 1.0}, kinks=(-1.0, 1.0),
    result="inputs", doc="hard_tanh with checked bounds.",
)  # fmt: skip
_PRELU = Pointwise("prelu_broadcast", "WHERE(v0 > 0, v0, v1 * v0)", ("WHERE(v0 > 0, g, g * v1)", "WHERE(v0 > 0, 0, g * v0)"),
                   lambda x, w: np.where(x > 0, x, w * x), kinks=(0.0,),
                   onnx="PRelu", doc="prelu with a weight that broadcasts.")  # fmt: skip
register(_PRELU)


def _gelu_form(approximate: str) -> tuple[str, Mapping[str, float]]:
    if approximate not in ("none", "tanh"):
        raise ValueError(message("gelu", 'approximate must be "none" or "tanh"', approximate=repr(approximate)))
    return ("gelu_erf" if approximate == "none" else "gelu_tanh"), {}


def _hard_tanh_form(min_val: float, max_val: float) -> tuple[str, Mapping[str, float]]:
    if min_val > max_val:
        raise ValueError(message("hard_tanh", "min_val must not be above max_val", min_val=min_val, max_val=max_val))
    return "hard_tanh_between", {"min_val": min_val, "max_val": max_val}


def _clamp_form(min: Any = None, max: Any = None) -> tuple[str, Mapping[str, float]]:
    tensors = isinstance(min, Tensor) or isinstance(max, Tensor)
    if max is None and min is not None:
        return ("clamp_min_tensor" if tensors else "clamp_min_number"), {"min": min}
    if max is None:
        raise ValueError(message("clamp", "min or max must be given"))
    if min is None:
        return ("clamp_max_tensor" if tensors else "clamp_max_number"), {"max": max}
    return ("clamp_tensors" if tensors else "clamp_both"), {"min": min, "max": max}


register(Choice("gelu", (_GELU, _GELU_TANH), {"approximate": "none"}, _gelu_form, 'x * P(N(0, 1) <= x); approximate="tanh" uses tanh.'))
register(Choice("clamp", (_CLAMP_BOTH, _CLAMP_MIN, _CLAMP_MAX, *_BOUNDS), {"min": None, "max": None}, _clamp_form,
                "x clamped between min and max: numbers, tensors or None."))  # fmt: skip
register(Choice("clamp_min", (_CLAMP_MIN, _BOUNDS[1]), {"min": None}, _clamp_form, "x, but not below min: a number or a tensor."))
register(Choice("clamp_max", (_CLAMP_MAX, _BOUNDS[2]), {"max": None}, _clamp_form, "x, but not above max: a number or a tensor."))
register(Choice("hard_tanh", (_HARD_TANH,), _HARD_TANH.params, _hard_tanh_form, "x clamped between min_val and max_val."))
alias("swish", "silu")
alias("clip", "clamp")


def __getattr__(name: str) -> Callable[..., Tensor]:
    row: Row | None = REGISTRY.get(name)
    if not isinstance(row, Pointwise | Choice):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return pointwise_function(row)


# ---- ops whose arguments are not numbers

_CAST = Pointwise("cast", "v0", ("g",), lambda x: x)


def _reference_cast(x: np.ndarray, dtype: str) -> np.ndarray:
    """Return the reference of ``cast``. Floats are not rounded: finite differences cannot resolve rounding, and the tolerance covers it."""
    return x if dtypes.lookup(dtype, "cast").is_float else x.astype(dtype)


@op(at_once=True, vjp=lambda F, g, x_dtype: F.cast(g, x_dtype), ref=_reference_cast, tol=1000,
    samples=[S((257,), dtype="float32"), S((3, 5), dtype="float"), S((0,), dtype="int32"),
             S((33,), dtype="uint8", dtypes="int32", low=0, high=200), S((9,), dtype="bool", dtypes="int64", high=2)],
    errors=[(S((3,), dtype="complex64"), r"\[cast\] unknown dtype; dtype='complex64'")])  # fmt: skip
def cast(x: Tensor, dtype: str, *, out: Tensor | None = None) -> Tensor:
    """Convert x to a dtype; returns x if it has that dtype and ``out`` is not given. Floats are truncated to integers; nonzero is true."""
    name = dtypes.lookup(dtype, "cast").name
    x = operand("cast", x)
    if out is None and x.dtype == name:
        return x
    return run(_CAST, (x,), out, name)


def _channel_view(name: str, x: Tensor, weight: Tensor, axis: int) -> Tensor:
    """Return a vector over ``axis`` of x as a view that broadcasts against x."""
    if weight.shape in ((), (1,)):
        return weight
    if not -x.ndim <= axis < x.ndim or weight.shape != (x.shape[axis],):
        label = "weight" if name == "prelu" else "bias"
        what = f"{label} must have one value, or one per element of axis {axis} of x"
        raise ShapeError(message(name, what, "", **{"x.shape": x.shape, f"{label}.shape": weight.shape}))
    after = x.ndim - 1 - axis % x.ndim
    return with_shape(weight, (*weight.shape, *(1,) * after))


def _sum_to_channels(F: Any, g: Any, axis: int, shape: tuple[int, ...]) -> Any:
    if shape in ((), (1,)):
        return F.reshape(F.sum(g), shape)
    return F.sum(g, axis=tuple(a for a in range(len(g.shape)) if a != axis % len(g.shape)))


def _per_channel(x: np.ndarray, w: np.ndarray, axis: int) -> np.ndarray:
    return w if w.size == 1 else w.reshape(-1, *(1,) * (x.ndim - 1 - axis % x.ndim))


@op(at_once=True, vjp=lambda F, g, bias_shape, axis: (g, _sum_to_channels(F, g, axis, bias_shape)),
    ref=lambda x, bias, axis=1: x + _per_channel(x, bias, axis),
    samples=[S((3, 5), (5,)), S((2, 3, 4, 5), (3,)), S((2, 7, 3), (3,), axis=-1), S((0, 3), (3,))],
    errors=[(S((3, 4), (3,)), r"\[bias_add\] bias must have one value, or one per element of axis 1")],
)  # fmt: skip
def bias_add(x: Tensor, bias: Tensor, axis: int = 1, *, out: Tensor | None = None) -> Tensor:
    """Add one value per channel, or one value for all, to x; ``axis`` is the channel axis."""
    x, bias = tensors("bias_add", (x, bias))
    return run(_ADD, (x, _channel_view("bias_add", x, bias, axis)), out)


def _prelu_vjp(F: Any, g: Any, x: Any, weight: Any) -> Any:
    axis = min(1, len(x.shape) - 1)
    shape = (-1, *(1,) * (len(x.shape) - 2)) if weight.shape not in ((), (1,)) else weight.shape
    positive = F.gt(x, 0)
    gx = F.where(positive, g, F.mul(g, F.reshape(weight, shape)))
    return gx, _sum_to_channels(F, F.where(positive, 0.0, F.mul(g, x)), axis, weight.shape)


@op(at_once=True, vjp=_prelu_vjp, ref=lambda x, weight: np.where(x > 0, x, _per_channel(x, weight, 1) * x),
    samples=[S((3, 5), (5,)), S((2, 3, 4, 5), (3,)), S((4, 6), (1,)), S((0, 3), (3,))],
    errors=[(S((3, 4), (3,)), r"\[prelu\] weight must have one value, or one per element of axis 1")],
)  # fmt: skip
def prelu(x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x where positive, else weight * x; one weight for all or one per channel (axis 1)."""
    x, weight = tensors("prelu", (x, weight))
    view = _channel_view("prelu", x, weight, 1)
    return run(_PRELU, (x, view if x.shape else with_shape(view, ())), out)


# ---- expressions of the user

_MACROS = {"ADD": "({0}) + ({1})", "SUB": "({0}) - ({1})", "MUL": "({0}) * ({1})", "DIV": "({0}) / ({1})",
           "RELU": "WHERE(({0}) <= 0, 0, {0})"}  # fmt: skip


class _Expand(ast.NodeTransformer):
    """A transformer that expands macros such as ``ADD(a, b)`` and ``RELU(x)`` to arithmetic."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        args = [self.visit(arg) for arg in node.args]
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name not in _MACROS or len(args) != 1 + ("{1}" in _MACROS[name]):
            return ast.Call(node.func, args, node.keywords)
        return ast.parse(_MACROS[name].format(*map(ast.unparse, args)), mode="eval").body


@lru_cache(maxsize=512)
def user_row(title: str, expr: str, names: tuple[str, ...]) -> Pointwise:
    """Build an unregistered row from an expression in ``v0``, ``v1``, ... or the given names; C's ``2.0f`` is read as ``2.0``."""
    plain = re.sub(r"(?<=[\d.])[fF]\b", "", expr)
    try:
        tree = ast.parse(plain, mode="eval")
    except SyntaxError as fault:
        raise ValueError(message(title, "expr must be an expression", expr=repr(expr), error=fault.msg)) from None
    table = {name: f"v{i}" for i, name in enumerate(names)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            node.id = table.get(node.id, node.id)
    return Pointwise(title, ast.unparse(_Expand().visit(tree)), (None,) * len(names), lambda *xs: None, inputs=names)


def _unary_vjp(F: Any, g: Any, x: Any, expr: str) -> Any:
    row = user_row("elementwise_unary", expr, ("x",))
    return differentiate(row.fwd, {"v0": x}, g, F)["v0"]


def _binary_vjp(F: Any, g: Any, a: Any, b: Any, expr: str) -> Any:
    row = user_row("elementwise_binary", expr, ("a", "b"))
    grads = differentiate(row.fwd, {"v0": a, "v1": b}, g, F)
    return grads["v0"], grads["v1"]


# ---- bits


def _bitop(name: str, function: str, ref: Callable[..., Any], doc: str, high: int = 9, truths: Any = None) -> None:
    """Register a bitwise op on two integers, and on two bools by the row ``truths``; its samples are below ``high``.

    A kernel that also compares floats computes in floats, which have no bits.
    """
    row = Pointwise(name, f"{function}(v0, v1)", (None, None), ref, accepts="any" if truths else "number")

    def call(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
        _check_integers(name, a, b)
        return run(truths if truths is not None and _is_truth(a) and _is_truth(b) else row, (a, b), out)

    call.__name__ = call.__qualname__ = name
    kinds = ["int32", "int64", *(["bool", ("int64", "uint8")] if truths else [])]
    samples = [S((257,), (257,), dtypes=kind, low=0, high=high) for kind in kinds] + [S((3, 1), (4,), dtypes="int64", low=-high, high=high)]
    errors = [(S((3,), (3,)), rf"\[{name}\] inputs must be integers or truth values; .*dtype=float32")]
    op(at_once=True, vjp=None, ref=ref, name=name, inputs=("a", "b"), samples=samples, errors=errors, doc=doc)(call)


def _is_truth(x: Any) -> bool:
    return x.dtype == "bool" if isinstance(x, Tensor | np.ndarray | np.generic) else isinstance(x, bool)


def _check_integers(name: str, *values: Any) -> None:
    for x in values:
        kind = x.dtype if isinstance(x, Tensor) else np.asarray(x).dtype.name
        if kind not in DTYPES or DTYPES[kind].is_float:
            raise DtypeError(message(name, "inputs must be integers or truth values", 'cast first: x.to("int64")', dtype=kind))


_BITNOT = Pointwise("bitwise_not", "BITNOT(v0)", (None,), np.bitwise_not)
_bitop("bitwise_and", "BITAND", np.bitwise_and, "Bitwise AND of a and b.", truths=_AND)
_bitop("bitwise_or", "BITOR", np.bitwise_or, "Bitwise OR of a and b.", truths=_OR)
_bitop("bitwise_xor", "BITXOR", np.bitwise_xor, "Bitwise XOR of a and b.", truths=NE)


@op(at_once=True, vjp=None, ref=np.bitwise_not,
    samples=[S((257,), dtypes="int32", low=-9, high=9), S((9,), dtypes="uint8", low=0, high=255), S((3, 4), dtypes="bool")],
    errors=[(S((3,)), r"\[bitwise_not\] inputs must be integers or truth values; .*dtype=float32")])  # fmt: skip
def bitwise_not(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Invert every bit; truth values are negated."""
    _check_integers("bitwise_not", x)
    x = operand("bitwise_not", x)
    return run(_LOGICAL_NOT if x.dtype == "bool" else _BITNOT, (x,), out)


_bitop("bitwise_left_shift", "SHIFTLEFT", shift_left, "a shifted left by b bits; 0 where b is negative or not below the number of bits.",
      40)  # fmt: skip
_bitop("bitwise_right_shift", "SHIFTRIGHT", shift_right, "a shifted right by b bits, filled with the sign.", 40)


@op(at_once=True, vjp=_unary_vjp, ref=lambda x, expr: np.tanh(x) * x + 1, samples=[S((257,), expr="TANH(v0) * x + 1")],
    errors=[(S((3,), expr="__import__('os')"), r"\[elementwise_unary\] .*unknown function"),
            (S((3,), expr="x ** 2"), r"\[elementwise_unary\] .*Pow is not in the expression language")])  # fmt: skip
def elementwise_unary(x: Tensor, expr: str, *, out: Tensor | None = None) -> Tensor:
    """Apply your own expression over x (or ``v0``): ``elementwise_unary(x, "x * EXP(-x)")``. The result has a gradient."""
    return run(user_row("elementwise_unary", expr, ("x",)), (x,), out)


@op(at_once=True, vjp=_binary_vjp, ref=lambda a, b, expr: (a + b) * 2.0,
    samples=[S((257,), (257,), expr="MUL(ADD(v0, v1), 2.0f)"), S((3, 1), (4,), expr="(a + b) * 2")],
    errors=[(S((3,), (3,), expr="a + c"), r"\[elementwise_binary\] .*unknown name 'c'")])  # fmt: skip
def elementwise_binary(a: Tensor, b: Tensor, expr: str, *, out: Tensor | None = None) -> Tensor:
    """Apply your own expression over a and b (or ``v0`` and ``v1``), broadcast together. The result has a gradient."""
    return run(user_row("elementwise_binary", expr, ("a", "b")), (a, b), out)
