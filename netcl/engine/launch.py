"""Helpers of structured ops: convert and check inputs, get a kernel from a ``.cl`` file, run on NumPy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from netcl.core import dtype as dtypes
from netcl.core.commands import check_planning
from netcl.core.device import get_active_device, profile_of, require
from netcl.core.errors import DeviceError, DtypeError, ShapeError, message
from netcl.core.hooks import hooks
from netcl.core.kernels import primitives, program
from netcl.core.nested import map_leaves, tensors_in
from netcl.core.tensor import Tensor, wrap_array
from netcl.engine.functions import exp_below
from netcl.engine.operands import from_values

FLOATS = tuple(dtypes.NAMES[name] for name in ("float32", "float16", "bfloat16", "float64"))
INTEGERS = tuple(name for name, row in dtypes.DTYPES.items() if 0 < row.rank < 40)
NUMBERS = (*FLOATS, *INTEGERS)
FETCHING = ("pocl", "intel")  # brands of CPU drivers whose compiler has __builtin_prefetch
# Prefetch distance in bytes, and the cache level to prefetch into: 3 is L1, 2 is L2. The larger distance takes 8 % less time on x86 (Adam
# on Intel's runtime: 15 %), and a quarter more on ARM.
_AHEAD, _AHEAD_X86 = (512, 3), (2048, 2)
# A kernel as .cl files are written: it begins a line, perhaps after a macro, and ends with the first "}" at the start of a line.
_SHARED_FILES = ("macros.cl", "rows.cl")  # beside this module
_KERNEL_SIGNATURE = re.compile(r"^(?:\w+ )?__kernel\b[^{;]*?\bvoid\s+(\w+)\s*\((?:[^\n]*\}\n|.*?^\}\n)", re.M | re.S)
_DIRECTIVE = re.compile(r"^[ \t]*#(?!pragma)(?:.*\\\n)*.*\n", re.M)
LOCAL_1D = 64  # local size of kernels with one work-item per element: a full wave on every GPU, small enough to spread small problems
#: By dtype, the expression that loads four values at p as float4.
QUADS = {
    "float32": "(*(__global const float4*)(p))",
    "float16": "vload_half4(0, p)",
    "bfloat16": "as_float4(convert_uint4(*(__global const ushort4*)(p)) << 16)",
}


# ---- inputs


def as_tensors(op: str, *values: Any) -> list[Any]:
    """Convert values to Tensors on the queue of the first Tensor (else the active device); ``None`` stays ``None``.

    A number gets the first tensor's dtype, unless that is bool, or integer while the number is a float. Tensors of different devices raise.
    """
    queue = getattr(values[0], "queue", None) if values else None
    if queue is None and values and values[0] is None:
        raise TypeError(message(op, "the first argument must be a tensor, got None", "check that the function before returns its result"))
    for value in values:
        if value is not None and (not isinstance(value, Tensor) or value.queue is not queue):
            break
    else:
        return list(values)
    first: Any = next((v for v in values if isinstance(v, Tensor)), None)
    queue = first.queue if first is not None else get_active_device().queue
    result: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            if value.queue is not queue:
                check_planning(queue, value.queue)
                if first.context != value.context:
                    named = {"first": first.device.device_name, "other": value.device.device_name}
                    raise DeviceError(message(op, "all inputs must be on the same device", "move one with tensor.to(device)", **named))
            result.append(value)
        else:
            result.append(None if value is None else _moved_to(op, value, queue, first))
    return result


def _moved_to(op: str, value: Any, queue: Any, first: Tensor | None) -> Tensor:
    like = None if first is None else dtypes.DTYPES[first.dtype]
    dtype = None
    if like is not None:
        weak = isinstance(value, (bool, int)) or (isinstance(value, float) and like.is_float)
        if (weak and like.name != "bool") or (like.name == "float64" and np.asarray(value).dtype == np.float64):
            dtype = like.name
    return from_values(op, value, queue, dtype)


# ---- checks


def check_dtype(op: str, x: Tensor, allowed: Sequence[str] = FLOATS, name: str = "x") -> None:
    """Raise ``DtypeError`` unless the dtype of ``x`` is one of ``allowed``."""
    if x.dtype not in allowed:
        remedy = f"cast it to one of {', '.join(allowed)}"
        raise DtypeError(message(op, f"{name} must have a dtype that this op accepts", remedy, dtype=x.dtype, shape=x.shape))


def check_axis(op: str, axis: int, ndim: int) -> int:
    """Return the axis as a non-negative number; raises ``ShapeError`` if out of range. A 0-d tensor has axes 0 and -1, as in torch."""
    most = max(ndim, 1)
    if isinstance(axis, bool) or not isinstance(axis, (int, np.integer)) or not -most <= axis < most:
        remedy = f"it must be an integer in -{most}..{most - 1}"
        raise ShapeError(message(op, f"axis must be in range for {ndim} dimensions, got {axis}", remedy))
    return int(axis) % most


def check_double(op: str, queue: Any, names: Iterable[str]) -> None:
    """Raise ``DtypeError`` if a dtype is float64 and the device has no float64 arithmetic."""
    if not {"float64"}.isdisjoint(names) and not profile_of(queue).has_fp64:
        remedy = "cast to float32, or use the NumPy backend: netcl.device('cpu')"
        raise DtypeError(message(op, "float64 requires a device with float64 arithmetic", remedy, device=profile_of(queue).name))


def index_type(count: int) -> str:
    """Return the C type of element indices: ``long`` if ``count`` plus surplus work-items may exceed an ``int``, else ``int``."""
    return "int" if count < 2**31 - 2**20 else "long"


def on_cpu_device(queue: Any) -> bool:
    """Whether a queue's device is a CPU, where a work-item should process many elements."""
    return profile_of(queue).device_type == "cpu"


