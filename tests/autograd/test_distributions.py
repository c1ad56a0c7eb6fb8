"""``netcl.distributions`` against the formulas, and ``netcl.Generator``."""

from __future__ import annotations

import math

import numpy as np
import pytest

import netcl
from netcl import distributions as D
from netcl import nn

#: Parameters, a value, and log_prob, entropy, mean and variance as torch 2.13 computes them.
L, S = (0.3, -1.0, 2.0), (0.5, 1.0, 2.0)
NORMAL = -0.5 * math.log(2 * math.pi)


def near(tensor, wanted, tolerance=2e-5):
    np.testing.assert_allclose(tensor.to_host(), wanted, rtol=tolerance, atol=tolerance)


def test_densities(device):
    with netcl.device(device):
        loc, scale, value = (netcl.tensor(list(x)) for x in (L, S, (0.2, 0.4, 1.5)))
        z = (np.array([0.2, 0.4, 1.5]) - L) / np.array(S)
        near(D.Normal(loc, scale).log_prob(value), NORMAL - z * z / 2 - np.log(S))
        near(D.Normal(loc, scale).cdf(loc), [0.5] * 3)
        near(D.Normal(loc, scale).entropy(), 0.5 - NORMAL + np.log(S))
        near(D.Uniform(loc, loc + scale).log_prob(loc), -np.log(S))
        assert D.Uniform(0.0, 1.0).log_prob(netcl.tensor(2.0)).item() == -math.inf
        near(D.Bernoulli(logits=loc).log_prob(netcl.tensor([1.0, 0.0, 1.0])), -np.log1p(np.exp([-0.3, -1.0, -2.0])))
        one = D.Categorical(netcl.tensor([1.0, 1.0, 2.0]))
        near(one.log_prob(netcl.tensor([0, 2])), np.log([0.25, 0.5]))
        near(one.entropy(), 1.5 * math.log(2))
        near(D.Independent(D.Normal(loc, scale), 1).log_prob(loc), 3 * NORMAL - np.log(S).sum())


def test_divergences(device):
    with netcl.device(device):
        loc, scale = netcl.tensor(list(L)), netcl.tensor(list(S))
        wanted = np.array(S) ** 2 / 2 + np.array(L) ** 2 / 2 - 0.5 - np.log(S)
        near(D.kl_divergence(D.Normal(loc, scale), D.Normal(0.0, 1.0)), wanted)
        near(D.kl_divergence(D.Independent(D.Normal(loc, scale), 1), D.Independent(D.Normal(loc, scale), 1)), 0.0)
        near(D.kl_divergence(D.Categorical(netcl.tensor([0.5, 0.5])), D.Categorical(netcl.tensor([0.25, 0.75]))), 0.5 * math.log(4 / 3))
        near(D.kl_divergence(D.Bernoulli(0.5), D.Bernoulli(0.25)), 0.5 * math.log(4 / 3))
        with pytest.raises(NotImplementedError, match=r"\[kl_divergence\] p and q must both be one of .*; p=Normal, q=Uniform"):
            D.kl_divergence(D.Normal(0.0, 1.0), D.Uniform(0.0, 1.0))


@pytest.mark.parametrize("made", [lambda: D.Normal(1.0, 0.5), lambda: D.Uniform(1.0, 3.0), lambda: D.Bernoulli(0.3)], ids=lambda f: "")
def test_draws_have_the_mean_and_variance(made):
    with netcl.device("cpu"):
        netcl.manual_seed(2)
        distribution = made()
        drawn = distribution.sample((4000,)).to_host()
        assert drawn.shape == (4000, *distribution.batch_shape, *distribution.event_shape)
        np.testing.assert_allclose(drawn.mean(0), distribution.mean.to_host(), atol=0.05)
        np.testing.assert_allclose(drawn.var(0), distribution.variance.to_host(), atol=0.05)


