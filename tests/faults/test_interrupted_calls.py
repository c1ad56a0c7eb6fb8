"""Ctrl-C at any place of netcl: what runs afterwards computes the right values."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import netcl
import netcl.autograd as ag
from netcl import nn, optim
from netcl.core.tensor import Tensor

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of destructors that are interrupted


def interrupted(function: Callable[[], Any], after: int) -> bool:
    """Call ``function`` and raise ``KeyboardInterrupt`` at the place number ``after`` that it reaches in netcl; False if it reaches fewer.

    The places are those where Python raises it: the begin of a function and the return from a function in C. At the begin of ``__exit__``,
    Python itself gives no way to restore what the block has set.
    """
    left = after

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal left
        if event not in ("call", "c_return") or "netcl" not in frame.f_code.co_filename:
            return
        if frame.f_code.co_name == "__del__" or (event == "call" and frame.f_code.co_name == "__exit__"):
            return
        left -= 1
        if left < 0:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        function()
    except KeyboardInterrupt as error:
        sys.last_value = error  # as interactive shells do: the frames of the interrupted call stay alive
        return True
    finally:
        sys.setprofile(None)
    return False


def at_every_place(run: Callable[[], Callable[[], Any]], check: Callable[[], None], step: int = 1) -> None:
    """Interrupt what ``run()`` prepares at one place after another, ``step`` apart, and call ``check`` after each interrupt."""
    after = 0
    while interrupted(run(), after):
        check()
        after += step
    check()
    assert after > 0


def labels_of(rng: np.random.Generator, queue: Any) -> tuple[Tensor, Tensor]:
    x = Tensor.from_host(queue, rng.normal(size=(16, 20)).astype(np.float32))
    return x, Tensor.from_host(queue, rng.integers(0, 4, 16).astype(np.int32))


@pytest.mark.fault("Ctrl-C in a write to a view", "`KeyboardInterrupt` at every place of five writes", "the views agree with their base")
@pytest.mark.parametrize(
    "write",
    [
        lambda x: x[:, 2].fill_(3.0),
        lambda x: x.T[1].mul_(0.5),
        lambda x: x[2].copy_(x[1] + 1.0),
        lambda x: x.__setitem__((slice(None), [0, 3]), x[:, [1, 2]]),
        lambda x: x.__iadd__(1.0),
    ],
    ids=["fill_", "mul_", "copy_", "setitem", "iadd"],
)
def test_views_follow_an_interrupted_write(queue, write):
    kept: list[Tensor] = []

    def run() -> Callable[[], Any]:
        x = Tensor.from_host(queue, np.arange(20, dtype=np.float32).reshape(4, 5))
        kept[:] = x, x[1], x[:, 1:3]
        for view in kept:
            view.to_host()  # the views hold copies
        return lambda: write(x)

    def check() -> None:
        x = kept[0].to_host()
        np.testing.assert_array_equal(kept[1].to_host(), x[1])
        np.testing.assert_array_equal(kept[2].to_host(), x[:, 1:3])

    at_every_place(run, check)


@pytest.mark.fault(
    "Ctrl-C in a compiled step", "`KeyboardInterrupt` at every place of a replay", "the next call computes with its own inputs and numbers"
)
def test_a_replay_after_an_interrupted_replay(cl_queue):
    """Neither inputs nor numbers of the interrupted replay are used again."""
    rng = np.random.default_rng(0)
    model, twin = (nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(2))
    optimizer, rate = optim.SGD(model.parameters(), lr=0.1), [0.1, 0.01]
    first = labels_of(rng, cl_queue)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = ag.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    compiled = netcl.compile(step)
    for _ in range(4):
        compiled(*first)
    assert compiled.graphs

    def run() -> Callable[[], Any]:
        optimizer.param_groups[0]["lr"] = rate[1]
        batch = labels_of(rng, cl_queue)
        return lambda: compiled(*batch)

    def check() -> None:
        optimizer.param_groups[0]["lr"] = rate[0]
        twin.load_state_dict(model.state_dict())
        loss = ag.cross_entropy(twin(first[0]), first[1])
        parameters = list(twin.parameters())
        wanted = [p.to_host() - rate[0] * g.to_host() for p, g in zip(parameters, ag.grad(loss, parameters), strict=True)]
        assert compiled(*first).item() == pytest.approx(loss.item(), rel=1e-5)
        for p, value in zip(model.parameters(), wanted, strict=True):
            np.testing.assert_allclose(p.to_host(), value, rtol=1e-4, atol=1e-6)

    at_every_place(run, check)
    assert not compiled.refused


@pytest.mark.fault("Ctrl-C while a step is recorded", "`KeyboardInterrupt` at every 20th place", "recorded and replayed by the next calls")
def test_an_interrupted_recording(cl_queue):
    """The next calls are recorded and replayed, and ops outside of the function are not recorded."""
    rng = np.random.default_rng(0)
    weight = Tensor.from_host(cl_queue, rng.normal(size=(8, 8)).astype(np.float32))
    kept: list[Any] = []

    def function(x: Tensor) -> Tensor:
        return ag.softmax(ag.matmul(x, weight), axis=1) + x.sum(0)

    def fresh() -> Tensor:
        return Tensor.from_host(cl_queue, rng.normal(size=(5, 8)).astype(np.float32))

    def run() -> Callable[[], Any]:
        kept[:] = [netcl.compile(function)]
        kept[0](fresh())
        return lambda: [kept[0](fresh()), kept[0](fresh())]

    def check() -> None:
        for _ in range(6):
            x = fresh()
            np.testing.assert_allclose(kept[0](x).to_host(), function(x).to_host(), rtol=1e-5, atol=1e-6)
        assert kept[0].graphs and not kept[0].refused

    at_every_place(run, check, step=20)


@pytest.mark.fault("Ctrl-C in a mode block", "`KeyboardInterrupt` at every place, in `no_grad` and `autocast`", "modes are as before")
def test_an_interrupted_block_leaves_its_mode(queue):
    w = Tensor.from_host(queue, np.ones((3, 3), np.float32))

    def run() -> Callable[[], Any]:
        def step() -> None:
            with netcl.amp.autocast(dtype="bfloat16"), netcl.no_grad():
                ag.matmul(w, w)

        return step

    def check() -> None:
        assert ag.is_grad_enabled()
        assert ag.matmul(w, w).dtype == "float32"

    at_every_place(run, check)


@pytest.mark.fault("Ctrl-C in backward", "`KeyboardInterrupt` at every place", "gradients are enabled")
def test_an_interrupted_backward_leaves_gradients_enabled(queue):
    w = Tensor.from_host(queue, np.ones((3, 3), np.float32))
    w.requires_grad = True

    def run() -> Callable[[], Any]:
        loss = ag.tanh(ag.matmul(w, w)).sum()
        return loss.backward

    def check() -> None:
        assert ag.is_grad_enabled()
        assert ag.relu(w).requires_grad

    at_every_place(run, check)
