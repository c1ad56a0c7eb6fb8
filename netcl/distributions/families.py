"""Distributions of counts, positive numbers, fractions and vectors, and mixtures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from netcl import autograd as ag
from netcl.autograd import creation
from netcl.core.errors import ShapeError, message
from netcl.core.tensor import Tensor
from netcl.distributions.base import ABOVE_ZERO, Categorical, Distribution, LocationScale, Normal, TensorOrNumber, pick_one

COUNTS: tuple[str, Any] = ("integers from 0", lambda a: (a >= 0) & (a == np.floor(a)) & (a < math.inf))


class Laplace(LocationScale):
    """The Laplace distribution around ``loc``."""

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        eps = creation.finfo(self.loc.dtype).eps
        u = (self.uniforms(sample_shape) * 2 - 1).clamp(eps - 1, 1 - eps)
        return self.loc - self.scale * u.sign() * (-u.abs()).log1p()

    def _log_density(self, value: Any) -> Tensor:
        return -(self.scale * 2).log() - (value - self.loc).abs() / self.scale

    def cdf(self, value: Any) -> Tensor:
        """Return the probability of values up to ``value``."""
        return 0.5 - (value - self.loc).sign() * (-(value - self.loc).abs() / self.scale).expm1() * 0.5

    def entropy(self) -> Tensor:
        return (self.scale * 2).log() + 1

    mean = property(lambda self: self.loc)
    variance = property(lambda self: self.scale.square() * 2)


class Gumbel(LocationScale):
    """The Gumbel distribution of the largest of many values."""

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        return (self.loc + self.scale * creation.gumbel_noise((*sample_shape, *self.batch_shape), self.loc)).to(self.loc.dtype)

    def _log_density(self, value: Any) -> Tensor:
        y = (self.loc - value) / self.scale
        return y - y.exp() - self.scale.log()

    def entropy(self) -> Tensor:
        return self.scale.log() + (1 + np.euler_gamma)

    mean = property(lambda self: self.loc + self.scale * float(np.euler_gamma))
    variance = property(lambda self: self.scale.square() * (math.pi**2 / 6))


class Exponential(Distribution):
    """The exponential distribution with ``rate`` events per unit."""

    has_rsample = True
    rate: Tensor
    limits: ClassVar = {"rate": ABOVE_ZERO, "value": ("at least 0", lambda a: a >= 0)}

    def __init__(self, rate: TensorOrNumber, validate_args: bool | None = None):
        super().__init__(validate_args, rate=rate)

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        return -(-self.uniforms(sample_shape)).log1p() / self.rate

    def _log_density(self, value: Any) -> Tensor:
        return self.rate.log() - self.rate * value

    def entropy(self) -> Tensor:
        return 1 - self.rate.log()

    mean = property(lambda self: self.rate.reciprocal())
    variance = property(lambda self: self.rate.pow(-2))


class Gamma(Distribution):
    """The gamma distribution; draws have no gradient."""

    concentration: Tensor
    rate: Tensor
    limits: ClassVar = {"concentration": ABOVE_ZERO, "rate": ABOVE_ZERO, "value": ("at least 0", lambda a: a >= 0)}

    def __init__(self, concentration: TensorOrNumber, rate: TensorOrNumber, validate_args: bool | None = None):
        super().__init__(validate_args, concentration=concentration, rate=rate)

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        with ag.no_grad():
            shape = (*sample_shape, *self.batch_shape)
            drawn = _log_gamma_draws(self.concentration.detach().expand(shape)).exp()
            return drawn.clamp(min=creation.finfo(drawn.dtype).tiny) / self.rate.detach()

    def _log_density(self, value: Any) -> Tensor:
        a, b = self.concentration, self.rate
        return a * b.log() + ag.xlogy(a - 1, value) - b * value - a.lgamma()

    def entropy(self) -> Tensor:
        a = self.concentration
        return a - self.rate.log() + a.lgamma() + (1 - a) * a.digamma()

    mean = property(lambda self: self.concentration / self.rate)
    variance = property(lambda self: self.concentration / self.rate.square())


def _log_gamma_draws(a: Tensor) -> Tensor:
    """Draw logarithms of gamma numbers, which may be too small for the dtype.

    The method is that of Marsaglia and Tsang (2000), with 16 proposals each: all are rejected once in 10^20 draws.
    """
    raised = ag.where(a < 1, a + 1, a)
    d = raised - 1 / 3
    draw = creation.CREATION_FUNCTIONS
    normal, uniform = (draw[kind]((16, *a.shape), dtype=a.dtype, queue=a.queue) for kind in ("randn", "rand"))
    v = (1 + normal / (d * 9).sqrt()).pow(3)
    accepted = (v > 0) & (uniform.log() < normal.square() * 0.5 + d - d * v + d * v.clamp(min=1e-30).log())
    first = accepted.to("int32").argmax(0, keepdims=True)
    made = d * v.gather(0, first).squeeze(0)
    small = draw["rand"](a.shape, dtype=a.dtype, queue=a.queue)
    return made.log() + ag.where(a < 1, small.clamp(min=creation.finfo(a.dtype).tiny).log() / a, 0.0)


class Chi2(Gamma):
    """The chi-squared distribution with ``df`` degrees of freedom."""

    def __init__(self, df: TensorOrNumber, validate_args: bool | None = None):
        super().__init__(df * 0.5, 0.5, validate_args)

    df = property(lambda self: self.concentration * 2)


class Beta(Distribution):
    """The beta distribution over numbers from 0 to 1; draws have no gradient."""

    concentration1: Tensor
    concentration0: Tensor
    limits: ClassVar = {"concentration1": ABOVE_ZERO, "concentration0": ABOVE_ZERO, "value": ("from 0 to 1", lambda a: (a >= 0) & (a <= 1))}

    def __init__(self, concentration1: TensorOrNumber, concentration0: TensorOrNumber, validate_args: bool | None = None):
        super().__init__(validate_args, concentration1=concentration1, concentration0=concentration0)

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        with ag.no_grad():
            shape = (*sample_shape, *self.batch_shape)
            one, zero = (_log_gamma_draws(c.detach().expand(shape)) for c in (self.concentration1, self.concentration0))
            limits = creation.finfo(one.dtype)
            return (one - zero).sigmoid().clamp(limits.tiny, 1 - limits.eps / 2)

    def normalizer(self) -> Tensor:
        a, b = self.concentration1, self.concentration0
        return a.lgamma() + b.lgamma() - (a + b).lgamma()

    def _log_density(self, value: Any) -> Tensor:
        a, b = self.concentration1, self.concentration0
        return ag.xlogy(a - 1, value) + ag.xlogy(b - 1, 1 - value) - self.normalizer()

    def entropy(self) -> Tensor:
        a, b = self.concentration1, self.concentration0
        return self.normalizer() - (a - 1) * a.digamma() - (b - 1) * b.digamma() + (a + b - 2) * (a + b).digamma()

    mean = property(lambda self: self.concentration1 / (self.concentration1 + self.concentration0))

    @property
    def variance(self) -> Tensor:
        a, b = self.concentration1, self.concentration0
        return a * b / ((a + b).square() * (a + b + 1))


class Dirichlet(Distribution):
    """The Dirichlet distribution over vectors whose sum is 1; draws have no gradient."""

    concentration: Tensor
    limits: ClassVar = {
        "concentration": ABOVE_ZERO,
        "value": ("at least 0, with a sum of 1", lambda a: (a >= 0) & (np.abs(a.sum(-1, keepdims=True) - 1) < 1e-5)),
    }

    def __init__(self, concentration: Tensor, validate_args: bool | None = None):
        if not getattr(concentration, "shape", ()):
            raise ShapeError(message("Dirichlet", "concentration must be a tensor with at least 1 dimension", given=repr(concentration)))
        super().__init__(validate_args, concentration=concentration)
        self.batch_shape, self.event_shape = self.batch_shape[:-1], self.batch_shape[-1:]

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        with ag.no_grad():
            return _log_gamma_draws(self.concentration.detach().expand((*sample_shape, *self.concentration.shape))).softmax(-1)

    def normalizer(self) -> Tensor:
        return self.concentration.lgamma().sum(-1) - self.concentration.sum(-1).lgamma()

    def _log_density(self, value: Any) -> Tensor:
        return ag.xlogy(self.concentration - 1, value).sum(-1) - self.normalizer()

    def entropy(self) -> Tensor:
        a, total = self.concentration, self.concentration.sum(-1)
        return self.normalizer() + (total - a.shape[-1]) * total.digamma() - ((a - 1) * a.digamma()).sum(-1)

    mean = property(lambda self: self.concentration / self.concentration.sum(-1, keepdim=True))

    @property
    def variance(self) -> Tensor:
        total = self.concentration.sum(-1, keepdim=True)
        return self.mean * (1 - self.mean) / (total + 1)


class StudentT(Distribution):
    """Student's t-distribution with ``df`` degrees of freedom; draws have no gradient."""

    df: Tensor
    loc: Tensor
    scale: Tensor
    limits: ClassVar = {"df": ABOVE_ZERO, "scale": ABOVE_ZERO}

    def __init__(self, df: TensorOrNumber, loc: TensorOrNumber = 0.0, scale: TensorOrNumber = 1.0, validate_args: bool | None = None):
        super().__init__(validate_args, df=df, loc=loc, scale=scale)

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        with ag.no_grad():
            normal = self.drawn("randn", self.loc, sample_shape)
            spread = Chi2(self.df.detach()).sample(sample_shape) / self.df
            return (self.loc + self.scale * normal / spread.sqrt()).detach()

    def _log_density(self, value: Any) -> Tensor:
        y, half = (value - self.loc) / self.scale, self.df * 0.5
        normalizer = self.scale.log() + self.df.log() * 0.5 + 0.5 * math.log(math.pi) + half.lgamma() - (half + 0.5).lgamma()
        return -(half + 0.5) * (y.square() / self.df).log1p() - normalizer

    @property
    def mean(self) -> Tensor:
        return ag.where(self.df > 1, self.loc, math.nan)

    @property
    def variance(self) -> Tensor:
        spread = self.scale.square() * self.df / (self.df - 2)
        return ag.where(self.df > 2, spread, ag.where(self.df > 1, math.inf, math.nan))


