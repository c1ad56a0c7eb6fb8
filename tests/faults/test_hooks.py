"""Exceptions in every hook, NumPy's errors set to raise, Python without its asserts: what comes afterwards is as if nothing had been."""

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import netcl
import netcl as nc
import netcl.autograd as ag
from netcl import amp, nn, optim, selftest
from netcl.autograd import backward_pass
from netcl.core import recording
from netcl.core.device import manager
from netcl.core.hooks import hooks
from netcl.engine.registry import REGISTRY, Choice
from netcl.nn.utils import parametrize
from netcl.trainer import Callback, Trainer

X = np.random.default_rng(0).standard_normal((12, 5), np.float32)
Y = np.arange(12) % 3


class Boom(Exception):
    pass


def boom(*_):
    raise Boom


class Run:
    def __init__(self, compiled=False):
        nc.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
        self.optimizer = optim.Adam(self.model.parameters(), lr=0.1)
        model, optimizer = self.model, self.optimizer

        def step(x, y):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        self.step = nc.compile(step) if compiled else step

    def train(self):
        return self.step(nc.tensor(X), nc.tensor(Y)).item()


HOOKS = {
    "forward_pre": lambda run: run.model[2].register_forward_pre_hook(boom),
    "forward": lambda run: run.model[0].register_forward_hook(boom),
    "backward": lambda run: run.model[0].register_full_backward_hook(boom),
    "leaf": lambda run: run.model[0].weight.register_hook(boom),
    "intermediate": lambda run: run.model[0].register_forward_hook(lambda module, given, out: out.register_hook(boom) and None),
    "after_backward": lambda run: run.model[2].weight.register_hook(lambda g: backward_pass.after_backward(boom)),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.fault(
    "hook raises",
    "forward, backward, leaf, intermediate and after-backward hooks; eager and compiled",
    "raised; the run goes on as if undisturbed",
)
def test_a_hook_that_raises_leaves_nothing_behind(device, hook, compiled):
    run, like = Run(compiled), Run()
    for _ in range(4):
        assert run.train() == pytest.approx(like.train(), rel=1e-5)
    for _ in range(2):
        handle = HOOKS[hook](run)
        with pytest.raises(Boom):
            run.train()
        handle.remove()
        assert recording.active.recorder is None and ag.is_grad_enabled()
    for _ in range(4):
        assert run.train() == pytest.approx(like.train(), rel=1e-5)


class Broken(ag.Function):
    @staticmethod
    def forward(ctx, x, where):
        ctx.where = where
        return boom() if where == "forward" else x * 2

    @staticmethod
    def backward(ctx, g):
        return boom() if ctx.where == "backward" else (g, None)


class _Once:
    """Works once: in the forward pass, not when backward runs it again."""

    called = False

    def __call__(self, x):
        if self.called:
            boom()
        self.called = True
        return x * 2


def _parametrized(x):
    layer = nn.Linear(5, 3)
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    layer.parametrizations.weight[0].forward = boom
    return layer(x)


CODE = {
    "Function.forward": lambda x: Broken.apply(x, "forward"),
    "Function.backward": lambda x: Broken.apply(x, "backward").sum().backward(),
    "checkpoint": lambda x: ag.checkpoint(boom, x),
    "checkpoint in backward": lambda x: ag.checkpoint(_Once(), x).sum().backward(),
    "parametrization": _parametrized,
    "compiled function": lambda x: nc.compile(boom)(x),
    "jit_compile": lambda x: ag.jit_compile(boom)(x),
    "closure": lambda x: optim.LBFGS([x]).step(boom),
    "schedule": lambda x: optim.lr_scheduler.LambdaLR(optim.SGD([x], lr=0.1), boom),
    "autocast": lambda x: amp.autocast(dtype="bfloat16")(boom)(x),
    "no_grad": lambda x: ag.no_grad()(boom)(x),
    "anomaly": lambda x: ag.detect_anomaly()(boom)(x),
}


@pytest.mark.parametrize("name", CODE)
@pytest.mark.fault(
    "user's code raises inside netcl",
    "`Function`, `checkpoint`, `compile`, `jit_compile`, closures, schedules, parametrizations, mode blocks",
    "raised as it is; modes and results are as before",
)
def test_code_of_the_user_that_raises_leaves_nothing_behind(device, name):
    x = nc.tensor(X, requires_grad=True)
    with pytest.raises(Boom):
        CODE[name](x)
    assert ag.is_grad_enabled() and not amp.is_autocast_enabled() and recording.active.recorder is None
    assert backward_pass.walk_under_way() is None and ag.get_current_tape() is None
    y = (x * 3).sum()
    x.grad = None
    y.backward()
    assert x.grad.numpy().tolist() == np.full_like(X, 3).tolist()


@pytest.mark.fault("launch observer raises", "an observer in the middle of a step", "raised; the model trains on")
def test_an_observer_of_launches_that_raises_leaves_nothing_behind(cl_device):
    run, like = Run(), Run()
    run.train(), like.train()
    hooks.launch_observers.append(boom)
    try:
        with pytest.raises(Boom):
            run.train()
    finally:
        hooks.launch_observers.remove(boom)
    assert hooks.launch_observers == []
    fresh = Run()
    assert fresh.train() == pytest.approx(Run().train())
    assert np.isfinite(run.train())


MOMENTS = [name for name in vars(Callback) if name.startswith("on_") and "predict" not in name and name != "on_interrupt"]


@pytest.mark.parametrize("moment", [*MOMENTS, "set_trainer", "state_dict"])
@pytest.mark.fault("trainer callback raises", "every moment of `Callback`", "raised; the trainer trains on")
def test_a_callback_that_raises_leaves_a_trainer_that_trains(moment):
    with nc.device("cpu"):
        data = [(X, Y)] * 2
        bad = type("Bad", (Callback,), {moment: boom})()
        run = Run()
        trainer = Trainer(run.model, run.optimizer, nn.CrossEntropyLoss(), callbacks=[bad])
        if moment == "state_dict":
            with pytest.raises(Boom):
                trainer.state_dict()
        else:
            with pytest.raises(Boom):
                trainer.fit(data, val=data, epochs=1)
        assert ag.is_grad_enabled() and recording.active.recorder is None
        trainer.callbacks.callbacks.remove(bad)
        history = trainer.fit(data, val=data, epochs=2)
        assert np.isfinite(history.history["loss"][-1]) and run.model.training


@pytest.mark.fault("NumPy's errors set to raise", '`np.errstate(all="raise")` around ops on infinities and NaN', "the same results")
def test_errors_of_numpy_that_raise_change_no_result():
    values = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e38, -1e38, 1e-45, 700.0], np.float32)
    names = [
        "exp",
        "log",
        "sqrt",
        "div",
        "square",
        "tanh",
        "pow",
        "reciprocal",
        "softmax",
        "log_softmax",
        "var",
        "mean",
        "cumsum",
        "dropout",
    ]
    for dtype in ("float32", "float16", "bfloat16"):
        results = []
        for error in ("ignore", "raise"):
            with nc.device("cpu"), np.errstate(all=error):
                nc.manual_seed(0)
                x = nc.tensor(values, dtype=dtype)
                made = [getattr(nc.ops, name)(*[x] * (2 if name in ("div", "pow") else 1)) for name in names]
                learnt = nc.tensor(values, requires_grad=True)
                (learnt.exp() / learnt + learnt.log()).sum().backward()
                results.append([t.numpy() for t in (*made, learnt.grad)])
        for name, plain, strict in zip([*names, "gradient"], *results, strict=True):
            np.testing.assert_array_equal(plain, strict, err_msg=name)


