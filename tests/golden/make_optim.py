"""Makes optim.npz: what torch's optimizers and schedulers give, from the same start and the same gradients.

Run with an interpreter that has torch 2.13.0: ``python tests/golden/make_optim.py``. No test needs torch.
"""

import json
import math
from pathlib import Path

import numpy as np
import torch

SHAPES = [(), (1,), (3,), (4, 5), (255,), (257,), (2, 3, 3, 3)]
STEPS, SHOWN = 15, (1, 5, 15)
CLIP = 2.0


class Lion(torch.optim.Optimizer):
    """The algorithm as its paper prints it (Chen et al. 2023, program 1)."""

    def __init__(self, params, lr, betas, weight_decay):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                update = torch.sign(beta1 * m + (1 - beta1) * p.grad)
                p -= group["lr"] * (update + group["weight_decay"] * p)
                m.copy_(beta2 * m + (1 - beta2) * p.grad)


class LARS(torch.optim.Optimizer):
    """Algorithm 1 of You et al. 2017 for one global learning rate."""

    def __init__(self, params, lr, momentum=0.9, weight_decay=0.0, trust_coefficient=1e-3, eps=1e-8):
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": weight_decay, "trust": trust_coefficient, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                weight, gradient = p.norm().item(), p.grad.norm().item()
                local = group["trust"] * weight / (gradient + group["decay"] * weight + group["eps"]) if weight and gradient else 1.0
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                m.copy_(group["momentum"] * m + group["lr"] * local * (p.grad + group["decay"] * p))
                p -= m


class LAMB(torch.optim.Optimizer):
    """Algorithm 2 of You et al. 2020 with the identity for phi."""

    def __init__(self, params, lr, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                state["n"] = state.get("n", 0) + 1
                m, v = (state.setdefault(name, torch.zeros_like(p)) for name in "mv")
                m.copy_(beta1 * m + (1 - beta1) * p.grad)
                v.copy_(beta2 * v + (1 - beta2) * p.grad**2)
                r = m / (1 - beta1 ** state["n"]) / ((v / (1 - beta2 ** state["n"])).sqrt() + group["eps"]) + group["decay"] * p
                weight, length = p.norm().item(), r.norm().item()
                p -= group["lr"] * (weight / length if weight and length else 1.0) * r


OPTIMIZERS = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW, "RMSProp": torch.optim.RMSprop, "Lion": Lion}
OPTIMIZERS |= {
    name: getattr(torch.optim, name) for name in ("Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop", "Adafactor")
}
OPTIMIZERS |= {"LARS": LARS, "LAMB": LAMB}

