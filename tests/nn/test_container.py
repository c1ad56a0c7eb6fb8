"""Containers behave like the lists and mappings they are."""

from __future__ import annotations

import numpy as np
import pytest

import netcl
from netcl import nn


def test_sequential_is_a_list():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    assert len(model) == 3 and isinstance(model[-1], nn.Linear) and len(model[:2]) == 2
    model.insert(1, nn.Tanh())
    assert [type(m).__name__ for m in model] == ["Linear", "Tanh", "ReLU", "Linear"]
    assert isinstance(model.pop(1), nn.Tanh)
    assert list(model.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    model[1] = nn.Sigmoid()
    del model[2]
    assert [type(m).__name__ for m in model.append(nn.ReLU())] == ["Linear", "Sigmoid", "ReLU"]
    assert len(nn.Sequential([nn.ReLU(), nn.ReLU()])) == 2
    with pytest.raises(IndexError, match=r"\[Sequential\] index must be in \[-length, length\); index=9, length=3"):
        model[9]
    with pytest.raises(TypeError, match=r"\[add_module\] '3' must be a module"):
        model.append("relu")


def test_sequential_with_names():
    model = nn.Sequential({"one": nn.Linear(2, 2), "two": nn.ReLU()})
    assert list(model.state_dict()) == ["one.weight", "one.bias"]
    assert repr(nn.build(model.config)) == repr(model)


def test_module_list_and_dict():
    layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))
    layers.extend([nn.ReLU()])
    assert len(layers) == 3 and len(layers.parameters()) == 4
    heads = nn.ModuleDict({"a": nn.ReLU()})
    heads["b"] = nn.Linear(1, 1)
    del heads["a"]
    assert (heads.keys(), "b" in heads, len(heads), list(heads)) == (["b"], True, 1, ["b"])
    assert isinstance(dict(heads.items())["b"], nn.Linear) and heads.values() == [heads["b"]]
    with pytest.raises(KeyError, match="there is no module of this name"):
        heads["a"]
    with pytest.raises(ValueError, match="name must be new"):
        heads["keys"] = nn.ReLU()


def test_concat_and_residual(device):
    x = np.float32([[1.0, -2.0]])
    assert nn.Concat(nn.Identity(), nn.ReLU())(x).tolist() == [[1.0, -2.0, 1.0, 0.0]]
    rows = nn.Concat(nn.Identity(), nn.ReLU(), nn.Tanh(), dim=0)
    assert rows(x).shape == (3, 2) and rows[:2](x).shape == (2, 2)
    assert nn.Residual(nn.ReLU(), nn.Tanh(), nn.ReLU())(x).shape == (1, 2)


def outputs_and_gradients(model, x, one_by_one: bool):
    model.zero_grad()
    y = x
    for layer in model if one_by_one else [model]:
        y = layer(y)
    (y * y).sum().backward()
    return [t.to_host() for t in (y, *[p.grad for p in model.parameters()])]


@pytest.mark.parametrize("activation", ["ReLU", "Tanh", "Sigmoid", "SiLU"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_linear_and_its_activation_give_what_both_give_alone(device, rng, activation, dtype):
    with netcl.device(device):
        layers = nn.Linear(33, 20), nn.Linear(20, 17), getattr(nn, activation)(), nn.Linear(17, 5, bias=False), getattr(nn, activation)()
        model = nn.Sequential(*layers).to(dtype)
        x = netcl.tensor(rng.standard_normal((7, 33), np.float32)).to(dtype)
        apart, together = (outputs_and_gradients(model, x, one_by_one) for one_by_one in (True, False))
        close = {"rtol": 1e-6, "atol": 1e-6} if dtype == "float32" else {"rtol": 4e-3, "atol": 4e-3}
        for a, b in zip(apart, together, strict=True):
            np.testing.assert_allclose(b, a, **close)


def test_hooks_and_patches_of_a_linear_and_its_activation_run(device):
    with netcl.device(device):
        model, x, seen = nn.Sequential(nn.Linear(3, 2), nn.ReLU()), netcl.ones((2, 3)), []
        model(x)
        handle = model[0].register_forward_hook(lambda module, args, y: seen.append(y.shape))
        model(x)
        handle.remove()
        model(x)
        model[1].register_forward_hook(lambda module, args, y: y + 5.0)
        assert seen == [(2, 2)] and (model(x).to_host() >= 5).all()
        model[1] = nn.ReLU()
        model[1].forward = lambda y: y * 0.0 + 3.0
        assert model(x).tolist() == [[3.0, 3.0]] * 2


def test_a_compiled_sequential_sees_a_hook_of_an_activation(cl_device):
    model, x = nn.Sequential(nn.Linear(3, 2), nn.ReLU()).to(cl_device), netcl.ones((2, 3), device=cl_device)
    compiled = netcl.compile(lambda x: model(x))
    plain = [compiled(x).tolist() for _ in range(5)][-1]
    handle = model[1].register_forward_hook(lambda module, args, y: y + 1.0)
    np.testing.assert_allclose(compiled(x).tolist(), np.add(plain, 1.0), rtol=1e-6)
    handle.remove()
    model[0].weight.data.zero_()
    np.testing.assert_allclose([compiled(x).tolist() for _ in range(5)][-1], np.maximum([model[0].bias.tolist()] * 2, 0), rtol=1e-6)


def test_a_sequential_may_end_in_a_linear_and_hold_two_in_a_row(device):
    with netcl.device(device):
        model, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 1)), netcl.ones((2, 3))
        wanted = x
        for layer in model:
            wanted = layer(wanted)
        np.testing.assert_allclose(model(x).to_host(), wanted.to_host(), rtol=1e-6)
