"""Invertible functions of random values, and the distributions of their results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from netcl import autograd as ag
from netcl.autograd import creation
from netcl.core.tensor import Tensor
from netcl.distributions.base import Distribution, Independent


class Transform:
    """An invertible function of single values. ``inv`` is its inverse, also a transform."""

    event_dim = 0  # over how many of the last axes log_abs_det_jacobian is summed
    shape: tuple[int, ...] = ()  # of the parameters

    def __call__(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def _inverse(self, y: Tensor) -> Tensor:
        raise NotImplementedError

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Return ``log |dy/dx|``."""
        raise NotImplementedError

    @property
    def inv(self) -> Transform:
        return _Inverse(self)


class _Inverse(Transform):
    def __init__(self, of: Transform):
        self.of, self.event_dim, self.shape = of, of.event_dim, of.shape

    def __call__(self, x: Tensor) -> Tensor:
        return self.of._inverse(x)

    def _inverse(self, y: Tensor) -> Tensor:
        return self.of(y)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        return -self.of.log_abs_det_jacobian(y, x)

    @property
    def inv(self) -> Transform:
        return self.of


class AffineTransform(Transform):
    """``loc + scale * x``. The last ``event_dim`` axes of values are one event."""

    def __init__(self, loc: Any, scale: Any, event_dim: int = 0, cache_size: int = 0):
        self.loc, self.scale, self.event_dim = loc, scale, event_dim
        self.shape = tuple(np.broadcast_shapes(*(getattr(x, "shape", ()) for x in (loc, scale))))

    def __call__(self, x: Tensor) -> Tensor:
        return self.loc + self.scale * x

    def _inverse(self, y: Tensor) -> Tensor:
        return (y - self.loc) / self.scale

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        size = self.scale.abs().log() if isinstance(self.scale, Tensor) else math.log(abs(self.scale))
        slopes = creation.CREATION_FUNCTIONS["zeros_like"](x) + size
        return slopes.sum(tuple(range(-self.event_dim, 0))) if self.event_dim else slopes


def _of_formulas(
    name: str, doc: str, forward: Callable[[Any], Tensor], back: Callable[[Any], Tensor], slope: Callable[[Any, Any], Tensor]
) -> Any:
    methods = {
        "__init__": lambda self, cache_size=0: None, "__call__": lambda self, x: forward(x), "_inverse": lambda self, y: back(y),
        "log_abs_det_jacobian": lambda self, x, y: slope(x, y), "__doc__": doc, "__module__": __name__,
    }  # fmt: skip
    return type(name, (Transform,), methods)


ExpTransform = _of_formulas("ExpTransform", "``exp(x)``.", ag.exp, ag.log, lambda x, y: x)
TanhTransform = _of_formulas(
    "TanhTransform", "``tanh(x)``.", ag.tanh, ag.arctanh, lambda x, y: (math.log(2.0) - x - ag.softplus(x * -2.0)) * 2.0
)
SigmoidTransform = _of_formulas(
    "SigmoidTransform", "``1 / (1 + exp(-x))``.", ag.sigmoid, ag.logit, lambda x, y: -ag.softplus(-x) - ag.softplus(x)
)


class TransformedDistribution(Distribution):
    """The distribution of values of ``base_distribution`` that pass one transform after the other."""

    def __init__(self, base_distribution: Distribution, transforms: Transform | Sequence[Transform], validate_args: bool | None = None):
        self.validates, self.has_rsample = bool(validate_args), base_distribution.has_rsample
        self.transforms = [transforms] if isinstance(transforms, Transform) else list(transforms)
        batch, event = base_distribution.batch_shape, base_distribution.event_shape
        shape = np.broadcast_shapes(batch + event, *(transform.shape for transform in self.transforms))
        base = base_distribution.expand(shape[: len(shape) - len(event)])
        more = max((transform.event_dim for transform in self.transforms), default=0) - len(event)
        self.base_dist = Independent(base, more) if more > 0 else base
        self.batch_shape, self.event_shape = self.base_dist.batch_shape, self.base_dist.event_shape

    def _through(self, x: Tensor) -> Tensor:
        for transform in self.transforms:
            x = transform(x)
        return x

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        return self._through(self.base_dist.rsample(sample_shape))

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        with ag.no_grad():
            return self._through(self.base_dist.sample(sample_shape))

    def check_value(self, value: Any) -> None:
        for transform in reversed(self.transforms):
            value = transform._inverse(value)
        self.base_dist.check_value(value)

    def _log_density(self, value: Any) -> Tensor:
        slopes = []
        for transform in reversed(self.transforms):
            x = transform._inverse(value)
            slope = transform.log_abs_det_jacobian(x, value)
            axes = tuple(range(transform.event_dim - len(self.event_shape), 0))
            slopes.append(slope.sum(axes) if axes else slope)
            value = x
        return self.base_dist.log_prob(value) - sum(slopes[1:], slopes[0]) if slopes else self.base_dist.log_prob(value)