# name: optimizer, its options, whether gradients are clipped, whether the learning rate follows a schedule
CASES = {
    "sgd": ("SGD", {"lr": 0.1}, False, False),
    "sgd_decay": ("SGD", {"lr": 0.1, "weight_decay": 0.01}, False, False),
    "momentum": ("SGD", {"lr": 0.05, "momentum": 0.9}, False, False),
    "dampening": ("SGD", {"lr": 0.05, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.01}, False, False),
    "nesterov": ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}, False, False),
    "maximize": ("SGD", {"lr": 0.05, "momentum": 0.9, "maximize": True, "weight_decay": 5e-4}, False, False),
    "nesterov_clip_schedule": ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}, True, True),
    "adam": ("Adam", {"lr": 0.01}, False, False),
    "adam_decay": ("Adam", {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.05}, False, False),
    "adam_maximize": ("Adam", {"lr": 0.01, "maximize": True}, False, False),
    "amsgrad": ("Adam", {"lr": 0.01, "amsgrad": True}, False, False),
    "adam_clip_schedule": ("Adam", {"lr": 0.01}, True, True),
    "adamw": ("AdamW", {"lr": 0.01}, False, False),
    "adamw_amsgrad": ("AdamW", {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}, False, False),
    "adamw_clip_schedule": ("AdamW", {"lr": 0.01, "weight_decay": 0.1}, True, True),
    "rmsprop": ("RMSProp", {"lr": 0.01}, False, False),
    "rmsprop_momentum": ("RMSProp", {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.01}, False, False),
    "rmsprop_centered": ("RMSProp", {"lr": 0.01, "alpha": 0.9, "centered": True}, False, False),
    "rmsprop_all_clip_schedule": ("RMSProp", {"lr": 0.01, "centered": True, "momentum": 0.5, "eps": 1e-5}, True, True),
    "lion": ("Lion", {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.0}, False, False),
    "lion_decay_clip_schedule": ("Lion", {"lr": 0.01, "betas": (0.95, 0.98), "weight_decay": 0.1}, True, True),
    "adagrad": ("Adagrad", {"lr": 0.05}, False, False),
    "adagrad_all": ("Adagrad", {"lr": 0.05, "lr_decay": 0.1, "weight_decay": 0.02, "initial_accumulator_value": 0.3}, True, True),
    "adadelta": ("Adadelta", {"lr": 0.5}, False, False),
    "adadelta_all": ("Adadelta", {"lr": 2.0, "rho": 0.8, "eps": 1e-4, "weight_decay": 0.05, "maximize": True}, True, True),
    "adamax": ("Adamax", {"lr": 0.01}, False, False),
    "adamax_all": ("Adamax", {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.05}, True, True),
    "nadam": ("NAdam", {"lr": 0.01}, False, False),
    "nadam_all": ("NAdam", {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.05, "decoupled_weight_decay": True}, True, True),
    "radam": ("RAdam", {"lr": 0.01}, False, False),
    "radam_all": ("RAdam", {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.05, "maximize": True}, True, True),
    "asgd": ("ASGD", {"lr": 0.05, "t0": 3.0}, False, False),
    "asgd_all": ("ASGD", {"lr": 0.05, "lambd": 0.02, "alpha": 0.5, "weight_decay": 0.05}, True, True),
    "rprop": ("Rprop", {"lr": 0.01}, False, False),
    "adafactor": ("Adafactor", {"lr": 0.05}, False, False),
    "adafactor_all": ("Adafactor", {"lr": 0.3, "beta2_decay": -0.5, "eps": (1e-4, 0.1), "d": 1.5, "weight_decay": 0.05}, True, True),
    "adafactor_maximize": ("Adafactor", {"lr": 0.05, "maximize": True}, False, False),
    "lars": ("LARS", {"lr": 0.5}, False, False),
    "lars_all": ("LARS", {"lr": 0.5, "momentum": 0.8, "weight_decay": 0.02, "trust_coefficient": 0.01}, True, True),
    "lamb": ("LAMB", {"lr": 0.02}, False, False),
    "lamb_all": ("LAMB", {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.05}, True, True),
}
# name: options, whether the iterations run in bfloat16, as torch has it, or in float32
MUON = {
    "muon": ({"lr": 0.02}, False),
    "muon_plain": ({"lr": 0.02, "nesterov": False, "momentum": 0.8, "weight_decay": 0.0, "ns_steps": 3}, False),
    "muon_rms": ({"lr": 0.02, "adjust_lr_fn": "match_rms_adamw"}, False),
    "muon_half": ({"lr": 0.02}, True),
}
MATRICES = [(4, 5), (7, 3), (6, 6)]
LBFGS = {
    "fixed": {"lr": 0.05, "max_iter": 5, "history_size": 3},
    "wolfe": {"line_search_fn": "strong_wolfe", "max_iter": 4},
    "wolfe_short": {"line_search_fn": "strong_wolfe", "max_iter": 3, "max_eval": 4, "history_size": 2, "lr": 3.0},
}
STATES = ("nesterov", "amsgrad", "adamw", "rmsprop_all_clip_schedule", "adagrad_all", "nadam", "radam", "asgd", "rprop", "adafactor")

