"""GradScaler: skipped steps, the way of the scale, and nothing read back from the device."""

from __future__ import annotations

import numpy as np
import pytest

from netcl import io, nn, optim
from netcl.amp import GradScaler, autocast
from netcl.core.tensor import Tensor
from tests.runtime.test_capture import both_ways

MAKES = {
    "adam": lambda p: optim.Adam(p, lr=0.1),
    "amsgrad": lambda p: optim.AdamW(p, lr=0.1, amsgrad=True, betas=(0.0, 0.9)),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "dampened": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "rmsprop": lambda p: optim.RMSProp(p, lr=0.01),
    "lion": lambda p: optim.Lion(p, lr=0.01),
}


def parameter(seed: int = 0) -> Tensor:
    return Tensor.from_host(np.random.default_rng(seed).normal(size=7).astype(np.float32), requires_grad=True)


def loss_of(w: Tensor, bad: bool = False) -> Tensor:
    loss = (w * w * w * w).sum() + w.sum()
    return loss * float("inf") if bad else loss


def train(make, steps: int, bad: tuple[int, ...] = (), scaled: bool = True, max_norm: float | None = None):
    """The parameter, its optimizer and the scaler after ``steps``; those of ``bad`` overflow, or without a scaler are left out."""
    w = parameter()
    opt, scaler = make([w]), GradScaler(2.0**10, enabled=scaled)
    for i in range(steps):
        if scaled or i not in bad:
            scaler.scale_loss(loss_of(w, i in bad)).backward()
            scaler.step(opt, max_norm=max_norm)
            scaler.update()
            opt.zero_grad()
    return w, opt, scaler


@pytest.mark.parametrize("name", MAKES)
def test_an_overflow_skips_exactly_that_step_and_halves_the_scale(device, name):
    """Also the first step, after which moments and corrections must be those of a first step."""
    w, opt, scaler = train(MAKES[name], 6, bad=(0, 3))
    plain, other, _ = train(MAKES[name], 6, bad=(0, 3), scaled=False)
    np.testing.assert_allclose(w.to_host(), plain.to_host(), rtol=2e-6, atol=1e-7)
    assert scaler.scale == 2.0**8
    ours, theirs = (o.state_dict()["state"].get(0, {}) for o in (opt, other))
    assert ours.get("step") == theirs.get("step") in (4, None)
    for key in set(ours) - {"step"}:
        np.testing.assert_allclose(ours[key].to_host(), theirs[key].to_host(), rtol=2e-5, atol=1e-7)


def test_a_skipped_step_changes_no_bit(device):
    w, _, _ = train(MAKES["adam"], 2)
    later, _, scaler = train(MAKES["adam"], 3, bad=(2,))
    np.testing.assert_array_equal(w.to_host(), later.to_host())
    assert scaler.scale == 2.0**9


def test_the_scale_grows_after_good_steps_only(device):
    w = parameter()
    opt, scaler = optim.SGD([w], lr=0.0), GradScaler(8.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=2)
    scales = []
    for bad in (0, 0, 0, 1, 0, 0, 1):
        scaler.scale_loss(loss_of(w, bool(bad))).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        scales.append(scaler.scale)
    assert scales == [8, 32, 32, 8, 8, 32, 8]


def test_the_scale_never_becomes_zero(device):
    """One over it would be infinite, and what follows a long row of overflows NaN."""
    w = parameter()
    opt, scaler = optim.SGD([w], lr=0.1), GradScaler(2.0**-99, backoff_factor=0.1)
    for bad in (True, True, False):
        opt.zero_grad()
        scaler.scale_loss(loss_of(w, bad)).backward()
        scaler.step(opt)
        scaler.update()
    assert scaler.scale == 2.0**-100 and np.isfinite(w.to_host()).all()


def test_clipping_acts_on_unscaled_gradients(device):
    w, *_ = train(MAKES["momentum"], 4, bad=(1,), max_norm=0.5)
    plain, *_ = train(MAKES["momentum"], 4, bad=(1,), scaled=False, max_norm=0.5)
    np.testing.assert_allclose(w.to_host(), plain.to_host(), rtol=1e-5)


def test_a_scale_at_which_the_norm_overflows_is_too_large(device):
    w = parameter()
    opt, scaler, before = optim.SGD([w], lr=0.1), GradScaler(2.0**90), w.to_host()
    for _ in range(40):
        scaler.scale_loss(loss_of(w)).backward()
        scaler.step(opt, max_norm=1.0)
        scaler.update()
        opt.zero_grad()
    assert not np.array_equal(before, w.to_host())


def test_the_state_of_a_scaler_that_is_off_does_not_turn_one_off():
    state = GradScaler(enabled=False).state_dict()
    with pytest.raises(ValueError, match=r"\[GradScaler\] an enabled scaler must load the state of an enabled one"):
        GradScaler().load_state_dict(state)
    off = GradScaler(enabled=False)
    off.load_state_dict(GradScaler().state_dict())
    assert not off.enabled


