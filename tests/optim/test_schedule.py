"""Schedules: torch's learning rates, state, errors."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from netcl import optim
from netcl.core.device import device
from netcl.core.tensor import Tensor
from netcl.optim.schedule import LRScheduler

GOLDEN = Path(__file__).parent.parent / "golden" / "optim.npz"


@cache
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN, allow_pickle=False) as file:
        return dict(file)


SCHEDULES = json.loads(str(golden()["schedules"]))
SEVERAL = json.loads(str(golden()["several"]))
PLATEAUS = json.loads(str(golden()["plateaus"]))


def leaf() -> Tensor:
    with device("cpu"):
        return Tensor.zeros((1,), requires_grad=True)


def optimizer(kind=optim.SGD, **options) -> optim.Optimizer:
    return kind([{"params": [leaf()]}, {"params": [leaf()], "lr": 0.03}], lr=0.1, **options)


def make(name: str, opt: optim.Optimizer):
    kind, options, steps = SCHEDULES[name]
    return getattr(optim, kind)(opt, **options), steps


def values(opt: optim.Optimizer) -> list[float]:
    return [value for group in opt.param_groups for value in (group["lr"], group["momentum"])]


@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_are_torchs(name):
    opt = optimizer(momentum=0.9)
    schedule, steps = make(name, opt)
    found = [values(opt)]
    for _ in range(steps):
        schedule.step()
        found.append(values(opt))
        assert schedule.get_last_lr() == found[-1][::2]
    np.testing.assert_array_equal(np.array(found), golden()[f"rates.{name}"])


def make_several(name: str):
    parts, milestones, steps = SEVERAL[name]
    opt = optimizer(momentum=0.9)
    made = [getattr(optim, kind)(opt, **options) for kind, options in parts]
    return opt, optim.ChainedScheduler(made) if milestones is None else optim.SequentialLR(opt, made, milestones), steps


@pytest.mark.parametrize("name", SEVERAL)
def test_rates_of_several_are_torchs(name):
    opt, schedule, steps = make_several(name)
    resumed, again, _ = make_several(name)
    found = []
    for step in range(steps + 1):
        found.append(schedule.present())
        if step == steps // 2:
            saved = json.loads(json.dumps([opt.state_dict()["param_groups"], schedule.state_dict()]))
            resumed.load_state_dict({"state": {}, "param_groups": saved[0]})
            again.load_state_dict(saved[1])
        elif step > steps // 2:
            again.step()
            assert again.get_last_lr() == schedule.get_last_lr() == found[-1]
        schedule.step()
    np.testing.assert_allclose(np.array(found), golden()[f"rates.{name}"], rtol=1e-12, atol=1e-15)


def test_multiplicative():
    opt = optimizer()
    schedule = optim.MultiplicativeLR(opt, [lambda step: 0.5, lambda step: 1 / step])
    for _ in range(3):
        schedule.step()
    np.testing.assert_allclose(schedule.get_last_lr(), [0.1 / 8, 0.03 / 6], rtol=1e-12)
    assert "lr_lambdas" not in schedule.state_dict()


def test_a_constant_schedule_without_steps_keeps_the_rates_at_a_milestone():
    opt = optimizer()
    schedule = optim.SequentialLR(opt, [optim.ExponentialLR(opt, 0.5), optim.ConstantLR(opt, 0.5, total_iters=0)], [2])
    found = []
    for _ in range(4):
        found.append(schedule.get_last_lr()[0])
        schedule.step()
    np.testing.assert_allclose(found, [0.1, 0.05, 0.1, 0.1], rtol=1e-12)  # torch 2.13
    assert schedule.get_last_lr()[0] == opt.param_groups[0]["lr"]


def test_restarts_go_to_a_fraction_of_an_epoch():
    first, second = (optim.CosineAnnealingWarmRestarts(optimizer(), 2, 2) for _ in range(2))
    for _ in range(7):
        first.step()
    second.step(6.5)
    assert (second.T_cur, second.T_i, second.last_epoch) == (0.5, 8, 6)
    second.step(7)
    assert second.get_last_lr() == first.get_last_lr()


def test_cycles_may_have_a_height_of_their_own():
    opt = optimizer(optim.Adam)
    schedule = optim.CyclicLR(opt, 0.0, 1.0, step_size_up=1, scale_fn=lambda cycle: 1 / cycle, base_momentum=0.5, max_momentum=0.9)
    found = []
    for _ in range(4):
        schedule.step()
        found.append(schedule.get_last_lr()[0])
    assert found == [1.0, 0.0, 0.5, 0.0] and opt.param_groups[0]["betas"] == (0.9, 0.999)
    assert "scale_fn" not in schedule.state_dict()


@pytest.mark.parametrize("name", PLATEAUS)
def test_plateaus_are_torchs(name):
    opt = optim.SGD([leaf()], lr=0.1)
    schedule = optim.ReduceLROnPlateau(opt, **PLATEAUS[name])
    found = []
    for i, metric in enumerate(golden()["metrics"]):
        schedule.step(Tensor.full((), metric, device="cpu") if i == 3 else metric)
        found.append(opt.param_groups[0]["lr"])
    np.testing.assert_array_equal(found, golden()[f"rates.{name}"])


def test_warmup_cosine_is_two_torch_schedules_in_a_row():
    opt = optim.SGD([leaf()], lr=0.1)
    schedule = optim.WarmupCosine(opt, warmup_steps=5, total_steps=20, min_lr=0.001)
    found = [opt.param_groups[0]["lr"]]
    for _ in range(20):
        schedule.step()
        found.append(opt.param_groups[0]["lr"])
    np.testing.assert_allclose(found, golden()["rates.warmup"], rtol=1e-12)
    schedule.step()
    assert opt.param_groups[0]["lr"] == 0.001
    bare = optim.SGD([leaf()], lr=0.1)
    optim.WarmupCosine(bare, warmup_steps=0, total_steps=4)
    assert bare.param_groups[0]["lr"] == 0.1


def test_lambda():
    opt = optimizer()
    schedule = optim.LambdaLR(opt, [lambda step: 1 / (step + 1), lambda step: 0.5**step])
    for _ in range(2):
        schedule.step()
    assert [group["lr"] for group in opt.param_groups] == [0.1 * (1 / 3), 0.03 * 0.25]
    state = schedule.state_dict()
    assert "lr_lambdas" not in state and "optimizer" not in state


def test_onecycle_moves_the_first_beta_of_adam():
    opt = optimizer(optim.Adam)
    schedule = optim.OneCycleLR(opt, 0.5, total_steps=10)
    assert opt.param_groups[0]["betas"] == (0.95, 0.999)
    for _ in range(2):
        schedule.step()
    np.testing.assert_allclose(opt.param_groups[0]["betas"], (0.85, 0.999), rtol=1e-12)


@pytest.mark.parametrize("name", [*SCHEDULES, "warmup"])
def test_state_resumes(name):
    def both():
        opt = optimizer(momentum=0.9)
        return opt, optim.WarmupCosine(opt, 4, 12) if name == "warmup" else make(name, opt)[0]

    opt, schedule = both()
    for _ in range(6):
        schedule.step()
    saved = json.loads(json.dumps([opt.state_dict()["param_groups"], schedule.state_dict()]))
    resumed, again = both()
    resumed.load_state_dict({"state": {}, "param_groups": saved[0]})
    again.load_state_dict(saved[1])
    for _ in range(6):
        schedule.step()
        again.step()
        assert values(resumed) == values(opt)
    assert again.state_dict() == schedule.state_dict()


def test_plateau_state_resumes():
    opts = [optim.SGD([leaf()], lr=0.1) for _ in range(2)]
    first, second = (optim.ReduceLROnPlateau(opt, patience=2, factor=0.5) for opt in opts)
    for metric in (3.0, 3.0, 3.0):
        first.step(metric)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for schedule in (first, second):
        schedule.step(3.0)
    assert [opt.param_groups[0]["lr"] for opt in opts] == [0.05, 0.05]


def test_a_torch_scheduler_state_loads():
    opt = optimizer()
    schedule = optim.MultiStepLR(opt, [1], gamma=0.9)
    schedule.load_state_dict({"milestones": {3: 1, 5: 2}, "gamma": 0.5, "base_lrs": [0.1, 0.03], "last_epoch": 2, "_step_count": 3,
                              "_is_initial": False, "_get_lr_called_within_step": False, "_last_lr": [0.1, 0.03]})  # fmt: skip
    schedule.step()
    assert opt.param_groups[0]["lr"] == 0.05 and schedule.milestones == [3, 5, 5]


def test_last_epoch_resumes_from_the_groups():
    opt = optimizer()
    with pytest.raises(ValueError, match=r"\[StepLR\] group 0 has no 'initial_lr' to resume from; last_epoch=4"):
        optim.StepLR(opt, 2, last_epoch=4)
    for group in opt.param_groups:
        group["initial_lr"] = 1.0
    schedule = optim.StepLR(opt, 2, last_epoch=4)
    assert schedule.last_epoch == 5 and schedule.base_lrs == [1.0, 1.0]


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        ("StepLR", {"step_size": 0}, r"\[StepLR\] step_size must be a positive integer; step_size=0"),
        ("CosineAnnealingLR", {"T_max": 2.5}, r"\[CosineAnnealingLR\] T_max must be a positive integer; T_max=2.5"),
        ("LinearLR", {"start_factor": 0.0}, r"\[LinearLR\] start_factor must be above 0 and at most 1; start_factor=0.0"),
        ("LinearLR", {"end_factor": 2.0}, r"\[LinearLR\] end_factor must be from 0 to 1; end_factor=2.0"),
        ("WarmupCosine", {"warmup_steps": 5, "total_steps": 5}, r"warmup_steps must be from 0 to total_steps - 1; warmup_steps=5"),
        ("OneCycleLR", {"max_lr": 1.0}, r"\[OneCycleLR\] the length of the cycle must be given; pass total_steps"),
        ("OneCycleLR", {"max_lr": [1.0] * 3, "total_steps": 5}, r"max_lr must have one value per parameter group; given=3, groups=2"),
        ("OneCycleLR", {"max_lr": 1.0, "total_steps": 5, "anneal_strategy": "exp"}, r"anneal_strategy must be 'cos' or 'linear'"),
        ("ConstantLR", {"factor": 0.0}, r"\[ConstantLR\] factor must be above 0 and at most 1; factor=0.0"),
        ("PolynomialLR", {"total_iters": 0}, r"\[PolynomialLR\] total_iters must be a positive integer; total_iters=0"),
        ("CosineAnnealingWarmRestarts", {"T_0": 0}, r"\[CosineAnnealingWarmRestarts\] T_0 must be a positive integer; T_0=0"),
        (
            "CyclicLR",
            {"base_lr": 0.1, "max_lr": 1.0, "mode": "up", "cycle_momentum": False},
            r"mode must be one of triangular, .*; mode='up'",
        ),
        ("SequentialLR", {"schedulers": [], "milestones": []}, r"one milestone fewer than schedulers; schedulers=0, milestones=0"),
        ("LambdaLR", {"lr_lambda": [abs]}, r"\[LambdaLR\] lr_lambda must have one value per parameter group; given=1, groups=2"),
        ("ReduceLROnPlateau", {"mode": "up"}, r"\[ReduceLROnPlateau\] mode must be 'min' or 'max', and threshold_mode .*; mode='up'"),
        ("ReduceLROnPlateau", {"factor": 1.0}, r"\[ReduceLROnPlateau\] factor must be a number, at least 0 and below 1; factor=1.0"),
    ],
)
def test_error_texts(kind, options, text):
    with pytest.raises(ValueError, match=text):
        getattr(optim, kind)(optimizer(), **options)


def test_schedulers_of_several_optimizers_are_refused():
    opt = optimizer()
    with pytest.raises(ValueError, match=r"\[ChainedScheduler\] scheduler 1 must belong to the same optimizer as the others; given=StepLR"):
        optim.ChainedScheduler([optim.StepLR(opt, 1), optim.StepLR(optimizer(), 1)])
    with pytest.raises(TypeError, match=r"\[SequentialLR\] scheduler 1 must be a Scheduler, .*; given=ReduceLROnPlateau; step a"):
        optim.SequentialLR(opt, [optim.StepLR(opt, 1), optim.ReduceLROnPlateau(opt)], [3])
    chained = optim.ChainedScheduler([optim.StepLR(opt, 1)])
    with pytest.raises(ValueError, match=r"\[ChainedScheduler\] the state must have as many schedulers as this one; schedulers=1, saved=0"):
        chained.load_state_dict(optim.StepLR(optimizer(), 2).state_dict())


def test_what_is_not_an_optimizer_is_refused():
    for make_one in (lambda x: optim.StepLR(x, 1), lambda x: optim.LambdaLR(x, abs), lambda x: optim.OneCycleLR(x, 1.0, 5),
                     optim.ReduceLROnPlateau):  # fmt: skip
        with pytest.raises(TypeError, match=r"the first argument must be the optimizer; given=float"):
            make_one(0.1)


def test_a_cycle_ends():
    opt = optimizer()
    schedule = optim.OneCycleLR(opt, 1.0, total_steps=3)
    for _ in range(3):
        schedule.step()
    with pytest.raises(ValueError, match=r"\[OneCycleLR\] step must be at most total_steps; step=4, total_steps=3"):
        schedule.step()
    with pytest.raises(ValueError, match=r"\[OneCycleLR\] the optimizer must have momentum or betas; pass cycle_momentum=False"):
        optim.OneCycleLR(Bare([leaf()], {"lr": 0.1, "weight_decay": 0.0}), 1.0, total_steps=3)


class Bare(optim.Optimizer):
    """An optimizer without momentum."""


def test_a_state_of_something_else_is_refused():
    with pytest.raises(ValueError, match=r"\[ReduceLROnPlateau\] the state must have 'best'"):
        optim.ReduceLROnPlateau(optimizer()).load_state_dict(optim.StepLR(optimizer(), 2).state_dict())


def test_a_rate_that_ends_at_0_can_be_resumed():
    optimizer = optim.SGD([leaf()], lr=0.003)
    schedule = optim.LinearLR(optimizer, start_factor=0.1, end_factor=0.0, total_iters=5)
    for _ in range(5):
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.0
    optim.SGD([leaf()], lr=0.003).load_state_dict(optimizer.state_dict())


def test_schedules_are_imported_by_torchs_name():
    from netcl.optim.lr_scheduler import StepLR

    assert StepLR is optim.StepLR


def test_a_schedule_of_the_user_with_torchs_get_lr():
    class Warmup(LRScheduler):
        def __init__(self, optimizer, steps, last_epoch=-1):
            self.steps = steps
            super().__init__(optimizer, last_epoch)

        def get_lr(self):
            return [rate * min(1.0, (self.last_epoch + 1) / self.steps) for rate in self.base_lrs]

    warmup = Warmup(optim.SGD([Tensor.from_host([1.0])], lr=1.0), 4)
    rates = []
    for _ in range(5):
        rates += warmup.get_last_lr()
        warmup.step()
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0]
    with pytest.raises(NotImplementedError, match=r"\[Scheduler\] a schedule must define get_lr\(\) or rates\(\)"):
        LRScheduler(optim.SGD([Tensor.from_host([1.0])], lr=1.0))
