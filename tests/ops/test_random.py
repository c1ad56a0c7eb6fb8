"""Random numbers: the generator itself, equality over devices, distributions, states, dropout."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import netcl
import netcl.autograd as ag
from netcl import ops
from netcl.core.device import device as activate
from netcl.core.errors import DtypeError, ShapeError
from netcl.core.tensor import Tensor
from netcl.ops import random


@pytest.fixture(autouse=True)
def seeded():
    random.manual_seed(1234)
    yield
    random.manual_seed(0)


def test_philox_gives_the_published_numbers():
    """The known answer of Random123 for a counter and a key of zeros."""
    assert [hex(word) for word in random.philox(0, 1, 0)[0]] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]


def test_blocks_are_independent_of_where_one_starts():
    np.testing.assert_array_equal(random.philox(2**32 - 2, 4, 99)[1:], random.philox(2**32 - 1, 3, 99))


DRAWS = {
    "rand": lambda dtype: ops.rand(257, dtype=dtype),
    "randn": lambda dtype: ops.randn((5, 51), dtype=dtype),
}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("name", DRAWS)
def test_every_device_draws_what_numpy_draws(name, dtype, cl_device, tol):
    if dtype == "float64" and not cl_device.profile.has_fp64:
        pytest.skip("the device has no float64")
    got = [DRAWS[name](dtype).to_host() for _ in range(2)]
    with activate("cpu"):
        wanted = [DRAWS[name](dtype).to_host() for _ in range(2)]
    assert not np.array_equal(got[0], got[1])
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, **tol[dtype])


def test_integers_and_masks_are_the_same_everywhere(cl_device):
    def draw():
        yield ops.randint(-5, 9, (255,))
        yield ops.randint(2**63 - 1, shape=(9,))
        yield ops.randint(-(2**63), 2**63, (9,))
        yield ops.randint(200, shape=7, dtype="uint8")
        yield ops.bernoulli(Tensor.full((1003,), 0.3))
        yield ops.keep_mask((99,), 0.25)

    got = [t.to_host() for t in draw()]
    with activate("cpu"):
        wanted = [t.to_host() for t in draw()]
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_distributions(device):
    n = 40000
    u, z, k = (t.to_host().astype(np.float64) for t in (ops.rand(n), ops.randn(n), ops.randint(10, shape=n)))
    assert u.min() >= 0 and u.max() < 1 and abs(u.mean() - 0.5) < 0.01 and abs(u.var() - 1 / 12) < 0.005
    assert abs(z.mean()) < 0.02 and abs(z.std() - 1) < 0.02 and abs((z**3).mean()) < 0.1 and abs((z**4).mean() - 3) < 0.2
    assert abs(np.corrcoef(z[:-1], z[1:])[0, 1]) < 0.02
    assert set(np.unique(k)) == set(range(10)) and np.abs(np.bincount(k.astype(int)) / n - 0.1).max() < 0.01


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_uniform_values_never_round_to_one(device, dtype):
    assert ops.rand(20000, dtype=dtype).to_host().max() < 1


def test_a_seed_repeats_and_another_does_not(device):
    first = ops.randn(7).tolist()
    random.manual_seed(1234)
    assert ops.randn(7).tolist() == first
    random.manual_seed(1235)
    assert ops.randn(7).tolist() != first


def test_states_go_back_in_time(device):
    ops.rand(3)
    state = random.get_state()
    first = ops.rand(5).tolist()
    saved = state.as_dict()
    assert saved == {"seed": 1234, "counter": 1}
    random.set_state(state)
    assert ops.rand(5).tolist() == first
    random.set_state(saved)
    assert ops.rand(5).tolist() == first


def test_a_state_taken_is_not_changed_by_drawing(device):
    state = random.get_state()
    ops.rand(100)
    assert state.as_dict()["counter"] == 0


def test_tensor_factories_draw_from_the_stream(device):
    t = Tensor.randn(2, 3, requires_grad=True)
    assert t.shape == (2, 3) and t.requires_grad
    assert Tensor.rand((4,)).to_host().max() < 1


def test_what_cannot_be_drawn_is_refused(device):
    with pytest.raises(DtypeError, match=r"\[rand\] dtype must be a floating-point type; dtype=int64; use randint for integers"):
        ops.rand(3, dtype="int64")
    with pytest.raises(ShapeError, match=r"\[randint\] low must be below high, and uint8 must hold all integers .*; low=0, high=300"):
        ops.randint(300, shape=3, dtype="uint8")
    with pytest.raises(DtypeError, match=r"\[bernoulli\] p must have a dtype that this op accepts"):
        ops.bernoulli(Tensor.zeros((3,), "int64"))
    with pytest.raises(ShapeError, match=r"\[manual_seed\] seed must be an integer; seed=1\.5"):
        random.manual_seed(1.5)


def test_empty_shapes(device):
    assert ops.rand(0, 3).shape == (0, 3) and ops.randn(()).shape == () and ops.randint(5, shape=(0,)).shape == (0,)


# ---- dropout


def test_dropout_keeps_the_mean_and_its_gradient_the_mask(device):
    x = Tensor.ones((20000,), requires_grad=True)
    y = ag.dropout(x, 0.25)
    values = y.to_host()
    assert set(np.unique(values)) == {0.0, np.float32(1 / 0.75)} and abs(values.mean() - 1) < 0.03
    (g,) = ag.grad(y, x, Tensor.ones((20000,)))
    np.testing.assert_array_equal(g.to_host(), values)


def test_dropout_is_the_identity_outside_training(device):
    x = Tensor.ones((5,))
    assert ops.dropout(x, 0.5, training=False) is x and ops.dropout(x, 0.0) is x


def test_dropout_propagates_nan_only_where_kept(device):
    y = ops.dropout(Tensor.full((1000,), float("nan")), 0.5).to_host()
    assert np.isnan(y).any() and (y == 0).any()


def test_the_state_keeps_its_memory(cl_device):
    """Recorded launches read the stream's own buffer, so neither seeding nor going back may replace it."""
    stream = random.stream_of(cl_device.queue)
    buffer = stream.state.buffer
    random.set_state(random.get_state())
    random.manual_seed(5)
    random.set_state({"seed": 1, "counter": 2})
    assert stream.state.buffer is buffer