def test_gradients_flow_through_rsample_and_log_prob():
    with netcl.device("cpu"):
        loc = netcl.zeros(3, requires_grad=True)
        D.Normal(loc, 1.0).rsample((2,)).sum().backward()
        assert loc.grad.tolist() == [2.0, 2.0, 2.0]
        logits = netcl.zeros(2, requires_grad=True)
        D.Categorical(logits=logits).log_prob(netcl.tensor(1)).backward()
        assert logits.grad.tolist() == [-0.5, 0.5] and not D.Normal(loc, 1.0).sample().requires_grad
        with pytest.raises(NotImplementedError, match=r"\[Categorical\] draws of this distribution have no gradient; use sample\(\)"):
            D.Categorical(logits=logits).rsample()
        with pytest.raises(NotImplementedError, match=r"\[Categorical\] mean is not defined"):
            D.Categorical(logits=logits).mean  # noqa: B018
        with pytest.raises(ValueError, match=r"\[Bernoulli\] exactly one of probs and logits must be given; given=\[\]"):
            D.Bernoulli()
        with pytest.raises(ValueError, match=r"\[Categorical\] probs must be a tensor with at least 1 dimension; given=\[0.2, 0.8\]"):
            D.Categorical([0.2, 0.8])


def test_a_generator_has_its_own_seed(device):
    with netcl.device(device):
        draws = {
            "randn": lambda g: netcl.randn(5, generator=g), "rand_like": lambda g: netcl.rand_like(netcl.ones(5), generator=g),
            "randint": lambda g: netcl.randint(0, 99, (5,), generator=g), "randperm": lambda g: netcl.randperm(9, generator=g),
            "multinomial": lambda g: netcl.multinomial(netcl.ones(50), 5, generator=g),
            "bernoulli": lambda g: netcl.bernoulli(netcl.full((40,), 0.5), generator=g),
            "normal_": lambda g: netcl.empty(5).normal_(generator=g),
            "init": lambda g: nn.init.xavier_uniform_(netcl.empty(3, 3), generator=g),
        }  # fmt: skip
        generator = netcl.Generator()
        for name, draw in draws.items():
            first, second = draw(generator.manual_seed(4)).tolist(), draw(generator).tolist()
            netcl.manual_seed(9)
            plain = netcl.rand(2).tolist()
            again = draw(generator.manual_seed(4)).tolist()
            netcl.manual_seed(9)
            draw(generator)
            assert first == again != second and netcl.rand(2).tolist() == plain, name
        assert generator.initial_seed() == 4 and generator.seed() == generator.initial_seed() != 4
        with pytest.raises(TypeError, match=r"\[randn\] generator must be a netcl.Generator; given=int"):
            netcl.randn(2, generator=3)


def test_a_function_that_draws_from_a_generator_can_be_compiled(device):
    with netcl.device(device):
        generator = netcl.Generator().manual_seed(1)
        step = netcl.compile(lambda x: x + netcl.randn(3, generator=generator))
        drawn = [step(netcl.zeros(3)).tolist() for _ in range(5)]
        generator.manual_seed(1)
        np.testing.assert_allclose(drawn, [netcl.randn(3, generator=generator).tolist() for _ in range(5)])


def test_numpy_numbers_are_parameters(device):
    with netcl.device(device):
        x = netcl.tensor([-1.0, 0.5, 2.0])
        assert x.clamp(np.float32(0), np.float64(1)).tolist() == [0.0, 0.5, 1.0] and (x * np.float64(2)).dtype == netcl.float32


@pytest.mark.parametrize(
    "make",
    [
        lambda t: D.Normal(0.0, -1.0), lambda t: D.Uniform(2.0, 1.0), lambda t: D.Bernoulli(1.5),
        lambda t: D.Normal(t([0.0]), t([0.0]), validate_args=True), lambda t: D.Uniform(t([1.0]), t([1.0]), validate_args=True),
        lambda t: D.Categorical(probs=t([-1.0, 2.0]), validate_args=True),
        lambda t: D.Categorical(logits=t([math.nan, 2.0]), validate_args=True),
        lambda t: D.Bernoulli(t([0.5]), validate_args=True).log_prob(t([0.5])),
        lambda t: D.Categorical(t([0.5, 0.5]), validate_args=True).log_prob(t([2.0])),
        lambda t: D.Uniform(t([0.0]), t([1.0]), validate_args=True).log_prob(t([1.5])),
        lambda t: D.Normal(t([0.0]), t([1.0]), validate_args=True).log_prob(t([math.nan])),
    ],
)  # fmt: skip
def test_invalid_values_raise(make, device):
    with netcl.device(device), pytest.raises(ValueError, match=r"\[(Normal|Uniform|Bernoulli|Categorical)\] .* must be"):
        make(netcl.tensor)


