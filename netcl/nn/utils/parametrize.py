"""Parameters that are computed from others: ``torch.nn.utils.parametrize``, and weight and spectral norm in torch's older form.

A module with a computed parameter gets a class of its own, and the parameter becomes a property of that class. The state dict has the
tensors from which the property is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import netcl.autograd as ag
from netcl.core.errors import ShapeError, message
from netcl.core.hooks import hooks
from netcl.core.tensor import Tensor
from netcl.nn.composed import normalize
from netcl.nn.container import ModuleDict, ModuleList
from netcl.nn.module import Module
from netcl.nn.parameter import Parameter, is_parameter


def recompute(module: Module, name: str, function: Callable[[Any], Tensor] | None) -> None:
    """Make ``module.name`` the result of ``function(module)``; ``None`` makes it a plain attribute again."""
    computed = {**vars(module).get("_computed", {}), name: function}
    vars(module)["_computed"] = computed = {key: value for key, value in computed.items() if value is not None}
    real = vars(type(module)).get("_real", type(module))
    body: dict[str, Any] = {key: property(partial(_computed, key)) for key in computed}
    body |= {"_real": real, "__module__": real.__module__, "saved_by": "save its state_dict, or remove the parametrization first"}
    body["__reduce_ex__"] = _refuse_pickle
    module.__class__ = type(real)(real.__name__, (real,), body) if computed else real


def _refuse_pickle(module: Any, protocol: int) -> str:
    what = f"a {type(module).__name__} with computed parameters cannot be pickled"
    raise TypeError(message("pickle", what, module.saved_by, computed=list(module._computed)))


def _computed(name: str, module: Any) -> Tensor:
    return module._computed[name](module)


def own_parameter(module: Module, name: str, op: str) -> Tensor:
    """Return a parameter of this module, not of one inside it."""
    there = dict(module.named_parameters(recurse=False))
    if name not in there:
        raise ValueError(message(op, f"{type(module).__name__} has no parameter {name!r}", f"it has {list(there)}"))
    return there[name]


def taken(module: Module, name: str, op: str) -> Tensor:
    """Remove a parameter from its module and return it."""
    parameter = own_parameter(module, name, op)
    delattr(module, name)
    return parameter


def other_axes(dim: int, ndim: int, op: str) -> tuple[int, tuple[int, ...]]:
    """Return ``dim``, counted from the first axis, and the other axes."""
    if not -ndim <= dim < ndim:
        raise ShapeError(message(op, f"dim must be from {-ndim} to {ndim - 1}, got {dim}"))
    return dim % ndim, tuple(axis for axis in range(ndim) if axis != dim % ndim)


def put_back(module: Module, name: str, value: Tensor, own: Any = None) -> Module:
    """Make ``value`` a plain parameter again: ``own`` with this value, which an optimizer may have, or a new one."""
    recompute(module, name, None)
    own = Parameter(value.detach()) if own is None else own
    own.data = value.detach()
    module.register_parameter(name, own)
    return module


# ---- any parametrization


class ParametrizationList(ModuleList):
    """The parametrizations of one parameter, applied one after the other, and the input tensors of the first parametrization."""

    def __init__(self, modules: Any = (), original: Any = ()):
        super().__init__(modules)
        several = isinstance(original, tuple | list)
        named = {f"original{i}": part for i, part in enumerate(original)} if several else {"original": original}
        for name, part in named.items():
            self.register_parameter(name, part if is_parameter(part) else Parameter(part))

    def originals(self) -> list[Tensor]:
        """Return the inputs of the first parametrization."""
        return [value for name, value in self.named_parameters(recurse=False) if name.startswith("original")]

    def forward(self) -> Tensor:
        first, *rest = self
        value = first(*self.originals())
        for module in rest:
            value = module(value)
        return value


def register_parametrization(module: Any, tensor_name: str, parametrization: Any, *, unsafe: bool = False) -> Any:
    """Replace a parameter by the result of a module: ``module.weight`` is ``parametrization(module.parametrizations.weight.original)``.

    The ``right_inverse`` of the first parametrization, if it has one, computes ``original``; further parametrizations apply to the result.

    >>> from netcl import nn
    >>> class Symmetric(nn.Module):
    ...     def forward(self, x):
    ...         return (x + x.T) * 0.5
    >>> layer = register_parametrization(nn.Linear(2, 2), "weight", Symmetric())
    >>> bool((layer.weight == layer.weight.T).all()), list(layer.state_dict())
    (True, ['bias', 'parametrizations.weight.original'])
    """
    parametrization.train(module.training)
    first = not is_parametrized(module, tensor_name)
    before = own_parameter(module, tensor_name, "register_parametrization") if first else getattr(module, tensor_name)
    with ag.no_grad():
        parts = parametrization.right_inverse(before.detach()) if first and hasattr(parametrization, "right_inverse") else before
        several = [Parameter(part, before.requires_grad) for part in parts] if isinstance(parts, tuple | list) else None
        made = ParametrizationList([parametrization], several or parts)
        after = made() if first else parametrization(before)
    if not unsafe and (after.shape, after.dtype) != (before.shape, before.dtype):
        what = "a parametrization must keep shape and dtype"
        given = {"before": f"{before.shape} {before.dtype}", "after": f"{after.shape} {after.dtype}"}
        raise ValueError(message("register_parametrization", what, "pass unsafe=True", **given))
    if not first:
        module.parametrizations[tensor_name].append(parametrization)
        return module
    if several is None and parts is not before:
        before.data, made.original = parts, before
    delattr(module, tensor_name)
    if not is_parametrized(module):
        module.parametrizations = ModuleDict()
    module.parametrizations[tensor_name] = made
    recompute(module, tensor_name, lambda self: self.parametrizations[tensor_name]())
    return module


def is_parametrized(module: Module, tensor_name: str | None = None) -> bool:
    """Whether a module has parametrized parameters, or whether ``tensor_name`` is one."""
    found = vars(module).get("parametrizations")
    return isinstance(found, ModuleDict) and (tensor_name is None or tensor_name in found)


def remove_parametrizations(module: Any, tensor_name: str, leave_parametrized: bool = True) -> Any:
    """Turn a computed parameter back into a plain one with its computed value or, if not ``leave_parametrized``, its original value."""
    if not is_parametrized(module, tensor_name):
        raise ValueError(message("remove_parametrizations", f"{tensor_name!r} of {type(module).__name__} must be parametrized"))
    originals = module.parametrizations[tensor_name].originals()
    if not leave_parametrized and len(originals) > 1:
        what = f"{tensor_name!r} must be computed from 1 tensor for leave_parametrized=False, got {len(originals)}"
        raise ValueError(message("remove_parametrizations", what, "pass leave_parametrized=True"))
    value = getattr(module, tensor_name) if leave_parametrized else originals[0]
    own = originals[0] if len(originals) == 1 else None
    del module.parametrizations[tensor_name]
    if not len(module.parametrizations):
        del module.parametrizations
    return put_back(module, tensor_name, value, own)


# ---- weight norm


class WeightNorm(Module):
    """Computes ``g * v / |v|``; norms are per slice along ``dim``, or of the whole tensor if ``dim`` is ``None`` or -1."""

    def __init__(self, dim: int | None = 0):
        super().__init__()
        self.dim = None if dim == -1 else dim

    def _norm(self, weight: Tensor) -> Tensor:
        if self.dim is None:
            return ag.norm(ag.reshape(weight, (-1,)), 2.0, axis=0)
        axes = other_axes(self.dim, weight.ndim, "weight_norm")[1]
        return ag.sqrt(ag.sum(ag.square(weight), axis=axes, keepdims=True))

    def forward(self, weight_g: Tensor, weight_v: Tensor) -> Tensor:
        return ag.mul(weight_v, ag.div(weight_g, self._norm(weight_v)))

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ``g`` and ``v`` of a weight."""
        return self._norm(weight), weight


