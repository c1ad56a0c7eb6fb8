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


class Density(Distribution):
    """Base class of distributions whose ``log_prob`` is a formula of the value and the parameters."""

    def log_prob(self, value: Any) -> Tensor:
        if self.validates and "value" in self.limits:
            self.check("value", value)
        return self._log_density(value)

    def _log_density(self, value: Any) -> Tensor:
        raise NotImplementedError

    def _uniform(self, sample_shape: Sequence[int]) -> Tensor:
        """Return uniform numbers above 0 and below 1."""
        like = next(x for x in vars(self).values() if isinstance(x, Tensor))
        return self.drawn("rand", like, sample_shape).clamp(creation.finfo(like.dtype).tiny, 1 - creation.finfo(like.dtype).eps)


class Laplace(LocationScale, Density):
    """The Laplace distribution around ``loc``."""

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        u = self._uniform(sample_shape) - 0.5
        return self.loc - self.scale * u.sign() * (-u.abs() * 2).log1p()

    def _log_density(self, value: Any) -> Tensor:
        return -(self.scale * 2).log() - (value - self.loc).abs() / self.scale

    def cdf(self, value: Any) -> Tensor:
        """Return the probability of values up to ``value``."""
        return 0.5 - (value - self.loc).sign() * (-(value - self.loc).abs() / self.scale).expm1() * 0.5

    def entropy(self) -> Tensor:
        return (self.scale * 2).log() + 1

    mean = property(lambda self: self.loc)
    variance = property(lambda self: self.scale.square() * 2)


class Gumbel(LocationScale, Density):
    """The Gumbel distribution of the largest of many values."""

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        return self.loc + self.scale * creation.gumbel_noise((*sample_shape, *self.batch_shape), self.loc)

    def _log_density(self, value: Any) -> Tensor:
        y = (self.loc - value) / self.scale
        return y - y.exp() - self.scale.log()

    def entropy(self) -> Tensor:
        return self.scale.log() + (1 + np.euler_gamma)

    mean = property(lambda self: self.loc + self.scale * float(np.euler_gamma))
    variance = property(lambda self: self.scale.square() * (math.pi**2 / 6))


class Exponential(Density):
    """The exponential distribution with ``rate`` events per unit."""

    has_rsample = True
    rate: Tensor
    limits: ClassVar = {"rate": ABOVE_ZERO, "value": ("at least 0", lambda a: a >= 0)}

    def __init__(self, rate: TensorOrNumber, validate_args: bool | None = None):
        super().__init__(validate_args, rate=rate)

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        return -(-self._uniform(sample_shape)).log1p() / self.rate

    def _log_density(self, value: Any) -> Tensor:
        return self.rate.log() - self.rate * value

    def entropy(self) -> Tensor:
        return 1 - self.rate.log()

    mean = property(lambda self: self.rate.reciprocal())
    variance = property(lambda self: self.rate.pow(-2))


class Gamma(Density):
    """The gamma distribution; draws have no gradient."""

    concentration: Tensor
    rate: Tensor
    limits: ClassVar = {"concentration": ABOVE_ZERO, "rate": ABOVE_ZERO, "value": ABOVE_ZERO}

    def __init__(self, concentration: TensorOrNumber, rate: TensorOrNumber, validate_args: bool | None = None):
        super().__init__(validate_args, concentration=concentration, rate=rate)

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        with ag.no_grad():
            shape = (*sample_shape, *self.batch_shape)
            return _gamma_draws(self.concentration.detach().expand(shape)) / self.rate.detach()

    def _log_density(self, value: Any) -> Tensor:
        a, b = self.concentration, self.rate
        value = value if isinstance(value, Tensor) else Tensor.full((), value, a.dtype, queue=a.queue)
        return a * b.log() + (a - 1) * value.log() - b * value - a.lgamma()

    def entropy(self) -> Tensor:
        a = self.concentration
        return a - self.rate.log() + a.lgamma() + (1 - a) * a.digamma()

    mean = property(lambda self: self.concentration / self.rate)
    variance = property(lambda self: self.concentration / self.rate.square())


def _gamma_draws(a: Tensor) -> Tensor:
    """Draw gamma numbers by the method of Marsaglia and Tsang (2000), with 16 proposals each: all are rejected once in 10^20 draws."""
    raised = ag.where(a < 1, a + 1, a)
    d = raised - 1 / 3
    draw = creation.CREATION_FUNCTIONS
    normal, uniform = (draw[kind]((16, *a.shape), dtype=a.dtype, queue=a.queue) for kind in ("randn", "rand"))
    v = (1 + normal / (d * 9).sqrt()).pow(3)
    accepted = (v > 0) & (uniform.log() < normal.square() * 0.5 + d - d * v + d * v.clamp(min=1e-30).log())
    first = accepted.to("int32").argmax(0, keepdims=True)
    made = d * v.gather(0, first).squeeze(0)
    small = draw["rand"](a.shape, dtype=a.dtype, queue=a.queue)
    return ag.where(a < 1, made * small.clamp(min=1e-30).pow(1 / a), made).clamp(min=creation.finfo(a.dtype).tiny)


