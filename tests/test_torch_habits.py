"""What scripts written for PyTorch rely on: values, dtypes, names and errors, on every device."""

from __future__ import annotations

import math

import numpy as np
import pytest

import netcl
import netcl.autograd as ag
from netcl import nn, optim
from netcl.core.errors import DtypeError, ShapeError
from netcl.torch import averaging


@pytest.fixture(autouse=True)
def on_device(device):
    with netcl.device(device):
        yield


# ---- values


def test_slices_take_values_of_other_dtypes():
    x = netcl.zeros(2, 3)
    x[0] = netcl.tensor([1, 2, 3])
    x[1] = netcl.tensor([True, False, True])
    whole = netcl.zeros(2, dtype=netcl.int64)
    whole[:1] = netcl.tensor([2.7])
    assert (x.tolist(), x.dtype, whole.tolist()) == ([[1.0, 2.0, 3.0], [1.0, 0.0, 1.0]], "float32", [2, 0])
    with pytest.raises(DtypeError, match="must have the same dtype"):
        x[x > 1] = netcl.tensor([1, 2, 3, 4])


def test_limits_are_python_numbers():
    assert [type(netcl.finfo(d).max) for d in ("float16", "bfloat16", "float32")] == [float] * 3
    assert netcl.finfo("float16").max * 2 == 131008.0 and netcl.finfo("float32").eps == 2.0**-23 and netcl.finfo("float16").bits == 16
    assert (netcl.float32.is_floating_point, netcl.int64.is_floating_point, netcl.float16.itemsize) == (True, False, 2)


def test_rounding_to_decimals_and_coordinates_as_tuple():
    x = netcl.tensor([[1.2345, 0.0], [0.0, 2.345]])
    assert np.allclose(netcl.round(x, decimals=2).tolist(), [[1.23, 0], [0, 2.34]], atol=1e-2) and x.round(decimals=-1).sum().item() == 0
    rows, columns = x.nonzero(as_tuple=True)
    assert (rows.tolist(), columns.tolist()) == ([0, 1], [0, 1]) and netcl.nonzero(x).shape == (2, 2)


def test_sums_and_lengths_of_small_dtypes_neither_wrap_around_nor_vanish():
    y, x = netcl.tensor([255, 255, 1], dtype="uint8"), netcl.tensor([0, 10, 1], dtype="uint8")
    assert (netcl.trapezoid(y).item(), netcl.trapezoid(y, x).item(), netcl.cumulative_trapezoid(y).tolist()) == (
        383.0,
        1398.0,
        [255.0, 383.0],
    )
    zero, one = netcl.zeros(1, 2, dtype="float16"), netcl.ones(1, 2, dtype="float16")
    assert nn.functional.cosine_similarity(zero, one).item() == 0.0 and math.isfinite(netcl.info_nce(zero, one).item())


def test_shapes_change_in_place():
    x = netcl.arange(6.0).reshape(2, 3).clone()
    assert x.t_() is x and x.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert x.unsqueeze_(0).shape == (1, 3, 2) and x.squeeze_(0).transpose_(0, 1).shape == (2, 3)
    x += 1
    assert x.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    assert x.fill_diagonal_(0).tolist() == [[0.0, 2.0, 3.0], [4.0, 0.0, 6.0]] and netcl.zeros(2, 2, 2).fill_diagonal_(3).sum().item() == 6
    with pytest.raises(ShapeError, match=r"write x = x.squeeze"):
        netcl.ones(1, 2, requires_grad=True).squeeze_()


def test_gradients_pass_parts_that_are_replaced():
    x, src = ag.tensor(np.ones((3, 2), np.float32), requires_grad=True), ag.tensor([5.0, 6.0], requires_grad=True)
    (netcl.select_scatter(x, src, 0, 1) * netcl.arange(6.0).reshape(3, 2)).sum().backward()
    assert x.grad.tolist() == [[0.0, 1.0], [0.0, 0.0], [4.0, 5.0]] and src.grad.tolist() == [2.0, 3.0]
    values = ag.tensor([3.0, math.nan, 1.0, 2.0], requires_grad=True)
    netcl.nanmedian(values).backward()
    assert values.grad.tolist() == [0.0, 0.0, 0.0, 1.0]


# ---- functions and optimizers of the user


class SortedWithPlaces(ag.Function):
    @staticmethod
    def forward(ctx, x):
        y, places = x.sort()
        ctx.save_for_backward(places)
        ctx.mark_non_differentiable(places)
        ctx.set_materialize_grads(False)
        return y, places

    @staticmethod
    def backward(ctx, grad, none):
        assert none is None
        return netcl.zeros(3).scatter(0, ctx.saved_tensors[0], grad)


class Tripled(ag.Function):
    @staticmethod
    def forward(x, by):
        return x * by

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.by = inputs[1]

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.by, None


def test_functions_with_indices_and_with_setup_context():
    x = ag.tensor([3.0, 1.0, 2.0], requires_grad=True)
    y, places = SortedWithPlaces.apply(x)
    assert y.requires_grad and not places.requires_grad
    (y * netcl.arange(3.0)).sum().backward()
    assert x.grad.tolist() == [2.0, 0.0, 1.0]
    x.grad = None
    Tripled.apply(x, 3.0).sum().backward()
    assert x.grad.tolist() == [3.0] * 3


