"""The base class of distributions, and those of most models: normal, uniform, Bernoulli, categorical."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from netcl import autograd as ag
from netcl.autograd import creation
from netcl.core.dtype import DTYPES
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor

TensorOrNumber = Tensor | float


class Distribution:
    """Base class of distributions: an object is a batch of shape ``batch_shape``. A draw from each member has shape ``event_shape``."""

    batch_shape: tuple[int, ...]
    event_shape: tuple[int, ...] = ()
    has_rsample = False
    #: What each parameter must be, in words and as a function of its values; the entry "value" is for values of ``log_prob``.
    limits: ClassVar[dict[str, tuple[str, Callable[[np.ndarray], Any]]]] = {}

    def __init__(self, validate_args: bool | None = None, **parameters: Any):
        """Store the parameters as tensors, broadcast to a common shape."""
        self.validates = bool(validate_args)
        for name, x in parameters.items():
            if validate_args is not False and (validate_args or not isinstance(x, Tensor)):
                self.check(name, x)
        first = next((x for x in parameters.values() if isinstance(x, Tensor)), None)
        queue, dtype = (None, "float32") if first is None else (first.queue, first.dtype)
        dtype = dtype if DTYPES[dtype].is_float else "float32"
        given = {name: x if isinstance(x, Tensor) else Tensor.from_host(queue, np.asarray(x), dtype) for name, x in parameters.items()}
        self.batch_shape = tuple(int(n) for n in np.broadcast_shapes(*(x.shape for x in given.values())))
        for name, x in given.items():
            setattr(self, name, x if x.shape == self.batch_shape else x.expand(self.batch_shape))

    def check(self, name: str, x: Any) -> None:
        """Raise ``ValueError`` unless all values of a parameter or, if its name is "value", of an argument of ``log_prob`` are allowed."""
        words, allowed = self.limits.get(name, ("numbers", lambda a: a == a))
        values = x.to_host() if isinstance(x, Tensor) else np.asarray(x)
        wrong = values[~np.broadcast_to(allowed(values), values.shape)]
        if wrong.size:
            raise ValueError(message(type(self).__name__, f"{name} must be {words}", count=wrong.size, first=wrong.flat[0]))

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw values of shape ``sample_shape + batch_shape + event_shape``; gradients flow through them to the parameters."""
        raise NotImplementedError(message(type(self).__name__, "draws of this distribution have no gradient", "use sample()"))

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw values without a gradient, of shape ``sample_shape + batch_shape + event_shape``."""
        with ag.no_grad():
            return self.rsample(sample_shape)

    def log_prob(self, value: Any) -> Tensor:
        """Return the logarithm of the density or probability of ``value``."""
        if self.event_shape and tuple(value.shape[-len(self.event_shape) :]) != self.event_shape:
            what = f"the last dimensions of value must be the event shape {self.event_shape}"
            raise ShapeError(message(type(self).__name__, what, shape=tuple(value.shape)))
        if self.validates:
            self.check_value(value)
        return self._log_density(value)

    def _log_density(self, value: Any) -> Tensor:
        raise NotImplementedError(message(type(self).__name__, "log_prob is not defined"))

    def check_value(self, value: Any) -> None:
        """Raise ``ValueError`` unless ``value`` has only values that can be drawn."""
        self.check("value", value)

    def expand(self, batch_shape: Sequence[int]) -> Any:
        """Return the same distributions with their batch broadcast to ``batch_shape``."""
        made, own = copy.copy(self), len(self.batch_shape)
        for name, part in vars(self).items():
            if isinstance(part, Tensor | Distribution):
                shape = part.shape if isinstance(part, Tensor) else part.batch_shape
                setattr(made, name, part.expand((*batch_shape, *shape[own:])))
        made.batch_shape = tuple(batch_shape)
        return made

    def drawn(self, kind: str, like: Tensor, sample_shape: Sequence[int]) -> Tensor:
        return creation.CREATION_FUNCTIONS[kind]((*sample_shape, *self.batch_shape), dtype=like.dtype, queue=like.queue)

    def uniforms(self, sample_shape: Sequence[int]) -> Tensor:
        """Return uniform numbers above 0 and below 1."""
        like = next(x for x in vars(self).values() if isinstance(x, Tensor))
        return self.drawn("rand", like, sample_shape).clamp(creation.finfo(like.dtype).tiny, 1 - creation.finfo(like.dtype).eps)

    def __getattr__(self, name: str) -> Any:
        if name in ("entropy", "mean", "variance"):
            raise NotImplementedError(message(type(self).__name__, f"{name} is not defined"))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    stddev = property(lambda self: self.variance.sqrt(), doc="The standard deviation.")

    def perplexity(self) -> Tensor:
        """Return the exponential of the entropy."""
        return self.entropy().exp()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(batch_shape={self.batch_shape}, event_shape={self.event_shape})"


ABOVE_ZERO: tuple[str, Callable[[np.ndarray], Any]] = ("positive", lambda a: a > 0)


class LocationScale(Distribution):
    """Base class of distributions with the parameters ``loc`` and ``scale``."""

    has_rsample = True
    loc: Tensor
    scale: Tensor
    limits: ClassVar = {"scale": ABOVE_ZERO}

    def __init__(self, loc: TensorOrNumber, scale: TensorOrNumber, validate_args: bool | None = None):
        super().__init__(validate_args, loc=loc, scale=scale)


class Normal(LocationScale):
    """The normal distribution with mean ``loc`` and standard deviation ``scale``."""

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        return self.loc + self.scale * self.drawn("randn", self.loc, sample_shape)

    def _log_density(self, value: Any) -> Tensor:
        return ((value - self.loc) / self.scale).square() * -0.5 - self.scale.log() - 0.5 * math.log(2 * math.pi)

    def entropy(self) -> Tensor:
        return self.scale.log() + 0.5 * (1 + math.log(2 * math.pi))

    def icdf(self, value: Any) -> Tensor:
        """Return the value up to which the probability is ``value``."""
        return self.loc + self.scale * (value * 2 - 1).erfinv() * math.sqrt(2)

    def cdf(self, value: Any) -> Tensor:
        """Return the probability of values up to ``value``."""
        return (((value - self.loc) / (self.scale * math.sqrt(2))).erf() + 1) * 0.5

    mean = mode = property(lambda self: self.loc)
    variance = property(lambda self: self.scale.square())


class Uniform(Distribution):
    """The uniform distribution over [low, high)."""

    has_rsample = True
    low: Tensor
    high: Tensor

    def __init__(self, low: TensorOrNumber, high: TensorOrNumber, validate_args: bool | None = None):
        super().__init__(validate_args, low=low, high=high)
        numbers = not isinstance(low, Tensor) and not isinstance(high, Tensor)
        if (validate_args or (numbers and validate_args is None)) and not bool((self.low < self.high).all()):
            raise ValueError(message("Uniform", "low must be less than high", low=self.low.to_host(), high=self.high.to_host()))

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        return self.low + (self.high - self.low) * self.drawn("rand", self.low, sample_shape)

    def check_value(self, value: Any) -> None:
        if not bool(((self.low <= value) * (value <= self.high)).all()):
            raise ValueError(message("Uniform", "value must be from low to high", "without validate_args its log_prob is -inf"))

    def _log_density(self, value: Any) -> Tensor:
        inside = (self.low <= value) * (value < self.high)
        return inside.to(self.low.dtype).log() - (self.high - self.low).log()

    def entropy(self) -> Tensor:
        return (self.high - self.low).log()

    def cdf(self, value: Any) -> Tensor:
        """Return the probability of values up to ``value``."""
        return ((value - self.low) / (self.high - self.low)).clamp(0, 1)

    mean = property(lambda self: (self.low + self.high) * 0.5)
    variance = property(lambda self: (self.high - self.low).square() / 12)


def pick_one(name: str, probs: Any, logits: Any) -> tuple[str, Any]:
    if (probs is None) == (logits is None):
        given = [word for word, value in (("probs", probs), ("logits", logits)) if value is not None]
        raise ValueError(message(name, "exactly one of probs and logits must be given", given=given))
    return ("probs", probs) if logits is None else ("logits", logits)


class Bernoulli(Distribution):
    """The Bernoulli distribution: 1 with probability ``probs``, else 0. ``logits`` are the logarithms of the odds."""

    probs: Tensor
    logits: Tensor
    limits: ClassVar = {"probs": ("from 0 to 1", lambda a: (a >= 0) & (a <= 1)), "value": ("0 or 1", lambda a: (a == 0) | (a == 1))}

    def __init__(self, probs: TensorOrNumber | None = None, logits: TensorOrNumber | None = None, validate_args: bool | None = None):
        name, given = pick_one("Bernoulli", probs, logits)
        super().__init__(validate_args, **{name: given})
        if name == "logits":
            self.probs = self.logits.sigmoid()
        else:
            eps = creation.finfo(self.probs.dtype).eps
            inside = self.probs.clamp(eps, 1 - eps)
            self.logits = inside.log() - (-inside).log1p()

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        with ag.no_grad():
            return ag.bernoulli(self.probs.detach().expand((*sample_shape, *self.batch_shape)))

    def _log_density(self, value: Any) -> Tensor:
        logits, value = creation.broadcast_tensors(self.logits, value.to(self.logits.dtype))
        return -ag.binary_cross_entropy_with_logits(logits, value, reduction="none")

    def entropy(self) -> Tensor:
        return ag.binary_cross_entropy_with_logits(self.logits, self.probs, reduction="none")

    mean = property(lambda self: self.probs)
    mode = property(lambda self: ag.where(self.probs == 0.5, math.nan, (self.probs > 0.5).to(self.probs.dtype)))
    variance = property(lambda self: self.probs * (1 - self.probs))


class Categorical(Distribution):
    """A distribution over class indices. The last axis of ``probs`` or ``logits`` has a value per class and is normalized."""

    probs: Tensor
    logits: Tensor
    limits: ClassVar = {
        "probs": ("at least 0, with a finite sum above 0", lambda a: (a >= 0) & (a.sum(-1, keepdims=True) > 0) & (a < math.inf)),
        "logits": ("numbers below infinity, one of them finite", lambda a: (a == a) & np.isfinite(a.max(-1, keepdims=True))),
    }

    def __init__(self, probs: Any = None, logits: Any = None, validate_args: bool | None = None):
        name, given = pick_one(type(self).__name__, probs, logits)
        if not getattr(given, "shape", ()):
            raise ShapeError(message(type(self).__name__, f"{name} must be a tensor with at least 1 dimension", given=repr(given)))
        super().__init__(validate_args, **{name: given})
        if name == "logits":
            self.logits = self.logits - self.logits.logsumexp(-1, keepdim=True)
            self.probs = self.logits.exp()
        else:
            self.probs = self.probs / self.probs.sum(-1, keepdim=True)
            self.logits = self.probs.clamp(min=creation.finfo(self.probs.dtype).eps).log()
        self.batch_shape, self.classes = self.batch_shape[:-1], self.batch_shape[-1]

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        with ag.no_grad():
            rows = self.probs.detach().reshape(-1, self.classes)
            drawn = creation.multinomial(rows, math.prod(sample_shape), replacement=True)
            return drawn.t().reshape((*sample_shape, *self.batch_shape))

    def check_value(self, value: Any) -> None:
        if not bool(((value >= 0) * (value < self.classes) * (value == value.to("int64"))).all()):
            raise ValueError(message("Categorical", f"value must be integers from 0 to {self.classes - 1}", shape=value.shape))

    def _log_density(self, value: Any) -> Tensor:
        shape = np.broadcast_shapes(value.shape, self.batch_shape)
        logits = self.logits.expand((*shape, self.classes))
        return logits.gather(-1, value.to("int64").expand(shape).unsqueeze(-1)).squeeze(-1)

    def finite_logits(self) -> Tensor:
        """Return the logits, with finite numbers in place of ``-inf``: 0 times them is 0."""
        return self.logits.clamp(min=creation.finfo(self.logits.dtype).min)

    def entropy(self) -> Tensor:
        return -(self.finite_logits() * self.probs).sum(-1)

    @property
    def mode(self) -> Tensor:
        """The most probable class."""
        return self.probs.argmax(-1)


class Independent(Distribution):
    """A distribution whose last ``reinterpreted_batch_ndims`` batch axes are one event: log probabilities are summed over them."""

    def __init__(self, base_distribution: Distribution, reinterpreted_batch_ndims: int, validate_args: bool | None = None):
        shape, count = base_distribution.batch_shape, reinterpreted_batch_ndims
        if not 0 <= count <= len(shape):
            raise ShapeError(message("Independent", f"reinterpreted_batch_ndims must be from 0 to {len(shape)}, got {count}", shape=shape))
        self.validates = bool(validate_args)
        self.base_dist, self.has_rsample, self._axes = base_distribution, base_distribution.has_rsample, tuple(range(-count, 0))
        self.batch_shape, self.event_shape = shape[: len(shape) - count], shape[len(shape) - count :] + base_distribution.event_shape

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        return self.base_dist.rsample(sample_shape)

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        return self.base_dist.sample(sample_shape)

    def summed(self, value: Tensor) -> Tensor:
        return value.sum(self._axes) if self._axes else value

    def check_value(self, value: Any) -> None:
        self.base_dist.check_value(value)

    def _log_density(self, value: Any) -> Tensor:
        return self.summed(self.base_dist.log_prob(value))

    def entropy(self) -> Tensor:
        return self.summed(self.base_dist.entropy())

    mean = property(lambda self: self.base_dist.mean)
    variance = property(lambda self: self.base_dist.variance)
