"""Optimizers against torch's trajectories, their state, their errors, and how many launches a step takes."""

from __future__ import annotations

import json
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from netcl import optim
from netcl.autograd import no_grad
from netcl.core.device import manager
from netcl.core.errors import DtypeError, ShapeError
from netcl.core.hooks import hooks
from netcl.core.kernels import program
from netcl.core.tensor import Tensor

GOLDEN = Path(__file__).parent.parent / "golden" / "optim.npz"


@cache
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN, allow_pickle=False) as file:
        return dict(file)


CASES = json.loads(str(golden()["cases"]))
COUNT = sum(key.startswith("start.") for key in golden())
SHOWN = (1, 5, 15)
CLIP = 2.0


def parameters(queue, dtype: str = "float32") -> list[Tensor]:
    return [Tensor.from_host(queue, golden()[f"start.{i}"], dtype, requires_grad=True) for i in range(COUNT)]


def set_gradients(params: list[Tensor], step: int, dtype: str = "float32") -> None:
    for i, p in enumerate(params):
        p.grad = Tensor.from_host(p.queue, golden()[f"gradients.{i}"][step], dtype)


def flat(params: list[Tensor]) -> np.ndarray:
    return np.concatenate([p.to_host().reshape(-1) for p in params])


def assert_close(params: list[Tensor], expected: np.ndarray, tolerance: float = 1e-6) -> None:
    """Relative to the largest element of each parameter, on its way here: what comes close to 0 keeps the rounding of where it was."""
    at = 0
    for i, p in enumerate(params):
        values, wanted = p.to_host().reshape(-1), expected[at : at + p.size]
        at += p.size
        scale = max(np.abs(wanted).max(), np.abs(golden()[f"start.{i}"]).max())
        np.testing.assert_allclose(values, wanted, rtol=tolerance, atol=tolerance * scale)


def make(name: str, params: list[Tensor]) -> optim.Optimizer:
    kind, options, _, _ = CASES[name]
    return getattr(optim, kind)(params, **{key: tuple(v) if isinstance(v, list) else v for key, v in options.items()})


@contextmanager
def launches():
    """The names of the kernels launched in a block."""
    seen: list[str] = []

    def observe(kernel, *_):
        seen.append(kernel.name)

    hooks.launch_observers.append(observe)
    try:
        yield seen
    finally:
        hooks.launch_observers.remove(observe)


# ---- trajectories


@pytest.mark.parametrize("name", CASES)
def test_trajectory_is_torchs(name, queue):
    params = parameters(queue)
    opt = make(name, params)
    _, _, clip, scheduled = CASES[name]
    schedule = optim.CosineAnnealingLR(opt, T_max=10, eta_min=1e-3) if scheduled else None
    for step in range(15):
        set_gradients(params, step)
        opt.step(CLIP if clip else None)
        if schedule is not None:
            schedule.step()
        if step + 1 in SHOWN:
            assert_close(params, golden()[f"case.{name}.{step + 1}"])


def test_clipping_before_the_step_is_the_same(queue):
    params = parameters(queue)
    opt = make("adam_clip_schedule", params)
    schedule = optim.CosineAnnealingLR(opt, T_max=10, eta_min=1e-3)
    for step in range(5):
        set_gradients(params, step)
        (optim.clip_grad_norm if step % 2 else optim.clip_grad_norm_device)(params, CLIP)
        opt.step()
        schedule.step()
    assert_close(params, golden()["case.adam_clip_schedule.5"])


@pytest.mark.parametrize("name", ["nesterov", "adamw_amsgrad", "rmsprop_all_clip_schedule", "lion"])
def test_float64(name, device):
    if device.backend == "cl" and not device.profile.has_fp64:
        pytest.skip("no float64 on this device")
    single, double = parameters(device.queue), parameters(device.queue, "float64")
    for params, dtype in ((single, "float32"), (double, "float64")):
        opt = make(name, params)
        for step in range(5):
            set_gradients(params, step, dtype)
            opt.step()
    assert all(p.dtype == "float64" for p in double)
    assert_close(single, flat(double))


