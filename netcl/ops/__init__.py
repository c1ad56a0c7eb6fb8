"""All ops, without recording for autograd. Each op is a row of the registry and an attribute of this module.

The modules of this package register rows when they are imported. Ops that a program registers later become attributes as well.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

from netcl.engine import pointwise, reduction
from netcl.engine.plan import planned
from netcl.engine.registry import ALIASES as ALIASES
from netcl.engine.registry import REGISTRY as REGISTRY
from netcl.engine.registry import Composite, Op, Reduction, Row, alias, lookup_op, register, unregister
from netcl.ops import fused_rows

# Not by "import": modules named like their ops would then replace the ops in this namespace.
pending_products: Any = importlib.import_module("netcl.ops.pending_products")
#: torch's aliases, by the names of the ops.
TORCHS_NAMES = {
    "abs": "absolute", "acos": "arccos", "acosh": "arccosh", "asin": "arcsin", "asinh": "arcsinh", "atan": "arctan", "atan2": "arctan2",
    "atanh": "arctanh", "cat": "concat concatenate", "div": "divide true_divide", "dot": "vdot", "expand": "broadcast_to",
    "ge": "greater_equal", "gt": "greater", "le": "less_equal", "linalg_det": "det",
    "linalg_inv": "inverse", "linalg_pinv": "pinverse", "linalg_slogdet": "slogdet", "lt": "less", "matmul": "mm", "moveaxis": "movedim",
    "mul": "multiply",
    "ne": "not_equal", "neg": "negative", "nonzero": "argwhere", "outer": "ger", "sign": "sgn", "split": "split_with_sizes",
    "sub": "subtract", "trapezoid": "trapz", "transpose": "swapaxes swapdims", "trunc": "fix", "vstack": "row_stack",
}  # fmt: skip
_NOT_OPS = {"epilogue", "pending_products", "fused_rows", "images"}


def function(name: str) -> Callable[..., Any]:
    """Return the public function of the op or alias ``name``."""
    return function_of(lookup_op(name))


def function_of(row: Row) -> Callable[..., Any]:
    """Return the public function of a row."""
    if isinstance(row, Op):
        if row.at_once:
            return row.call
        if row.name in pending_products.PRODUCTS:
            return planned(row, row.call, pending_products.PRODUCTS[row.name])
        return planned(row, row.call, fused_rows.fused(row.name) if row.name in fused_rows.FUSED else row.deferred, row.defer_if)
    if isinstance(row, Composite):
        return row.over(sys.modules[__name__])
    return reduction.reduction_function(row) if isinstance(row, Reduction) else pointwise.pointwise_function(row)


def names() -> list[str]:
    """Return the names of all ops and aliases, sorted."""
    return sorted([*REGISTRY, *ALIASES])


for _module in pkgutil.iter_modules(__path__):
    if _module.name not in _NOT_OPS:
        importlib.import_module(f"{__name__}.{_module.name}")
for _name, _second in TORCHS_NAMES.items():
    for _torchs in _second.split():
        alias(_torchs, _name)
# Importing a submodule puts it here under its name; where an op has that name (softmax, matmul), the op is meant.
globals().update({_name: function(_name) for _name in names()})


def __getattr__(name: str) -> Callable[..., Any]:
    if name not in REGISTRY and name not in ALIASES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return function(name)


def __dir__() -> list[str]:
    return sorted({*names(), *__all__})


__all__ = ["function", "names", "register", "unregister"]
