"""Generates OpenCL C and NumPy code from rows, for eager kernels, gradients, fused chains and the NumPy backend.

A :class:`Body` is a sequence of assignments. :func:`forward_body` and :func:`vjp_body` make one from a row,
:mod:`netcl.engine.fused_kernel` one from several. :func:`kernel_source` adds loads, stores and the loop; :func:`numpy_function`
compiles it for NumPy.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from netcl.core.dtype import DTYPES, HALVES, DType, decode, encode
from netcl.engine.expression import CText, PythonText, c_name, compose, evaluate
from netcl.engine.functions import HELPERS
from netcl.engine.registry import Pointwise, names_read_by, parse

__all__ = ["Body", "Layout", "Port", "compose", "forward_body", "kernel_source", "numpy_function", "vjp_body"]

#: No contraction to fma: a fused chain then gives the same bits as its ops in separate kernels.
SEPARATE = "#pragma OPENCL FP_CONTRACT OFF"
_NUMPY_TYPES = {"float": "float32", "double": "float64", "int": "int32", "long": "int64", "ulong": "uint64"}
COMPUTE: dict[str, np.dtype[Any]] = {name: np.dtype(kind) for name, kind in _NUMPY_TYPES.items()}
_INFINITE = ("-INFINITY", "INFINITY")
_C_LIMITS = {"float": _INFINITE, "double": _INFINITE, "int": ("INT_MIN", "INT_MAX"), "long": ("LONG_MIN", "LONG_MAX"),
          "ulong": ("0", "ULONG_MAX")}  # fmt: skip
_MASKS = {"float": "int", "double": "long", "ulong": "long"}  # of compute types whose comparisons give another type
#: NumPy's functions for folds, by the expression that combines two values.
UFUNCS = {"v0 + v1": np.add, "v0 * v1": np.multiply, "MAX(v0, v1)": np.maximum, "MIN(v0, v1)": np.minimum}


# ---- bodies


@dataclass(frozen=True, eq=False)
class Body:
    """Assignments ``name = expression`` over loaded values and scalar arguments.

    ``rounds`` maps names to the dtype their value is rounded to, so that a fused chain rounds as separate ops do.
    """

    inputs: tuple[str, ...]
    scalars: tuple[str, ...]
    lines: tuple[tuple[str, ast.expr], ...]
    outputs: tuple[str, ...]
    rounds: Mapping[str, str] = field(default_factory=dict)


class _Rename(ast.NodeTransformer):
    def __init__(self, table: Mapping[str, str]):
        self.table = table

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self.table.get(node.id, node.id), node.ctx)

    def visit_Call(self, node: ast.Call) -> ast.Call:
        return ast.Call(node.func, [self.visit(arg) for arg in node.args], [])


def renamed(tree: ast.expr, table: Mapping[str, str]) -> ast.expr:
    """Return a copy of an expression with its names replaced as in ``table``; other names stay."""
    return _Rename(table).visit(copy.deepcopy(tree))


@lru_cache(maxsize=1024)
def forward_body(row: Pointwise) -> Body:
    """Return the body of a row's forward kernel: ``out`` from ``v0``.. and the parameters."""
    read = names_read_by(row.fwd, row.let) if row.let else ()
    lines = [(name, parse(text)) for name, text in row.let.items() if name in read]
    return Body(tuple(map("v{}".format, range(row.arity))), tuple(row.params), (*lines, ("out", parse(row.fwd))), ("out",))


@lru_cache(maxsize=1024)
def vjp_body(row: Pointwise, wanted: tuple[bool, ...]) -> Body:
    """Return the body of a row's gradient kernel. It computes ``d0``.. of the wanted inputs from ``g`` and the tensors kept for them."""
    texts = {f"d{i}": text for i, text in enumerate(row.vjp) if text and wanted[i]}
    read = frozenset().union(*(names_read_by(text, row.let) for text in texts.values()))
    tensors = tuple(t for t in ("g", "out", *(f"v{i}" for i in range(row.arity))) if t in read)
    lines = [(name, parse(text)) for name, text in row.let.items() if name in read]
    lines += [(name, parse(text)) for name, text in texts.items()]
    return Body(tensors or ("g",), tuple(name for name in row.params if name in read), tuple(lines), tuple(texts))


# ---- NumPy