def test_invalid_values_are_accepted_without_validation(device):
    with netcl.device(device):
        assert math.isnan(D.Normal(0.0, -1.0, validate_args=False).entropy().item())
        assert math.isnan(D.Normal(netcl.tensor(0.0), netcl.tensor(-1.0)).entropy().item())


#: Distribution, values, and log_prob as torch 2.13 computes it.
V = (0.2, 0.5, 0.9)
FAMILIES = {
    "LogNormal": (lambda: D.LogNormal(0.1, 0.5), V, (-4.46071, -0.79081, -0.20478)),
    "Laplace": (lambda: D.Laplace(0.1, 0.7), V, (-0.47933, -0.9079, -1.47933)),
    "Gumbel": (lambda: D.Gumbel(0.0, 2.0), V, (-1.69798, -1.72195, -1.78078)),
    "Beta": (lambda: D.Beta(2.0, 3.0), V, (0.42918, 0.40547, -2.22562)),
    "Gamma": (lambda: D.Gamma(2.0, 3.0), V, (-0.01221, 0.00408, -0.60814)),
    "Exponential": (lambda: D.Exponential(2.0), V, (0.29315, -0.30685, -1.10685)),
    "StudentT": (lambda: D.StudentT(3.0), V, (-1.02738, -1.16097, -1.47892)),
    "Chi2": (lambda: D.Chi2(3.0), V, (-1.82366, -1.51551, -1.42162)),
    "Dirichlet": (lambda: D.Dirichlet(netcl.tensor([1.0, 2.0, 3.0])), (0.2, 0.3, 0.5), 1.50408),
    "Poisson": (lambda: D.Poisson(3.0), (0.0, 2.0, 5.0), (-3.0, -1.49592, -2.29443)),
    "Geometric": (lambda: D.Geometric(0.3), (0.0, 2.0), (-1.20397, -1.91732)),
    "MultivariateNormal": (lambda: D.MultivariateNormal(netcl.zeros(2), scale_tril=TRIL()), ((0.1, 0.2), (1.0, -1.0)),
                           (-2.53884, -3.31227)),
    "OneHotCategorical": (lambda: D.OneHotCategorical(logits=netcl.tensor([0.0, 1.0, 2.0])), (0.0, 0.0, 1.0), -0.40761),
    "tanh": (lambda: D.TransformedDistribution(D.Normal(0.0, 1.0), [D.TanhTransform(cache_size=1)]), V, (-0.89867, -0.78213, -0.34192)),
    "affine": (lambda: D.TransformedDistribution(D.Normal(0.0, 1.0), D.AffineTransform(1.0, 2.0)), V, (-1.69209, -1.64334, -1.61334)),
    "logistic": (
        lambda: D.TransformedDistribution(D.Uniform(0.0, 1.0), [D.SigmoidTransform().inv, D.AffineTransform(0.5, 1.5)]),
        V, (-1.80174, -1.79176, -1.80948),
    ),
    "mixture": (
        lambda: D.MixtureSameFamily(D.Categorical(netcl.tensor([0.3, 0.7])), D.Normal(netcl.tensor([0.0, 1.0]), netcl.tensor([1.0, 0.5]))),
        V, (-1.29974, -0.81108, -0.46635),
    ),
}  # fmt: skip


def TRIL():
    return netcl.tensor([[1.0, 0.0], [0.5, 2.0]])


@pytest.mark.parametrize("name", FAMILIES)
def test_family(device, name):
    make, values, wanted = FAMILIES[name]
    with netcl.device(device):
        near(make().log_prob(netcl.tensor(values)), wanted, 1e-4)
        netcl.manual_seed(1)
        drawn, made = make().sample((4000,)), make()
        assert drawn.shape == (4000, *made.batch_shape, *made.event_shape) and not drawn.requires_grad
        try:
            mean, spread = made.mean.to_host(), made.stddev.to_host()
        except NotImplementedError:
            return
        assert (np.abs(drawn.to_host().mean(0) - mean) <= 5 * spread / math.sqrt(4000)).all()
        assert np.allclose(drawn.to_host().std(0), spread, rtol=0.25 if name != "StudentT" else 1)