def weight_norm(module: Module, name: str = "weight", dim: int | None = 0) -> Module:
    """Replace a parameter by ``weight_g * weight_v / |weight_v|``. The norm is per slice along ``dim``, or total if ``dim`` is ``None``.

    >>> from netcl import nn
    >>> [(key, value.shape) for key, value in weight_norm(nn.Linear(3, 2)).state_dict().items()]
    [('bias', (2,)), ('weight_g', (2, 1)), ('weight_v', (2, 3))]
    """
    form = WeightNorm(dim)
    for suffix, value in zip("gv", form.right_inverse(taken(module, name, "weight_norm").detach()), strict=True):
        module.register_parameter(f"{name}_{suffix}", Parameter(value))
    recompute(module, name, lambda self: form.forward(getattr(self, f"{name}_g"), getattr(self, f"{name}_v")))
    return module


def remove_weight_norm(module: Module, name: str = "weight") -> Module:
    """Turn a parameter of :func:`weight_norm` back into a plain one with its current value; returns the module."""
    return _removed(module, name, ("_g", "_v"), "remove_weight_norm")


def _removed(module: Module, name: str, suffixes: tuple[str, ...], op: str) -> Module:
    if not all(f"{name}{suffix}" in vars(module) for suffix in suffixes):
        raise ValueError(message(op, f"{name!r} of {type(module).__name__} must be normalized by {op.removeprefix('remove_')}"))
    training, vars(module)["training"] = module.training, False
    value, vars(module)["training"] = getattr(module, name), training
    for suffix in suffixes:
        delattr(module, f"{name}{suffix}")
    return put_back(module, name, value)