class Poisson(Distribution):
    """The Poisson distribution of counts with mean ``rate``. Draws are made on the host."""

    rate: Tensor
    limits: ClassVar = {"rate": ("at least 0", lambda a: a >= 0), "value": COUNTS}

    def __init__(self, rate: TensorOrNumber, validate_args: bool | None = None):
        super().__init__(validate_args, rate=rate)

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        with ag.no_grad():
            seed = int(creation.CREATION_FUNCTIONS["randint"](0, 2**31 - 1, (1,)).item())
            drawn = np.random.default_rng(seed).poisson(self.rate.to_host(), (*sample_shape, *self.batch_shape))
            return Tensor.from_host(self.rate.queue, drawn, self.rate.dtype)

    def _log_density(self, value: Any) -> Tensor:
        return ag.xlogy(value, self.rate) - self.rate - (value + 1).lgamma()

    mean = property(lambda self: self.rate)
    variance = property(lambda self: self.rate)


class Geometric(Distribution):
    """The number of failures before the first success, which has probability ``probs``."""

    probs: Tensor
    limits: ClassVar = {"probs": ("above 0, at most 1", lambda a: (a > 0) & (a <= 1)), "value": COUNTS}

    def __init__(self, probs: TensorOrNumber | None = None, logits: TensorOrNumber | None = None, validate_args: bool | None = None):
        name, given = pick_one("Geometric", probs, logits)
        super().__init__(validate_args, **{name: given})
        if name == "logits":
            self.probs = self.logits.sigmoid()

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        with ag.no_grad():
            return (self.uniforms(sample_shape).log() / (-self.probs.detach()).log1p()).floor()

    def _log_density(self, value: Any) -> Tensor:
        return value * (-ag.where(value == 0, 0.0, self.probs)).log1p() + self.probs.log()

    mean = property(lambda self: self.probs.reciprocal() - 1)
    variance = property(lambda self: (self.probs.reciprocal() - 1) / self.probs)


