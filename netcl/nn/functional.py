"""The functions of ``torch.nn.functional`` by their names: ``import netcl.nn.functional as F``.

Most are ops of :mod:`netcl.autograd`; every op is available here. Defined below are those that torch spells
differently: ``dim`` for ``axis``, ``training`` defaults, names of losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial, wraps
from typing import TYPE_CHECKING, Any

import netcl.autograd as ag
from netcl.core.errors import ShapeError, message
from netcl.core.hooks import hooks
from netcl.core.tensor import Tensor
from netcl.nn import activation, attention, composed, ctc, volume
from netcl.nn import dropout as dropouts
from netcl.nn import embedding as embeddings
from netcl.nn import linear as linears
from netcl.nn.activation import celu as celu
from netcl.nn.activation import glu as glu
from netcl.nn.norm import EPSILON

#: torch's names of ops that have another name here.
RENAMED = {
    "logsigmoid": "log_sigmoid", "hardsigmoid": "hard_sigmoid", "hardswish": "hard_swish", "hardtanh": "hard_tanh",
    "native_channel_shuffle": "channel_shuffle",
}  # fmt: skip
#: Functions that are composed of ops, and where they are.
COMPOSED = {name: module for module in (attention, composed, ctc, dropouts, embeddings, linears, volume) for name in module.FUNCTIONS}
#: Functions that torch has in a form that writes its result into the input.
WRITING = ("celu_", "elu_", "hardtanh_", "leaky_relu_", "relu_", "rrelu_", "selu_", "threshold_")
_POOLS = tuple(f"{kind}max_pool{axes}d" for kind in ("", "adaptive_") for axes in (1, 2, 3))


if TYPE_CHECKING:
    from netcl.nn.functional_names import *  # noqa: F403
else:

    def __getattr__(name: str) -> Callable[..., Any]:
        op = RENAMED.get(name, name)
        if name in WRITING:
            found = _writing(__getattr__(name[:-1]) if name != "celu_" else celu)
        elif name.removesuffix("_with_indices") in _POOLS and name not in _POOLS:
            found = partial(__getattr__(name.removesuffix("_with_indices")), return_indices=True)
        else:
            found = _in_place(op) if op in activation.IN_PLACE else getattr(COMPOSED.get(op, ag), op)
        if op in ag.LASTING or op in COMPOSED or name in WRITING:
            globals()[name] = found  # later calls find it without this function
        return found


def _writing(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function that writes its result into its input."""

    @wraps(function)
    def write(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hooks.call("in_place", "copy", input, function(ag.clone(input), *args, **kwargs))

    return write


@cache
def _in_place(name: str) -> Callable[..., Tensor]:
    """An activation that torch can compute in place; ``inplace`` is accepted and changes nothing, as in the layers."""
    op = getattr(ag, name)

    @wraps(op)
    def function(input: Tensor, *args: Any, inplace: bool = False, **kwargs: Any) -> Tensor:
        return op(input, *(value for value in args if not isinstance(value, bool)), **kwargs)

    return function


def __dir__() -> list[str]:
    return sorted({*globals(), *COMPOSED, *RENAMED, *WRITING, *(f"{name}_with_indices" for name in _POOLS), *dir(ag)})


def normalize(input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Tensor:
    """Normalize vectors to length one along ``dim``: ``x / max(norm(x), eps)``.

    >>> import netcl.nn.functional as F
    >>> [round(v, 4) for v in F.normalize([[3.0, 4.0]]).tolist()[0]]
    [0.6, 0.8]
    """
    return ag.div(input, ag.clamp(ag.norm(input, p, axis=dim, keepdims=True), min=eps))


def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """The cosine of the angle between vectors along ``dim``."""
    return ag.cosine_similarity(x1, x2, axis=dim, eps=eps)


def rms_norm(input: Tensor, normalized_shape: int | Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axes; without ``eps`` the machine epsilon of the arithmetic."""
    return ag.rms_norm(input, normalized_shape, weight, eps=EPSILON[input.dtype] if eps is None else eps)


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Zeros elements with probability ``p`` and scales the others by ``1 / (1 - p)``; the identity unless ``training``."""
    return ag.dropout(input, p, training)


def pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """Add elements at the ends of axes, two numbers per axis, the last axis first."""
    return ag.pad(input, pad, mode, 0.0 if value is None else value)


def instance_norm(
    input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, weight: Tensor | None = None,
    bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Instance norm of ``(N, C, ...)`` by its own statistics, or by given ones. Only :class:`netcl.nn.InstanceNorm2d` updates them."""
    if not use_input_stats:
        return ag.batch_norm(input, running_mean, running_var, weight, bias, eps=eps)
    if running_mean is not None or running_var is not None:
        raise ShapeError(message("instance_norm", "a function cannot update running statistics", "use nn.InstanceNorm2d"))
    return ag.instance_norm(input, weight, bias, eps=eps)


def batch_norm(input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
               bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5) -> Tensor:  # fmt: skip
    """Batch norm of ``(N, C, ...)``; training updates the running statistics in place."""
    return ag.batch_norm(input, running_mean, running_var, weight, bias, training=training, momentum=momentum, eps=eps)


def conv1d(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
           groups: int = 1) -> Tensor:  # fmt: skip
    """Convolution of signals."""
    return ag.conv1d(input, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups)


def conv2d(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
           groups: int = 1) -> Tensor:  # fmt: skip
    """Convolution of images."""
    return ag.conv2d(input, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups)


def conv_transpose1d(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0,
                     groups: int = 1, dilation: Any = 1) -> Tensor:  # fmt: skip
    """The transpose of a convolution of signals."""
    options = {"stride": stride, "padding": padding, "output_padding": output_padding, "groups": groups, "dilation": dilation}
    return ag.conv_transpose1d(input, weight, bias, **options)


def conv_transpose2d(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0,
                     groups: int = 1, dilation: Any = 1) -> Tensor:  # fmt: skip
    """The transpose of a convolution of images."""
    options = {"stride": stride, "padding": padding, "output_padding": output_padding, "groups": groups, "dilation": dilation}
    return ag.conv_transpose2d(input, weight, bias, **options)


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
                                 is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False) -> Tensor:  # fmt: skip
    """``softmax(q k^T / sqrt(d) + mask) v``; a bool mask is True where a key takes part. Grouped queries need no switch."""
    del enable_gqa
    return ag.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale)
