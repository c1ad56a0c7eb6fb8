"""Containers behave like the lists and mappings they are."""

from __future__ import annotations

import numpy as np
import pytest

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
