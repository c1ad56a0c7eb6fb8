"""``torch.nn.utils.parametrizations`` by its names."""

from __future__ import annotations

from netcl.nn.module import Module
from netcl.nn.utils.parametrize import WeightNorm, register_parametrization, spectral_form


def weight_norm(module: Module, name: str = "weight", dim: int | None = 0) -> Module:
    """:func:`~netcl.nn.utils.weight_norm` as a parametrization of ``parametrizations.weight.original0`` and ``original1``."""
    return register_parametrization(module, name, WeightNorm(dim))


def spectral_norm(module: Module, name: str = "weight", n_power_iterations: int = 1, eps: float = 1e-12, dim: int | None = None) -> Module:
    """:func:`~netcl.nn.utils.spectral_norm` as a parametrization of ``parametrizations.weight.original``."""
    return register_parametrization(module, name, spectral_form(module, name, n_power_iterations, eps, dim))