def test_gradients_can_be_unscaled_first(device):
    w = parameter()
    opt, scaler = optim.SGD([w], lr=0.5), GradScaler(64.0)
    scaler.scale_loss(loss_of(w)).backward()
    scaler.unscale_grads(opt)
    start, gradient = w.to_host(), w.grad.to_host()
    np.testing.assert_allclose(gradient, 4 * start**3 + 1, rtol=1e-5)
    with pytest.raises(RuntimeError, match=r"\[unscale_grads\] the gradients of an optimizer must be unscaled only once"):
        scaler.unscale_grads(opt)
    scaler.step(opt)
    scaler.update()
    np.testing.assert_allclose(w.to_host(), start - 0.5 * gradient, rtol=1e-6)
    with pytest.raises(RuntimeError, match=r"\[GradScaler\] at least one parameter must have a gradient"):
        opt.zero_grad()
        scaler.step(opt)


def test_each_optimizer_steps_once_between_updates(device):
    first, second = parameter(1), parameter(2)
    opts, scaler = [optim.SGD([p], lr=0.1) for p in (first, second)], GradScaler(8.0)
    with pytest.raises(RuntimeError, match=r"\[update\] step\(\) or unscale_grads\(\) must be called before update\(\)"):
        scaler.update()
    for _ in range(2):
        opts[0].zero_grad()
        opts[1].zero_grad()
        scaler.scale_loss(loss_of(first) + loss_of(second)).backward()
        with pytest.raises(ValueError, match=r"\[GradScaler\] params must hold every parameter of the optimizer"):
            scaler.step(opts[0], [second])
        for opt in opts:
            scaler.step(opt)
            for again in (scaler.step, scaler.unscale_grads):
                with pytest.raises(RuntimeError, match="must step only once between two calls of update"):
                    again(opt)
        scaler.update()


def test_a_step_reads_nothing_back(cl_device, monkeypatch):
    w = parameter()
    opt, scaler = optim.Adam([w]), GradScaler()

    def step(bad: bool) -> None:
        scaler.scale_loss(loss_of(w, bad)).backward()
        scaler.step(opt, max_norm=1.0)
        scaler.update()
        opt.zero_grad()

    step(False)

    def refuse(*args, **kwargs):
        raise AssertionError("the host has read a value")

    with monkeypatch.context() as patch:
        for name in ("to_host", "to_host_async"):
            patch.setattr(f"netcl.core.backend.opencl.OpenCLBackend.{name}", refuse)
        step(True)
        step(False)
    assert scaler.scale == 2.0**15 and opt.state_dict()["state"][0]["step"] == 2


def test_parameters_left_out_of_a_step_keep_their_own_count(device):
    a, b = parameter(0), parameter(1)
    opt, scaler = optim.Adam([a, b], lr=0.1), GradScaler(4.0)
    for used, bad in (((a, b), 0), ((a,), 0), ((a, b), 1), ((b,), 0)):
        for p in used:
            scaler.scale_loss(loss_of(p, bool(bad))).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    assert [opt.state_dict()["state"][i]["step"] for i in (0, 1)] == [2, 2]
    loss_of(a).backward()
    opt.step()  # and on the host again
    assert [opt.state_dict()["state"][i]["step"] for i in (0, 1)] == [3, 2]


class Foreign:
    """An optimizer that knows nothing of netcl's."""

    def __init__(self, params):
        self.param_groups = [{"params": params}]
        self.steps = 0

    def step(self):
        self.steps += 1
        self.seen = self.param_groups[0]["params"][0].grad.to_host()


def test_any_optimizer_will_do(device):
    w = parameter()
    opt, scaler = Foreign([w]), GradScaler(16.0)
    for bad in (False, True):
        w.zero_grad()
        scaler.scale_loss(loss_of(w, bad)).backward()
        scaler.step(opt)
        scaler.update()
    assert (opt.steps, scaler.scale) == (1, 8.0)
    np.testing.assert_allclose(opt.seen, 4 * w.to_host() ** 3 + 1, rtol=1e-5)