# name: optimizer options, scheduler, its arguments, steps
SCHEDULES = {
    "step": ("StepLR", {"step_size": 3, "gamma": 0.5}, 20),
    "multistep": ("MultiStepLR", {"milestones": [2, 5, 5, 11], "gamma": 0.3}, 20),
    "exponential": ("ExponentialLR", {"gamma": 0.9}, 20),
    "linear": ("LinearLR", {"start_factor": 0.25, "end_factor": 0.9, "total_iters": 7}, 20),
    "cosine": ("CosineAnnealingLR", {"T_max": 7, "eta_min": 0.001}, 40),
    "onecycle": ("OneCycleLR", {"max_lr": 0.5, "total_steps": 30}, 29),
    "onecycle_three": ("OneCycleLR", {"max_lr": [0.5, 0.7], "epochs": 5, "steps_per_epoch": 6, "three_phase": True, "pct_start": 0.4}, 29),
    "onecycle_linear": ("OneCycleLR", {"max_lr": 0.5, "total_steps": 30, "anneal_strategy": "linear", "cycle_momentum": False}, 29),
    "constant": ("ConstantLR", {"factor": 0.3, "total_iters": 4}, 10),
    "polynomial": ("PolynomialLR", {"total_iters": 7, "power": 1.7}, 10),
    "restarts": ("CosineAnnealingWarmRestarts", {"T_0": 3, "T_mult": 2, "eta_min": 0.001}, 30),
    "cyclic": ("CyclicLR", {"base_lr": 0.01, "max_lr": [0.5, 0.7], "step_size_up": 3, "step_size_down": 5}, 30),
    "cyclic_2": ("CyclicLR", {"base_lr": 0.01, "max_lr": 0.5, "step_size_up": 4, "mode": "triangular2"}, 30),
    "cyclic_exp": (
        "CyclicLR",
        {"base_lr": 0.01, "max_lr": 0.5, "step_size_up": 4, "mode": "exp_range", "gamma": 0.9, "cycle_momentum": False},
        30,
    ),
}
# name: schedulers in order with their arguments, milestones (none: all at once), steps
SEVERAL = {
    "sequential": ([("LinearLR", {"total_iters": 4}), ("StepLR", {"step_size": 2}), ("CosineAnnealingLR", {"T_max": 6})], [4, 9], 20),
    "sequential_restarts": ([("ConstantLR", {}), ("CosineAnnealingWarmRestarts", {"T_0": 3, "T_mult": 2})], [5], 20),
    "chained": ([("ConstantLR", {"factor": 0.1, "total_iters": 3}), ("ExponentialLR", {"gamma": 0.9})], None, 10),
}
METRICS = [5, 4, 4, 4.1, 3.9999, 4, 4, 4, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3]
PLATEAUS = {
    "plateau": {"patience": 2},
    "plateau_cooldown": {"patience": 1, "cooldown": 2, "factor": 0.5, "threshold": 0.01},
    "plateau_max": {"mode": "max", "patience": 3, "threshold_mode": "abs", "threshold": 0.5, "min_lr": 0.003},
}
CLIPS = {"2": 2.0, "1": 1.0, "inf": math.inf, "3": 3.0}


def parameters(start):
    return [torch.nn.Parameter(torch.from_numpy(np.array(x))) for x in start]


def run(name, start, gradients, kept):
    kind, options, clip, schedule = CASES[name]
    params = parameters(start)
    optimizer = OPTIMIZERS[kind](params, **options)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10, eta_min=1e-3) if schedule else None
    for step in range(1, STEPS + 1):
        for p, g in zip(params, gradients, strict=True):
            p.grad = torch.from_numpy(np.array(g[step - 1]))
        if clip:
            torch.nn.utils.clip_grad_norm_(params, CLIP)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if step in SHOWN:
            kept[f"case.{name}.{step}"] = np.concatenate([p.detach().numpy().reshape(-1) for p in params])
        if step == SHOWN[1] and name in STATES:
            keep_state(name, optimizer.state_dict(), kept)


def matrices(kept):
    rng = np.random.default_rng(21)
    start = [rng.standard_normal(shape).astype(np.float32) for shape in MATRICES]
    gradients = [rng.standard_normal((STEPS, *shape)).astype(np.float32) for shape in MATRICES]
    kept |= {f"matrix.{i}": x for i, x in enumerate(start)} | {f"matrix_gradients.{i}": g for i, g in enumerate(gradients)}
    narrow = torch.Tensor.bfloat16
    for name, (options, half) in MUON.items():
        torch.Tensor.bfloat16 = narrow if half else torch.Tensor.clone
        params = parameters(start)
        optimizer = torch.optim.Muon(params, **options)
        for step in range(STEPS):
            for p, g in zip(params, gradients, strict=True):
                p.grad = torch.from_numpy(np.array(g[step]))
            optimizer.step()
            if step + 1 in SHOWN:
                kept[f"case.{name}.{step + 1}"] = np.concatenate([p.detach().numpy().reshape(-1) for p in params])
    torch.Tensor.bfloat16 = narrow