def test_divergences_and_entropies_of_families(device):
    def t(*values):
        return netcl.tensor(list(values) if len(values) > 1 else values[0])

    with netcl.device(device):
        near(D.kl_divergence(D.Laplace(t(0.0), t(1.0)), D.Laplace(t(1.0), t(2.0))), 0.37709, 1e-4)
        near(D.kl_divergence(D.Beta(t(2.0), t(1.0)), D.Beta(t(1.0), t(2.0))), 1.0, 1e-4)
        covariance = TRIL() @ TRIL().mT
        other = D.MultivariateNormal(netcl.ones(2), covariance)
        near(D.kl_divergence(D.MultivariateNormal(netcl.zeros(2), netcl.eye(2)), other), 0.88065, 1e-4)
        near(other.entropy(), 3.53102, 1e-4)
        near(other.variance, [1.0, 4.25])
        near(D.kl_divergence(D.Dirichlet(t(1.0, 2.0)), D.Dirichlet(t(2.0, 2.0))), 0.40139, 1e-4)
        near(D.kl_divergence(D.Gamma(t(1.0), t(2.0)), D.Gamma(t(2.0), t(2.0))), 0.57722, 1e-4)
        near(D.Gamma(t(2.0), t(3.0)).entropy(), 0.4786, 1e-4)
        near(D.Beta(t(2.0), t(3.0)).entropy(), -0.23491, 1e-4)
        near(D.Dirichlet(t(1.0, 2.0, 3.0)).entropy(), -1.24434, 1e-4)
        near(D.Normal(0.0, 1.0).icdf(t(0.2, 0.5, 0.9)), [-0.84162, 0.0, 1.28155], 1e-4)
        with pytest.raises(NotImplementedError, match="draws of this distribution have no gradient; use sample"):
            D.Gamma(1.0, 1.0).rsample()
        with pytest.raises(ValueError, match="exactly one of covariance_matrix, precision_matrix and scale_tril"):
            D.MultivariateNormal(netcl.zeros(2))


def VEC(*values, **options):
    return netcl.tensor(list(values), **options)


INF = math.inf
#: Distributions at the edge of their parameters, and values of torch 2.13.
EDGES = {
    "numbers take the dtype of tensors": (lambda: D.Normal(VEC(0.5, dtype="float64"), 0.1).log_prob(VEC(0.0, dtype="float64")),
                                          [-11.116353440210595]),
    "a masked class": (lambda: D.Categorical(logits=VEC(-INF, 0.0, 0.0)).entropy(), 0.6931471805599453),
    "divergence of a masked class": (lambda: D.kl_divergence(D.Categorical(logits=VEC(-INF, 0.0)), D.Categorical(VEC(0.5, 0.5))),
                                     0.6931471805599453),
    "an impossible class": (lambda: D.kl_divergence(D.Categorical(VEC(0.5, 0.5)), D.Categorical(VEC(1.0, 0.0))), INF),
    "an impossible truth": (lambda: D.kl_divergence(D.Bernoulli(VEC(0.3, 1.0)), D.Bernoulli(VEC(0.0, 1.0))), [INF, 0.0]),
    "a sure success": (lambda: D.Geometric(VEC(1.0)).log_prob(VEC(0.0)), [0.0]),
    "an exponential gamma": (lambda: D.Gamma(1.0, 2.0).log_prob(VEC(0.0)), [0.6931471805599453]),
    "the mode of vectors": (lambda: D.OneHotCategorical(VEC(0.1, 0.7, 0.2)).mode, [0.0, 1.0, 0.0]),
    "values of a larger batch": (lambda: D.Bernoulli(VEC(0.5)).log_prob(netcl.ones(2, 2)), [[-0.6931471805599453] * 2] * 2),
    "one event": (lambda: D.TransformedDistribution(D.Normal(netcl.zeros(2), 1.0), D.AffineTransform(1.0, VEC(2.0, 4.0), event_dim=1))
                  .log_prob(VEC(1.0, 5.0)), -4.417318608089113),
    "an infinite value": (lambda: D.AffineTransform(1.0, 2.0).log_abs_det_jacobian(VEC(INF), VEC(INF)), [0.6931471805599453]),
}  # fmt: skip