@lru_cache(maxsize=4096)
def numpy_function(body: Body, compute: str) -> Callable[..., tuple[Any, ...]]:
    """Return the body as a Python function. It takes input arrays of the compute type, then scalars, and returns a tuple."""
    writer = PythonText(COMPUTE[compute])
    writer.env |= {f"to_{name}": partial(as_held, DTYPES[name], COMPUTE[compute]) for name in set(body.rounds.values())}
    exec(compile(numpy_source(body, writer), "<op row>", "exec"), writer.env)
    return writer.env["body"]


def numpy_source(body: Body, writer: PythonText) -> str:
    """Return the Python source that :func:`numpy_function` compiles."""
    text = [f"def body({', '.join((*body.inputs, *body.scalars))}):"]
    for name, tree in body.lines:
        value = evaluate(tree, writer)
        text.append(f"    {name} = {f'to_{body.rounds[name]}({value})' if name in body.rounds else value}")
    return "\n".join([*text, f"    return ({', '.join(body.outputs)},)"])


def as_held(dtype: DType, compute: np.dtype[Any], values: Any) -> Any:
    """Return values of the compute type, rounded to values that ``dtype`` can store."""
    if dtype.name == "bool":
        return (np.asarray(values) != 0).astype(compute)
    return decode(encode(np.asarray(values), dtype), dtype).astype(compute)


# ---- OpenCL: values


class Port(NamedTuple):
    """A tensor argument: its name in the body, its dtype, and whether it has the inner axis."""

    name: str
    dtype: DType
    moves: bool = True


class Layout(NamedTuple):
    """How a kernel iterates: number of outer axes, vector width, alignment, 32- or 64-bit indices.

    - ``half_bits`` (CPUs): halves are converted by :func:`_half_vectors`, because drivers call a function per element for ``vload_half``;
      vectors may be unaligned, because a caller's array may be.
    - ``whole``: rows are whole vectors, one per work-item; without remainder code a GPU moves nearly twice the bytes per second.
    - ``streams``: results bypass a CPU's caches, which would read each line before overwriting it.
    - ``ahead``: prefetch distance in bytes and cache level (3 is L1, 2 is L2).
    """

    rank: int = 0
    width: int = 1
    aligned: bool = True
    integer: str = "int"
    half_bits: bool = False
    whole: bool = False
    streams: bool = False
    ahead: tuple[int, int] | None = None


STREAM_BYTES = 4 << 20  # results of at least this size are streamed: smaller ones are still cached when they are read
LINE = 64  # bytes of a cache line; an aligned vector of this size can bypass the caches
_BOOL, _HALVES = DTYPES["bool"], (DTYPES["float16"], DTYPES["bfloat16"])
_LINES = 4  # stored in sequence: the kernel takes 13 to 22 % less time on x86, 5 % less on ARM


def _vector(kind: str, width: int) -> str:
    return kind if width == 1 else f"{kind}{width}"


def _converted(kind: str, width: int, text: str) -> str:
    """Return a conversion in C; 16 lanes are split, because on PoCL ``convert_x16`` takes four times as long as two ``convert_x8``."""
    return f"CONVERT16({kind}, {text})" if width == 16 else f"convert_{_vector(kind, width)}({text})"


def _halfword_functions(width: int) -> str:
    """Return C functions that reinterpret words as pairs of 16-bit values. On PoCL, a conversion is a call that spills all registers."""
    h, u = f"ushort{width}", f"uint{width}"
    if width == 16:  # there are no vectors of 32
        before = _halfword_functions(8) + "\n"
        words, low = "(uint16)(netcl_words_8(h.lo), netcl_words_8(h.hi))", "(ushort16)(netcl_low_8(x.lo), netcl_low_8(x.hi))"
    else:
        before, twice = "", f"ushort{2 * width}"
        words, low = f"as_{u}(({twice})({', '.join(f'h.s{k:x}, 0' for k in range(width))}))", f"as_{twice}(x).even"
    return f"""{before}#ifndef NETCL_HALFWORDS_{width}
#define NETCL_HALFWORDS_{width}
static inline {u} netcl_words_{width}(const {h} h) {{ return {words}; }}
static inline {h} netcl_low_{width}(const {u} x) {{ return {low}; }}
#endif"""