def quasi_newton(kept):
    """Rosenbrock's function in four variables, held by two parameters."""
    for name, options in LBFGS.items():
        params = [torch.nn.Parameter(torch.tensor(start)) for start in ([-1.2, 1.0], [0.5, -0.5])]
        optimizer = torch.optim.LBFGS(params, **options)

        def closure(params=params, optimizer=optimizer):
            optimizer.zero_grad()
            x = torch.cat(params)
            loss = (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum() / 100
            loss.backward()
            return loss

        found = []
        for step in range(4):
            loss = optimizer.step(closure)
            state = optimizer.state_dict()["state"][0]
            found.append([loss.item(), *torch.cat(params).tolist(), state["func_evals"], state["n_iter"]])
            if step == 1:
                for key in ("d", "prev_flat_grad", "old_dirs", "old_stps", "ro", "t", "H_diag", "prev_loss", "func_evals", "n_iter"):
                    value = (
                        torch.stack([*map(torch.as_tensor, state[key])]) if isinstance(state[key], list) else torch.as_tensor(state[key])
                    )
                    kept[f"lbfgs_state.{name}.{key}"] = value.numpy().copy()
        kept[f"lbfgs.{name}"] = np.array(found)


def keep_state(name, state, kept):
    for number, entries in state["state"].items():
        for key, value in entries.items():
            kept[f"state.{name}.{number}.{key}"] = value.detach().numpy().copy()
    kept[f"groups.{name}"] = np.array(json.dumps(state["param_groups"]))


def rates(kept):
    for name, (kind, options, steps) in SCHEDULES.items():
        params = parameters([np.zeros(1, np.float32)] * 2)
        optimizer = torch.optim.SGD([{"params": params[:1]}, {"params": params[1:], "lr": 0.03}], lr=0.1, momentum=0.9)
        scheduler = getattr(torch.optim.lr_scheduler, kind)(optimizer, **options)
        found = []
        for _ in range(steps + 1):
            found.append([value for group in optimizer.param_groups for value in (group["lr"], group["momentum"])])
            optimizer.step()
            if len(found) <= steps:
                scheduler.step()
        kept[f"rates.{name}"] = np.array(found)
    for name, (parts, milestones, steps) in SEVERAL.items():
        params = parameters([np.zeros(1, np.float32)] * 2)
        optimizer = torch.optim.SGD([{"params": params[:1]}, {"params": params[1:], "lr": 0.03}], lr=0.1, momentum=0.9)
        made = [getattr(torch.optim.lr_scheduler, kind)(optimizer, **options) for kind, options in parts]
        lr = torch.optim.lr_scheduler
        scheduler = lr.ChainedScheduler(made) if milestones is None else lr.SequentialLR(optimizer, made, milestones)
        found = []
        for _ in range(steps + 1):
            found.append([group["lr"] for group in optimizer.param_groups])
            optimizer.step()
            scheduler.step()
        kept[f"rates.{name}"] = np.array(found)
    for name, options in PLATEAUS.items():
        optimizer = torch.optim.SGD(parameters([np.zeros(1, np.float32)]), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **options)
        found = []
        for metric in METRICS:
            scheduler.step(metric)
            found.append(optimizer.param_groups[0]["lr"])
        kept[f"rates.{name}"] = np.array(found)
    kept["rates.warmup"] = warmup()


def warmup():
    optimizer = torch.optim.SGD(parameters([np.zeros(1, np.float32)]), lr=0.1)
    lr = torch.optim.lr_scheduler
    parts = [lr.LinearLR(optimizer, 1 / 6, 1.0, 5), lr.CosineAnnealingLR(optimizer, 15, 0.001)]
    scheduler = lr.SequentialLR(optimizer, parts, [5])
    found = [optimizer.param_groups[0]["lr"]]
    for _ in range(20):
        optimizer.step()
        scheduler.step()
        found.append(optimizer.param_groups[0]["lr"])
    return np.array(found)


def clips(start, gradients, kept):
    for name, order in CLIPS.items():
        params = parameters(start)
        for p, g in zip(params, gradients, strict=True):
            p.grad = torch.from_numpy(np.array(g[0]))
        kept[f"norm.{name}"] = torch.nn.utils.clip_grad_norm_(params, CLIP, order).numpy()
        kept[f"clipped.{name}"] = np.concatenate([p.grad.numpy().reshape(-1) for p in params])


def main():
    rng = np.random.default_rng(20)
    start = [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]
    gradients = [rng.standard_normal((STEPS, *shape)).astype(np.float32) for shape in SHAPES]
    kept = {f"start.{i}": x for i, x in enumerate(start)} | {f"gradients.{i}": g for i, g in enumerate(gradients)}
    for name in CASES:
        run(name, start, gradients, kept)
    matrices(kept)
    quasi_newton(kept)
    rates(kept)
    clips(start, gradients, kept)
    kept["cases"] = np.array(json.dumps({name: case for name, case in CASES.items()}))
    kept["muon"], kept["lbfgs"] = np.array(json.dumps(MUON)), np.array(json.dumps(LBFGS))
    kept["schedules"] = np.array(json.dumps(SCHEDULES))
    kept["several"] = np.array(json.dumps(SEVERAL))
    kept["plateaus"] = np.array(json.dumps(PLATEAUS))
    kept["metrics"] = np.array(METRICS, np.float64)
    np.savez_compressed(Path(__file__).with_name("optim.npz"), **kept)


if __name__ == "__main__":
    main()
