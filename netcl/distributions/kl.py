"""Kullback-Leibler divergences, a formula per kind of distribution."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from netcl import autograd as ag
from netcl.core.errors import message
from netcl.core.tensor import Tensor
from netcl.distributions.base import Bernoulli, Categorical, Distribution, Independent, Normal
from netcl.distributions.families import Beta, Dirichlet, Exponential, Gamma, Laplace, LogNormal, MultivariateNormal, Poisson


def _kl_gamma(p: Any, q: Any) -> Tensor:
    a, b, c, d = p.concentration, p.rate, q.concentration, q.rate
    return (a - c) * a.digamma() - a.lgamma() + c.lgamma() + c * (b / d).log() + a * (d / b - 1)


def _kl_beta(p: Any, q: Any) -> Tensor:
    a, b, c, d = p.concentration1, p.concentration0, q.concentration1, q.concentration0
    return q.normalizer() - p.normalizer() + (a - c) * a.digamma() + (b - d) * b.digamma() + (c + d - a - b) * (a + b).digamma()


def _kl_dirichlet(p: Any, q: Any) -> Tensor:
    a, c = p.concentration, q.concentration
    return q.normalizer() - p.normalizer() + ((a - c) * (a.digamma() - a.sum(-1, keepdim=True).digamma())).sum(-1)


def _kl_laplace(p: Any, q: Any) -> Tensor:
    apart = (p.loc - q.loc).abs()
    return (q.scale / p.scale).log() + (apart + p.scale * (-apart / p.scale).exp()) / q.scale - 1


def _kl_multivariate(p: Any, q: Any) -> Tensor:
    inverse = ag.linalg_inv(q.scale_tril)
    distance = (inverse @ (q.loc - p.loc).unsqueeze(-1)).square().sum((-2, -1)) + (inverse @ p.scale_tril).square().sum((-2, -1))
    return q.half_log_det() - p.half_log_det() + (distance - p.event_shape[0]) * 0.5


def _with_limits(p: Tensor, q: Tensor, value: Tensor) -> Tensor:
    """Return ``value``, a divergence of the probabilities ``p`` and ``q``, with its limits 0 where p is 0 and infinity where only q is."""
    return ag.where(p == 0, 0.0, ag.where(q == 0, math.inf, value))


_DIVERGENCES: dict[type, Callable[[Any, Any], Tensor]] = {
    Gamma: _kl_gamma, Beta: _kl_beta, Dirichlet: _kl_dirichlet, Laplace: _kl_laplace, MultivariateNormal: _kl_multivariate,
    Exponential: lambda p, q: (p.rate / q.rate).log() + q.rate / p.rate - 1,
    LogNormal: lambda p, q: kl_divergence(Normal(p.loc, p.scale), Normal(q.loc, q.scale)),
    Poisson: lambda p, q: p.rate * (p.rate.log() - q.rate.log()) - (p.rate - q.rate),
}  # fmt: skip


def kl_divergence(p: Distribution, q: Distribution) -> Tensor:
    """Return the Kullback-Leibler divergence of two distributions of one kind."""
    for kind, formula in _DIVERGENCES.items():
        if isinstance(p, kind) and isinstance(q, kind):
            return formula(p, q)
    if isinstance(p, Normal) and isinstance(q, Normal):
        ratio = (p.scale / q.scale).square()
        return (ratio + ((p.loc - q.loc) / q.scale).square() - 1 - ratio.log()) * 0.5
    if isinstance(p, Categorical) and isinstance(q, Categorical):
        apart = p.probs * (p.finite_logits() - q.finite_logits())
        return _with_limits(p.probs, q.probs, apart).sum(-1)
    if isinstance(p, Bernoulli) and isinstance(q, Bernoulli):
        ones = p.probs * (ag.softplus(-q.logits) - ag.softplus(-p.logits))
        zeros = (1 - p.probs) * (ag.softplus(q.logits) - ag.softplus(p.logits))
        return _with_limits(p.probs, q.probs, ones) + _with_limits(1 - p.probs, 1 - q.probs, zeros)
    if isinstance(p, Independent) and isinstance(q, Independent) and p.event_shape == q.event_shape:
        return p.summed(kl_divergence(p.base_dist, q.base_dist))
    kinds = ", ".join(sorted(kind.__name__ for kind in (*_DIVERGENCES, Normal, Categorical, Bernoulli)))
    what = f"p and q must both be one of {kinds}, or Independent with equal event shapes"
    raise NotImplementedError(message("kl_divergence", what, p=type(p).__name__, q=type(q).__name__))