class LogNormal(LocationScale):
    """The distribution of the exponential of normal numbers with mean ``loc`` and standard deviation ``scale``."""

    limits: ClassVar = {"scale": ABOVE_ZERO, "value": ABOVE_ZERO}

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        return (self.loc + self.scale * self.drawn("randn", self.loc, sample_shape)).exp()

    def _log_density(self, value: Any) -> Tensor:
        logarithm = value.log()
        return Normal(self.loc, self.scale).log_prob(logarithm) - logarithm

    def entropy(self) -> Tensor:
        return self.loc + self.scale.log() + 0.5 * (1 + math.log(2 * math.pi))

    mean = property(lambda self: (self.loc + self.scale.square() / 2).exp())
    variance = property(lambda self: self.scale.square().expm1() * (self.loc * 2 + self.scale.square()).exp())


class MultivariateNormal(Distribution):
    """The normal distribution of vectors with mean ``loc``, and one of a covariance, a precision and a lower triangular matrix."""

    has_rsample = True
    loc: Tensor
    scale_tril: Tensor
    limits: ClassVar = {
        "scale_tril": (
            "lower triangular with a positive diagonal",
            lambda a: (np.triu(a, 1) == 0) & (a > np.where(np.eye(a.shape[-1]), 0, -np.inf)),
        ),
        **dict.fromkeys(("covariance_matrix", "precision_matrix"), ("symmetric", lambda a: np.isclose(a, a.swapaxes(-1, -2), atol=1e-6))),
    }

    def __init__(
        self,
        loc: Tensor,
        covariance_matrix: Any = None,
        precision_matrix: Any = None,
        scale_tril: Any = None,
        validate_args: bool | None = None,
    ):
        matrices = {"covariance_matrix": covariance_matrix, "precision_matrix": precision_matrix, "scale_tril": scale_tril}
        given = {name: x for name, x in matrices.items() if x is not None}
        if len(given) != 1 or loc.ndim < 1:
            what = "loc must be a vector, and exactly one of covariance_matrix, precision_matrix and scale_tril must be given"
            raise ValueError(message("MultivariateNormal", what, given=len(given)))
        if validate_args:
            self.check(*given.popitem())
        covariance = ag.linalg_inv(precision_matrix) if precision_matrix is not None else covariance_matrix
        tril = scale_tril if scale_tril is not None else ag.linalg_cholesky(covariance)
        batch = np.broadcast_shapes(tril.shape[:-2], loc.shape[:-1])
        super().__init__(validate_args, loc=loc.expand((*batch, loc.shape[-1])))
        self.scale_tril = tril.expand((*batch, *tril.shape[-2:]))
        self.batch_shape, self.event_shape = tuple(batch), loc.shape[-1:]

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        drawn = creation.CREATION_FUNCTIONS["randn"]((*sample_shape, *self.loc.shape, 1), dtype=self.loc.dtype, queue=self.loc.queue)
        return self.loc + (self.scale_tril @ drawn).squeeze(-1)

    def _log_density(self, value: Any) -> Tensor:
        apart = (value - self.loc).unsqueeze(-1)
        tril = self.scale_tril.expand((*apart.shape[:-2], *self.scale_tril.shape[-2:]))
        distance = ag.linalg_solve_triangular(tril, apart, upper=False).square().sum((-2, -1))
        return (distance + self.event_shape[0] * math.log(2 * math.pi)) * -0.5 - self.half_log_det()

    def half_log_det(self) -> Tensor:
        return self.scale_tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    def entropy(self) -> Tensor:
        return self.half_log_det() + 0.5 * self.event_shape[0] * (1 + math.log(2 * math.pi))

    mean = property(lambda self: self.loc)
    variance = property(lambda self: self.scale_tril.square().sum(-1))
    covariance_matrix = property(lambda self: self.scale_tril @ self.scale_tril.mT)