@pytest.mark.parametrize("name", ["adagrad_all", "adadelta", "adamax", "radam", "rprop"])
def test_steps_counted_on_the_device_are_the_same(name, queue):
    params, counted = parameters(queue), parameters(queue)
    opts = make(name, params), make(name, counted)
    zero = Tensor.full((), 0.0, queue=queue)
    for step in range(8):
        for own in (params, counted):
            set_gradients(own, step)
        opts[0].step()
        opts[1].step(found_inf=zero)
        if step == 3:
            opts[1].step(found_inf=Tensor.full((), 1.0, queue=queue))  # neither counted nor taken
    assert_close(counted, flat(params), 1e-5)
    assert opts[1].state_dict()["state"][0]["step"] == 8


@pytest.mark.parametrize("kind", ["SGD", "Adam", "ASGD", "Adafactor", "LARS", "Muon"])
def test_an_option_that_is_none_raises(kind, queue):
    p = Tensor.from_host(queue, np.ones((2, 2), np.float32), requires_grad=True)
    opt = getattr(optim, kind)([p], lr=0.1)
    opt.param_groups[0]["lr"] = None
    p.grad = Tensor.ones((2, 2), queue=queue)
    with pytest.raises(TypeError):
        opt.step()
    assert p.tolist() == [[1.0, 1.0]] * 2


@pytest.mark.parametrize("kind", ["NAdam", "ASGD"])
def test_numbers_of_the_host_are_kept_per_parameter(kind, queue):
    """Two parameters of one age whose steps were taken under different options."""
    alone, together = ([Tensor.from_host(queue, np.ones(3, np.float32), requires_grad=True) for _ in range(2)] for _ in range(2))
    opts = [getattr(optim, kind)([p], lr=0.1) for p in alone], [getattr(optim, kind)(together, lr=0.1)] * 2
    option, value = ("betas", (0.5, 0.99)) if kind == "NAdam" else ("lr", 0.01)
    for params, mine in zip((alone, together), opts, strict=True):
        for p, opt in zip(params, mine, strict=True):
            p.grad = Tensor.ones((3,), queue=queue)
            opt.step()
            p.grad = None
            for each in mine:
                each.param_groups[0][option] = value
        for p in params:
            p.grad = Tensor.ones((3,), queue=queue)
        for opt in dict.fromkeys(mine):
            opt.step()
    assert opts[0][0].skips_on_device is False
    np.testing.assert_array_equal(flat(together), flat(alone))
    assert flat(together)[0] != flat(together)[3]


def test_a_step_takes_a_closure(queue):
    p = Tensor.from_host(queue, np.ones(3, np.float32), requires_grad=True)
    opt = optim.SGD([p], lr=0.5)

    def closure():
        opt.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    with no_grad():
        assert opt.step(closure).item() == 3.0
    assert opt.step(closure=closure).item() == 0.0 and p.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "RMSprop", "NAdam"])
