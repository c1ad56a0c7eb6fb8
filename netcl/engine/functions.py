"""The table of functions that expressions may call, in OpenCL C and in NumPy; read by the registry and the code generator.

The OpenCL C form uses ``real``, a scalar or a vector of the compute type, and ``mask``, the type of a comparison of two ``real``.
One definition thus serves scalars and vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from netcl.core.errors import DtypeError, message

_ERF_SMALL = (
    (1.85777706184603153e-1, 3.16112374387056560e00, 1.13864154151050156e02, 3.77485237685302021e02, 3.20937758913846947e03),
    (1.0, 2.36012909523441209e01, 2.44024637934444173e02, 1.28261652607737228e03, 2.84423683343917062e03),
)
_ERF_MIDDLE = (
    (2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594e0, 6.61191906371416295e01, 2.98635138197400131e02,
     8.81952221241769090e02, 1.71204761263407058e03, 2.05107837782607147e03, 1.23033935479799725e03),
    (1.0, 1.57449261107098347e01, 1.17693950891312499e02, 5.37181101862009858e02, 1.62138957456669019e03,
     3.29079923573345963e03, 4.36261909014324716e03, 3.43936767414372164e03, 1.23033935480374942e03),
)  # fmt: skip


_ERFC = np.vectorize(math.erfc, otypes=[float])


def erf(x: np.ndarray) -> np.ndarray:
    """Return the error function for arrays, accurate to 1e-15 (the rational approximations of W. J. Cody, 1969)."""
    wide = np.asarray(x, np.float64)
    y = np.abs(wide)
    square = np.minimum(wide * wide, 1.0)
    small = wide * np.polyval(_ERF_SMALL[0], square) / np.polyval(_ERF_SMALL[1], square)
    z = np.minimum(y, 6.0)  # 1 - erf(6) is below half an ulp of one
    middle = np.copysign(1.0 - np.exp(-z * z) * np.polyval(_ERF_MIDDLE[0], z) / np.polyval(_ERF_MIDDLE[1], z), wide)
    return np.where(y <= 0.46875, small, middle).astype(np.result_type(x, np.float16), copy=False)


def erfc(x: np.ndarray) -> np.ndarray:
    """Return ``1 - erf(x)``, accurate where that difference is small."""
    return _ERFC(x).astype(np.result_type(x, np.float16), copy=False)


_LGAMMA = np.vectorize(lambda x: math.inf if math.isinf(x) or (x <= 0 and x == math.floor(x)) else math.lgamma(x), otypes=[float])


def lgamma(x: np.ndarray) -> np.ndarray:
    """Return ``log(|gamma(x)|)``, infinite at 0 and negative integers."""
    return _LGAMMA(x).astype(np.result_type(x, np.float16), copy=False)


#: M. Giles, "Approximating the erfinv function" (2011), by powers of w - 2.5 where w < 5, of sqrt(w) - 3 beyond; w = -log(1 - x * x).
_ERFINV = (
    (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164, 0.246640727,
     1.50140941),
    (-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047, 1.00167406, 2.83297682),
)  # fmt: skip


def erfinv(x: np.ndarray) -> np.ndarray:
    """Return the inverse of erf: S. Winitzki's approximation (2008) and two steps of Halley's method, by erfc near -1 and 1."""
    wide = np.asarray(x, np.float64)
    w, far = -np.log((1 - wide) * (1 + wide)), np.abs(wide) > 0.99
    t = 4.330746750799873 - w / 2
    y = np.copysign(np.sqrt(np.sqrt(t * t + w / 0.147) - t), wide)
    for _ in range(2):
        beyond = np.copysign(1, wide) * (1 - np.abs(wide) - erfc(np.where(far, np.abs(y), 0)))
        step = np.where(far, beyond, erf(y) - wide) * np.exp(np.minimum(y * y, 700)) * (math.sqrt(math.pi) / 2)
        y = y - step / (1 + y * step)
    return np.where(np.abs(wide) == 1, wide * np.inf, y).astype(np.result_type(x, np.float16), copy=False)


def power(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return ``a ** b``. For a single exponent 0.5 NumPy takes the square root, which is NaN for -infinity, where powers are infinite."""
    if np.ndim(b) == 0 and b == 0.5:
        return np.power(a, np.full(np.shape(a) or (1,), b)).reshape(np.shape(a))
    return np.power(a, b)