def test_state_goes_through_a_checkpoint_file(device, tmp_path):
    _, opt, scaler = train(MAKES["adam"], 3, bad=(1,))
    scaler.growth_interval = 7
    model = nn.Linear(2, 2)
    io.save_checkpoint(tmp_path / "c.netcl", model=model, optimizer=opt, scaler=scaler)
    again, other = GradScaler(), optim.Adam([parameter()], lr=0.1)
    io.load_checkpoint(tmp_path / "c.netcl", model=model, optimizer=other, scaler=again)
    assert again.state_dict() == scaler.state_dict() and again.state_dict()["growth_tracker"] == 1
    assert other.state_dict()["state"][0]["step"] == 2
    scaler.load_state_dict({**again.state_dict(), "scale": 2.0})
    assert scaler.scale == 2.0 and scaler.scale_loss(Tensor.ones(())).item() == 2.0
    with pytest.raises(ValueError, match=r"\[GradScaler\] the state dict must have the key 'scale'"):
        scaler.load_state_dict({"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 1})


def test_half_parameters_with_masters(device):
    w = Tensor.from_host(np.full(3, 100.0), dtype="float16", requires_grad=True)
    opt, scaler = optim.SGD([w], lr=1e-3, master_weights=True), GradScaler(256.0)
    for _ in range(20):  # each move is below what float16 can see at 100
        scaler.scale_loss(w.sum()).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    np.testing.assert_allclose(opt.state_dict()["state"][0]["master"].to_host(), 100 - 20e-3, rtol=1e-6)


def test_options_are_checked():
    rules = {
        "init_scale": (0.0, "in"),
        "growth_factor": (1.0, "above 1"),
        "backoff_factor": (1.0, "between 0 and 1"),
        "growth_interval": (0, "at least 1"),
    }
    for name, (value, rule) in rules.items():
        with pytest.raises(ValueError, match=rf"\[GradScaler\] {name} must be {rule}"):
            GradScaler(**{name: value})
    assert optim.AMPGradScaler is GradScaler
    off = GradScaler(enabled=False)
    loss = Tensor.ones(())
    assert off.scale_loss(loss) is loss and off.scale == 1.0


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.matrix)])
def test_digits_are_learnt_as_well_as_in_float32(device, dtype):
    """One seed of what benchmarks/amp.py does with three."""
    import netcl.autograd as ag
    from netcl.data.datasets import digits
    from netcl.ops import random

    train_set, _ = digits()
    x, y = (np.stack([np.asarray(train_set[i][part]) for i in range(512)]) for part in (0, 1))

    def final(half: bool) -> float:
        random.manual_seed(3)
        model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10))
        opt, scaler, losses = optim.Adam(model.parameters(), lr=2e-2), GradScaler(enabled=half and dtype == "float16"), []
        for step in range(32):
            part = slice(64 * step % 512, 64 * step % 512 + 64)
            with autocast(half, dtype):
                loss = ag.cross_entropy(model(Tensor.from_host(x[part])), Tensor.from_host(y[part]))
            opt.zero_grad()
            scaler.scale_loss(loss).backward()
            scaler.step(opt)
            scaler.update()
            losses.append(loss.detach())
        return float(np.mean([loss.item() for loss in losses[-8:]]))

    plain, half = final(False), final(True)
    assert plain < 0.8 and abs(half / plain - 1) < 0.01


def small_step(compiled: bool, update_inside: bool):
    """A step of mixed precision with what it returns, its optimizer and scaler; ``k`` multiplies the loss."""
    import netcl
    import netcl.autograd as ag
    from netcl.ops import random

    random.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    opt, scaler = optim.Adam(model.parameters(), lr=1e-2), GradScaler(2.0**10, growth_interval=4)

    def step(x, y, k):
        opt.zero_grad()
        with autocast():
            loss = ag.cross_entropy(model(x), y) * k
        scaler.scale_loss(loss).backward()
        scaler.step(opt, max_norm=1.0)
        if update_inside:
            scaler.update()
        return loss

    return netcl.compile(step) if compiled else step, opt, scaler


@pytest.mark.parametrize("update_inside", [True, False])
def test_a_compiled_step_skips_and_scales_as_an_eager_one(cl_device, update_inside):
    x, y = np.random.default_rng(0).random((8, 6), np.float32), np.arange(8) % 3
    told = []
    for compiled in (False, True):
        step, opt, scaler = small_step(compiled, update_inside)
        losses = []
        for i in range(12):
            losses.append(step(x, y, Tensor.from_host(np.float32(np.inf if i in (6, 9) else 1.0))).item())
            if not update_inside:
                scaler.update()
        told.append((losses, scaler.state_dict(), opt.state_dict()["state"][0]["step"]))
    assert told[0] == told[1] and told[0][2] == 10
    assert len(step.graphs) == 1 and step.refused == []


@pytest.mark.parametrize("change", ["another optimizer overflows", "gradients are unscaled before", "it is switched off"])
def test_what_happened_to_a_scaler_before_a_compiled_step_counts(cl_device, change):
    def run(way):
        first, second = parameter(1), parameter(2)
        opts, scaler, told = [optim.SGD([p], lr=0.1) for p in (first, second)], GradScaler(8.0), []

        @way
        def step(x):
            scaler.step(opts[1])

        for i in range(10):
            late = i >= 6
            opts[0].zero_grad(set_to_none=False)
            opts[1].zero_grad(set_to_none=False)
            scaler.enabled = not (late and change == "it is switched off")
            scaler.scale_loss(loss_of(first, late) + loss_of(second)).backward()
            if late and change == "another optimizer overflows":
                scaler.step(opts[0])
            if late and change == "gradients are unscaled before":
                scaler.unscale_grads(opts[1])
            step(Tensor.ones(1))
            scaler.update()
            told += [first.detach().clone(), second.detach().clone(), scaler.scale]
        return told

    both_ways(run)


def test_a_device_is_refused_by_name():
    with pytest.raises(TypeError, match=r"\[GradScaler\] init_scale must be a number; init_scale='cuda'; leave a device out"):
        GradScaler("cuda")