@pytest.mark.fault("NumPy's errors set to raise, in every op", '`np.errstate(all="raise")` around a call of each row', "the same results")
def test_every_op_computes_when_numpy_raises():
    handle, failed = manager.default("cpu"), []
    for name, row in REGISTRY.items():
        for part in row.rows if isinstance(row, Choice) else (row,):
            case = next(iter(selftest.cases(part, "float32", (257,))), None) if part.ref is not None else None
            try:
                with np.errstate(all="raise"):
                    if case is not None:
                        selftest.check_forward(part, case, handle)
            except FloatingPointError as error:
                failed.append(f"{name}: {error}")
    assert failed == []


def test_large_values_become_infinite_when_numpy_raises():
    with np.errstate(all="raise"), nc.device("cpu"):
        assert nc.tensor([1e300, 1.0]).tolist() == [np.inf, 1.0]
        assert nc.tensor([1e6], dtype="float16").tolist() == [np.inf] and nc.tensor([3.4e38], dtype="bfloat16").tolist() == [np.inf]


ALLOWED = (ast.Name, ast.Attribute, ast.Constant, ast.Compare, ast.BoolOp, ast.Subscript, ast.UnaryOp, ast.Tuple, ast.BinOp)
ALLOWED += (ast.cmpop, ast.boolop, ast.unaryop, ast.operator, ast.expr_context)


def test_no_assert_does_anything():
    """``python -O`` leaves asserts out: in the package they tell a type checker something, and neither compute nor refuse."""
    found = []
    for path in sorted(Path(netcl.__file__).parent.rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if " assert " in text else ():
            if isinstance(node, ast.Assert):
                parts = [part for part in ast.walk(node.test) if not isinstance(part, ALLOWED)]
                calls = [part for part in parts if not (isinstance(part, ast.Call) and ast.unparse(part.func) in ("isinstance", "len"))]
                deferred = [part for part in ast.walk(node.test) if isinstance(part, ast.Attribute) and part.attr == "buffer"]
                found += [f"{path.name}:{node.lineno}: {ast.unparse(node)}" for _ in calls[:1] or deferred[:1]]
    assert found == []


OPTIMIZED = """
import sys, numpy as np, netcl as nc
from netcl import nn, optim
from netcl.core.errors import ShapeError

def loss_of(selector):
    with nc.device(selector):
        nc.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        optimizer = optim.AdamW(model.parameters(), lr=0.1)
        x, y = np.linspace(-1, 1, 60, dtype=np.float32).reshape(12, 5), np.arange(12) % 3
        for _ in range(3):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), nc.tensor(y))
            loss.backward()
            optimizer.step()
        try:
            nc.zeros((2, 3)) @ nc.zeros((2, 3))
        except ShapeError:
            return loss.item().hex()
"""


@pytest.mark.fault("`python -O`", "training in a process without asserts", "the same bits, the same errors")
def test_without_asserts_the_numbers_and_the_refusals_are_the_same(one_target):
    names = {}
    exec(OPTIMIZED, names)
    script = f"{OPTIMIZED}\nassert False\nsys.stdout.write(loss_of(sys.argv[1]))"
    command = [sys.executable, "-O", "-c", script, one_target.selector]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == names["loss_of"](one_target.selector)