class Plain(optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def step(self):
        with netcl.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    if not state:
                        state["step"], state["mean"] = 0, netcl.zeros_like(p)
                    state["step"] += 1
                    state["mean"].mul_(0.5).add_(p.grad, alpha=0.5)
                    p.add_(state["mean"], alpha=-group["lr"] * group.get("lr_scale", 1.0))


def test_an_optimizer_of_the_user_keeps_and_restores_its_state():
    p = nn.Parameter([1.0, 2.0])
    opt = Plain([{"params": [p], "lr_scale": 2.0}])
    p.grad = netcl.ones(2)
    opt.step()
    assert np.allclose(p.tolist(), [0.9, 1.9])
    q = nn.Parameter(p.detach().clone())
    other = Plain([{"params": [q], "lr_scale": 2.0}])
    other.load_state_dict(opt.state_dict())
    for one, by in ((p, opt), (q, other)):
        one.grad = netcl.ones(2)
        by.step()
    assert p.tolist() == q.tolist() and other.state[q]["step"] == 2 and np.allclose(p.tolist(), [0.75, 1.75])


# ---- shapes


def test_pools_take_one_sample_and_repetitions_collapse():
    x = netcl.arange(32.0).reshape(2, 4, 4)
    y, places = nn.functional.max_pool2d(x, 2, return_indices=True)
    assert y.shape == places.shape == (2, 2, 2) and y[0].tolist() == [[5.0, 7.0], [13.0, 15.0]]
    assert nn.AdaptiveAvgPool2d(1)(x).flatten().tolist() == [7.5, 23.5] and nn.AvgPool1d(2)(x[0]).shape == (4, 2)
    values, places, counts = netcl.unique_consecutive(netcl.tensor([1, 1, 2, 2, 1]), return_inverse=True, return_counts=True)
    assert (values.tolist(), places.tolist(), counts.tolist()) == ([1, 2, 1], [0, 0, 1, 1, 2], [2, 2, 1])
    rows = netcl.tensor([[1, 2], [1, 2], [3, 2]])
    assert netcl.unique_consecutive(rows, axis=0).tolist() == [[1, 2], [3, 2]] and netcl.unique_consecutive(rows[:0]).tolist() == []


def test_masks_of_large_tensors_combine():
    """Above the size from which comparisons are deferred, one kernel compares floats and combines the results."""
    a = netcl.arange(-150_000.0, 150_000.0)
    inside = (a > -3) & (a < 3)
    assert inside.sum().item() == 5 and inside.dtype == "bool"
    assert ((a < -149_999) | (a >= 149_998)).sum().item() == 3 and ((a > 0) ^ (a > 2)).sum().item() == 2
    assert netcl.where((a > 1) & (a < 4), a, 0.0).sum().item() == 5 and a[(a >= 0) & (a <= 2)].tolist() == [0.0, 1.0, 2.0]
    assert ((a.long() & 1) == (a % 2 == 1)).all() and (inside & True).sum().item() == 5


def test_weights_are_averaged_and_rates_annealed():
    layer = nn.Linear(1, 1, bias=False)
    layer.weight.data.fill_(1.0)
    equal, decaying = (
        averaging.AveragedModel(layer),
        averaging.AveragedModel(layer, multi_avg_fn=averaging.SWA_NAMES["get_ema_multi_avg_fn"](0.9)),
    )
    for value in (1.0, 2.0, 6.0):
        layer.weight.data.fill_(value)
        equal.update_parameters(layer)
        decaying.update_parameters(layer)
    assert np.allclose([m.module.weight.item() for m in (equal, decaying)], [3.0, 1.59]) and equal.n_averaged.item() == 3
    opt = optim.SGD(layer.parameters(), lr=0.1)
    schedule = averaging.SWALR(opt, swa_lr=0.05, anneal_epochs=2)
    rates = []
    for _ in range(3):
        opt.step()
        schedule.step()
        rates.append(schedule.get_last_lr()[0])
    assert np.allclose(rates, [0.075, 0.05, 0.05])
    at_once = averaging.SWALR(optim.SGD(layer.parameters(), lr=0.1), swa_lr=0.05, anneal_epochs=0)
    assert at_once.get_last_lr() == [0.05]
    opt = optim.SGD(layer.parameters(), lr=0.1)
    parts = [optim.ExponentialLR(opt, 0.5), averaging.SWALR(opt, swa_lr=0.01, anneal_epochs=2, anneal_strategy="linear")]
    both = optim.SequentialLR(opt, parts, [2])
    rates = []
    for _ in range(4):
        both.step()
        rates.append(both.get_last_lr()[0])
    assert np.allclose(rates, [0.05, 0.05, 0.03, 0.01])  # torch 2.13: annealed from the rate of the step before, not from 0.1
    norm = nn.BatchNorm1d(1)
    averaging.update_bn([netcl.tensor([[1.0], [3.0]]), netcl.tensor([[5.0], [7.0]])], norm)
    assert np.allclose(norm.running_mean.tolist(), [4.0]) and norm.momentum == 0.1 and norm.training
