"""Probability distributions under torch's names. Parameters that are Python numbers are checked; tensors, and values of ``log_prob``, are
checked with ``validate_args=True``, which reads them back from the device.

>>> import netcl
>>> from netcl.distributions import Categorical
>>> policy = Categorical(logits=netcl.tensor([0.0, 2.0]))
>>> action = policy.sample()
>>> policy.log_prob(action).shape, policy.probs.tolist()[1] > 0.8
((), True)
"""

from netcl.distributions import transforms as transforms
from netcl.distributions.base import Bernoulli, Categorical, Distribution, Independent, Normal, Uniform
from netcl.distributions.families import (
    Beta,
    Chi2,
    Dirichlet,
    Exponential,
    Gamma,
    Geometric,
    Gumbel,
    Laplace,
    LogNormal,
    MixtureSameFamily,
    MultivariateNormal,
    OneHotCategorical,
    Poisson,
    StudentT,
)  # fmt: skip
from netcl.distributions.kl import kl_divergence
from netcl.distributions.transforms import (
    AffineTransform,
    ExpTransform,
    SigmoidTransform,
    TanhTransform,
    Transform,
    TransformedDistribution,
)  # fmt: skip

__all__ = [
    "AffineTransform", "Bernoulli", "Beta", "Categorical", "Chi2", "Dirichlet", "Distribution", "ExpTransform", "Exponential", "Gamma",
    "Geometric", "Gumbel", "Independent", "Laplace", "LogNormal", "MixtureSameFamily", "MultivariateNormal", "Normal",
    "OneHotCategorical", "Poisson", "SigmoidTransform", "StudentT", "TanhTransform", "Transform", "TransformedDistribution", "Uniform",
    "kl_divergence",
]  # fmt: skip
