"""Averages of weights."""

from __future__ import annotations

import numpy as np
import pytest

from netcl.core.errors import ShapeError
from netcl.core.hooks import hooks
from netcl.core.tensor import Tensor
from netcl.optim import ModelEMA


class Model:
    """As much of a module as an average asks for."""

    def __init__(self, queue, rng, dtype="float32"):
        self.weights = {
            name: Tensor.from_host(queue, rng.standard_normal(shape).astype(np.float32), dtype, requires_grad=True)
            for name, shape in (("body.weight", (5, 51)), ("body.bias", (257,)), ("scale", ()))
        }

    def named_parameters(self):
        return iter(self.weights.items())


def test_follows_the_weights(queue, rng):
    model = Model(queue, rng)
    ema = ModelEMA(model, decay=0.9)
    expected = {name: w.to_host().astype(np.float64) for name, w in model.weights.items()}
    for _ in range(10):
        for name, w in model.weights.items():
            w.from_host(w.to_host() + 1)
            expected[name] = 0.9 * expected[name] + 0.1 * w.to_host()
        ema.update()
    for name, value in expected.items():
        np.testing.assert_allclose(ema.shadow[name].to_host(), value, rtol=1e-5, atol=1e-6)


def test_apply_and_restore(queue, rng):
    model = Model(queue, rng, "float16")
    ema = ModelEMA(model, decay=0.5)
    own = {}
    for name, w in model.weights.items():
        w.from_host(w.to_host() * 2)
        own[name] = w.to_host()
    ema.update()
    shadow = {name: t.to_host() for name, t in ema.shadow.items()}
    assert {t.dtype for t in ema.shadow.values()} == {"float32"}
    with ema.applied():
        for name, w in model.weights.items():
            np.testing.assert_array_equal(w.to_host(), shadow[name].astype(np.float16))
        with pytest.raises(RuntimeError, match=r"\[ModelEMA\] the averages must not be applied during update\(\); call restore\(\) first"):
            ema.update()
        with pytest.raises(RuntimeError, match=r"\[ModelEMA\] the averages must not be applied twice"):
            ema.apply()
    for name, w in model.weights.items():
        np.testing.assert_array_equal(w.to_host(), own[name])
        np.testing.assert_array_equal(ema.shadow[name].to_host(), shadow[name])
    with pytest.raises(RuntimeError, match=r"\[ModelEMA\] apply\(\) must be called before restore\(\)"):
        ema.restore()


def test_restores_after_an_error(queue, rng):
    model = Model(queue, rng)
    ema = ModelEMA(model, decay=0.0)
    before = model.weights["scale"].item()
    model.weights["scale"].from_host(np.float32(before + 1))
    with pytest.raises(KeyError), ema.applied():
        assert model.weights["scale"].item() == before
        raise KeyError
    assert model.weights["scale"].item() == np.float32(before + 1)


def test_warmup(queue):
    w = Tensor.zeros((1,), queue=queue)
    ema = ModelEMA([w], decay=0.999, warmup=True)
    w.fill_(1.0)
    ema.update()
    np.testing.assert_allclose(ema.shadow["0"].item(), 1 - 2 / 11, rtol=1e-6)


def test_state_resumes_bit_for_bit(queue, rng):
    model = Model(queue, rng)
    first = ModelEMA(model, decay=0.9, warmup=True)
    for w in model.weights.values():
        w.from_host(w.to_host() * 3)
    first.update()
    second = ModelEMA(dict(model.weights), decay=0.1)
    second.load_state_dict(first.state_dict())
    for ema in (first, second):
        ema.update()
    assert second.updates == 2 and second.decay == 0.9 and second.warmup
    for name in model.weights:
        np.testing.assert_array_equal(second.shadow[name].to_host(), first.shadow[name].to_host())


def test_error_texts(queue, rng):
    ema = ModelEMA(Model(queue, rng))
    state = ema.state_dict()
    with pytest.raises(ValueError, match=r"exactly the parameters of the model; missing=\['scale'\], unexpected=\['other'\]"):
        shadow = {("other" if name == "scale" else name): t for name, t in state["shadow"].items()}
        ema.load_state_dict({**state, "shadow": shadow})
    with pytest.raises(ShapeError, match=r"\[ModelEMA\] 'scale' must have shape \(\), as the parameter has; saved=\(2,\)"):
        ema.load_state_dict({**state, "decay": 0.5, "shadow": {**state["shadow"], "scale": np.zeros(2)}})
    assert ema.decay == 0.999
    with pytest.raises(ValueError, match=r"\[ModelEMA\] decay must be a number, at least 0 and at most 1; decay=1.5"):
        ModelEMA([Tensor.zeros((1,), queue=queue)], decay=1.5)
    with pytest.raises(ValueError, match=r"\[ModelEMA\] the model must have parameters"):
        ModelEMA([])
    with pytest.raises(TypeError, match=r"\[ModelEMA\] '0' must be a tensor of floats"):
        ModelEMA([Tensor.zeros((1,), "int32", queue=queue)])


def test_an_update_is_one_launch(cl_queue):
    ema = ModelEMA([Tensor.zeros((i + 1,), queue=cl_queue) for i in range(20)])
    ema.update()
    seen = []
    hooks.launch_observers.append(lambda kernel, *_: seen.append(kernel.name))
    try:
        ema.update()
    finally:
        hooks.launch_observers.pop()
    assert seen == ["update"]
