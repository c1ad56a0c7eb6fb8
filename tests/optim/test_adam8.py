"""AdamW with averages in 8 bits: its codes, its course beside AdamW's, its memory and its state."""

from __future__ import annotations

import numpy as np
import pytest

import netcl
import netcl.autograd as ag
from netcl import nn, optim
from netcl.core.tensor import Tensor
from netcl.ops.random import manual_seed
from netcl.ops.update import unpack_average

SHAPES = ((3, 300), (256,), (7,), (1,))


def made(queue, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    return [Tensor.from_host(queue, rng.standard_normal(shape), dtype, requires_grad=True) for shape in SHAPES]


def gradients(params, step):
    rng = np.random.default_rng([7, step])
    for p in params:
        values = rng.standard_normal(p.shape) * 10.0 ** rng.uniform(-4, 0, p.shape)  # small ones beside large ones
        values[..., ::5] = 0
        p.grad = Tensor.from_host(p.queue, values, p.dtype)


def averages(optimizer, p):
    state = {name: value.to_host() for name, value in optimizer.state[p].items() if name != "step"}
    return [unpack_average(state[name].reshape(-1), state[f"{name}_scale"], name == "exp_avg").reshape(p.shape)
            for name in ("exp_avg", "exp_avg_sq")]  # fmt: skip


def bits_of(params, optimizer):
    states = [value.to_host().tobytes() for p in params for name, value in optimizer.state[p].items() if name != "step"]
    return [p.to_host().tobytes() for p in params] + states


def test_codes_are_the_neighbors_of_the_averages_and_squares_stay_positive(queue):
    params = made(queue)
    packed, before = optim.AdamW8bit(params, lr=0.1), [p.to_host() for p in params]
    gradients(params, 0)
    packed.step()
    for p, old in zip(params, before, strict=True):
        g = p.grad.to_host()
        m, v = averages(packed, p)
        for found, wanted, gap in ((m, 0.1 * g, 0.0913), (v, 0.001 * g * g, 0.0910)):
            flat, exact = np.abs(found).reshape(-1), np.abs(wanted).reshape(-1)
            for at in range(0, flat.size, 256):
                a, b = flat[at : at + 256], exact[at : at + 256]
                np.testing.assert_allclose(a, b, rtol=gap, atol=2e-6 * b.max())
                assert a.max() == pytest.approx(b.max(), rel=1e-5)
        assert (np.sign(m)[m != 0] == np.sign(g)[m != 0]).all() and ((v > 0) == (g != 0)).all()
        # The move of the first step uses the averages before they are rounded.
        np.testing.assert_allclose(p.to_host(), old * (1 - 0.1 * 0.01) - 0.1 * g / (np.abs(g) + 1e-8), atol=1e-5)


def test_rounding_is_right_on_average(queue):
    p = Tensor.from_host(queue, np.random.default_rng(1).standard_normal(2048 * 256), requires_grad=True)
    g = np.full((2048, 256), 0.01, np.float32)
    g[:, 0] = 1.0
    p.grad = Tensor.from_host(queue, g.reshape(-1))
    optimizer = optim.AdamW8bit([p])
    optimizer.step()
    for average, exact in zip(averages(optimizer, p), (0.1 * 0.01, 0.001 * 0.01**2), strict=True):
        rest = average.reshape(2048, 256)[:, 1:]
        assert len(np.unique(rest)) == 2 and rest.mean() == pytest.approx(exact, rel=1e-3)


def train(kind, steps=120):
    """Noise in the targets leaves a loss that no optimizer goes below, so that small differences stay small."""
    manual_seed(3)
    rng = np.random.default_rng(3)
    x = rng.standard_normal((512, 8)).astype(np.float32)
    y = (x @ rng.standard_normal((8, 4)) + rng.standard_normal((512, 4))).astype(np.float32)
    model, losses = nn.MLP(8, [32], 4), []
    optimizer = kind(model.parameters(), lr=0.01)
    for i in range(steps):
        part = slice(i % 4 * 128, i % 4 * 128 + 128)
        optimizer.zero_grad()
        loss = ag.mse_loss(model(Tensor.from_host(model.queue, x[part])), Tensor.from_host(model.queue, y[part]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses), optimizer


def test_training_follows_adamw_with_a_quarter_of_the_memory(device):
    (plain, wide), (packed, narrow) = train(optim.AdamW), train(optim.AdamW8bit)
    assert packed[0] == plain[0] and plain[-40:].mean() < 0.2 * plain[0]
    np.testing.assert_allclose(packed.reshape(3, 40).mean(1), plain.reshape(3, 40).mean(1), rtol=0.02)

    def size(optimizer):
        return sum(t.to_host().nbytes for state in optimizer.state.values() for name, t in state.items() if name != "step")

    assert size(narrow) <= 0.27 * size(wide)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_state_goes_on_to_the_bit(queue, dtype):
    def run(params, optimizer, steps):
        for step in steps:
            gradients(params, step)
            optimizer.step()

    options = {"lr": 0.05, "master_weights": dtype == "float16"}
    whole = made(queue, dtype)
    through = optim.AdamW8bit(whole, **options)
    run(whole, through, range(6))
    first = made(queue, dtype)
    begun = optim.AdamW8bit(first, **options)
    run(first, begun, range(3))
    saved = {**begun.state_dict(), "state": {i: {k: v.to_host() if isinstance(v, Tensor) else v for k, v in state.items()}
                                             for i, state in begun.state_dict()["state"].items()}}  # fmt: skip
    second = [Tensor.from_host(queue, p.to_host(), dtype, requires_grad=True) for p in first]
    resumed = optim.AdamW8bit(second, lr=1.0)
    resumed.load_state_dict(saved)
    assert bits_of(second, resumed) == bits_of(first, begun)
    run(second, resumed, range(3, 6))
    assert bits_of(second, resumed) == bits_of(whole, through)


def test_a_step_that_the_device_skips_and_a_compiled_one(queue):
    params, twins = made(queue), made(queue)
    optimizers = [optim.AdamW8bit(of, lr=0.05) for of in (params, twins)]
    gradients(params, 0)
    optimizers[0].step()
    before = bits_of(params, optimizers[0])
    optimizers[0].step(found_inf=Tensor.from_host(queue, np.float32(1)))
    assert bits_of(params, optimizers[0]) == before
    optimizers[0].step(found_inf=Tensor.from_host(queue, np.float32(0)))
    assert bits_of(params, optimizers[0]) != before and optimizers[0].state_dict()["state"][0]["step"] == 2

    w, twin = (Tensor.from_host(queue, np.linspace(-1, 1, 600), requires_grad=True) for _ in range(2))
    plain, replayed = optim.AdamW8bit([w], lr=0.05), optim.AdamW8bit([twin], lr=0.05)

    def step(p, optimizer):
        optimizer.zero_grad()
        ag.sum(ag.mul(ag.sin(p), p)).backward()
        optimizer.step()

    fast = netcl.compile(lambda: step(twin, replayed))
    for _ in range(6):
        step(w, plain)
        fast()
    assert replayed.state_dict()["state"][0]["step"] == 6
    np.testing.assert_allclose(twin.to_host(), w.to_host(), atol=1e-5)


def test_what_does_not_fit_is_refused(queue):
    params = made(queue)
    with pytest.raises(ValueError, match=r"\[AdamW8bit\] amsgrad must be False; use AdamW"):
        optim.AdamW8bit(params, amsgrad=True)
    wide = optim.AdamW(params)
    gradients(params, 0)
    wide.step()
    with pytest.raises(ValueError, match="must have 'exp_avg_scale'"):
        optim.AdamW8bit(params).load_state_dict(wide.state_dict())