def _load(dtype: DType, compute: str, layout: Layout) -> str:
    """Return the expression that loads elements ``i..`` of ``p`` in the compute type."""
    width, aligned = layout.width, layout.aligned
    natural = "float" if dtype in _HALVES else dtype.c_storage
    if width == 1:
        text = dtype.load
    elif dtype is _HALVES[0] and layout.half_bits:
        text = f"netcl_of_float16_{width}(((__global const loose_half*)(p + i))->v)"
    elif dtype is _HALVES[0]:
        text = f"vload{'a' if aligned else ''}_half{width}(0, p + i)"
    else:
        text = f"*(__global const {dtype.c_storage}{width}*)(p + i)" if aligned else f"vload{width}(0, p + i)"
        text = f"((__global const loose_{dtype.c_storage}*)(p + i))->v" if layout.half_bits else text
        if dtype is _HALVES[1]:
            words = f"netcl_words_16({text})" if width == 16 else _converted("uint", width, text)
            text = f"as_float{width}({words} << 16)"
    return text if natural == compute else _converted(compute, width, text)


def _store_text(dtype: DType, compute: str, width: int) -> str:
    """Return the expression that converts ``x`` from the compute type to the storage type; for half, to float, because the store rounds."""
    if dtype is _BOOL:
        zero, one = (f"({_vector(compute, width)})({digit})" for digit in "01")
        kind = _vector(_MASKS.get(compute, compute), width)
        return _converted("uchar", width, f"PICK({zero}, {one}, ({kind})(x != {zero}))")
    if dtype in _HALVES:
        wide = "x" if compute == "float" else _converted("float", width, "x")
        return wide if dtype is _HALVES[0] else f"netcl_bfloat16_{width}({wide})"
    if dtype.narrow and compute in ("float", "double"):  # beyond the range, the low bits: a conversion to an unsigned type may saturate
        return _converted(dtype.c_storage, width, _converted(dtype.c_compute, width, "x"))
    return "x" if dtype.c_storage == compute else _converted(dtype.c_storage, width, "x")


def _store(dtype: DType, compute: str, layout: Layout) -> str:
    width, aligned = layout.width, layout.aligned
    value = _store_text(dtype, compute, width)
    if dtype is _HALVES[0] and layout.half_bits and width > 1:
        return f"((__global loose_half*)(p + i))->v = netcl_to_float16_{width}({value})"
    if dtype is _HALVES[0]:
        return f"vstore_half_rte({value}, i, p)" if width == 1 else f"vstore{'a' if aligned else ''}_half{width}_rte({value}, 0, p + i)"
    if width == 1:
        return f"p[i] = {value}"
    if layout.half_bits:
        return f"((__global loose_{dtype.c_storage}*)(p + i))->v = {value}"
    return f"*(__global {dtype.c_storage}{width}*)(p + i) = {value}" if aligned else f"vstore{width}({value}, 0, p + i)"


def _bfloat16_words(width: int) -> str:
    """Return functions that convert between float and bfloat16 in the low bits of ``uint``. They round to nearest even and keep NaN."""
    f, u, mask = (_vector(kind, width) for kind in ("float", "uint", "int"))
    return f"""#ifndef NETCL_BFLOAT16_WORDS_{width}
#define NETCL_BFLOAT16_WORDS_{width}
{f} netcl_of_bfloat16_word_{width}({u} bits) {{ return as_{f}(bits << 16); }}
{u} netcl_bfloat16_word_{width}({f} x) {{
  const {u} bits = as_{u}(x), rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return PICK(rounded, (bits >> 16) | 0x40u, ({mask})(x != x));
}}
#endif"""


def _half_words(width: int) -> str:
    """Return functions that convert between float and half in the low bits of ``uint``, including denormals; they round to nearest even."""
    f, u = (_vector(kind, width) for kind in ("float", "uint"))
    return f"""#ifndef NETCL_FLOAT16_WORDS_{width}
#define NETCL_FLOAT16_WORDS_{width}
{f} netcl_of_float16_word_{width}({u} bits) {{
  const {u} rest = (bits & 0x7fffu) << 13, finite = as_{u}(as_{f}(rest) * 0x1p112f);
  const {u} value = PICK(finite, rest | 0x7f800000u, rest >= 0x0f800000u);
  return as_{f}(value | ((bits & 0x8000u) << 16));
}}
{u} netcl_float16_word_{width}({f} x) {{
  const {u} sign = as_{u}(x) & 0x80000000u, bits = as_{u}(x) ^ sign;
  const {u} normal = (bits - 0x38000000u + 0xfffu + ((bits >> 13) & 1u)) >> 13;
  const {u} small = as_{u}(as_{f}(bits) + 0.5f) - 0x3f000000u;
  const {u} large = PICK(({u})(0x7c00u), ({u})(0x7e00u), bits > 0x7f800000u);
  const {u} value = PICK(PICK(normal, small, bits < 0x38800000u), large, bits >= 0x47800000u);
  return value | (sign >> 16);
}}
#endif"""