def test_switches_of_torch(kind, queue):
    params = parameters(queue)
    getattr(optim, kind)(params, lr=0.1, foreach=True, capturable=True, differentiable=False)
    with pytest.raises(TypeError, match=rf"\[{kind[:3]}.*unknown option 'momentun'; known are params, lr"):
        getattr(optim, kind)(params, momentun=0.9)
    with pytest.raises(ValueError, match=r"differentiable must be False"):
        getattr(optim, kind)(params, differentiable=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_master_weights_hold_what_halves_lose(queue, dtype):
    start, gradient = np.ones(300, np.float32), np.full(300, 1.0, np.float32)
    results = {}
    for master in (False, True):
        p = Tensor.from_host(queue, start, dtype, requires_grad=True)
        opt = optim.SGD([p], lr=1e-4, master_weights=master)
        for _ in range(100):
            p.grad = Tensor.from_host(queue, gradient, dtype)
            opt.step()
        results[master] = p.to_host().astype(np.float32)
    assert (results[False] == 1).all()  # each step is less than half a unit in the last place
    np.testing.assert_allclose(results[True], 0.99, rtol=4e-3)
    np.testing.assert_allclose(opt.state[p]["master"].to_host(), 0.99, rtol=1e-5)


@pytest.mark.parametrize("name", ["nesterov", "adam", "rmsprop_all_clip_schedule"])
def test_master_weights_follow_float32(queue, name):
    params, halves = parameters(queue), parameters(queue, "bfloat16")
    for p, h in zip(params, halves, strict=True):
        p.from_host(h.to_host())
    opts = make(name, params), make(name, halves)
    for group in opts[1].param_groups:
        group["master_weights"] = True
    for step in range(3):
        set_gradients(halves, step, "bfloat16")
        for p, h in zip(params, halves, strict=True):
            p.grad = Tensor.from_host(queue, h.grad.to_host())
        for opt in opts:
            opt.step()
    masters = [opts[1].state[h]["master"] for h in halves]
    np.testing.assert_array_equal(flat(masters), flat(params))
    for h, p in zip(halves, params, strict=True):
        np.testing.assert_array_equal(h.to_host(), Tensor.from_host(queue, p.to_host(), "bfloat16").to_host())


def test_two_runs_agree_bit_for_bit(queue):
    results = []
    for _ in range(2):
        params = parameters(queue)
        opt = make("adamw_clip_schedule", params)
        for step in range(5):
            set_gradients(params, step)
            opt.step(CLIP)
        results.append(flat(params))
    np.testing.assert_array_equal(*results)


def test_many_sizes_in_one_optimizer(queue, rng):
    """Sizes around vectors and blocks, empty ones among them, more tensors than a launch takes."""
    sizes = [0, 1, 3, 4, 15, 16, 17, 255, 256, 257, 1023, 1024, 1025, 4095, 4096, 4097, 70001] * 5
    start = [rng.standard_normal(n).astype(np.float32) for n in sizes]
    params = [Tensor.from_host(queue, x, requires_grad=True) for x in start]
    opt = optim.SGD(params, lr=0.5, momentum=0.5)
    for _ in range(2):
        for p, x in zip(params, start, strict=True):
            p.grad = Tensor.from_host(queue, x)
        opt.step()
    for p, x in zip(params, start, strict=True):
        np.testing.assert_allclose(p.to_host(), x - np.float32(1.25) * x, rtol=1e-6, atol=1e-7)


# ---- launches


RESNET18 = [(64, 3, 3, 3), (64,), (64,)] + [(64, 64, 3, 3), (64,), (64,)] * 4 + [(8, 8), (8,), (8,)] * 15 + [(10, 512), (10,)]


def test_a_step_of_a_resnet_is_a_handful_of_launches(cl_queue):
    assert len(RESNET18) == 62
    params = [Tensor.zeros(shape, queue=cl_queue, requires_grad=True) for shape in RESNET18]
    for p in params:
        p.grad = Tensor.ones(p.shape, queue=cl_queue)
    for kind, most in ((optim.SGD, 2), (optim.Momentum, 3), (optim.Adam, 4), (optim.AdamW, 4), (optim.RMSProp, 3), (optim.Lion, 3)):
        opt = kind(params, lr=0.01)
        opt.step()
        with launches() as seen:
            opt.step()
        assert 1 <= len(seen) <= most and set(seen) == {"update"}
    with launches() as seen:
        opt.step(1.0)
    assert len(seen) <= most + 3
    with launches() as seen:
        opt.zero_grad(set_to_none=False)
    assert len(seen) == 1


def test_new_numbers_and_new_models_compile_nothing(cl_queue):
    def train(size: int, lr: float) -> None:
        params = [Tensor.zeros((size + i,), queue=cl_queue, requires_grad=True) for i in range(3)]
        opt = optim.Adam(params, lr=lr, betas=(lr, lr))
        for _ in range(3):
            for p in params:
                p.grad = Tensor.ones(p.shape, queue=cl_queue)
            opt.step(lr)
            opt.param_groups[0]["lr"] *= 0.5

    train(10, 0.1)
    built = program.build_count()
    train(3000, 0.2)
    assert program.build_count() == built


def test_no_step_waits_for_the_device(queue, monkeypatch):
    params = parameters(queue)
    opt = optim.AdamW(params)
    set_gradients(params, 0)
    opt.step(1.0)
    set_gradients(params, 1)

    def refuse(self):
        raise AssertionError("the step read a tensor")

    if params[0].backend == "cl":
        monkeypatch.setattr(Tensor, "to_host", refuse)
    norm = opt.step(1.0)
    optim.clip_grad_norm_device(params, 1.0)
    monkeypatch.undo()
    assert norm.shape == () and norm.item() > 0


# ---- groups


def test_groups_have_options_of_their_own(queue):
    a, b, c = (Tensor.from_host(queue, np.ones(5, np.float32), requires_grad=True) for _ in range(3))
    opt = optim.SGD([{"params": [a]}, {"params": b, "lr": 0.5, "name": "head"}], lr=0.1)
    opt.add_param_group({"params": [c], "weight_decay": 1.0})
    for p in (a, b, c):
        p.grad = Tensor.ones((5,), queue=queue)
    opt.step()
    for p, value in ((a, 0.9), (b, 0.5), (c, 0.8)):
        np.testing.assert_allclose(p.to_host(), value, rtol=1e-6)
    assert "group 1: 1 parameters, lr=0.5" in repr(opt)


def test_parameters_without_a_gradient_are_left_alone(queue):
    params = parameters(queue)
    opt = optim.Adam(params, lr=0.1)
    before = [p.to_host() for p in params]
    opt.step()
    assert not opt.state
    for step in range(3):
        set_gradients(params, step)
        params[3].grad = None
        opt.step()
    set_gradients(params, 4)
    late = optim.Adam([Tensor.from_host(queue, before[3], requires_grad=True)], lr=0.1)
    late.param_groups[0]["params"][0].grad = Tensor.from_host(queue, params[3].grad.to_host())
    np.testing.assert_array_equal(params[3].to_host(), before[3])
    assert params[3] not in opt.state and opt.state[params[0]]["step"] == 3
    opt.step()
    late.step()
    np.testing.assert_array_equal(params[3].to_host(), late.param_groups[0]["params"][0].to_host())  # its own bias correction
    assert opt.state[params[3]]["step"] == 1 and opt.state[params[0]]["step"] == 4


def test_parameters_of_several_devices(cl_queue):
    queues = cl_queue, manager.default("cpu").queue
    here, there = (Tensor.from_host(queue, np.arange(5, dtype=np.float32), requires_grad=True) for queue in queues)
    opt = optim.Adam([here, there], lr=0.1)
    for _ in range(3):
        for p in (here, there):
            p.grad = Tensor.from_host(p.queue, np.full(5, 2.0, np.float32))
        norm = opt.step(1.0)
    np.testing.assert_allclose(norm.item(), np.sqrt(40), rtol=1e-6)
    np.testing.assert_allclose(here.to_host(), there.to_host(), rtol=1e-6)


def test_state_follows_a_parameter_to_another_device(cl_queue):
    moved, stayed = (Tensor.from_host(cl_queue, np.arange(9, dtype=np.float32), "float16", requires_grad=True) for _ in range(2))
    opt = optim.Adam([moved, stayed], lr=0.1, master_weights=True)
    for step in range(4):
        for p in (moved, stayed):
            p.grad = Tensor.from_host(p.queue, np.full(9, step + 1.0, np.float32), "float16")
        opt.step()
        if step == 1:
            there = moved.to("cpu")
            moved.memory, moved.lease, moved.queue, moved.context = there.memory, None, there.queue, None
    np.testing.assert_allclose(opt.state[moved]["master"].to_host(), opt.state[stayed]["master"].to_host(), rtol=1e-6)
    np.testing.assert_allclose(moved.to_host(), stayed.to_host(), rtol=1e-3)


def test_dtypes_may_differ(queue):
    params = [Tensor.from_host(queue, np.ones(7, np.float32), dtype, requires_grad=True) for dtype in ("float32", "float16", "bfloat16")]
    opt = optim.Momentum(params, lr=0.25)
    for p, dtype in zip(params, ("float16", "float16", "float32"), strict=True):
        p.grad = Tensor.from_host(queue, np.ones(7, np.float32), dtype)
    opt.step(100.0)
    assert all((p.to_host() == 0.75).all() for p in params)
    assert {opt.state[p]["momentum_buffer"].dtype for p in params} == {"float32"}


def test_zero_grad(queue):
    params = parameters(queue)
    opt = optim.SGD(params)
    set_gradients(params, 0)
    held = [p.grad for p in params]
    opt.zero_grad(set_to_none=False)
    assert all(p.grad is g and not g.to_host().any() for p, g in zip(params, held, strict=True))
    opt.zero_grad()
    assert all(p.grad is None for p in params)


# ---- state


@pytest.mark.parametrize("name", CASES)
def test_state_resumes_bit_for_bit(name, queue):
    straight, first = parameters(queue), parameters(queue)
    a, b = make(name, straight), make(name, first)
    for step in range(3):
        for params, opt in ((straight, a), (first, b)):
            set_gradients(params, step)
            opt.step(CLIP)
    resumed = [Tensor.from_host(queue, p.to_host(), requires_grad=True) for p in first]
    c = make(name, resumed)
    for group in c.param_groups:
        group["lr"] = 123.0
    c.load_state_dict(b.state_dict())
    first[0].grad = None
    b.step()  # must not reach c through shared tensors
    for step in range(3, 6):
        for params, opt in ((straight, a), (resumed, c)):
            set_gradients(params, step)
            opt.step(CLIP)
    np.testing.assert_array_equal(flat(resumed), flat(straight))
    assert c.param_groups[0]["lr"] == a.param_groups[0]["lr"]


def test_state_has_torchs_form(queue):
    params = parameters(queue)
    opt = optim.Adam([{"params": params[:2]}, {"params": params[2:], "lr": 0.5}], amsgrad=True)
    set_gradients(params, 0)
    params[1].grad = None
    opt.step()
    state = opt.state_dict()
    assert [group["params"] for group in state["param_groups"]] == [[0, 1], list(range(2, COUNT))]
    assert sorted(state["state"]) == [0, *range(2, COUNT)]
    assert sorted(state["state"][2]) == ["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"]
    assert state["state"][2]["step"] == 1 and state["state"][3]["exp_avg"].shape == params[3].shape
    assert {"lr", "betas", "eps", "weight_decay", "amsgrad", "maximize"} <= set(state["param_groups"][0])


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adagrad])
def test_switches_of_torch_are_no_options(kind, queue):
    opt = kind([Tensor.from_host(queue, [1.0], requires_grad=True)], foreach=True)
    assert not {"switches", "foreach"} & {*opt.defaults, *opt.state_dict()["param_groups"][0]}


