"""The functions of ``torch.nn.utils.parametrizations``."""

from __future__ import annotations

from typing import Any

import numpy as np

import netcl.autograd as ag
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor
from netcl.nn.module import Module
from netcl.nn.utils.parametrize import WeightNorm, register_parametrization, spectral_form


def weight_norm(module: Module, name: str = "weight", dim: int | None = 0) -> Module:
    """Replace a parameter by ``g * v / |v|``; ``parametrizations.weight`` holds ``g`` as ``original0`` and ``v`` as ``original1``."""
    return register_parametrization(module, name, WeightNorm(dim))


def spectral_norm(module: Module, name: str = "weight", n_power_iterations: int = 1, eps: float = 1e-12, dim: int | None = None) -> Module:
    """Replace a parameter by ``parametrizations.weight.original`` divided by its estimated largest singular value. Returns the module."""
    return register_parametrization(module, name, spectral_form(module, name, n_power_iterations, eps, dim))


class _Orthogonal(Module):
    """Computes ``base`` times an orthogonal matrix, made from a skew-symmetric matrix as large as the weight's longer axis."""

    base: Any

    def __init__(self, orthogonal_map: str):
        super().__init__()
        self.orthogonal_map = orthogonal_map

    def forward(self, x: Tensor) -> Tensor:
        wide = x.shape[-2] < x.shape[-1]
        x = ag.transpose(x, -2, -1) if wide else x
        rows, columns = x.shape[-2:]
        part = ag.pad(ag.tril(x), (0, rows - columns))
        skew = ag.sub(part, ag.transpose(part, -2, -1))
        if self.orthogonal_map == "matrix_exp":
            q = ag.matrix_exp(skew)
        else:
            one, half = Tensor.from_host(x.queue, np.eye(rows), x.dtype), ag.mul(skew, 0.5)
            q = ag.linalg_solve(ag.sub(one, half), ag.add(one, half))
        q = ag.narrow(ag.matmul(self.base, q), -1, 0, columns)
        return ag.transpose(q, -2, -1) if wide else q

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Set ``base`` to the orthogonal factor of ``weight``; returns the parameter that gives ``base``."""
        tall = ag.transpose(weight, -2, -1) if weight.shape[-2] < weight.shape[-1] else weight
        rows, columns = tall.shape[-2:]
        rest = ag.randn(*tall.shape[:-1], rows - columns, dtype=tall.dtype, queue=tall.queue)
        q, r = ag.linalg_qr(ag.cat([tall, rest], -1))
        self.register_buffer("base", ag.mul(q, ag.unsqueeze(ag.sign(ag.diagonal(r, 0, -2, -1)), -2)))
        return Tensor.from_host(weight.queue, -np.eye(weight.shape[0], weight.shape[1]), weight.dtype)


def orthogonal(module: Module, name: str = "weight", orthogonal_map: str | None = None, *, use_trivialization: bool = True) -> Module:
    """Keep the rows or columns of a parameter orthonormal: compute them by ``matrix_exp`` or ``cayley`` from a skew-symmetric matrix."""
    kind, weight = orthogonal_map or "matrix_exp", getattr(module, name)
    if kind not in ("matrix_exp", "cayley") or weight.ndim != 2 or not use_trivialization:
        what = "the weight must be a matrix, orthogonal_map matrix_exp or cayley, and use_trivialization True"
        raise ShapeError(message("orthogonal", what, orthogonal_map=kind, shape=weight.shape, use_trivialization=use_trivialization))
    return register_parametrization(module, name, _Orthogonal(kind))