def _bfloat16(width: int) -> str:
    f, s = (_vector(kind, width) for kind in ("float", "ushort"))
    low = "netcl_low_16(value)" if width == 16 else _converted("ushort", width, "value")
    return f"""{_bfloat16_words(width)}
{s} netcl_bfloat16_{width}({f} x) {{ const {_vector("uint", width)} value = netcl_bfloat16_word_{width}(x); return {low}; }}"""


def _half_vectors(dtype: str, width: int) -> str:
    """Return C functions that convert 16-bit floats in ``ushort`` to floats and back; if the target has F16C (x86), by its instructions."""
    f, h = f"float{width}", f"ushort{width}"
    of, to = f"static inline {f} netcl_of_{dtype}_{width}(const {h} h)", f"static inline {h} netcl_to_{dtype}_{width}(const {f} x)"
    text = f"""{_halfword_functions(width)}
{_bfloat16_words(width) if dtype == "bfloat16" else _half_words(width)}
{of} {{ return netcl_of_{dtype}_word_{width}(netcl_words_{width}(h)); }}
{to} {{ return netcl_low_{width}(netcl_{dtype}_word_{width}(x)); }}"""
    if dtype == "float16":
        text = f"""#ifdef __F16C__
typedef __fp16 netcl_fp16_{width} __attribute__((ext_vector_type({width})));
{of} {{ return __builtin_convertvector(__builtin_astype(h, netcl_fp16_{width}), {f}); }}
{to} {{ return __builtin_astype(__builtin_convertvector(x, netcl_fp16_{width}), {h}); }}
#else
{text}
#endif"""
    return f"#ifndef NETCL_{dtype.upper()}_{width}\n#define NETCL_{dtype.upper()}_{width}\n{text}\n#endif"


_PICK = "#define PICK(no, yes, mask) ((mask) ? (yes) : (no))"


def loose_halves(dtype: str, width: int, packed: bool = True) -> str:
    """Return the functions ``load_<dtype>_<width>`` and ``store_<dtype>_<width>`` for ``width`` 16-bit floats.

    They may lie at any address or, unless ``packed``, at multiples of their size.
    """
    f, h = f"float{width}", f"ushort{width}"
    return f"""#ifndef PICK
{_PICK}
#endif
{_half_vectors(dtype, width)}
typedef struct {"__attribute__((packed)) " if packed else ""}{{ {h} v; }} loose_{dtype}_{width};
static inline {f} load_{dtype}_{width}(__global const void* p) {{
  return netcl_of_{dtype}_{width}(((__global const loose_{dtype}_{width}*)p)->v);
}}
static inline void store_{dtype}_{width}(const {f} x, __global void* p) {{
  ((__global loose_{dtype}_{width}*)p)->v = netcl_to_{dtype}_{width}(x);
}}
"""


def _load_function(dtype: DType, compute: str, layout: Layout) -> str:
    head = f"real load_{dtype.name}(__global const {dtype.c_storage}* p, {layout.integer} i, {layout.integer} left) {{"
    whole = _load(dtype, compute, layout)
    if layout.width == 1 or layout.whole:
        return f"{head} return {whole}; }}"
    return f"""{head}
  if (left >= {layout.width}) return {whole};
  return load_{dtype.name}_tail(p, i, left);
}}"""


def _tail_function(dtype: DType, compute: str, layout: Layout) -> str:
    lane = dtype.load.replace("(i,", "(i + k,").replace("p[i]", "p[i + k]")
    return f"""real load_{dtype.name}_tail(__global const {dtype.c_storage}* p, {layout.integer} i, {layout.integer} left) {{
  {compute} lanes[{layout.width}];
  for (int l = 0; l < {layout.width}; ++l) {{
    const {layout.integer} k = l < left ? l : 0;
    lanes[l] = ({compute})({lane});
  }}
  return vload{layout.width}(0, lanes);
}}"""


