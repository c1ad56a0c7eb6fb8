"""Lazy layers: they infer the number of input features from the first input, or a loaded state dict, and become the actual layer.

>>> from netcl import nn, zeros
>>> layer = nn.LazyLinear(3)
>>> layer(zeros((2, 5))).shape, layer
((2, 3), Linear(in_features=5, out_features=3, bias=True))
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from netcl.core import dtype as dtypes
from netcl.core.errors import message
from netcl.core.tensor import Tensor
from netcl.nn import conv, linear, norm
from netcl.nn.module import Module
from netcl.nn.parameter import here


class _Lazy(Module):
    """Base class of lazy layers. Before the first input there are no parameters, and ``parameters()`` raises."""

    becomes: Any
    of_input: int  # the axis of the input whose size is missing
    of_weight: int  # the axis of the weight that has it

    def _become(self, size: int, queue: Any, dtype: str | None) -> None:
        """Become the layer for ``size`` features, with this layer's mode and hooks."""
        positional, named = self._constructor_arguments()
        made = self.becomes(size, *positional, **named, queue=queue, dtype=dtype)
        kept = {name: self.__dict__[name] for name in ("training", "_module_hooks")}
        self.__dict__.clear()
        self.__dict__.update(made.__dict__ | kept)
        self.__class__ = self.becomes

    def forward(self, x: Tensor, *rest: Any) -> Any:
        self._become(x.shape[self.of_input], x.queue, x.dtype if dtypes.DTYPES[x.dtype].is_float else None)
        return self.forward(x, *rest)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        given = [state_dict[prefix + name] for name in ("weight", "running_mean") if prefix + name in state_dict]
        if not given:
            return super()._load_from_state_dict(state_dict, prefix, *rest)
        groups = self._made_from.get("groups", 1) if self.of_weight else 1
        self._become(given[0].shape[self.of_weight] * groups, here(), None)
        return self._load_from_state_dict(state_dict, prefix, *rest)

    def _named_tensors(self, *wanted: str) -> Iterator[tuple[str, Tensor]]:
        if wanted == ("parameter",):
            what, remedy = "there are no parameters before the first input", "call the model once with an input first"
            raise ValueError(message(type(self).__name__, what, remedy))
        return super()._named_tensors(*wanted)


def lazy_class(real: type[Module], of_input: int, of_weight: int = 0, **defaults: Any) -> Any:
    """Make the lazy form of ``real``. Its first argument is the size of input axis ``of_input``, or of axis ``of_weight`` of a weight."""
    parameters = [p.replace(default=defaults.get(p.name, p.default)) for p in list(inspect.signature(real).parameters.values())[1:]]

    class Made(_Lazy, real):  # type: ignore[valid-type,misc]
        def __init__(self, *args: Any, **kwargs: Any):
            Module.__init__(self)

    Made.becomes, Made.of_input, Made.of_weight = real, of_input, of_weight
    Made.__name__ = Made.__qualname__ = f"Lazy{real.__name__}"
    size = (2, 5) + (4,) * (int(real.__name__[-2]) if real.__name__[-1] == "d" else 0)
    required = [str(3 - i) for i, p in enumerate(parameters) if p.default is p.empty]
    Made.__doc__ = f""":class:`{real.__name__}` that takes its number of input features from the first input.

    >>> from netcl import nn, zeros
    >>> layer = nn.{Made.__name__}({", ".join(required)})
    >>> y = layer(zeros({size}))
    >>> type(layer) is nn.{real.__name__}
    True
    """
    Made.__signature__ = inspect.Signature(parameters)
    return Made


LazyLinear = lazy_class(linear.Linear, -1, 1)
_CHANNELS = (-2, -3, -4)  # of the channels, counted from the end: inputs may have no batch dimension
LazyConv1d, LazyConv2d, LazyConv3d = map(lazy_class, (conv.Conv1d, conv.Conv2d, conv.Conv3d), _CHANNELS, (1, 1, 1))
_TRANSPOSED = conv.ConvTranspose1d, conv.ConvTranspose2d, conv.ConvTranspose3d
LazyConvTranspose1d, LazyConvTranspose2d, LazyConvTranspose3d = map(lazy_class, _TRANSPOSED, _CHANNELS)
LazyBatchNorm1d, LazyBatchNorm2d, LazyBatchNorm3d = map(lazy_class, (norm.BatchNorm1d, norm.BatchNorm2d, norm.BatchNorm3d), (1, 1, 1))
_INSTANCE_NORMS = norm.InstanceNorm1d, norm.InstanceNorm2d, norm.InstanceNorm3d
LazyInstanceNorm1d, LazyInstanceNorm2d, LazyInstanceNorm3d = (
    lazy_class(real, axis, affine=True, track_running_stats=True) for real, axis in zip(_INSTANCE_NORMS, _CHANNELS, strict=True)
)
