"""Functions of ``torch.nn.utils``: gradient clipping, parameters as one vector, normalized weights, sequences."""

from __future__ import annotations

from collections.abc import Iterable

import netcl.autograd as ag
from netcl.autograd.clipping import Parameters, clip_grad_norm, clip_grad_norm_device, clip_grad_value
from netcl.core.errors import ShapeError, message
from netcl.core.hooks import hooks
from netcl.core.tensor import Tensor
from netcl.nn.utils import parametrizations as parametrizations
from netcl.nn.utils import parametrize as parametrize
from netcl.nn.utils import prune as prune
from netcl.nn.utils import rnn as rnn
from netcl.nn.utils.parametrize import remove_spectral_norm as remove_spectral_norm
from netcl.nn.utils.parametrize import remove_weight_norm as remove_weight_norm
from netcl.nn.utils.parametrize import spectral_norm as spectral_norm
from netcl.nn.utils.parametrize import weight_norm as weight_norm


def clip_grad_norm_(
    parameters: Parameters, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> Tensor:
    """Scale gradients in place so that their total norm is at most ``max_norm``; returns the norm before scaling.

    >>> w = Tensor.from_host([0.0, 0.0], requires_grad=True)
    >>> w.grad = Tensor.from_host([30.0, 40.0])
    >>> clip_grad_norm_([w], 5.0).item()
    50.0
    """
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if error_if_nonfinite or len({p.context for p in given if p.grad is not None}) > 1:
        return Tensor.from_host(clip_grad_norm(given, max_norm, norm_type, error_if_nonfinite))
    return clip_grad_norm_device(given, max_norm, norm_type)


def clip_grad_value_(parameters: Parameters, clip_value: float, foreach: bool | None = None) -> None:
    """Clamp every element of every gradient to ``-clip_value .. clip_value``, in place."""
    clip_grad_value(parameters, clip_value)


def parameters_to_vector(parameters: Iterable[Tensor]) -> Tensor:
    """Return all parameters as one vector, in their order."""
    return ag.cat([ag.reshape(p, (-1,)) for p in parameters])


def vector_to_parameters(vec: Tensor, parameters: Iterable[Tensor]) -> None:
    """Write the parts of a vector into parameters, in their order.

    >>> a, b = Tensor.zeros((2,)), Tensor.zeros((1, 1))
    >>> vector_to_parameters(Tensor.from_host([1.0, 2.0, 3.0]), [a, b])
    >>> a.tolist(), b.tolist()
    ([1.0, 2.0], [[3.0]])
    """
    given = list(parameters)
    if vec.shape != (sum(p.size for p in given),):
        what = "vec must have one axis with as many elements as the parameters together"
        raise ShapeError(message("vector_to_parameters", what, elements=sum(p.size for p in given), **{"vec.shape": vec.shape}))
    with ag.no_grad():
        for p, part in zip(given, ag.split(vec, [p.size for p in given], axis=0), strict=True):
            hooks.call("in_place", "copy", p, ag.reshape(part, p.shape))