def _store_function(dtype: DType, compute: str, layout: Layout) -> str:
    head = f"void store_{dtype.name}(__global {dtype.c_storage}* p, {layout.integer} i, {layout.integer} left, real x)"
    if layout.width == 1 or layout.whole:
        return f"{head} {{ {_store(dtype, compute, layout)}; }}"
    lane = f"void store_{dtype.name}_lane(__global {dtype.c_storage}* p, {layout.integer} i, {compute} x)"
    return f"""{lane} {{ {_store(dtype, compute, layout._replace(width=1))}; }}
{head} {{
  if (left >= {layout.width}) {{
    {_store(dtype, compute, layout)};
    return;
  }}
  {compute} lanes[{layout.width}];
  vstore{layout.width}(x, 0, lanes);
  for (int l = 0; l < left; ++l) store_{dtype.name}_lane(p, i + l, lanes[l]);
}}"""


def _stream_function(dtype: DType, compute: str, layout: Layout) -> str:
    value, vector = _store_text(dtype, compute, layout.width), f"{dtype.c_storage}{layout.width}"
    head = f"void stream_{dtype.name}(__global {dtype.c_storage}* p, {layout.integer} i, real x)"
    return f"{head} {{ __builtin_nontemporal_store({value}, (__global {vector}*)(p + i)); }}"


def value_functions(loads: Sequence[DType], stores: Sequence[DType], compute: str, layout: Layout, rounds: Sequence[str] = ()) -> str:
    """Return the typedefs and the load and store functions of every dtype that a kernel uses."""
    width, lanes, mask = layout.width, "" if layout.width == 1 else layout.width, _MASKS.get(compute, compute)
    of, held = {}, set(rounds)  # C types of storage; names of the dtypes that are loaded, stored or rounded to
    for d in (*loads, *stores):
        of[d.c_storage] = "ushort" if d is _HALVES[0] else d.c_storage
        held.add(d.name)
    parts = [_PICK]
    if width == 16:
        parts.append("#define CONVERT16(kind, x) ((kind##16)(convert_##kind##8((x).lo), convert_##kind##8((x).hi)))")
    parts += [f"typedef {compute} element;", f"typedef {compute}{lanes} real;", f"typedef {mask}{lanes} mask;"]
    if layout.half_bits and width > 1:
        parts += [f"typedef struct __attribute__((packed)) {{ {kind}{width} v; }} loose_{name};" for name, kind in of.items()]
    if compute == "double" or "float64" in held:
        parts.insert(0, "#pragma OPENCL EXTENSION cl_khr_fp64 : enable")
    if width == 16 and not held.isdisjoint(HALVES):
        parts.append(_halfword_functions(16))
    if _HALVES[1] in stores or "bfloat16" in rounds:
        parts += [_bfloat16(w) for w in sorted({1, width})]
    if layout.half_bits and width > 1 and _HALVES[0] in (*loads, *stores):
        parts.append(_half_vectors("float16", width))
    if rounds:
        parts.append(rounding_functions(rounds, compute, layout))
    for dtype in dict.fromkeys(loads):
        if width > 1 and not layout.whole:
            parts.append(_tail_function(dtype, compute, layout))
        parts.append(_load_function(dtype, compute, layout))
    parts += [_store_function(dtype, compute, layout) for dtype in dict.fromkeys(stores)]
    if layout.streams:
        parts += [_stream_function(dtype, compute, layout) for dtype in dict.fromkeys(stores) if dtype.itemsize * width == LINE]
    return "\n".join(filter(None, parts))


_HELPER_TEXTS = {"netcl_number": "real netcl_number(mask t) { return PICK((real)(0), (real)(1), t); }", **HELPERS}


def helper_functions(text: str) -> str:
    """Return the definitions of the helpers that a piece of C calls."""
    used = set(re.findall(r"\bnetcl_[a-z]+\b", text))
    return "\n".join([definition for name, definition in _HELPER_TEXTS.items() if name in used]) if used else ""


def statements(body: Body, compute: str) -> list[str]:
    """Return the body's assignments in C."""
    writer = CText(compute)
    return [f"const real {c_name(name)} = {rounded(body.rounds.get(name), writer.statement(tree))};" for name, tree in body.lines]