def test_draws_that_a_dtype_cannot_hold_are_refused(device):
    for dtype, high in (("uint8", 300), ("float16", 2**11 + 2), ("float32", 2**24 + 2), ("bool", 3)):
        with pytest.raises(ShapeError, match=rf"\[randint\] .* {dtype} must hold all integers"):
            netcl.randint(0, high, (4,), dtype=dtype)
        with pytest.raises(ShapeError, match=rf"\[random_\] .* {dtype} must hold all integers"):
            netcl.zeros(4, dtype=dtype).random_(0, high)
    with pytest.raises(ShapeError, match=r"\[manual_seed\] seed must be an integer; seed=2\.7"):
        netcl.Generator().manual_seed(2.7)
    with pytest.raises(ShapeError, match=r"\[randperm\] .* uint8 must hold all integers"):
        netcl.randperm(300, dtype="uint8")
    assert netcl.zeros(1000, dtype="int64").random_().max().item() > 2**32
    assert netcl.randint(2, (99,), dtype="bool").to_host().any()


def test_values_that_are_no_probabilities_are_not_drawn_from(device):
    assert np.isnan(netcl.bernoulli(netcl.tensor([1.5, -0.5, float("nan"), 1.0])).to_host()).tolist() == [True, True, True, False]
    near = netcl.tensor([1 + 1e-12, -1e-60, 1.0, 0.0], dtype="float64")  # the first two are probabilities only in float32
    assert np.array_equal(netcl.bernoulli(near).to_host(), [np.nan, np.nan, 1, 0], equal_nan=True)
    with pytest.raises(ValueError, match=r"\[bernoulli_\] p must be a number from 0 to 1; p=1\.5"):
        netcl.zeros(3).bernoulli_(1.5)
    with pytest.raises(ValueError, match=r"\[exponential_\] lambd must be above 0; lambd=-1"):
        netcl.zeros(3).exponential_(-1.0)
    for weights, count in (([-1.0, 0.5], 1), ([float("nan"), 0.5], 1), ([float("inf"), 0.5], 1), ([0.0, 0.0], 1), ([0.0, 1.0], 2)):
        with pytest.raises(ValueError, match=r"\[multinomial\] the values of input must be finite and not negative"):
            netcl.multinomial(netcl.tensor(weights), count)


def test_multinomial_of_unlike_weights(device):
    weights = np.full(100_000, 1e-12, np.float32)
    weights[0] = 1.0
    random.manual_seed(277)
    assert (netcl.rand(100_000).to_host() == 0).any(), "another seed must draw this number, which is once in 2**24"
    random.manual_seed(277)
    assert (netcl.multinomial(netcl.tensor(weights), 20, replacement=True).to_host() == 0).all()
    drawn = netcl.multinomial(netcl.tensor([1e38, 3e38]), 4000, replacement=True).to_host()
    assert 0.7 < drawn.mean() < 0.8


def test_copies_of_generators(device):
    with netcl.device(device):
        generator = netcl.Generator().manual_seed(3)
        stored = pickle.loads(pickle.dumps(generator))
        assert netcl.rand(4, generator=stored).tolist() == netcl.rand(4, generator=generator).tolist()
        copied = copy.deepcopy(generator)
        assert netcl.rand(4, generator=copied).tolist() == netcl.rand(4, generator=generator).tolist()
        assert copied.random() == generator.random() == stored.random() and copied.initial_seed() == 3
        with pytest.raises(TypeError, match=r"a generator that has drawn numbers on a device cannot be pickled; seed=3"):
            pickle.dumps(generator)