def fetches(queue: Any) -> bool:
    """Whether a queue's device is a CPU whose compiler has ``__builtin_prefetch``; OpenCL's ``prefetch`` does nothing on PoCL."""
    profile = profile_of(queue)
    return profile.device_type == "cpu" and profile.brand in FETCHING


def ahead(queue: Any) -> tuple[int, int] | None:
    """Return prefetch distance in bytes and cache level for data that a kernel reads once; ``None`` if the compiler cannot prefetch."""
    if not fetches(queue):
        return None
    return _AHEAD if profile_of(queue).vector_width < 8 else _AHEAD_X86


# ---- OpenCL


def exponential(queue: Any, real: str, lanes: int) -> tuple[dict[str, str], str]:
    """Return the macro ``EXP_BELOW(x)`` and its source for float vectors of ``lanes`` on PoCL's CPUs; both are empty otherwise."""
    if real != "float" or lanes == 1 or not on_cpu_device(queue) or profile_of(queue).brand != "pocl":
        return {}, ""
    vector = f"float{lanes} __attribute__((overloadable)) exp_below(const float{lanes} x) {{\n{exp_below(f'float{lanes}', f'int{lanes}')}}}"
    scalar = "float __attribute__((overloadable)) exp_below(const float x) { return exp(x); }"
    return {"EXP_BELOW(x)": "exp_below(x)"}, f"static inline {scalar}\nstatic inline {vector}\n"


def kernel(
    queue: Any,
    module_file: str,
    cl_file: str,
    kernel_name: str,
    operands: Mapping[str, str] | None = None,
    defines: Mapping[str, int | float | str] | None = None,
    text: str = "",
) -> program.Kernel:
    """Return the kernel ``kernel_name`` of the ``.cl`` file beside a module.

    ``"rows.cl softmax.cl"`` concatenates two files; ``macros.cl`` precedes them. ``operands={"A": "float16"}`` defines the macros ``A_T``,
    ``A_REAL``, ``A_LOAD`` and ``A_STORE``; ``defines`` become ``#define`` lines; ``text`` is generated source that precedes the files.
    """
    key = ("launch", module_file, cl_file, kernel_name, text, *(operands or {}).items(), *(defines or {}).items())
    state = program.state(queue)
    found = state.get(key)
    if found is not None:
        return found
    check_double(kernel_name, queue, (operands or {}).values())
    lines = primitives.storage_macros(**(operands or {}))
    for name, value in (defines or {}).items():
        lines += f"#define {name} {f'{value!r}f' if isinstance(value, float) else value if isinstance(value, str) else int(value)}\n"
    files = [primitives.cl_source(__file__ if part in _SHARED_FILES else module_file, part) for part in ("macros.cl", *cl_file.split())]
    source = without_other_kernels("\n".join(files), kernel_name)
    found = state[key] = program.get_later(queue, lines + text + source, kernel_name)
    return found


def without_other_kernels(source: str, name: str) -> str:
    """Remove all kernels except ``name`` from ``source``, because drivers would compile them too; preprocessor directives stay."""
    if f"void {name}(" not in source:
        return source  # its name is made by a macro
    return _KERNEL_SIGNATURE.sub(lambda found: found[0] if found[1] == name else "".join(_DIRECTIVE.findall(found[0])), source)


# ---- NumPy


def run_cpu(fn: Callable[..., Any], *tensors: Any, dtype: str | Sequence[str] | None = None, **kwargs: Any) -> Any:
    """Call ``fn(*arrays, **kwargs)`` and wrap its results as Tensors of the NumPy backend.

    float16 and bfloat16 inputs are widened to float32, results are rounded. ``dtype`` is the result's (one name, or one per result of a
    tuple), by default that of the first tensor. Lists of tensors become lists of arrays; ``None`` and numbers stay unchanged.
    """
    given = tensors_in(tensors)
    with np.errstate(all="ignore"):
        result = fn(*map_leaves(tensors, lambda t: decoded(t) if isinstance(t, Tensor) else t), **kwargs)
    several = isinstance(result, tuple)
    results = result if several else (result,)
    names = [dtype or given[0].dtype] * len(results) if dtype is None or isinstance(dtype, str) else list(dtype)
    wrapped = tuple(_wrap(array, name, given) for array, name in zip(results, names, strict=True))
    return wrapped if several else wrapped[0]


def decoded(x: Tensor) -> np.ndarray:
    """Return the values of a NumPy tensor, 16-bit floats as float32; may share the tensor's memory."""
    row = dtypes.DTYPES[x.dtype]
    values = dtypes.decode(x.array, row)  # type: ignore[arg-type]
    return values.astype(np.float32) if row.name == "float16" else values


def _wrap(array: Any, name: str, given: Sequence[Tensor]) -> Tensor:
    row = dtypes.lookup(name)
    array = np.asarray(array)
    stored = dtypes.encode(array, row)
    if not stored.flags.writeable or any(np.may_share_memory(stored, t.array) for t in given):
        stored = stored.copy()  # a result must not alias an input: either may be written in place
    return wrap_array(stored.reshape(array.shape), row.name, given[0].queue)


def numpy_reference(name: str, *args: Any, **kwargs: Any) -> Any:
    """Call an op by name on the NumPy backend, floats in float64; takes and returns arrays."""
    queue = require("cpu").queue

    def sent(value: Any) -> Any:
        if not isinstance(value, np.ndarray | np.generic):
            return value
        return Tensor.from_host(queue, value, "float64" if value.dtype.kind == "f" else None)

    found = hooks.call(name, *map_leaves(args, sent), **kwargs)
    return tuple(x.to_host() for x in found) if isinstance(found, (tuple, list)) else found.to_host()
