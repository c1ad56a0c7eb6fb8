"""Muon and LBFGS against torch, and what optimizers that look at whole tensors share with the others: replays, masters, checkpoints."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import netcl
from netcl import amp, io, optim
from netcl.core.errors import ShapeError
from netcl.core.tensor import Tensor

MATRICES = 3
KINDS = ("LARS", "LAMB", "Adafactor", "Muon")


@cache
def golden() -> dict[str, np.ndarray]:
    with np.load(Path(__file__).parent.parent / "golden" / "optim.npz", allow_pickle=False) as file:
        return dict(file)


MUON, LBFGS = (json.loads(str(golden()[name])) for name in ("muon", "lbfgs"))


def matrices(queue, dtype="float32") -> list[Tensor]:
    return [Tensor.from_host(queue, golden()[f"matrix.{i}"], dtype, requires_grad=True) for i in range(MATRICES)]


def set_gradients(params: list[Tensor], step: int) -> None:
    for i, p in enumerate(params):
        p.grad = Tensor.from_host(p.queue, golden()[f"matrix_gradients.{i}"][step], p.dtype)


def flat(params: list[Tensor]) -> np.ndarray:
    return np.concatenate([p.to_host().reshape(-1) for p in params])


@pytest.mark.parametrize("name", MUON)
def test_muon_is_torchs(name, queue):
    options, half = MUON[name]
    params = matrices(queue)
    opt = optim.Muon(params, **options)
    for step in range(15):
        set_gradients(params, step)
        opt.step()
        if step + 1 in (1, 5, 15):
            tolerance = 3e-2 if half else 2e-5
            np.testing.assert_allclose(flat(params), golden()[f"case.{name}.{step + 1}"], rtol=0, atol=tolerance * (step + 1) / 5 + 2e-6)


def test_muon_takes_matrices_only(queue):
    with pytest.raises(
        ShapeError, match=r"\[Muon\] every parameter must be a matrix; shape=\(3,\); optimize the other parameters with AdamW"
    ):
        optim.Muon([Tensor.zeros((3,), queue=queue)])
    with pytest.raises(ValueError, match=r"\[Muon\] adjust_lr_fn must be None"):
        optim.Muon(matrices(queue), adjust_lr_fn="other")


# ---- what they share


@pytest.mark.parametrize("kind", ["LAMB", "Adafactor"])
def test_replays_take_the_same_steps(kind, cl_device):
    results = []
    for compiled in (False, True):
        params = matrices(cl_device.queue)
        opt = getattr(optim, kind)(params, lr=0.05)
        schedule = optim.ExponentialLR(opt, 0.9)

        def step(params=params, opt=opt, schedule=schedule):
            opt.zero_grad()
            loss = sum(((p - 1) ** 2).sum() for p in params)
            loss.backward()
            opt.step()
            schedule.step()
            return loss

        step = netcl.compile(step) if compiled else step
        for _ in range(6):
            step()
        assert not compiled or (len(step.graphs), step.refused) == (1, [])
        results.append(flat(params))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_masters_hold_what_halves_lose(kind, queue):
    wide, halves = matrices(queue), matrices(queue, "bfloat16")
    for p, h in zip(wide, halves, strict=True):
        p.from_host(h.to_host())
    options = {"eps": (1e-7, 1e-3)} if kind == "Adafactor" else {}
    opts = getattr(optim, kind)(wide, lr=1e-3, **options), getattr(optim, kind)(halves, lr=1e-3, master_weights=True, **options)
    for step in range(3):
        set_gradients(halves, step)
        for p, h in zip(wide, halves, strict=True):
            p.grad = Tensor.from_host(queue, h.grad.to_host())
        for opt in opts:
            opt.step()
    masters = flat([opts[1].state[h]["master"] for h in halves])
    np.testing.assert_allclose(masters, flat(wide), rtol=1e-5, atol=1e-6)
    assert not np.array_equal(masters, np.concatenate([golden()[f"matrix.{i}"].reshape(-1) for i in range(MATRICES)]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_scaler_skips_steps_that_are_not_finite(kind, queue):
    params = matrices(queue)
    opt, scaler = getattr(optim, kind)(params, lr=0.1), amp.GradScaler(init_scale=4.0)
    before = flat(params)
    set_gradients(params, 0)
    params[0].grad = params[0].grad * float("inf")
    scaler.step(opt)
    scaler.update()
    np.testing.assert_array_equal(flat(params), before)
    set_gradients(params, 0)
    scaler.step(opt)
    assert not np.array_equal(flat(params), before)


def test_adafactor_refuses_other_states(queue):
    p = Tensor.ones((3, 2), queue=queue, requires_grad=True)
    opt = optim.Adafactor([p])
    p.grad = Tensor.ones((3, 2), queue=queue)
    opt.step()
    state = opt.state_dict()
    assert {name: t.shape for name, t in state["state"][0].items() if name != "step"} == {"row_var": (3, 1), "col_var": (1, 2)}
    saved = dict(state["state"][0])
    del saved["col_var"]
    with pytest.raises(ValueError, match="the state of parameter 0 must have 'col_var'"):
        opt.load_state_dict({**state, "state": {0: saved}})
    with pytest.raises(ShapeError, match="'row_var' of parameter 0 must have the shape that the optimizer expects"):
        opt.load_state_dict({**state, "state": {0: {**saved, "col_var": saved["row_var"], "row_var": np.ones((2, 1), np.float32)}}})


def test_tensors_of_zeros_move_by_the_learning_rate(queue):
    for kind, start in (("LARS", 0.0), ("LAMB", 0.0)):
        p = Tensor.full((4,), start, queue=queue, requires_grad=True)
        p.grad = Tensor.ones((4,), queue=queue)
        getattr(optim, kind)([p], lr=0.5).step()
        np.testing.assert_allclose(p.to_host(), -0.5, rtol=1e-5)


# ---- LBFGS


def rosenbrock(queue, options):
    params = [Tensor.from_host(queue, np.array(x, np.float32), requires_grad=True) for x in ([-1.2, 1.0], [0.5, -0.5])]
    opt = optim.LBFGS(params, **options)

    def closure():
        opt.zero_grad()
        x = netcl.cat(params)
        loss = (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum() / 100
        loss.backward()
        return loss

    return params, opt, closure


@pytest.mark.parametrize("name", LBFGS)
def test_lbfgs_is_torchs(name, queue):
    params, opt, closure = rosenbrock(queue, LBFGS[name])
    for loss, *point, evaluations, iterations in golden()[f"lbfgs.{name}"]:
        assert float(opt.step(closure)) == pytest.approx(loss, rel=1e-3, abs=1e-6)
        np.testing.assert_allclose(flat(params), point, rtol=2e-3, atol=2e-3)
        state = opt.state_dict()["state"][0]
        assert (state["func_evals"], state["n_iter"]) == (evaluations, iterations)


@pytest.mark.parametrize("name", LBFGS)
def test_lbfgs_goes_on_from_a_state_of_torch(name, queue):
    params, opt, closure = rosenbrock(queue, LBFGS[name])
    point = golden()[f"lbfgs.{name}"][1][1:5].astype(np.float32)
    for p, part in zip(params, np.split(point, 2), strict=True):
        p.from_host(part)
    found = {key.rpartition(".")[2]: value for key, value in golden().items() if key.startswith(f"lbfgs_state.{name}.")}
    state = {key: list(value) if key in ("old_dirs", "old_stps", "ro") else value for key, value in found.items()}
    opt.load_state_dict({"state": {0: {**state, "al": [None] * 100}}, "param_groups": opt.state_dict()["param_groups"]})
    opt.step(closure)
    np.testing.assert_allclose(flat(params), golden()[f"lbfgs.{name}"][2][1:5], rtol=2e-3, atol=2e-3)


def test_lbfgs_resumes_bit_for_bit_from_a_checkpoint(queue, tmp_path):
    straight = rosenbrock(queue, {"line_search_fn": "strong_wolfe", "max_iter": 3})
    resumed = rosenbrock(queue, {"line_search_fn": "strong_wolfe", "max_iter": 3})
    for _ in range(2):
        straight[1].step(straight[2])
    io.save_checkpoint(tmp_path / "run", optimizer=straight[1])
    for p, q in zip(straight[0], resumed[0], strict=True):
        q.from_host(p.to_host())
    io.load_checkpoint(tmp_path / "run", optimizer=resumed[1])
    for _ in range(2):
        losses = [float(opt.step(closure)) for _, opt, closure in (straight, resumed)]
        assert losses[0] == losses[1]
    np.testing.assert_array_equal(flat(resumed[0]), flat(straight[0]))


def test_lbfgs_errors(queue):
    params, opt, _ = rosenbrock(queue, {})
    with pytest.raises(TypeError, match=r"\[LBFGS\] step must be called with a function that computes the loss"):
        opt.step()
    for options in ({"max_norm": 1.0}, {"found_inf": None}):
        with pytest.raises(TypeError, match=r"\[LBFGS\] step must be called with a function .*, and nothing else"):
            opt.step(closure=lambda: None, **options)
    with pytest.raises(ValueError, match="only one parameter group"):
        optim.LBFGS([{"params": params[:1]}, {"params": params[1:]}])
    with pytest.raises(ValueError, match="line_search_fn must be None or 'strong_wolfe'"):
        optim.LBFGS(params, line_search_fn="golden")
    with pytest.raises(ValueError, match=r"the state must be that of an LBFGS optimizer; unknown=\['exp_avg'\]"):
        opt.load_state_dict({"state": {0: {"exp_avg": 1, "func_evals": 1, "n_iter": 1}}, "param_groups": opt.state_dict()["param_groups"]})