class Chi2(Gamma):
    """The chi-squared distribution with ``df`` degrees of freedom."""

    def __init__(self, df: TensorOrNumber, validate_args: bool | None = None):
        super().__init__(df * 0.5, df * 0 + 0.5, validate_args)

    df = property(lambda self: self.concentration * 2)


class Beta(Density):
    """The beta distribution over numbers from 0 to 1; draws have no gradient."""

    concentration1: Tensor
    concentration0: Tensor
    limits: ClassVar = {"concentration1": ABOVE_ZERO, "concentration0": ABOVE_ZERO, "value": ("from 0 to 1", lambda a: (a >= 0) & (a <= 1))}

    def __init__(self, concentration1: TensorOrNumber, concentration0: TensorOrNumber, validate_args: bool | None = None):
        super().__init__(validate_args, concentration1=concentration1, concentration0=concentration0)

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        with ag.no_grad():
            shape = (*sample_shape, *self.batch_shape)
            one, zero = (_gamma_draws(c.detach().expand(shape)) for c in (self.concentration1, self.concentration0))
            return one / (one + zero)

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


class Dirichlet(Density):
    """The Dirichlet distribution over vectors whose sum is 1; draws have no gradient."""

    concentration: Tensor
    limits: ClassVar = {"concentration": ABOVE_ZERO}

    def __init__(self, concentration: Tensor, validate_args: bool | None = None):
        if not getattr(concentration, "shape", ()):
            raise ShapeError(message("Dirichlet", "concentration must be a tensor with at least 1 dimension", given=repr(concentration)))
        super().__init__(validate_args, concentration=concentration)
        self.batch_shape, self.event_shape = self.batch_shape[:-1], self.batch_shape[-1:]

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        with ag.no_grad():
            drawn = _gamma_draws(self.concentration.detach().expand((*sample_shape, *self.concentration.shape)))
            return drawn / drawn.sum(-1, keepdim=True)

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


class StudentT(Density):
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


class Poisson(Density):
    """The Poisson distribution of counts with mean ``rate``. Draws are made on the host."""

    rate: Tensor
    limits: ClassVar = {"rate": ("at least 0", lambda a: a >= 0), "value": ("integers from 0", lambda a: (a >= 0) & (a == np.floor(a)))}

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


class Geometric(Density):
    """The number of failures before the first success, which has probability ``probs``."""

    probs: Tensor
    limits: ClassVar = {"probs": ("above 0, at most 1", lambda a: (a > 0) & (a <= 1)), "value": ("at least 0", lambda a: a >= 0)}

    def __init__(self, probs: TensorOrNumber | None = None, logits: TensorOrNumber | None = None, validate_args: bool | None = None):
        name, given = pick_one("Geometric", probs, logits)
        super().__init__(validate_args, **{name: given})
        if name == "logits":
            self.probs = self.logits.sigmoid()

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        with ag.no_grad():
            return (self._uniform(sample_shape).log() / (-self.probs.detach()).log1p()).floor()

    def _log_density(self, value: Any) -> Tensor:
        return value * (-self.probs).log1p() + self.probs.log()

    mean = property(lambda self: self.probs.reciprocal() - 1)
    variance = property(lambda self: (self.probs.reciprocal() - 1) / self.probs)


class LogNormal(LocationScale, Density):
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


class MultivariateNormal(Density):
    """The normal distribution of vectors with mean ``loc``, and one of a covariance, a precision and a lower triangular matrix."""

    has_rsample = True
    loc: Tensor
    scale_tril: Tensor

    def __init__(
        self,
        loc: Tensor,
        covariance_matrix: Any = None,
        precision_matrix: Any = None,
        scale_tril: Any = None,
        validate_args: bool | None = None,
    ):
        given = [x for x in (covariance_matrix, precision_matrix, scale_tril) if x is not None]
        if len(given) != 1 or loc.ndim < 1:
            what = "loc must be a vector, and exactly one of covariance_matrix, precision_matrix and scale_tril must be given"
            raise ValueError(message("MultivariateNormal", what, given=len(given)))
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

    def __init__(self, probs: Any = None, logits: Any = None, validate_args: bool | None = None):
        super().__init__(probs, logits, validate_args)
        self.event_shape = (self.classes,)

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        return ag.one_hot(super().sample(sample_shape), self.classes).to(self.probs.dtype)

    def log_prob(self, value: Any) -> Tensor:
        return super().log_prob(value.argmax(-1))

    mean = property(lambda self: self.probs)
    variance = property(lambda self: self.probs * (1 - self.probs))


class MixtureSameFamily(Distribution):
    """A mixture of distributions of one kind, the last batch axis of ``component_distribution``; draws have no gradient."""

    def __init__(self, mixture_distribution: Categorical, component_distribution: Distribution, validate_args: bool | None = None):
        self.mixture_distribution, self.component_distribution = mixture_distribution, component_distribution
        self.batch_shape, self.event_shape = component_distribution.batch_shape[:-1], component_distribution.event_shape
        self._axis = -1 - len(self.event_shape)

    def log_prob(self, value: Any) -> Tensor:
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