# ---- spectral norm


class SpectralNorm(Module):
    """Divides a weight by its largest singular value, estimated with ``u`` and ``v``. Training refines ``u`` and ``v`` by power iterations.

    ``older`` is torch's older form, which starts from random vectors and updates ``v`` before ``u``.
    """

    _u: Tensor
    _v: Tensor

    def __init__(self, weight: Any, n_power_iterations: int = 1, dim: int = 0, eps: float = 1e-12, older: bool = False):
        super().__init__()
        self.n_power_iterations, self.dim, self.eps, self.older = n_power_iterations, dim, eps, older
        matrix = self._matrix(weight)
        u, v = (normalize(ag.randn(n, queue=weight.queue).to(weight.dtype), dim=0, eps=eps) for n in matrix.shape)
        for _ in range(0 if older else 15):
            u, v = self._round(matrix, u, v)
        self.register_buffer("_u", u)
        self.register_buffer("_v", v)

    def _matrix(self, weight: Tensor) -> Tensor:
        return ag.reshape(ag.moveaxis(weight, self.dim, 0), (weight.shape[self.dim], -1))

    def _round(self, matrix: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        u = u if self.older else normalize(ag.mv(matrix, v), dim=0, eps=self.eps)
        v = normalize(ag.mv(ag.transpose(matrix, 0, 1), u), dim=0, eps=self.eps)
        return normalize(ag.mv(matrix, v), dim=0, eps=self.eps) if self.older else u, v

    def forward(self, weight: Tensor) -> Tensor:
        return self.divided(weight, self._u, self._v, self.training)

    def divided(self, weight: Tensor, u: Tensor, v: Tensor, training: bool) -> Tensor:
        """Return the weight divided by an estimate of its largest singular value; ``training`` first refines ``u`` and ``v`` in place."""
        matrix = self._matrix(weight)
        with ag.no_grad():
            for _ in range(self.n_power_iterations if training else 0):
                for kept, new in zip((u, v), self._round(matrix, u, v), strict=True):
                    hooks.call("in_place", "copy", kept, new)
        return ag.div(weight, ag.dot(ag.clone(u), ag.mv(matrix, ag.clone(v))))


def spectral_form(module: Module, name: str, rounds: int, eps: float, dim: int | None, older: bool = False) -> SpectralNorm:
    """Make the :class:`SpectralNorm` of a parameter. Axis ``dim`` becomes the rows of a matrix; by default 0 (1 in transposed layers)."""
    axis = dim if dim is not None else int(getattr(module, "transposed", False))
    return SpectralNorm(getattr(module, name).detach(), rounds, axis, eps, older)


def spectral_norm(module: Module, name: str = "weight", n_power_iterations: int = 1, eps: float = 1e-12, dim: int | None = None) -> Module:
    """Replace a parameter by ``weight_orig`` divided by its largest singular value, as estimated by power iterations in training.

    >>> from netcl import nn
    >>> list(spectral_norm(nn.Linear(3, 2)).state_dict())
    ['bias', 'weight_orig', 'weight_u', 'weight_v']
    """
    form = spectral_form(module, name, n_power_iterations, eps, dim, older=True)
    module.register_parameter(f"{name}_orig", taken(module, name, "spectral_norm"))
    for suffix, value in zip("uv", form.buffers(), strict=True):
        module.register_buffer(f"{name}_{suffix}", value)

    def compute(self: Any) -> Tensor:
        original, u, v = (getattr(self, f"{name}_{suffix}") for suffix in ("orig", "u", "v"))
        return form.divided(original, u, v, self.training)

    recompute(module, name, compute)
    return module


def remove_spectral_norm(module: Module, name: str = "weight") -> Module:
    """Turn a parameter of :func:`spectral_norm` back into a plain one with its current value; returns the module."""
    return _removed(module, name, ("_orig", "_u", "_v"), "remove_spectral_norm")