class Foreign:
    """A tensor of another library, as far as loading is concerned."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.values, dtype)


def torch_state(name: str) -> dict:
    state: dict[int, dict] = {}
    for key, value in golden().items():
        if key.startswith(f"state.{name}."):
            _, _, number, entry = key.split(".")
            state.setdefault(int(number), {})[entry] = Foreign(value)
    return {"state": state, "param_groups": json.loads(str(golden()[f"groups.{name}"]))}


@pytest.mark.parametrize(
    "name", ["nesterov", "amsgrad", "adamw", "rmsprop_all_clip_schedule", "adagrad_all", "nadam", "radam", "asgd", "rprop", "adafactor"]
)
def test_a_torch_state_loads(name, queue):
    _, _, clip, scheduled = CASES[name]
    params = parameters(queue)
    at = 0
    for p in params:
        p.from_host(golden()[f"case.{name}.5"][at : at + p.size].reshape(p.shape))
        at += p.size
    opt = make(name, params)
    schedule = optim.CosineAnnealingLR(opt, T_max=10, eta_min=1e-3) if scheduled else None
    opt.load_state_dict(torch_state(name))
    if schedule is not None:
        schedule.last_epoch = 5
    assert "foreach" not in opt.param_groups[0]
    for step in range(5, 15):
        set_gradients(params, step)
        opt.step(CLIP if clip else None)
        if schedule is not None:
            schedule.step()
    assert_close(params, golden()[f"case.{name}.15"])


def test_a_state_that_does_not_fit_changes_nothing(queue):
    params = parameters(queue)
    opt = optim.Adam(params)
    set_gradients(params, 0)
    opt.step()
    good = opt.state_dict()

    def bad(**changes):
        return {**good, **changes}

    entry = dict(good["state"][3])
    with pytest.raises(ValueError, match=r"every group of the state must have as many .*; parameters_of_groups=\[7\], saved=\[2, 5\]"):
        opt.load_state_dict(bad(param_groups=[{"params": [0, 1]}, {"params": [2, 3, 4, 5, 6]}]))
    with pytest.raises(ShapeError, match=r"'exp_avg' of parameter 3 must have the shape .*; state=\(2,\), expected=\(4, 5\)"):
        opt.load_state_dict(bad(state={**good["state"], 3: {**entry, "exp_avg": np.zeros(2)}}))
    with pytest.raises(ValueError, match=r"unknown entry 'square_avg' in the state of parameter 3; known are exp_avg, exp_avg_sq"):
        opt.load_state_dict(bad(state={**good["state"], 3: {"square_avg": np.zeros((4, 5))}}))
    with pytest.raises(ValueError, match=r"the state of parameter 3 must have 'exp_avg_sq'"):
        opt.load_state_dict(bad(state={3: {"step": 1, "exp_avg": entry["exp_avg"]}}))
    with pytest.raises(ValueError, match=r"every parameter of the state must be in a group, got 9; parameters=7"):
        opt.load_state_dict(bad(state={9: entry}))
    with pytest.raises(ValueError, match=r"lr must be a number, at least 0; lr=-1"):
        opt.load_state_dict(bad(param_groups=[{**good["param_groups"][0], "lr": -1}]))
    with pytest.raises(ValueError, match=r"must have the keys 'state' and 'param_groups'; has=\['weights'\]"):
        opt.load_state_dict({"weights": 1})
    assert opt.state_dict()["state"][3]["exp_avg"] is entry["exp_avg"] and opt.param_groups[0]["lr"] == 1e-3


def test_numbers_of_parameters_may_be_text(queue):
    """JSON has no other keys, and no tuples."""
    params = parameters(queue)
    opt = optim.Adam(params, betas=(0.5, 0.75))
    set_gradients(params, 0)
    opt.step()
    state = opt.state_dict()
    groups = json.loads(json.dumps(state["param_groups"]))
    other = optim.Adam(parameters(queue))
    other.load_state_dict({"state": {str(number): entry for number, entry in state["state"].items()}, "param_groups": groups})
    assert other.param_groups[0]["betas"] == (0.5, 0.75)
    np.testing.assert_array_equal(flat([s["exp_avg"] for s in other.state.values()]), flat([s["exp_avg"] for s in opt.state.values()]))


# ---- errors


def test_error_texts(device):
    p = Tensor.zeros((3,), requires_grad=True)
    for kind, options, text in (
        (optim.SGD, {"lr": -0.1}, r"\[SGD\] lr must be a number, at least 0; lr=-0.1"),
        (optim.SGD, {"lr": "0.1"}, r"\[SGD\] lr must be a number, at least 0; lr='0.1'"),
        (optim.SGD, {"lr": float("nan")}, r"\[SGD\] lr must be a number"),
        (optim.SGD, {"lr": 0.1, "momentum": -1}, r"\[SGD\] momentum must be a number, at least 0; momentum=-1"),
        (optim.SGD, {"lr": 0.1, "nesterov": True}, r"\[SGD\] nesterov requires a momentum and dampening=0; momentum=0.0, dampening=0.0"),
        (optim.Adam, {"betas": (0.9, 1.0)}, r"\[Adam\] beta2 must be a number, at least 0 and below 1; beta2=1.0"),
        (optim.Adam, {"betas": 0.9}, r"\[Adam\] betas must be a tuple or list of two numbers; betas=0.9"),
        (optim.Adam, {"eps": -1e-8}, r"\[Adam\] eps must be a number, at least 0; eps=-1e-08"),
        (optim.AdamW, {"weight_decay": "0.1"}, r"\[AdamW\] weight_decay must be a number"),
        (optim.RMSProp, {"alpha": -1}, r"\[RMSProp\] alpha must be a number, at least 0; alpha=-1"),
        (optim.Lion, {"betas": (2, 0.9)}, r"\[Lion\] beta1 must be a number, at least 0 and below 1; beta1=2"),
    ):
        with pytest.raises(ValueError, match=text):
            kind([p], **options)


def test_errors_about_parameters(device):
    p, q = Tensor.zeros((3,), requires_grad=True), Tensor.zeros((2,), requires_grad=True)
    with pytest.raises(ValueError, match=r"\[SGD\] params must not be empty; pass model.parameters\(\)"):
        optim.SGD([])
    with pytest.raises(TypeError, match=r"\[SGD\] params must be a list; shape=\(3,\); pass \[tensor\]"):
        optim.SGD(p)
    with pytest.raises(TypeError, match=r"\[SGD\] parameter 1 of group 0 must be a Tensor; type=float"):
        optim.SGD([p, 1.0])
    with pytest.raises(DtypeError, match=r"\[SGD\] parameter 0 of group 0 must have a floating-point dtype; dtype=int32, shape=\(2,\)"):
        optim.SGD([Tensor.zeros((2,), "int32")])
    with pytest.raises(
        ValueError, match=r"\[SGD\] parameter 1 of group 0 must be given only once; first=parameter 0 of group 0, shape=\(3,\)"
    ):
        optim.SGD([p, p])
    opt = optim.SGD([p])
    with pytest.raises(ValueError, match=r"\[SGD\] parameter 1 of group 1 must be given only once; first=parameter 0 of group 0"):
        opt.add_param_group({"params": [q, p]})
    opt.add_param_group({"params": [q]})
    assert len(opt.param_groups) == 2
    with pytest.raises(ValueError, match=r"\[SGD\] a parameter group has no option 'weight_dekay'; known are lr, momentum"):
        opt.add_param_group({"params": [Tensor.zeros((1,))], "weight_dekay": 0.1})
    with pytest.raises(ValueError, match=r"\[SGD\] a parameter group must not be empty; group=2"):
        opt.add_param_group({"params": []})
    with pytest.raises(TypeError, match=r"\[SGD\] a parameter group must be a dict with the key 'params'"):
        opt.add_param_group([p])
    with pytest.raises(ValueError, match=r"\[SGD\] parameter 0 of group 0 must be a leaf tensor; by=mul, shape=\(3,\)"):
        optim.SGD([p * 2])


def test_errors_about_gradients(device):
    p, q = Tensor.zeros((3,), requires_grad=True), Tensor.zeros((2,), requires_grad=True)
    opt = optim.Adam([p, q])
    p.grad, q.grad = Tensor.ones((3,)), Tensor.ones((3,))
    with pytest.raises(ShapeError, match=r"\[Adam\] a gradient must have the shape of its parameter; gradient=\(3,\), parameter=\(2,\)"):
        opt.step()
    q.grad = Tensor.ones((2,), "int32")
    with pytest.raises(DtypeError, match=r"\[Adam\] a gradient must have a floating-point dtype; dtype=int32"):
        opt.step()
    q.grad = None
    with pytest.raises(ValueError, match=r"\[Adam\] max_norm must be a number, at least 0; max_norm=-1"):
        opt.step(-1)
    assert not opt.state and not p.to_host().any()


def test_nan_reaches_the_parameters(queue):
    p = Tensor.from_host(queue, np.ones(300, np.float32), requires_grad=True)
    opt = optim.SGD([p], lr=0.1)
    gradient = np.ones(300, np.float32)
    gradient[257] = np.nan
    p.grad = Tensor.from_host(queue, gradient)
    opt.step()
    assert np.flatnonzero(np.isnan(p.to_host())).tolist() == [257]
    opt.step(1.0)
    assert np.isnan(p.to_host()).all()  # as torch: the norm is NaN, and with it the factor


def test_backward_and_step(queue):
    """Least squares by the tape and an optimizer."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((64, 3)).astype(np.float32)
    wanted = np.array([1.0, -2.0, 0.5], np.float32)
    w = Tensor.from_host(queue, np.zeros(3, np.float32), requires_grad=True)
    inputs, targets = Tensor.from_host(queue, x), Tensor.from_host(queue, x @ wanted)
    opt = optim.Adam([w], lr=0.1)
    for _ in range(200):
        opt.zero_grad()
        error = (inputs * w).sum(axis=1) - targets
        (error * error).mean().backward()
        opt.step()
    np.testing.assert_allclose(w.to_host(), wanted, atol=1e-3)
