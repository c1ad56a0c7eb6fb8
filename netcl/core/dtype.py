"""The dtype table: how a value is stored, how kernels load and store it, and in which type they compute.

Half and bfloat16 are *storage* formats on every device: ``vload_half`` is core OpenCL and bfloat16 is a shift, so
neither needs ``cl_khr_fp16``. Kernels convert them to float32, except for matrix units, which take them as operands.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from netcl.core.errors import DtypeError, message


class dtype(str):
    """The dtype of a tensor: a string that also equals NumPy's dtype and scalar type of the same name.

    There is one object per dtype, so ``x.dtype is netcl.float32`` holds as well. Hot paths compare by identity.

    >>> import netcl
    >>> netcl.float32 == "float32", netcl.float32 == np.float32, netcl.float32 == np.dtype("float32"), netcl.long == np.int32
    (True, True, True, False)
    """

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, str):
            return str.__eq__(self, other)
        if isinstance(other, type) and issubclass(other, np.generic):
            other = np.dtype(other)
        return isinstance(other, np.dtype) and str.__eq__(self, other.name)

    def __ne__(self, other: object) -> bool:
        return self is not other and not dtype.__eq__(self, other)

    is_floating_point = property(lambda self: DTYPES[self].is_float, doc="Whether it is a floating-point dtype.")
    is_signed = property(lambda self: DTYPES[self].host.kind in "if", doc="Whether it has negative numbers.")
    is_complex = False
    itemsize = property(lambda self: DTYPES[self].itemsize, doc="The bytes of an element.")


@dataclass(frozen=True, eq=False)
class DType:
    """An entry of the dtype table: NumPy and OpenCL storage, LOAD and STORE of kernels, compute type.

    Entries are compared by identity: dtypes are in the keys of every cache, and hashing eight fields takes a microsecond.
    """

    name: dtype
    storage: np.dtype  # of the bytes in a buffer; bfloat16 is stored as its 16 bits
    host: np.dtype  # of the array a user gets; bfloat16 is widened to float32
    c_storage: str
    c_compute: str
    load: str
    store: str
    rank: int  # promotion order
    itemsize: int
    is_float: bool
    narrow: bool  # whether storing an integer of the compute type keeps only its low bits


def _dtype_row(name: str, storage: str, c_storage: str, c_compute: str, rank: int, load="p[i]", store="p[i] = (x)", host="") -> DType:
    kind, is_float = np.dtype(storage), rank >= 40
    narrow = 0 < rank < 40 and c_storage != c_compute
    return DType(dtype(name), kind, np.dtype(host or storage), c_storage, c_compute, load, store, rank, kind.itemsize, is_float, narrow)


# A NaN whose payload sits in the low half would round to infinity: it is stored as the quiet NaN instead.
_BF16_STORE = "p[i] = netcl_to_bfloat16(x)"

DTYPES: dict[str, DType] = {  # keyed by the single object of each dtype, so that a look-up needs no string comparison
    row.name: row
    for row in (
        _dtype_row("bool", "bool", "uchar", "int", 0, store="p[i] = (uchar)((x) != 0)"),
        _dtype_row("uint8", "uint8", "uchar", "int", 10),
        _dtype_row("int8", "int8", "char", "int", 11),
        _dtype_row("int16", "int16", "short", "int", 15),
        _dtype_row("uint16", "uint16", "ushort", "int", 16),
        _dtype_row("int32", "int32", "int", "int", 20),
        _dtype_row("uint32", "uint32", "uint", "long", 25),
        _dtype_row("int64", "int64", "long", "long", 30),
        _dtype_row("uint64", "uint64", "ulong", "ulong", 35),
        _dtype_row("float16", "float16", "half", "float", 40, load="vload_half(i, p)", store="vstore_half_rte(x, i, p)"),
        _dtype_row("bfloat16", "uint16", "ushort", "float", 41, load="as_float((uint)(p[i]) << 16)", store=_BF16_STORE, host="float32"),
        _dtype_row("float32", "float32", "float", "float", 50),
        _dtype_row("float64", "float64", "double", "double", 60),
    )
}
_BFLOAT16, _FLOAT32, _FLOAT64 = (DTYPES[name] for name in ("bfloat16", "float32", "float64"))
STORED = {row.c_compute: row.name for row in DTYPES.values() if row.c_storage == row.c_compute}  # what a compute type is stored as
NAMES: dict[str, dtype] = {row.name: row.name for row in DTYPES.values()}
FLOAT32 = NAMES["float32"]
HALVES: frozenset[str] = frozenset((NAMES["float16"], NAMES["bfloat16"]))  # stored in 16 bits, computed in float32
DTYPE_ALIASES = {"float": "float32", "half": "float16", "double": "float64", "int": "int32", "long": "int64", "short": "int16",
           "bf16": "bfloat16"}  # fmt: skip
_ROWS_BY_NAME = {**DTYPES, **{alias: DTYPES[name] for alias, name in DTYPE_ALIASES.items()}}
_BY_NUMPY = {row.storage: row for row in DTYPES.values() if row.name != "bfloat16"}  # a dtype's .name costs microseconds


def lookup(given: str | DTypeLike | DType, op: str = "dtype") -> DType:
    """Return the entry of a dtype given by name, alias, NumPy dtype or entry; raises :class:`DtypeError` for anything else."""
    if isinstance(given, DType):
        return given
    if isinstance(given, str) and given in _ROWS_BY_NAME:
        return _ROWS_BY_NAME[given]
    try:
        return DTYPES[np.dtype(given).name]
    except (TypeError, KeyError):
        raise DtypeError(message(op, "unknown dtype", f"known: {', '.join([*DTYPES, *DTYPE_ALIASES])}", dtype=repr(given))) from None


def named(given: object) -> DType | None:
    """Return the entry of a dtype; ``None`` for other strings and objects. A NumPy dtype or a type that netcl does not know raises."""
    if isinstance(given, str):
        return _ROWS_BY_NAME.get(given)
    return lookup(given) if isinstance(given, DType | np.dtype | type) else None


def of_value(value: object) -> DType:
    """Return the dtype of a Python value: bool, int64 or float32, as in torch."""
    kind = np.asarray(value).dtype.kind
    return DTYPES[{"b": "bool", "i": "int64", "u": "int64"}.get(kind, "float32")]


def of_array(array: np.ndarray, op: str = "from_host") -> DType:
    """Return the default dtype for an array: float64 becomes float32, other known dtypes stay."""
    row = _BY_NUMPY.get(array.dtype) or _BY_NUMPY.get(array.dtype.newbyteorder("="))
    if row is not None:
        return _FLOAT32 if row is _FLOAT64 else row
    name = array.dtype.name
    if name == "bfloat16":
        return DTYPES[name]
    remedy = f"convert it to one of {', '.join(DTYPES)}" + ", or pass dtype=" * (array.dtype.kind in "biuf")
    raise DtypeError(message(op, f"arrays of dtype {name} cannot be converted to tensors", remedy, shape=array.shape))


def _promoted(a: DType, b: DType) -> DType:
    if {a.name, b.name} == {"float16", "bfloat16"}:
        return _FLOAT32
    if a.is_float or b.is_float:
        return a if a.rank >= b.rank else b
    return DTYPES[np.promote_types(a.storage, b.storage).name]


_PROMOTED = {(a, b): _promoted(a, b) for a in DTYPES.values() for b in DTYPES.values()}


def promote(a: DType, b: DType) -> DType:
    """Return the dtype of ``a op b``.

    A pair with a float gives the higher rank; float16 and bfloat16 give float32. Other pairs follow NumPy: uint64 and int8 give float64.
    """
    return _PROMOTED[a, b]


def sum_dtype(dtype: str) -> str:
    """Return the dtype that stores the compute type of ``dtype``: float32 for float16, int32 for uint8."""
    return STORED[DTYPES[dtype].c_compute]


def encode(array: np.ndarray, dtype: DType) -> np.ndarray:
    """Convert host values to the storage of ``dtype``; conversions to floats round to nearest even."""
    if dtype is not _BFLOAT16:
        return array if array.dtype == dtype.storage else _cast(array, dtype.storage)
    if array.dtype.name == "bfloat16":
        return array.view(dtype.storage)
    bits = np.ascontiguousarray(_cast(array, np.dtype(np.float32))).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits >> 16) | 0x40, rounded).astype(np.uint16).reshape(array.shape)


def _cast(array: np.ndarray, kind: np.dtype) -> np.ndarray:
    """Convert values to another dtype. Overflow of floats gives infinity, as on a device, also under ``np.seterr(all="raise")``."""
    try:
        return array.astype(kind, copy=False)
    except FloatingPointError:
        with np.errstate(all="ignore"):
            return array.astype(kind, copy=False)


def decode(stored: np.ndarray, dtype: DType) -> np.ndarray:
    """Convert stored bytes to values; bfloat16 is widened to float32, other dtypes are returned unchanged."""
    return stored if dtype is not _BFLOAT16 else (stored.astype(np.uint32) << 16).view(np.float32)