def c_function(name: str, text: str, arguments: Sequence[str], compute: str) -> str:
    """Return a C function of vectors that computes a formula."""
    (line,) = statements(Body((), (), (("result", parse(text)),), ()), compute)
    return f"real {name}({', '.join(f'const real {a}' for a in arguments)}) {{ {line} return result_; }}"


def folded_lanes(combine: str, width: int) -> str:
    """Return C that combines all lanes of ``x`` with the function ``combine``, by rotations; every lane gets the result."""
    turns = {by: "".join(f"{(lane + by) % width:x}" for lane in range(width)) for by in (8, 4, 2, 1) if by < width}
    return "".join(f" x = {combine}(x, x.s{lanes});" for lanes in turns.values())


def c_neutral(neutral: str, compute: str) -> str:
    """Return the neutral element of a fold as a vector in C."""
    low, high = _C_LIMITS[compute]
    return f"((real)({ {'LOWEST': low, 'HIGHEST': high}.get(neutral, neutral) }))"


def rounded(dtype: str | None, text: str) -> str:
    """Return the expression that rounds a value to ``dtype`` by :func:`rounding_functions`; ``text`` itself for ``None``."""
    return text if dtype is None else f"as_{dtype}_holds({text})"


def rounding_functions(names: Iterable[str], compute: str, layout: Layout) -> str:
    """Return the C functions that expressions of :func:`rounded` call."""
    w, parts = layout.width, []
    names = set(names)
    wide, back = ("x", "{}") if compute == "float" else (_converted("float", w, "x"), _converted(compute, w, "{}"))
    if "float16" in names:
        parts.append(_half_words(w))
        value = f"netcl_of_float16_word_{w}(netcl_float16_word_{w}({wide}))"
        parts.append(f"real as_float16_holds(real x) {{ return {back.format(value)}; }}")
    if "bfloat16" in names:
        value = f"netcl_of_bfloat16_word_{w}(netcl_bfloat16_word_{w}({wide}))"
        parts.append(f"real as_bfloat16_holds(real x) {{ return {back.format(value)}; }}")
    if "bool" in names:
        parts.append("real as_bool_holds(real x) { return PICK((real)(0), (real)(1), (mask)(x != (real)(0))); }")
    return "\n".join(parts)


# ---- OpenCL: kernels


def _row_offsets(inputs: Sequence[Port], outputs: Sequence[Port], layout: Layout) -> list[str]:
    index = layout.integer
    text = [f"const {index} per_row = (inner + chunk - 1) / chunk;", f"const {index} row = item / per_row;", "if (row >= rows) return;"]
    text += [f"p_{port.name} += row / {_inner_sizes(layout, 0)} * step_{port.name}_0;" for port in inputs]
    for d in range(1, layout.rank):
        text.append(f"const {index} at{d} = row / {_inner_sizes(layout, d)} % size{d};")
        text += [f"p_{port.name} += at{d} * step_{port.name}_{d};" for port in inputs]
    text += [f"q_{port.name} += row * inner;" for port in outputs]
    return [*text, f"const {index} begin = (item - row * per_row) * chunk;"]


def _inner_sizes(layout: Layout, above: int) -> str:
    inner = [f"size{d}" for d in range(above + 1, layout.rank)]
    return f"({' * '.join(inner)})" if inner else "1"