@pytest.mark.parametrize("case", EDGES)
def test_edges_of_distributions(case):
    compute, wanted = EDGES[case]
    with netcl.device("cpu"):
        result = compute()
        np.testing.assert_allclose(result.to_host(), wanted, rtol=1e-14 if result.dtype == "float64" else 1e-6)


def test_shapes_of_distributions():
    with netcl.device("cpu"):
        moved = D.TransformedDistribution(D.Normal(0.0, 1.0), D.AffineTransform(netcl.zeros(3), 1.0))
        assert moved.batch_shape == (3,) and len(set(moved.sample().tolist())) == 3
        whole = D.TransformedDistribution(D.Normal(netcl.zeros(2, 3), 1.0), D.AffineTransform(0.0, 1.0, event_dim=1))
        assert (whole.batch_shape, whole.event_shape) == ((2,), (3,)) and whole.log_prob(netcl.ones(2, 3)).shape == (2,)
        mixture = D.MixtureSameFamily(D.Categorical(VEC(0.5, 0.5)), D.Normal(netcl.zeros(2, 2), 1.0))
        assert mixture.batch_shape == (2,) and mixture.sample((2,)).shape == (2, 2) and mixture.expand((3, 2)).sample().shape == (3, 2)
        near(D.Independent(D.Normal(netcl.zeros(2), 1.0), 1).expand((4,)).log_prob(netcl.zeros(2)), [2 * NORMAL] * 4)
        with pytest.raises(ValueError, match=r"\[MixtureSameFamily\] mixture_distribution must be a Categorical with as many classes"):
            D.MixtureSameFamily(D.Categorical(VEC(0.5, 0.5)), D.Normal(netcl.zeros(3), 1.0))
        with pytest.raises(ValueError, match=r"\[MultivariateNormal\] the last dimensions of value must be the event shape \(2,\)"):
            D.MultivariateNormal(netcl.zeros(2), netcl.eye(2)).log_prob(netcl.zeros(1))


def test_draws_at_the_limits_of_the_dtype():
    with netcl.device("cpu"):
        netcl.manual_seed(3)
        drawn = D.Beta(0.01, 0.01).sample((4000,)).to_host()
        assert drawn.min() > 0 and drawn.max() < 1 and 0.01 < ((drawn > 0.1) & (drawn < 0.9)).mean() < 0.03  # torch: 0.022
        for kind in (D.Laplace, D.Gumbel):
            half = kind(VEC(0.0, dtype="float16"), 1.0).sample((5000,))
            assert half.dtype == "float16" and np.isfinite(half.to_host()).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: D.Laplace(0.0, 1.0, True).log_prob(VEC(math.nan)), lambda: D.Geometric(0.5, validate_args=True).log_prob(VEC(0.5)),
        lambda: D.Categorical(VEC(0.5, 0.5), validate_args=True).log_prob(VEC(0.5)),
        lambda: D.Categorical(VEC(0.0, 0.0), validate_args=True),
        lambda: D.Dirichlet(VEC(1.0, 1.0), True).log_prob(VEC(0.5, 0.6)),
        lambda: D.OneHotCategorical(VEC(0.5, 0.5), validate_args=True).log_prob(VEC(0.5, 0.5)),
        lambda: D.MultivariateNormal(VEC(0.0, 0.0), VEC([1.0, 0.5], [0.0, 1.0]), validate_args=True),
        lambda: D.MultivariateNormal(VEC(0.0, 0.0), scale_tril=-netcl.eye(2), validate_args=True),
        lambda: D.Independent(D.Uniform(VEC(0.0), VEC(1.0)), 1, True).log_prob(VEC(1.5)),
        lambda: D.TransformedDistribution(D.Normal(0.0, 1.0), D.ExpTransform(), True).log_prob(VEC(-1.0)),
        lambda: D.MixtureSameFamily(D.Categorical(VEC(1.0)), D.Exponential(VEC(1.0)), True).log_prob(VEC(-1.0)),
    ],
)  # fmt: skip
def test_validate_args_checks_events(make):
    with netcl.device("cpu"), pytest.raises(ValueError, match=r"\[\w+\] .* must be"):
        make()