class OneHotCategorical(Categorical):
    """A distribution over vectors with a one in place of the class, else zeros."""

    limits: ClassVar = Categorical.limits | {
        "value": ("0, and once 1", lambda a: ((a == 0) | (a == 1)) & (a.sum(-1, keepdims=True) == 1)),
    }

    def __init__(self, probs: Any = None, logits: Any = None, validate_args: bool | None = None):
        super().__init__(probs, logits, validate_args)
        self.event_shape = (self.classes,)

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        return ag.one_hot(super().sample(sample_shape), self.classes).to(self.probs.dtype)

    def _log_density(self, value: Any) -> Tensor:
        return super()._log_density(value.argmax(-1))

    check_value = Distribution.check_value
    mode = property(lambda self: ag.one_hot(self.probs.argmax(-1), self.classes).to(self.probs.dtype))
    mean = property(lambda self: self.probs)
    variance = property(lambda self: self.probs * (1 - self.probs))


class MixtureSameFamily(Distribution):
    """A mixture of distributions of one kind, the last batch axis of ``component_distribution``; draws have no gradient."""

    def __init__(self, mixture_distribution: Categorical, component_distribution: Distribution, validate_args: bool | None = None):
        batch, classes = component_distribution.batch_shape, getattr(mixture_distribution, "classes", None)
        if not isinstance(mixture_distribution, Categorical) or mixture_distribution.event_shape or (classes,) != batch[-1:]:
            what = "mixture_distribution must be a Categorical with as many classes as the last batch axis of component_distribution"
            raise ValueError(
                message("MixtureSameFamily", what, mixture_distribution=mixture_distribution, classes=classes, batch_shape=batch)
            )
        self.validates, self.component_distribution = bool(validate_args), component_distribution
        self.mixture_distribution = mixture_distribution.expand(batch[:-1])
        self.batch_shape, self.event_shape = batch[:-1], component_distribution.event_shape
        self._axis = -1 - len(self.event_shape)

    def check_value(self, value: Any) -> None:
        self.component_distribution.check_value(value.unsqueeze(self._axis))

    def _log_density(self, value: Any) -> Tensor:
        each = self.component_distribution.log_prob(value.unsqueeze(self._axis))
        return (each + self.mixture_distribution.logits).logsumexp(-1)

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        with ag.no_grad():
            chosen = ag.one_hot(self.mixture_distribution.sample(sample_shape), self.mixture_distribution.classes)
            drawn = self.component_distribution.sample(sample_shape)
            return (drawn * chosen.reshape((*chosen.shape, *(1,) * len(self.event_shape))).to(drawn.dtype)).sum(self._axis)

    @property
    def mean(self) -> Tensor:
        probs = self.mixture_distribution.probs
        return (self.component_distribution.mean * probs.reshape((*probs.shape, *(1,) * len(self.event_shape)))).sum(self._axis)