def integer_power(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return ``a ** b`` in integers; a negative exponent gives the truncated quotient, 0 unless the base is 1 or -1."""
    power = np.power(a, np.maximum(b, 0))
    odd = np.where(np.bitwise_and(b, 1) == 1, a, a * a)
    return np.where(b >= 0, power, np.where(np.abs(a) == 1, odd, a * 0))


def shift_left(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Compute ``a << b``; 0 if ``b`` is negative or at least the number of bits."""
    bits = 8 * np.asarray(a).dtype.itemsize
    return np.where((b < 0) | (b >= bits), a * 0, np.left_shift(a, np.clip(b, 0, bits - 1)))


def shift_right(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Compute ``a >> b``, filled with the sign; only the sign is left if ``b`` is negative or at least the number of bits."""
    last = 8 * np.asarray(a).dtype.itemsize - 1
    return np.right_shift(a, np.where((b < 0) | (b > last), last, b))


def _integers_only(*values: Any) -> Any:
    raise DtypeError(message("formula", "bitwise functions require integers, got floats", 'cast first: x.to("int64")'))


def _unchanged(x: Any) -> Any:
    return x


@dataclass(frozen=True)
class FormulaFunction:
    """A function that expressions may call: its forms in C and in NumPy, and the differentiable op that computes it.

    ``takes`` and ``gives`` are sorts: ``n`` a number, ``t`` a truth value. ``c_int`` and ``np_int`` are the forms for
    integers. If they are empty, the function needs floats, and integers are promoted to float32. ``c_single`` is a form for
    float32 that is faster than the driver's.
    """

    name: str
    c: str
    np: Callable[..., Any]
    op: str
    takes: str = "n"
    gives: str = "n"
    c_int: str = ""
    np_int: Callable[..., Any] | None = None
    c_single: str = ""

    def c_name(self, compute: str) -> str:
        """Return the name of the C function for a compute type; raises ``DtypeError`` for a bitwise function of floats."""
        if compute in ("int", "long", "ulong"):
            return self.c_int
        if not self.c:
            _integers_only()
        return self.c_single if self.c_single and compute == "float" else self.c

    @property
    def integral(self) -> bool:
        return bool(self.c_int)


_FUNCTION_ROWS = (
    # Functions with the same name in OpenCL C and NumPy, such as EXP; then those that NumPy names otherwise, such as ASIN (arcsin).
    *(FormulaFunction(name.upper(), name, getattr(np, name), name)
      for name in "exp expm1 log log1p log2 log10 exp2 sqrt tanh sinh cosh".split()),
    *(FormulaFunction(name.upper(), name, getattr(np, f"arc{name[1:]}"), name) for name in "asin acos atan asinh acosh atanh".split()),
    FormulaFunction("EXP_BELOW", "exp", np.exp, "exp", c_single="netcl_expbelow"),  # for arguments that are not far above 0
    FormulaFunction("RSQRT", "rsqrt", lambda x: 1 / np.sqrt(x), "rsqrt"),
    FormulaFunction("SIN", "netcl_sin", np.sin, "sin"),
    FormulaFunction("COS", "netcl_cos", np.cos, "cos"),
    FormulaFunction("TAN", "netcl_tan", np.tan, "tan"),
    FormulaFunction("ATAN2", "atan2", np.arctan2, "atan2", "nn"),
    FormulaFunction("ERF", "erf", erf, "erf", c_single="netcl_erf"),
    FormulaFunction("ERFC", "erfc", erfc, "erfc"),
    FormulaFunction("ERFINV", "netcl_erfinv", erfinv, "erfinv"),
    FormulaFunction("LGAMMA", "lgamma", lgamma, "lgamma"),
    FormulaFunction("HYPOT", "hypot", np.hypot, "hypot", "nn"),
    FormulaFunction("COPYSIGN", "copysign", np.copysign, "copysign", "nn"),
    FormulaFunction("ABS", "fabs", np.abs, "abs", c_int="netcl_iabs", np_int=np.abs),
    FormulaFunction("SIGN", "netcl_sign", np.sign, "sign", c_int="netcl_isign", np_int=np.sign),
    FormulaFunction("FLOOR", "floor", np.floor, "floor", c_int="netcl_same", np_int=_unchanged),
    FormulaFunction("CEIL", "ceil", np.ceil, "ceil", c_int="netcl_same", np_int=_unchanged),
    FormulaFunction("ROUND", "rint", np.rint, "round", c_int="netcl_same", np_int=_unchanged),
    FormulaFunction("TRUNC", "trunc", np.trunc, "trunc", c_int="netcl_same", np_int=_unchanged),
    FormulaFunction("FMOD", "netcl_fmod", np.fmod, "fmod", "nn", c_int="netcl_ifmod", np_int=np.fmod),
    FormulaFunction("REMAINDER", "netcl_remainder", np.remainder, "remainder", "nn", c_int="netcl_iremainder", np_int=np.remainder),
    FormulaFunction("FLOORDIV", "netcl_floordiv", np.floor_divide, "floor_divide", "nn", c_int="netcl_ifloordiv", np_int=np.floor_divide),
    FormulaFunction("POW", "pow", power, "pow", "nn", c_int="netcl_ipow", np_int=integer_power),
    FormulaFunction("MAX", "netcl_max", np.maximum, "maximum", "nn", c_int="max", np_int=np.maximum),
    FormulaFunction("MIN", "netcl_min", np.minimum, "minimum", "nn", c_int="min", np_int=np.minimum),
    FormulaFunction("WHERE", "netcl_where", np.where, "where", "tnn", c_int="netcl_where", np_int=np.where),
    FormulaFunction("ISNAN", "netcl_isnan", np.isnan, "isnan", gives="t", c_int="netcl_never", np_int=np.isnan),
    FormulaFunction("ISINF", "netcl_isinf", np.isinf, "isinf", gives="t", c_int="netcl_never", np_int=np.isinf),
    FormulaFunction("ISFINITE", "netcl_isfinite", np.isfinite, "isfinite", gives="t", c_int="netcl_always", np_int=np.isfinite),
    FormulaFunction("AND", "netcl_and", np.logical_and, "logical_and", "tt", "t", c_int="netcl_and", np_int=np.logical_and),
    FormulaFunction("OR", "netcl_or", np.logical_or, "logical_or", "tt", "t", c_int="netcl_or", np_int=np.logical_or),
    FormulaFunction("BITAND", "", _integers_only, "bitwise_and", "nn", c_int="netcl_bitand", np_int=np.bitwise_and),
    FormulaFunction("BITOR", "", _integers_only, "bitwise_or", "nn", c_int="netcl_bitor", np_int=np.bitwise_or),
    FormulaFunction("BITXOR", "", _integers_only, "bitwise_xor", "nn", c_int="netcl_bitxor", np_int=np.bitwise_xor),
    FormulaFunction("BITNOT", "", _integers_only, "bitwise_not", c_int="netcl_bitnot", np_int=np.bitwise_not),
    FormulaFunction("SHIFTLEFT", "", _integers_only, "bitwise_left_shift", "nn", c_int="netcl_shiftleft", np_int=shift_left),
    FormulaFunction("SHIFTRIGHT", "", _integers_only, "bitwise_right_shift", "nn", c_int="netcl_shiftright", np_int=shift_right),
    FormulaFunction("NOT", "netcl_not", np.logical_not, "logical_not", "t", "t", c_int="netcl_not", np_int=np.logical_not),
)  # fmt: skip

FORMULA_FUNCTIONS: dict[str, FormulaFunction] = {row.name: row for row in _FUNCTION_ROWS}


def _bits_test(name: str, order: str) -> str:
    """Return the C function ``name(a)``. It compares the bits of ``|a|`` and infinity by the operator ``order``, also under fast math."""
    return f"""mask {name}(real a) {{
  union {{ real value; mask bits; }} x;
  x.value = a;
  const mask top = (mask)(sizeof(element) == 8 ? 0x7ff0000000000000L : 0x7f800000L);
  return (x.bits & (mask)(sizeof(element) == 8 ? 0x7fffffffffffffffL : 0x7fffffffL)) {order} top;
}}"""


def _circular(name: str, near_0: str) -> str:
    """Return the C function ``netcl_{name}(x)``. ``near_0`` is its polynomial for float32 near 0.

    PoCL 3.0 takes its reduction of large angles for a whole vector, in which other lanes near 0 come out as multiples.
    """
    return f"""real netcl_{name}(real x) {{
#ifdef POCL_DEVICE_ADDRESS_BITS
  if (sizeof(element) == 4) return PICK({name}(x), {near_0}, (mask)(fabs(x) < 0.015625f));
#endif
  return {name}(x);
}}"""


def exp_below(kind: str, bits: str) -> str:
    """Return the body of exp for arguments not far above 0, for a float type ``kind`` and the integer type ``bits`` of the same size.

    The result is accurate to an ulp. The body has 16 operations, PoCL's has 27: overflow is not handled, and results below the smallest
    normal number become 0. Adding 1.5 * 2^23 rounds the exponent to an integer and leaves that integer in the low bits.
    """
    return f"""#pragma OPENCL FP_CONTRACT ON
  union {{ {kind} value; {bits} bits; }} sum, power;
  sum.value = x * 1.44269504f + 12582912.0f;
  const {kind} n = sum.value - 12582912.0f;
  const {kind} r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
  {kind} p = r * 1.98412698e-4f + 1.38888889e-3f;
  p = p * r + 8.33333333e-3f;
  p = p * r + 4.16666667e-2f;
  p = p * r + 1.66666667e-1f;
  p = p * r + 0.5f;
  p = p * (r * r) + (r + 1.0f);
  power.bits = (sum.bits + 127) << 23;
  return x < -87.33f ? ({kind})(0.0f) : p * power.value;
"""


def _horner(numbers: tuple[float, ...], variable: str) -> str:
    """Return a polynomial in OpenCL C; ``numbers`` are its coefficients, from the highest power down."""
    text = f"(real)({numbers[0]!r}f)"
    for number in numbers[1:]:
        text = f"({text} * {variable} + (real)({number!r}f))"
    return text


# In a vector of doubles, a dividend of 0, NaN or infinity makes fmod of PoCL 3.0 scale the results of other lanes.
_FMOD = """#ifdef POCL_DEVICE_ADDRESS_BITS
  const mask plain = (mask)((fabs(a) < (real)(INFINITY)) & (a != 0));
  const real r = fmod(PICK((real)(1), a, plain), b) * PICK(a * (real)(0), (real)(1), plain);
#else
  const real r = fmod(a, b);
#endif
"""
#: Functions that OpenCL C lacks, or that treat NaN, signs or zeros differently from NumPy. Emitted only where used.
#: ``PICK(no, yes, mask)`` is the ternary operator, which works on vectors as ``select`` does; PoCL's ``select`` takes ten times longer.
HELPERS: dict[str, str] = {
    # The order of the comparison makes a NaN on either side win; fmax would drop it.
    "netcl_max": "real netcl_max(real a, real b) { return PICK(b, a, (mask)((a > b) | (a != a))); }",
    "netcl_min": "real netcl_min(real a, real b) { return PICK(b, a, (mask)((a < b) | (a != a))); }",
    "netcl_where": "real netcl_where(mask c, real a, real b) { return PICK(b, a, c); }",
    "netcl_and": "mask netcl_and(mask a, mask b) { return a & b; }",
    "netcl_or": "mask netcl_or(mask a, mask b) { return a | b; }",
    "netcl_not": "mask netcl_not(mask a) { return !a; }",
    "netcl_isnan": _bits_test("netcl_isnan", ">"),
    "netcl_isinf": _bits_test("netcl_isinf", "=="),
    "netcl_isfinite": _bits_test("netcl_isfinite", "<"),
    "netcl_bitand": "real netcl_bitand(real a, real b) { return a & b; }",
    "netcl_bitor": "real netcl_bitor(real a, real b) { return a | b; }",
    "netcl_bitxor": "real netcl_bitxor(real a, real b) { return a ^ b; }",
    "netcl_bitnot": "real netcl_bitnot(real a) { return ~a; }",
    "netcl_shiftleft": """real netcl_shiftleft(real a, real b) {
  const real bits = (real)(sizeof(element) * 8);
  return PICK(a << b, (real)(0), (mask)((b < 0) | (b >= bits)));
}""",
    "netcl_shiftright": """real netcl_shiftright(real a, real b) {
  const real last = (real)(sizeof(element) * 8 - 1);
  return a >> PICK(b, last, (mask)((b < 0) | (b > last)));
}""",
    "netcl_sin": _circular("sin", "x * (1 - x * x * (1.0f / 6))"),
    "netcl_cos": _circular("cos", "1 - x * x * 0.5f"),
    "netcl_tan": _circular("tan", "x * (1 + x * x * (1.0f / 3))"),
    "netcl_never": "mask netcl_never(real a) { return a != a; }",
    "netcl_always": "mask netcl_always(real a) { return a == a; }",
    "netcl_same": "real netcl_same(real a) { return a; }",
    # sign() of OpenCL is 0 for NaN and -0 for -0.
    "netcl_sign": "real netcl_sign(real a) { return PICK(sign(a) + (real)(0), a, (mask)((a != a))); }",
    "netcl_isign": "real netcl_isign(real a) { return PICK(PICK((real)(0), (real)(1), (mask)(a > 0)), (real)(-1), (mask)(a < 0)); }",
    "netcl_iabs": "real netcl_iabs(real a) { return PICK(a, -a, (mask)(a < 0)); }",
    # A rational approximation, within 4e-7: drivers of CPUs call their scalar erf lane by lane, at seven times the cost.
    "netcl_erf": """real netcl_erf(real a) {
  const real x = PICK(PICK(a, (real)(4.0f), (mask)(a > 4.0f)), (real)(-4.0f), (mask)(a < -4.0f)), s = x * x;
  real p = s * -2.72614225801306e-10f + 2.77068142495902e-08f;
  p = p * s - 2.10102402082508e-06f;
  p = p * s - 5.69250639462346e-05f;
  p = p * s - 7.34990630326855e-04f;
  p = p * s - 2.95459980854025e-03f;
  p = p * s - 1.60960333262415e-02f;
  real q = s * -1.45660718464996e-05f - 2.13374055278905e-04f;
  q = q * s - 1.68282697438203e-03f;
  q = q * s - 7.37332916720468e-03f;
  q = q * s - 1.42647390514189e-02f;
  const real y = x * p / q;
  return PICK(PICK(y, (real)(1.0f), (mask)(y > 1.0f)), (real)(-1.0f), (mask)(y < -1.0f));
}""",
    "netcl_erfinv": f"""real netcl_erfinv(real x) {{
  const real w = -log((1 - x) * (1 + x)), a = w - (real)(2.5f), b = sqrt(PICK((real)(5), w, (mask)(w > 5))) - (real)(3);
  real y = x * PICK({_horner(_ERFINV[1], "b")}, {_horner(_ERFINV[0], "a")}, (mask)(w < 5));
  if (sizeof(element) == 8) {{  /* as erfinv() of functions.py */
    const real t = (real)(4.330746750799873) - w / 2;
    y = copysign(sqrt(sqrt(t * t + w / (real)(0.147)) - t), x);
    for (int i = 0; i < 2; ++i) {{
      const real beyond = copysign((real)(1), x) * ((1 - fabs(x)) - erfc(fabs(y)));
      const real step = PICK(erf(y) - x, beyond, (mask)(fabs(x) > (real)(0.99f))) * exp(y * y) * (real)(0.886226925452758);
      y -= step / (1 + y * step);
    }}
  }}
  return PICK(PICK(y, x * (real)(INFINITY), (mask)(fabs(x) == 1)), (x - x) / (x - x), (mask)(fabs(x) > 1));
}}""",
    "netcl_expbelow": "real netcl_expbelow(real x) {\n#ifdef POCL_DEVICE_ADDRESS_BITS\n"
    + exp_below("real", "mask")
    + "#else\n  return exp(x);\n#endif\n}",
    "netcl_fmod": f"real netcl_fmod(real a, real b) {{\n{_FMOD}  return r;\n}}",
    "netcl_remainder": f"real netcl_remainder(real a, real b) {{\n{_FMOD}"
    """  const real shifted = PICK(r, r + b, (mask)((r < 0) != (b < 0)));
  return PICK(shifted, copysign((real)(0), b), (mask)(r == 0));
}""",
    # As NumPy and Python: (a - a mod b) / b is an integer up to rounding, floor(a / b) may be one too large.
    "netcl_floordiv": f"real netcl_floordiv(real a, real b) {{\n{_FMOD}"
    """  const real shift = PICK((real)(0), (real)(1), (mask)((r != 0) & ((r < 0) != (b < 0))));
  const real q = (a - r) / b - shift;
  const real low = floor(q);
  const real near = PICK(low, low + (real)(1), (mask)(q - low > (real)(0.5f)));
  const real whole = PICK(near, copysign((real)(0), a / b), (mask)(q == 0));
  return PICK(whole, a / b, (mask)(b == 0));
}""",
    # Division by zero and MIN / -1 trap on x86: both are computed as a division by one.
    "netcl_ifmod": "real netcl_ifmod(real a, real b) { return a % PICK(b, (real)(1), (mask)((b == 0) | ((b == -1) & (b < 0)))); }",
    "netcl_iremainder": """real netcl_iremainder(real a, real b) {
  const real r = a % PICK(b, (real)(1), (mask)((b == 0) | ((b == -1) & (b < 0))));
  return PICK(r, r + b, (mask)((r != 0) & ((r < 0) != (b < 0)) & (b != 0)));
}""",
    "netcl_ifloordiv": """real netcl_ifloordiv(real a, real b) {
  const real d = PICK(b, (real)(1), (mask)((b == 0) | ((b == -1) & (b < 0))));
  const real q = a / d, r = a - q * d;
  const real whole = PICK(q, q - (real)(1), (mask)((r != 0) & ((r < 0) != (d < 0))));
  return PICK(PICK(whole, -a, (mask)((b == -1) & (b < 0))), (real)(0), (mask)(b == 0));
}""",
    "netcl_ipow": """real netcl_ipow(real a, real b) {
  real result = (real)(1), base = a, left = b;
  for (int bit = 0; bit < (int)(sizeof(element) * 8 - 1); ++bit) {
    result = PICK(result, result * base, (mask)((left & 1) != 0));
    base *= base;
    left >>= 1;
  }
  const real odd = PICK((real)(1), a, (mask)((b & 1) != 0));
  const real inverse = PICK((real)(0), odd, (mask)((a == 1) | (a == -1)));
  return PICK(result, inverse, (mask)(b < 0));
}""",
}  # fmt: skip