def kernel_source(name: str, body: Body, inputs: Sequence[Port], outputs: Sequence[Port], compute: str, layout: Layout) -> str:
    """Return a complete program with the one kernel ``op_<name>``.

    Arguments: inputs, outputs, constants and scalars of the body, ``inner`` (elements of a row) and ``chunk`` (elements of a
    work-item). If there are outer axes: also ``rows``, the sizes of all outer axes but the first, and each input's strides.
    """
    lines, index = statements(body, compute), layout.integer
    known, start = {p.name for p in inputs}, [f"const {index} item = get_global_id(0);"]
    start += _row_offsets(inputs, outputs, layout) if layout.rank else [f"const {index} begin = item * chunk;"]
    start += [f"const {index} end = min(begin + chunk, inner);"]
    parameters = [f"__global const {p.dtype.c_storage}* p_{p.name}" for p in inputs]
    parameters += [f"__global {p.dtype.c_storage}* q_{p.name}" for p in outputs]
    for n in (*body.inputs, *body.scalars):
        if n not in known:
            parameters.append(f"const {compute} a_{n}")
            start.append(f"const real {c_name(n)} = (real)(a_{n});")
    parameters += [f"const {index} inner", f"const {index} chunk"]
    if layout.rank:
        parameters += [f"const {index} rows", *[f"const {index} size{d}" for d in range(1, layout.rank)]]
        parameters += [f"const {index} step_{p.name}_{d}" for p in inputs for d in range(layout.rank)]
    start += [f"const real {p.name} = (real)({scalar_load(p, compute, f'p_{p.name}')});" for p in inputs if not p.moves]
    values = value_functions([p.dtype for p in inputs if p.moves], [p.dtype for p in outputs], compute, layout, list(body.rounds.values()))
    signature = ",\n    ".join(parameters)
    return f"""{values}
{helper_functions(" ".join(lines))}
{SEPARATE}
__kernel void op_{name}(
    {signature}) {{
  {(chr(10) + "  ").join(start)}
  {_loop_text(lines, inputs, outputs, layout)}
}}
"""


def _loop_text(lines: Sequence[str], inputs: Sequence[Port], outputs: Sequence[Port], layout: Layout) -> str:
    """Return the loop from ``begin`` to ``end``: streamed whole vectors first, if any, then the remainder."""
    index, width = layout.integer, layout.width
    loop = [f"const real {p.name} = load_{p.dtype.name}(p_{p.name}, i, left);" for p in inputs if p.moves] + list(lines)
    stores = {p: f"store_{p.dtype.name}(q_{p.name}, i, left, {p.name});" for p in outputs}
    rest = "\n    ".join([f"const {index} left = end - i;", *loop, *stores.values()])
    if layout.whole:
        return f"if (begin < end) {{\n    const {index} i = begin;\n    {rest}\n  }}"
    streams = [p for p in outputs if p.dtype.itemsize * width == LINE] if layout.streams else []
    if not streams:
        return f"for ({index} i = begin; i < end; i += {width}) {{\n    {rest}\n  }}"
    ahead = prefetches((f"p_{p.name} + i" for p in inputs if p.moves), layout)
    held = {p: f"held_{p.name}[line] = {p.name};" for p in streams}
    return f"""{index} first = begin;
  {_stream_loop([*ahead, *loop, *(stores | held).values()], streams, layout)}
  for ({index} i = first; i < end; i += {width}) {{
    {rest}
  }}"""


def prefetches(pointers: Iterable[str], layout: Layout) -> list[str]:
    """Return prefetch statements for some pointers; none if the layout has no prefetch distance."""
    if layout.ahead is None:
        return []
    distance, level = layout.ahead
    return [f"__builtin_prefetch((const void*)((size_t)({pointer}) + {distance}), 0, {level});" for pointer in pointers]


def _stream_loop(body: Sequence[str], streams: Sequence[Port], layout: Layout) -> str:
    """Return the loop over whole vectors. Each result is a whole cache line, and several lines are stored at a time.

    Alignment is tested once, before the loop: Intel's compiler merges two conditional streaming stores into one ordinary store.
    """
    index, width = layout.integer, layout.width
    asked = " && ".join(f"((size_t)(q_{p.name} + begin) & {LINE - 1}) == 0" for p in streams)
    lines = f"""#pragma unroll
    for (int line = 0; line < {_LINES}; ++line)"""
    out = " ".join(f"stream_{p.dtype.name}(q_{p.name}, first + {width} * line, held_{p.name}[line]);" for p in streams)
    return f"""if ({asked}) for (; first + {_LINES * width} <= end; first += {_LINES * width}) {{
    real {", ".join(f"held_{p.name}[{_LINES}]" for p in streams)};
    {lines} {{
      const {index} i = first + {width} * line, left = {width};
      {(chr(10) + "      ").join(body)}
    }}
    {lines} {{ {out} }}
  }}"""


def scalar_load(port: Port, compute: str, pointer: str) -> str:
    """Return C that loads the element at a pointer as a scalar of the compute type."""
    text = port.dtype.load.replace("p[i]", f"{pointer}[0]").replace("(i, p)", f"(0, {pointer})")
    return f"({compute})({text})"
