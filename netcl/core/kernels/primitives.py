"""Tools for kernel authors: a declarative kernel, the macros that bodies may use, and a tuner of work-group sizes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from netcl.core import dtype as dtypes
from netcl.core import platforms, recording
from netcl.core.errors import DeviceError, KernelBuildError, ShapeError, message
from netcl.core.hooks import hooks
from netcl.core.kernels import program

PRIMITIVE_PREAMBLE = Path(__file__).with_name("preamble.cl").read_text()

#: Rounds to nearest even; a NaN whose payload sits in the low half stays a NaN instead of becoming infinity.
BFLOAT16_STORE = """
static inline ushort netcl_to_bfloat16(float x) {
  const uint u = as_uint(x);
  return (ushort)(x != x ? ((u >> 16) | 0x40u) : ((u + 0x7fffu + ((u >> 16) & 1u)) >> 16));
}
"""
MACRO_NAMES = tuple(re.findall(r"^#define (\w+)", PRIMITIVE_PREAMBLE, re.M))
_FUNCTIONS = frozenset(
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt cbrt sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh erf erfc "
    "fabs fmin fmax fma mad floor ceil round rint trunc fmod pow pown powr hypot sign clamp mix step smoothstep isnan isinf isfinite "
    "select min max abs native_exp native_log native_sqrt native_rsqrt native_sin native_cos convert_float convert_int".split()
)
_TOKEN = re.compile(
    r"\s*(?:(?P<name>[A-Za-z_]\w*)|(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?[fF]?)|(?P<sign>&&|\|\||[<>=!]=|[-+*/%(),<>!?:&|]))", re.A
)
#: Build options that a kernel may have: each is one word without quotes, or ``-D NAME``; none can add text to the source.
_OPTION = re.compile(r"-D ?[A-Za-z_]\w*(=[-+*/%().,\w]*)?|-cl-[-\w.=]+|-I[-\w./+]+|-w|-Werror|-g", re.A)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.A)
_OPENING = frozenset("- + * / % ( , < > ! ? : & | && || <= >= == !=".split())  # tokens that precede a value
_COMMENT_OR_DIGRAPH = re.compile(r"//|/\*|<:|:>|<%|%>|%:|\+\+|--")  # and digraphs, which are alternative spellings of brackets and #
_FP16 = "#ifdef cl_khr_fp16\n#pragma OPENCL EXTENSION cl_khr_fp16 : enable\n#endif\n"


@dataclass(frozen=True)
class KernelSpec:
    """A kernel as data: either a complete ``src``, or ``params`` and a ``body`` from which the definition is built.

    A ``body`` is preceded by ``preamble``. A ``src`` is preceded by :data:`PRIMITIVE_PREAMBLE`, unless it defines a name of
    that preamble.

    >>> print(KernelSpec("nop", params=["__global float* x"], body="x[0] = 1.0f;").to_source())
    __kernel void nop(__global float* x) {
      x[0] = 1.0f;
    }
    <BLANKLINE>
    """

    name: str
    params: Sequence[str] = ()
    preamble: str = ""
    body: str = ""
    src: str = ""
    options: Sequence[str] = ()
    guarded: bool = False  # the body returns beyond its element count, so a global size may be rounded up
    tuner: WorkGroupTuner | None = None  # measures local sizes; the last arguments must be the output and the element count

    def __post_init__(self) -> None:
        if bool(self.body) == bool(self.src):
            what = f"exactly one of src and body must be given, got {'both' if self.src else 'neither'}"
            raise KernelBuildError(message("KernelSpec", what, name=self.name))
        if not _IDENTIFIER.fullmatch(self.name):
            raise KernelBuildError(message("KernelSpec", "name must be a C identifier", name=repr(self.name)))
        for option in self.options:
            if not _OPTION.fullmatch(option):
                known = "one option per string: -DNAME=value, -cl-..., -Ifolder, -w, -Werror or -g"
                raise KernelBuildError(message(self.name, "every build option must have a known form", known, option=repr(option)))
        if self.tuner is not None and not self.guarded:
            remedy = "measure an unguarded kernel with netcl.profiling.local_sizes.autotune_local_size"
            raise KernelBuildError(message("KernelSpec", "a tuner requires guarded=True", remedy, name=self.name))

    def to_source(self) -> str:
        """Return the complete OpenCL C text."""
        if self.src:
            return self.src if _defines_a_macro(self.src) else f"{PRIMITIVE_PREAMBLE}\n{self.src}"
        head = f"{self.preamble.rstrip()}\n\n" if self.preamble else ""
        return f"{head}__kernel void {self.name}({', '.join(self.params)}) {{\n  {self.body.strip()}\n}}\n"

    def build(self, where: Any) -> BuiltKernel:
        """Return the kernel compiled for a context, a queue or a device handle; the program is cached."""
        context = getattr(where, "context", where)
        if context is None:
            platforms.opencl()  # raises if pyopencl is missing
            what = "a kernel requires an OpenCL device, got the NumPy backend"
            raise DeviceError(message(self.name, what, "choose one with netcl.device('cl')"))
        built = program.build(context, self.to_source(), tuple(self.options))
        return BuiltKernel(self, built.kernel(self.name))

    def run(self, queue: Any, global_size: program.LaunchSize, local_size: program.LaunchSize | None, *args: Any) -> Any:
        """Build the kernel if necessary and enqueue it; returns the event."""
        return self.build(queue).run(queue, global_size, local_size, *args)


def _defines_a_macro(src: str) -> bool:
    names = "|".join(MACRO_NAMES)
    declared = rf"\b[A-Za-z_]\w*[\s*]+({names})\s*(\([^;{{}}]*\)\s*{{|[=;,\[])"
    return re.search(rf"#\s*define\s+({names})\b|{declared}", src) is not None


class BuiltKernel:
    """A compiled kernel: call it, or ``run`` it, with Tensors, buffers and Python numbers.

    A local size of ``None`` selects a measured one (``netcl.profiling.local_sizes``) or else a safe one. A local size that does not
    divide the global size is reduced to one that does, unless the kernel is ``guarded``. With a tuner, the first launch of a global size
    measures the candidates, unless a step is being recorded.
    """

    def __init__(self, spec: KernelSpec, kernel: program.Kernel):
        self.spec = spec
        self.kernel = kernel
        self.name = spec.name

    def run(self, queue: Any, global_size: program.LaunchSize, local_size: program.LaunchSize | None, *args: Any) -> Any:
        """Enqueue on ``queue``; returns the event, or ``None`` if a global size is 0."""
        queue = getattr(queue, "queue", queue)
        for arg in args:
            if hasattr(arg, "host_ref"):
                arg.host_ref = None  # the kernel may write to it
        sizes = (global_size,) if isinstance(global_size, int) else tuple(int(n) for n in global_size)
        if any(n < 0 for n in sizes):
            raise ShapeError(message(self.name, "global_size must not be negative", global_size=sizes))
        return self.kernel(queue, sizes, self._local(queue, sizes, local_size, args), *args)

    __call__ = run

    def _local(
        self, queue: Any, sizes: tuple[int, ...], local_size: program.LaunchSize | None, args: Sequence[Any] = ()
    ) -> tuple[int, ...] | None:
        if self.kernel.required_local is not None or 0 in sizes:
            return None
        wanted = self._measured(queue, sizes, args) or (256, 1, 1)[: len(sizes)] if local_size is None else local_size
        local = self.kernel.clamp((wanted,) if isinstance(wanted, int) else tuple(wanted))
        if len(local) != len(sizes):
            what = "global_size and local_size must have the same number of dimensions"
            raise ShapeError(message(self.name, what, global_size=sizes, local_size=local))
        return local if self.spec.guarded else tuple(largest_divisor(n, most) for n, most in zip(sizes, local, strict=True))

    def slot(self, sizes: tuple[int, ...]) -> tuple[Any, ...]:
        """Return the key under which the context state keeps the local size of this kernel for a global size."""
        return ("local size", self.kernel.program.key, self.name, sizes)

    def _measured(self, queue: Any, sizes: tuple[int, ...], args: Sequence[Any]) -> tuple[int, ...] | None:
        """Return the stored local size for a global size, or ``None``; a tuner measures a missing one, unless a step is being recorded."""
        known, slot = self.kernel.program.state, self.slot(sizes)
        if slot not in known:
            tuner = self.spec.tuner if (len(sizes), len(args)) == (1, len(self.spec.params)) else None
            if tuner is not None and recording.active.recorder is not None:  # launches that measure must not be replayed
                return (tuner.choose_local_size(queue.device),)
            known[slot] = hooks.upper(".profiling.local_sizes").tuned(queue, self, sizes, None if tuner is None else args)
        return known[slot]


@lru_cache(maxsize=4096)
def largest_divisor(n: int, limit: int) -> int:
    """Return the largest divisor of ``n`` that is at most ``limit``.

    >>> largest_divisor(1000, 256)
    250
    """
    return next(d for d in range(min(n, limit), 0, -1) if n % d == 0)


@dataclass(frozen=True)
class WorkGroupTuner:
    """Chooses a local size that a device allows, and rounds a global size up to a multiple of it.

    Kernels of a :class:`PrimitiveBuilder` measure the :meth:`candidates` at the first launch of a size, see :class:`BuiltKernel`.
    """

    max_local: int = 256

    def candidates(self, device: Any) -> tuple[int, ...]:
        """List the local sizes to measure: the default, then smaller ones."""
        most = self.choose_local_size(device)
        return tuple(most >> step for step in range(4) if most >> step)

    def choose_local_size(self, device: Any) -> int:
        """Return the largest power of two within ``max_local`` and the device's limit."""
        limit = min(self.max_local, int(device.max_work_group_size), int(device.max_work_item_sizes[0]))
        return 1 << (max(1, limit).bit_length() - 1)

    def global_local_sizes(self, n: int, device: Any) -> tuple[tuple[int], tuple[int]]:
        """Return launch sizes that cover ``n`` elements; the kernel must guard the surplus work-items."""
        local = self.choose_local_size(device)
        return (-(-max(n, 1) // local) * local,), (local,)


def check_expression(expression: str, arity: int, op: str = "elementwise") -> None:
    """Raise for comments, unbalanced parentheses, and names other than ``v0 .. v{arity-1}``, the macros and math functions."""
    known = {f"v{i}" for i in range(arity)} | set(MACRO_NAMES) | _FUNCTIONS
    hidden = _COMMENT_OR_DIGRAPH.search(expression)
    if hidden:
        raise KernelBuildError(message(op, f"the expression must not contain {hidden[0]!r}", expression=repr(expression)))
    position, depth, before = 0, 0, "("
    while position < len(expression.rstrip()):
        token = _TOKEN.match(expression, position)
        if token is None:
            what = f"the expression must not contain {expression[position:].strip()[0]!r}"
            raise KernelBuildError(message(op, what, expression=repr(expression)))
        if token["name"] and token["name"] not in known:
            remedy = f"known: v0..v{arity - 1}, {' '.join(MACRO_NAMES)} and OpenCL's math functions"
            raise KernelBuildError(message(op, f"unknown name {token['name']}", remedy, expression=repr(expression)))
        sign = token["sign"] or ""
        depth += (sign == "(") - (sign == ")")
        if depth < 0 or (sign == "," and not depth):
            what = f"{sign!r} must {'close' if sign == ')' else 'be inside'} an open parenthesis"
            raise KernelBuildError(message(op, what, expression=repr(expression)))
        if sign in ("*", "&") and before in _OPENING:
            raise KernelBuildError(message(op, f"{sign!r} needs a value on its left", expression=repr(expression)))
        position, before = token.end(), sign or "value"
    if depth:
        raise KernelBuildError(message(op, "every parenthesis must be closed", expression=repr(expression)))
    if not expression.strip():
        raise KernelBuildError(message(op, "the expression must not be empty"))


@dataclass(frozen=True)
class PrimitiveBuilder:
    """Builds elementwise kernels from expressions.

    >>> spec = PrimitiveBuilder().elementwise_spec("mul_add", arity=2, expression="MUL(ADD(v0, v1), 2.0f)")
    >>> spec.params[-1]
    'const int n'
    """

    dtype: str = "float"
    tuner: WorkGroupTuner | None = WorkGroupTuner()  # None: the largest local size up to 256, unmeasured

    def elementwise_spec(self, name: str, arity: int, expression: str, options: Sequence[str] = ()) -> KernelSpec:
        """Return a kernel that sets ``out[i]`` to the expression, with ``v0 = in0[i]`` and so on; it takes inputs, ``out``, ``int n``."""
        if arity < 1:
            raise ShapeError(message(name, "arity must be at least 1", arity=arity))
        check_expression(expression, arity, name)
        row = dtypes.lookup(self.dtype, name)
        ins = [f"__global const {row.c_storage}* in{i}" for i in range(arity)]
        loads = "\n  ".join(f"const {row.c_compute} v{i} = LOAD(in{i}, i);" for i in range(arity))
        body = f"const int i = get_global_id(0);\n  if (i >= n) return;\n  {loads}\n  STORE(out, i, {expression});"
        params = [*ins, f"__global {row.c_storage}* out", "const int n"]
        storage = f"{_NEEDS.get(row.name, '')}#define LOAD(p, i) ({row.load})\n#define STORE(p, i, x) {row.store}\n"
        return KernelSpec(name, params, storage + PRIMITIVE_PREAMBLE, body, options=tuple(options), guarded=True, tuner=self.tuner)


_NEEDS = {"float16": _FP16, "bfloat16": BFLOAT16_STORE, "float64": "#pragma OPENCL EXTENSION cl_khr_fp64 : enable\n"}


@lru_cache(maxsize=1024)
def storage_macros(**operands: str) -> str:
    """Return macros for each named operand of a ``.cl`` file: ``A_T`` storage type, ``A_REAL`` compute type, ``A_LOAD``, ``A_STORE``.

    >>> print(storage_macros(A="float16").splitlines()[-2])
    #define A_LOAD(p, i) (vload_half(i, p))
    """
    needs = "".join([_NEEDS[dtype] for dtype in sorted(_NEEDS.keys() & operands.values())])
    for name, dtype in operands.items():
        row = dtypes.DTYPES[dtype]
        needs += f"#define {name}_T {row.c_storage}\n#define {name}_REAL {row.c_compute}\n"
        needs += f"#define {name}_LOAD(p, i) ({row.load})\n#define {name}_STORE(p, i, x) {row.store}\n"
    return needs


@lru_cache(maxsize=256)
def cl_source(module_file: str, name: str) -> str:
    """Return the text of the ``.cl`` file ``name`` beside a module: ``cl_source(__file__, "pool.cl")``."""
    return Path(module_file).with_name(name).read_text()


def build_elementwise_kernel(
    context: Any, name: str, arity: int, expression: str, dtype: str = "float", options: Sequence[str] | None = None
) -> tuple[KernelSpec, BuiltKernel | None]:
    """Return the spec of an elementwise kernel and the compiled kernel, which is ``None`` for ``context=None``.

    Half kernels store halves and compute in float32, which every device supports. They are built with ``-cl-fast-relaxed-math``,
    so do not use them where NaN must be preserved.
    """
    half = dtypes.lookup(dtype, name).name == "float16"
    flags = [*(options or ()), *(["-cl-fast-relaxed-math"] if half else [])]
    spec = PrimitiveBuilder(dtype=dtype).elementwise_spec(name, arity, expression, flags)
    return spec, None if context is None else spec.build(context)
