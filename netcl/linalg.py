"""Linear algebra under the names of ``torch.linalg``: the rows of the op table whose names begin with ``linalg_``, and a few others.

Decompositions wait for the device and run on the host, by NumPy's LAPACK. Results and gradients are on the tensor's device.

>>> import netcl
>>> netcl.linalg.solve(netcl.tensor([[2.0, 0.0], [0.0, 4.0]]), netcl.tensor([2.0, 2.0])).tolist()
[1.0, 0.5]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from netcl.autograd.ops import find_twin
from netcl.core.errors import DtypeError, message
from netcl.ops import names


def eig(A: Any) -> Any:
    """Raise ``DtypeError``: eigenvalues of matrices that are not symmetric may be complex, and there is no complex dtype."""
    remedy = "use linalg.eigh for symmetric matrices, or numpy.linalg.eig(A.numpy())"
    raise DtypeError(message("linalg.eig", "complex eigenvalues are not supported: there is no complex dtype", remedy))


eigvals = eig
LinAlgError = np.linalg.LinAlgError
_ROOT_FUNCTIONS = {"matmul", "matrix_exp", "matrix_power"}


def __getattr__(name: str) -> Callable[..., Any]:
    found = None if name.startswith("_") else find_twin(name if name in _ROOT_FUNCTIONS else f"linalg_{name}")
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*_ROOT_FUNCTIONS, "LinAlgError", *(name.removeprefix("linalg_") for name in names() if name.startswith("linalg_"))})
